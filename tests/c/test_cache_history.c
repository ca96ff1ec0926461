/*
 * What the caching allocator tells: its hook, snapshots.
 */
#include <pthread.h>
#include <string.h>

#include "cache_helpers.h"

enum { MANY = 100000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static orCacheRecord seen[MANY];
static size_t seenCount;

/* Called under no lock of the library: it may look at the cache. */
static void hook(const orCacheRecord *record) {
  orCacheStats stats = {.size = sizeof stats};
  ASSERT_OK(orCacheGetStats(&stats, record->device));
  pthread_mutex_lock(&lock);
  ASSERT_LT(seenCount, MANY);
  seen[seenCount++] = *record;
  pthread_mutex_unlock(&lock);
}

static void expect(size_t at, orCacheAction action, const void *address, size_t bytes,
                   orStream_t stream) {
  ASSERT_LT(at, seenCount);
  ASSERT_EQ(seen[at].action, action);
  ASSERT_PTR(seen[at].address, address);
  ASSERT_EQ(seen[at].bytes, bytes);
  ASSERT_EQ(seen[at].stream, stream);
  ASSERT_EQ(seen[at].sequence, at + 1);
  if (at) ASSERT_GE(seen[at].time_ns, seen[at - 1].time_ns);
}

TEST(history_tells_each_action_in_order) {
  orStream_t s = defaultStream(0);
  size_t none = 0;
  ASSERT_OK(orSetCacheHook(hook));
  void *a = take(700, s);
  expect(0, orCacheActionSegmentAlloc, a, 2 * MIB, s);
  expect(1, orCacheActionAlloc, a, 700, s);
  ASSERT_OK(orCacheFree(a));
  expect(2, orCacheActionFreeRequested, a, 700, s);
  expect(3, orCacheActionFreeCompleted, a, 700, s);
  ASSERT_PTR(take(900, s), a);
  expect(4, orCacheActionAlloc, a, 900, s);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheEmpty(0));
  expect(7, orCacheActionSegmentFree, a, 2 * MIB, s);
  ASSERT_OK(orCacheSnapshot(NULL, sizeof(orCacheBlock), &none, 0));
  expect(8, orCacheActionSnapshot, NULL, 0, 0);
  ASSERT_EQ(seenCount, 9);
  ASSERT_OK(orSetCacheHook(NULL));
  take(700, s);
  ASSERT_EQ(seenCount, 9);
}

TEST(history_a_free_completes_when_recorded_streams_are_done) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orSetCacheHook(hook));
  ASSERT_OK(orCacheFree(a));
  ASSERT_EQ(seenCount, 1);
  expect(0, orCacheActionFreeRequested, a, 4 * KIB, s);
  openGate(gate, side);
  take(512, s); /* looks */
  expect(1, orCacheActionFreeCompleted, a, 4 * KIB, s);
  ASSERT_EQ(seen[2].action, orCacheActionAlloc);
}

TEST(history_out_of_memory) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p;
  take(20 * MIB, s);
  ASSERT_OK(orSetCacheHook(hook));
  ASSERT_ERROR(orCacheMalloc(&p, 60 * MIB, s), orErrorMemoryAllocation);
  ASSERT_EQ(seenCount, 1);
  expect(0, orCacheActionOutOfMemory, NULL, 60 * MIB, s);
  ASSERT_EQ(seen[0].device_free, 44 * MIB);
}

static void allocateAndFree(int thread, void *context) {
  orStream_t s = thread % 2 ? newStream() : defaultStream(0);
  (void)context;
  for (int i = 0; i < 2000; i++) {
    void *p = take((size_t)(1 + i % 7) * 512, s);
    ASSERT_OK(orCacheFree(p));
  }
}

static int bySequence(const void *a, const void *b) {
  uint64_t x = ((const orCacheRecord *)a)->sequence, y = ((const orCacheRecord *)b)->sequence;
  return (x > y) - (x < y);
}

/* Every number once, and by sequence an address is live once at a time. */
TEST(history_of_several_threads_has_one_order) {
  ASSERT_OK(orSetCacheHook(hook));
  runThreads(4, allocateAndFree, NULL);
  qsort(seen, seenCount, sizeof *seen, bySequence);
  ASSERT_GE(seenCount, 4 * 2000 * 3);
  static void *live[8];
  for (size_t i = 0; i < seenCount; i++) {
    ASSERT_EQ(seen[i].sequence, i + 1);
    int at = 0;
    while (at < 8 && live[at] != seen[i].address) at++;
    if (seen[i].action == orCacheActionAlloc) {
      ASSERT_EQ(at, 8);
      for (at = 0; live[at];) at++;
      live[at] = seen[i].address;
    } else if (seen[i].action == orCacheActionFreeRequested) {
      ASSERT_LT(at, 8);
      live[at] = NULL;
    }
  }
}

/* ---- Snapshots ---- */

static size_t list(orCacheBlock *blocks, size_t room, int device) {
  ASSERT_OK(orCacheSnapshot(blocks, sizeof(orCacheBlock), &room, device));
  return room;
}

static const orCacheBlock *blockAt(const orCacheBlock *blocks, size_t count, const void *address) {
  for (size_t i = 0; i < count; i++)
    if (blocks[i].address == address) return &blocks[i];
  FAIL("%p is not in the snapshot", address);
}

TEST(snapshot_has_every_block) {
  orStream_t s = defaultStream(0), side = newStream();
  char *a = take(700, s), *b = take(1000, s), *c = take(3 * MIB, side);
  ASSERT_OK(orCacheRecordStream(b, side));
  orEvent_t gate = closeGate(side);
  ASSERT_OK(orCacheFree(b));
  orCacheBlock blocks[16];
  memset(blocks, 0x55, sizeof blocks);
  ASSERT_EQ(list(blocks, 4, 0), 5);
  ASSERT_EQ(blocks[0].bytes, (size_t)0x5555555555555555); /* too little room: nothing */
  size_t count = list(blocks, 16, 0);
  ASSERT_EQ(count, 5);
  const orCacheBlock *first = blockAt(blocks, count, a);
  ASSERT_EQ(first->state, orCacheBlockAllocated);
  ASSERT_EQ(first->requested, 700);
  ASSERT_EQ(first->bytes, 1024);
  ASSERT_EQ(first->large, 0);
  ASSERT_EQ(first->stream, s);
  ASSERT_PTR(first[1].address, b);
  ASSERT_PTR(first[1].segment, a);
  ASSERT_EQ(first[1].state, orCacheBlockPending);
  ASSERT_EQ(first[1].requested, 1000);
  ASSERT_PTR(first[2].address, a + 2048);
  ASSERT_EQ(first[2].state, orCacheBlockInactive);
  ASSERT_EQ(first[2].requested, 0);
  ASSERT_EQ(first[2].bytes, 2 * MIB - 2048);
  const orCacheBlock *large = blockAt(blocks, count, c);
  ASSERT_EQ(large->large, 1);
  ASSERT_EQ(large->stream, side);
  ASSERT_EQ(large[0].bytes + large[1].bytes, 20 * MIB);
  ASSERT_EQ(list(blocks, 16, 1), 0);
  openGate(gate, side);
}

TEST(snapshot_refuses_bad_arguments) {
  size_t count = 3;
  orCacheBlock block;
  ASSERT_ERROR(orCacheSnapshot(NULL, sizeof(orCacheBlock), &count, 0), orErrorInvalidValue);
  ASSERT_ERROR(orCacheSnapshot(&block, sizeof block, NULL, 0), orErrorInvalidValue);
  ASSERT_REFUSED(orCacheSnapshot(&block, sizeof block, &count, 2), orErrorInvalidDevice, "2");
  ASSERT_REFUSED(orCacheSnapshot(&block, sizeof block - 1, &count, 0), orErrorInvalidValue,
                 "orCacheBlock: size");
}
