/*
 * The sanitizer: late accesses, whose bytes are known once the task runs.
 */
#include "openreg_graph.h"
#include "openreg_late.h"
#include "sanitizer_helpers.h"

enum { ROW = 8, ROWS = 4 };

static char *rows(void) { return deviceMemory(1 << 12); }

/* An access to rows of memory that is ROWS wide, or of single columns if they have gaps. */
static orLateAccess *lateOn(orStream_t stream, const char *operation, void *data, uint32_t write) {
  orLateAccess *late = orSanitizerLate(data);
  ASSERT_EQ(late != NULL, true);
  orMemoryAccess a = {.data = data, .width = ROWS * ROW, .write = write | OR_ACCESS_LATE};
  ASSERT_OK(orSanitizerAccessLate(stream, operation, &a, 1, late));
  return late;
}

static void resolveRow(orLateAccess *late, size_t row) {
  orMemoryAccess slice = {.width = ROW};
  size_t offset = row * ROW;
  ASSERT_OK(orSanitizerResolve(late, &slice, &offset, 1));
}

/* A column of ROWS bytes at a distance of a row. */
static void resolveColumn(orLateAccess *late, size_t column) {
  orMemoryAccess slice = {.width = 1, .dims = 1, .count = {ROWS}, .stride = {ROW}};
  ASSERT_OK(orSanitizerResolve(late, &slice, &column, 1));
}

static void over(orLateAccess *late) { orSanitizerLateOver(late); }

TEST(sanitizer_decides_late_accesses_by_their_bytes) {
  sanitize();
  char *x = rows();
  orStream_t s = newStream();
  for (size_t row = 0; row < 2; row++) { /* whichever of the two runs first */
    ASSERT_OK(orSanitizerClearReports());
    orLateAccess *read = lateOn(s, "gather", x, 0), *write = lateOn(defaultOf(0), "scatter", x, 1);
    ASSERT_EQ(reportCount(), 0);
    resolveRow(row ? write : read, 1);
    ASSERT_EQ(reportCount(), 0);
    resolveRow(row ? read : write, 1);
    ASSERT_EQ(reportCount(), 1);
    orRaceReport r = reportAt(1);
    ASSERT_EQ((uintptr_t)r.begin, (uintptr_t)x + ROW);
    ASSERT_EQ((uintptr_t)r.end, (uintptr_t)x + 2 * ROW);
    ASSERT_EQ(r.earlier.write | r.later.write, OR_ACCESS_WRITES);
    over(read);
    over(write);
    ASSERT_OK(orDeviceSynchronize());
    ASSERT_EQ(orSanitizerFound(NULL, NULL), 0); /* it may be about to queue */
    ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  }
}

TEST(sanitizer_forgets_late_accesses_to_other_bytes) {
  sanitizeStrictly();
  char *x = rows();
  orStream_t s = newStream();
  orLateAccess *one = lateOn(s, "index_put", x, 1), *two = lateOn(defaultOf(0), "index_put", x, 1);
  resolveRow(one, 0);
  resolveRow(two, 2);
  writes(defaultOf(0), "fill", x + ROW, ROW);
  orLateAccess *other = lateOn(s, "index_select", x, 0), *never = lateOn(s, "index_add", x, 1);
  resolveColumn(other, 1);
  over(never);                 /* it has not run */
  ASSERT_EQ(reportCount(), 2); /* of the column and rows 1 and 2 */
  ASSERT_OK(orSanitizerAwaitLate(0));
  ASSERT_EQ(reportCount(), 2);
  over(one);
  over(two);
  over(other);
}

TEST(sanitizer_keeps_earlier_late_accesses_beside_later_ones) {
  sanitize();
  char *x = rows();
  orStream_t s = newStream();
  orLateAccess *first = lateOn(s, "gather", x, 0), *second = lateOn(s, "gather", x, 0);
  resolveColumn(first, 3);
  resolveColumn(second, 4);
  ASSERT_EQ(writes(defaultOf(0), "fill", x + 4 + ROW, 1), 1);
  ASSERT_EQ(writes(defaultOf(0), "zero", x + 3 + ROW, 1), 2);
  ASSERT_EQ(writes(defaultOf(0), "one", x + 5 + ROW, 1), 0);
  ASSERT_EQ(reportAt(2).earlier.write, 0);
  over(first);
  over(second);
}

TEST(sanitizer_finds_a_known_late_access_at_the_call) {
  sanitizeStrictly();
  char *x = rows();
  orStream_t s = newStream();
  orLateAccess *write = lateOn(s, "index_put", x, 1);
  resolveRow(write, 1);
  ASSERT_EQ(reads(defaultOf(0), "sum", x + 2 * ROW, ROW), 0);
  ASSERT_EQ(reads(defaultOf(0), "sum", x, 2 * ROW), 1);
  orLateAccess *known = orSanitizerLate(x);
  resolveRow(known, 1);
  orMemoryAccess a = {.data = x, .width = ROWS * ROW, .write = OR_ACCESS_LATE};
  ASSERT_OK(orSanitizerAccessLate(defaultOf(0), "gather", &a, 1, known));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 2);
  over(write);
  over(known);
}

TEST(sanitizer_reports_late_accesses_that_never_run_as_possible) {
  sanitize();
  char *x = rows();
  orLateAccess *write = lateOn(newStream(), "index_put", x, 1);
  ASSERT_EQ(reads(defaultOf(0), "sum", x, ROW), 0);
  ASSERT_OK(orSanitizerAwaitLate(1));
  ASSERT_EQ(reportAt(1).earlier.write, OR_ACCESS_WRITES | OR_ACCESS_PARTIAL);
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  over(write);
}

TEST(sanitizer_decides_late_accesses_of_each_replay) {
  sanitize();
  char *x = rows();
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  orLateAccess *write = lateOn(s, "index_put", x, 1);
  orGraph_t graph;
  ASSERT_OK(orStreamEndCapture(s, &graph));
  for (size_t replay = 0; replay < 3; replay++) {
    ASSERT_OK(orGraphReplay(graph, s));
    reads(defaultOf(0), replay ? "sum" : "mean", x, ROW);
    ASSERT_OK(orStreamSynchronize(defaultOf(0)));
  }
  resolveRow(write, 1);
  resolveRow(write, 1);
  ASSERT_EQ(reportCount(), 0);
  resolveRow(write, 0);
  ASSERT_EQ(reportCount(), 1); /* the last one */
  ASSERT_EQ(strcmp(reportAt(1).later.operation, "sum"), 0);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orDeviceReset()); /* it does not run */
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_OK(orGraphReplay(graph, s));
  reads(defaultOf(0), "max", x, ROW);
  resolveRow(write, 0);
  ASSERT_EQ(reportCount(), 1);
  over(write);
  ASSERT_OK(orGraphDestroy(graph));
}

/* ---- threads ---- */

typedef struct Indexed {
  orLateAccess *late;
  size_t row;
} Indexed;

static orError_t indexKernel(void *args) {
  Indexed *i = *(Indexed **)args;
  orMemoryAccess slice = {.width = ROW};
  size_t offset = i->row * ROW;
  orSanitizerResolve(i->late, &slice, &offset, 1);
  orSanitizerLateOver(i->late);
  return orSuccess;
}

TEST(sanitizer_decides_late_accesses_of_workers) {
  sanitize();
  char *x = rows();
  orStream_t s = newStream();
  Indexed all[100];
  for (size_t i = 0; i < 100; i++) {
    all[i] = (Indexed){lateOn(i % 2 ? s : defaultOf(0), "index_put", x, 1), i % 3};
    launch(i % 2 ? s : defaultOf(0), indexKernel, &all[i]);
  }
  ASSERT_OK(orSanitizerAwaitLate(10000));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(reportCount(), 6); /* three rows, either stream first */
  for (uint64_t i = 1; i <= 6; i++) ASSERT_EQ(reportAt(i).later.write, OR_ACCESS_WRITES);
}
