/*
 * The sanitizer: who is told of a conflict and how often, and what its access leaves behind.
 */
#include <stdlib.h>

#include "sanitizer_helpers.h"

static uint64_t tell(orStream_t stream, const char *operation, const orMemoryAccess *accesses,
                     size_t count) {
  ASSERT_OK(orSanitizerAccess(stream, operation, accesses, count));
  return orSanitizerFound(NULL, NULL);
}

static size_t keptCount(void) {
  orRaceReport kept[8];
  size_t count;
  ASSERT_OK(orSanitizerReports(1, kept, sizeof(orRaceReport), 8, &count, NULL));
  return count;
}

/* ---- What is in conflict is not queued ---- */

TEST(sanitizer_tells_each_time_of_what_is_refused) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "first", a, KIB);
  for (int i = 0; i < 5; i++) ASSERT_EQ(writes(s1, "second", a, KIB), 1);
  ASSERT_EQ(writes(s1, "other", a, KIB), 2);
  ASSERT_EQ(reportCount(), 2);
  waitStream(s1, s0);
  ASSERT_EQ(writes(s1, "second", a, KIB), 0);
}

/* Of none of its accesses anything is left, decided or not. */
TEST(sanitizer_does_not_remember_what_is_refused) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB), *b = deviceMemory(4 * KIB), *c = deviceMemory(4 * KIB);
  writes(s0, "first", a, KIB);
  orEvent_t gate = closeGate(s2);
  reads(s2, "behind", c, KIB);
  orMemoryAccess three[] = {{.data = b, .width = KIB, .write = 1},
                            {.data = c, .width = KIB, .write = 1},
                            {.data = a, .width = KIB, .write = 1}};
  ASSERT_EQ(tell(s1, "refused", three, 3), 1);
  openGate(gate);
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
  for (int i = 0; i < 3; i++) ASSERT_EQ(writes(i == 1 ? s2 : s0, "next", three[i].data, KIB), 0);
  ASSERT_EQ(reportCount(), 1);
  ASSERT_EQ(writes(s1, "refused", a, KIB), 2); /* not with itself, but with what is new */
  ASSERT_STR(reportAt(2).earlier.operation, "next");
}

/* An operator of which one part is refused is not queued. */
TEST(sanitizer_does_not_remember_what_is_told_after_a_conflict) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB), *host = pinnedMemory(KIB);
  ASSERT_OK(orMemcpyAsync(host, a, KIB, orMemcpyDeviceToHost, s0));
  orMemoryAccess of_host = {.data = host, .width = 4};
  ASSERT_OK(orSanitizerAccess(0, "aten::mul", &of_host, 1));
  ASSERT_EQ(writes(s1, "aten::mul", a + KIB, KIB), 1);
  ASSERT_EQ(writes(s0, "next", a + KIB, KIB), 0);
  ASSERT_EQ(reportCount(), 1);
}

TEST(sanitizer_remembers_copies_in_conflict) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB);
  ASSERT_OK(orMemsetAsync(a, 1, KIB, s0));
  synchronizeUnseen(s0);
  ASSERT_OK(orMemsetAsync(a, 2, KIB, s1));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  waitStream(s2, s0);
  ASSERT_EQ(reads(s2, "read", a, KIB), 2); /* with the second one, which was queued */
  ASSERT_EQ(reportAt(2).earlier.stream, s1);
}

/* What conflicts in other memory alone is queued. */
TEST(sanitizer_remembers_what_unknown_memory_does_not_refuse) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB), *other = malloc(KIB);
  orMemoryAccess both[] = {{.data = other, .width = KIB, .write = 1},
                           {.data = a, .width = KIB, .write = 1}};
  ASSERT_EQ(tell(s0, "first", both, 1), 0);
  ASSERT_EQ(tell(s1, "second", both, 2), 0);
  ASSERT_EQ(writes(s0, "third", a, KIB), 1);
  ASSERT_STR(reportAt(1).earlier.operation, "second");
  free(other);
}

TEST(sanitizer_remembers_what_is_only_warned_of) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "first", a, KIB);
  ASSERT_EQ(writes(s1, "second", a, KIB), 1);
  ASSERT_EQ(writes(s0, "first", a, KIB), 2);
  ASSERT_EQ(writes(s1, "second", a, KIB), 0); /* known */
  ASSERT_EQ(writes(s0, "first", a, KIB), 0);
}

/* All that is kept has been another stream's since it replaced this stream's. */
TEST(sanitizer_keeps_no_refused_access_to_what_another_stream_took_over) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  orEvent_t event;
  ASSERT_OK(orEventCreate(&event));
  sanitizeStrictly();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "first", a, KIB);
  ASSERT_OK(orEventRecord(event, s0));
  ASSERT_OK(orStreamWaitEvent(s1, event));
  ASSERT_EQ(writes(s1, "second", a, KIB), 0);
  ASSERT_EQ(writes(s0, "refused", a, KIB), 1);
  ASSERT_EQ(writes(s1, "third", a, KIB), 0);
  ASSERT_OK(orEventDestroy(event));
}

/* ---- More than are kept ---- */

TEST(sanitizer_tells_of_more_than_are_kept) {
  for (uint32_t refuse = 0; refuse < 2; refuse++) {
    orStream_t s0 = defaultOf(0), s1 = newStream();
    orSanitizerOptions options = {.size = sizeof options, .reports = 2};
    ASSERT_EQ(orSanitizerRefuse(refuse), 0);
    ASSERT_OK(orSanitizerEnable(&options));
    char *a = deviceMemory(4 * KIB);
    writes(s0, "first", a, KIB);
    for (size_t i = 0; i < 8; i++) ASSERT_EQ(writes(s1, "second", a + i * 8, 8), i + 1);
    ASSERT_EQ(reportCount(), 8);
    ASSERT_EQ(keptCount(), 2);
    ASSERT_OK(orSanitizerDisable());
  }
}

/* ---- What is told ---- */

static atomic_int alive;

static void *captureStack(void *context) {
  (void)context;
  atomic_fetch_add(&alive, 1);
  return malloc(1); /* a sanitizer of the compiler sees it used too late */
}

static void releaseStack(void *stack, void *context) {
  (void)context;
  atomic_fetch_sub(&alive, 1);
  free(stack);
}

static void sanitizeWithStacks(size_t reports) {
  orSanitizerOptions options = {
      .size = sizeof options, .capture = captureStack, .release = releaseStack, .reports = reports};
  orSanitizerRefuse(1);
  ASSERT_OK(orSanitizerEnable(&options));
}

static void lookAt(const orRaceReport *report, void *context) {
  *(orRaceReport *)context = *report;
  *(char *)report->earlier.stack = *(char *)report->later.stack = 1;
  ASSERT_GE(reportCount(), 1); /* no lock is held */
}

/* Of this call, not of the one that is kept. */
TEST(sanitizer_tells_the_stacks_of_each_call) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(1);
  char *a = deviceMemory(4 * KIB);
  orMemoryAccess access = {.data = a, .width = KIB, .write = 1};
  orRaceReport told[2];
  writes(s0, "other", a + KIB, KIB);
  for (int i = 0; i < 2; i++) {
    writes(s0, "first", a, KIB);
    ASSERT_OK(orSanitizerAccess(s1, "second", &access, 1));
    ASSERT_EQ(orSanitizerFound(lookAt, &told[i]), 1);
    ASSERT_EQ(told[i].number, 1);
  }
  ASSERT(told[0].earlier.stack != told[1].earlier.stack);
  ASSERT_STR(told[1].memory, "openreg:0");
  ASSERT_CONTAINS(told[1].advice, "s1.wait_stream(s0) before second");
  access.data = a + KIB;
  ASSERT_OK(orSanitizerAccess(s1, "third", &access, 1));
  ASSERT_EQ(orSanitizerFound(lookAt, &told[0]), 2); /* not kept */
  ASSERT_STR(told[0].later.operation, "third");
  ASSERT_EQ(orSanitizerFound(lookAt, &told[0]), 0);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(alive, 0);
}

typedef struct orRacing {
  char *memory;
  orStream_t streams[2];
} orRacing;

static void raceUnasked(int thread, void *context) {
  const orRacing *r = context;
  orMemoryAccess access = {.data = r->memory, .width = KIB, .write = 1};
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0); /* of this thread nothing yet */
  for (int i = 0; i < 3; i++) ASSERT_OK(orSanitizerAccess(r->streams[1], "second", &access, 1));
  if (thread) ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
}

TEST(sanitizer_tells_the_thread_that_found_it) {
  orRacing r = {.streams = {defaultOf(0), newStream()}};
  sanitizeWithStacks(0);
  r.memory = deviceMemory(4 * KIB);
  writes(r.streams[0], "first", r.memory, KIB);
  for (int i = 0; i < 5; i++) runThreads(4, raceUnasked, &r);
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 0);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(alive, 0);
}

TEST(sanitizer_tells_nothing_that_was_cleared) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitizeWithStacks(0);
  char *a = deviceMemory(4 * KIB);
  ASSERT_OK(orMemsetAsync(a, 1, KIB, s0));
  synchronizeUnseen(s0);
  ASSERT_OK(orMemsetAsync(a, 1, KIB, s1));
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(writes(s0, "kept", a + KIB, KIB), 0); /* nothing refuses it */
  ASSERT_EQ(writes(s0, "next", a, KIB), 1);
  ASSERT_STR(reportAt(1).later.operation, "next");
  ASSERT_EQ(reads(s1, "read", a + KIB, KIB), 2);
  ASSERT_OK(orSanitizerDisable());
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_EQ(alive, 0);
}
