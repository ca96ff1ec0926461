/*
 * The sanitizer: a missing orCacheRecordStream is found whether or not the block is handed out
 * again.
 */
#include "sanitizer_helpers.h"

enum { BYTES = 4 * KIB };

/* A block of `from` that `side` uses when it is freed. Its neighbour is not free. */
static char *freedInUse(orStream_t from, orStream_t side, size_t bytes) {
  char *a = block(bytes, from);
  block(KIB, from);
  waitStream(side, from);
  writes(side, "aten::add_", a, bytes);
  ASSERT_OK(orCacheFree(a));
  return a;
}

static void judge(void) { ASSERT_OK(orSanitizerJudgeFrees()); }

/* Frees a smaller block, so that the allocator prefers that to `a`. */
static char *otherThan(const char *a, char *b, orStream_t stream) {
  ASSERT_OK(orCacheFree(b));
  char *taken = block(KIB, stream);
  ASSERT_PTR(taken, b);
  ASSERT_NE(taken, a);
  return taken;
}

TEST(sanitizer_judges_a_free_by_the_first_allocation_that_could_have_the_block) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *smaller = block(KIB, s0), *gap = block(KIB, s0);
  char *a = freedInUse(s0, side, BYTES);
  char *b = otherThan(a, smaller, s0);
  ASSERT_EQ(writes(s0, "aten::fill_", b, KIB), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.memory, "openreg:0, reused without record_stream");
  ASSERT_STR(r.earlier.operation, "aten::add_");
  ASSERT_PTR(r.begin, b);
  ASSERT_CONTAINS(r.advice, "t.record_stream(s) before the tensor t of aten::add_ is freed");
  writes(s0, "again", b, KIB); /* judged once */
  judge();
  ASSERT_EQ(reportCount(), 1);
  ASSERT_OK(orCacheFree(gap));
}

/* By stream, pool and size; the owner's stream has waited; a host has. */
TEST(sanitizer_judges_a_free_by_no_other_allocation) {
  orStream_t s0 = defaultOf(0), side = newStream(), third = newStream();
  sanitize();
  freedInUse(s0, side, 2 * MIB);
  writes(s0, "other pool", block(KIB, s0), KIB);
  freedInUse(s0, side, BYTES);
  writes(third, "other stream", block(KIB, third), KIB);
  writes(s0, "larger", block(2 * BYTES, s0), 2 * BYTES);
  ASSERT_CLEAN();
  waitStream(s0, side);
  writes(s0, "after the wait", block(KIB, s0), KIB);
  freedInUse(s0, side, BYTES);
  ASSERT_OK(orStreamSynchronize(side));
  writes(s0, "after the host's wait", block(KIB, s0), KIB);
  judge();
  ASSERT_CLEAN();
}

TEST(sanitizer_judges_what_is_freed_in_use_at_the_end) {
  orStream_t s0 = defaultOf(0), side = newStream(), third = newStream();
  sanitize();
  char *a = freedInUse(s0, side, BYTES);
  freedInUse(third, side, BYTES);
  waitStream(third, side);
  judge();
  judge();
  ASSERT_EQ(reportCount(), 1);
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.memory, "openreg:0, freed without record_stream");
  ASSERT_STR(r.later.operation, "free");
  ASSERT_EQ(r.later.write, OR_ACCESS_FREES);
  ASSERT_EQ(r.later.stream, s0);
  ASSERT_PTR(r.begin, a);
  ASSERT_CONTAINS(r.advice, "t.record_stream(s) before the tensor t of aten::add_ is freed");
}

static void judgesNothing(orStream_t side) {
  judge();
  ASSERT_CLEAN();
  ASSERT_OK(orStreamSynchronize(side));
}

/* Recorded, waited for by the host, freed by an exception, or reported only if asked for. */
TEST(sanitizer_judges_no_free_that_is_right_at_the_end) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *a = block(BYTES, s0);
  writes(side, "aten::add_", a, BYTES);
  ASSERT_OK(orCacheRecordStream(a, side));
  ASSERT_OK(orCacheFree(a));
  judgesNothing(side);
  freedInUse(s0, side, BYTES);
  ASSERT_OK(orStreamSynchronize(side));
  judgesNothing(side);
  a = block(BYTES, s0);
  writes(side, "aten::add_", a, BYTES);
  orSanitizerIgnore(1);
  ASSERT_OK(orCacheFree(a));
  orSanitizerIgnore(0);
  judgesNothing(side);
  freedInUse(s0, side, BYTES);
  orSanitizerPossible(0);
  judgesNothing(side);
  orSanitizerPossible(1);
}

/* A part of the block that no use touches may be another's. */
TEST(sanitizer_judges_the_part_of_a_freed_block_that_is_in_use) {
  orStream_t s0 = defaultOf(0), side = newStream();
  sanitize();
  char *smaller = block(KIB, s0), *gap = block(KIB, s0), *next = block(KIB, s0),
       *last = block(KIB, s0);
  char *a = block(BYTES, s0);
  writes(side, "aten::add_", a + KIB, KIB);
  ASSERT_OK(orCacheFree(a));
  char *b = otherThan(a, smaller, s0);
  ASSERT_EQ(writes(s0, "first", b, KIB), 0);
  b = otherThan(a, next, s0);
  ASSERT_EQ(writes(s0, "second", b, KIB), 1);
  ASSERT_OK(orCacheFree(gap));
  ASSERT_OK(orCacheFree(last));
}

static void *freedStack(void *context) {
  ++*(int *)context;
  return context;
}
static void releaseStack(void *stack, void *context) { (void)stack, (void)context; }

TEST(sanitizer_keeps_the_stack_of_a_free_that_is_judged) {
  orStream_t s0 = defaultOf(0), side = newStream();
  int captured = 0;
  orSanitizerOptions options = {
      .size = sizeof options, .capture = freedStack, .release = releaseStack, .context = &captured};
  ASSERT_OK(orSanitizerEnable(&options));
  ASSERT_OK(orCacheFree(block(BYTES, s0)));
  ASSERT_EQ(captured, 0);
  freedInUse(s0, side, BYTES);
  ASSERT_EQ(captured, 2); /* of the write, and of the free */
  judge();
  ASSERT_PTR(reportAt(1).later.stack, &captured);
  ASSERT_OK(orSanitizerDisable());
}
