/* Errors: names, texts, the last one of a thread. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Named {
  orError_t error;
  const char *name, *text;
} Named;

static const Named all[] = {
#define OR_X(name, text) {name, #name, text},
    OR_ERROR_LIST(OR_X)
#undef OR_X
};

enum { ERROR_COUNT = sizeof(all) / sizeof(all[0]) };

TEST(error_names_and_texts) {
  for (int i = 0; i < ERROR_COUNT; ++i) {
    ASSERT_EQ(all[i].error, i);
    ASSERT_STR(orGetErrorName(all[i].error), all[i].name);
    ASSERT_STR(orGetErrorString(all[i].error), all[i].text);
    ASSERT_GT(strlen(all[i].text), 0);
    for (int j = 0; j < i; ++j) ASSERT_NE(strcmp(all[i].text, all[j].text), 0);
  }
}

TEST(error_unknown_code) {
  ASSERT_STR(orGetErrorName((orError_t)ERROR_COUNT), "unrecognized error code");
  ASSERT_STR(orGetErrorString((orError_t)-1), "unrecognized error code");
}

TEST(error_last_is_kept_until_read) {
  orSetting setting = {.size = sizeof setting};
  ASSERT_ERROR(orPeekAtLastError(), orSuccess);
  ASSERT_STR(orGetLastErrorMessage(), "");
  ASSERT_ERROR(orGetSetting(-7, &setting), orErrorInvalidValue);
  ASSERT_OK(orGetSetting(0, &setting)); /* a success does not clear it */
  ASSERT_ERROR(orPeekAtLastError(), orErrorInvalidValue);
  ASSERT_ERROR(orGetLastError(), orErrorInvalidValue);
  ASSERT_ERROR(orGetLastError(), orSuccess);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "-7");
}

TEST(error_newest_wins) {
  orSetting setting = {.size = sizeof setting};
  orDevice *device;
  ASSERT_ERROR(orGetSetting(-1, &setting), orErrorInvalidValue);
  ASSERT_ERROR(orGetDeviceByName(&device, "nowhere"), orErrorNotFound);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "'nowhere'");
  ASSERT_ERROR(orGetLastError(), orErrorNotFound);
}

static void failOnThread(int thread, void *context) {
  (void)context;
  orSetting setting = {.size = sizeof setting};
  char number[16];
  ASSERT_ERROR(orPeekAtLastError(), orSuccess);
  for (int i = 0; i < 1000; ++i) {
    int index = -1000 - thread;
    ASSERT_ERROR(orGetSetting(index, &setting), orErrorInvalidValue);
    snprintf(number, sizeof(number), "%d", index);
    ASSERT_CONTAINS(orGetLastErrorMessage(), number);
  }
}

TEST(error_belongs_to_its_thread) {
  orSetting setting = {.size = sizeof setting};
  ASSERT_ERROR(orGetSetting(-42, &setting), orErrorInvalidValue);
  runThreads(4, failOnThread, NULL);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "-42");
  ASSERT_ERROR(orPeekAtLastError(), orErrorInvalidValue);
}

TEST(error_long_values_are_cut) {
  char *name = malloc(100001);
  memset(name, 'x', 100000);
  name[100000] = 0;
  orDevice *device;
  ASSERT_REFUSED(orGetDeviceByName(&device, name), orErrorNotFound, "xxxxxxxx");
  ASSERT_LT(strlen(orGetLastErrorMessage()), 2000);
  free(name);
}

TEST(error_not_ready_is_not_kept) {
  orEvent_t gate;
  orStream_t stream;
  orSetting setting = {.size = sizeof setting};
  ASSERT_ERROR(orGetSetting(-5, &setting), orErrorInvalidValue);
  ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
  ASSERT_OK(orStreamCreate(&stream));
  ASSERT_OK(orStreamWaitEvent(stream, gate));
  ASSERT_ERROR(orStreamQuery(stream), orErrorNotReady);
  ASSERT_ERROR(orEventQuery(gate), orErrorNotReady);
  ASSERT_ERROR(orPeekAtLastError(), orErrorInvalidValue);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "-5");
  ASSERT_OK(orEventSignal(gate, orSuccess));
  ASSERT_OK(orStreamSynchronize(stream));
}
