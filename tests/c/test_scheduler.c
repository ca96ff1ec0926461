/*
 * What runs next: the scheduler's rules, one by one, and all of them in random graphs of waits.
 *
 * Most tests hold every lane, queue what is to be ordered, and let one lane go: what that one takes
 * first is then no matter of luck.
 */
#include "gate.h"

/* A kernel that notes its place in the order of all such kernels. */
static atomic_int places;
static orError_t placeKernel(void *args) {
  **(int **)args = atomic_fetch_add(&places, 1) + 1;
  return orSuccess;
}

static void releaseLanes(Holder *holders) {
  letGoAllLanes(holders);
  for (int d = 0; d < 2; d++) {
    ASSERT_OK(orSetDevice(d));
    ASSERT_OK(orDeviceSynchronize());
  }
}

/* ---- a more urgent stream goes first, and nobody makes way for less ---- */

TEST(scheduler_urgent_streams_come_first) {
  Holder h[LANE_MOST] = {0};
  int place[4];
  orStream_t streams[4];
  holdAllLanes(h);
  for (int p = 0; p < 4; p++) { /* the least urgent is queued first, and lanes serve both devices */
    ASSERT_OK(orSetDevice(p % 2));
    streams[p] = newStreamOfPriority(-p);
    launch(streams[p], placeKernel, &place[p]);
  }
  letGo(&h[0]);
  for (int p = 0; p < 4; p++) ASSERT_OK(orStreamSynchronize(streams[p]));
  for (int p = 0; p < 4; p++) ASSERT_EQ(place[p], 4 - p);
  releaseLanes(h);
}

TEST(scheduler_equal_streams_take_turns_in_order) {
  Holder h[LANE_MOST] = {0};
  int place[8];
  orStream_t streams[8];
  holdAllLanes(h);
  for (int i = 0; i < 8; i++) {
    streams[i] = newStreamOn(i % 2);
    launch(streams[i], placeKernel, &place[i]);
  }
  letGo(&h[0]);
  for (int i = 0; i < 8; i++) ASSERT_OK(orStreamSynchronize(streams[i]));
  for (int i = 0; i < 8; i++) ASSERT_EQ(place[i], i + 1);
  releaseLanes(h);
}

/* A stream in the middle of its tasks makes way after the one that is running, for one that has so
 * many. */
static void assertMakesWay(orStream_t busy, orStream_t other, int count) {
  Holder h[LANE_MOST] = {0}, middle = {0};
  int late[2], inner[50];
  holdAllLanes(h);
  letGo(&h[0]); /* one lane serves `busy` */
  hold(busy, &middle);
  for (int i = 0; i < 50; i++) launch(busy, placeKernel, &inner[i]);
  for (int i = 0; i < count; i++) launch(other, placeKernel, &late[i]);
  sleepMs(3); /* longer than a stream of equal priority has to wait */
  letGo(&middle);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_OK(orStreamSynchronize(busy));
  for (int i = 0; i < count; i++) ASSERT_EQ(late[i], i + 1);
  for (int i = 0; i < 50; i++) ASSERT_EQ(inner[i], i + 1 + count);
  releaseLanes(h);
}

TEST(scheduler_makes_way_for_a_more_urgent_stream) {
  assertMakesWay(newStream(), newStreamOfPriority(-1), 2);
}

/* Between two tasks of its own it would make way in its turn, if the lane stood still there for a
 * millisecond. */
TEST(scheduler_makes_way_for_one_that_has_waited) {
  assertMakesWay(newStream(), newStreamOn(1), 1);
}

/* ... and not before it has waited for a millisecond. */
typedef struct Stamp {
  int place;
  uint64_t at;
} Stamp;

static orError_t stampKernel(void *args) {
  Stamp *stamp = *(Stamp **)args;
  stamp->place = atomic_fetch_add(&places, 1) + 1;
  stamp->at = nowNs();
  return orSuccess;
}

static orError_t computeKernel(void *args) {
  uint64_t until = nowNs() + 100000;
  while (nowNs() < until) {
  }
  return placeKernel(args);
}

TEST(scheduler_makes_way_after_a_millisecond) {
  Holder h[LANE_MOST] = {0}, middle = {0};
  Stamp late = {0};
  int inner[50];
  orStream_t busy = newStream(), other = newStream();
  holdAllLanes(h);
  letGo(&h[0]);
  hold(busy, &middle);
  for (int i = 0; i < 50; i++) launch(busy, computeKernel, &inner[i]);
  uint64_t ready = nowNs();
  launch(other, stampKernel, &late);
  letGo(&middle);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_OK(orStreamSynchronize(busy));
  ASSERT_GE(late.at - ready, 1000000);
  ASSERT_LE(late.place, 50); /* the other one's 50 tasks take 5 ms */
  releaseLanes(h);
}

TEST(scheduler_does_not_make_way_for_a_less_urgent_stream) {
  Holder h[LANE_MOST] = {0}, middle = {0};
  orStream_t busy = newStreamOfPriority(-2), other = newStreamOfPriority(-1);
  int late = 0, inner[50];
  holdAllLanes(h);
  letGo(&h[0]);
  hold(busy, &middle);
  for (int i = 0; i < 50; i++) launch(busy, placeKernel, &inner[i]);
  launch(other, placeKernel, &late);
  sleepMs(3);
  letGo(&middle);
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_OK(orStreamSynchronize(busy));
  ASSERT_EQ(late, 51);
  releaseLanes(h);
}

/* ---- a stream that waits holds no lane ---- */

/* In the middle of their work, too. */
TEST(scheduler_64_waiting_streams_hold_no_lane) {
  orEvent_t gate = newGate();
  orStream_t gated[64];
  atomic_int before = 0, after = 0, other = 0;
  for (int i = 0; i < 64; i++) {
    gated[i] = newStreamOn(i % 2);
    launch(gated[i], countKernel, &before);
    ASSERT_OK(orStreamWaitEvent(gated[i], gate));
    launch(gated[i], countKernel, &after);
  }
  awaitInt(&before, 64);
  orStream_t s = newStream();
  for (int i = 0; i < 100; i++) launch(s, countKernel, &other);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(other, 100);
  ASSERT_EQ(after, 0);
  openGate(gate);
  for (int i = 0; i < 64; i++) ASSERT_OK(orStreamSynchronize(gated[i]));
  ASSERT_EQ(after, 64);
}

/* What they wait for is a record of another stream, which waits itself. */
TEST(scheduler_24_streams_on_one_event_do_not_delay_another) {
  orStream_t first = newStream(), waiting[24];
  orEvent_t event = newEvent(0), gate = closeGate(first);
  Holder h[LANE_MOST] = {0};
  atomic_int ran = 0;
  ASSERT_OK(orEventRecord(event, first));
  for (int i = 0; i < 24; i++) {
    waiting[i] = newStreamOn(i % 2);
    ASSERT_OK(orStreamWaitEvent(waiting[i], event));
    launch(waiting[i], countKernel, &ran);
  }
  holdAllLanes(h); /* returns only if not one lane is taken */
  ASSERT_EQ(ran, 0);
  openGate(gate);
  releaseLanes(h);
  ASSERT_EQ(ran, 24);
}

TEST(scheduler_resumed_stream_keeps_its_priority) {
  Holder h[LANE_MOST] = {0};
  int place[2];
  orStream_t plain = newStream(), urgent = newStreamOfPriority(-1);
  orEvent_t gate = closeGate(urgent);
  launch(urgent, placeKernel, &place[1]);
  holdAllLanes(h);
  launch(plain, placeKernel, &place[0]);
  openGate(gate); /* the urgent one becomes ready last */
  letGo(&h[0]);
  ASSERT_OK(orStreamSynchronize(plain));
  ASSERT_OK(orStreamSynchronize(urgent));
  ASSERT_EQ(place[1], 1);
  ASSERT_EQ(place[0], 2);
  releaseLanes(h);
}

/* ---- markers never block ---- */

/* Far beyond what a queue holds of kernels, with no lane to take any. */
TEST(scheduler_markers_never_block) {
  Holder h[LANE_MOST] = {0};
  orStream_t a = newStream(), b = newStream();
  orEvent_t event = newEvent(0), gate = closeGate(b);
  atomic_int ran = 0;
  holdAllLanes(h);
  ASSERT_OK(orEventRecord(event, a));
  ASSERT_OK(orEventSynchronize(event)); /* nothing is before it: it needs no lane */
  launch(a, countKernel, &ran);
  for (int i = 0; i < 5000; i++) {
    ASSERT_OK(orEventRecord(event, a));
    ASSERT_OK(orStreamWaitEvent(b, event));
    ASSERT_OK(orStreamWaitEvent(a, gate));
    ASSERT_ERROR(orEventQuery(event), orErrorNotReady);
    ASSERT_ERROR(orStreamQuery(b), orErrorNotReady);
  }
  ASSERT_EQ(ran, 0);
  openGate(gate);
  releaseLanes(h);
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orEventQuery(event));
}

/* ---- random graphs of waits ---- */

enum { GRAPH_STREAMS = 16, GRAPH_STEPS = 96, GRAPH_ROUNDS = 50, GRAPH_MOST = 4 };

typedef struct Step {
  struct Step *needs[GRAPH_MOST]; /* the last is the step before it on its own stream */
  atomic_int done;
  unsigned work_ns;
} Step;

static orError_t stepKernel(void *args) {
  Step *step = *(Step **)args;
  for (int i = 0; i < GRAPH_MOST; i++)
    if (step->needs[i]) ASSERT(atomic_load(&step->needs[i]->done));
  uint64_t until = nowNs() + step->work_ns;
  while (nowNs() < until) {
  }
  atomic_store(&step->done, 1);
  return orSuccess;
}

typedef struct Node {
  orStream_t stream;
  orEvent_t event; /* recorded after each step */
  Step *last;
} Node;

static unsigned draw(unsigned below) {
  static uint64_t x = 88172645463325252u;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return (unsigned)(x >> 20) % below;
}

static void queueStep(Node *nodes, Step *step) {
  Node *node = &nodes[draw(GRAPH_STREAMS)];
  *step = (Step){.work_ns = draw(4) ? 0 : draw(60000)};
  for (unsigned i = draw(GRAPH_MOST); i-- > 0;) {
    Node *other = &nodes[draw(GRAPH_STREAMS)];
    ASSERT_OK(orStreamWaitEvent(node->stream, other->event));
    step->needs[i] = other->last;
  }
  step->needs[GRAPH_MOST - 1] = node->last;
  launch(node->stream, stepKernel, step);
  ASSERT_OK(orEventRecord(node->event, node->stream));
  node->last = step;
}

TEST_WITH_LIMIT(scheduler_random_wait_graphs, 60) {
  static Step steps[GRAPH_STEPS];
  Node nodes[GRAPH_STREAMS];
  for (int i = 0; i < GRAPH_STREAMS; i++) {
    ASSERT_OK(orSetDevice(i % 2));
    nodes[i].stream = newStreamOfPriority(-(i % 3));
    nodes[i].event = newEvent(orEventDisableTiming);
  }
  for (int round = 0; round < GRAPH_ROUNDS; round++) {
    orEvent_t gate = newGate();
    for (int i = 0; i < GRAPH_STREAMS; i++) {
      nodes[i].last = NULL;
      /* Every other round everything is queued before anything runs. */
      if (round % 2) ASSERT_OK(orStreamWaitEvent(nodes[i].stream, gate));
    }
    for (int i = 0; i < GRAPH_STEPS; i++) queueStep(nodes, &steps[i]);
    openGate(gate);
    for (int i = 0; i < GRAPH_STREAMS; i++) ASSERT_OK(orEventSynchronize(nodes[i].event));
    for (int i = 0; i < GRAPH_STEPS; i++) ASSERT(steps[i].done);
    ASSERT_OK(orEventDestroy(gate));
  }
}
