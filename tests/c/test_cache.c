/*
 * The caching allocator: reuse, split, merge, figures, bad input, capacity. test_cache_order.c has
 * what depends on queued work, test_cache_stress.c the model.
 */
#include <stdint.h>
#include <stdio.h>

#include "cache_helpers.h"

/* ---- Reuse ---- */

TEST(cache_freed_block_is_handed_out_again) {
  orStream_t s = defaultStream(0);
  const size_t sizes[] = {1, 512, 513, 100 * KIB, MIB, MIB + 1, 9 * MIB, 10 * MIB, 33 * MIB};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    void *a = take(sizes[i], s);
    ASSERT_OK(orCacheFree(a));
    void *b = take(sizes[i], s);
    ASSERT_PTR(a, b);
    void *c = take(sizes[i], s);
    ASSERT_NE((uintptr_t)b, (uintptr_t)c);
    ASSERT_OK(orCacheFree(c));
    ASSERT_PTR(take(sizes[i], s), c); /* the one freed last, not any that fits */
  }
}

TEST(cache_takes_the_block_freed_last_of_several) {
  orStream_t s = defaultStream(0);
  void *block[4];
  for (int i = 0; i < 4; i++) {
    block[i] = take(4 * KIB, s);
    take(512, s);
  }
  static const int order[4] = {2, 0, 3, 1};
  for (int i = 0; i < 4; i++) ASSERT_OK(orCacheFree(block[order[i]]));
  for (int i = 3; i >= 0; i--) ASSERT_PTR(take(4 * KIB, s), block[order[i]]);
}

TEST(cache_stream_0_is_the_current_devices_default) {
  ASSERT_OK(orSetDevice(1));
  void *a = take(MIB, OR_STREAM_DEFAULT);
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  ASSERT_OK(orPointerGetAttributes(&attributes, a));
  ASSERT_EQ(attributes.device, 1);
  ASSERT_OK(orSetDevice(0));
  ASSERT_OK(orCacheFree(a)); /* whatever device is current */
  ASSERT_PTR(take(MIB, defaultStream(1)), a);
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
}

TEST(cache_streams_do_not_share_blocks) {
  orStream_t s = defaultStream(0), side = newStream();
  void *a = take(4 * KIB, s);
  ASSERT_OK(orCacheFree(a));
  void *b = take(4 * KIB, side);
  ASSERT_NE((uintptr_t)a, (uintptr_t)b);
  ASSERT_PTR(take(4 * KIB, s), a);
}

TEST(cache_zero_bytes_is_null) {
  void *p = &p;
  ASSERT_OK(orCacheMalloc(&p, 0, defaultStream(0)));
  ASSERT_PTR(p, NULL);
  ASSERT_OK(orCacheFree(NULL));
  ASSERT_OK(orCacheRecordStream(NULL, defaultStream(0)));
  ASSERT_EQ(statsOf(0).allocation[0].allocated, 0);
}

TEST(cache_best_fit_takes_the_smallest_that_is_large_enough) {
  orStream_t s = defaultStream(0);
  static const size_t sizes[] = {40 * KIB, 8 * KIB, 24 * KIB, 16 * KIB, 32 * KIB};
  void *hole[5], *wall[5];
  for (int i = 0; i < 5; i++) {
    hole[i] = take(sizes[i], s);
    wall[i] = take(512, s);
  }
  for (int i = 0; i < 5; i++) ASSERT_OK(orCacheFree(hole[i]));
  ASSERT_PTR(take(20 * KIB, s), hole[2]);
  ASSERT_PTR(take(25 * KIB, s), hole[4]);
  ASSERT_PTR(take(16 * KIB, s), hole[3]);
  ASSERT_PTR(take(33 * KIB, s), hole[0]);
  ASSERT_PTR(take(8 * KIB, s), hole[1]);
  for (int i = 0; i < 5; i++) ASSERT_OK(orCacheFree(wall[i]));
}

TEST(cache_neighbours_merge_in_every_order) {
  static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  orStream_t s = defaultStream(0);
  for (int i = 0; i < 6; i++) {
    char *base = take(512 * KIB, s), *block[3] = {base, NULL, NULL};
    for (int j = 1; j < 3; j++) {
      block[j] = take(512 * KIB, s);
      ASSERT_PTR(block[j], base + (size_t)j * 512 * KIB);
    }
    for (int j = 0; j < 3; j++) ASSERT_OK(orCacheFree(block[orders[i][j]]));
    orCacheStats stats = statsOf(0);
    ASSERT_EQ(stats.segment[0].current, 1);
    ASSERT_EQ(stats.inactive_split[0].current, 0); /* whole again */
    ASSERT_EQ(stats.inactive_split_bytes[0].current, 0);
  }
}

/* ---- Figures ---- */

static void checkStat(const orCacheStat *stat, int64_t all, int64_t small, int64_t large) {
  ASSERT_EQ(stat[0].current, all);
  ASSERT_EQ(stat[1].current, small);
  ASSERT_EQ(stat[2].current, large);
  for (int i = 0; i < 3; i++) ASSERT_EQ(stat[i].allocated - stat[i].freed, stat[i].current);
}

TEST(cache_figures_are_exact) {
  orStream_t s = defaultStream(0);
  void *small = take(700, s), *large = take(3 * MIB, s), *huge = take(25 * MIB, s);
  orCacheStats t = statsOf(0);
  checkStat(t.allocation, 3, 1, 2);
  checkStat(t.active, 3, 1, 2);
  checkStat(t.segment, 3, 1, 2);
  checkStat(t.requested_bytes, 700 + 28 * (int64_t)MIB, 700, 28 * MIB);
  /* 25 of 26 MiB: a large block keeps a rest that is not above 1 MiB. */
  checkStat(t.allocated_bytes, 1024 + 29 * (int64_t)MIB, 1024, 29 * MIB);
  checkStat(t.active_bytes, 1024 + 29 * (int64_t)MIB, 1024, 29 * MIB);
  checkStat(t.reserved_bytes, 48 * MIB, 2 * MIB, 46 * MIB);
  checkStat(t.inactive_split, 2, 1, 1);
  checkStat(t.inactive_split_bytes, 19 * (int64_t)MIB - 1024, 2 * (int64_t)MIB - 1024, 17 * MIB);
  ASSERT_EQ(t.device_alloc, 3);
  ASSERT_OK(orCacheFree(small));
  ASSERT_OK(orCacheFree(large));
  ASSERT_OK(orCacheFree(huge));
  t = statsOf(0);
  checkStat(t.allocation, 0, 0, 0);
  checkStat(t.allocated_bytes, 0, 0, 0);
  checkStat(t.active_bytes, 0, 0, 0);
  checkStat(t.requested_bytes, 0, 0, 0);
  checkStat(t.inactive_split, 0, 0, 0);
  checkStat(t.reserved_bytes, 48 * MIB, 2 * MIB, 46 * MIB);
  ASSERT_EQ(t.allocated_bytes[0].peak, 1024 + 29 * MIB);
  ASSERT_OK(orCacheEmpty(0));
  t = statsOf(0);
  checkStat(t.reserved_bytes, 0, 0, 0);
  checkStat(t.segment, 0, 0, 0);
  ASSERT_EQ(t.device_free, 3);
  ASSERT_EQ(t.reserved_bytes[0].peak, 48 * MIB);
  ASSERT_EQ(statsOf(1).allocation[0].allocated, 0);
}

TEST(cache_resets_of_the_figures) {
  orStream_t s = defaultStream(0);
  void *a = take(4 * KIB, s), *b = take(8 * KIB, s);
  ASSERT_OK(orCacheFree(b));
  ASSERT_EQ(statsOf(0).allocated_bytes[0].peak, 12 * KIB);
  ASSERT_OK(orCacheResetPeakStats(0));
  ASSERT_EQ(statsOf(0).allocated_bytes[0].peak, 4 * KIB);
  ASSERT_EQ(statsOf(0).allocated_bytes[0].allocated, 12 * KIB);
  ASSERT_OK(orCacheResetAccumulatedStats(0));
  orCacheStats t = statsOf(0);
  ASSERT_EQ(t.allocated_bytes[1].current, 4 * KIB);
  ASSERT_EQ(t.allocated_bytes[1].allocated, 0);
  ASSERT_EQ(t.allocated_bytes[1].freed, 0);
  ASSERT_EQ(t.device_alloc, 0);
  ASSERT_OK(orCacheFree(a));
  t = statsOf(0);
  ASSERT_EQ(t.allocated_bytes[1].current, 0);
  ASSERT_EQ(t.allocated_bytes[1].allocated, 0);
  ASSERT_EQ(t.allocated_bytes[1].freed, 4 * KIB);
}

/* ---- Bad input ---- */

TEST(cache_refuses_what_is_no_live_block) {
  orStream_t s = defaultStream(0);
  int on_stack = 0;
  char text[32];
  void *raw, *a = take(4 * KIB, s), *b = take(4 * KIB, s);
  ASSERT_OK(orMalloc(&raw, 4 * KIB));
  ASSERT_REFUSED(orCacheFree(&on_stack), orErrorInvalidValue, "is not a block");
  snprintf(text, sizeof text, "%p", (void *)&on_stack);
  ASSERT_CONTAINS(orGetLastErrorMessage(), text);
  ASSERT_REFUSED(orCacheFree(raw), orErrorInvalidValue, "is not a block");
  ASSERT_REFUSED(orCacheRecordStream(raw, s), orErrorInvalidValue, "is not a block");
  ASSERT_REFUSED(orCacheFree((char *)a + 512), orErrorInvalidValue, "is not a block");
  ASSERT_OK(orCacheFree(a));
  snprintf(text, sizeof text, "%p", a);
  ASSERT_REFUSED(orCacheFree(a), orErrorInvalidValue, "has been freed already");
  ASSERT_CONTAINS(orGetLastErrorMessage(), text);
  ASSERT_REFUSED(orCacheRecordStream(a, newStream()), orErrorInvalidValue,
                 "has been freed already");
  ASSERT_EQ(statsOf(0).allocation[0].current, 1);
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_REFUSED(orCacheFree(b), orErrorInvalidValue, "is not a block");
  ASSERT_EQ(statsOf(0).allocation[0].freed, 2);
  ASSERT_OK(orFree(raw));
}

/* orFree knows the memory, and that it is not the caller's to give back. */
TEST(cache_segments_are_not_orFrees) {
  orStream_t s = defaultStream(0);
  void *a = take(4 * KIB, s), *b = take(3 * MIB, s);
  ASSERT_REFUSED(orFree(a), orErrorInvalidValue, "belongs to the caching allocator");
  ASSERT_REFUSED(orFree(b), orErrorInvalidValue, "belongs to the caching allocator");
  ASSERT_OK(orCacheFree(b));
  ASSERT_REFUSED(orFree(b), orErrorInvalidValue, "belongs to the caching allocator");
  ASSERT_EQ(statsOf(0).segment[0].current, 2);
  ASSERT_PTR(take(3 * MIB, s), b);
  ASSERT_OK(orMemset(a, 1, 4 * KIB));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_REFUSED(orFree(a), orErrorInvalidValue, "is not the start");
}

TEST(cache_refuses_bad_arguments) {
  void *p = &p;
  orCacheStats stats = {.size = sizeof stats};
  orStream_t gone = newStream();
  ASSERT_OK(orStreamDestroy(gone));
  ASSERT_ERROR(orCacheMalloc(NULL, 1, defaultStream(0)), orErrorInvalidValue);
  ASSERT_ERROR(orCacheMalloc(&p, 1, gone), orErrorInvalidResourceHandle);
  ASSERT_PTR(p, NULL);
  ASSERT_ERROR(orCacheMalloc(&p, 1, 12345), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orCacheRecordStream(take(1, defaultStream(0)), gone), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orCacheGetStats(NULL, 0), orErrorInvalidValue);
  ASSERT_REFUSED(orCacheGetStats(&stats, 2), orErrorInvalidDevice, "2");
  ASSERT_ERROR(orCacheEmpty(-1), orErrorInvalidDevice);
  ASSERT_ERROR(orCacheResetPeakStats(64), orErrorInvalidDevice);
  ASSERT_ERROR(orCacheResetAccumulatedStats(1 << 30), orErrorInvalidDevice);
}

static void *inherited;

static void childIsRefused(void) {
  void *p;
  orCacheStats stats = {.size = sizeof stats};
  ASSERT_REFUSED(orCacheMalloc(&p, 1, OR_STREAM_DEFAULT), orErrorForked, "fork");
  ASSERT_ERROR(orCacheFree(inherited), orErrorForked);
  ASSERT_ERROR(orCacheFree(NULL), orErrorForked);
  ASSERT_ERROR(orCacheRecordStream(inherited, OR_STREAM_DEFAULT), orErrorForked);
  ASSERT_ERROR(orCacheEmpty(0), orErrorForked);
  ASSERT_ERROR(orCacheGetStats(&stats, 0), orErrorForked);
}

TEST(cache_checks_the_size_of_a_block) {
  char *p = NULL, *other = NULL, host[8];
  ASSERT_OK(orCacheMalloc((void **)&p, 1000, OR_STREAM_DEFAULT));
  ASSERT_OK(orMalloc((void **)&other, 4096));
  ASSERT_OK(orCacheCheck(p, 0));
  ASSERT_OK(orCacheCheck(p, 1024));
  ASSERT_REFUSED(orCacheCheck(p, 1025), orErrorInvalidValue, "ends 1 bytes past");
  const void *not_judged[] = {NULL, p + 8, other, host};
  for (int i = 0; i < 4; i++) ASSERT_OK(orCacheCheck(not_judged[i], 1 << 20));
}

TEST(cache_refuses_in_a_forked_child) {
  inherited = take(4 * KIB, defaultStream(0));
  ASSERT_FORK_OK(childIsRefused);
  ASSERT_OK(orCacheFree(inherited));
}

/* ---- Capacity ---- */

TEST(cache_capacity_of_64_mib) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p[5] = {NULL};
  int held = 0;
  for (int i = 0; i < 3; i++) p[held++] = take(16 * MIB, s);
  if (!orCacheMalloc(&p[3], 16 * MIB, s)) held++;
  ASSERT_ERROR(orCacheMalloc(&p[4], 16 * MIB, s), orErrorMemoryAllocation);
  ASSERT_PTR(p[4], NULL);
  ASSERT_CONTAINS(orGetLastErrorMessage(),
                  "openreg:0 is out of memory: tried to allocate 16.00 MiB; ");
  ASSERT_CONTAINS(orGetLastErrorMessage(), " is free of a capacity of 64.00 MiB, ");
  ASSERT_CONTAINS(orGetLastErrorMessage(), held == 4
                                               ? "64.00 MiB is allocated and 64.00 MiB reserved"
                                               : "48.00 MiB is allocated and 48.00 MiB reserved");
  ASSERT_EQ(statsOf(0).ooms, 1);
  ASSERT_EQ(statsOf(0).alloc_retries, 1);
  void *other = take(48 * MIB, defaultStream(1));
  for (int i = 0; i < held; i++) ASSERT_OK(orCacheFree(p[i]));
  orGetLastError();
  p[0] = take(48 * MIB, s);
  ASSERT_OK(orGetLastError()); /* what failed on the way is not an error */
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 48 * MIB);
  ASSERT_EQ(statsOf(0).alloc_retries, 2);
  ASSERT_OK(orCacheFree(p[0]));
  ASSERT_OK(orCacheFree(other));
}

TEST(cache_absurd_sizes_are_out_of_memory_and_flush_nothing) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p, *kept = take(MIB, s);
  ASSERT_OK(orCacheFree(kept));
  static const size_t sizes[] = {(size_t)1 << 50, SIZE_MAX, SIZE_MAX - 511, SIZE_MAX - 512,
                                 64 * MIB + 1};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    ASSERT_ERROR(orCacheMalloc(&p, sizes[i], s), orErrorMemoryAllocation);
  ASSERT_EQ(statsOf(0).ooms, 5);
  ASSERT_PTR(take(MIB, s), kept);
}

/* Where a segment of 20 or 2 MiB does not fit, one of just the size does. */
TEST(cache_uses_the_last_of_the_capacity) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p;
  take(50 * MIB, s);
  take(9 * MIB, s);
  ASSERT_EQ(statsOf(0).reserved_bytes[2].current, 59 * MIB);
  take(MIB + 1, s);
  ASSERT_EQ(statsOf(0).reserved_bytes[2].current, 60 * MIB + pageSize());
  for (int i = 0; i < 3; i++) take(MIB, s);
  ASSERT_EQ(statsOf(0).reserved_bytes[1].current, 3 * MIB);
  size_t each = pageSize() < 60 * KIB ? 60 * KIB : pageSize(), left = MIB - pageSize();
  for (; left; left -= each) take(each, s);
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 64 * MIB);
  ASSERT_ERROR(orCacheMalloc(&p, 1, s), orErrorMemoryAllocation);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "allocate 1 bytes; 0 bytes is free");
}

TEST(cache_block_size) {
  void *block = NULL;
  size_t bytes = 0;
  ASSERT_OK(orCacheMalloc(&block, 1000, OR_STREAM_DEFAULT));
  ASSERT_OK(orCacheBlockSize(&bytes, block));
  ASSERT_EQ(bytes, 1024);
  ASSERT_OK(orCacheBlockSize(&bytes, (char *)block + 1));
  ASSERT_EQ(bytes, 0);
  bytes = 1;
  ASSERT_OK(orCacheBlockSize(&bytes, NULL));
  ASSERT_EQ(bytes, 0);
  ASSERT_REFUSED(orCacheBlockSize(NULL, block), orErrorInvalidValue, "null");
  ASSERT_OK(orCacheFree(block));
  ASSERT_OK(orCacheBlockSize(&bytes, block));
  ASSERT_EQ(bytes, 0);
}
