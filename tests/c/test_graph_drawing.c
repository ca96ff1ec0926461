/*
 * Graphs, drawn: what the DOT and the picture say.
 */
#include <stdio.h>
#include <unistd.h>

#include "gate.h"
#include "openreg_graph.h"

typedef struct Files {
  char dot[64], svg[64];
} Files;

static Files newFiles(void) {
  Files f;
  snprintf(f.dot, sizeof f.dot, "/tmp/graph.drawing-%d.dot", getpid());
  snprintf(f.svg, sizeof f.svg, "/tmp/graph.drawing-%d.svg", getpid());
  return f;
}

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

typedef struct Drawn {
  char *dot, *svg;
} Drawn;

/* Ends the capture. */
static Drawn draw(orStream_t stream) {
  Files f = newFiles();
  orGraph_t graph;
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  ASSERT_OK(orGraphDebugDotPrint(graph, f.dot));
  ASSERT_OK(orGraphDestroy(graph));
  return (Drawn){take(f.dot), take(f.svg)};
}

static void done(Drawn d) {
  free(d.dot);
  free(d.svg);
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

TEST(graph_drawing_has_each_kind_of_node) {
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
  Drawn d = draw(s);
  ASSERT_CONTAINS(d.dot, "label=\"0 Memcpy HtoD\\n48 bytes\"");
  ASSERT_CONTAINS(d.dot, "label=\"1 Memset\\n24 bytes = 7\"");
  ASSERT_CONTAINS(d.dot, "label=\"2 orLaunchHostFunc\\nhost function\"");
  ASSERT_CONTAINS(d.dot, "label=\"3 aten::mm\\nkernel\"");
  ASSERT_EDGES(d.dot, "n0 -> n1;", "n1 -> n2;", "n2 -> n3;", "n3 -> n4;");
  ASSERT_CONTAINS(d.svg, "<title>0 Memcpy HtoD, 48 bytes</title>");
  ASSERT_CONTAINS(d.svg, "width=\"1076\""); /* five columns */
  ASSERT_EQ(countOf(d.svg, "<title>"), 5);
  done(d);
}

/* The events' records and waits are edges between the nodes around them. */
TEST(graph_drawing_has_forks_and_joins_as_edges) {
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
  Drawn d = draw(s);
  ASSERT_EDGES(d.dot, "n0 -> n1;", "n0 -> n2;", "n2 -> n3;", "n1 -> n3;", "n2 -> n4;", "n3 -> n4;",
               "n1 -> n4;", "n4 -> n5;");
  ASSERT_EQ(countOf(d.dot, "subgraph"), 3);
  ASSERT(strstr(d.dot, "label=\"stream 1\"") < strstr(d.dot, "on_left"));
  ASSERT(strstr(d.dot, "on_left") < strstr(d.dot, "label=\"stream 2\""));
  ASSERT_EQ(countOf(d.svg, "class=\"order\""), 3);
  ASSERT_EQ(countOf(d.svg, "class=\"event\""), 5);
  ASSERT_CONTAINS(d.svg, ">stream 2<");
  done(d);
}

/* A stream that only hands an event on has no node: the edge is from the node before. */
TEST(graph_drawing_sees_through_a_stream_without_nodes) {
  orStream_t s = newStream(), relay = newStream(), far = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "first");
  order(s, relay);
  order(relay, far);
  queue(far, "far");
  order(far, s);
  Drawn d = draw(s);
  ASSERT_EDGES(d.dot, "n0 -> n1;");
  ASSERT_EQ(countOf(d.svg, ">stream 1<"), 0);
  ASSERT_EQ(countOf(d.svg, ">stream 2<"), 1);
  done(d);
}

TEST(graph_drawing_escapes_names) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "a<b>&\"c\\\n\xff");
  queue(s, "a_name_that_is_so_long_that_no_box_has_room_for_all_of_it");
  queue(s, "a_name_that_fills_its_box_to_the_end");
  Drawn d = draw(s);
  ASSERT_CONTAINS(d.dot, "\"0 a<b>&\\\"c\\\\\\\\x0a\\\\xff\\nkernel\"");
  ASSERT_CONTAINS(d.svg, ">a&#60;b&#62;&#38;&#34;c\\\\x0a\\xff<");
  ASSERT_CONTAINS(d.svg, ">a_name_that_is_so_long_that_no_bo...<");
  ASSERT_CONTAINS(d.svg, ">a_name_that_fills_its_box_to_the_end<");
  ASSERT_CONTAINS(d.svg,
                  "1 a_name_that_is_so_long_that_no_box_has_room_for_all_of_it, kernel</title>");
  done(d);
}

/* The width is that of any long graph; an edge that would lead down across others is a text. */
TEST(graph_drawing_of_a_long_graph_goes_down) {
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "first");
  order(s, side);
  queue(side, "on_side");
  for (int i = 0; i < 3000; i++) queue(s, "tiny");
  order(side, s);
  queue(s, "last");
  Drawn d = draw(s);
  int width = 0, height = 0;
  ASSERT_EQ(sscanf(strstr(d.svg, "width="), "width=\"%d\" height=\"%d\"", &width, &height), 2);
  ASSERT_LT(width, 2000);
  ASSERT_GT(height, 3000);
  ASSERT_EQ(countOf(d.svg, "<title>"), 3003);
  ASSERT_EQ(countOf(d.svg, ">after 1<"), 1);
  ASSERT_EQ(countOf(d.svg, "class=\"event\""), 1);
  ASSERT_EQ(countOf(d.svg, ">stream 1<"), 1); /* nowhere but where it has a node */
  ASSERT_EQ(countOf(d.svg, ">stream 2<"), 0);
  ASSERT_EQ(countOf(d.dot, "->"), 3003);
  done(d);
}

TEST(graph_drawing_of_nothing) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  Drawn d = draw(s);
  ASSERT_CONTAINS(d.dot, "digraph");
  ASSERT_CONTAINS(d.svg, "nodes 0, streams 1");
  ASSERT_CONTAINS(d.svg, "</svg>");
  done(d);
}

TEST(graph_drawing_names_what_it_cannot_write) {
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT_OK(orStreamBeginCapture(s));
  queue(s, "one");
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, "/tmp/no such place/a.dot"), orErrorSystem,
                 "cannot write \"/tmp/no such place/a.dot\": No such file or directory");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, "/dev/full"), orErrorSystem,
                 "cannot write \"/dev/full\": No space left on device");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, "/tmp/a.svg"), orErrorInvalidValue, "\"/tmp/a.svg\"");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph, NULL), orErrorInvalidValue, "null path");
  ASSERT_REFUSED(orGraphDebugDotPrint(graph + 1, "/tmp/a.dot"), orErrorInvalidResourceHandle, "");
  ASSERT_OK(orGraphDestroy(graph));
}

/* Of the last part of the path alone. */
TEST(graph_drawing_puts_the_picture_beside_it) {
  char directory[] = "/tmp/graph.drawing.XXXXXX", path[64], svg[64];
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT(mkdtemp(directory));
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orStreamEndCapture(s, &graph));
  const char *const names[][2] = {{"a.b.dot", "a.b.svg"}, {"a", "a.svg"}, {".a", ".a.svg"}};
  for (int i = 0; i < 3; i++) {
    snprintf(path, sizeof path, "%s/%s", directory, names[i][0]);
    snprintf(svg, sizeof svg, "%s/%s", directory, names[i][1]);
    ASSERT_OK(orGraphDebugDotPrint(graph, path));
    free(take(path));
    free(take(svg));
  }
  ASSERT_EQ(rmdir(directory), 0);
  ASSERT_OK(orGraphDestroy(graph));
}
