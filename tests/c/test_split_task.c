/*
 * Split tasks: which tasks a schedule runs in two halves, and which others run in between.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "openreg_schedule.h"

/* Of two streams at once where no schedule is set: each takes a place of its own. */
static struct {
  char text[1000];
  _Atomic size_t count;
} notes;

static void noteHere(char letter) {
  size_t place = notes.count++;
  if (place + 1 < sizeof notes.text) notes.text[place] = letter;
}

static const char *noted(void) {
  static char text[sizeof notes.text];
  memcpy(text, notes.text, sizeof text);
  memset(&notes, 0, sizeof notes);
  return text;
}

/* 'w', or '1' and '2'. */
static orError_t tearKernel(void *args) {
  static const char letters[] = "w12";
  (void)args;
  noteHere(letters[orTaskPart()]);
  return orSuccess;
}

static orError_t failKernel(void *args) {
  tearKernel(args);
  return orErrorLaunchFailure;
}

static orError_t noteKernel(void *args) {
  noteHere(*(const char *)args);
  return orSuccess;
}

/* How many of these 32 bytes are 1. */
static orError_t onesKernel(void *args) {
  const char *bytes = *(char **)args;
  int ones = 0;
  for (int i = 0; i < 32; i++) ones += bytes[i];
  noteHere((char)('A' + ones));
  return orSuccess;
}

static void give(orStream_t stream, orKernelFn fn, const void *args, size_t size) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = fn,
                                         .args = args,
                                         .args_size = size,
                                         .name = "split"}));
}

static void runBeside(orStream_t a, orStream_t b) {
  give(a, tearKernel, NULL, 0);
  give(b, noteKernel, "b", 1);
  ASSERT_OK(orDeviceSynchronize());
}

TEST(split_task_a_tape_lets_another_stream_come_between) {
  static const struct {
    const char *tape, *order;
  } cases[] = {{"0", "12b"}, {"3:1", "1b2"}, {"2:1", "b12"}};
  orStream_t a = newStream(), b = newStream();
  runBeside(a, b);
  ASSERT(strchr(noted(), 'w'));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char *taken;
    ASSERT_OK(orScheduleSetTape(cases[i].tape));
    runBeside(a, b);
    ASSERT_OK(orScheduleGetTape(&taken));
    ASSERT_STR(taken, cases[i].tape);
    ASSERT_STR(noted(), cases[i].order);
    free(taken);
  }
}

TEST(split_task_under_every_fourth_seed) {
  orStream_t a = newStream(), b = newStream();
  bool between = false;
  for (uint64_t seed = 0; seed < 200; seed++) {
    char first[4];
    ASSERT_OK(orScheduleSet(orScheduleSeeded, seed));
    runBeside(a, b);
    const char *order = noted();
    ASSERT_EQ(strchr(order, 'w') != NULL, seed % 4 != 2);
    between |= !strcmp(order, "1b2");
    strcpy(first, order);
    ASSERT_OK(orScheduleSet(orScheduleSeeded, seed));
    runBeside(a, b);
    ASSERT_STR(noted(), first);
  }
  ASSERT(between);
  for (int policy = orScheduleLate; policy <= orScheduleEarly; policy++) {
    ASSERT_OK(orScheduleSet((orSchedulePolicy)policy, 0));
    runBeside(a, b);
    ASSERT(strchr(noted(), 'w'));
  }
}

/* Half of the bytes are there. */
TEST(split_task_fills_and_copies) {
  orStream_t a = newStream(), b = newStream();
  void *bytes, *ones;
  ASSERT_OK(orMallocHost(&bytes, 32));
  ASSERT_OK(orMallocHost(&ones, 32));
  memset(ones, 1, 32);
  for (int copies = 0; copies < 2; copies++) {
    memset(bytes, 0, 32);
    ASSERT_OK(orScheduleSetTape("3:1"));
    if (copies)
      ASSERT_OK(orMemcpyAsync(bytes, ones, 32, orMemcpyDefault, a));
    else
      ASSERT_OK(orMemsetAsync(bytes, 1, 32, a));
    give(b, onesKernel, &bytes, sizeof bytes);
    ASSERT_OK(orDeviceSynchronize());
    give(b, onesKernel, &bytes, sizeof bytes);
    ASSERT_OK(orDeviceSynchronize());
    ASSERT_STR(noted(), "Qa");
  }
  ASSERT_OK(orFreeHost(bytes));
  ASSERT_OK(orFreeHost(ones));
}

/* It moves as if by way of another place. */
TEST(split_task_is_no_copy_within_the_same_bytes) {
  orStream_t a = newStream();
  char *bytes;
  ASSERT_OK(orMallocHost((void **)&bytes, 48));
  for (int i = 0; i < 48; i++) bytes[i] = (char)i;
  ASSERT_OK(orScheduleSetTape("0"));
  ASSERT_OK(orMemcpyAsync(bytes + 8, bytes, 40, orMemcpyDefault, a));
  ASSERT_OK(orStreamSynchronize(a));
  for (int i = 0; i < 48; i++) ASSERT_EQ(bytes[i], i < 8 ? i : i - 8);
  ASSERT_OK(orFreeHost(bytes));
}

TEST(split_task_halves_are_in_the_record) {
  orScheduleStep steps[64];
  size_t count;
  int halves = 0, ends = 0;
  orStream_t a = newStream();
  ASSERT_OK(orScheduleRecord(1));
  ASSERT_OK(orScheduleSetTape("0"));
  give(a, tearKernel, NULL, 0);
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), 64, &count));
  for (size_t i = 0; i < count; i++) {
    halves += steps[i].kind == orStepRuns && steps[i].flags == 1;
    ends += steps[i].kind == orStepRuns && steps[i].flags == 0;
  }
  ASSERT_EQ(halves, 1);
  ASSERT_EQ(ends, 1);
}

TEST(split_task_a_first_half_that_fails_is_the_end) {
  orStream_t a = newStream();
  ASSERT_OK(orScheduleSetTape("0"));
  give(a, failKernel, NULL, 0);
  ASSERT_EQ(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT_STR(noted(), "1");
}

/* What is held between its halves goes on by the lanes. */
TEST(split_task_the_schedule_ends_between_the_halves) {
  orStream_t a = newStream();
  ASSERT_OK(orScheduleSetTape("1,1"));
  give(a, tearKernel, NULL, 0); /* its first half, and then the host */
  ASSERT_STR(noted(), "1");
  ASSERT_OK(orScheduleSet(orScheduleFair, 0));
  ASSERT_STR(noted(), "2");
}
