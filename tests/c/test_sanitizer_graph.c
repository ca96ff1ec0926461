/*
 * The sanitizer: inputs of a graph that were freed, and outputs that no replay has written.
 */
#include <string.h>

#include "openreg_graph.h"
#include "sanitizer_helpers.h"

static orStream_t capturing(void) {
  orStream_t stream;
  ASSERT_OK(orStreamCreate(&stream));
  ASSERT_OK(orStreamBeginCapture(stream));
  return stream;
}

static orGraph_t captured(orStream_t stream) {
  orGraph_t graph;
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  return graph;
}

static void nameInput(const void *begin, size_t bytes, char name[64], void *seen) {
  ASSERT_EQ((uintptr_t)begin, *(uintptr_t *)seen);
  ASSERT_EQ(bytes >= 1000, true);
  strcpy(name, "x");
}

TEST(sanitizer_reports_replays_whose_input_was_freed) {
  sanitize();
  char *x = block(1000, defaultOf(0)), *y = block(1000, defaultOf(0));
  orStream_t s = capturing();
  reads(s, "add", x + 8, 8);
  reads(s, "again", x, 1000);
  ASSERT_OK(orSanitizerInputs(s, nameInput, &x));
  ASSERT_OK(orMemsetAsync(y, 1, 8, s));
  orGraph_t graph = captured(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reportCount(), 0);
  ASSERT_OK(orCacheFree(x));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  orRaceReport r = reportAt(1);
  ASSERT_EQ(r.kind, orReportFreedInput);
  ASSERT_EQ(strcmp(r.name, "x"), 0);
  ASSERT_EQ(strcmp(r.earlier.operation, "add"), 0);
  ASSERT_EQ(strcmp(r.later.operation, "free"), 0);
  ASSERT_EQ((uintptr_t)r.begin, (uintptr_t)x + 8);
  ASSERT_OK(orCacheFree(y));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(strcmp(reportAt(2).earlier.operation, "orMemsetAsync"), 0);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(sanitizer_leaves_checked_inputs_to_their_owner) {
  sanitize();
  char *x = block(1000, defaultOf(0));
  ASSERT_EQ(orSanitizerInputsChecked(defaultOf(0)), orErrorInvalidValue);
  orStream_t s = capturing();
  reads(s, "add", x, 8);
  ASSERT_EQ(orSanitizerInputs(s, NULL, NULL), orErrorInvalidValue);
  ASSERT_OK(orSanitizerInputsChecked(s));
  orGraph_t graph = captured(s);
  ASSERT_OK(orCacheFree(x));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reportCount(), 0);
}

TEST(sanitizer_reports_reads_before_the_first_replay) {
  sanitize();
  void *y;
  orMemPool_t pool;
  orStream_t s = capturing();
  ASSERT_OK(orMemPoolCreate(&pool, 0));
  ASSERT_OK(orCacheMallocFromPool(&y, 1000, s, pool));
  writes(s, "add", y, 1000);
  orGraph_t graph = captured(s);
  ASSERT_EQ(reads(s, "read", (char *)y + 8, 8), 1);
  ASSERT_EQ(reportAt(1).kind, orReportNotReplayed);
  ASSERT_EQ(strcmp(reportAt(1).advice, "a replay of the graph before read"), 0);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reads(s, "later", y, 8), 0);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_OK(orMemPoolRelease(pool));
}

TEST(sanitizer_reports_a_replaced_input_that_nothing_has_written) {
  sanitize();
  uint64_t id;
  orCaptureStatus status;
  char *x = block(1000, defaultOf(0));
  orStream_t s = capturing();
  ASSERT_OK(orStreamGetCaptureInfo(s, &status, &id));
  reads(s, "add", x, 8);
  orGraph_t graph = captured(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orSanitizerInputReplaced(id, x));
  writes(s, "copy", x, 8);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reportCount(), 0);
  ASSERT_OK(orSanitizerInputReplaced(id, x));
  ASSERT_OK(orSanitizerInputReplaced(id + 1, x));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reportAt(1).kind, orReportReplacedInput);
  orSanitizerPossible(0);
  ASSERT_OK(orSanitizerInputReplaced(id, x));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reportCount(), 1);
}

TEST(sanitizer_reports_what_a_layer_above_has_found) {
  sanitize();
  char *x = block(1000, defaultOf(0));
  orGraphFinding found = {.size = sizeof found,
                          .kind = orReportOverwritten,
                          .begin = x,
                          .bytes = 1000,
                          .stream = defaultOf(0),
                          .earlier = "replay"};
  ASSERT_EQ(orSanitizerFinding(&found), orErrorInvalidValue);
  found.later = "read";
  ASSERT_OK(orSanitizerFinding(&found));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  ASSERT_EQ(strcmp(reportAt(1).advice, "t.clone() of the output t before the next call"), 0);
  found.kind = orReportFirstCall;
  found.earlier = "SGD.step";
  ASSERT_OK(orSanitizerFinding(&found));
  ASSERT_EQ(strcmp(reportAt(2).advice, "a call of SGD.step before the capture"), 0);
  found.stream = 1;
  ASSERT_EQ(orSanitizerFinding(&found), orErrorInvalidResourceHandle);
}
