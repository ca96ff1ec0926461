/*
 * The caching allocator's limits and options: memory fraction, blocks that are not split, rounding,
 * segments that go back early.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "cache_helpers.h"
#include "later_device.h"

static void setOptions(orCacheOptions options) {
  options.size = sizeof options;
  ASSERT_OK(orCacheSetOptions(&options));
}

TEST(cache_fraction_limits_what_is_held) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  double fraction = 0;
  void *p;
  ASSERT_OK(orCacheGetFraction(&fraction, 0));
  ASSERT_NEAR(fraction, 1, 0);
  ASSERT_OK(orCacheSetFraction(0, 0.5));
  ASSERT_OK(orCacheGetFraction(&fraction, 0));
  ASSERT_NEAR(fraction, 0.5, 0);
  void *a = take(20 * MIB, s);
  ASSERT_REFUSED(orCacheMalloc(&p, 14 * MIB, s), orErrorMemoryAllocation,
                 "64.00 MiB (32.00 MiB allowed by the memory fraction)");
  void *b = take(12 * MIB, s);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(b));
  orGetLastError();
  ASSERT_OK(orCacheFree(take(32 * MIB, s))); /* what is cached goes back first */
  ASSERT_OK(orGetLastError());
  take(64 * MIB, defaultStream(1)); /* the other device has its own */
  ASSERT_OK(orCacheSetFraction(0, 1));
  take(64 * MIB, s);
}

/* Sizes are in the largest unit of which there is one. */
TEST(cache_refusals_name_sizes) {
  setCapacity("64M");
  void *p;
  ASSERT_OK(orCacheSetFraction(0, 1.0 / (64 * KIB)));
  ASSERT_REFUSED(orCacheMalloc(&p, MIB, defaultStream(0)), orErrorMemoryAllocation,
                 "tried to allocate 1.00 MiB; 64.00 MiB is free of a capacity of 64.00 MiB (1.00 "
                 "KiB allowed by the memory fraction), 0 bytes is allocated");
  ASSERT_OK(orCacheSetFraction(0, 1023.0 / (64 * MIB)));
  ASSERT_REFUSED(orCacheMalloc(&p, (size_t)1 << 40, defaultStream(0)), orErrorMemoryAllocation,
                 "tried to allocate 1.00 TiB; 64.00 MiB is free of a capacity of 64.00 MiB (1023 "
                 "bytes allowed by the memory fraction)");
  ASSERT_OK(orCacheSetFraction(0, 1));
  ASSERT_REFUSED(orCacheMalloc(&p, (size_t)1 << 40, defaultStream(0)), orErrorMemoryAllocation,
                 "a capacity of 64.00 MiB, 0 bytes is allocated");
}

TEST(cache_fraction_below_what_is_in_use) {
  setCapacity("64M");
  orStream_t s = defaultStream(0);
  void *p, *a = take(20 * MIB, s);
  ASSERT_OK(orCacheSetFraction(0, 0));
  orGetLastError();
  ASSERT_ERROR(orCacheMalloc(&p, 1, s), orErrorMemoryAllocation);
  ASSERT_ERROR(orGetLastError(), orErrorMemoryAllocation);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(take(20 * MIB, s), a);
}

TEST(cache_fraction_refuses_what_is_none) {
  double fraction;
  ASSERT_REFUSED(orCacheSetFraction(0, 1.5), orErrorInvalidValue, "1.5 is out of range: 0 to 1");
  ASSERT_REFUSED(orCacheSetFraction(0, -0.25), orErrorInvalidValue, "-0.25");
  ASSERT_ERROR(orCacheSetFraction(0, 0.0 / 0.0), orErrorInvalidValue);
  ASSERT_REFUSED(orCacheSetFraction(2, 0.5), orErrorInvalidDevice, "2");
  ASSERT_ERROR(orCacheGetFraction(NULL, 0), orErrorInvalidValue);
  ASSERT_ERROR(orCacheGetFraction(&fraction, -1), orErrorInvalidDevice);
}

/* What is in use counts from now on as what it is by the new limit. */
TEST(cache_counts_what_a_new_max_split_size_makes_oversize) {
  orStream_t s = defaultStream(0);
  void *whole = take(40 * MIB, s);
  take(30 * MIB, s);
  take(22 * MIB, s);
  take(2 * MIB, s);
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 0);
  ASSERT_OK(orCacheFree(whole));
  setOptions((orCacheOptions){.max_split_size = 30 * MIB, .max_non_split_rounding = 8 * MIB});
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 1);
  ASSERT_EQ(statsOf(0).oversize_segments.current, 2);
  ASSERT_PTR(take(40 * MIB, s), whole);
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 2);
  ASSERT_OK(orCacheFree(whole));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).oversize_segments.current, 1);
}

TEST(cache_blocks_from_max_split_size_on_are_not_split) {
  orStream_t s = defaultStream(0);
  setOptions((orCacheOptions){.max_split_size = 30 * MIB, .max_non_split_rounding = 8 * MIB});
  void *whole = take(30 * MIB, s); /* no more and no less */
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 1);
  ASSERT_OK(orCacheFree(whole));
  void *other = take(29 * MIB, s); /* as little as it would waste */
  ASSERT_NE((uintptr_t)other, (uintptr_t)whole);
  ASSERT_PTR(take(30 * MIB, s), whole);
  ASSERT_OK(orCacheFree(whole));
  ASSERT_OK(orCacheFree(other));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(orCacheResetPeakStats(0));
  whole = take(40 * MIB, s);
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 1);
  ASSERT_EQ(statsOf(0).oversize_segments.current, 1);
  ASSERT_OK(orCacheFree(whole));
  ASSERT_EQ(statsOf(0).oversize_allocations.current, 0);
  ASSERT_EQ(statsOf(0).oversize_allocations.peak, 1);
  void *small = take(16 * MIB, s); /* does not spoil the large one */
  ASSERT_NE((uintptr_t)small, (uintptr_t)whole);
  void *little = take(32 * MIB, s); /* would waste 8 MiB */
  ASSERT_NE((uintptr_t)little, (uintptr_t)whole);
  ASSERT_PTR(take(34 * MIB, s), whole);
  ASSERT_EQ(statsOf(0).inactive_split[0].current, 0);
  ASSERT_EQ(statsOf(0).allocated_bytes[0].current, (40 + 16 + 32) * MIB);
  setOptions((orCacheOptions){0});
  ASSERT_EQ(statsOf(0).oversize_segments.current, 0);
  ASSERT_OK(orCacheFree(whole));
  ASSERT_PTR(take(16 * MIB, s), whole);
  ASSERT_EQ(statsOf(0).inactive_split[0].current, 1);
}

TEST(cache_rounds_up_to_steps_between_powers_of_two) {
  orStream_t s = defaultStream(0);
  orCacheOptions options = {0};
  options.roundup_power2_divisions[0] = 4;
  options.roundup_power2_divisions[1] = 2;
  options.roundup_power2_divisions[4] = 3;
  setOptions(options);
  static const struct {
    size_t asked, got;
  } cases[] = {{1, 512},
               {2048, 2048},
               {2049, 2560}, /* steps of 512 from 2048 on */
               {5000, 5120},
               {40000, 40960}, /* 32768 + 8192 */
               {1200 * KIB, 1280 * KIB},
               {2 * MIB, 2 * MIB},
               {2 * MIB + 1, 3 * MIB},
               {5 * MIB, 5 * MIB}, /* [2] is 0 */
               {16 * MIB, 16 * MIB}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int64_t before = statsOf(0).allocated_bytes[0].current;
    take(cases[i].asked, s);
    ASSERT_EQ(statsOf(0).allocated_bytes[0].current - before, cases[i].got);
  }
}

TEST(cache_large_segments_may_be_larger) {
  setOptions((orCacheOptions){.large_segment_size = 32 * MIB});
  take(2 * MIB, defaultStream(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 32 * MIB);
}

/* Above the threshold, a new segment makes the oldest unused ones go, as many as are too much. */
TEST(cache_garbage_goes_before_a_new_segment) {
  setCapacity("128M");
  orStream_t s = defaultStream(0);
  setOptions((orCacheOptions){.garbage_collection_threshold = 44.0 / 128});
  void *a = take(20 * MIB, s), *b = take(22 * MIB, s), *c = take(24 * MIB, s);
  ASSERT_OK(orCacheFree(b));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheFree(c));
  take(26 * MIB, s); /* 66 of 44 MiB: the 22 that were freed first are enough */
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, (20 + 24 + 26) * MIB);
  ASSERT_EQ(statsOf(0).alloc_retries, 0);
  ASSERT_PTR(take(20 * MIB, s), a);
}

TEST(cache_options_are_checked) {
  orCacheOptions options = {.size = 7};
  ASSERT_REFUSED(orCacheSetOptions(&options), orErrorInvalidValue, "size is 7");
  ASSERT_ERROR(orCacheSetOptions(NULL), orErrorInvalidValue);
  options = (orCacheOptions){.size = sizeof options, .garbage_collection_threshold = 1};
  ASSERT_REFUSED(orCacheSetOptions(&options), orErrorInvalidValue, "threshold is 1");
  options = (orCacheOptions){.size = sizeof options, .max_split_size = MIB};
  ASSERT_REFUSED(orCacheSetOptions(&options), orErrorInvalidValue, "1048576");
  options = (orCacheOptions){.size = sizeof options, .large_segment_size = 20 * MIB + 1};
  ASSERT_REFUSED(orCacheSetOptions(&options), orErrorInvalidValue, "20971521");
  setOptions((orCacheOptions){.max_split_size = 20 * MIB, .large_segment_size = 20 * MIB});
}

/* ---- a thread that is short of memory waits for one that gives it back ---- */

static atomic_int giving_back, hosts_asleep;

static void *fallAsleep(void) {
  atomic_fetch_add(&hosts_asleep, 1);
  return NULL;
}

static void wakeUp(void *token) { (void)token; }

/* As one that wants a lock of the caller's, which a thread that sleeps has put down. */
static orError_t freeWhenAHostSleeps(void *device, void *ptr, size_t bytes) {
  atomic_store(&giving_back, 1);
  while (!atomic_load(&hosts_asleep)) sched_yield();
  return freeLater(device, ptr, bytes);
}

static void *emptyCache(void *context) {
  (void)context;
  ASSERT_OK(orCacheEmpty(0));
  return NULL;
}

TEST(cache_puts_down_the_callers_lock_while_memory_is_on_its_way_back) {
  static orDeviceFactory slow;
  pthread_t thread;
  slow = later;
  slow.free = freeWhenAHostSleeps;
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){fallAsleep, wakeUp}));
  ASSERT_OK(orRegisterDeviceFactory("openreg", 10, &slow));
  ASSERT_OK(orCacheFree(take(512 * KIB, defaultStream(0))));
  atomic_store(&hosts_asleep, 0); /* while the devices were made, too */
  ASSERT_EQ(pthread_create(&thread, NULL, emptyCache, NULL), 0);
  while (!atomic_load(&giving_back)) sched_yield();
  take(MIB, defaultStream(0));
  pthread_join(thread, NULL);
  ASSERT_EQ(hosts_asleep, 1);
}
