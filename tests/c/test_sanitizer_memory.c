/*
 * The sanitizer: ranges of memory, the caching allocator, stacks, what stays bounded, threads.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openreg_graph.h"
#include "sanitizer_helpers.h"

/* ---- Ranges ---- */

static uint64_t tellStrided(orStream_t stream, const void *data, size_t width, uint32_t dims,
                            const size_t *counts, const size_t *strides) {
  orMemoryAccess a = {.data = data, .width = width, .dims = dims, .write = 1};
  for (uint32_t i = 0; i < dims; i++) {
    a.count[i] = counts[i];
    a.stride[i] = strides[i];
  }
  ASSERT_OK(orSanitizerAccess(stream, "strided", &a, 1));
  return orSanitizerFound(NULL, NULL);
}

TEST(sanitizer_knows_views_that_overlap) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  writes(s0, "write", a, 100);
  ASSERT_EQ(writes(s1, "write", a + 100, 100), 0);
  ASSERT_EQ(writes(s1, "nothing", a + 1050, 0), 0);
  ASSERT_EQ(writes(s0, "write", a + 1000, 100), 0);
  ASSERT_EQ(writes(s1, "write", a + 99, 1), 1);
}

/* Columns of a matrix of 1000 rows of 64 floats. */
TEST(sanitizer_knows_interleaved_columns) {
  static const size_t rows[] = {1000}, pitch[] = {256};
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  ASSERT_EQ(tellStrided(s0, a, 128, 1, rows, pitch), 0);
  ASSERT_EQ(tellStrided(s1, a + 128, 128, 1, rows, pitch), 0);
  ASSERT_EQ(tellStrided(s1, a + 128 + 256 * 500, 128, 1, rows, pitch), 0);
  ASSERT_EQ(writes(s1, "gap", a + 256 * 7 + 128, 128), 0);
  ASSERT_EQ(writes(s1, "row", a + 256 * 7 + 124, 128), 1);
  ASSERT_EQ(tellStrided(s1, a + 124, 8, 1, rows, pitch), 2);
}

TEST(sanitizer_knows_geometries_of_several_dimensions) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  /* [8, 16, 32] bytes: x[:, :, 3] and x[:, 2::4, :] meet, x[:, :, 3] and x[:, :, 5::2] do not */
  static const size_t c0[] = {8, 16}, t0[] = {512, 32}, c1[] = {8, 4}, t1[] = {512, 128},
                      c2[] = {8, 16, 13}, t2[] = {512, 32, 2};
  ASSERT_EQ(tellStrided(s0, a + 3, 1, 2, c0, t0), 0);
  ASSERT_EQ(tellStrided(s1, a + 6, 1, 3, c2, t2), 0);
  ASSERT_EQ(tellStrided(s1, a + 64, 32, 2, c1, t1), 1);
  /* The same in another order of dimensions. */
  static const size_t c3[] = {16, 8}, t3[] = {32, 512};
  ASSERT_EQ(tellStrided(s1, a + 3, 1, 2, c3, t3), 2);
}

TEST(sanitizer_reads_as_many_dimensions_as_there_are) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  orMemoryAccess two = {
      .width = 1, .dims = 1, .write = 1, .count = {2, 64}, .stride = {3000, 8}}; /* and no more */
  sanitize();
  char *a = deviceMemory(MIB);
  two.data = a;
  ASSERT_OK(orSanitizerAccess(s0, "two bytes", &two, 1));
  ASSERT_EQ(writes(s1, "between", a + 8, 1), 0);
}

TEST(sanitizer_takes_the_hull_of_what_has_too_many_dimensions) {
  static const size_t two[] = {2, 2, 2, 2, 2, 2, 2, 2},
                      gaps[] = {3000, 3, 160, 10, 700, 40}, /* any order */
      dense[] = {1, 2, 4, 8, 16, 32, 64, 128};
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB), *b = deviceMemory(MIB);
  ASSERT_EQ(tellStrided(s0, a, 1, 6, two, gaps), 0);
  ASSERT_EQ(writes(s1, "between", a + 14, 26), 0);
  ASSERT_EQ(writes(s1, "between", a + 3000 + 54, 106), 0);
  ASSERT_EQ(writes(s1, "in the hull", a + 3000 + 5, 1), 1);
  ASSERT_EQ(tellStrided(s0, b, 1, 8, two, dense), 0);
  ASSERT_EQ(writes(s1, "behind", b + 256, 1), 0);
  ASSERT_EQ(writes(s1, "the last", b + 255, 1), 2);
}

/* Compared with a bitmap of each. */
TEST(sanitizer_geometry_against_a_model) {
  enum { SPAN = 600, ROUNDS = 20000 };
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(64 * KIB);
  uint32_t x = 12345;
#define RANDOM(n) ((x = x * 1664525u + 1013904223u) >> 8) % (n)
  int met = 0, apart = 0;
  for (int round = 0; round < ROUNDS; round++) {
    unsigned char bytes[2][4 * SPAN] = {{0}};
    uint64_t found = 0;
    for (int side = 0; side < 2; side++) {
      size_t count[3], stride[3], width = 1 + RANDOM(6), start = RANDOM(40);
      uint32_t dims = RANDOM(4);
      for (uint32_t i = 0; i < dims; i++) {
        count[i] = 1 + RANDOM(5);
        stride[i] = RANDOM(60);
      }
      for (size_t i = 0; i < (dims > 0 ? count[0] : 1); i++)
        for (size_t j = 0; j < (dims > 1 ? count[1] : 1); j++)
          for (size_t k = 0; k < (dims > 2 ? count[2] : 1); k++)
            memset(&bytes[side][start + i * (dims > 0 ? stride[0] : 0) +
                                j * (dims > 1 ? stride[1] : 0) + k * (dims > 2 ? stride[2] : 0)],
                   1, width);
      found = tellStrided(side ? s1 : s0, a + start, width, dims, count, stride);
    }
    bool meet = false;
    for (int i = 0; i < 4 * SPAN; i++) meet |= bytes[0][i] && bytes[1][i];
    ASSERT_EQ(found != 0, meet);
    *(meet ? &met : &apart) += 1;
    waitStream(s0, s1); /* all is ordered again */
    waitStream(s1, s0);
    ASSERT_OK(orStreamSynchronize(s1));
    ASSERT_OK(orSanitizerClearReports());
  }
  ASSERT_GT(met, ROUNDS / 20);
  ASSERT_GT(apart, ROUNDS / 20);
}

TEST(sanitizer_remembers_what_a_later_write_does_not_cover) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  writes(s0, "whole", a, 1000);
  waitStream(s1, s0);
  writes(s1, "middle", a + 400, 200);
  waitStream(s2, s1);
  writes(s1, "end", a + 900, 200);
  ASSERT_CLEAN();
  waitStream(s0, s1);
  orStream_t s3 = newStream();
  ASSERT_EQ(reads(s3, "read", a + 399, 1), 1);
  ASSERT_STR(reportAt(1).earlier.operation, "whole");
  ASSERT_EQ(reads(s3, "read", a + 599, 1), 2);
  ASSERT_STR(reportAt(2).earlier.operation, "middle");
  ASSERT_EQ(reads(s3, "read", a + 600, 1), 3);
  ASSERT_STR(reportAt(3).earlier.operation, "whole");
  ASSERT_EQ(reads(s2, "read", a + 950, 1), 4);
  ASSERT_STR(reportAt(4).earlier.operation, "end");
  ASSERT_EQ(reads(s2, "read", a + 899, 1), 0);
}

static void *captureNothing(void *context) { return context; }

TEST(sanitizer_remembers_nothing_where_a_later_write_ends) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  writes(s0, "whole", a, 100);
  ASSERT_EQ(writes(s1, "second half", a + 50, 50), 1);
  waitStream(s2, s1);
  ASSERT_EQ(writes(s2, "around its end", a + 90, 20), 0);
}

TEST(sanitizer_refuses_bad_accesses) {
  orStream_t s0 = defaultOf(0);
  orMemoryAccess bad = {.data = "", .width = SIZE_MAX};
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerAccess(s0, "off", &bad, 1)); /* it is off */
  sanitize();
  ASSERT_REFUSED(orSanitizerAccess(s0, "op", &bad, 1), orErrorInvalidValue,
                 "ends past the address space");
  bad = (orMemoryAccess){.data = "", .width = 1, .dims = 1, .count = {SIZE_MAX}, .stride = {8}};
  ASSERT_REFUSED(orSanitizerAccess(s0, "op", &bad, 1), orErrorInvalidValue,
                 "ends past the address space");
  bad.dims = OR_ACCESS_DIMS + 1;
  ASSERT_REFUSED(orSanitizerAccess(s0, "op", &bad, 1), orErrorInvalidValue, "at most 8");
  ASSERT_REFUSED(orSanitizerAccess(s0, NULL, &bad, 1), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orSanitizerAccess(s0, "op", NULL, 1), orErrorInvalidValue, "null");
  bad.dims = 0;
  ASSERT_ERROR(orSanitizerAccess(12345, "op", &bad, 1), orErrorInvalidResourceHandle);
  ASSERT_OK(orSanitizerAccess(s0, "op", NULL, 0));
  orSanitizerOptions options = {.size = 4};
  ASSERT_OK(orSanitizerDisable());
  ASSERT_REFUSED(orSanitizerEnable(&options), orErrorInvalidValue, "size is 4");
  options = (orSanitizerOptions){.size = sizeof options, .capture = captureNothing};
  ASSERT_REFUSED(orSanitizerEnable(&options), orErrorInvalidValue, "without release");
  size_t count;
  ASSERT_REFUSED(orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, NULL, NULL),
                 orErrorInvalidValue, "null");
  ASSERT_REFUSED(orSanitizerReports(1, NULL, 8, 0, &count, NULL), orErrorInvalidValue,
                 "orRaceReport");
}

/* ---- The caching allocator ---- */

TEST(sanitizer_reports_reuse_without_record_stream) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = block(4 * KIB, s0);
  writes(s0, "make", a, 4 * KIB);
  waitStream(side, s0);
  reads(side, "aten::sum", a, 4 * KIB);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(block(4 * KIB, s0), a);
  ASSERT_EQ(writes(s0, "aten::fill_", a, 4 * KIB), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.memory, "openreg:0, reused without record_stream");
  ASSERT_STR(r.earlier.operation, "aten::sum");
  ASSERT_CONTAINS(r.advice, "t.record_stream(s) before the tensor t of aten::sum is freed");
  ASSERT_CONTAINS(r.advice, "s being stream 0x");
}

TEST(sanitizer_accepts_reuse_after_record_stream) {
  orStream_t s0 = defaultOf(0), side = newStream(), third = newStream();
  sanitize();
  char *a = block(4 * KIB, s0);
  writes(s0, "make", a, 4 * KIB);
  waitStream(third, s0);
  writes(third, "change", a, 4 * KIB);
  waitStream(side, third); /* the recorded stream comes after the third */
  reads(side, "aten::sum", a, 4 * KIB);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_PTR(block(4 * KIB, s0), a);
  writes(s0, "aten::fill_", a, 4 * KIB);
  ASSERT_CLEAN();
}

/* Not by way of the synchronisation: the free alone says it. */
TEST(sanitizer_knows_what_record_stream_waits_for) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = block(4 * KIB, s0), *p = NULL;
  reads(side, "aten::sum", a, 4 * KIB);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  for (p = block(4 * KIB, s0); p != a; p = block(4 * KIB, s0)) sleepMs(1);
  writes(s0, "aten::fill_", a, 4 * KIB);
  ASSERT_CLEAN();
}

TEST(sanitizer_accepts_reuse_after_the_stream_has_joined) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = block(4 * KIB, s0);
  reads(side, "aten::sum", a, 4 * KIB);
  waitStream(s0, side);
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(block(4 * KIB, s0), a);
  writes(s0, "aten::fill_", a, 4 * KIB);
  ASSERT_CLEAN();
  /* Whoever has it next on another stream comes after the allocation stream. */
  ASSERT_OK(orCacheFree(a));
  ASSERT_PTR(block(4 * KIB, s0), a);
  ASSERT_EQ(writes(side, "aten::add_", a, 4 * KIB), 1);
  ASSERT_STR(reportAt(1).memory, "openreg:0, freed and reused");
  ASSERT_CONTAINS(reportAt(1).advice, "s0 being the default stream of openreg:0");
}

TEST(sanitizer_takes_what_is_aside_to_keep_its_memory) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  for (int aside = 1; aside >= 0; aside--) {
    sanitize();
    char *a = block(4 * KIB, s0);
    if (aside) ASSERT_OK(orSanitizerMarkExternal(s1));
    writes(s1, "beside", a, KIB);
    ASSERT_OK(orCacheFree(a));
    ASSERT_PTR(block(4 * KIB, s0), a);
    ASSERT_EQ(writes(s0, "next", a, KIB), !aside);
    ASSERT_OK(orCacheFree(a));
    ASSERT_OK(orSanitizerDisable());
    ASSERT_OK(orStreamDestroy(s1));
    s1 = newStream();
  }
}

TEST(sanitizer_forgets_memory_that_went_back_to_the_device) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = block(40 * MIB, s0);
  writes(s0, "make", a, 40 * MIB);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_PTR(block(40 * MIB, side), a);
  writes(side, "aten::fill_", a, 40 * MIB);
  ASSERT_CLEAN();
}

/* The cache cannot know of the side stream, and the memory is another stream's now. */
TEST(sanitizer_remembers_a_side_stream_when_memory_went_back) {
  orStream_t s0 = defaultOf(0), side = newStream(), third = newStream();
  sanitize();
  char *a = block(40 * MIB, s0);
  writes(side, "aten::mul_", a, 40 * MIB);
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_PTR(block(40 * MIB, third), a);
  ASSERT_EQ(writes(third, "aten::fill_", a, 40 * MIB), 1);
  ASSERT_STR(reportAt(1).memory, "openreg:0, reused without record_stream");
}

static void *blockFrom(orMemPool_t pool, orStream_t stream) {
  void *ptr;
  ASSERT_OK(orCacheMallocFromPool(&ptr, 4 * KIB, stream, pool));
  return ptr;
}

/* Launches go on to use what the program has freed; after the pool's end nothing does. */
TEST(sanitizer_knows_the_memory_of_graphs) {
  orStream_t s = newStream(), launches = newStream();
  orMemPool_t pool;
  orGraph_t graph;
  sanitizeStrictly();
  ASSERT_OK(orMemPoolCreate(&pool, 0));
  ASSERT_OK(orStreamBeginCapture(s));
  void *a = blockFrom(pool, s), *kept = blockFrom(pool, s);
  ASSERT_OK(orMemsetAsync(a, 1, 4 * KIB, s));
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_OK(orGraphReplay(graph, launches));
  ASSERT_OK(orGraphReplay(graph, launches));
  ASSERT_OK(orCacheFree(a));
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_OK(orMemPoolRelease(pool));
  ASSERT_OK(orCacheEmpty(0)); /* waits, and tells nobody */
  ASSERT_PTR(block(4 * KIB, s), a);
  ASSERT_OK(orMemsetAsync(a, 2, 4 * KIB, s));
  ASSERT_CLEAN();
  ASSERT_OK(orCacheFree(kept));
}

/* In a capture nothing is touched yet, and at each launch it is. */
TEST(sanitizer_compares_what_a_graph_touches_when_it_is_launched) {
  orStream_t s = newStream(), other = newStream();
  orGraph_t graph;
  sanitize();
  char *a = deviceMemory(KIB);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_EQ(writes(s, "captured", a, KIB), 0);
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_EQ(writes(other, "other", a, KIB), 0);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  ASSERT_STR(reportAt(1).later.operation, "captured");
  waitStream(other, s);
  ASSERT_OK(orGraphReplay(graph, other));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
}

/* What a kernel of a graph writes is not seen. */
TEST(sanitizer_takes_the_memory_of_graphs_for_written) {
  orStream_t s = newStream();
  orMemPool_t pool;
  orGraph_t graph;
  orSanitizerInitcheck(1);
  sanitizeStrictly();
  ASSERT_OK(orMemPoolCreate(&pool, 0));
  ASSERT_OK(orStreamBeginCapture(s));
  void *a = blockFrom(pool, s);
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_EQ(reads(s, "aten::sum", a, 4 * KIB), 0);
  ASSERT_EQ(reads(s, "aten::sum", block(4 * KIB, s), 4 * KIB), 1);
}

TEST(sanitizer_forgets_what_orFree_has_waited_for) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, 4 * KIB);
  ASSERT_OK(orFree(a));
  ASSERT_PTR(deviceMemory(4 * KIB), a);
  writes(s1, "write", a, 4 * KIB);
  ASSERT_CLEAN();
}

TEST(sanitizer_forgets_memory_that_is_registered_no_more) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *memory = malloc(KIB), *a = deviceMemory(KIB);
  reads(s0, "read", a, KIB);
  for (int i = 0; i < 2; i++) {
    ASSERT_OK(orHostRegister(memory, KIB));
    ASSERT_OK(orMemcpyAsync(memory, a, KIB, orMemcpyDeviceToHost, i ? s0 : s1));
    orSanitizerIgnore(1); /* its wait tells nobody */
    ASSERT_OK(orHostUnregister(memory));
    orSanitizerIgnore(0);
  }
  ASSERT_CLEAN();
  free(memory);
}

TEST(sanitizer_survives_a_reset) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  writes(s0, "dropped", a, 4 * KIB);
  writes(s1, "other", a, 4 * KIB);
  ASSERT_OK(orDeviceReset());
  openGate(gate);
  writes(s1, "after", a, 4 * KIB);
  ASSERT_CLEAN();
  ASSERT_EQ(writes(s0, "after", a, 4 * KIB), 1);
}

TEST(sanitizer_keeps_the_gates_of_other_devices_over_a_reset) {
  orStream_t s0 = newStreamOn(1), s1 = newStreamOn(1);
  sanitize();
  orEvent_t gate = closeGate(s0);
  ASSERT_OK(orDeviceReset()); /* of device 0 */
  char *a = deviceMemory(4 * KIB);
  writes(s0, "behind", a, KIB);
  writes(s1, "other", a, KIB);
  ASSERT_CLEAN();
  openGate(gate);
  ASSERT_EQ(reportCount(), 1);
}

static orError_t loseDevice(void *args) {
  (void)args;
  return orErrorDeviceLost;
}

/* What a lost device is asked for is refused, and so touches nothing. */
TEST(sanitizer_ignores_what_a_lost_device_refuses) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  launch(s0, loseDevice, NULL);
  ASSERT_ERROR(orStreamSynchronize(s0), orErrorDeviceLost);
  ASSERT_ERROR(orMemsetAsync(a, 1, KIB, s0), orErrorDeviceLost);
  writes(s1, "write", a, KIB);
  ASSERT_CLEAN();
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orMemsetAsync(a, 1, KIB, s1));
  ASSERT_CLEAN();
}

/* ---- Stacks and reports ---- */

static atomic_int captured, released;

static void *captureNumber(void *context) {
  ASSERT_PTR(context, &captured);
  uint64_t total;
  size_t count;
  ASSERT_OK(
      orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, &count, &total)); /* no lock is held */
  return (void *)(intptr_t)(1 + atomic_fetch_add(&captured, 1));
}

static void releaseNumber(void *stack, void *context) {
  uint64_t total;
  size_t count;
  ASSERT(stack != NULL);
  ASSERT_PTR(context, &captured);
  ASSERT_OK(orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, &count, &total));
  atomic_fetch_add(&released, 1);
}

static void sanitizeWithStacks(size_t reports) {
  orSanitizerOptions options = {.size = sizeof options,
                                .capture = captureNumber,
                                .release = releaseNumber,
                                .context = &captured,
                                .reports = reports};
  ASSERT_OK(orSanitizerEnable(&options));
}

TEST(sanitizer_keeps_the_stacks_of_a_report) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(0);
  char *a = deviceMemory(4 * KIB);
  for (int i = 0; i < 10; i++) writes(s0, "write", a, 4 * KIB);
  ASSERT_EQ(captured, 10);
  ASSERT_GE(released, 8); /* one is in use, one may be waiting for the next call */
  writes(s1, "write", a, 4 * KIB);
  orRaceReport r = reportAt(1);
  ASSERT_PTR(r.earlier.stack, (void *)10);
  ASSERT_PTR(r.later.stack, (void *)11);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_EQ(captured, 11);
  ASSERT_EQ(released, 9);
  ASSERT_PTR(reportAt(1).earlier.stack, (void *)10);
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(released, 11);
  ASSERT_CLEAN();
}

static int released_by[2];

static void releaseCounted(void *stack, void *context) {
  ASSERT_PTR(stack, context);
  ++*(int *)context;
}

static void *captureSecond(void *context) { return context; }

/* Others switch the options while a thread captures its stack. */
static void *captureAndSwitch(void *context) {
  orSanitizerOptions second = {.size = sizeof second,
                               .capture = captureSecond,
                               .release = releaseCounted,
                               .context = &released_by[1]};
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerEnable(&second));
  return context;
}

TEST(sanitizer_releases_a_stack_by_who_captured_it) {
  orSanitizerOptions first = {.size = sizeof first,
                              .capture = captureAndSwitch,
                              .release = releaseCounted,
                              .context = &released_by[0]};
  ASSERT_OK(orSanitizerEnable(&first));
  orStream_t s0 = defaultOf(0);
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  writes(s0, "write", a, KIB);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_EQ(released_by[0], 1);
  ASSERT_EQ(released_by[1], 1);
}

static void countCall(void *context) { ++*(int *)context; }

static void enableCounting(int *told) {
  orSanitizerOptions options = {.size = sizeof options, .pinned = countCall, .context = told};
  ASSERT_OK(orSanitizerEnable(&options));
}

/* Who watches the host need not before. */
TEST(sanitizer_tells_of_the_first_pinned_memory_that_a_stream_uses) {
  int told = 0;
  orStream_t s0 = defaultOf(0);
  char *host = pinnedMemory(KIB), *device = deviceMemory(KIB), pageable[16];
  enableCounting(&told);
  ASSERT_OK(orMemcpyAsync(device, pageable, sizeof pageable, orMemcpyHostToDevice, s0));
  writes(s0, "write", device, KIB);
  writes(0, "host", host, KIB);
  ASSERT_EQ(told, 0);
  ASSERT_OK(orMemcpyAsync(device, host, KIB, orMemcpyHostToDevice, s0));
  ASSERT_EQ(told, 1);
  reads(s0, "read", host, KIB);
  ASSERT_EQ(told, 1);
  ASSERT_OK(orSanitizerDisable());
  enableCounting(&told);
  reads(s0, "read", host, KIB);
  ASSERT_EQ(told, 2);
}

TEST(sanitizer_reports_the_same_once) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(2);
  char *a = deviceMemory(4 * KIB);
  for (int i = 0; i < 100; i++) {
    writes(s0, "first", a, KIB);
    writes(s1, "second", a, KIB);
  }
  ASSERT_EQ(reportCount(), 2); /* each after the other */
  writes(s0, "third", a, KIB); /* counted, not kept */
  ASSERT_EQ(reportCount(), 3);
  size_t count;
  orRaceReport kept[3];
  ASSERT_OK(orSanitizerReports(1, kept, sizeof(orRaceReport), 3, &count, NULL));
  ASSERT_EQ(count, 2);
  ASSERT_OK(orSanitizerReports(2, kept, sizeof(orRaceReport), 3, &count, NULL));
  ASSERT_EQ(count, 1);
  ASSERT_EQ(kept[0].number, 2);
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(writes(s1, "second", a, KIB), 1);
  ASSERT_OK(orMemsetAsync(a, 0, KIB, s0)); /* and nobody asks */
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(captured, released);
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
}

/* A read and a write of one operation, after a write and a read of another. */
TEST(sanitizer_makes_one_report_of_one_missing_wait) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orMemoryAccess both[] = {{.data = a, .width = KIB}, {.data = a, .width = KIB, .write = 1}};
  ASSERT_OK(orSanitizerAccess(s0, "aten::mul.out", both, 2));
  ASSERT_CLEAN();
  ASSERT_OK(orSanitizerAccess(s1, "aten::add.out", both, 2));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  ASSERT_EQ(reportCount(), 1);
  ASSERT_EQ(reportAt(1).later.write, 1);
}

/* ---- Bounds ---- */

/* By what it would take to keep all of them: the stacks that are alive. */
static int alive(void) { return captured - released; }

TEST(sanitizer_stays_bounded_over_10000_steps) {
  enum { STEPS = 10000, LAYERS = 8 };
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitizeWithStacks(0);
  char *weights = block(LAYERS * 64 * KIB, s0), *table = block(MIB, s0);
  int half = 0;
  for (int step = 0; step < STEPS; step++) {
    char *activation[LAYERS];
    char *batch = block((1 + step % 7) * 3 * KIB, s0);
    waitStream(side, s0);
    writes(side, "load", batch, KIB);
    waitStream(s0, side);
    for (int i = 0; i < LAYERS; i++) {
      size_t size = (size_t)(1 + (step + i) % 5) * 2 * KIB;
      activation[i] = block(size, s0);
      reads(s0, "weight", weights + i * 64 * KIB, 64 * KIB);
      writes(s0, "forward", activation[i], size);
    }
    static const size_t rows[] = {256}, pitch[] = {4 * KIB};
    tellStrided(s0, table + step % 1024 * 4, 4, 1, rows, pitch); /* a column */
    writes(s0, "row", table + step % 256 * 4 * KIB + step % 13 * 4, 16);
    for (int i = 0; i < LAYERS; i++) {
      writes(s0, "update", weights + i * 64 * KIB, 64 * KIB);
      ASSERT_OK(orCacheFree(activation[i]));
    }
    ASSERT_OK(orCacheFree(batch));
    if (step == STEPS / 2) half = alive();
  }
  ASSERT_CLEAN();
  ASSERT_LE(alive(), half + half / 50);
}

/* A column each step, as of a cache of keys: none covers another. */
TEST(sanitizer_keeps_few_pieces_of_one_hull) {
  static const size_t rows[] = {64}, pitch[] = {64 * KIB};
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(0);
  char *a = deviceMemory(4 * MIB);
  for (int i = 0; i < 16000; i++) tellStrided(s0, a + (size_t)i * 4, 4, 1, rows, pitch);
  ASSERT_LT(alive(), 1100);
  ASSERT_EQ(tellStrided(s1, a + 15999 * 4, 4, 1, rows, pitch), 1);
}

TEST(sanitizer_remembers_a_thousand_columns) {
  static const size_t rows[] = {64}, pitch[] = {64 * KIB};
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * MIB);
  for (int i = 0; i < 1000; i++) tellStrided(s0, a + (size_t)i * 4, 4, 1, rows, pitch);
  ASSERT_EQ(reads(s1, "of the first", a + 64 * KIB, 4), 1);
  ASSERT_EQ(tellStrided(s1, a + 999 * 4, 4, 1, rows, pitch), 2);
  ASSERT_EQ(tellStrided(s1, a + 1000 * 4, 4, 1, rows, pitch), 0);
}

/* As of a cache of keys of which each step reads what there is so far. */
TEST(sanitizer_keeps_the_widest_of_one_pattern) {
  static const size_t rows[] = {64}, pitch[] = {64 * KIB};
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(0);
  char *a = deviceMemory(4 * MIB);
  for (size_t i = 1; i <= 900; i++) tellStrided(s0, a, i * 4, 1, rows, pitch);
  ASSERT_LT(alive(), 10);
  for (size_t i = 1; i <= 300; i++) tellStrided(s0, a, i * 4, 1, rows, pitch);
  ASSERT_GE(alive(), 2); /* a narrower one covers no wider one */
  ASSERT_EQ(tellStrided(s1, a + 899 * 4, 4, 1, rows, pitch), 1);
  ASSERT_EQ(tellStrided(s1, a + 900 * 4, 4, 1, rows, pitch), 0);
}

/* Nothing of it is superfluous, so the oldest have to go. */
TEST(sanitizer_forgets_the_oldest_of_too_many) {
  enum { PIECES = 600000 };
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(0);
  char *a = deviceMemory(16 * MIB);
  for (int i = 0; i < PIECES; i++) writes(s0, "piece", a + (size_t)i * 16, 8);
  ASSERT_LT(alive(), 300000);
  ASSERT_EQ(writes(s1, "whole", a + (size_t)PIECES * 16 - 64, 64), 1);
}

/* ---- Threads ---- */

static void useAll(int thread, void *context) {
  char *a = context;
  orStream_t mine = newStream();
  for (int i = 0; i < 300; i++) {
    char *b = block((size_t)(1 + i % 9) * KIB, mine);
    writes(mine, "own", b, KIB);
    ASSERT_OK(orMemsetAsync(a + thread * 4 * KIB, thread, 4 * KIB, mine));
    orEvent_t event = record(mine);
    ASSERT_OK(orStreamWaitEvent(defaultOf(0), event));
    if (i % 3 == 0) ASSERT_OK(orEventSynchronize(event));
    if (i % 7 == 0) ASSERT_OK(orStreamSynchronize(mine));
    if (i % 50 == 0) ASSERT_OK(orDeviceSynchronize());
    orEventQuery(event);
    ASSERT_OK(orEventDestroy(event));
    ASSERT_OK(orCacheFree(b));
    orEvent_t gate = closeGate(mine);
    openGate(gate);
    ASSERT_OK(orEventDestroy(gate));
  }
  /* The next round writes the same bytes on another stream. */
  ASSERT_OK(orStreamSynchronize(mine));
}

TEST_WITH_LIMIT(sanitizer_from_several_threads, 60) {
  defaultOf(0);
  sanitizeWithStacks(0);
  runThreads(4, useAll, deviceMemory(16 * KIB));
  ASSERT_CLEAN();
  ASSERT_OK(orSanitizerDisable());
  ASSERT_EQ(captured, released);
}

static atomic_int stop;

static void switchOrUse(int thread, void *context) {
  if (thread) {
    while (!stop) useAll(thread, context);
    return;
  }
  for (int i = 0; i < 50; i++) {
    sanitizeWithStacks(0);
    sleepMs(2);
    ASSERT_OK(orSanitizerDisable());
  }
  stop = 1;
}

TEST_WITH_LIMIT(sanitizer_switched_while_in_use, 60) {
  defaultOf(0);
  runThreads(3, switchOrUse, deviceMemory(16 * KIB));
}
