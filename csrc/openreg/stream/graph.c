/*
 * Graphs: captured work, queued again by each replay.
 *
 * A replay queues copies of the captured records, with fresh cells for events and waits. Branch 0's
 * go to the stream of the launch, in one piece, so that no other thread's work comes between them;
 * the other branches' go to streams of the graph's own. Code that runs, cancels, shows or disturbs
 * tasks therefore treats them as any others. Each branch ends with an event's record that drops a
 * reference to the graph: its nodes' arguments, which the copies share, outlive every replay.
 *
 * Replays of one graph follow each other: a replay on another stream than the previous one waits
 * for that one's last record. Threads that replay it take turns, with no lock held; `cells`, `end`
 * and `last` belong to the thread that has the turn. `body` of a slot and the list of user objects
 * are under the slot's lock.
 */
#include <stdlib.h>

#include "stream/stream.h"

enum { OR_MOST_GRAPHS = 1 << 16 };

typedef struct orLine { /* a branch, as it is queued */
  orStream_t stream;    /* 0: the stream of the launch */
  const orTask **tasks;
  size_t count, bytes;
} orLine;

typedef struct orObject {
  struct orObject *next;
  void *object;
  void (*destroy)(void *object);
} orObject;

typedef struct orGraphBody {
  _Atomic uint32_t refs; /* the handle's, one a line of each replay, each caller's */
  _Atomic uint32_t turn; /* futex: 0 free, 1 taken, 2 taken and a thread sleeps */
  int device;
  orGraphNodes nodes; /* captured */
  orGraphNodes own;   /* the first node of line 0, and the last of each line */
  orObject *objects;
  uint32_t line_count, cell_count;
  orLine *lines;
  orCell **cells; /* [0] the end of the previous replay, then the ends of the lines, then records */
  uint32_t *recorded_by; /* the line of each cell */
  orCell *end;           /* the newest replay's */
  orStream_t last;       /* the stream of that replay */
} orGraphBody;

typedef struct orGraphSlot {
  orSlot slot;
  orMutex lock;
  orGraphBody *body; /* under `lock` */
} orGraphSlot;

static orHandleTable table = {.kind = OR_HANDLE_GRAPH,
                              .what = "graph",
                              .slot_size = sizeof(orGraphSlot),
                              .limit = OR_MOST_GRAPHS,
                              .lock_at = offsetof(orGraphSlot, lock),
                              .rank = OR_RANK_GRAPH,
                              .lock = OR_MUTEX_INITIALIZER(OR_RANK_HANDLES)};

/* ---- making ---- */

static void freeBody(orGraphBody *b) {
  orGraphNodesFree(&b->nodes);
  orGraphNodesFree(&b->own);
  for (orObject *o = b->objects, *next; o; o = next) {
    next = o->next;
    orCallDestroy(o->destroy, o->object);
    free(o);
  }
  for (uint32_t i = 0; b->lines && i < b->line_count; i++) {
    if (b->lines[i].stream) orStreamUnmake(b->lines[i].stream);
    free(b->lines[i].tasks);
  }
  orCellRelease(b->end);
  free(b->lines);
  free(b->cells);
  free(b->recorded_by);
  free(b);
}

static void release(orGraphBody *b, uint32_t refs) {
  if (atomic_fetch_sub_explicit(&b->refs, refs, memory_order_acq_rel) == refs) freeBody(b);
}

static void destroyLine(void *args) { release(*(orGraphBody **)args, 1); }

static void addToLine(orLine *line, const orGraphNode *n) {
  line->tasks[line->count++] = &n->task;
  line->bytes += n->task.size;
}

/* Adds a record or wait of the graph's own to a line. */
static bool addOwn(orGraphBody *b, orTaskKind kind, uint32_t line, uint32_t cell) {
  orGraphNode *n = orGraphNodeNew(sizeof b);
  if (!n) return false;
  n->branch = line;
  n->task.kind = kind;
  n->task.name = "orGraphReplay";
  n->task.destroy = kind == OR_KIND_RECORD ? destroyLine : NULL;
  n->task.u.slot = cell;
  *(orGraphBody **)orTaskArgs(&n->task) = b;
  *b->own.end = n;
  b->own.end = &n->next;
  addToLine(&b->lines[line], n);
  return true;
}

/* Removes events' records that no wait is for; numbers the cells of other records and of waits. */
static void numberCells(orGraphBody *b) {
  for (orGraphNode **at = &b->nodes.first, *n; (n = *at);) {
    if (n->task.kind == OR_KIND_RECORD && !n->awaited) {
      *at = n->next;
      free(n);
      continue;
    }
    if (n->task.kind == OR_KIND_RECORD) n->task.u.slot = b->cell_count++;
    if (n->task.kind == OR_KIND_WAIT) n->task.u.slot = n->record->task.u.slot;
    at = &n->next;
  }
}

/* Line 0 begins with a wait for the previous replay; each line ends by dropping a reference. */
static bool makeLines(orGraphBody *b) {
  size_t *counts = calloc(b->line_count, sizeof *counts);
  if (!counts) return false;
  for (const orGraphNode *n = b->nodes.first; n; n = n->next) counts[n->branch] += !n->report;
  bool made = true;
  for (uint32_t i = 0; i < b->line_count && made; i++)
    made = (b->lines[i].tasks = calloc(counts[i] + 2, sizeof(orTask *))) != NULL;
  free(counts);
  if (!made) return false;
  if (!addOwn(b, OR_KIND_WAIT, 0, 0)) return false;
  for (const orGraphNode *n = b->nodes.first; n; n = n->next)
    if (!n->report) addToLine(&b->lines[n->branch], n);
  for (uint32_t i = 0; i < b->line_count; i++)
    if (!addOwn(b, OR_KIND_RECORD, i, 1 + i)) return false;
  return true;
}

static bool makeCells(orGraphBody *b) {
  b->cells = calloc(b->cell_count, sizeof *b->cells);
  b->recorded_by = calloc(b->cell_count, sizeof *b->recorded_by);
  if (!b->cells || !b->recorded_by) return false;
  for (uint32_t i = 0; i < b->line_count; i++) b->recorded_by[1 + i] = i;
  for (const orGraphNode *n = b->nodes.first; n; n = n->next)
    if (n->task.kind == OR_KIND_RECORD) b->recorded_by[n->task.u.slot] = n->branch;
  return true;
}

static orError_t publish(orGraphBody *b, orGraph_t *graph) {
  void *slot;
  OR_TRY(orHandleReserve(&table, b->device, &slot, graph));
  orGraphSlot *g = slot;
  orMutexLock(&g->lock);
  g->body = b;
  orHandlePublish(&g->slot, *graph);
  orMutexUnlock(&g->lock);
  return orSuccess;
}

static orError_t fill(orGraphBody *b, const int *priorities) {
  numberCells(b);
  b->lines = calloc(b->line_count, sizeof *b->lines);
  if (!b->lines || !makeLines(b) || !makeCells(b))
    return orFail(orErrorMemoryAllocation, "no memory for a graph");
  for (uint32_t i = 1; i < b->line_count; i++)
    OR_TRY(orStreamMake(b->device, priorities[i], OR_OWNER_GRAPH, &b->lines[i].stream));
  return orSuccess;
}

static orError_t make(const orCaptured *from, orGraph_t *graph) {
  orGraphBody *b = calloc(1, sizeof *b);
  if (!b) {
    orGraphNodesFree(&(orGraphNodes){.first = from->nodes});
    return orFail(orErrorMemoryAllocation, "no memory for a graph");
  }
  atomic_init(&b->refs, 1);
  b->device = from->device;
  b->line_count = from->branches;
  b->cell_count = 1 + from->branches;
  b->nodes.first = from->nodes;
  b->own.end = &b->own.first;
  orError_t error = fill(b, from->priorities);
  if (!error) error = publish(b, graph);
  if (error) release(b, 1);
  return error;
}

orError_t orStreamEndCapture(orStream_t stream, orGraph_t *graph) {
  orCaptured captured;
  OR_TRY(orEnterBlocking());
  if (!graph) return orFail(orErrorInvalidValue, "orStreamEndCapture: null result");
  *graph = 0;
  OR_TRY(orCaptureEnd(stream, &captured));
  return make(&captured, graph);
}

/* ---- replay ---- */

/* A thread that has the turn does not sleep, so the wait is short. */
static void takeTurn(orGraphBody *b) {
  uint32_t nobody = 0;
  if (OR_LIKELY(atomic_compare_exchange_strong(&b->turn, &nobody, 1))) return;
  void *token = orBlockEnter();
  while (atomic_exchange(&b->turn, 2)) orFutexWait(&b->turn, 2, 0);
  orBlockLeave(token);
}

static void releaseCells(orGraphBody *b) {
  for (uint32_t i = 1; i < b->cell_count; i++) {
    orCellRelease(b->cells[i]);
    b->cells[i] = NULL;
  }
}

/* Each cell names the stream that completes it before any is queued, for the tools. */
static orError_t makeAllCells(orGraphBody *b, orStream_t stream) {
  b->cells[0] = b->end;
  for (uint32_t i = 1; i < b->cell_count; i++) {
    b->cells[i] = orCellNew(1);
    if (!b->cells[i]) {
      releaseCells(b);
      return orErrorMemoryAllocation;
    }
    uint32_t line = b->recorded_by[i];
    b->cells[i]->stream = line ? b->lines[line].stream : stream;
  }
  return orSuccess;
}

/* To tools that follow the program's calls, each node is an eager call, in captured order. */
static void reportNode(const orGraphBody *b, orGraphNode *node, orStream_t on) {
  const orTask *t = &node->task;
  if (node->report) {
    node->report(orTaskArgs(&node->task), on);
    return;
  }
  switch (t->kind) {
    case OR_KIND_COPY:
      OR_PROBE(OR_PROBE_ACCESS, .call = "orMemcpyAsync", .stream = on, .dst = t->u.copy.dst,
               .src = t->u.copy.src, .bytes = t->u.copy.bytes);
      break;
    case OR_KIND_SET:
      OR_PROBE(OR_PROBE_ACCESS, .call = "orMemsetAsync", .stream = on, .dst = t->u.set.dst,
               .bytes = t->u.set.bytes);
      break;
    case OR_KIND_HOST_FUNC:
      OR_PROBE(OR_PROBE_HOST_ACQUIRES, .stream = on);
      break;
    case OR_KIND_RECORD:
      OR_PROBE(OR_PROBE_RECORD, .stream = on, .cell = b->cells[t->u.slot]);
      break;
    case OR_KIND_WAIT:
      if (b->cells[t->u.slot]) OR_PROBE(OR_PROBE_WAIT, .stream = on, .cell = b->cells[t->u.slot]);
      break;
    case OR_KIND_KERNEL: /* its accesses have a node of their own */
      break;
  }
}

static void reportToTools(const orGraphBody *b, orStream_t stream, bool waits) {
  orGraphNode *before = b->own.first;
  if (waits) reportNode(b, before, stream);
  for (orGraphNode *n = b->nodes.first; n; n = n->next)
    reportNode(b, n, n->branch ? b->lines[n->branch].stream : stream);
  for (orGraphNode *n = before->next; n; n = n->next)
    reportNode(b, n, n->branch ? b->lines[n->branch].stream : stream);
}

/* For lines that are not queued. The caller keeps a reference. */
static void takeBack(orGraphBody *b, uint32_t refs) {
  atomic_fetch_sub_explicit(&b->refs, refs, memory_order_relaxed);
}

/* A line that could not be queued: completes its cells, so that waits for them end. */
static void giveUpLine(orGraphBody *b, uint32_t line, orError_t error) {
  orDeviceNoteFailure(b->device, error, "orGraphReplay", NULL);
  for (uint32_t i = 1; i < b->cell_count; i++)
    if (b->recorded_by[i] == line) orCellComplete(b->cells[i], orSuccess);
  takeBack(b, 1);
}

/* Reserves room on the graph's own streams before anything is reported or queued. Only replays
 * queue there, so the room stays, and a replay that has begun does not run out of memory. */
static orError_t reserveLines(const orGraphBody *b) {
  for (uint32_t i = 1; i < b->line_count; i++)
    OR_TRY(orStreamReserve(b->lines[i].stream, b->lines[i].bytes));
  return orSuccess;
}

/* Called with the turn held. */
static orError_t replay(orGraphBody *b, orStream_t stream) {
  bool waits = b->end && b->last != stream && !orCellDone(b->end);
  OR_TRY(reserveLines(b));
  OR_TRY(makeAllCells(b, stream));
  const uint32_t reported = 1u << OR_PROBE_ACCESS | 1u << OR_PROBE_RECORD | 1u << OR_PROBE_WAIT |
                            1u << OR_PROBE_HOST_ACQUIRES;
  if (OR_UNLIKELY(atomic_load_explicit(&orProbesOn, memory_order_relaxed) & reported))
    reportToTools(b, stream, b->end && b->last != stream);
  atomic_fetch_add_explicit(&b->refs, b->line_count, memory_order_relaxed);
  for (uint32_t i = 0; i < b->line_count; i++) {
    const orLine *l = &b->lines[i];
    orSequence records = {
        .tasks = l->tasks, .count = l->count, .bytes = l->bytes, .cells = b->cells};
    if (!i && !waits) {
      records.tasks++;
      records.count--;
    }
    orError_t error = orStreamQueueAll(i ? l->stream : stream, i == 0, &records);
    if (OR_UNLIKELY(error) && !i) {
      releaseCells(b);
      takeBack(b, b->line_count);
      return error;
    }
    if (OR_UNLIKELY(error)) giveUpLine(b, i, error);
  }
  orCellRelease(b->end);
  b->end = b->cells[1];
  b->cells[1] = NULL;
  b->last = stream;
  releaseCells(b);
  return orSuccess;
}

/* ---- public ---- */

/* Returns the body with a reference for the caller. */
static orError_t bodyOf(orGraph_t graph, orGraphBody **body) {
  orGraphSlot *g = orHandleLock(&table, graph);
  if (!g) return orErrorInvalidResourceHandle;
  *body = g->body;
  atomic_fetch_add_explicit(&g->body->refs, 1, memory_order_relaxed);
  orMutexUnlock(&g->lock);
  return orSuccess;
}

static orError_t launch(orGraphBody *b, orStream_t stream) {
  int device;
  OR_TRY(orStreamGetDevice(stream, &device));
  if (device != b->device)
    return orFail(
        orErrorInvalidValue,
        "orGraphReplay: the graph was captured on device %d but the stream belongs to device %d",
        b->device, device);
  OR_TRY(orDeviceCheckLost(device));
  OR_TRY(orStreamAwaitRoom(stream));
  takeTurn(b);
  orError_t error = replay(b, stream);
  if (atomic_exchange(&b->turn, 0) == 2) orFutexWake(&b->turn, 1);
  return error;
}

orError_t orGraphReplay(orGraph_t graph, orStream_t stream) {
  orGraphBody *b;
  OR_TRY(orEnterBlocking());
  if (stream == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &stream));
  OR_TRY(bodyOf(graph, &b));
  orError_t error = launch(b, stream);
  release(b, 1);
  OR_TRY(error);
  if (OR_UNLIKELY(orLaunchesBlock())) return orStreamSynchronize(stream);
  orDispatchPoint();
  return orSuccess;
}

orError_t orGraphDestroy(orGraph_t graph) {
  OR_TRY(orEnter());
  orGraphSlot *g = orHandleLock(&table, graph);
  if (!g) return orErrorInvalidResourceHandle;
  orGraphBody *b = g->body;
  orHandleInvalidate(&g->slot);
  orMutexUnlock(&g->lock);
  orHandleRecycle(&table, &g->slot);
  release(b, 1);
  return orSuccess;
}

orError_t orGraphGetNodeCount(orGraph_t graph, size_t *count) {
  orGraphBody *b;
  OR_TRY(orEnter());
  if (!count) return orFail(orErrorInvalidValue, "orGraphGetNodeCount: null result");
  OR_TRY(bodyOf(graph, &b));
  *count = 0;
  for (const orGraphNode *n = b->nodes.first; n; n = n->next)
    *count += !n->report && n->task.kind != OR_KIND_RECORD && n->task.kind != OR_KIND_WAIT;
  release(b, 1);
  return orSuccess;
}

orError_t orGraphDebugDotPrint(orGraph_t graph, const char *path) {
  orGraphBody *b;
  OR_TRY(orEnter());
  if (!path) return orFail(orErrorInvalidValue, "orGraphDebugDotPrint: null path");
  OR_TRY(bodyOf(graph, &b));
  orError_t error = orGraphDraw(b->device, &b->nodes, b->line_count, b->cell_count, path);
  release(b, 1);
  return error;
}

orError_t orGraphRetainUserObject(orGraph_t graph, void *object, void (*destroy)(void *object)) {
  orGraphBody *b;
  OR_TRY(orEnter());
  if (!destroy) return orFail(orErrorInvalidValue, "orGraphRetainUserObject: null function");
  OR_TRY(bodyOf(graph, &b));
  orObject *o = malloc(sizeof *o);
  if (o) {
    orGraphSlot *g = orHandleSlotAt(&table, orHandleIndex(graph));
    *o = (orObject){.object = object, .destroy = destroy};
    orMutexLock(&g->lock);
    o->next = b->objects;
    b->objects = o;
    orMutexUnlock(&g->lock);
  }
  release(b, 1);
  return o ? orSuccess : orFail(orErrorMemoryAllocation, "no memory for a graph's object");
}
