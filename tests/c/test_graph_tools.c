/*
 * Graphs and the tools: a launch is to each of them what the same calls without a graph are.
 */
#include "openreg_fault.h"
#include "openreg_graph.h"
#include "sanitizer_helpers.h"

static orGraph_t fillAndCopy(orStream_t stream, char *memory) {
  orGraph_t graph;
  ASSERT_OK(orStreamBeginCapture(stream));
  ASSERT_OK(orMemsetAsync(memory, 1, 64, stream));
  ASSERT_OK(orMemcpyAsync(memory + 64, memory, 64, orMemcpyDefault, stream));
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  return graph;
}

static char *newMemory(void) {
  char *memory;
  ASSERT_OK(orMalloc((void **)&memory, 4096));
  return memory;
}

/* The capture touches nothing, and orders nothing. */
TEST(graph_sanitizer_sees_each_launch) {
  char *memory = newMemory();
  orStream_t s = newStream(), other = newStream();
  sanitize();
  writes(other, "writer", memory, 128);
  orGraph_t graph = fillAndCopy(s, memory);
  ASSERT_EQ(reportCount(), 0);
  ASSERT_OK(orGraphReplay(graph, s)); /* nothing orders it after the writer */
  ASSERT_GE(reportCount(), 1);
  ASSERT_EQ(reportAt(1).later.stream, s);
  ASSERT_OK(orSanitizerClearReports());
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphReplay(graph, other)); /* follows the one before */
  ASSERT_EQ(reportCount(), 0);
  ASSERT_NE(writes(s, "writer", memory + 64, 8), 0);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_sanitizer_knows_forks_and_joins) {
  char *memory = newMemory();
  orStream_t s = newStream(), side = newStream();
  orEvent_t e = newEvent(0);
  orGraph_t graph;
  sanitize();
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orMemsetAsync(memory, 1, 64, s));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(side, e));
  ASSERT_OK(orMemsetAsync(memory, 2, 64, side));
  ASSERT_OK(orEventRecord(e, side));
  ASSERT_OK(orStreamWaitEvent(s, e));
  ASSERT_OK(orMemsetAsync(memory, 3, 64, s));
  ASSERT_OK(orStreamEndCapture(s, &graph));
  for (int i = 0; i < 3; i++) ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_EQ(reads(s, "reader", memory, 64), 0);
  ASSERT_NE(reads(side, "reader", memory, 64), 0); /* nobody told it to wait */
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_trace_has_each_node) {
  char *memory = newMemory();
  orStream_t s = newStream();
  orTrace trace = {.size = sizeof trace};
  orGraph_t graph = fillAndCopy(s, memory);
  ASSERT_OK(orTraceStart(0));
  for (int i = 0; i < 3; i++) ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orTraceStop(&trace));
  int fills = 0, copies = 0, launched = 0;
  for (size_t i = 0; i < trace.count; i++) {
    const orTraceRecord *r = &trace.records[i];
    fills += r->kind == orTraceMemset && r->bytes == 64 && r->stream == s;
    copies += r->kind == orTraceMemcpy && r->bytes == 64;
    for (size_t k = 0; r->kind == orTraceLaunch && k < trace.count; k++)
      launched +=
          trace.records[k].kind != orTraceLaunch && trace.records[k].correlation == r->correlation;
  }
  ASSERT_EQ(fills, 3);
  ASSERT_EQ(copies, 3);
  ASSERT_EQ(launched, 6);
  orTraceFree(&trace);
  ASSERT_OK(orGraphDestroy(graph));
}

/* Of a graph with one node, which another stream than the one that is launched on runs. */
static orStream_t ownStreamOf(orGraph_t graph, orStream_t on) {
  orTrace trace = {.size = sizeof trace};
  orStream_t own = 0;
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orGraphReplay(graph, on));
  ASSERT_OK(orStreamSynchronize(on));
  ASSERT_OK(orTraceStop(&trace));
  for (size_t i = 0; i < trace.count; i++)
    if (trace.records[i].kind == orTraceKernel) own = trace.records[i].stream;
  orTraceFree(&trace);
  ASSERT_NE(own, 0);
  ASSERT_NE(own, on);
  return own;
}

/* A trace has their handles. */
TEST(graph_keeps_its_own_streams) {
  atomic_int ran = 0;
  orStream_t s = newStream(), side = newStream();
  orEvent_t e = newEvent(0);
  orGraph_t graph, other;
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(side, e));
  launch(side, countKernel, &ran);
  ASSERT_OK(orEventRecord(e, side));
  ASSERT_OK(orStreamWaitEvent(s, e));
  ASSERT_OK(orStreamEndCapture(s, &graph));
  orStream_t own = ownStreamOf(graph, s);
  ASSERT_REFUSED(orStreamDestroy(own), orErrorInvalidValue, "a graph");
  ASSERT_REFUSED(orStreamBeginCapture(own), orErrorStreamCaptureUnsupported, "a graph");
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_REFUSED(orStreamWaitEvent(own, e), orErrorStreamCaptureUnsupported, "a graph");
  ASSERT_ERROR(orStreamEndCapture(s, &other), orErrorStreamCaptureInvalidated);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 2);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_REFUSED(orStreamQuery(own), orErrorInvalidResourceHandle, "not a live stream");
}

/* The third kernel from now, counted where they run or are about to: not in the capture. */
TEST(graph_faults_strike_inside) {
  atomic_int ran = 0;
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT_OK(orFaultInject(
      &(orFault){.size = sizeof(orFault), .kind = orFaultKernelError, .device = 0, .after = 2}));
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, countKernel, &ran);
  launch(s, countKernel, &ran);
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure, "injected");
  ASSERT_EQ(ran, 3);
  ASSERT_OK(orFaultRemove(orFaultKernelError, 0));
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_hang_report_names_the_node) {
  Holder holder = {0};
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, holdKernel, &holder);
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_OK(orGraphReplay(graph, s));
  awaitInt(&holder.started, 1);
  awaitReport("test"); /* the kernel's name */
  letGo(&holder);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orGraphDestroy(graph));
}

/* A free runs its poison now, though the stream captures: it is no node. */
TEST(graph_capture_does_not_keep_poison) {
  setenv("OPENREG_POISON", "1", 1);
  void *block;
  size_t nodes = 1;
  unsigned char first = 0;
  orStream_t s = newStream();
  orGraph_t graph;
  ASSERT_OK(orCacheMalloc(&block, 512, s));
  ASSERT_OK(orMemsetAsync(block, 3, 512, s));
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orCacheFree(block));
  ASSERT_OK(orStreamEndCapture(s, &graph));
  ASSERT_OK(orGraphGetNodeCount(graph, &nodes));
  ASSERT_EQ(nodes, 0);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_OK(orMemcpyWithStream(&first, block, 1, orMemcpyDeviceToHost, s));
  ASSERT_EQ(first, 0xFF);
}
