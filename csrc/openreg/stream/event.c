/*
 * Events and their completion cells.
 *
 * A cell is one completion: pending, then done for ever. Each record of an event makes a cell and
 * queues a task that completes it. The event points to its newest cell; a queued wait holds the
 * cell that it bound to. A later record therefore neither delays an earlier wait nor satisfies it
 * early, and destroying the event leaves its cells to the waits.
 *
 * References to a cell are held by the event (its newest cell), each queued record and wait, a host
 * thread while it sleeps, and the core while it completes the cell. The last release puts it back
 * into the pool.
 *
 * cell->state is a futex for sleeping hosts. cell->lock guards the list of waiting streams, and
 * `done` is set under it, so that each stream is either in the list or sees `done`. A stream's lock
 * is taken before a cell's, so orCellComplete takes the streams off one by one and resumes each
 * with no cell lock held.
 *
 * model/wait.pml and model/wait.cpp are models of how a cell is completed (`make model`).
 */
#include <inttypes.h>
#include <stdlib.h>

#include "stream/stream.h"

enum { OR_POOL_GROWTH = 64, OR_MOST_EVENTS = 1 << 20 };
_Static_assert((int)OR_MOST_EVENTS <= OR_MOST_SLOTS, "a handle has room for every event's index");

/* An internal flag, beside the public ones. */
enum { OR_EVENT_SIGNALLED = 1 << 8 };
_Static_assert((int)orEventExternal < OR_EVENT_SIGNALLED, "the public flags are below our own");

typedef struct orEvent {
  orSlot slot;
  orMutex lock;
  /* Under `lock`. */
  unsigned flags;
  orCell *cell; /* newest; null: never recorded */
  /* of a completion, kept when it is over: */
  orEvent_t latest;
  const char *task;
} orEvent;

static orHandleTable table = {.kind = OR_HANDLE_EVENT,
                              .what = "event",
                              .slot_size = sizeof(orEvent),
                              .limit = OR_MOST_EVENTS,
                              .lock_at = offsetof(orEvent, lock),
                              .rank = OR_RANK_EVENT,
                              .lock = OR_MUTEX_INITIALIZER(OR_RANK_HANDLES)};

/* Handles of the events that factories signal have a kind of their own, so that a signal that comes
 * too late is known to be a factory's. */
static bool isCompletion(orEvent_t event) { return orHandleKindOf(event) == OR_HANDLE_COMPLETION; }

/* ---- cells ---- */

static orMutex pool_lock = OR_MUTEX_INITIALIZER(OR_RANK_CELLS);
static orCell *pool;

static bool growPool(void) {
  orCell *block =
      aligned_alloc(OR_CACHE_LINE, OR_POOL_GROWTH * ((sizeof(orCell) + 63) & ~(size_t)63));
  if (!block) return false;
  for (int i = 0; i < OR_POOL_GROWTH; i++) {
    orCell *c = (orCell *)((char *)block + (size_t)i * ((sizeof(orCell) + 63) & ~(size_t)63));
    *c = (orCell){.next = pool};
    orMutexInit(&c->lock, OR_RANK_CELL);
    pool = c;
  }
  return true;
}

orCell *orCellNew(uint32_t refs) {
  orMutexLock(&pool_lock);
  orCell *c = pool || growPool() ? pool : NULL;
  if (c) pool = c->next;
  orMutexUnlock(&pool_lock);
  if (!c) {
    orFail(orErrorMemoryAllocation, "no memory for an event's record");
    return NULL;
  }
  c->status = orSuccess;
  c->stream = 0;
  c->number = 0;
  c->event = 0;
  c->time_ns = 0;
  c->began_ns = 0;
  atomic_store_explicit(&c->state, OR_CELL_PENDING, memory_order_relaxed);
  atomic_store_explicit(&c->refs, refs, memory_order_relaxed);
  return c;
}

orCell *orCellRetain(orCell *cell) {
  atomic_fetch_add_explicit(&cell->refs, 1, memory_order_relaxed);
  return cell;
}

void orCellRelease(orCell *cell) {
  if (!cell || atomic_fetch_sub_explicit(&cell->refs, 1, memory_order_acq_rel) != 1) return;
  if (OR_UNLIKELY(cell->capture != NULL)) orCaptureForget(cell);
  if (OR_UNLIKELY(cell->kept != NULL)) orProbeCall(OR_PROBE_CELL_FREED, &(orProbe){.cell = cell});
  if (OR_UNLIKELY(cell->message != NULL)) free(cell->message);
  cell->message = NULL;
  orMutexLock(&pool_lock);
  cell->next = pool;
  pool = cell;
  orMutexUnlock(&pool_lock);
}

static orStream *nextWaiter(orCell *cell) {
  orMutexLock(&cell->lock);
  orStream *s = cell->waiters;
  if (s) cell->waiters = s->waiter_next;
  orMutexUnlock(&cell->lock);
  return s;
}

/* The caller holds a reference. */
void orCellComplete(orCell *cell, orError_t status) {
  cell->status = status;
  if (OR_LIKELY(!cell->time_ns)) cell->time_ns = orNow();
  orMutexLock(&cell->lock);
  uint32_t before = atomic_fetch_or_explicit(&cell->state, OR_CELL_DONE, memory_order_acq_rel);
  orMutexUnlock(&cell->lock);
  if (before & OR_CELL_SLEEPERS) {
    orFutexWake(&cell->state, INT32_MAX);
    orDispatchNotice();
  }
  for (orStream *s; (s = nextWaiter(cell));) orStreamResume(s);
}

bool orCellWaitOrPark(orCell *cell, orStream *s) {
  if (orCellDone(cell)) return true;
  orMutexLock(&s->lock);
  orMutexLock(&cell->lock);
  bool done = orCellDone(cell);
  if (!done) {
    s->waiter_next = cell->waiters;
    cell->waiters = s;
    s->waits_for = cell;
    s->state = OR_STREAM_WAITING;
  }
  orMutexUnlock(&cell->lock);
  orMutexUnlock(&s->lock);
  return done;
}

void orCellForget(orCell *cell, orStream *s) {
  orMutexLock(&cell->lock);
  for (orStream **p = &cell->waiters; *p; p = &(*p)->waiter_next)
    if (*p == s) {
      *p = s->waiter_next;
      break;
    }
  orMutexUnlock(&cell->lock);
}

orStream *orCellStream(const orCell *cell) {
  return cell->stream ? orHandleSlotAt(&orStreamTable, orHandleIndex(cell->stream)) : NULL;
}

static orWaitGoal goalOf(orCell *cell) {
  return (orWaitGoal){.stream = orCellStream(cell), .count = cell->number, .cell = cell};
}

/* ---- events ---- */

static orError_t lockEvent(orEvent_t handle, orEvent **event) {
  *event = orHandleLock(&table, handle);
  return *event ? orSuccess : orErrorInvalidResourceHandle;
}

orError_t orEventCell(orEvent_t handle, orCell **cell, unsigned *flags) {
  orEvent *e;
  OR_TRY(lockEvent(handle, &e));
  *cell = e->cell ? orCellRetain(e->cell) : NULL;
  *flags = e->flags;
  orMutexUnlock(&e->lock);
  return orSuccess;
}

/* `task`: what the event completes; null: no task. */
static orError_t makeEvent(int device, unsigned flags, orCell *cell, const char *task,
                           orEvent_t *handle) {
  void *slot;
  orError_t error = orHandleReserve(&table, device, &slot, handle);
  if (error) {
    orCellRelease(cell);
    return error;
  }
  if (task) *handle = orHandleOfKind(*handle, OR_HANDLE_COMPLETION);
  orEvent *e = slot;
  orMutexLock(&e->lock);
  e->flags = flags;
  e->cell = cell;
  e->latest = *handle;
  e->task = task;
  if (cell) cell->event = *handle;
  orHandlePublish(&e->slot, *handle);
  orMutexUnlock(&e->lock);
  return orSuccess;
}

orError_t orEventMakeCompletion(int device, const char *task, orEvent_t *event, orCell **cell) {
  orCell *made = orCellNew(2); /* one reference for the event, one for the caller */
  if (!made) return orErrorMemoryAllocation;
  orError_t error = makeEvent(device, orEventExternal, made, task, event);
  if (error)
    orCellRelease(made);
  else
    *cell = made;
  return error;
}

orError_t orEventCreateWithFlags(orEvent_t *event, unsigned flags) {
  OR_TRY(orEnter());
  if (!event) return orFail(orErrorInvalidValue, "orEventCreate: null result");
  if (flags & ~(unsigned)(orEventDisableTiming | orEventExternal))
    return orFail(orErrorInvalidValue,
                  "event flags 0x%x: allowed are orEventDisableTiming and orEventExternal", flags);
  OR_TRY(orDeviceUse(orCurrentDevice()));
  orCell *cell = NULL;
  if (flags & orEventExternal) {
    cell = orCellNew(1);
    if (!cell) return orErrorMemoryAllocation;
  }
  return makeEvent(orCurrentDevice(), flags, cell, NULL, event);
}

orError_t orEventCreate(orEvent_t *event) { return orEventCreateWithFlags(event, orEventDefault); }

static void signalCell(orCell *cell, orError_t status) {
  OR_PROBE(OR_PROBE_SIGNAL, .cell = cell);
  orCellComplete(cell, status);
}

/* Lock held at entry, not at return. The caller releases the cell. */
static orCell *takeEvent(orEvent *e) {
  orCell *cell = e->cell;
  e->cell = NULL;
  orHandleInvalidate(&e->slot);
  orMutexUnlock(&e->lock);
  orHandleRecycle(&table, &e->slot);
  return cell;
}

/* The task of a completion; "a task" once another event has used its slot. */
static const char *taskOf(orEvent_t done) {
  orEvent *e = orHandleSlotAt(&table, orHandleIndex(done));
  orMutexLock(&e->lock);
  const char *task = e->latest == done ? e->task : "a task";
  orMutexUnlock(&e->lock);
  return task;
}

/* A factory's mistake about `done`. A driver may ignore what the call returns, so the first mistake
 * is printed too. */
static __attribute__((cold)) orError_t refuseCompletion(orEvent_t done, orError_t error,
                                                        const char *did, const char *why) {
  static atomic_flag printed = ATOMIC_FLAG_INIT;
  uint32_t used = atomic_load_explicit(&table.used, memory_order_acquire);
  const orDevice *d = orDeviceAt(orHandleDevice(done));
  if (orHandleIndex(done) >= used || !d) return error; /* never handed out */
  orFail(error, "device factory \"%s\" %s %s on openreg:%d, which %s (`done` 0x%" PRIx64 ")",
         d->factory->name, did, taskOf(done), orHandleDevice(done), why, done);
  if (!atomic_flag_test_and_set(&printed)) orWarn("%s", orGetLastErrorMessage());
  return error;
}

/* Refuses to destroy a completion; `error` is that of its look-up. */
static orError_t keepCompletion(orEvent_t done, orError_t error, orEvent *e) {
  if (!error) orMutexUnlock(&e->lock);
  return refuseCompletion(done, error ? error : orErrorNotPermitted, "destroyed the event of",
                          "is only signalled");
}

orError_t orEventDestroy(orEvent_t event) {
  orEvent *e;
  OR_TRY(orEnter());
  orError_t error = lockEvent(event, &e);
  if (isCompletion(event)) return keepCompletion(event, error, e);
  if (error) return error;
  unsigned flags = e->flags;
  orCell *cell = takeEvent(e);
  /* No thread can signal the event any more, so a wait for it would never end. */
  if ((flags & orEventExternal) && !(flags & OR_EVENT_SIGNALLED)) signalCell(cell, orSuccess);
  orCellRelease(cell);
  return orSuccess;
}

void orEventEndTask(orEvent_t event) {
  orEvent *e;
  if (!lockEvent(event, &e)) orCellRelease(takeEvent(e));
}

/* A record in a capture. Both locks held. */
static orError_t captureRecord(orEvent *e, orStream *s, orCell *cell, orCell **replaced) {
  OR_TRY(orCaptureRecord(s, cell));
  *replaced = e->cell;
  e->cell = cell;
  cell->stream = s->last_handle;
  orCellRelease(cell); /* no task has it */
  return orSuccess;
}

/* The event stays locked while its record is queued: if two threads record it, the later record is
 * the newest cell. A record never waits for room. */
static orError_t queueRecord(orEvent *e, orStream_t stream, orCell *cell, orCell **replaced) {
  orStream *s;
  orTask *task;
  orEvent_t event = atomic_load_explicit(&e->slot.handle, memory_order_relaxed);
  OR_TRY(orStreamBegin(stream, false, 0, &s, &task));
  if (s->device != orHandleDevice(event)) {
    int device = s->device;
    orMutexUnlock(&s->lock); /* the reserved record is not committed, so it is discarded */
    return orFail(orErrorInvalidValue,
                  "an event of device %d cannot be recorded on a stream of device %d",
                  orHandleDevice(event), device);
  }
  if (OR_UNLIKELY(s->capturing != NULL)) {
    orError_t error = captureRecord(e, s, cell, replaced);
    orMutexUnlock(&s->lock);
    return error;
  }
  uint64_t queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  *replaced = e->cell;
  e->cell = cell;
  cell->stream = s->last_handle;
  cell->number = queued;
  cell->event = event;
  OR_PROBE(OR_PROBE_RECORD, .stream = cell->stream, .cell = cell, .replaced = *replaced);
  if (atomic_load_explicit(&s->completed, memory_order_acquire) == queued) {
    orMutexUnlock(&s->lock); /* nothing is before it, so no worker has to wake up */
    orCellComplete(cell, orSuccess);
    orCellRelease(cell);
    return orSuccess;
  }
  cell->number = queued + 1;
  task->kind = OR_KIND_RECORD;
  task->name = "orEventRecord";
  task->u.cell = cell;
  orStreamCommit(s, task);
  return orSuccess;
}

orError_t orEventRecord(orEvent_t event, orStream_t stream) {
  orEvent *e;
  OR_TRY(orEnterBlocking());
  if (stream == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &stream));
  orCell *cell = orCellNew(2); /* one reference for the event, one for the record */
  if (!cell) return orErrorMemoryAllocation;
  orCell *replaced = NULL;
  orError_t error = lockEvent(event, &e);
  if (!error) {
    error = e->flags & orEventExternal
                ? orFail(orErrorInvalidValue,
                         "an external event is completed by orEventSignal, not by a record")
                : queueRecord(e, stream, cell, &replaced);
    orMutexUnlock(&e->lock);
  }
  if (error) {
    orCellRelease(cell);
    orCellRelease(cell);
  }
  orCellRelease(replaced);
  return error;
}

orError_t orStreamWaitEvent(orStream_t stream, orEvent_t event) {
  orCell *cell;
  unsigned flags;
  orStream *s;
  orTask *task;
  OR_TRY(orEnterBlocking());
  OR_TRY(orEventCell(event, &cell, &flags));
  orError_t error = orStreamBegin(stream, false, 0, &s, &task);
  if (!error && cell && OR_UNLIKELY(s->capturing || cell->capture)) {
    error = orCaptureWait(s, cell);
    orMutexUnlock(&s->lock);
    orCellRelease(cell);
    return error;
  }
  if (!error && cell) OR_PROBE(OR_PROBE_WAIT, .stream = s->last_handle, .cell = cell);
  if (error || !cell || orCellDone(cell) || cell->stream == s->last_handle) {
    if (!error) orMutexUnlock(&s->lock);
    orCellRelease(cell);
    return error;
  }
  task->kind = OR_KIND_WAIT;
  task->name = "orStreamWaitEvent";
  task->u.cell = cell; /* passes the reference to the task */
  orStreamCommit(s, task);
  orDispatchPoint();
  return orSuccess;
}

/* As orEventCell, for a host that queries the event's progress. */
static orError_t cellToAskOf(orEvent_t event, const char *call, orCell **cell, unsigned *flags) {
  OR_TRY(orEventCell(event, cell, flags));
  if (OR_LIKELY(!*cell || !(*cell)->capture)) return orSuccess;
  orError_t error = orCaptureRefuseEvent(*cell, call);
  orCellRelease(*cell);
  return error;
}

orError_t orEventQuery(orEvent_t event) {
  orCell *cell;
  unsigned flags;
  OR_TRY(orEnter());
  orDispatchPoint();
  OR_TRY(cellToAskOf(event, "orEventQuery", &cell, &flags));
  orWaitGoal goal = cell ? goalOf(cell) : (orWaitGoal){0};
  bool over = !cell || orIsOver(&goal);
  bool ready = !cell || orQueryAnswers(0, cell, over);
  if (ready && cell) OR_PROBE(OR_PROBE_HOST_ACQUIRES, .cell = cell);
  orError_t error = ready ? orSuccess : over ? orErrorNotReady : orHostAwaitStep(&goal);
  orCellRelease(cell);
  return error;
}

orError_t orEventSynchronize(orEvent_t event) {
  orCell *cell;
  unsigned flags;
  OR_TRY(orEnterBlocking());
  OR_TRY(cellToAskOf(event, "orEventSynchronize", &cell, &flags));
  if (!cell) return orSuccess;
  int device = orHandleDevice(event);
  orError_t lost = orDeviceCheckLost(device);
  if (OR_UNLIKELY(lost)) {
    orCellRelease(cell);
    return lost;
  }
  orProbe wait;
  orWaitGoal goal = goalOf(cell);
  OR_PROBE_WAITS(&wait, .call = "orEventSynchronize", .device = device, .stream = cell->stream,
                 .cell = cell);
  orError_t error = orProbeWaited(&wait, orHostAwait(&goal));
  if (OR_LIKELY(!error)) OR_PROBE(OR_PROBE_HOST_ACQUIRES, .cell = cell);
  orCellRelease(cell);
  return error ? error : orDeviceTakeFailure(device);
}

static orError_t finishedTime(orEvent_t event, const char *which, uint64_t *time_ns) {
  orCell *cell;
  unsigned flags;
  OR_TRY(cellToAskOf(event, "orEventElapsedTime", &cell, &flags));
  orError_t error = orSuccess;
  if (flags & orEventDisableTiming)
    error = orFail(orErrorEventNotTimed, "the %s event was created without timing", which);
  else if (!cell)
    error = orFail(orErrorEventNotRecorded, "the %s event has not been recorded", which);
  else if (!orCellDone(cell))
    error = orErrorNotReady;
  else
    *time_ns = cell->time_ns;
  orCellRelease(cell);
  return error;
}

orError_t orEventElapsedTime(float *milliseconds, orEvent_t start, orEvent_t end) {
  uint64_t from = 0, to = 0;
  OR_TRY(orEnter());
  if (!milliseconds) return orFail(orErrorInvalidValue, "orEventElapsedTime: null result");
  OR_TRY(finishedTime(start, "start", &from));
  OR_TRY(finishedTime(end, "end", &to));
  if (orHandleDevice(start) != orHandleDevice(end))
    return orFail(orErrorInvalidValue,
                  "orEventElapsedTime: the events belong to device %d and device %d, not to one",
                  orHandleDevice(start), orHandleDevice(end));
  *milliseconds = (float)((double)(int64_t)(to - from) / 1e6);
  return orSuccess;
}

/* Event locked. */
static orError_t checkSignal(const orEvent *e) {
  if (!(e->flags & orEventExternal))
    return orFail(orErrorInvalidValue, "only an external event can be signalled");
  if (e->flags & OR_EVENT_SIGNALLED)
    return orFail(orErrorInvalidValue, "the event has been signalled already");
  return orSuccess;
}

static orError_t checkStatus(orEvent_t event, orError_t status) {
  if (status != orErrorNotReady || isCompletion(event)) return orSuccess;
  return orFail(orErrorInvalidValue,
                "orEventSignal: status orErrorNotReady is not a result of the work");
}

static void completeExternal(orEvent_t event, orCell *cell, orError_t status) {
  if (status && !isCompletion(event)) /* a task's failure is noted with its name */
    orDeviceNoteFailure(orHandleDevice(event), status, "external event", cell->message);
  orFailureForgetCause();
  if (isCompletion(event))
    orCellComplete(cell, status);
  else
    signalCell(cell, status);
}

/* Its cell, with a reference for the caller. */
static orError_t takeSignal(orEvent_t event, orCell **cell) {
  orEvent *e;
  OR_TRY(lockEvent(event, &e));
  orError_t error = checkSignal(e);
  if (!error) {
    *cell = orCellRetain(e->cell);
    e->flags |= OR_EVENT_SIGNALLED;
  }
  orMutexUnlock(&e->lock);
  return error;
}

orError_t orEventSignalError(orEvent_t event, orError_t status, const char *message) {
  orCell *cell = NULL;
  OR_TRY(orEnter());
  orError_t error = checkStatus(event, status);
  if (!error) error = takeSignal(event, &cell);
  if (error) {
    orFailureForgetCause();
    return isCompletion(event) ? refuseCompletion(event, error, "signalled", "is over") : error;
  }
  if (status && message) orFailureKeepText(cell, message);
  completeExternal(event, cell, status);
  orCellRelease(cell);
  return orSuccess;
}

orError_t orEventSignal(orEvent_t event, orError_t status) {
  return orEventSignalError(event, status, NULL);
}

orError_t orEventSetTimes(orEvent_t event, uint64_t start_ns, uint64_t end_ns) {
  orEvent *e;
  OR_TRY(orEnter());
  if (!start_ns || end_ns < start_ns)
    return orFail(orErrorInvalidValue,
                  "orEventSetTimes: %" PRIu64 " to %" PRIu64
                  " ns; a start of 1 or more and an end "
                  "that is not before it are allowed",
                  start_ns, end_ns);
  OR_TRY(lockEvent(event, &e));
  orError_t error = checkSignal(e);
  if (!error) {
    e->cell->began_ns = start_ns;
    e->cell->time_ns = end_ns;
  }
  orMutexUnlock(&e->lock);
  return error;
}
