/*
 * The sanitizer: reads of device memory that nothing has written since it was handed out.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "sanitizer_helpers.h"

static orStream_t check(void) {
  orStream_t stream = defaultOf(0);
  ASSERT_EQ(orSanitizerInitcheck(1), 0);
  sanitize();
  return stream;
}

static uint64_t columns(orStream_t stream, const char *data, size_t width, size_t rows,
                        size_t pitch, uint32_t write) {
  orMemoryAccess a = {.data = data, .width = width, .dims = 1, .write = write};
  a.count[0] = rows;
  a.stride[0] = pitch;
  ASSERT_OK(orSanitizerAccess(stream, "columns", &a, 1));
  return orSanitizerFound(NULL, NULL);
}

TEST(sanitizer_reports_a_read_of_what_nothing_has_written) {
  orStream_t s = check();
  char *a = block(1000, s);
  ASSERT_EQ(reads(s, "read", a + 10, 20), 1);
  orRaceReport r = reportAt(1);
  ASSERT_EQ(r.earlier.write, OR_ACCESS_ALLOCATES);
  ASSERT_EQ(strcmp(r.earlier.operation, "allocation"), 0);
  ASSERT_EQ(r.earlier.stream, s);
  ASSERT_EQ((uintptr_t)r.earlier.begin, (uintptr_t)a);
  ASSERT_EQ((uintptr_t)r.earlier.end, (uintptr_t)a + 1000);
  ASSERT_EQ(strcmp(r.later.operation, "read"), 0);
  ASSERT_EQ((uintptr_t)r.begin, (uintptr_t)a + 10);
  ASSERT_EQ(strcmp(r.memory, "openreg:0"), 0);
  ASSERT_EQ(strcmp(r.advice, "a write of these bytes before read"), 0);
  /* What it has read is not reported of the next one. */
  ASSERT_EQ(reads(s, "again", a + 10, 20), 0);
  ASSERT_EQ(reads(s, "beside", a + 9, 1), 2);
}

TEST(sanitizer_reports_reads_of_fresh_memory_by_the_setting) {
  setenv("OPENREG_SANITIZER", "1", 1);
  setenv("OPENREG_INITCHECK", "1", 1);
  orStream_t s = defaultOf(0);
  beginCapture();
  ASSERT_EQ(reads(s, "read", block(1000, s), 20), 1);
  ASSERT_CONTAINS(unwrapped(endCapture()),
                  "a part of which has not been written since it was handed out");
}

TEST(sanitizer_reports_each_fresh_block_that_a_call_reads_once) {
  orStream_t s = check();
  char *a = block(1000, s), *b = block(1000, s);
  orMemoryAccess all[] = {
      {.data = a, .width = 8}, {.data = a + 8, .width = 8}, {.data = b, .width = 8}};
  ASSERT_OK(orSanitizerAccess(s, "read", all, 3));
  ASSERT_EQ(reportCount(), 2);
  ASSERT(reportAt(1).earlier.begin != reportAt(2).earlier.begin);
}

TEST(sanitizer_says_nothing_of_fresh_memory_unless_it_is_asked_to) {
  orStream_t s = defaultOf(0);
  sanitize();
  ASSERT_EQ(reads(s, "read", block(1000, s), 20), 0);
  ASSERT_EQ(orSanitizerInitcheck(1), 0);
  char *a = block(1000, s);
  ASSERT_EQ(orSanitizerInitcheck(0), 1);
  ASSERT_EQ(reads(s, "read", a, 20), 0);
}

TEST(sanitizer_knows_what_was_written_in_part) {
  orStream_t s = check();
  char *a = block(1000, s);
  ASSERT_EQ(writes(s, "write", a + 100, 100), 0);
  ASSERT_EQ(reads(s, "read", a + 100, 100), 0);
  ASSERT_EQ(reads(s, "before", a + 99, 2), 1);
  ASSERT_EQ(reads(s, "behind", a + 199, 2), 2);
  ASSERT_EQ(writes(s, "the rest", a, 100), 0);
  ASSERT_EQ(writes(s, "the rest", a + 200, 800), 0);
  ASSERT_EQ(reads(s, "all", a, 1000), 0);
}

TEST(sanitizer_knows_columns_that_were_written) {
  orStream_t s = check();
  char *a = block(64 * 100, s);
  ASSERT_EQ(columns(s, a + 4, 4, 100, 64, 1), 0);
  ASSERT_EQ(columns(s, a + 4, 4, 100, 64, 0), 0);
  ASSERT_EQ(reads(s, "one", a + 64 * 70 + 4, 4), 0);
  ASSERT_EQ(columns(s, a + 4, 5, 100, 64, 0), 1);
  ASSERT_EQ(reads(s, "row", a + 64 * 70, 64), 2);
}

/* More pieces are taken as a whole. */
TEST(sanitizer_knows_a_million_pieces_that_were_written) {
  enum { PIECES = 1 << 20 };
  orStream_t s = check();
  char *a = block(4 * PIECES, s);
  ASSERT_EQ(columns(s, a, 1, PIECES, 2, 1), 0);
  ASSERT_EQ(reads(s, "gap", a + 1, 1), 1);
  ASSERT_EQ(columns(s, a, 1, PIECES + 1, 2, 1), 0);
  ASSERT_EQ(reads(s, "gap", a + 3, 1), 0);
}

/* The next block's bytes, and what the allocator has rounded up, are nobody's here. */
TEST(sanitizer_judges_a_block_that_is_handed_out_again) {
  orStream_t s = check();
  char *a = block(1000, s);
  ASSERT_EQ(writes(s, "write", a, 1000), 0);
  ASSERT_OK(orCacheFree(a));
  char *b = block(700, s);
  ASSERT_EQ((uintptr_t)b, (uintptr_t)a);
  ASSERT_EQ(writes(s, "write", b, 700), 0);
  ASSERT_EQ(reads(s, "read", b, 1024), 0);
  ASSERT_OK(orCacheFree(b));
  char *c = block(1000, s);
  ASSERT_EQ(reads(s, "read", c, 1000), 1);
}

TEST(sanitizer_counts_copies_and_fills_as_writes) {
  orStream_t s = check();
  char *a = block(1000, s), *b = block(1000, s);
  ASSERT_OK(orMemsetAsync(a, 0, 1000, s));
  ASSERT_OK(orMemcpyAsync(b, a, 1000, orMemcpyDeviceToDevice, s));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
  ASSERT_EQ(reads(s, "read", b, 1000), 0);
  char *c = block(1000, s), *host = pinnedMemory(1000);
  ASSERT_OK(orMemcpyAsync(b, c, 1000, orMemcpyDeviceToDevice, s)); /* as it is */
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
  ASSERT_OK(orMemcpyAsync(host, c, 1000, orMemcpyDeviceToHost, s));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
}

TEST(sanitizer_carries_fresh_memory_on_with_a_copy) {
  orStream_t s = check();
  char *a = block(1000, s), *b = block(1000, s);
  ASSERT_EQ(writes(s, "write", a + 100, 100), 0);
  ASSERT_EQ(writes(s, "write", a + 300, 100), 0);
  ASSERT_OK(orMemcpyAsync(b + 10, a + 90, 500, orMemcpyDeviceToDevice, s));
  ASSERT_EQ(reads(s, "read", b + 20, 100), 0);
  ASSERT_EQ(reads(s, "read", b + 220, 100), 0);
  ASSERT_EQ(reads(s, "before", b + 19, 1), 1);
  ASSERT_EQ(reads(s, "between", b + 120, 1), 2);
  ASSERT_EQ(reads(s, "behind", b + 320, 1), 3);
}

/* What is behind the source's block is nobody's. */
TEST(sanitizer_carries_on_what_is_fresh_of_a_source) {
  orStream_t s = check();
  char *a = block(1000, s), *b = block(1000, s);
  ASSERT_OK(orMemcpyAsync(b + 10, a + 990, 30, orMemcpyDeviceToDevice, s));
  ASSERT_EQ(reads(s, "read", b + 20, 20), 0);
  ASSERT_EQ(reads(s, "read", b + 19, 1), 1);
}

/* An operator whose output is its input reads what was there before its own write. */
TEST(sanitizer_judges_the_reads_of_a_call_before_its_writes) {
  orStream_t s = check();
  char *a = block(1000, s);
  orMemoryAccess both[] = {{.data = a, .width = 1000, .write = 1}, {.data = a, .width = 1000}};
  ASSERT_OK(orSanitizerAccess(s, "both", both, 2));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
}

TEST(sanitizer_refuses_a_read_of_fresh_memory_each_time) {
  orStream_t s = defaultOf(0);
  orSanitizerInitcheck(1);
  sanitizeStrictly();
  char *a = block(1000, s);
  ASSERT_EQ(reads(s, "read", a, 4), 1);
  ASSERT_EQ(reads(s, "read", a, 4), 1);
  ASSERT_EQ(writes(s, "write", a, 4), 0);
  ASSERT_EQ(reads(s, "read", a, 4), 0);
}

static orError_t allocates(void *args) { return orCacheMalloc(*(void ***)args, 1000, 0); }

TEST(sanitizer_does_not_judge_what_a_task_allocates) {
  static void *result;
  void **at = &result;
  orStream_t s = check();
  orLaunch launch = {.size = sizeof launch,
                     .stream = s,
                     .fn = allocates,
                     .args = &at,
                     .args_size = sizeof at,
                     .name = "allocates"};
  ASSERT_OK(orLaunchKernelEx(&launch));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT(result != NULL);
  ASSERT_EQ(reads(s, "read", result, 1000), 0);
}

/* Compared with a byte for each byte. */
TEST(sanitizer_fresh_memory_against_a_model) {
  enum { SPAN = 500, ROUNDS = 4000 };
  orStream_t s = check();
  unsigned seed = 7;
  char written[SPAN];
  for (int round = 0; round < ROUNDS; round++) {
    static char *a;
    if (round % 40 == 0) {
      if (a) ASSERT_OK(orCacheFree(a));
      a = block(SPAN, s);
      memset(written, 0, sizeof written);
    }
    size_t width = 1 + (size_t)rand_r(&seed) % 7, pitch = width + (size_t)rand_r(&seed) % 70;
    size_t rows = 1 + (size_t)rand_r(&seed) % 6, hull = (rows - 1) * pitch + width;
    size_t at = (size_t)rand_r(&seed) % (SPAN - hull + 1);
    bool write = rand_r(&seed) % 2, fresh = false;
    for (size_t i = 0; i < rows; i++)
      for (size_t j = 0; j < width; j++) fresh |= !written[at + i * pitch + j];
    orSanitizerClearReports();
    ASSERT_EQ(columns(s, a + at, width, rows, pitch, write) != 0, fresh && !write);
    for (size_t i = 0; i < rows; i++) memset(written + at + i * pitch, 1, width);
  }
}

/* ---- What is not known exactly ---- */

static uint64_t some(orStream_t stream, const char *operation, const void *data, size_t bytes,
                     uint32_t write) {
  return tellAccess(stream, operation, data, bytes, write | OR_ACCESS_PARTIAL);
}

TEST(sanitizer_says_which_conflicts_are_possible_ones) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  ASSERT_EQ(some(s0, "scatter", a, 1000, OR_ACCESS_WRITES), 0);
  ASSERT_EQ(some(s1, "gather", a, 1000, 0), 1);
  orRaceReport r = reportAt(1);
  ASSERT_EQ(r.earlier.write, OR_ACCESS_WRITES | OR_ACCESS_PARTIAL);
  ASSERT_EQ(r.later.write, OR_ACCESS_PARTIAL);
  ASSERT_EQ(orSanitizerPossible(0), 1);
  ASSERT_EQ(some(s1, "scatter", a, 1000, OR_ACCESS_WRITES), 0);
  ASSERT_EQ(orSanitizerPossible(1), 0);
  ASSERT_EQ(some(s1, "scatter", a, 1000, OR_ACCESS_WRITES), 2);
}

/* It may have left the bytes alone that the first access touched. */
TEST(sanitizer_keeps_what_is_behind_an_access_to_some_bytes) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  orSanitizerPossible(0);
  char *a = deviceMemory(MIB);
  ASSERT_EQ(writes(s0, "write", a, 1000), 0);
  ASSERT_EQ(some(s0, "scatter", a, 1000, OR_ACCESS_WRITES), 0);
  ASSERT_EQ(reads(s1, "read", a, 10), 1);
}

/* What has too many dimensions is read as its hull, of which not all need be written. */
TEST(sanitizer_reports_no_read_of_a_hull) {
  orMemoryAccess six = {.width = 1, .dims = 6};
  orStream_t s = check();
  char *a = block(8 * KIB, s);
  six.data = a;
  for (int i = 0; i < 6; i++) {
    six.count[i] = 2;
    six.stride[i] = (size_t)3 << 2 * i;
  }
  for (int bits = 0; bits < 64; bits++) {
    size_t at = 0;
    for (int i = 0; i < 6; i++)
      if (bits >> i & 1) at += six.stride[i];
    ASSERT_EQ(writes(s, "write", a + at, 1), 0);
  }
  ASSERT_OK(orSanitizerAccess(s, "read", &six, 1));
  ASSERT_CLEAN();
}

TEST(sanitizer_takes_fresh_memory_that_is_touched_in_part_as_written) {
  orStream_t s = check();
  char *a = block(1000, s);
  ASSERT_EQ(some(s, "gather", a, 1000, 0), 0);
  ASSERT_EQ(some(s, "scatter", a, 1000, OR_ACCESS_WRITES), 0);
  ASSERT_EQ(reads(s, "read", a, 1000), 0);
}

TEST(sanitizer_peeks_at_what_the_host_knows) {
  orStream_t s = defaultOf(0);
  char *a = deviceMemory(KIB), *b = deviceMemory(KIB), got[4];
  ASSERT_EQ(orSanitizerPeek(got, a, 4), orErrorNotReady); /* it is off */
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemsetAsync(a, 1, KIB, s));
  sanitize();
  ASSERT_OK(orMemsetAsync(b, 2, KIB, s));
  ASSERT_EQ(orSanitizerPeek(got, a, 4), orErrorNotReady);
  ASSERT_EQ(orSanitizerPeek(got, b, 4), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orSanitizerPeek(got, a + 8, 4));
  ASSERT_EQ(got[3], 1);
  ASSERT_OK(orSanitizerPeek(got, b, 4));
  ASSERT_EQ(got[0], 2);
  ASSERT_OK(orMemsetAsync(b, 3, KIB, s)); /* done or not: the host does not know */
  ASSERT_EQ(orSanitizerPeek(got, b, 4), orErrorNotReady);
  ASSERT_EQ(orSanitizerPeek(got, b + KIB - 2, 4), orErrorInvalidValue);
  ASSERT_EQ(orSanitizerPeek(got, got, 4), orErrorInvalidValue);
}

/* ---- Kernels of one's own ---- */

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

static uint64_t launchOn(orStream_t stream, const void *data, size_t bytes, int write,
                         unsigned flags) {
  orAccess touched = {data, bytes, write};
  orLaunch l = {.size = sizeof l,
                .stream = stream,
                .fn = nothing,
                .accesses = &touched,
                .access_count = 1,
                .name = "my_kernel",
                .flags = flags};
  ASSERT_OK(orLaunchKernelEx(&l));
  return orSanitizerFound(NULL, NULL);
}

TEST(sanitizer_compares_what_a_launch_says_that_it_touches) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  ASSERT_EQ(launchOn(s0, a, 100, 1, 0), 0);
  ASSERT_EQ(launchOn(s1, a + 100, 100, 1, 0), 0);
  ASSERT_EQ(launchOn(s1, a, 10, 0, orLaunchTold), 0);
  ASSERT_EQ(launchOn(s1, a, 10, 0, 0), 1);
  ASSERT_EQ(strcmp(reportAt(1).later.operation, "my_kernel"), 0);
  waitStream(s1, s0);
  ASSERT_EQ(launchOn(s1, a, 100, 1, 0), 0);
}

TEST(sanitizer_knows_nothing_fresh_after_a_kernel_that_says_nothing) {
  orStream_t s = check();
  char *a = block(1000, s);
  ASSERT_EQ(launchOn(s, a, 10, 1, 0), 0);
  ASSERT_OK(orLaunchSleep(s, 0));
  ASSERT_EQ(reads(s, "read", a + 10, 10), 1);
  orLaunch silent = {.size = sizeof silent, .stream = s, .fn = nothing, .name = "silent"};
  ASSERT_OK(orLaunchKernelEx(&silent));
  ASSERT_EQ(reads(s, "read", a, 1000), 0);
}

/* ---- The order that there was ---- */

TEST(sanitizer_tells_the_waits_between_two_accesses) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(MIB);
  waitStream(s2, s0); /* before both, and of others */
  waitStream(s1, s0);
  ASSERT_EQ(writes(s0, "write", a, 100), 0);
  waitStream(s1, s2);
  waitStream(s1, s1); /* no wait */
  ASSERT_EQ(reads(s1, "read", a, 100), 1);
  waitStream(s1, s0);
  orRaceOrder order = {.size = sizeof order};
  ASSERT_OK(orSanitizerOrder(1, &order));
  ASSERT_EQ(order.count, 2);
  ASSERT_EQ(order.edges[0].from, s0);
  ASSERT_EQ(order.edges[0].to, s1);
  ASSERT(order.edges[0].recorded < order.edges[0].waited);
  ASSERT(order.edges[0].waited < order.earlier);
  ASSERT_EQ(order.edges[1].from, s2);
  ASSERT_EQ(order.edges[1].to, s1);
  ASSERT(order.edges[1].recorded > order.earlier);
  ASSERT(order.edges[1].waited < order.later);
  ASSERT_EQ(orSanitizerOrder(2, &order), orErrorInvalidValue);
  ASSERT_EQ(orSanitizerOrder(1, NULL), orErrorInvalidValue);
}
