/*
 * Timelines of streams, and the happens-before order that the program has asked for.
 *
 * Each stream's slot is a timeline with a counter, which increases whenever its clock is copied. A
 * clock holds for every timeline the counter up to which it is covered: work of a timeline at
 * counter c happens before the owner of a clock with c or more there. A copy has the counter of
 * the timeline's newest work, so that it covers nothing if there is none. Streams, events (orSync)
 * and the host have clocks, and join them:
 *
 *   recording an event          the event copies the stream's
 *   waiting for an event        the stream joins the event's
 *   synchronising, a query      the host joins the stream's or the event's
 *   that returns "done"
 *
 * All that a thread queues comes after what happens before that thread (host_clock.c). The host
 * needs no counter: the clock of all its threads is consulted directly, and a thread's own clock
 * joins the stream's when it queues.
 *
 * Gates. A stream may wait for an external event before it is known what will signal it. Work
 * behind such a gate is remembered by counter, until orSyncOpen joins the signaller's clock into
 * all that is behind it. Clocks that were copied from such a stream name the gate too. An external
 * event that stands for a stream's work (orSanitizerEventAfter) is no gate: it has that stream's
 * clock from the start, like a record. A stream remembers OR_GATES gates. Behind more of them its
 * order is unknown, so nothing is reported there until the host has waited for it.
 *
 * Queries. Whether a query finds work done depends on how fast the device is, and what it finds
 * orders the caller. So that no verdict depends on it, the first query of a record, or of what is
 * new on a stream, by a thread that nothing else has ordered after it is answered "not ready",
 * which is right at any time. A program may record, or queue, anew each turn of a loop and query
 * once: after OR_ANSWERS such answers in a row for an event or a stream comes the truth.
 *
 * All under orSanitizerMutex. Timelines are never freed; there are as many as there were streams at
 * one time.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

enum { OR_SLOTS = 1 << 16, OR_EDGES = 512, OR_ANSWERS = 10 };

static uint32_t timeline_of_slot[OR_SLOTS]; /* + 1; 0: none yet */
static orTimeline *timelines;
static uint32_t timeline_count, timeline_room;
static orRaceEdge edges[OR_EDGES]; /* the newest, in a ring */
static uint64_t edge_count;        /* ever */

/* ---- timelines ---- */

orTimeline *orTimelineAt(uint32_t timeline) { return &timelines[timeline]; }

static uint32_t newTimeline(void) {
  if (timeline_count == timeline_room) {
    timeline_room = timeline_room ? timeline_room * 2 : 16;
    timelines = orSanitizerResize(timelines, timeline_room * sizeof *timelines);
  }
  orTimeline *t = &timelines[timeline_count];
  *t = (orTimeline){.unsure_from = UINT64_MAX};
  orClockReserve(&t->clock, timeline_count + 1);
  t->clock.at[timeline_count] = 1;
  return timeline_count++;
}

static uint32_t indexOf(const orTimeline *t) { return (uint32_t)(t - timelines); }

/* What the timeline does from now on is not in copies of its clock made before. */
static void step(orTimeline *t) { t->clock.at[indexOf(t)]++; }

/* A slot's streams count as one timeline, known by the latest: handles of earlier ones still come,
 * with the blocks that were allocated on them. */
uint32_t orTimelineOf(orStream_t stream) {
  uint32_t *known = &timeline_of_slot[orHandleIndex(stream) % OR_SLOTS];
  if (!*known) *known = newTimeline() + 1;
  orTimeline *t = &timelines[*known - 1];
  if (orHandleGeneration(stream) > orHandleGeneration(t->stream)) {
    if (t->stream && orHandleDevice(t->stream) != orHandleDevice(stream)) {
      orHostAcquireAll(&t->clock); /* a wait for the earlier one's device would miss it now */
      step(t);
    }
    t->stream = stream;
    t->external = false;
  }
  return *known - 1;
}

static void becomeUnsure(orTimeline *t) {
  uint32_t own = indexOf(t);
  if (t->unsure_from != UINT64_MAX && !orHappensBeforeThread(own, t->unsure_from)) return;
  step(t);
  t->unsure_from = t->clock.at[own];
}

static void goBehind(orTimeline *t, orSync *gate) {
  for (uint32_t i = 0; i < t->gate_count; i++)
    if (t->gates[i].gate == gate) return;
  if (t->gate_count == OR_GATES) {
    becomeUnsure(t);
    return;
  }
  step(t);
  t->gates[t->gate_count].gate = orSyncRetain(gate);
  t->gates[t->gate_count++].from = t->clock.at[indexOf(t)];
}

/* For pictures. */
static void noteEdge(const orSync *sync, orStream_t to) {
  if (!sync->moment || (to && sync->stream == to)) return;
  edges[edge_count++ % OR_EDGES] =
      (orRaceEdge){sync->stream, to, sync->moment, orSanitizerMoment()};
}

void orClocksEdges(orStream_t earlier, orStream_t later, orRaceOrder *order) {
  order->count = 0;
  uint64_t all = edge_count < OR_EDGES ? edge_count : OR_EDGES;
  for (uint64_t i = edge_count - all; i < edge_count; i++) {
    const orRaceEdge *e = &edges[i % OR_EDGES];
    bool shows = e->waited > order->earlier || (e->from == earlier && e->to == later);
    if (!shows || e->waited > order->later) continue;
    if (order->count == OR_RACE_EDGES)
      memmove(order->edges, order->edges + 1, --order->count * sizeof order->edges[0]);
    order->edges[order->count++] = *e;
  }
}

void orTimelineWait(orStream_t stream, orSync *sync) {
  noteEdge(sync, stream);
  orTimeline *t = orTimelineAt(orTimelineOf(stream));
  orHostRelease(&t->clock);
  orClockJoin(&t->clock, &sync->clock);
  if (sync->gate) goBehind(t, sync);
  for (uint32_t i = 0; i < sync->gate_count; i++)
    if (sync->gates[i]->gate)
      goBehind(t, sync->gates[i]);
    else
      orClockJoin(&t->clock, &sync->gates[i]->clock);
  if (sync->unsure) becomeUnsure(t);
  if (sync->lost && !orClockIncludes(&t->clock, sync->lost - 1, sync->lost_counter)) {
    t->lost = sync->lost;
    t->lost_counter = sync->lost_counter;
  }
}

/* ---- moments ---- */

static orSync *newSync(void) {
  orSync *sync = orSanitizerAllocate(sizeof *sync);
  *sync = (orSync){.refs = 1};
  return sync;
}

void orSyncRelease(orSync *sync) {
  if (!sync || --sync->refs) return;
  for (uint32_t i = 0; i < sync->gate_count; i++) orSyncRelease(sync->gates[i]);
  free(sync->clock.at);
  free(sync);
}

static void syncGoBehind(orSync *sync, orSync *gate) {
  if (sync == gate) return;
  for (uint32_t i = 0; i < sync->gate_count; i++)
    if (sync->gates[i] == gate) return;
  if (sync->gate_count == OR_GATES)
    sync->unsure = true;
  else
    sync->gates[sync->gate_count++] = orSyncRetain(gate);
}

static void syncAddTimeline(orSync *sync, orTimeline *t) {
  uint64_t *own = &t->clock.at[indexOf(t)], now = *own;
  *own = t->newest;
  orClockJoin(&sync->clock, &t->clock);
  *own = now;
  for (uint32_t i = 0; i < t->gate_count; i++) syncGoBehind(sync, t->gates[i].gate);
  sync->unsure |=
      t->unsure_from != UINT64_MAX && !orHappensBeforeThread(indexOf(t), t->unsure_from);
  step(t);
}

orSync *orTimelineSnapshot(orStream_t stream) {
  orSync *sync = newSync();
  syncAddTimeline(sync, orTimelineAt(orTimelineOf(stream)));
  sync->stream = stream;
  sync->moment = orSanitizerMoment();
  return sync;
}

orSync *orDeviceSnapshot(int device) {
  orSync *sync = newSync();
  for (uint32_t i = 0; i < timeline_count; i++)
    if (!timelines[i].external && (device < 0 || orHandleDevice(timelines[i].stream) == device))
      syncAddTimeline(sync, &timelines[i]);
  sync->moment = orSanitizerMoment();
  return sync;
}

orSync *orSyncRecord(orStream_t stream, const orSync *replaced) {
  orHostRelease(&orTimelineAt(orTimelineOf(stream))->clock);
  orSync *sync = orTimelineSnapshot(stream);
  sync->timeline = orTimelineOf(stream);
  sync->counter = sync->clock.at[sync->timeline];
  if (replaced) sync->queries.early = replaced->queries.early;
  if (replaced && replaced->counter &&
      !orClockIncludes(&sync->clock, replaced->timeline, replaced->counter) &&
      !orHappensBeforeThread(replaced->timeline, replaced->counter)) {
    sync->lost = replaced->timeline + 1;
    sync->lost_counter = replaced->counter;
  }
  return sync;
}

/* ---- queries ---- */

static bool isKnown(const orClock *clock) {
  for (uint32_t i = 0; i < clock->size; i++)
    if (clock->at[i] && !orHappensBeforeThread(i, clock->at[i])) return false;
  return true;
}

static bool isOrdered(const orSync *sync) {
  bool known = isKnown(&sync->clock);
  for (uint32_t i = 0; known && i < sync->gate_count; i++) known = isKnown(&sync->gates[i]->clock);
  return known;
}

static bool isEarly(orQueries *queries, uint64_t asked, bool ordered, bool done) {
  uint64_t thread = orHostThreadNumber();
  bool first = queries->asked != asked || queries->thread != thread;
  bool early = first && done && !ordered && queries->early < OR_ANSWERS;
  queries->asked = asked;
  queries->thread = thread;
  if (early)
    queries->early++;
  else if (done)
    queries->early = 0;
  return early;
}

bool orSyncQueryIsEarly(orSync *sync, bool done) {
  return isEarly(&sync->queries, 1, isOrdered(sync), done);
}

bool orTimelineQueryIsEarly(orStream_t stream, bool done) {
  orTimeline *t = orTimelineAt(orTimelineOf(stream));
  orSync *now = orTimelineSnapshot(stream);
  bool ordered = isOrdered(now);
  orSyncRelease(now);
  return isEarly(&t->queries, t->newest + 1, ordered, done);
}

/* ---- gates ---- */

orSync *orSyncGate(void) {
  orSync *sync = newSync();
  sync->gate = true;
  return sync;
}

void orSyncJoin(orSync *into, const orSync *other) {
  orClockJoin(&into->clock, &other->clock);
  for (uint32_t i = 0; i < other->gate_count; i++) syncGoBehind(into, other->gates[i]);
  into->unsure |= other->unsure;
}

/* The caller has a reference of its own. */
static void leaveGate(orTimeline *t, orSync *gate) {
  for (uint32_t i = 0; i < t->gate_count; i++) {
    if (t->gates[i].gate != gate) continue;
    orClockJoin(&t->clock, &gate->clock);
    t->gates[i] = t->gates[--t->gate_count];
    gate->refs--;
    return;
  }
}

/* A gate behind others would keep them, and those behind which they were, for as long as it is
 * there. */
static void leaveOpenGates(orSync *sync) {
  for (uint32_t i = 0; i < sync->gate_count;) {
    orSync *gate = sync->gates[i];
    if (gate->gate) {
      i++;
      continue;
    }
    orClockJoin(&sync->clock, &gate->clock);
    sync->gates[i] = sync->gates[--sync->gate_count];
    orSyncRelease(gate);
  }
}

void orSyncOpen(orSync *gate, orStream_t stream) {
  orHostReleaseAll(&gate->clock);
  if (stream) {
    orTimeline *t = orTimelineAt(orTimelineOf(stream));
    orClockJoin(&gate->clock, &t->clock);
    step(t);
  }
  gate->gate = false;
  leaveOpenGates(gate);
  for (uint32_t i = 0; i < timeline_count; i++) leaveGate(&timelines[i], gate);
}

void orHostJoin(const orSync *sync, bool everybody) {
  void (*acquire)(const orClock *clock) = everybody ? orHostAcquireAll : orHostAcquire;
  noteEdge(sync, 0);
  acquire(&sync->clock);
  for (uint32_t i = 0; i < sync->gate_count; i++) acquire(&sync->gates[i]->clock);
}

void orClocksForgetGates(int device) {
  for (uint32_t i = 0; i < timeline_count; i++) {
    orTimeline *t = &timelines[i];
    if (device >= 0 && orHandleDevice(t->stream) != device) continue;
    while (t->gate_count) orSyncRelease(t->gates[--t->gate_count].gate);
    t->unsure_from = UINT64_MAX;
  }
}
