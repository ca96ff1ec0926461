/*
 * Capture: a stream's work is kept as the nodes of a graph instead of being run.
 *
 *            begin                end: every branch has been joined
 *     NONE --------> ACTIVE ----------------------------------------> a graph
 *                       |  a call that no graph can repeat
 *                       +-------------> INVALIDATED ----------------> an error, and nothing is kept
 *
 * A capture belongs to the stream that it began on, whichever threads queue there. Another stream
 * joins by waiting for an event that was recorded in the capture, and becomes a *branch*. Each
 * branch counts its work and has a vector clock: how much of every other branch's work comes before
 * what it queues next. A record keeps the clock and a wait joins it. A branch is joined if the
 * origin, branch 0, comes after all of its work.
 *
 * s->capturing is the stream's, under its lock, and holds a reference. Each cell that was recorded
 * in a capture holds one too; nothing completes such a cell. A branch's `reserved` is under the
 * lock of its stream. All else of a capture is under the capture's lock, which is taken under a
 * stream's. A record is reserved and committed with its stream's lock held throughout. The thread
 * that ends a capture first sets its state, then takes each branch's stream out under that stream's
 * lock. After that no thread is between the two steps, and the nodes are that thread's own.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stream/stream.h"

/* OVER: nothing more is added, and its streams are being taken out. */
typedef enum orCaptureState {
  OR_CAPTURE_ACTIVE,
  OR_CAPTURE_INVALIDATED,
  OR_CAPTURE_OVER
} orCaptureState;

struct orBranch {
  orCapture *capture;
  orStream_t stream;
  int priority;
  uint32_t index;
  orGraphNode *reserved; /* a node that may not be committed */
  /* how much of each branch's work comes before; all of its own */
  uint32_t after[OR_MOST_BRANCHES];
};

struct orCapture {
  _Atomic uint32_t refs;
  orMutex lock;
  orCaptureState state;
  char invalidated_by[64]; /* the call that did */
  int device;
  uint64_t id;
  uint32_t count;
  orBranch *branches[OR_MOST_BRANCHES];
  orGraphNodes nodes;
};

/* The active and invalidated captures of each device. Where there are none, none is searched. */
static _Atomic int captures[OPENREG_MAX_DEVICES];
/* The captures that have ended, of all devices. Counted after the state became OVER, so a thread
 * that reads the count sees the state. */
static _Atomic uint64_t ended;

void orCaptureRelease(orCapture *c) {
  if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1) return;
  for (uint32_t i = 0; i < c->count; i++) {
    free(c->branches[i]->reserved);
    free(c->branches[i]);
  }
  free(c);
}

void orCaptureForget(orCell *cell) {
  orCaptureRelease(cell->capture);
  cell->capture = NULL;
}

/* Lock of the stream held. */
static void takeOut(orStream *s) {
  orMutexAssertHeld(&s->lock);
  orCapture *c = s->capturing->capture;
  s->capturing = NULL;
  orCaptureRelease(c);
}

/* Reads the state under the capture's lock. */
static orCaptureState stateOf(orCapture *c) {
  orMutexLock(&c->lock);
  orCaptureState state = c->state;
  orMutexUnlock(&c->lock);
  return state;
}

bool orCaptureHolds(orStream *s) {
  if (!s->capturing) return false;
  bool over = orCaptureIsOver(s->capturing->capture);
  if (over) takeOut(s);
  return !over;
}

/* ---- what goes wrong ---- */

static void invalidate(orCapture *c, const char *call) {
  orMutexLock(&c->lock);
  if (c->state == OR_CAPTURE_ACTIVE) {
    c->state = OR_CAPTURE_INVALIDATED;
    snprintf(c->invalidated_by, sizeof c->invalidated_by, "%s", call);
  }
  orMutexUnlock(&c->lock);
}

/* Called when the capture is not active, which is final. */
static orError_t refuseInvalidated(const orCapture *c) {
  return orFail(orErrorStreamCaptureInvalidated, "the capture was invalidated by %s",
                *c->invalidated_by ? c->invalidated_by : "its end, by another thread");
}

orError_t orCaptureRefuse(orStream *s, const char *call, const char *instead) {
  invalidate(s->capturing->capture, call);
  orStream_t handle = s->last_handle;
  orMutexUnlock(&s->lock);
  return orFail(orErrorStreamCaptureUnsupported,
                "%s: not permitted while stream 0x%" PRIx64
                " is capturing; the capture is invalidated: %s",
                call, handle, instead);
}

orError_t orCaptureRefuseEvent(const orCell *cell, const char *call) {
  invalidate(cell->capture, call);
  return orFail(orErrorCapturedEvent,
                "%s: the event was last recorded in a capture, where nothing runs", call);
}

void orCapturesInvalidate(int device, const char *call) {
  if (!atomic_load_explicit(&captures[device], memory_order_acquire)) return;
  uint32_t i = 0;
  for (orStream *s; (s = orHandleNext(&orStreamTable, &i));) {
    if (!atomic_load_explicit(&s->slot.handle, memory_order_acquire)) continue;
    orMutexLock(&s->lock);
    if (s->device == device && orCaptureHolds(s)) invalidate(s->capturing->capture, call);
    orMutexUnlock(&s->lock);
  }
}

orError_t orCapturesRefuse(int device, const char *call) {
  if (OR_LIKELY(!atomic_load_explicit(&captures[device], memory_order_acquire))) return orSuccess;
  orCapturesInvalidate(device, call);
  return orFail(
      orErrorStreamCaptureUnsupported,
      "%s: not permitted while a stream of device %d is capturing; the capture is invalidated: "
      "synchronise before or after",
      call, device);
}

/* ---- nodes ---- */

orGraphNode *orGraphNodeNew(size_t args_size) {
  size_t task = OR_TASK_HEADER + ((args_size + 15) & ~(size_t)15);
  orGraphNode *n = aligned_alloc(16, (offsetof(orGraphNode, task) + task + 15) & ~(size_t)15);
  if (n) *n = (orGraphNode){.task = {.size = task}};
  return n;
}

void orGraphNodesFree(orGraphNodes *nodes) {
  orMutexAssertNone();
  for (orGraphNode *n = nodes->first, *next; n; n = next) {
    next = n->next;
    if (n->destroy) orCallDestroy(n->destroy, orTaskArgs(&n->task));
    free(n);
  }
  *nodes = (orGraphNodes){.end = &nodes->first};
}

orError_t orCaptureReserve(orStream *s, size_t args_size, orTask **task) {
  orBranch *b = s->capturing;
  orMutexAssertHeld(&s->lock);
  if (stateOf(b->capture) != OR_CAPTURE_ACTIVE) return refuseInvalidated(b->capture);
  free(b->reserved);
  b->reserved = orGraphNodeNew(args_size);
  if (!b->reserved)
    return orFail(orErrorMemoryAllocation, "no memory for a node with %zu bytes of arguments",
                  args_size);
  *task = &b->reserved->task;
  return orSuccess;
}

/* Lock of the capture held. */
static void append(orBranch *b, orGraphNode *node) {
  orGraphNodes *nodes = &b->capture->nodes;
  node->branch = b->index;
  *nodes->end = node;
  nodes->end = &node->next;
}

bool orCaptureCommit(orStream *s, const orTask *task) {
  orBranch *b = s->capturing;
  orMutexAssertHeld(&s->lock);
  if (!b->reserved || task != &b->reserved->task) return false;
  orMutexLock(&b->capture->lock);
  /* the node's alone: its record must not destroy the arguments */
  b->reserved->destroy = b->reserved->task.destroy;
  b->reserved->task.destroy = NULL;
  append(b, b->reserved);
  b->reserved = NULL;
  b->after[b->index]++;
  orMutexUnlock(&b->capture->lock);
  return true;
}

/* ---- fork and join ---- */

/* A record's clock: its node's arguments. */
static uint32_t *clockOf(orGraphNode *record) { return orTaskArgs(&record->task); }

orError_t orCaptureRecord(orStream *s, orCell *cell) {
  orBranch *b = s->capturing;
  orCapture *c = b->capture;
  orGraphNode *record = orGraphNodeNew(sizeof b->after);
  if (!record) return orFail(orErrorMemoryAllocation, "no memory for an event's record");
  record->task.kind = OR_KIND_RECORD;
  record->task.name = "orEventRecord";
  memcpy(clockOf(record), b->after, sizeof b->after);
  orMutexLock(&c->lock);
  bool active = c->state == OR_CAPTURE_ACTIVE;
  if (active) append(b, record);
  orMutexUnlock(&c->lock);
  if (!active) {
    free(record);
    return refuseInvalidated(c);
  }
  atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
  cell->capture = c;
  cell->record = record;
  return orSuccess;
}

/* Orders the branch after a record of another branch of its capture, whose lock is held. */
static void appendWait(orBranch *b, orGraphNode *wait, orGraphNode *record) {
  const uint32_t *clock = clockOf(record);
  wait->task.kind = OR_KIND_WAIT;
  wait->task.name = "orStreamWaitEvent";
  wait->record = record;
  record->awaited = true;
  for (uint32_t i = 0; i < OR_MOST_BRANCHES; i++)
    if (clock[i] > b->after[i]) b->after[i] = clock[i];
  append(b, wait);
}

/* Locks of the stream and of the capture held. */
static orError_t join(orCapture *c, orStream *s) {
  if (c->count == OR_MOST_BRANCHES)
    return orFail(orErrorMemoryAllocation,
                  "stream 0x%" PRIx64 " cannot join the capture, which has %d streams, the maximum",
                  s->last_handle, OR_MOST_BRANCHES);
  orBranch *b = calloc(1, sizeof *b);
  if (!b) return orFail(orErrorMemoryAllocation, "no memory for a stream of a capture");
  *b = (orBranch){
      .capture = c, .stream = s->last_handle, .priority = s->priority, .index = c->count};
  c->branches[c->count++] = b;
  atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
  s->capturing = b;
  return orSuccess;
}

/* Orders the stream after a record of an active capture, which it joins if it is in none. Changes
 * nothing on failure. Locks of the stream and of the capture held. */
static orError_t follow(orCapture *c, orStream *s, orGraphNode *record) {
  if (s->capturing && s->capturing->index == record->branch) return orSuccess;
  orGraphNode *wait = orGraphNodeNew(0);
  if (!wait) return orFail(orErrorMemoryAllocation, "no memory for a wait of a capture");
  orError_t error = s->capturing ? orSuccess : join(c, s);
  if (error)
    free(wait);
  else
    appendWait(s->capturing, wait, record);
  return error;
}

/* Why a stream cannot come after a record of the capture, which is then invalidated; or null. */
static const char *cannotJoin(const orCapture *c, const orStream *s) {
  if (s->device != c->device) return "a graph has one device";
  if (s->owner == OR_OWNER_GRAPH) return "a stream of a graph cannot capture";
  return s->owner == OR_OWNER_DEVICE ? "a default stream cannot capture" : NULL;
}

static orError_t waitInside(orStream *s, orCell *cell) {
  orCapture *c = cell->capture;
  const char *why = cannotJoin(c, s);
  if (why && stateOf(c) != OR_CAPTURE_OVER) {
    invalidate(c, "orStreamWaitEvent");
    return orFail(orErrorStreamCaptureUnsupported,
                  "orStreamWaitEvent: stream 0x%" PRIx64 " cannot join the capture: %s",
                  s->last_handle, why);
  }
  orError_t error = orSuccess;
  orMutexLock(&c->lock);
  if (c->state == OR_CAPTURE_INVALIDATED)
    error = refuseInvalidated(c);
  else if (c->state == OR_CAPTURE_OVER)
    error = orFail(orErrorCapturedEvent,
                   "orStreamWaitEvent: the event was last recorded in a capture that has ended");
  else
    error = follow(c, s, cell->record);
  orMutexUnlock(&c->lock);
  return error;
}

orError_t orCaptureWait(orStream *s, orCell *cell) {
  orMutexAssertHeld(&s->lock);
  orCapture *own = orCaptureHolds(s) ? s->capturing->capture : NULL;
  if (!cell->capture) {
    if (!own)
      return orFail(orErrorStreamCaptureInvalidated,
                    "orStreamWaitEvent: the capture of stream 0x%" PRIx64
                    " has been ended by another thread",
                    s->last_handle);
    invalidate(own, "orStreamWaitEvent");
    return orFail(
        orErrorStreamCaptureIsolation,
        "orStreamWaitEvent: the event was not recorded in the capture of stream 0x%" PRIx64
        ": wait for it before the capture begins",
        s->last_handle);
  }
  if (!own || own == cell->capture) return waitInside(s, cell);
  invalidate(own, "orStreamWaitEvent");
  invalidate(cell->capture, "orStreamWaitEvent");
  return orFail(orErrorStreamCaptureMerge,
                "orStreamWaitEvent: stream 0x%" PRIx64 " is in another capture than the event",
                s->last_handle);
}

/* ---- begin and end ---- */

static orCapture *newCapture(int device) {
  static _Atomic uint64_t ids;
  orCapture *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  orMutexInit(&c->lock, OR_RANK_CAPTURE);
  atomic_init(&c->refs, 1);
  c->device = device;
  c->id = 1 + atomic_fetch_add_explicit(&ids, 1, memory_order_relaxed);
  c->nodes.end = &c->nodes.first;
  return c;
}

/* Lock of the stream held. */
static orError_t begin(orStream *s) {
  if (s->owner == OR_OWNER_DEVICE || s->owner == OR_OWNER_GRAPH)
    return orFail(orErrorStreamCaptureUnsupported,
                  "%s of device %d cannot capture: make another stream current",
                  orStreamOwnerName(s->owner), s->device);
  if (orCaptureHolds(s))
    return orFail(orErrorStreamCaptureUnsupported, "stream 0x%" PRIx64 " is capturing already",
                  s->last_handle);
  orCapture *c = newCapture(s->device);
  if (!c) return orFail(orErrorMemoryAllocation, "no memory for a capture");
  orMutexLock(&c->lock);
  orError_t error = join(c, s);
  orMutexUnlock(&c->lock);
  orCaptureRelease(c); /* if it has joined, the stream holds a reference */
  OR_TRY(error);
  atomic_fetch_add_explicit(&captures[s->device], 1, memory_order_release);
  return orSuccess;
}

orError_t orStreamBeginCapture(orStream_t stream) {
  orStream *s;
  int device;
  OR_TRY(orEnterBlocking());
  OR_TRY(orStreamGetDevice(stream, &device));
  OR_TRY(orDeviceCheckLost(device));
  OR_TRY(orStreamLock(stream, &s));
  orError_t error = begin(s);
  orMutexUnlock(&s->lock);
  return error;
}

/* Ends the capture: nothing more is added. Lock of the origin held; the caller has a reference. */
static orCaptureState seal(orCapture *c) {
  orMutexLock(&c->lock);
  orCaptureState before = c->state;
  c->state = OR_CAPTURE_OVER;
  orMutexUnlock(&c->lock);
  atomic_fetch_sub_explicit(&captures[c->device], 1, memory_order_release);
  atomic_fetch_add_explicit(&ended, 1, memory_order_release);
  return before;
}

static void takeAllOut(orCapture *c) {
  for (uint32_t i = 0; i < c->count; i++) {
    orStream *s = orHandleSlotAt(&orStreamTable, orHandleIndex(c->branches[i]->stream));
    orMutexLock(&s->lock);
    if (s->capturing && s->capturing->capture == c) takeOut(s);
    orMutexUnlock(&s->lock);
  }
}

/* A branch with work that the origin does not come after; or null. */
static const orBranch *unjoined(const orCapture *c) {
  for (uint32_t i = 1; i < c->count; i++)
    if (c->branches[i]->after[i] > c->branches[0]->after[i]) return c->branches[i];
  return NULL;
}

/* For a capture that is over: why it is no graph, or orSuccess. */
static orError_t check(const orCapture *c, orCaptureState was) {
  if (was == OR_CAPTURE_INVALIDATED) return refuseInvalidated(c);
  const orBranch *loose = unjoined(c);
  if (!loose) return orSuccess;
  return orFail(orErrorStreamCaptureUnjoined,
                "stream 0x%" PRIx64
                " has work in the capture that the origin stream does not come "
                "after: record an event there, and have the origin stream wait for it",
                loose->stream);
}

orError_t orCaptureEnd(orStream_t stream, orCaptured *captured) {
  orStream *s;
  OR_TRY(orStreamLock(stream, &s));
  if (!orCaptureHolds(s) || s->capturing->index) {
    bool branch = s->capturing;
    orMutexUnlock(&s->lock);
    return orFail(orErrorStreamCaptureUnmatched, "stream 0x%" PRIx64 " %s", stream,
                  branch ? "joined a capture that another stream began" : "is not capturing");
  }
  orCapture *c = s->capturing->capture;
  atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
  orCaptureState was = seal(c);
  orMutexUnlock(&s->lock);
  takeAllOut(c);
  orError_t error = check(c, was);
  if (!error) {
    *captured = (orCaptured){.device = c->device, .branches = c->count, .nodes = c->nodes.first};
    for (uint32_t i = 0; i < c->count; i++) captured->priorities[i] = c->branches[i]->priority;
    c->nodes = (orGraphNodes){.end = &c->nodes.first};
  }
  orGraphNodesFree(&c->nodes);
  orCaptureRelease(c);
  return error;
}

orCapture *orCaptureLeave(orStream *s) {
  if (!orCaptureHolds(s)) return NULL;
  orCapture *c = s->capturing->capture;
  invalidate(c, "orStreamDestroy");
  bool origin = !s->capturing->index;
  if (origin) {
    atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    seal(c);
  }
  takeOut(s);
  return origin ? c : NULL;
}

void orCaptureAbandon(orCapture *c) {
  if (!c) return;
  takeAllOut(c);
  orGraphNodesFree(&c->nodes);
  orCaptureRelease(c);
}

orError_t orStreamGetCaptureInfo(orStream_t stream, orCaptureStatus *status, uint64_t *id) {
  orStream *s;
  OR_TRY(orEnter());
  if (!status) return orFail(orErrorInvalidValue, "orStreamGetCaptureInfo: null result");
  OR_TRY(orStreamLock(stream, &s));
  *status = !orCaptureHolds(s)                                    ? orCaptureStatusNone
            : stateOf(s->capturing->capture) == OR_CAPTURE_ACTIVE ? orCaptureStatusActive
                                                                  : orCaptureStatusInvalidated;
  if (id) *id = s->capturing ? s->capturing->capture->id : 0;
  orMutexUnlock(&s->lock);
  return orSuccess;
}

/* Whether any stream of the device may be capturing. */
static bool mayCapture(int device) {
  return atomic_load_explicit(&captures[device], memory_order_acquire) != 0;
}

uint64_t orCapturesEnded(void) { return atomic_load_explicit(&ended, memory_order_acquire); }

bool orCaptureIsOver(orCapture *c) { return stateOf(c) == OR_CAPTURE_OVER; }

orCapture *orStreamCapture(orStream_t stream) {
  if (OR_LIKELY(!mayCapture(orHandleDevice(stream)))) return NULL;
  orStream *s = orHandleSlotAt(&orStreamTable, orHandleIndex(stream));
  orMutexLock(&s->lock);
  orCapture *c = orHandleIs(&s->slot, stream) && orCaptureHolds(s) ? s->capturing->capture : NULL;
  if (c) atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
  orMutexUnlock(&s->lock);
  return c;
}

/* Lock of the stream held. */
static bool appendReport(orBranch *b, const orNodeTool *tool, const void *args, size_t size) {
  orGraphNode *n = orGraphNodeNew(size);
  if (!n) return false;
  n->report = tool->report;
  n->destroy = tool->destroy;
  memcpy(orTaskArgs(&n->task), args, size);
  orMutexLock(&b->capture->lock);
  append(b, n);
  orMutexUnlock(&b->capture->lock);
  return true;
}

/* Returns the stream locked if it captures, else null. */
static orStream *lockCapturing(orStream_t stream) {
  orStream *s;
  if (stream == OR_STREAM_DEFAULT || !orHandleFind(&orStreamTable, stream)) return NULL;
  if (!mayCapture(orHandleDevice(stream))) return NULL;
  if (orStreamLock(stream, &s)) return NULL;
  if (orCaptureHolds(s)) return s;
  orMutexUnlock(&s->lock);
  return NULL;
}

bool orStreamCaptures(orStream_t stream) {
  orStream *s = lockCapturing(stream);
  if (s) orMutexUnlock(&s->lock);
  return s;
}

orError_t orStreamRefuseCapture(orStream_t stream, const char *call, const char *instead) {
  OR_TRY(orEnter());
  if (!call || !instead) return orFail(orErrorInvalidValue, "orStreamRefuseCapture: null text");
  if (stream != OR_STREAM_DEFAULT && !orHandleFind(&orStreamTable, stream))
    return orErrorInvalidResourceHandle;
  orStream *s = lockCapturing(stream);
  return s ? orCaptureRefuse(s, call, instead) : orSuccess;
}

bool orCaptureReport(orStream_t stream, const orNodeTool *tool, const void *args, size_t size,
                     bool *kept) {
  orStream *s = lockCapturing(stream);
  *kept = false;
  if (!s) return false;
  *kept = appendReport(s->capturing, tool, args, size);
  orMutexUnlock(&s->lock);
  return true;
}
