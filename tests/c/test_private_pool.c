/*
 * Private pools: the requests that their memory serves, what keeps the memory, and where it goes.
 * Also the cache while a stream captures.
 */
#include <stdatomic.h>
#include <string.h>

#include "cache_helpers.h"
#include "openreg_fault.h"
#include "openreg_graph.h"
#include "openreg_schedule.h"

static orMemPool_t newPool(int device) {
  orMemPool_t pool;
  ASSERT_OK(orMemPoolCreate(&pool, device));
  ASSERT_NE(pool, 0);
  return pool;
}

static void *takeFrom(orMemPool_t pool, size_t bytes, orStream_t stream) {
  void *ptr = NULL;
  ASSERT_OK(orCacheMallocFromPool(&ptr, bytes, stream, pool));
  ASSERT(ptr != NULL);
  return ptr;
}

static orMemPoolStats statsOfPool(orMemPool_t pool) {
  orMemPoolStats stats = {.size = sizeof stats};
  ASSERT_OK(orMemPoolGetStats(&stats, pool));
  return stats;
}

static int64_t reserved(void) { return statsOf(0).reserved_bytes[0].current; }

static orGraph_t endCaptureOf(orStream_t stream) {
  orGraph_t graph;
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  return graph;
}

static void order(orStream_t before, orStream_t after) {
  orEvent_t e;
  ASSERT_OK(orEventCreateWithFlags(&e, 0));
  ASSERT_OK(orEventRecord(e, before));
  ASSERT_OK(orStreamWaitEvent(after, e));
  ASSERT_OK(orEventDestroy(e));
}

/* ---- whose memory ---- */

TEST(private_pool_freed_blocks_serve_the_pool_alone) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0), other = newPool(0);
  static const size_t sizes[] = {1, 700, MIB, 3 * MIB, 25 * MIB};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    void *a = takeFrom(pool, sizes[i], s);
    ASSERT_OK(orCacheFree(a));
    void *own = take(sizes[i], s), *others = takeFrom(other, sizes[i], s);
    ASSERT(own != a && others != a && own != others);
    ASSERT_PTR(takeFrom(pool, sizes[i], s), a);
    ASSERT_OK(orCacheFree(own));
    ASSERT(takeFrom(pool, sizes[i], s) != own);
  }
}

TEST(private_pool_streams_do_not_share_blocks) {
  orStream_t s = defaultStream(0), side = newStream();
  orMemPool_t pool = newPool(0);
  void *a = takeFrom(pool, 700, s);
  ASSERT_OK(orCacheFree(a));
  ASSERT(takeFrom(pool, 700, side) != a);
  ASSERT_PTR(takeFrom(pool, 700, s), a);
}

TEST(private_pool_0_is_the_devices_own_memory) {
  orStream_t s = defaultStream(0);
  void *a = takeFrom(0, 700, s);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(700, s), a);
}

TEST(private_pool_refuses_what_is_no_pool) {
  orStream_t s = defaultStream(0), far;
  orMemPool_t pool = newPool(0), gone = newPool(0);
  orMemPoolStats stats = {.size = sizeof stats};
  void *p = &p;
  ASSERT_OK(orSetDevice(1));
  far = newStream();
  ASSERT_OK(orMemPoolRelease(gone));
  const orMemPool_t bad[] = {1, s, gone, UINT64_MAX};
  for (int i = 0; i < 4; i++) {
    ASSERT_REFUSED(orCacheMallocFromPool(&p, 1, s, bad[i]), orErrorInvalidResourceHandle,
                   "memory pool");
    ASSERT_PTR(p, NULL);
    ASSERT_ERROR(orMemPoolRelease(bad[i]), orErrorInvalidResourceHandle);
    ASSERT_ERROR(orCacheEmptyPool(bad[i]), orErrorInvalidResourceHandle);
    ASSERT_ERROR(orMemPoolGetStats(&stats, bad[i]), orErrorInvalidResourceHandle);
  }
  ASSERT_REFUSED(orCacheMallocFromPool(&p, 1, far, pool), orErrorInvalidValue, "device 1");
  ASSERT_ERROR(orCacheMallocFromPool(&p, 1, 77, pool), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orCacheMallocFromPool(NULL, 1, s, pool), orErrorInvalidValue);
  ASSERT_ERROR(orMemPoolCreate(NULL, 0), orErrorInvalidValue);
  ASSERT_ERROR(orMemPoolCreate(&gone, 99), orErrorInvalidDevice);
  ASSERT_EQ(gone, 0);
  ASSERT_ERROR(orMemPoolGetStats(NULL, pool), orErrorInvalidValue);
  ASSERT_OK(orCacheMallocFromPool(&p, 0, s, pool));
  ASSERT_PTR(p, NULL);
}

/* ---- what keeps it ---- */

TEST(private_pool_memory_stays_while_it_is_held) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0);
  void *a = takeFrom(pool, 30 * MIB, s), *p;
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 30 * MIB);
  ASSERT_ERROR(orCacheMalloc(&p, 40 * MIB, s), orErrorMemoryAllocation);
  ASSERT_PTR(takeFrom(pool, 30 * MIB, s), a);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orMemPoolRelease(pool));
  ASSERT_OK(orCacheMalloc(&p, 40 * MIB, s)); /* by the retry */
  ASSERT_EQ(reserved(), 40 * MIB);
}

TEST(private_pool_empty_gives_back_one_pools_idle_memory) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0), other = newPool(0);
  void *kept = takeFrom(pool, 700, s);
  ASSERT_OK(orCacheFree(takeFrom(pool, 3 * MIB, s)));
  ASSERT_OK(orCacheFree(takeFrom(other, 3 * MIB, s)));
  ASSERT_OK(orCacheFree(take(3 * MIB, s)));
  orEvent_t gate = closeGate(newStream()); /* has nothing to do with it */
  ASSERT_EQ(statsOfPool(pool).reserved_bytes[0].current, 22 * MIB);
  ASSERT_OK(orCacheEmptyPool(pool));
  ASSERT_EQ(statsOfPool(pool).reserved_bytes[0].current, 2 * MIB);
  ASSERT_EQ(statsOfPool(other).reserved_bytes[0].current, 20 * MIB);
  ASSERT_EQ(reserved(), 42 * MIB);
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 22 * MIB);
  ASSERT_OK(orCacheFree(kept));
  ASSERT_OK(orEventSignal(gate, orSuccess));
}

TEST(private_pool_live_blocks_outlive_it) {
  orStream_t s = defaultStream(0), far = defaultStream(1);
  orMemPool_t pool = newPool(0);
  void *a = takeFrom(pool, 700, s), *b = takeFrom(pool, 700, s);
  ASSERT_OK(orCacheFree(a));
  orEvent_t gate = closeGate(far); /* another device's work has nothing to do with it */
  ASSERT_OK(orMemPoolRelease(pool));
  ASSERT_OK(orMemsetAsync(b, 1, 700, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_PTR(take(700, s), a); /* the device's own now */
  ASSERT_OK(orCacheFree(a));
  ASSERT_EQ(statsOf(0).allocation[0].current, 1);
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
  openGate(gate, far);
}

/* A graph that is launched and destroyed still runs, on any stream. */
TEST(private_pool_memory_stays_until_what_was_launched_is_over) {
  orStream_t s = defaultStream(0), side = newStream();
  for (int destroyed = 0; destroyed < 2; destroyed++) {
    orMemPool_t pool = newPool(0);
    void *a = takeFrom(pool, 700, s);
    ASSERT_OK(orCacheFree(a));
    orEvent_t gate = closeGate(side);
    ASSERT_OK(orMemPoolRelease(pool));
    if (destroyed) ASSERT_OK(orStreamDestroy(side));
    void *other = take(700, s);
    ASSERT(other != a);
    ASSERT_OK(orCacheFree(other));
    ASSERT_OK(orEventSignal(gate, orSuccess));
    ASSERT_OK(orCacheEmpty(0)); /* waits for the side stream */
    ASSERT_EQ(reserved(), 0);
    ASSERT_OK(orEventDestroy(gate));
  }
}

typedef struct openThenEmpty {
  orEvent_t gate;
  orMemPool_t pool;
  atomic_int *opened;
} openThenEmpty;

static void emptyPoolLater(int thread, void *context) {
  openThenEmpty *e = context;
  if (thread == 0) {
    sleepMs(20);
    atomic_store(e->opened, 1);
    ASSERT_OK(orEventSignal(e->gate, orSuccess));
  } else {
    ASSERT_OK(orCacheEmptyPool(e->pool));
    ASSERT_EQ(atomic_load(e->opened), 1);
  }
}

enum { GATES = 6 };

static void openLater(int thread, void *gates) {
  for (int i = 0; thread == 0 && i < GATES; i++) {
    sleepMs(5);
    ASSERT_OK(orEventSignal(((orEvent_t *)gates)[i], orSuccess));
  }
  if (thread == 0) return;
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
}

/* More streams than there are blocks. */
TEST(private_pool_empty_waits_for_each_stream) {
  orMemPool_t pool = newPool(0);
  ASSERT_OK(orCacheFree(takeFrom(pool, 30 * MIB, defaultStream(0))));
  orEvent_t gate[GATES];
  for (int i = 0; i < GATES; i++) gate[i] = closeGate(newStream());
  ASSERT_OK(orMemPoolRelease(pool));
  ASSERT_EQ(reserved(), 30 * MIB);
  runThreads(2, openLater, gate);
}

/* A graph that is gone may still run. */
TEST(private_pool_empty_pool_waits_for_what_was_launched) {
  orStream_t s = newStream(), side = newStream();
  orMemPool_t pool = newPool(0);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orCacheFree(takeFrom(pool, 30 * MIB, s)));
  ASSERT_OK(orGraphDestroy(endCaptureOf(s)));
  orEvent_t gate = closeGate(side);
  atomic_int opened = 0;
  openThenEmpty e = {.gate = gate, .pool = pool, .opened = &opened};
  runThreads(2, emptyPoolLater, &e);
  ASSERT_EQ(reserved(), 0);
}

TEST(private_pool_release_joins_what_the_device_has_of_the_stream) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0);
  void *block[6];
  for (int i = 0; i < 3; i++) block[i] = take(4 * KIB, s);
  for (int i = 3; i < 6; i++) block[i] = takeFrom(pool, 4 * KIB, s);
  ASSERT_OK(orCacheFree(block[1]));
  ASSERT_OK(orCacheFree(block[4]));
  ASSERT_OK(orMemPoolRelease(pool));
  void *a = take(4 * KIB, s), *b = take(4 * KIB, s);
  ASSERT((a == block[1] && b == block[4]) || (a == block[4] && b == block[1]));
  for (int i = 0; i < 6; i++) ASSERT_OK(orCacheFree(block[i]));
  ASSERT_EQ(statsOf(0).inactive_split[0].current, 0);
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
}

TEST(private_pool_ten_thousand_leave_nothing) {
  orStream_t s = defaultStream(0);
  orMemPool_t first = newPool(0);
  ASSERT_OK(orMemPoolRelease(first));
  for (int i = 0; i < 10000; i++) {
    orMemPool_t pool = newPool(0);
    ASSERT_EQ(pool >> 30, first >> 30); /* the same slot */
    ASSERT_OK(orCacheFree(takeFrom(pool, 700, s)));
    ASSERT_OK(orMemPoolRelease(pool));
  }
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
}

/* ---- where memory is short ---- */

static orMemPool_t spare[2];
static int asked;

/* Lets go of one pool at a time, and has none at the end. */
static int giveSpare(int device) {
  asked++;
  ASSERT_EQ(device, 0);
  for (int i = 0; i < 2; i++) {
    orMemPool_t pool = spare[i];
    if (!pool) continue;
    spare[i] = 0;
    ASSERT_OK(orMemPoolRelease(pool));
    return 1;
  }
  return 0;
}

static void fillSpare(orStream_t s) {
  for (int i = 0; i < 2; i++) {
    spare[i] = newPool(0);
    ASSERT_OK(orCacheFree(takeFrom(spare[i], 20 * MIB, s)));
  }
  asked = 0;
}

TEST(private_pool_spare_ones_are_let_go_one_by_one) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p;
  fillSpare(s);
  ASSERT_ERROR(orCacheMalloc(&p, 30 * MIB, s), orErrorMemoryAllocation);
  ASSERT_OK(orSetShortageHook(giveSpare));
  orCacheStats before = statsOf(0);
  orGetLastError();
  ASSERT_OK(orCacheFree(take(20 * MIB, s)));
  ASSERT_EQ(asked, 0);
  ASSERT_OK(orCacheFree(take(30 * MIB, s)));
  ASSERT_EQ(asked, 1);
  ASSERT_OK(orCacheFree(take(64 * MIB, s)));
  ASSERT_EQ(asked, 2);
  ASSERT_EQ(statsOf(0).ooms, before.ooms);
  ASSERT_OK(orPeekAtLastError());
  void *kept = take(2 * MIB, s);
  ASSERT_REFUSED(orCacheMalloc(&p, 64 * MIB, s), orErrorMemoryAllocation, "64.00 MiB");
  ASSERT_EQ(asked, 3);
  ASSERT_OK(orCacheFree(kept));
  ASSERT_OK(orSetShortageHook(NULL));
}

/* The work that was queued when the pool was let go is waited for. */
TEST(private_pool_spare_one_that_is_in_use) {
  setCapacity("64M");
  orStream_t s = defaultStream(0), side = newStream();
  fillSpare(s);
  ASSERT_OK(orSetShortageHook(giveSpare));
  ASSERT_OK(orLaunchSleep(side, 20 * 1000 * 1000));
  orEvent_t slept;
  ASSERT_OK(orEventCreateWithFlags(&slept, 0));
  ASSERT_OK(orEventRecord(slept, side));
  ASSERT_OK(orCacheFree(take(60 * MIB, s)));
  ASSERT_OK(orEventQuery(slept));
  ASSERT_OK(orSetShortageHook(NULL));
}

static orError_t allocateTooMuch(void *args) {
  void *p;
  (void)args;
  ASSERT_ERROR(orCacheMalloc(&p, 60 * MIB, defaultStream(0)), orErrorMemoryAllocation);
  return orSuccess;
}

TEST(private_pool_spare_ones_are_kept_where_they_are_no_help) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p;
  fillSpare(s);
  ASSERT_OK(orSetShortageHook(giveSpare));
  ASSERT_ERROR(orCacheMalloc(&p, 65 * MIB, s), orErrorMemoryAllocation);
  launch(s, allocateTooMuch, NULL); /* it could not wait for a pool's end */
  ASSERT_OK(orStreamSynchronize(s));
  orFault fault = {.size = sizeof fault, .kind = orFaultOutOfMemory, .device = 0};
  ASSERT_OK(orFaultInject(&fault));
  ASSERT_REFUSED(orCacheMalloc(&p, 512, s), orErrorMemoryAllocation, "injected");
  ASSERT_EQ(asked, 0);
  ASSERT_OK(orFaultRemove(orFaultOutOfMemory, 0));
  ASSERT_OK(orSetShortageHook(NULL));
}

/* ---- what is told ---- */

TEST(private_pool_figures) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0);
  void *a = takeFrom(pool, 700, s), *b = takeFrom(pool, 3 * MIB, s);
  take(700, s);
  orMemPoolStats t = statsOfPool(pool);
  ASSERT_EQ(t.reserved_bytes[0].current, 22 * MIB);
  ASSERT_EQ(t.reserved_bytes[1].current, 2 * MIB);
  ASSERT_EQ(t.reserved_bytes[2].allocated, 20 * MIB);
  ASSERT_EQ(reserved(), 24 * MIB);
  ASSERT_EQ(statsOf(0).allocation[0].current, 3);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheEmptyPool(pool));
  ASSERT_OK(orCacheResetPeakStats(1)); /* of the other device */
  ASSERT_OK(orCacheResetAccumulatedStats(1));
  t = statsOfPool(pool);
  ASSERT_EQ(t.reserved_bytes[0].current, 0);
  ASSERT_EQ(t.reserved_bytes[0].peak, 22 * MIB);
  ASSERT_EQ(t.reserved_bytes[0].freed, 22 * MIB);
  ASSERT_OK(orCacheResetPeakStats(0));
  ASSERT_OK(orCacheResetAccumulatedStats(0));
  t = statsOfPool(pool);
  ASSERT_EQ(t.reserved_bytes[0].peak, 0);
  ASSERT_EQ(t.reserved_bytes[0].freed, 0);
  ASSERT_EQ(t.reserved_bytes[0].allocated, 0);
}

static _Atomic orMemPool_t told;
static void hook(const orCacheRecord *record) { atomic_store(&told, record->pool); }

TEST(private_pool_is_named_by_snapshots_and_history) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0);
  orCacheBlock list[8];
  size_t count = 8;
  take(700, s);
  ASSERT_OK(orSetCacheHook(hook));
  void *a = takeFrom(pool, 700, s);
  ASSERT_EQ(told, pool);
  take(700, s);
  ASSERT_EQ(told, 0);
  ASSERT_OK(orCacheFree(a));
  ASSERT_EQ(told, pool);
  ASSERT_OK(orSetCacheHook(NULL));
  for (int released = 0; released < 2; released++) {
    ASSERT_OK(orCacheSnapshot(list, sizeof(orCacheBlock), &count, 0));
    for (size_t i = 0; i < count; i++)
      ASSERT_EQ(list[i].pool, list[i].segment == a && !released ? pool : 0);
    if (!released) ASSERT_OK(orMemPoolRelease(pool));
  }
}

/* Once more than it is held, while an allocation from it is under way. */
static void releaseTwice(const orCacheRecord *record) {
  orMemPool_t pool = atomic_exchange(&told, 0);
  if (!pool || record->action != orCacheActionAlloc) return;
  ASSERT_OK(orMemPoolRelease(pool));
  ASSERT_REFUSED(orMemPoolRelease(pool), orErrorInvalidResourceHandle, "not a live memory pool");
}

TEST(private_pool_released_too_often_in_an_allocation) {
  orStream_t s = defaultStream(0);
  orMemPool_t pool = newPool(0);
  ASSERT_OK(orCacheFree(takeFrom(pool, 700, s)));
  atomic_store(&told, pool);
  ASSERT_OK(orSetCacheHook(releaseTwice));
  void *a = takeFrom(pool, 700, s);
  ASSERT_OK(orSetCacheHook(NULL));
  ASSERT_EQ(told, 0);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(700, s), a); /* the device's own by now */
}

/* ---- captures ---- */

TEST(private_pool_a_capture_reuses_what_its_stream_frees) {
  orStream_t s = newStream(), side = newStream();
  orMemPool_t pool = newPool(0);
  ASSERT_OK(orStreamBeginCapture(s));
  void *a = takeFrom(pool, 700, s);
  ASSERT_OK(orMemsetAsync(a, 1, 700, s));
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(takeFrom(pool, 700, s), a);
  order(s, side);
  ASSERT_OK(orMemsetAsync(a, 2, 700, side));
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  order(side, s);
  void *b = takeFrom(pool, 700, s);
  ASSERT(b != a); /* no count says when the side stream's node is over */
  orGraph_t graph = endCaptureOf(s);
  ASSERT_PTR(takeFrom(pool, 700, s), a);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(private_pool_a_capture_keeps_others_blocks_that_it_uses) {
  orStream_t s = newStream(), owner = defaultStream(0), third = newStream();
  void *a = take(700, owner), *b = take(700, owner);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orCacheRecordStream(a, s));
  ASSERT_OK(orCacheRecordStream(a, third));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheRecordStream(b, third)); /* which does not capture */
  ASSERT_OK(orCacheFree(b));
  ASSERT_PTR(take(700, owner), b);
  ASSERT(take(700, owner) != a);
  ASSERT_OK(orCacheEmpty(0)); /* waits for no capture */
  ASSERT_OK(orGraphDestroy(endCaptureOf(s)));
  ASSERT_PTR(take(700, owner), a);
}

/* There is no moment without a capture, and room for one block. */
TEST(private_pool_captures_in_a_chain_give_blocks_back) {
  setCapacity("64M");
  orStream_t s[2] = {newStream(), newStream()}, owner = defaultStream(0);
  ASSERT_OK(orStreamBeginCapture(s[0]));
  for (int i = 0; i < 4; i++) {
    orStream_t ends = s[i % 2], begins = s[(i + 1) % 2];
    void *a = take(40 * MIB, owner);
    ASSERT_OK(orCacheRecordStream(a, ends));
    ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orStreamBeginCapture(begins));
    ASSERT_OK(orGraphDestroy(endCaptureOf(ends)));
  }
  take(40 * MIB, owner);
}

TEST(private_pool_a_block_waits_for_each_capture_that_uses_it) {
  orStream_t first = newStream(), second = newStream(), later = newStream();
  orStream_t owner = defaultStream(0);
  void *a = take(700, owner), *b = take(700, owner);
  ASSERT_OK(orStreamBeginCapture(first));
  ASSERT_OK(orStreamBeginCapture(second));
  for (int i = 0; i < 2; i++) ASSERT_OK(orCacheRecordStream(i ? b : a, first));
  ASSERT_OK(orCacheRecordStream(a, second));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orStreamBeginCapture(later));
  ASSERT_OK(orGraphDestroy(endCaptureOf(first)));
  ASSERT_PTR(take(700, owner), b);
  ASSERT(take(700, owner) != a);
  ASSERT_OK(orStreamDestroy(second)); /* ends its capture */
  ASSERT_PTR(take(700, owner), a);
}

/* That the block is another device's changes nothing. */
TEST(private_pool_a_block_waits_for_another_devices_capture) {
  ASSERT_OK(orSetDevice(1));
  orStream_t far = newStream(), owner = defaultStream(0);
  ASSERT_OK(orStreamBeginCapture(far));
  void *a = take(700, owner);
  ASSERT_OK(orCacheRecordStream(a, far));
  ASSERT_OK(orCacheFree(a));
  ASSERT(take(700, owner) != a);
  ASSERT_OK(orGraphDestroy(endCaptureOf(far)));
  ASSERT_PTR(take(700, owner), a);
}

static unsigned char byteAt(const void *ptr) {
  unsigned char byte;
  orStream_t s = newStream();
  ASSERT_OK(orMemcpyAsync(&byte, ptr, 1, orMemcpyDefault, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orStreamDestroy(s));
  return byte;
}

/* The memory of a graph is poisoned once, before the graph can be launched. */
TEST(private_pool_a_graphs_memory_is_not_poisoned) {
  clearSettings();
  setenv("OPENREG_POISON", "1", 1);
  orStream_t s = newStream(), launches = newStream();
  orMemPool_t pool = newPool(0);
  orEvent_t gate = closeGate(s); /* what is queued there for real comes late */
  ASSERT_OK(orStreamBeginCapture(s));
  void *a = takeFrom(pool, 700, s), *b = takeFrom(pool, 3 * MIB, s);
  ASSERT_OK(orMemsetAsync(a, 1, 700, s));
  ASSERT_OK(orCacheFree(a)); /* is no node either */
  orGraph_t graph = endCaptureOf(s);
  size_t nodes;
  ASSERT_OK(orGraphGetNodeCount(graph, &nodes));
  ASSERT_EQ(nodes, 1);
  ASSERT_EQ(byteAt(b), 0xFF);
  ASSERT_OK(orGraphReplay(graph, launches));
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orStreamSynchronize(launches));
  openGate(gate, s);
  ASSERT_EQ(byteAt(a), 1);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(private_pool_without_a_graph_is_poisoned) {
  clearSettings();
  setenv("OPENREG_POISON", "1", 1);
  orStream_t s = newStream();
  orMemPool_t pool = newPool(0);
  void *a = takeFrom(pool, 700, s);
  ASSERT_OK(orMemsetAsync(a, 1, 700, s));
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(takeFrom(pool, 700, s), a);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(byteAt(a), 0xFF);
}

/* ---- threads ---- */

enum { THREADS = 4, ROUNDS = 300 };

typedef struct Shared {
  orMemPool_t pool;
  orStream_t stream[THREADS];
} Shared;

static void useIt(int thread, void *context) {
  Shared *shared = context;
  orStream_t s = shared->stream[thread];
  for (int i = 0; i < ROUNDS; i++) {
    orMemPool_t own = newPool(0);
    void *a = takeFrom(shared->pool, (size_t)(1 + i % 7) * 700, s), *b = takeFrom(own, 700, s);
    ASSERT_OK(orMemsetAsync(a, 1, 700, s));
    ASSERT_OK(orMemsetAsync(b, 1, 700, s));
    ASSERT_OK(orCacheRecordStream(a, shared->stream[(thread + 1) % THREADS]));
    ASSERT_OK(orMemPoolRelease(own));
    ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orCacheFree(b));
    if (i % 32 == 0) ASSERT_OK(orCacheEmptyPool(shared->pool));
    if (i % 50 == 0) ASSERT_OK(orCacheEmpty(0));
  }
}

TEST(private_pool_threads) {
  Shared shared = {.pool = newPool(0)};
  for (int i = 0; i < THREADS; i++) shared.stream[i] = newStream();
  runThreads(THREADS, useIt, &shared);
  ASSERT_OK(orMemPoolRelease(shared.pool));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
  ASSERT_EQ(statsOf(0).active[0].current, 0);
}

static void captureIt(int thread, void *context) {
  Shared *shared = context;
  orStream_t s = shared->stream[thread], side = shared->stream[(thread + 1) % THREADS];
  for (int i = 0; i < ROUNDS; i++) {
    orMemPool_t pool = newPool(0);
    if (thread % 2 == 0) ASSERT_OK(orStreamBeginCapture(s));
    void *a = takeFrom(pool, 700, s);
    ASSERT_OK(orMemsetAsync(a, 1, 700, s));
    ASSERT_OK(orCacheRecordStream(a, side));
    ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orCacheFree(takeFrom(pool, 700, s)));
    if (thread % 2 == 0) {
      orGraph_t graph = endCaptureOf(s);
      ASSERT_OK(orGraphReplay(graph, s));
      ASSERT_OK(orGraphDestroy(graph));
    }
    ASSERT_OK(orMemPoolRelease(pool));
  }
}

TEST(private_pool_threads_that_capture) {
  Shared shared = {0};
  for (int i = 0; i < THREADS; i++) shared.stream[i] = newStream();
  runThreads(THREADS, captureIt, &shared);
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(reserved(), 0);
  ASSERT_EQ(statsOf(0).active[0].current, 0);
}
