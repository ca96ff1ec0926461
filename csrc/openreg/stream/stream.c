/*
 * Streams: enqueue, query, synchronise, destroy.
 *
 * orStream in stream.h lists which lock or thread owns each field. The states of a stream:
 *
 *            commit                 a worker picks it
 *     IDLE ----------> READY ---------------------------> RUNNING --+--> IDLE     (queue empty)
 *                        ^                                          +--> READY    (makes way)
 *                        |      orStreamResume                      +--> WAITING  (for a cell)
 *                        +--------------------------- WAITING <-----+
 *
 * A host thread that waits for its own task may run the stream itself, if any thread may run all
 * that is queued there. Its commit then leads from IDLE to RUNNING, or it takes the stream before a
 * worker does.
 *
 * Every step is taken under the stream's lock, so no wake-up is lost. A worker that finds the queue
 * empty checks again under the lock before the stream goes IDLE. A producer publishes under the
 * lock and schedules only if it finds IDLE, so a steady producer never touches the scheduler. A
 * resumed stream checks its wait again, so an extra resume does no harm.
 *
 * A destroyed stream's handle is invalid at once. Its slot is recycled when its last task has
 * finished. The counters never restart.
 *
 * model/wait.pml is a model of the states and the steps between them (`make model`).
 */
#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "openreg_package.h"
#include "stream/stream.h"

/* The limits of a queue, after which kernels and copies block. Events and waits never do. */
enum { OR_QUEUE_TASKS = 1024, OR_QUEUE_BYTES = 1 << 20 };
enum { OR_MOST_STREAMS = 1 << 16 };
_Static_assert((int)OR_MOST_STREAMS <= OR_MOST_SLOTS, "a handle has room for every stream's index");

orHandleTable orStreamTable = {
    .kind = OR_HANDLE_STREAM,
    .what = "stream",
    .slot_size = (sizeof(orStream) + OR_CACHE_LINE - 1) & ~(OR_CACHE_LINE - 1),
    .limit = OR_MOST_STREAMS,
    .walked = true,
    .lock_at = offsetof(orStream, lock),
    .rank = OR_RANK_STREAM,
    .lock = OR_MUTEX_INITIALIZER(OR_RANK_HANDLES)};

/* Held while a stream is published, and while all streams are marked lost or usable again, so that
 * none is missed. */
static orMutex making = OR_MUTEX_INITIALIZER(OR_RANK_STREAMS);

static _Thread_local uint64_t last_correlation;

uint64_t orGetLastCorrelation(void) { return last_correlation; }

orError_t orStreamMake(int device, int priority, orStreamOwner owner, orStream_t *handle) {
  void *slot;
  OR_TRY(orHandleReserve(&orStreamTable, device, &slot, handle));
  orStream *s = slot;
  if (!s->last_handle) atomic_store_explicit(&s->wake_at, UINT64_MAX, memory_order_relaxed);
  orMutexLock(&making);
  orMutexLock(&s->lock);
  s->device = device;
  s->priority = priority;
  s->owner = owner;
  s->last_handle = *handle;
  s->lost = orDeviceIsLost(device);
  orHandlePublish(&s->slot, *handle);
  orMutexUnlock(&s->lock);
  orMutexUnlock(&making);
  return orSuccess;
}

orStream_t orStreamHandleOf(orStream *s) {
  orMutexLock(&s->lock);
  orStream_t handle = s->last_handle;
  orMutexUnlock(&s->lock);
  return handle;
}

orError_t orStreamLock(orStream_t handle, orStream **stream) {
  if (handle == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &handle));
  *stream = orHandleLock(&orStreamTable, handle);
  return *stream ? orSuccess : orErrorInvalidResourceHandle;
}

/* ---- enqueue ---- */

/* Reads the worker's counters, which are on its cache line, only when the known room is used up. */
static bool isFull(orStream *s) {
  uint64_t queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  if (OR_LIKELY(queued < s->room_until && s->bytes_in < s->bytes_until)) return false;
  s->room_until = atomic_load_explicit(&s->completed, memory_order_relaxed) + OR_QUEUE_TASKS;
  s->bytes_until = atomic_load_explicit(&s->bytes_out, memory_order_relaxed) + OR_QUEUE_BYTES;
  return queued >= s->room_until || s->bytes_in >= s->bytes_until;
}

/* Waits until a quarter of a full queue has run. Producer and worker then do not alternate task by
 * task, and the rest keeps the worker busy for longer than a sleeping producer takes to wake up. */
static orError_t awaitRoom(orStream *s) {
  uint64_t queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  uint64_t completed = atomic_load_explicit(&s->completed, memory_order_relaxed);
  orMutexUnlock(&s->lock);
  return orHostAwaitTasks(s, completed + (queued - completed + 3) / 4);
}

/* Unlocks the stream of a lost device. Returns orSuccess if the device is usable again. */
static orError_t refuseLost(orStream *s) {
  int device = s->device;
  orMutexUnlock(&s->lock);
  OR_TRY(orDeviceCheckLost(device));
  sched_yield(); /* the reset is about to clear this stream's flag */
  return orSuccess;
}

/* A stream in a capture is never full. */
static __attribute__((noinline)) orError_t beginCaptured(orStream *s, size_t args_size,
                                                         orStream **stream, orTask **task) {
  orError_t error = orCaptureReserve(s, args_size, task);
  *stream = s;
  if (error) orMutexUnlock(&s->lock);
  return error;
}

orError_t orStreamBegin(orStream_t handle, bool hold, size_t args_size, orStream **stream,
                        orTask **task) {
  orStream *s;
  OR_PROBE(OR_PROBE_QUEUES, 0);
  for (;;) {
    OR_TRY(orStreamLock(handle, &s));
    if (OR_UNLIKELY(s->capturing != NULL) && orCaptureHolds(s))
      return beginCaptured(s, args_size, stream, task);
    if (!hold) break;
    if (OR_UNLIKELY(s->lost)) {
      OR_TRY(refuseLost(s));
      continue;
    }
    if (OR_LIKELY(!isFull(s))) break;
    OR_TRY(awaitRoom(s));
  }
  *task = orQueueReserve(&s->in, args_size);
  if (!*task) {
    orMutexUnlock(&s->lock);
    return orFail(orErrorMemoryAllocation, "no memory to queue a task with %zu bytes of arguments",
                  args_size);
  }
  *stream = s;
  return orSuccess;
}

orError_t orStreamBeginInternal(orStream_t handle, orStream **stream, orTask **task) {
  OR_PROBE(OR_PROBE_QUEUES, 0);
  OR_TRY(orStreamLock(handle, stream));
  *task = orQueueReserve(&(*stream)->in, 0);
  if (*task) {
    (*task)->internal = true;
    return orSuccess;
  }
  orMutexUnlock(&(*stream)->lock);
  return orFail(orErrorMemoryAllocation, "no memory to queue a task");
}

/* True if no task is before this one and the thread that queues it may run it. Lock held. */
static inline bool isForCaller(const orStream *s, const orTask *task) {
  return OR_UNLIKELY(task->awaited) && task->any_thread && s->state == OR_STREAM_IDLE &&
         !orDispatching();
}

/* Sets `mine` if the calling thread now has the stream and must run it. */
static inline uint64_t publish(orStream *s, orTask *task, bool *mine) {
  uint64_t number = atomic_load_explicit(&s->queued, memory_order_relaxed) + 1;
  bool idle = s->state == OR_STREAM_IDLE;
  *mine = isForCaller(s, task);
  if (orTaskIsForWorkers(task)) s->worker_until = number;
  last_correlation = orCorrelation(s->last_handle, number);
  orQueueCommit(&s->in, &s->out, task);
  s->bytes_in += task->size;
  if (idle) s->state = *mine ? OR_STREAM_RUNNING : OR_STREAM_READY;
  atomic_store_explicit(&s->queued, number, memory_order_release);
  orMutexUnlock(&s->lock);
  if (idle && !*mine)
    orWorkerSchedule(s);
  else
    orWorkerTryAgain();
  return number;
}

static const char *callOf(const orTask *task) {
  switch (task->kind) {
    case OR_KIND_KERNEL:
      return "orLaunchKernelEx";
    case OR_KIND_COPY:
      return "orMemcpyAsync";
    case OR_KIND_SET:
      return "orMemsetAsync";
    default:
      return task->name;
  }
}

static void fillProbe(orProbe *probe, const orTask *task, orStream_t stream) {
  *probe = (orProbe){
      .call = callOf(task), .stream = stream, .kind = (int)task->kind, .internal = task->internal};
  if (task->kind == OR_KIND_COPY) {
    probe->dst = task->u.copy.dst;
    probe->src = task->u.copy.src;
    probe->bytes = task->u.copy.bytes;
  } else if (task->kind == OR_KIND_SET) {
    probe->dst = task->u.set.dst;
    probe->bytes = task->u.set.bytes;
  }
}

/* Once published, the task may be over and the slot another stream's. */
static __attribute__((noinline)) uint64_t publishProbed(orStream *s, orTask *task, bool *mine) {
  orProbe probe;
  fillProbe(&probe, task, s->last_handle);
  probe.number = publish(s, task, mine);
  orProbeCall(OR_PROBE_QUEUED, &probe);
  return probe.number;
}

/* True if the task is a node of a capture. Unlocks the stream if so. */
static __attribute__((noinline)) bool commitCaptured(orStream *s, const orTask *task, bool *mine) {
  *mine = false;
  if (!orCaptureCommit(s, task)) return false;
  orMutexUnlock(&s->lock);
  return true;
}

static inline uint64_t commit(orStream *s, orTask *task, bool *mine) {
  if (OR_UNLIKELY(s->capturing != NULL) && commitCaptured(s, task, mine)) return 0;
  return orProbeOn(OR_PROBE_QUEUED) ? publishProbed(s, task, mine) : publish(s, task, mine);
}

uint64_t orStreamCommit(orStream *s, orTask *task) {
  bool mine;
  return commit(s, task, &mine);
}

/* ---- progress ---- */

void orStreamFinishTask(orStream *s, const orTask *task) {
  size_t size = task->size;
  orQueuePop(&s->out, size);
  atomic_store_explicit(&s->bytes_out,
                        atomic_load_explicit(&s->bytes_out, memory_order_relaxed) + size,
                        memory_order_relaxed);
  uint64_t n = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
  atomic_store_explicit(&s->completed, n, memory_order_seq_cst);
  if (OR_UNLIKELY(n >= atomic_load_explicit(&s->wake_at, memory_order_seq_cst)))
    orStreamWakeSleepers(s);
}

/* Runs what is queued up to the task that the calling thread is about to wait for. The thread has
 * nothing else to do, and waking another thread and being woken takes longer than many tasks. */
__attribute__((noinline)) void orStreamRunHere(orStream *s, uint64_t count) {
  void *token = orBlockEnter();
  orWorkerRun(s, count, OR_HOST);
  orBlockLeave(token);
  orDispatchNotice(); /* as a worker does */
}

/* `mine`: the calling thread has the stream, and runs it. */
static orError_t synchronize(orStream *s, uint64_t count, orStream_t handle, bool promised,
                             bool mine) {
  orProbe wait;
  OR_PROBE_WAITS(&wait, .call = "orStreamSynchronize", .device = orHandleDevice(handle),
                 .stream = handle, .ordered = promised);
  if (mine) orStreamRunHere(s, count);
  return orProbeWaited(&wait, orHostAwaitTasks(s, count));
}

/* The task refers to its waiter's stack. The waiter therefore does not return while a thread runs
 * the task or one may still begin it. */
static orError_t waitOrCancel(orStream *s, orTask *task, uint64_t number, orStream_t handle,
                              bool promised, bool mine) {
  orError_t before = orPeekAtLastError();
  orError_t error = synchronize(s, number, handle, promised, mine);
  if (OR_LIKELY(!error) || !orHostAwaitOrCancel(s, task, number)) return error;
  if (!before) orGetLastError();
  return orSuccess;
}

/* For a task that the caller waits for, and whose results it would otherwise use. */
static orError_t reportCancelled(int device) {
  OR_TRY(orDeviceTakeFailure(device));
  return orFail(orErrorLaunchFailure, "%s:%d was reset before a task of this call had run",
                orDevicesName(), device);
}

static orError_t submitAndWait(orStream *s, orTask *task, orWaitMode waits) {
  if (OR_UNLIKELY(s->capturing != NULL)) {
    /* OPENREG_LAUNCH_BLOCKING: a call that waits was refused earlier */
    orStreamCommit(s, task);
    return orSuccess;
  }
  if (OR_UNLIKELY(orProcessExiting())) {
    orMutexUnlock(&s->lock);
    return orProcessRefuseExiting();
  }
  int device = s->device;
  orStream_t handle = s->last_handle;
  bool cancelled = false, mine;
  task->awaited = true;
  task->was_cancelled = &cancelled;
  uint64_t number = commit(s, task, &mine);
  if (!mine) mine = !orDispatching() && orWorkerTake(s);
  OR_TRY(waitOrCancel(s, task, number, handle, waits == OR_WAIT_PROMISED, mine));
  if (OR_UNLIKELY(cancelled)) return reportCancelled(device);
  bool takes = waits != OR_WAIT_RUN || OR_UNLIKELY(orLaunchesBlock());
  return takes ? orDeviceTakeFailure(device) : orSuccess;
}

static _Thread_local const char *last_queued;

const char *orLastQueued(void) { return last_queued; }

orError_t orStreamSubmit(orStream *s, orTask *task, orWaitMode waits) {
  bool mine;
  last_queued = task->name;
  if (!s->capturing) OR_PROBE(OR_PROBE_COMMIT, .slot = s, .task = task);
  if (waits || OR_UNLIKELY(orLaunchesBlock())) return submitAndWait(s, task, waits);
  bool awaited = task->awaited && !s->capturing; /* once committed, the task may be over */
  uint64_t number = commit(s, task, &mine);
  if (OR_UNLIKELY(awaited) && !mine) mine = !orDispatching() && orWorkerTake(s);
  if (OR_UNLIKELY(mine)) orStreamRunHere(s, number);
  orDispatchPoint();
  return orSuccess;
}

/* ---- many at once ---- */

static bool mayFail(const orTask *task) {
  return task->kind == OR_KIND_KERNEL || task->kind == OR_KIND_COPY || task->kind == OR_KIND_SET;
}

/* Lock held, and room for all records reserved. Returns the number of the last task. */
static uint64_t appendAll(orStream *s, const orSequence *records) {
  uint64_t number = atomic_load_explicit(&s->queued, memory_order_relaxed);
  for (size_t i = 0; i < records->count; i++) {
    const orTask *from = records->tasks[i];
    orTask *task = orQueueReserve(&s->in, from->size - OR_TASK_HEADER);
    memcpy(task, from, from->size);
    if (task->kind == OR_KIND_RECORD || task->kind == OR_KIND_WAIT)
      task->u.cell = orCellRetain(records->cells[from->u.slot]);
    else if (mayFail(task))
      OR_PROBE(OR_PROBE_COMMIT, .slot = s, .task = task);
    number++;
    if (orTaskIsForWorkers(task)) s->worker_until = number;
    orQueueCommit(&s->in, &s->out, task);
    s->bytes_in += task->size;
  }
  return number;
}

static void reportQueued(orStream_t stream, const orSequence *records, uint64_t last) {
  for (size_t i = 0; i < records->count; i++) {
    orProbe probe;
    fillProbe(&probe, records->tasks[i], stream);
    probe.number = last - records->count + 1 + i;
    orProbeCall(OR_PROBE_QUEUED, &probe);
  }
}

static orError_t reserve(orStream *s, size_t bytes) {
  if (orQueueReserve(&s->in, bytes)) return orSuccess;
  return orFail(orErrorMemoryAllocation, "no memory to queue %zu bytes of records", bytes);
}

orError_t orStreamReserve(orStream_t handle, size_t bytes) {
  orStream *s;
  OR_TRY(orStreamLock(handle, &s));
  orError_t error = reserve(s, bytes);
  orMutexUnlock(&s->lock);
  return error;
}

/* Returns the stream, locked and with room for all records, or null if it refuses them. */
static orStream *beginAll(orStream_t handle, bool asked, size_t bytes, orError_t *error) {
  orStream *s = NULL;
  for (;;) {
    *error = orStreamLock(handle, &s);
    if (*error || !s) return NULL;
    if (s->capturing && orCaptureHolds(s)) {
      *error = orCaptureRefuse(s, "orGraphReplay", "a graph cannot be part of another one");
      return NULL;
    }
    if (OR_LIKELY(!s->lost || !asked)) break;
    *error = refuseLost(s);
    if (*error) return NULL;
  }
  *error = reserve(s, bytes);
  if (!*error) return s;
  orMutexUnlock(&s->lock);
  return NULL;
}

orError_t orStreamQueueAll(orStream_t handle, bool asked, const orSequence *records) {
  orError_t error;
  OR_PROBE(OR_PROBE_QUEUES, 0);
  orStream *s = beginAll(handle, asked, records->bytes, &error);
  if (OR_UNLIKELY(!s)) return error;
  orStream_t name = s->last_handle;
  bool idle = s->state == OR_STREAM_IDLE;
  uint64_t last = appendAll(s, records);
  last_correlation = orCorrelation(name, last);
  if (idle) s->state = OR_STREAM_READY;
  if (OR_UNLIKELY(s->lost)) atomic_store_explicit(&s->cancel_until, last, memory_order_release);
  atomic_store_explicit(&s->queued, last, memory_order_release);
  orMutexUnlock(&s->lock);
  if (idle)
    orWorkerSchedule(s);
  else
    orWorkerTryAgain();
  if (orProbeOn(OR_PROBE_QUEUED)) reportQueued(name, records, last);
  return orSuccess;
}

orError_t orStreamAwaitRoom(orStream_t handle) {
  orStream *s;
  OR_TRY(orStreamLock(handle, &s));
  if (isFull(s)) return awaitRoom(s);
  orMutexUnlock(&s->lock);
  return orSuccess;
}

/* ---- the end of a stream ---- */

/* Frees the queue of a destroyed stream, as its slot may stay unused for long. Lock held. */
static void letGoOfMemory(orStream *s) {
  orMutexAssertHeld(&s->lock);
  s->dying = false;
  atomic_store_explicit(&s->head, NULL, memory_order_relaxed);
  orQueueClear(&s->in, &s->out);
}

bool orStreamTryIdle(orStream *s) {
  orMutexLock(&s->lock);
  bool empty = atomic_load_explicit(&s->completed, memory_order_relaxed) ==
               atomic_load_explicit(&s->queued, memory_order_relaxed);
  bool recycle = empty && s->dying;
  if (empty) s->state = OR_STREAM_IDLE;
  if (recycle) letGoOfMemory(s);
  orMutexUnlock(&s->lock);
  if (recycle) orHandleRecycle(&orStreamTable, &s->slot);
  return empty;
}

void orStreamResume(orStream *s) {
  orMutexLock(&s->lock);
  bool waiting = s->state == OR_STREAM_WAITING;
  if (waiting) {
    orCellForget(s->waits_for, s);
    s->state = OR_STREAM_READY;
  }
  orMutexUnlock(&s->lock);
  if (waiting) orWorkerSchedule(s);
}

orStream *orStreamBlocker(orStream *s) {
  orMutexLock(&s->lock);
  const orCell *cell = s->state == OR_STREAM_WAITING ? s->waits_for : NULL;
  orStream *other = cell ? orCellStream(cell) : NULL;
  orMutexUnlock(&s->lock);
  return other;
}

/* ---- over all streams ---- */

/* A slot's device changes when the slot is reused, so it is read under the lock with the count. */
static bool hasWork(orStream *s, int device, uint64_t *queued) {
  *queued = atomic_load_explicit(&s->queued, memory_order_acquire);
  /* A thread that queues work has set the slot up; an idle slot does not matter. */
  if (*queued == atomic_load_explicit(&s->completed, memory_order_acquire)) return false;
  orMutexLock(&s->lock);
  bool of_device = device < 0 || s->device == device;
  *queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  orMutexUnlock(&s->lock);
  return of_device;
}

void orStreamForEach(int device, void (*fn)(orStream *, uint64_t, void *), void *context) {
  uint32_t i = 0;
  for (orStream *s; (s = orHandleNext(&orStreamTable, &i));) {
    uint64_t queued;
    if (hasWork(s, device, &queued)) fn(s, queued, context);
  }
}

static void awaitQueued(orStream *s, uint64_t queued, void *failed) {
  orError_t error = orHostAwaitTasks(s, queued);
  if (OR_UNLIKELY(error)) *(orError_t *)failed = error;
}

orError_t orStreamsAwait(int device) {
  orError_t error = orSuccess;
  orStreamForEach(device, awaitQueued, &error);
  return error;
}

orError_t orStreamSynchronizeDevice(const char *call, int device) {
  orProbe wait;
  OR_PROBE_WAITS(&wait, .call = call, .device = device, .ordered = true);
  return orProbeWaited(&wait, orStreamsAwait(device));
}

static bool isIdle(orStream *s) {
  if (!atomic_load_explicit(&s->slot.handle, memory_order_acquire)) return true;
  orMutexLock(&s->lock);
  bool idle = s->state == OR_STREAM_IDLE;
  orMutexUnlock(&s->lock);
  return idle;
}

orError_t orStreamSettle(void) {
  uint32_t i = 0;
  OR_TRY(orStreamsAwait(-1));
  for (orStream *s; (s = orHandleNext(&orStreamTable, &i));)
    while (!isIdle(s)) {
      sched_yield();
      OR_TRY(orProcessRefuseExiting());
      OR_TRY(orStreamsAwait(-1));
    }
  return orSuccess;
}

static void giveUpWait(orStream *s, uint64_t queued, void *context) {
  (void)queued, (void)context;
  orStreamResume(s);
}

void orStreamsGiveUpWaits(int device) { orStreamForEach(device, giveUpWait, NULL); }

static void setLost(orStream *s, int device, bool lost) {
  orMutexLock(&s->lock);
  if (s->device == device) {
    s->lost = lost;
    if (lost)
      atomic_store_explicit(&s->cancel_until,
                            atomic_load_explicit(&s->queued, memory_order_relaxed),
                            memory_order_release);
  }
  orMutexUnlock(&s->lock);
}

void orStreamsSetLost(int device, bool lost) {
  orMutexLock(&making);
  uint32_t i = 0;
  for (orStream *s; (s = orHandleNext(&orStreamTable, &i));) {
    uint64_t queued;
    /* A slot with neither a handle nor work may not be set up yet; no thread can queue there. */
    if (atomic_load_explicit(&s->slot.handle, memory_order_acquire) || hasWork(s, device, &queued))
      setLost(s, device, lost);
  }
  orMutexUnlock(&making);
}

/* ---- public ---- */

orError_t orDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (!least || !greatest)
    return orFail(orErrorInvalidValue, "orDeviceGetStreamPriorityRange: null result");
  *least = 0;
  *greatest = 1 - OR_PRIORITIES;
  return orSuccess;
}

int orClampPriority(int priority) {
  return priority > 0 ? 0 : priority < 1 - OR_PRIORITIES ? 1 - OR_PRIORITIES : priority;
}

orError_t orStreamCreateWithPriority(orStream_t *stream, int priority) {
  OR_TRY(orEnter());
  if (!stream) return orFail(orErrorInvalidValue, "orStreamCreate: null result");
  OR_TRY(orDeviceUse(orCurrentDevice()));
  return orStreamMake(orCurrentDevice(), orClampPriority(priority), OR_OWNER_CALLER, stream);
}

orError_t orStreamCreate(orStream_t *stream) { return orStreamCreateWithPriority(stream, 0); }

/* Unlocks the stream. */
static void destroy(orStream *s) {
  orHandleInvalidate(&s->slot);
  bool idle = s->state == OR_STREAM_IDLE;
  s->dying = true;
  if (idle) letGoOfMemory(s);
  orMutexUnlock(&s->lock);
  if (idle) orHandleRecycle(&orStreamTable, &s->slot);
}

const char *orStreamOwnerName(orStreamOwner owner) {
  static const char *const names[] = {[OR_OWNER_DEVICE] = "the default stream",
                                      [OR_OWNER_POOL] = "a stream of the pool",
                                      [OR_OWNER_GRAPH] = "a stream of a graph"};
  OR_COVERS(names, OR_OWNER_GRAPH + 1);
  return names[owner];
}

/* Unlocks the stream. */
static orError_t refuseDestroy(orStream *s) {
  orStream_t handle = s->last_handle;
  const char *name = orStreamOwnerName(s->owner);
  orMutexUnlock(&s->lock);
  return orFail(orErrorInvalidValue,
                "orStreamDestroy: stream 0x%" PRIx64
                " is %s of device %d; allowed are streams of orStreamCreate",
                handle, name, orHandleDevice(handle));
}

orError_t orStreamDestroy(orStream_t stream) {
  orStream *s;
  OR_TRY(orEnter());
  OR_TRY(orStreamLock(stream, &s));
  if (s->owner != OR_OWNER_CALLER) return refuseDestroy(s);
  orCapture *left = orCaptureLeave(s);
  destroy(s);
  orCaptureAbandon(left);
  return orSuccess;
}

void orStreamUnmake(orStream_t handle) {
  orStream *s = orHandleSlotAt(&orStreamTable, orHandleIndex(handle));
  orMutexLock(&s->lock);
  OR_ASSERT(atomic_load_explicit(&s->slot.handle, memory_order_relaxed), ==, handle);
  OR_ASSERT(s->owner, !=, OR_OWNER_CALLER);
  OR_ASSERT(s->capturing, ==, NULL);
  destroy(s);
}

orError_t orStreamGetDevice(orStream_t stream, int *device) {
  orStream *s;
  OR_TRY(orEnter());
  if (!device) return orFail(orErrorInvalidValue, "orStreamGetDevice: null result");
  OR_TRY(orStreamLock(stream, &s));
  *device = s->device;
  orMutexUnlock(&s->lock);
  return orSuccess;
}

orError_t orStreamGetPriority(orStream_t stream, int *priority) {
  orStream *s;
  OR_TRY(orEnter());
  if (!priority) return orFail(orErrorInvalidValue, "orStreamGetPriority: null result");
  OR_TRY(orStreamLock(stream, &s));
  *priority = s->priority;
  orMutexUnlock(&s->lock);
  return orSuccess;
}

/* Returns the stream, unlocked, and how many tasks it has been given. */
static orError_t snapshot(const char *call, orStream_t stream, orStream **s, uint64_t *queued) {
  OR_TRY(orStreamLock(stream, s));
  if (OR_UNLIKELY((*s)->capturing != NULL) && orCaptureHolds(*s))
    return orCaptureRefuse(*s, call, "nothing runs before the graph is launched");
  *queued = atomic_load_explicit(&(*s)->queued, memory_order_relaxed);
  orMutexUnlock(&(*s)->lock);
  return orSuccess;
}

orError_t orStreamQuery(orStream_t stream) {
  orStream *s;
  uint64_t queued;
  OR_TRY(orEnter());
  orDispatchPoint();
  if (stream == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &stream));
  OR_TRY(snapshot("orStreamQuery", stream, &s, &queued));
  orWaitGoal goal = {.stream = s, .count = queued};
  bool over = orIsOver(&goal);
  if (orQueryAnswers(stream, NULL, over)) {
    OR_PROBE(OR_PROBE_HOST_ACQUIRES, .stream = stream);
    return orSuccess;
  }
  return over ? orErrorNotReady : orHostAwaitStep(&goal);
}

orError_t orStreamSynchronize(orStream_t stream) {
  orStream *s;
  uint64_t queued;
  OR_TRY(orEnterBlocking());
  if (stream == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &stream));
  OR_TRY(snapshot("orStreamSynchronize", stream, &s, &queued));
  int device = orHandleDevice(stream);
  OR_TRY(orDeviceCheckLost(device));
  OR_TRY(synchronize(s, queued, stream, true, false));
  return orDeviceTakeFailure(device);
}

/* ---- for the caching allocator ---- */

/* The slot whose present or latest owner is the handle. */
static orStream *findDrained(orStream_t stream) {
  uint32_t index = orHandleIndex(stream);
  if (index >= atomic_load_explicit(&orStreamTable.used, memory_order_acquire)) return NULL;
  return orHandleSlotAt(&orStreamTable, index);
}

static orError_t counts(orStream_t handle, uint64_t *queued, uint64_t *completed) {
  if (handle == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(orCurrentDevice(), &handle));
  orStream *s = findDrained(handle);
  if (!s) return orFail(orErrorInvalidResourceHandle, "0x%" PRIx64 " is not a stream", handle);
  orMutexLock(&s->lock);
  bool mine = s->last_handle == handle && (s->dying || orHandleIs(&s->slot, handle));
  *queued = mine ? atomic_load_explicit(&s->queued, memory_order_relaxed) : 0;
  *completed = mine ? atomic_load_explicit(&s->completed, memory_order_acquire) : UINT64_MAX;
  orMutexUnlock(&s->lock);
  return orSuccess;
}

orError_t orStreamQueued(orStream_t stream, uint64_t *count) {
  uint64_t other;
  return counts(stream, count, &other);
}

orError_t orStreamCompleted(orStream_t stream, uint64_t *count) {
  uint64_t other;
  OR_PROBE(OR_PROBE_LOOKED, .stream = stream);
  return counts(stream, &other, count);
}
