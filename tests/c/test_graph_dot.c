/*
 * Graphs as DOT. tests/graphs/test_graph_dump.py tests the picture.
 */
#include <stdio.h>
#include <unistd.h>

#include "gate.h"
#include "openreg_graph.h"

/* The file's text, which is gone then; to be freed. */
static char *take(const char *path) {
  FILE *file = fopen(path, "re");
  ASSERT(file);
  ASSERT_EQ(fseek(file, 0, SEEK_END), 0);
  size_t size = (size_t)ftell(file);
  rewind(file);
  char *text = malloc(size + 1);
  ASSERT_EQ(fread(text, 1, size, file), size);
  text[size] = 0;
  fclose(file);
  ASSERT_EQ(unlink(path), 0);
  return text;
}

static int countOf(const char *text, const char *part) {
  int count = 0;
  for (; (text = strstr(text, part)); text++) count++;
  return count;
}

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

static void nothingOnHost(void *data) { (void)data; }

static void queue(orStream_t stream, const char *name) {
  orLaunch l = {.size = sizeof l, .stream = stream, .fn = nothing, .name = name};
  ASSERT_OK(orLaunchKernelEx(&l));
}

static void order(orStream_t before, orStream_t after) {
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventRecord(e, before));
  ASSERT_OK(orStreamWaitEvent(after, e));
  ASSERT_OK(orEventDestroy(e));
}

/* Ends the capture. To be freed. */
static char *draw(orStream_t stream) {
  char path[64];
  orGraph_t graph;
  snprintf(path, sizeof path, "/tmp/graph.drawing-%dot", getpid());
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  ASSERT_OK(orGraphDebugDotPrint(graph, path));
  ASSERT_OK(orGraphDestroy(graph));
  return take(path);
}

static void assertEdges(const char *dot, const char *const *edges, int count) {
  ASSERT_EQ(countOf(dot, "->"), count);
  for (int i = 0; i < count; i++) ASSERT_CONTAINS(dot, edges[i]);
}
#define ASSERT_EDGES(dot, ...)                                       \
  do {                                                               \
    const char *const edges_[] = {__VA_ARGS__};                      \
    assertEdges(dot, edges_, (int)(sizeof edges_ / sizeof *edges_)); \
  } while (0)

TEST(graph_dot_has_each_kind_of_node) {
  orStream_t s = newStream();
  char *pinned, *device;
  ASSERT_OK(orMallocHost((void **)&pinned, 64));
  ASSERT_OK(orMalloc((void **)&device, 64));
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orMemcpyAsync(device, pinned, 48, orMemcpyDefault, s));
  ASSERT_OK(orMemsetAsync(device, 7, 24, s));
  ASSERT_OK(orLaunchHostFunc(s, nothingOnHost, NULL));
  queue(s, "aten::mm");
  queue(s, "last");
  char *dot = draw(s);
  ASSERT_CONTAINS(dot, "label=\"0 Memcpy HtoD\\n48 bytes\"");
  ASSERT_CONTAINS(dot, "label=\"1 Memset\\n24 bytes = 7\"");
  ASSERT_CONTAINS(dot, "label=\"2 orLaunchHostFunc\\nhost function\"");
  ASSERT_CONTAINS(dot, "label=\"3 aten::mm\\nkernel\"");
  ASSERT_EDGES(dot, "n0 -> n1;", "n1 -> n2;", "n2 -> n3;", "n3 -> n4;");
  free(dot);
}

/* The events' records and waits are edges between the nodes around them. */
TEST(graph_dot_has_forks_and_joins_as_edges) {
  orStream_t s = newStream(), left = newStream(), right = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "first");
  order(s, left);
  queue(left, "on_left");
  queue(s, "beside");
  order(s, right);
  order(left, right); /* which has two before its first node */
  queue(right, "on_right");
  order(right, s);
  order(left, s);
  queue(s, "last");
  queue(s, "after");
  char *dot = draw(s);
  ASSERT_EDGES(dot, "n0 -> n1;", "n0 -> n2;", "n2 -> n3;", "n1 -> n3;", "n2 -> n4;", "n3 -> n4;",
               "n1 -> n4;", "n4 -> n5;");
  ASSERT_EQ(countOf(dot, "subgraph"), 3);
  ASSERT(strstr(dot, "label=\"stream 1\"") < strstr(dot, "on_left"));
  ASSERT(strstr(dot, "on_left") < strstr(dot, "label=\"stream 2\""));
  free(dot);
}

/* A stream that only hands an event on has no node: the edge is from the node before. */
TEST(graph_dot_sees_through_a_stream_without_nodes) {
  orStream_t s = newStream(), relay = newStream(), far = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "first");
  order(s, relay);
  order(relay, far);
  queue(far, "far");
  order(far, s);
  char *dot = draw(s);
  ASSERT_EDGES(dot, "n0 -> n1;");
  free(dot);
}

TEST(graph_dot_escapes_names) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "a<b>&\"c\\\n\xff");
  char *dot = draw(s);
  ASSERT_CONTAINS(dot, "\"0 a<b>&\\\"c\\\\\\\\x0a\\\\xff\\nkernel\"");
  free(dot);
}

TEST(graph_dot_of_a_long_graph) {
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "first");
  order(s, side);
  queue(side, "on_side");
  for (int i = 0; i < 3000; i++) queue(s, "tiny");
  order(side, s);
  queue(s, "last");
  char *dot = draw(s);
  ASSERT_EQ(countOf(dot, "->"), 3003);
  free(dot);
}

TEST(graph_dot_of_nothing) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  char *dot = draw(s);
  ASSERT_CONTAINS(dot, "digraph");
  free(dot);
}

TEST(graph_dot_names_what_it_cannot_write) {
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "one");
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, "/tmp/no such place/a.dot"), orErrorSystem,
                 "cannot write \"/tmp/no such place/a.dot\": No such file or directory");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, "/dev/full"), orErrorSystem,
                 "cannot write \"/dev/full\": No space left on device");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, NULL), orErrorInvalidValue, "null path");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph + 1, "/tmp/a.dot"), orErrorInvalidResourceHandle, "");
  ASSERT_OK(orGraphDestroy(graph));
}
