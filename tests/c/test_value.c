/*
 * orStreamWaitValue32 and orStreamWriteValue32: streams that wait for a word of memory, and hold no lane meanwhile.
 */
#include "gate.h"

static uint32_t *newWord(void) {
  void *word = NULL;
  ASSERT_OK(orMallocHost(&word, 64));
  return word;
}

static void store(uint32_t *word, uint32_t value) {
  atomic_store_explicit((_Atomic uint32_t *)word, value, memory_order_release);
}

TEST(value_between_streams) {
  void *words = NULL;
  ASSERT_OK(orMalloc(&words, 64)); /* device memory, of device 0 */
  ASSERT_OK(orMemset(words, 0, 64));
  orStream_t first = newStreamOn(0), second = newStreamOn(1);
  orEvent_t gate = closeGate(first);
  atomic_int ran = 0;
  ASSERT_OK(orStreamWriteValue32(first, (char *)words + 8, 5));
  ASSERT_OK(orStreamWaitValue32(second, (char *)words + 8, 5, orWaitValueEq));
  launch(second, countKernel, &ran);
  ASSERT_ERROR(orStreamQuery(second), orErrorNotReady);
  ASSERT_EQ(ran, 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(second));
  ASSERT_EQ(ran, 1);
  uint32_t seen = 0;
  ASSERT_OK(orMemcpy(&seen, (char *)words + 8, 4, orMemcpyDeviceToHost));
  ASSERT_EQ(seen, 5);
}

TEST(value_back_and_forth) {
  uint32_t *word = newWord();
  orStream_t a = newStream(), b = newStreamOn(1);
  for (uint32_t i = 0; i < 500; i++) {
    ASSERT_OK(orStreamWriteValue32(a, word, 2 * i + 1));
    ASSERT_OK(orStreamWaitValue32(b, word, 2 * i + 1, orWaitValueGeq));
    ASSERT_OK(orStreamWriteValue32(b, word, 2 * i + 2));
    ASSERT_OK(orStreamWaitValue32(a, word, 2 * i + 2, orWaitValueEq));
  }
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_OK(orStreamSynchronize(b));
  ASSERT_EQ(*word, 1000);
}

/* Nobody tells the library that the host has written. */
TEST(value_written_by_the_host) {
  uint32_t *word = newWord();
  orStream_t s = newStream();
  for (uint32_t i = 1; i <= 50; i++) {
    ASSERT_OK(orStreamWaitValue32(s, word, i, orWaitValueEq));
    if (i % 2) sleepMs(1);
    ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
    store(word, i);
    ASSERT_OK(orStreamSynchronize(s));
  }
}

TEST(value_in_registered_memory) {
  static uint32_t words[16];
  ASSERT_OK(orHostRegister(words, sizeof words));
  orStream_t s = newStream();
  ASSERT_OK(orStreamWaitValue32(s, &words[15], 1, orWaitValueEq));
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  store(&words[15], 1);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orHostUnregister(words));
  ASSERT_REFUSED(orStreamWaitValue32(s, words, 1, orWaitValueEq), orErrorInvalidValue,
                 "not in device or pinned");
}

TEST(value_comparisons) {
  uint32_t *word = newWord();
  orStream_t s = newStream();
  store(word, 10);
  ASSERT_OK(orStreamWaitValue32(s, word, 10, orWaitValueGeq));
  ASSERT_OK(orStreamWaitValue32(s, word, 9, orWaitValueGeq));
  ASSERT_OK(
      orStreamWaitValue32(s, word, 10u - 0x7fffffffu, orWaitValueGeq)); /* by signed difference */
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orStreamWaitValue32(s, word, 11, orWaitValueGeq));
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  store(word, 12);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orStreamWaitValue32(s, word, 11, orWaitValueEq)); /* passed, but not equal */
  sleepMs(2);
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  store(word, 11);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_REFUSED(orStreamWaitValue32(s, word, 0, (orWaitValue)2), orErrorInvalidValue,
                 "comparison 2");
}

TEST(value_bad_addresses) {
  uint32_t *word = newWord(), local = 0;
  void *memory;
  orStream_t s = newStream();
  ASSERT_OK(orMalloc(&memory, 10));
  ASSERT_REFUSED(orStreamWaitValue32(s, (char *)word + 2, 0, orWaitValueEq), orErrorInvalidValue,
                 "4-byte aligned");
  ASSERT_REFUSED(orStreamWriteValue32(s, (char *)word + 1, 0), orErrorInvalidValue,
                 "4-byte aligned");
  ASSERT_REFUSED(orStreamWaitValue32(s, &local, 0, orWaitValueEq), orErrorInvalidValue,
                 "not in device or pinned");
  ASSERT_REFUSED(orStreamWriteValue32(s, NULL, 0), orErrorInvalidValue, "not in device or pinned");
  ASSERT_REFUSED(orStreamWriteValue32(s, (char *)memory + 8, 0), orErrorInvalidValue,
                 "not in device or pinned");
  ASSERT_OK(orStreamWriteValue32(s, (char *)memory + 4, 7));
  ASSERT_OK(orStreamSynchronize(s));
}

/* More waits than lanes, and the stream that ends them still runs. */
TEST(value_waits_hold_no_lane) {
  uint32_t *word = newWord();
  atomic_int ran = 0;
  for (int i = 0; i < 64; i++) {
    orStream_t s = newStreamOn(i % 2);
    ASSERT_OK(orStreamWaitValue32(s, word, 1, orWaitValueEq));
    launch(s, countKernel, &ran);
  }
  orStream_t last = newStream();
  ASSERT_OK(orLaunchSleep(last, 1000000));
  ASSERT_OK(orStreamSynchronize(last));
  ASSERT_EQ(ran, 0);
  ASSERT_OK(orStreamWriteValue32(last, word, 1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 64);
}

/* A kernel may write the word, too. */
static orError_t writeKernel(void *args) {
  store(*(uint32_t **)args, 3);
  return orSuccess;
}

TEST(value_written_by_a_kernel) {
  uint32_t *word = newWord();
  orStream_t waits = newStream(), writes = newStreamOn(1);
  ASSERT_OK(orStreamWaitValue32(waits, word, 3, orWaitValueEq));
  launch(writes, writeKernel, word);
  ASSERT_OK(orStreamSynchronize(waits));
}

/* The lanes are kept busy by streams that always have a next task. */
static orError_t feedKernel(void *args) {
  (void)args;
  uint64_t end = nowNs() + 200000;
  while (nowNs() < end) {
  }
  return orSuccess;
}

/* How many of them have come to their end by now. */
static atomic_int ended;
static orError_t noteEndedKernel(void *args) {
  **(int **)args = atomic_load(&ended);
  return orSuccess;
}

TEST(value_is_seen_while_all_lanes_are_busy) {
  uint32_t *word = newWord();
  orStream_t waits = newStream();
  orLaneInfo info;
  int ended_before = -1;
  ASSERT_OK(orGetLaneInfo(&info));
  ASSERT_OK(orStreamWaitValue32(waits, word, 1, orWaitValueEq));
  launch(waits, noteEndedKernel, &ended_before);
  Holder h[16] = {0};
  for (int i = 0; i < info.limit; i++) {
    orStream_t busy = newStream();
    hold(busy, &h[i]);
    for (int k = 0; k < 900; k++)
      ASSERT_OK(orLaunchKernelEx(
          &(orLaunch){.size = sizeof(orLaunch), .stream = busy, .fn = feedKernel, .name = "busy"}));
    launch(busy, countKernel, &ended);
  }
  store(word, 1);
  for (int i = 0; i < info.limit; i++) letGo(&h[i]);
  ASSERT_OK(orStreamSynchronize(waits));
  ASSERT_EQ(ended_before, 0);
  ASSERT_OK(orDeviceReset());
}
