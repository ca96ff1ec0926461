/*
 * Graphs: what a capture takes and refuses, how it ends, and what a launch does.
 */
#include <stdio.h>

#include "gate.h"
#include "openreg_graph.h"

typedef struct Counts {
  atomic_int ran, dropped;
} Counts;

static orError_t countRun(void *args) {
  atomic_fetch_add(&(*(Counts **)args)->ran, 1);
  return orSuccess;
}

static void countHost(void *count) { atomic_fetch_add((atomic_int *)count, 1); }

static void countDrop(void *args) { atomic_fetch_add(&(*(Counts **)args)->dropped, 1); }

static orLaunch counting(orStream_t stream, Counts **counts) {
  return (orLaunch){.size = sizeof(orLaunch),
                    .stream = stream,
                    .fn = countRun,
                    .args = counts,
                    .args_size = sizeof *counts,
                    .drop = countDrop,
                    .name = "count"};
}

static void queueCount(orStream_t stream, Counts *counts) {
  orLaunch l = counting(stream, &counts);
  ASSERT_OK(orLaunchKernelEx(&l));
}

static orCaptureStatus statusOf(orStream_t stream) {
  orCaptureStatus status;
  ASSERT_OK(orStreamGetCaptureInfo(stream, &status, NULL));
  return status;
}

static orGraph_t endCaptureOf(orStream_t stream) {
  orGraph_t graph = 0;
  ASSERT_OK(orStreamEndCapture(stream, &graph));
  ASSERT_NE(graph, 0);
  return graph;
}

static void refuseEnd(orStream_t stream, orError_t error, const char *part) {
  orGraph_t graph = 1;
  ASSERT_REFUSED(orStreamEndCapture(stream, &graph), error, part);
  ASSERT_EQ(graph, 0);
}

static void order(orStream_t before, orStream_t after) {
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventRecord(e, before));
  ASSERT_OK(orStreamWaitEvent(after, e));
  ASSERT_OK(orEventDestroy(e));
}

static orGraph_t countingGraph(orStream_t stream, Counts *counts, int nodes) {
  ASSERT_OK(orStreamBeginCapture(stream));
  for (int i = 0; i < nodes; i++) queueCount(stream, counts);
  return endCaptureOf(stream);
}

/* ---- one stream ---- */

TEST(graph_runs_when_it_is_launched) {
  Counts counts = {0};
  orStream_t s = newStream(), other = newStream();
  ASSERT_EQ(statusOf(s), orCaptureStatusNone);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_EQ(statusOf(s), orCaptureStatusActive);
  for (int i = 0; i < 3; i++) queueCount(s, &counts);
  queueCount(other, &counts); /* another stream's runs */
  ASSERT_OK(orStreamSynchronize(other));
  orGraph_t graph = endCaptureOf(s);
  ASSERT_EQ(statusOf(s), orCaptureStatusNone);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 1);
  size_t nodes = 0;
  ASSERT_OK(orGraphGetNodeCount(graph, &nodes));
  ASSERT_EQ(nodes, 3);
  for (int i = 0; i < 100; i++) ASSERT_OK(orGraphReplay(graph, i % 2 ? s : other));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(counts.ran, 301);
  ASSERT_EQ(counts.dropped, 1);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_EQ(counts.dropped, 4);
  ASSERT_REFUSED(orGraphReplay(graph, s), orErrorInvalidResourceHandle, "not a live graph");
}

/* What was queued before the capture runs, and so does what comes after. */
TEST(graph_is_captured_beside_work_that_runs) {
  Counts counts = {0};
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  queueCount(s, &counts);
  orGraph_t graph = countingGraph(s, &counts, 1);
  queueCount(s, &counts);
  ASSERT_EQ(counts.ran, 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 2);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_of_nothing) {
  orStream_t s = newStream();
  orGraph_t graph = countingGraph(s, NULL, 0);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphReplay(graph, OR_STREAM_DEFAULT));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_copies_fills_and_host_functions) {
  orStream_t s = newStream();
  uint32_t *pinned, seen[2] = {0};
  char *device;
  ASSERT_OK(orMallocHost((void **)&pinned, 64));
  ASSERT_OK(orMalloc((void **)&device, 64));
  atomic_int calls = 0;
  pinned[0] = 5;
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orMemcpyAsync(device, pinned, 4, orMemcpyDefault, s));
  ASSERT_OK(orMemsetAsync(device + 4, 1, 4, s));
  ASSERT_OK(orMemcpyAsync(pinned + 4, device, 8, orMemcpyDefault, s));
  ASSERT_OK(orLaunchHostFunc(s, countHost, &calls));
  orGraph_t graph = endCaptureOf(s);
  for (uint32_t i = 1; i < 4; i++) {
    pinned[0] = i; /* it reads what is there then */
    ASSERT_OK(orGraphReplay(graph, s));
    ASSERT_OK(orStreamSynchronize(s));
    memcpy(seen, pinned + 4, sizeof seen);
    ASSERT_EQ(seen[0], i);
    ASSERT_EQ(seen[1], 0x01010101);
    ASSERT_EQ(calls, (int)i);
  }
  ASSERT_OK(orGraphDestroy(graph));
}

static orError_t failing(void *args) {
  (void)args;
  orSetTaskErrorMessage("on purpose");
  return orErrorLaunchFailure;
}

TEST(graph_failures_are_those_of_its_kernels) {
  Counts counts = {0};
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, failing, NULL);
  queueCount(s, &counts);
  orGraph_t graph = endCaptureOf(s);
  for (int i = 1; i < 4; i++) {
    ASSERT_OK(orGraphReplay(graph, s));
    ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure, "on purpose");
    ASSERT_EQ(counts.ran, i);
  }
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_longer_than_a_queue) {
  Counts counts = {0};
  orStream_t s = newStream();
  orGraph_t graph = countingGraph(s, &counts, 5000);
  for (int i = 0; i < 20; i++) ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 100000);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_EQ(counts.dropped, 5000);
}

typedef struct SharedGraph {
  orGraph_t graph;
  orStream_t streams[4];
} SharedGraph;

static void launchShared(int thread, void *context) {
  const SharedGraph *shared = context;
  ASSERT_OK(orGraphReplay(shared->graph, shared->streams[thread]));
}

/* Launches take turns, and the last one to have it wakes a thread that sleeps for it. */
TEST(graph_launched_by_threads_at_once) {
  Counts counts = {0};
  SharedGraph shared = {.graph = countingGraph(newStream(), &counts, 1000)};
  for (int i = 0; i < 4; i++) shared.streams[i] = newStream();
  for (int round = 0; round < 40; round++) runThreads(4, launchShared, &shared);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(counts.ran, 160000);
  ASSERT_OK(orGraphDestroy(shared.graph));
}

/* ---- branches ---- */

typedef struct Trail {
  atomic_int length;
  int step[64];
} Trail;

typedef struct Footprint {
  Trail *trail;
  int name;
} Footprint;

static orError_t leaveFootprint(void *args) {
  const Footprint *f = args;
  f->trail->step[atomic_fetch_add(&f->trail->length, 1)] = f->name;
  return orSuccess;
}

static void walk(orStream_t stream, Trail *trail, int name) {
  Footprint f = {trail, name};
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = leaveFootprint,
                                         .args = &f,
                                         .args_size = sizeof f,
                                         .name = "walk"}));
}

TEST(graph_forks_and_joins) {
  Trail trail = {0};
  orStream_t s = newStream(), side = newStreamOfPriority(-3), third = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  walk(s, &trail, 0);
  order(s, side);
  ASSERT_EQ(statusOf(side), orCaptureStatusActive);
  walk(side, &trail, 1);
  order(side, third); /* joins by way of a stream that joined */
  walk(third, &trail, 2);
  order(third, s);
  walk(s, &trail, 3);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_EQ(statusOf(side), orCaptureStatusNone);
  size_t nodes = 0;
  ASSERT_OK(orGraphGetNodeCount(graph, &nodes));
  ASSERT_EQ(nodes, 4); /* marks and waits are none */
  for (int i = 0; i < 100; i++) {
    trail.length = 0;
    ASSERT_OK(orGraphReplay(graph, i % 3 ? s : third));
    ASSERT_OK(orStreamSynchronize(i % 3 ? s : third));
    ASSERT_EQ(trail.length, 4);
    for (int k = 0; k < 4; k++) ASSERT_EQ(trail.step[k], k);
  }
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_branches_run_beside_each_other) {
  Holder one = {0}, two = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  launch(side, holdKernel, &one);
  launch(s, holdKernel, &two);
  order(side, s);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_OK(orGraphReplay(graph, s));
  awaitInt(&one.started, 1);
  awaitInt(&two.started, 1);
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  ASSERT_OK(orStreamQuery(side)); /* it runs on a stream of its own */
  letGo(&one);
  letGo(&two);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_branch_that_is_not_joined) {
  Counts counts = {0};
  orStream_t s = newStream(), side = newStream();
  for (int i = 0; i < 2; i++) {
    ASSERT_OK(orStreamBeginCapture(s));
    order(s, side);
    queueCount(side, &counts);
    if (i) {
      order(side, s);
      queueCount(side, &counts); /* and this is not */
    }
    refuseEnd(s, orErrorStreamCaptureUnjoined, "the origin stream does not come after");
    ASSERT_EQ(statusOf(side), orCaptureStatusNone);
    ASSERT_EQ(counts.ran, 0);
    ASSERT_EQ(counts.dropped, i ? 3 : 1);
  }
  /* Nothing to join, and joined before it goes on waiting. */
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphDestroy(graph));
  queueCount(side, &counts);
  queueCount(s, &counts);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(counts.ran, 2);
}

/* A launch is one piece of its stream, and those of one graph follow each other. */
TEST(graph_launches_follow_each_other) {
  Trail trail = {0};
  orStream_t s = newStream(), side = newStream(), other = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  walk(side, &trail, 1);
  order(side, s);
  walk(s, &trail, 2);
  orGraph_t graph = endCaptureOf(s);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphReplay(graph, other));
  walk(other, &trail, 3);
  ASSERT_ERROR(orStreamQuery(other), orErrorNotReady);
  ASSERT_EQ(trail.length, 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(other));
  const int wanted[] = {1, 2, 1, 2, 3};
  ASSERT_MEM(trail.step, wanted, sizeof wanted);
  ASSERT_OK(orGraphDestroy(graph));
}

/* ---- what a capture refuses ---- */

/* Also where the graph has no other stream. */
TEST(graph_launch_waits_for_the_one_before) {
  Counts counts = {0};
  orStream_t s = newStream(), other = newStream();
  orGraph_t graph = countingGraph(s, &counts, 1);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphReplay(graph, other));
  awaitReport(": waits for event 0x");
  ASSERT_EQ(counts.ran, 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_EQ(counts.ran, 2);
  ASSERT_OK(orGraphDestroy(graph));
}

static uint64_t idOf(orStream_t stream) {
  orCaptureStatus status;
  uint64_t id = 1;
  ASSERT_OK(orStreamGetCaptureInfo(stream, &status, &id));
  return id;
}

TEST(graph_capture_has_an_id_of_its_own) {
  orStream_t s = newStream(), side = newStream();
  ASSERT_EQ(idOf(s), 0);
  ASSERT_OK(orStreamBeginCapture(s));
  uint64_t first = idOf(s);
  ASSERT_NE(first, 0);
  order(s, side);
  ASSERT_EQ(idOf(side), first);
  order(side, s);
  endCaptureOf(s);
  ASSERT_EQ(idOf(side), 0);
  ASSERT_OK(orStreamBeginCapture(side));
  ASSERT_NE(idOf(side), 0);
  ASSERT_NE(idOf(side), first);
  endCaptureOf(side);
}

TEST(graph_capture_names_its_first_mistake) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_ERROR(orStreamQuery(s), orErrorStreamCaptureUnsupported);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorStreamCaptureUnsupported);
  refuseEnd(s, orErrorStreamCaptureInvalidated, "orStreamQuery");
}

TEST(graph_capture_begins_on_a_stream_of_its_own) {
  orStream_t standard, s = newStream();
  ASSERT_OK(orStreamGetDefault(&standard, 0));
  ASSERT_REFUSED(orStreamBeginCapture(standard), orErrorStreamCaptureUnsupported,
                 "default stream of device 0");
  ASSERT_ERROR(orStreamBeginCapture(OR_STREAM_DEFAULT), orErrorStreamCaptureUnsupported);
  ASSERT_ERROR(orStreamBeginCapture(77), orErrorInvalidResourceHandle);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_REFUSED(orStreamBeginCapture(s), orErrorStreamCaptureUnsupported, "capturing already");
  endCaptureOf(s);
  refuseEnd(s, orErrorStreamCaptureUnmatched, "is not capturing");
}

/* Each of these ends the capture: the next call says so, the end says why, and all is as before. */
typedef struct Mistake {
  const char *by;
  orError_t error;
  orError_t (*make)(orStream_t stream);
} Mistake;

static char *devices(void) {
  static char *memory;
  if (!memory) ASSERT_OK(orMalloc((void **)&memory, 1 << 20));
  return memory;
}
static char pageable[1 << 20];
static orEvent_t captured, outside;

static orError_t copyIn(orStream_t s) {
  return orMemcpyAsync(devices(), pageable, 8, orMemcpyDefault, s);
}
static orError_t copyInLarge(orStream_t s) {
  return orMemcpyAsync(devices(), pageable, sizeof pageable, orMemcpyDefault, s);
}
static orError_t copyOut(orStream_t s) {
  return orMemcpyAsync(pageable, devices(), 8, orMemcpyDefault, s);
}
static orError_t copyAndWait(orStream_t s) {
  return orMemcpyWithStream(devices(), devices() + 64, 8, orMemcpyDefault, s);
}
static orError_t launchAndWait(orStream_t s) {
  Counts counts = {0}, *at = &counts;
  int queued = 1;
  orLaunch l = counting(s, &at);
  l.flags = orLaunchWaits;
  l.queued = &queued;
  orError_t error = orLaunchKernelEx(&l);
  ASSERT_EQ(queued, 0);
  ASSERT_EQ(counts.dropped, 0);
  return error;
}
static orError_t synchronizeAll(orStream_t s) {
  (void)s;
  return orDeviceSynchronize();
}
static orError_t askEvent(orStream_t s) {
  (void)s;
  return orEventQuery(captured);
}
static orError_t awaitEvent(orStream_t s) {
  (void)s;
  return orEventSynchronize(captured);
}
static orError_t timeEvent(orStream_t s) {
  (void)s;
  float ms;
  return orEventElapsedTime(&ms, captured, captured);
}
static orError_t waitOutside(orStream_t s) { return orStreamWaitEvent(s, outside); }
static orError_t waitFromDefault(orStream_t s) {
  (void)s;
  return orStreamWaitEvent(OR_STREAM_DEFAULT, captured);
}
static orError_t waitFromOtherDevice(orStream_t s) {
  (void)s;
  return orStreamWaitEvent(newStreamOn(1), captured);
}
static orError_t waitFromOtherCapture(orStream_t s) {
  (void)s;
  orGraph_t graph;
  orStream_t other = newStream();
  ASSERT_OK(orStreamBeginCapture(other));
  orError_t error = orStreamWaitEvent(other, captured);
  ASSERT_ERROR(orStreamEndCapture(other, &graph), orErrorStreamCaptureInvalidated);
  return error;
}
static orError_t launchInside(orStream_t s) {
  orStream_t other = newStream();
  orGraph_t graph = countingGraph(other, NULL, 0);
  return orGraphReplay(graph, s);
}

TEST(graph_capture_refuses_what_no_graph_can_repeat) {
  const Mistake mistakes[] = {
      {"Memcpy HtoD", orErrorStreamCaptureUnsupported, copyIn},
      {"Memcpy HtoD", orErrorStreamCaptureUnsupported, copyInLarge},
      {"Memcpy DtoH", orErrorStreamCaptureUnsupported, copyOut},
      {"Memcpy DtoD", orErrorStreamCaptureUnsupported, copyAndWait},
      {"count", orErrorStreamCaptureUnsupported, launchAndWait},
      {"orStreamQuery", orErrorStreamCaptureUnsupported, orStreamQuery},
      {"orStreamSynchronize", orErrorStreamCaptureUnsupported, orStreamSynchronize},
      {"orDeviceSynchronize", orErrorStreamCaptureUnsupported, synchronizeAll},
      {"orGraphReplay", orErrorStreamCaptureUnsupported, launchInside},
      {"orEventQuery", orErrorCapturedEvent, askEvent},
      {"orEventSynchronize", orErrorCapturedEvent, awaitEvent},
      {"orEventElapsedTime", orErrorCapturedEvent, timeEvent},
      {"orStreamWaitEvent", orErrorStreamCaptureIsolation, waitOutside},
      {"orStreamWaitEvent", orErrorStreamCaptureUnsupported, waitFromDefault},
      {"orStreamWaitEvent", orErrorStreamCaptureUnsupported, waitFromOtherDevice},
      {"orStreamWaitEvent", orErrorStreamCaptureMerge, waitFromOtherCapture},
  };
  Counts counts = {0};
  orStream_t s = newStream();
  captured = newEvent(0);
  outside = newEvent(0);
  for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
    const Mistake *m = &mistakes[i];
    ASSERT_OK(orEventRecord(outside, OR_STREAM_DEFAULT));
    ASSERT_OK(orStreamBeginCapture(s));
    queueCount(s, &counts);
    ASSERT_OK(orEventRecord(captured, s));
    orError_t error = m->make(s);
    if (error != m->error) FAIL("mistake %zu: %s", i, orGetErrorName(error));
    ASSERT_CONTAINS(orGetLastErrorMessage(), m->by);
    ASSERT_EQ(statusOf(s), orCaptureStatusInvalidated);
    ASSERT_REFUSED(orMemsetAsync(devices(), 0, 8, s), orErrorStreamCaptureInvalidated, m->by);
    ASSERT_REFUSED(orEventRecord(outside, s), orErrorStreamCaptureInvalidated, m->by);
    refuseEnd(s, orErrorStreamCaptureInvalidated, m->by);
    ASSERT_EQ(statusOf(s), orCaptureStatusNone);
    ASSERT_EQ(counts.dropped, (int)i + 1);
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT_ERROR(orEventQuery(captured), orErrorCapturedEvent);
    ASSERT_ERROR(orStreamWaitEvent(s, captured), orErrorCapturedEvent);
    ASSERT_ERROR(orStreamWaitEvent(OR_STREAM_DEFAULT, captured), orErrorCapturedEvent);
    ASSERT_OK(orEventRecord(captured, s)); /* as good as new */
    ASSERT_OK(orEventSynchronize(captured));
    ASSERT_OK(orDeviceSynchronize());
  }
  ASSERT_EQ(counts.ran, 0);
}

/* What is wrong without a capture, too, leaves it as it is. */
TEST(graph_capture_survives_bad_arguments) {
  Counts counts = {0};
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_ERROR(orMemsetAsync(devices(), 0, 1 << 21, s), orErrorInvalidValue);
  ASSERT_ERROR(orEventRecord(77, s), orErrorInvalidResourceHandle);
  orEvent_t never = newEvent(0);
  ASSERT_OK(orStreamWaitEvent(s, never));
  ASSERT_OK(orStreamQuery(OR_STREAM_DEFAULT)); /* another stream's affair */
  queueCount(s, &counts);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 1);
  ASSERT_REFUSED(orGraphReplay(graph, newStreamOn(1)), orErrorInvalidValue, "device 1");
}

TEST(graph_capture_ends_with_its_stream) {
  Counts counts = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  queueCount(s, &counts);
  order(s, side);
  queueCount(side, &counts);
  ASSERT_OK(orStreamDestroy(s));
  ASSERT_EQ(statusOf(side), orCaptureStatusNone);
  ASSERT_EQ(counts.dropped, 2);
  queueCount(side, &counts);
  ASSERT_OK(orStreamSynchronize(side));
  ASSERT_EQ(counts.ran, 1);
  /* Of one that has joined, the capture is lost. */
  s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  ASSERT_OK(orStreamDestroy(side));
  refuseEnd(s, orErrorStreamCaptureInvalidated, "orStreamDestroy");
}

/* A stream that has the slot of one that had joined is in no capture but its own. */
TEST(graph_capture_lets_a_slots_next_stream_be) {
  Counts counts = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  ASSERT_OK(orStreamDestroy(side));
  orStream_t next = newStream();
  ASSERT_EQ(next >> 30, side >> 30);
  ASSERT_OK(orStreamBeginCapture(next));
  refuseEnd(s, orErrorStreamCaptureInvalidated, "orStreamDestroy");
  queueCount(next, &counts);
  endCaptureOf(next);
  ASSERT_EQ(counts.ran, 0);
}

TEST(graph_capture_is_not_refused_for_a_default_stream) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orStreamRefuseCapture(OR_STREAM_DEFAULT, "a call", "nothing"));
  ASSERT_OK(orGetLastError());
  endCaptureOf(s);
}

TEST(graph_capture_has_at_most_64_streams) {
  orStream_t s = newStream(), one_more = newStream();
  orEvent_t e = newEvent(0);
  ASSERT_OK(orStreamBeginCapture(s));
  ASSERT_OK(orEventRecord(e, s));
  for (int i = 1; i < 64; i++) ASSERT_OK(orStreamWaitEvent(newStream(), e));
  ASSERT_REFUSED(orStreamWaitEvent(one_more, e), orErrorMemoryAllocation, "64 streams");
  ASSERT_EQ(statusOf(one_more), orCaptureStatusNone);
  ASSERT_OK(orGraphDestroy(endCaptureOf(s)));
}

TEST(graph_capture_ends_where_it_began) {
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  refuseEnd(side, orErrorStreamCaptureUnmatched, "that another stream began");
  endCaptureOf(s);
}

/* ---- the end of a graph ---- */

TEST(graph_destroyed_while_it_runs) {
  Counts counts = {0};
  Holder holder = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, holdKernel, &holder);
  order(s, side);
  queueCount(side, &counts);
  order(side, s);
  queueCount(s, &counts);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_OK(orGraphRetainUserObject(graph, &(Counts *){&counts}, countDrop));
  Counts *at = &counts;
  ASSERT_OK(orGraphRetainUserObject(graph, &at, countDrop));
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orGraphReplay(graph, s));
  awaitInt(&holder.started, 1);
  ASSERT_OK(orGraphDestroy(graph));
  ASSERT_EQ(counts.dropped, 0);
  letGo(&holder);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 4);
  while (counts.dropped != 4) sched_yield();
}

TEST(graph_survives_a_reset) {
  Counts counts = {0};
  Holder holder = {0};
  orStream_t s = newStream(), side = newStream(), capturing = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  queueCount(side, &counts);
  order(side, s);
  orGraph_t graph = endCaptureOf(s);
  ASSERT_OK(orStreamBeginCapture(capturing));
  hold(s, &holder);
  for (int i = 0; i < 10; i++) ASSERT_OK(orGraphReplay(graph, s));
  letGo(&holder);
  ASSERT_OK(orDeviceReset());
  int ran = counts.ran;
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, ran + 1);
  refuseEnd(capturing, orErrorStreamCaptureInvalidated, "orDeviceReset");
  ASSERT_OK(orGraphDestroy(graph));
  while (counts.dropped != 1) sched_yield(); /* the end of the last launch */
}

static orError_t lose(void *args) {
  (void)args;
  return orErrorDeviceLost;
}

TEST(graph_on_a_device_that_is_lost) {
  Counts counts = {0};
  Holder holder = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  order(s, side);
  queueCount(side, &counts);
  order(side, s);
  orGraph_t graph = endCaptureOf(s);
  hold(s, &holder);
  launch(s, lose, NULL);
  ASSERT_OK(orGraphReplay(graph, s));
  letGo(&holder);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorDeviceLost);
  ASSERT_ERROR(orGraphReplay(graph, s), orErrorDeviceLost);
  ASSERT_ERROR(orStreamBeginCapture(s), orErrorDeviceLost);
  ASSERT_EQ(counts.ran, 0);
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(counts.ran, 1);
  ASSERT_OK(orGraphDestroy(graph));
}

TEST(graph_leaves_nothing_behind) {
  Counts counts = {0};
  orStream_t s = newStream(), side = newStream();
  for (int i = 0; i < 5000; i++) {
    ASSERT_OK(orStreamBeginCapture(s));
    order(s, side);
    queueCount(side, &counts);
    if (i % 3) order(side, s);
    orGraph_t graph = 0;
    orError_t error = orStreamEndCapture(s, &graph);
    ASSERT_EQ(error, i % 3 ? orSuccess : orErrorStreamCaptureUnjoined);
    if (error) continue;
    ASSERT_OK(orGraphReplay(graph, s));
    if (i % 2) ASSERT_OK(orStreamSynchronize(s));
    ASSERT_OK(orGraphDestroy(graph));
  }
  ASSERT_OK(orStreamSynchronize(s));
  while (counts.dropped != 5000) sched_yield();
  /* Handles: a slot's number says how many there have been at a time. */
  ASSERT_LT((newStream() >> 30) & 0xffffff, 2000);
}

/* ---- threads ---- */

enum { THREADS = 4, LAUNCHES = 500 };

typedef struct Shared {
  orGraph_t graph;
  atomic_int inside, most, ran;
} Shared;

static orError_t enter(void *args) {
  Shared *shared = *(Shared **)args;
  int inside = atomic_fetch_add(&shared->inside, 1) + 1;
  if (inside > 1) atomic_store(&shared->most, inside);
  sched_yield();
  atomic_fetch_add(&shared->ran, 1);
  atomic_fetch_sub(&shared->inside, 1);
  return orSuccess;
}

static void launchMany(int thread, void *context) {
  (void)thread;
  Shared *shared = context;
  orStream_t s = newStream();
  for (int i = 0; i < LAUNCHES; i++) ASSERT_OK(orGraphReplay(shared->graph, s));
  ASSERT_OK(orStreamSynchronize(s));
}

TEST_WITH_LIMIT(graph_launched_by_many_threads, 60) {
  Shared shared = {0};
  orStream_t s = newStream(), side = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, enter, &shared);
  order(s, side);
  launch(side, enter, &shared);
  order(side, s);
  launch(s, enter, &shared);
  shared.graph = endCaptureOf(s);
  runThreads(THREADS, launchMany, &shared);
  ASSERT_EQ(shared.most, 0); /* one after the other, also from launch to launch */
  ASSERT_EQ(shared.ran, 3 * THREADS * LAUNCHES);
  ASSERT_OK(orGraphDestroy(shared.graph));
}

static void captureMany(int thread, void *context) {
  (void)context;
  Counts counts = {0};
  orStream_t s = newStream();
  for (int i = 0; i < 200; i++) {
    orGraph_t graph = countingGraph(s, &counts, thread + 1);
    ASSERT_OK(orGraphReplay(graph, s));
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT_EQ(counts.ran, (i + 1) * (thread + 1));
    ASSERT_OK(orGraphDestroy(graph));
  }
}

TEST(graph_captured_by_many_threads) { runThreads(THREADS, captureMany, NULL); }

/* Threads queue on the streams of a capture while another ends it: each piece of work is a node,
 * runs, or is refused, and all are dropped. */
typedef struct Race {
  orStream_t origin, side;
  Counts counts;
  atomic_int queued, over;
  orEvent_t outside;
} Race;

static void orderIfItTakes(orStream_t before, orStream_t after) {
  orEvent_t e = newEvent(0);
  if (!orEventRecord(e, before)) orStreamWaitEvent(after, e);
  ASSERT_OK(orEventDestroy(e));
}

static void raceToTheEnd(int thread, void *context) {
  Race *race = context;
  Counts *counts = &race->counts;
  while (thread && !atomic_load(&race->over)) {
    orLaunch l = counting(thread % 2 ? race->side : race->origin, &counts);
    orError_t error = orLaunchKernelEx(&l);
    if (!error)
      atomic_fetch_add(&race->queued, 1);
    else
      ASSERT_EQ(error, orErrorStreamCaptureInvalidated);
    if (atomic_load(&race->queued) % 64 == 63) orStreamWaitEvent(l.stream, race->outside);
  }
  for (int i = 0; !thread && i < 40; i++) {
    orGraph_t graph = 0;
    ASSERT_OK(orStreamBeginCapture(race->origin));
    orderIfItTakes(race->origin, race->side);
    sched_yield();
    orderIfItTakes(race->side, race->origin);
    if (!orStreamEndCapture(race->origin, &graph)) ASSERT_OK(orGraphDestroy(graph));
  }
  if (!thread) atomic_store(&race->over, 1);
}

TEST_WITH_LIMIT(graph_capture_ends_while_others_queue, 60) {
  Race race = {.origin = newStream(), .side = newStream()};
  race.outside = newEvent(0);
  ASSERT_OK(orEventRecord(race.outside, OR_STREAM_DEFAULT));
  runThreads(3, raceToTheEnd, &race);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(race.counts.dropped, race.queued);
}
