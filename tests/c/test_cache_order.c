/*
 * The caching allocator and queued work: recorded streams, giving memory back, allocating inside
 * tasks, poison.
 */
#include <pthread.h>
#include <stdlib.h>

#include "cache_helpers.h"
#include "openreg_schedule.h"

/* ---- Recorded streams ---- */

TEST(cache_recorded_stream_keeps_a_block_until_it_is_done) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheRecordStream((char *)a + 100, side)); /* twice is once */
  ASSERT_OK(orCacheRecordStream(a, s));                  /* its own changes nothing */
  ASSERT_OK(orCacheFree(a));
  ASSERT_EQ(statsOf(0).allocated_bytes[0].current, 0);
  ASSERT_EQ(statsOf(0).active_bytes[0].current, 4 * KIB);
  void *b = take(4 * KIB, s);
  ASSERT_NE((uintptr_t)a, (uintptr_t)b);
  ASSERT_REFUSED(orCacheFree(a), orErrorInvalidValue, "has been freed already");
  openGate(gate, side);
  void *c = take(4 * KIB, s);
  ASSERT_PTR(c, a);
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheFree(c));
  ASSERT_EQ(statsOf(0).active_bytes[0].current, 0);
}

/* That is the bug which users must be able to see. */
TEST(cache_unrecorded_stream_keeps_nothing) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(4 * KIB, s), a);
  openGate(gate, side);
}

TEST(cache_recording_its_own_stream_changes_nothing) {
  orStream_t s = defaultStream(0);
  void *a = take(4 * KIB, s);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orCacheRecordStream(a, s));
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(4 * KIB, s), a);
  openGate(gate, s);
}

TEST(cache_waits_for_each_of_several_recorded_streams) {
  enum { COUNT = 5 };
  orStream_t s = defaultStream(0), side[COUNT];
  orEvent_t gate[COUNT];
  void *a = take(4 * KIB, s);
  for (int i = 0; i < COUNT; i++) {
    ASSERT_OK(orSetDevice(i % 2));
    side[i] = newStream();
    gate[i] = closeGate(side[i]);
    ASSERT_OK(orCacheRecordStream(a, side[i]));
  }
  ASSERT_OK(orCacheFree(a));
  static const int order[COUNT] = {3, 0, 4, 1, 2};
  for (int i = 0; i < COUNT; i++) {
    ASSERT_NE((uintptr_t)take(4 * KIB, s), (uintptr_t)a);
    openGate(gate[order[i]], side[order[i]]);
  }
  ASSERT_PTR(take(4 * KIB, s), a);
}

/* What the recorded stream is given after the free does not hold the block. */
TEST(cache_waits_for_earlier_work_of_the_recorded_stream_only) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  orEvent_t first = closeGate(side);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  orEvent_t second = closeGate(side);
  ASSERT_NE((uintptr_t)take(4 * KIB, s), (uintptr_t)a);
  ASSERT_OK(orEventSignal(first, orSuccess));
  void *p = NULL;
  for (uint64_t until = nowNs() + 10000000000u; p != a && nowNs() < until; sleepMs(1)) {
    p = take(4 * KIB, s);
    if (p != a) ASSERT_OK(orCacheFree(p));
  }
  ASSERT_PTR(p, a);
  openGate(second, side);
}

TEST(cache_records_through_interior_pointers) {
  orStream_t s = defaultStream(0), side = newStream();
  char *block[40];
  for (int i = 0; i < 40; i++) block[i] = take(8 * KIB, s);
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheRecordStream(block[17] + 8 * KIB - 1, side));
  for (int i = 0; i < 40; i++) ASSERT_OK(orCacheFree(block[i]));
  ASSERT_EQ(statsOf(0).active[0].current, 1);
  ASSERT_REFUSED(orCacheRecordStream(block[3] + 1, side), orErrorInvalidValue, "freed already");
  openGate(gate, side);
  ASSERT_OK(orCacheFree(take(512, s)));
  ASSERT_EQ(statsOf(0).active[0].current, 0);
}

static void *openWhenWaitedFor(void *gate) {
  while (!statsOf(0).sync_all_streams) sleepMs(1);
  ASSERT_OK(orEventSignal(*(orEvent_t *)gate, orSuccess));
  return NULL;
}

/* The caller may be waiting for memory that recorded streams hold. */
TEST(cache_waits_for_recorded_streams_before_it_is_out_of_memory) {
  setCapacity("64M");
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(40 * MIB, s);
  orEvent_t gate = closeGate(side);
  pthread_t thread;
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  ASSERT_EQ(pthread_create(&thread, NULL, openWhenWaitedFor, &gate), 0);
  void *b = take(48 * MIB, s);
  pthread_join(thread, NULL);
  ASSERT_OK(orStreamQuery(side));
  ASSERT_EQ(statsOf(0).sync_all_streams, 1);
  ASSERT_EQ(statsOf(0).ooms, 0);
  ASSERT_OK(orCacheFree(b));
}

/* ---- Giving memory back ---- */

TEST(cache_memory_goes_back_after_the_work_on_it) {
  orStream_t s = defaultStream(0);
  void *a = take(4 * MIB, s);
  ASSERT_OK(orLaunchSleep(s, 50000000));
  ASSERT_OK(orMemsetAsync(a, 1, 4 * MIB, s));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(orStreamQuery(s));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
  ASSERT_OK(orDeviceSynchronize()); /* nothing failed */
}

TEST(cache_empty_keeps_what_is_in_use) {
  orStream_t s = defaultStream(0);
  char *a = take(4 * KIB, s), *b = take(3 * MIB, s), *c = take(12 * MIB, s);
  ASSERT_OK(orCacheFree(c));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 22 * MIB);
  char out[4] = {0};
  ASSERT_OK(orMemset(a, 7, 4 * KIB));
  ASSERT_OK(orMemset(b, 9, 3 * MIB));
  ASSERT_OK(orMemcpy(out, a + 4 * KIB - 4, 4, orMemcpyDefault));
  ASSERT_EQ(out[3], 7);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
}

TEST(cache_blocks_outlive_their_stream) {
  setCapacity("64M");
  for (int i = 0; i < 20; i++) {
    orStream_t side = newStream();
    void *a = take(20 * MIB, side), *b = take(20 * MIB, side);
    ASSERT_OK(orLaunchSleep(side, 2000000));
    if (i % 2) ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orStreamDestroy(side));
    if (i % 2 == 0) ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orCacheFree(b));
    ASSERT_OK(orGetLastError());
  }
  void *all = take(64 * MIB, defaultStream(0));
  ASSERT_OK(orCacheFree(all));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
}

TEST(cache_recorded_stream_may_be_destroyed) {
  orStream_t s = defaultStream(0);
  for (int before = 0; before < 2; before++) {
    orStream_t side = newStream();
    void *a = take(4 * KIB, s);
    orEvent_t gate = closeGate(side);
    ASSERT_OK(orCacheRecordStream(a, side));
    if (before) ASSERT_OK(orStreamDestroy(side));
    ASSERT_OK(orCacheFree(a));
    if (!before) ASSERT_OK(orStreamDestroy(side));
    void *b = take(4 * KIB, s);
    ASSERT_NE((uintptr_t)a, (uintptr_t)b);
    ASSERT_OK(orEventSignal(gate, orSuccess));
    ASSERT_OK(orDeviceSynchronize());
    void *c = take(4 * KIB, s);
    ASSERT_PTR(c, a);
    ASSERT_OK(orCacheFree(b));
    ASSERT_OK(orCacheFree(c));
    ASSERT_OK(orCacheEmpty(0));
    ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
  }
}

TEST(cache_reset_of_the_device) {
  orStream_t s = defaultStream(0), side = newStream();
  void *live = take(4 * KIB, s), *freed = take(4 * MIB, s), *recorded = take(12 * MIB, s);
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheRecordStream(recorded, side));
  ASSERT_OK(orCacheFree(recorded));
  ASSERT_OK(orCacheFree(freed));
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 2 * MIB);
  ASSERT_ERROR(orCacheFree(freed), orErrorInvalidValue);
  ASSERT_OK(orCacheFree(live));
  ASSERT_OK(orEventDestroy(gate));
}

/* ---- Inside tasks ---- */

typedef struct InTask {
  orStream_t stream; /* to allocate for */
  size_t bytes;
  void *freed; /* to free first */
  void *got;
  orError_t error;
} InTask;

static orError_t allocateInTask(void *args) {
  InTask *t = *(InTask **)args;
  if (t->freed && orCacheFree(t->freed)) t->error = orErrorInvalidValue;
  if (!t->error) t->error = orCacheMalloc(&t->got, t->bytes, t->stream);
  return orSuccess;
}

/* The task queued last reads the block that the host frees then: neither it nor an earlier one
 * may have it. */
TEST(cache_task_never_gets_what_the_host_freed_later) {
  orStream_t s = defaultStream(0);
  InTask first = {s, 4 * KIB, NULL, NULL, orSuccess}, last = first, after = first;
  void *a = take(4 * KIB, s);
  take(512, s); /* nothing to merge with */
  orEvent_t gate = closeGate(s);
  launch(s, allocateInTask, &first);
  launch(s, allocateInTask, &last);
  ASSERT_OK(orCacheFree(a));
  launch(s, allocateInTask, &after);
  openGate(gate, s);
  ASSERT_OK(first.error);
  ASSERT_OK(last.error);
  ASSERT_OK(after.error);
  ASSERT(first.got != a);
  ASSERT(last.got != a);
  ASSERT_PTR(after.got, a);
  ASSERT_OK(orCacheFree(first.got));
}

TEST(cache_task_reuses_what_a_task_freed) {
  orStream_t s = defaultStream(0);
  void *a = take(4 * KIB, s), *wall = take(512, s), *b = take(4 * KIB, s), *end = take(512, s);
  InTask first = {s, 4 * KIB, a, NULL, orSuccess}, second = {s, 4 * KIB, NULL, NULL, orSuccess};
  orEvent_t gate = closeGate(s);
  launch(s, allocateInTask, &first);
  launch(s, allocateInTask, &second);
  ASSERT_OK(orCacheFree(b)); /* newer, and not to be had */
  openGate(gate, s);
  ASSERT_OK(first.error);
  ASSERT_PTR(first.got, a);
  ASSERT_OK(second.error);
  ASSERT(second.got != b);
  ASSERT_PTR(take(4 * KIB, s), b);
  ASSERT_OK(orCacheFree(wall));
  ASSERT_OK(orCacheFree(end));
}

/* A merged block is as new as its newest part. */
TEST(cache_task_gets_no_part_of_a_merged_newer_block) {
  orStream_t s = defaultStream(0);
  char *a = take(512 * KIB, s), *b = take(512 * KIB, s), *c = take(MIB, s);
  InTask t = {s, 512 * KIB, NULL, NULL, orSuccess};
  ASSERT_OK(orCacheFree(a));
  orEvent_t gate = closeGate(s);
  launch(s, allocateInTask, &t);
  ASSERT_OK(orCacheFree(b));
  openGate(gate, s);
  ASSERT_OK(t.error);
  ASSERT((char *)t.got < a || (char *)t.got >= c + MIB);
}

/* The rest of a block that was cut is as new as the block was. */
TEST(cache_task_gets_no_rest_of_a_newer_block) {
  orStream_t s = defaultStream(0);
  char *a = take(8 * KIB, s);
  take(512, s);
  InTask t = {s, 4 * KIB, NULL, NULL, orSuccess};
  orEvent_t gate = closeGate(s);
  launch(s, allocateInTask, &t);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(4 * KIB, s), a);
  openGate(gate, s);
  ASSERT_OK(t.error);
  ASSERT((char *)t.got != a + 4 * KIB);
}

TEST(cache_task_of_another_stream_counts_as_the_host) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  take(512, s);
  InTask t = {s, 4 * KIB, NULL, NULL, orSuccess};
  for (int i = 0; i < 8; i++)
    ASSERT_OK(orMemset(a, i, 4 * KIB)); /* numbers of s beyond those of side */
  orEvent_t gate = closeGate(side);
  launch(side, allocateInTask, &t);
  ASSERT_OK(orCacheFree(a));
  openGate(gate, side);
  ASSERT_PTR(t.got, a);
}

TEST(cache_task_does_not_wait_for_memory) {
  setCapacity("64M");
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(40 * MIB, s);
  InTask t = {s, 40 * MIB, NULL, NULL, orSuccess};
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  launch(s, allocateInTask, &t);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_ERROR(t.error, orErrorMemoryAllocation);
  openGate(gate, side);
  t.error = orSuccess;
  launch(s, allocateInTask, &t);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(t.error);
}

static orError_t emptyInTask(void *args) {
  (*(InTask **)args)->error = orCacheEmpty(0);
  return orSuccess;
}

TEST(cache_task_may_not_empty) {
  InTask t = {0};
  launch(defaultStream(0), emptyInTask, &t);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_ERROR(t.error, orErrorNotPermitted);
}

/* ---- Poison ---- */

static void poisonOn(void) {
  clearSettings();
  setenv("OPENREG_POISON", "1", 1);
}

static void assertBytes(const void *device, unsigned char value, size_t bytes) {
  unsigned char *host = malloc(bytes);
  ASSERT_OK(orMemcpy(host, device, bytes, orMemcpyDefault));
  for (size_t i = 0; i < bytes; i++)
    if (host[i] != value) FAIL("byte %zu is %#x, not %#x", i, host[i], value);
  free(host);
}

TEST(cache_poison_fills_fresh_and_freed_memory) {
  poisonOn();
  orStream_t s = defaultStream(0);
  void *a = take(5000, s), *b = take(100, s);
  assertBytes(a, 0xFF, 5000);
  assertBytes(b, 0xFF, 100);
  ASSERT_OK(orMemset(a, 3, 5000));
  assertBytes(a, 3, 5000);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orStreamSynchronize(s));
  assertBytes(a, 0xFF, 5000); /* its segment is still there: a use after free reads NaN */
  ASSERT_PTR(take(5000, s), a);
}

/* The call comes before the setting. */
TEST(cache_poison_is_switched) {
  poisonOn();
  orStream_t s = defaultStream(0);
  ASSERT_EQ(orCachePoison(0), 1);
  for (uint32_t on = 0; on < 2; on++) {
    void *a = take(5000, s);
    ASSERT_OK(orMemset(a, 3, 5000));
    ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orStreamSynchronize(s));
    assertBytes(a, on ? 0xFF : 3, 5000);
    ASSERT_EQ(orCachePoison(1), on);
  }
}

TEST(cache_poison_comes_after_the_work_that_is_queued) {
  poisonOn();
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(64 * KIB, s), *own, *other;
  ASSERT_OK(orMallocHost(&own, 64 * KIB));
  ASSERT_OK(orMallocHost(&other, 64 * KIB));
  ASSERT_OK(orMemset(a, 5, 64 * KIB));
  orEvent_t gate = closeGate(s), side_gate = closeGate(side);
  ASSERT_OK(orMemcpyAsync(own, a, 64 * KIB, orMemcpyDefault, s));
  ASSERT_OK(orMemcpyAsync(other, a, 64 * KIB, orMemcpyDefault, side));
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  openGate(gate, s);
  openGate(side_gate, side);
  for (size_t i = 0; i < 64 * KIB; i++) ASSERT_EQ(((char *)own)[i], 5);
  for (size_t i = 0; i < 64 * KIB; i++) ASSERT_EQ(((char *)other)[i], 5);
  ASSERT_PTR(take(64 * KIB, s), a);
  assertBytes(a, 0xFF, 64 * KIB);
}

/* A free never blocks: not even when the queue that takes the poison is full. */
TEST(cache_poison_does_not_wait_for_room) {
  poisonOn();
  enum { COUNT = 5000 };
  static void *block[COUNT];
  orStream_t s = defaultStream(0);
  for (int i = 0; i < COUNT; i++) block[i] = take(512, s);
  orEvent_t gate = closeGate(s);
  for (int i = 0; i < COUNT; i++) ASSERT_OK(orCacheFree(block[i]));
  openGate(gate, s);
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
}

TEST(cache_poison_inside_a_task) {
  poisonOn();
  orStream_t s = defaultStream(0);
  void *a = take(3 * MIB, s);
  InTask t = {s, 12 * MIB, a, NULL, orSuccess};
  launch(s, allocateInTask, &t);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(t.error);
  assertBytes(t.got, 0xFF, 12 * MIB);
  assertBytes(a, 0xFF, 3 * MIB);
  ASSERT_OK(orCacheFree(t.got));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
}

static unsigned char first_byte;

static orError_t allocateAndLook(void *args) {
  InTask *t = *(InTask **)args;
  void *mapped;
  allocateInTask(args);
  if (!t->error) t->error = orMapForKernel(&mapped, t->got, 1);
  if (!t->error) first_byte = *(unsigned char *)mapped;
  return orSuccess;
}

TEST(cache_poison_is_there_when_a_task_has_the_memory) {
  poisonOn();
  orStream_t s = defaultStream(0);
  InTask t = {s, 12 * MIB, NULL, NULL, orSuccess};
  launch(s, allocateAndLook, &t);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(t.error);
  ASSERT_EQ(first_byte, 0xFF);
}

/* A task of another stream does it at once: not to what work that is queued still reads. */
TEST(cache_poison_by_a_task_is_of_what_is_fresh) {
  poisonOn();
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s), *read;
  ASSERT_OK(orMallocHost(&read, 4 * KIB));
  ASSERT_OK(orMemset(a, 5, 4 * KIB));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemcpyAsync(read, a, 4 * KIB, orMemcpyDefault, s));
  ASSERT_OK(orCacheFree(a)); /* and is one with the fresh rest of its segment */
  InTask t = {s, 64 * KIB, NULL, NULL, orSuccess};
  launch(side, allocateInTask, &t);
  ASSERT_OK(orStreamSynchronize(side));
  ASSERT_OK(t.error);
  ASSERT_PTR(t.got, a);
  openGate(gate, s);
  for (size_t i = 0; i < 4 * KIB; i++) ASSERT_EQ(((char *)read)[i], 5);
  assertBytes(t.got, 0xFF, 64 * KIB);
}

/* ---- Under a schedule ---- */

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

/* Every fourth seed keeps a freed block back until its stream has passed; others hand it out at
 * once. */
TEST(cache_a_seed_decides_when_a_block_is_used_again) {
  orStream_t s = defaultStream(0);
  for (uint64_t seed = 0; seed < 40; seed++) {
    ASSERT_OK(orScheduleSet(orScheduleSeeded, seed));
    void *a = take(4 * KIB, s);
    orEvent_t gate = closeGate(s);
    ASSERT_OK(orLaunchKernelEx(
        &(orLaunch){.size = sizeof(orLaunch), .stream = s, .fn = nothing, .name = "nothing"}));
    ASSERT_OK(orCacheFree(a));
    void *b = take(4 * KIB, s);
    ASSERT_EQ(a != b, seed % 4 == 0);
    openGate(gate, s);
    ASSERT_OK(orStreamSynchronize(s));
    if (a != b) ASSERT_OK(orCacheFree(b));
    void *c = a != b ? take(4 * KIB, s) : b;
    ASSERT_OK(orCacheFree(c));
    ASSERT_OK(orScheduleSet(orScheduleFair, 0));
    ASSERT_EQ(statsOf(0).active_bytes[0].current, 0);
  }
}

/* Three blocks, of which the one between has been freed. */
static void *makeGap(void *alive[2], orStream_t s) {
  alive[0] = take(4 * KIB, s);
  void *gap = take(4 * KIB, s);
  alive[1] = take(4 * KIB, s);
  ASSERT_OK(orCacheFree(gap));
  return gap;
}

static void *takeAndFree(orStream_t s) {
  void *block = take(4 * KIB, s);
  ASSERT_OK(orCacheFree(block));
  return block;
}

TEST(cache_a_schedule_hands_out_nothing_of_before) {
  orStream_t s = defaultStream(0);
  void *alive[2], *gap = makeGap(alive, s);
  ASSERT_OK(orScheduleSet(orScheduleEarly, 0));
  void *first = takeAndFree(s);
  ASSERT_NE(first, gap);
  ASSERT_EQ(takeAndFree(s), first);
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  void *second = takeAndFree(s);
  ASSERT(second != gap && second != first);
  ASSERT_OK(orCacheFree(alive[1]));
  ASSERT_EQ(takeAndFree(s), second);
  ASSERT_OK(orScheduleSet(orScheduleFair, 0));
  alive[1] = take(4 * KIB, s);
  ASSERT(alive[1] != second);
  for (int i = 0; i < 2; i++) ASSERT_OK(orCacheFree(alive[i]));
}

TEST(cache_memory_of_before_is_better_than_none) {
  orStream_t s = defaultStream(0);
  void *alive[2], *gap = makeGap(alive, s);
  ASSERT_OK(orCacheSetFraction(0, 0));
  ASSERT_OK(orScheduleSet(orScheduleEarly, 0));
  ASSERT_EQ(takeAndFree(s), gap);
  ASSERT_OK(orScheduleSet(orScheduleFair, 0));
  ASSERT_OK(orCacheSetFraction(0, 1));
  for (int i = 0; i < 2; i++) ASSERT_OK(orCacheFree(alive[i]));
}
