/*
 * What the files of stream/ offer: queued work, the threads that run it, and how hosts wait for it.
 */
#ifndef OPENREG_PRIVATE_STREAM_H
#define OPENREG_PRIVATE_STREAM_H

#include "device/device.h"

/* ---- queue.c ---- */

typedef enum orTaskKind {
  OR_KIND_KERNEL,
  OR_KIND_HOST_FUNC,
  OR_KIND_COPY,
  OR_KIND_SET, /* up to here: work */
  OR_KIND_RECORD,
  OR_KIND_WAIT
} orTaskKind;

typedef struct orCell orCell;

typedef struct orCopyArgs {
  void *dst;
  const void *src; /* null: the bytes follow in the record (a staged source) */
  size_t bytes;
  orMemcpyKind kind;
  int device; /* whose factory copies; -1: host to host */
} orCopyArgs;

typedef struct orSetArgs {
  void *dst;
  size_t bytes;
  int value;
  int device; /* -1: pinned host memory */
} orSetArgs;

/* What a task is, besides its arguments, which follow it in the queue. */
typedef struct orTask {
  size_t size; /* of the record, header included; a multiple of 16 */
  const char *name;
  void (*destroy)(void *args);
  union {
    orKernelFn kernel;
    void (*host)(void *);
    orCell *cell;  /* of a record or wait; this task's reference */
    uint32_t slot; /* of a record or wait in a graph: which of a replay's cells */
    orCopyArgs copy;
    orSetArgs set;
  } u;
  union {
    void *user_data; /* of a host function */
    /* of a vendor's operation that is awaited: when it started, if that is wanted */
    uint64_t began;
  };
  orCell *completion;  /* a vendor's operation that has started and is awaited */
  bool *was_cancelled; /* of whoever waits for it: becomes true where it is not run */
  orEvent_t done;      /* its event */
  orTaskKind kind;
  uint32_t fault;  /* of the tool that is asked before it runs (OR_PROBE_INJECT); 0 */
  bool any_thread; /* of a kernel, copy or fill: a host thread may run it */
  bool awaited;    /* the thread that queues it waits for it, and may run it */
  bool internal;   /* what the allocator does for itself: no choice of a schedule */
  bool split;      /* its first half has run, or is running */
  /* cancelled when its turn comes; written under the stream's lock, while no thread runs the
   * stream */
  _Atomic bool cancelled;
} orTask;

#define OR_TASK_HEADER ((sizeof(orTask) + 15) & ~(size_t)15)
static inline void *orTaskArgs(orTask *task) { return (char *)task + OR_TASK_HEADER; }

typedef struct orChunk orChunk;
/* Two ends on two cache lines: producers and the worker do not slow each other down. */
typedef struct orQueueIn { /* under the stream's lock */
  orChunk *tail;
  orChunk *spare; /* in no list */
} orQueueIn;
typedef struct orQueueOut { /* the worker that runs the stream */
  orChunk *head;
  size_t offset;
} orQueueOut;

/* Room for a record with `args_size` bytes of arguments; null when memory is short. Whoever does
 * not commit it need do nothing: the next reservation takes its place. Stream lock held. */
orTask *orQueueReserve(orQueueIn *in, size_t args_size);
/* The latest reserved record becomes part of the queue; the caller then publishes the count of
 * tasks. Stream lock held. */
void orQueueCommit(orQueueIn *in, orQueueOut *out, const orTask *task);
/* The oldest record; the caller has seen a count of tasks that includes it. */
orTask *orQueueFront(orQueueOut *out, orChunk **emptied);
void orQueuePop(orQueueOut *out, size_t size);
/* The oldest record of a queue that is not empty and that no worker is at. Stream lock held. */
const orTask *orQueuePeek(const orQueueOut *out);
/* Gives the memory of an empty queue back, which no worker is at. Stream lock held. */
void orQueueClear(orQueueIn *in, orQueueOut *out);
/* Takes back a chunk that orQueueFront emptied. Stream lock held. */
void orQueueReuse(orQueueIn *in, orChunk *chunk);

/* ---- stream.c ---- */

typedef struct orBranch orBranch;
typedef struct orCapture orCapture;

typedef enum orStreamState {
  OR_STREAM_IDLE,    /* no task */
  OR_STREAM_READY,   /* in the scheduler's list */
  OR_STREAM_RUNNING, /* a worker has it, or a host thread that waits for a task of it */
  OR_STREAM_WAITING  /* its first task waits for a cell; no thread has it */
} orStreamState;

/* What may be no choice of a schedule; the allocator's poison never is. */
typedef enum orScheduleForced {
  OR_FORCED_NOT,
  OR_FORCED_RECORD,
  OR_FORCED_POISON
} orScheduleForced;

enum { OR_PRIORITIES = 4 }; /* 0, -1, -2, -3 */

/* What a stream belongs to. Only a caller's is destroyed by orStreamDestroy. */
typedef enum orStreamOwner {
  OR_OWNER_CALLER,
  OR_OWNER_DEVICE, /* its default stream, never destroyed */
  OR_OWNER_POOL,   /* never destroyed */
  OR_OWNER_GRAPH
} orStreamOwner;

typedef struct orStream {
  /* Read often, written rarely. */
  orSlot slot;
  int device;
  int priority;
  orStreamOwner owner;
  orStream_t last_handle;        /* of the slot's present or latest owner */
  _Atomic uint64_t cancel_until; /* tasks up to this number are cancelled instead of run */
  _Atomic uint64_t wake_at;      /* sleepers: see host_wait.c */
  _Atomic uint32_t wake_word;
  /* Under `lock`. Counters go on when the slot is used again. */
  _Alignas(OR_CACHE_LINE) orMutex lock;
  orStreamState state;
  bool dying;              /* destroyed, still draining */
  bool lost;               /* its device is: nothing more is queued */
  int worker;              /* while RUNNING, its worker, or OR_HOST */
  _Atomic uint64_t queued; /* tasks; read by all */
  uint64_t worker_until;   /* the number of the last task that only a worker may run */
  uint64_t room_until;     /* the queue is not full before this count, as last looked at */
  size_t bytes_in;         /* of all records ever queued */
  size_t bytes_until;
  orBranch *capturing; /* where its work goes instead; or null */
  orQueueIn in;
  orCell *waits_for; /* while WAITING */
  /* The thread that runs the stream. */
  _Alignas(OR_CACHE_LINE) _Atomic uint64_t completed; /* tasks; read by all */
  _Atomic size_t bytes_out;                           /* read by all */
  uint64_t seen;                                      /* `queued`, as last looked at */
  _Atomic(const orTask *) head; /* the task that runs, or ran last; valid under `lock`; null */
  _Atomic uint64_t began;       /* when it was started, if a tool wants to know */
  orQueueOut out;
  /* Under the scheduler's lock. */
  _Alignas(OR_CACHE_LINE) struct orStream *ready_next;
  uint64_t ready_since;
  /* Under the schedule's lock. */
  uint64_t schedule_epoch;
  uint32_t schedule_number;
  orScheduleForced schedule_forced; /* while it is held: of its first task */
  /* Under the lock of the cell it waits for. */
  struct orStream *waiter_next;
} orStream;

extern orHandleTable orStreamTable;

/* A record to fill, in a stream that is locked until orStreamCommit. May block while the queue is
 * full if `hold` says so (kernels and copies). */
orError_t orStreamBegin(orStream_t handle, bool hold, size_t args_size, orStream **stream,
                        orTask **task);
/* What the allocator does for itself: never held up, and run though the stream captures. */
orError_t orStreamBeginInternal(orStream_t handle, orStream **stream, orTask **task);
/* Calls `fn` for each stream of the device with tasks that have not finished, destroyed ones too:
 * its handle, and the number of the last. No lock is held meanwhile. */
void orStreamsForEachBusy(int device, void (*fn)(orStream_t stream, uint64_t last, void *context),
                          void *context);
/* The stream, locked; 0 is the current device's default one. */
orError_t orStreamLock(orStream_t handle, orStream **stream);
/* Publishes the record, unlocks and schedules; returns the task's number on its stream: 0 in a
 * capture. */
uint64_t orStreamCommit(orStream *stream, orTask *task);
/* Who waits though the call does not promise it may rely on nothing. */
typedef enum orWaitMode {
  OR_WAIT_NOT,
  OR_WAIT_RUN, /* unasked, and takes no failure of the device */
  OR_WAIT_UNASKED,
  OR_WAIT_PROMISED
} orWaitMode;
/* For kernels, copies and fills: commits; if it waits, or with OPENREG_LAUNCH_BLOCKING, returns
 * when the task is done and reports as every call that synchronises does, or that the task was
 * cancelled. */
orError_t orStreamSubmit(orStream *stream, orTask *task, orWaitMode waits);
/* Tasks to copy into the queue. Those of events and waits name their cells by slots. */
typedef struct orSequence {
  const orTask *const *tasks;
  size_t count, bytes; /* of the records together, or more */
  orCell *const *cells;
} orSequence;
/* All of them, with nothing between, or none. Never blocks. `asked`: somebody queues them on this
 * stream, which may refuse; else they follow what was queued elsewhere, and are cancelled if the
 * device is lost. */
orError_t orStreamQueueAll(orStream_t handle, bool asked, const orSequence *records);
/* Reserves room for records of `bytes` together. The next orStreamQueueAll then lacks no memory,
 * unless another call queues on the stream first. */
orError_t orStreamReserve(orStream_t handle, size_t bytes);
/* Blocks while the queue is full. */
orError_t orStreamAwaitRoom(orStream_t handle);
/* A waiting stream becomes runnable; its wait is looked at again. Harmless when it does not
 * wait. */
void orStreamResume(orStream *stream);
/* By a worker: one more task has finished. */
void orStreamFinishTask(orStream *stream, const orTask *task);
/* By the worker that runs it: true if the stream was empty and is now idle (the worker lets go of
 * it). */
bool orStreamTryIdle(orStream *stream);
/* Every stream of a device (-1: of all) that has unfinished tasks, in turn, with its count of tasks
 * so far: that many were the device's. By the time `fn` runs, the slot may be another stream's. */
void orStreamForEach(int device, void (*fn)(orStream *stream, uint64_t queued, void *context),
                     void *context);
/* Waits until everything queued now on a device (-1: all) has finished, or fails as orHostAwait;
 * `call` promises it, or is null. */
orError_t orStreamSynchronizeDevice(const char *call, int device);
/* Every stream of a device, also those to come, is lost, and cancels what is queued; or it is back.
 * The caller has noted it where orStreamMake looks. */
void orStreamsSetLost(int device, bool lost);
/* Every waiting stream of a device looks at its wait again. */
void orStreamsGiveUpWaits(int device);
/* The stream whose record it waits for, if it does. */
orStream *orStreamBlocker(orStream *stream);
/* Runs a stream that the calling host thread has taken until `count` of its tasks have finished: it
 * has nothing else to do. */
void orStreamRunHere(orStream *stream, uint64_t count);
/* Waits until every stream is idle, no worker having one. */
orError_t orStreamSettle(void);
orError_t orStreamMake(int device, int priority, orStreamOwner owner, orStream_t *handle);
/* Destroys a stream that the library owns. Any thread, also in a task. */
void orStreamUnmake(orStream_t handle);
/* "the default stream", "a stream of the pool" or "a stream of a graph"; null: a caller's. */
const char *orStreamOwnerName(orStreamOwner owner);
int orClampPriority(int priority);
/* Tasks queued so far, and finished so far. A destroyed stream that has drained: 0 and
 * UINT64_MAX. */
orError_t orStreamQueued(orStream_t stream, uint64_t *count);
orError_t orStreamCompleted(orStream_t stream, uint64_t *count);
const char *orLastQueued(void); /* by the calling thread, or null; for signal handlers */

/* ---- event.c ---- */

typedef struct orGraphNode orGraphNode;

/* One completion. Pooled; freed when the last reference goes. */
struct orCell {
  _Atomic uint32_t refs;
  _Atomic uint32_t state; /* futex: OR_CELL_* */
  orMutex lock;           /* waiters, and the step to done as seen by them */
  orStream *waiters;
  uint64_t time_ns;    /* written before done */
  orError_t status;    /* written before done */
  orStream_t stream;   /* that it was recorded on; 0: external */
  uint64_t number;     /* of its record there */
  orEvent_t event;     /* that it was made for */
  orCell *next;        /* pool */
  void *kept;          /* a tool's, under its lock; it is told when the cell is freed */
  orCapture *capture;  /* that it was recorded in: nothing completes it; or null */
  orGraphNode *record; /* there, while the capture is active */
};
/* From LOOK on it counts how often sleepers should have looked around: none misses two of them. */
enum { OR_CELL_PENDING = 0, OR_CELL_DONE = 1, OR_CELL_SLEEPERS = 2, OR_CELL_LOOK = 4 };

/* With that many references; null if memory is short. */
orCell *orCellNew(uint32_t refs);
orCell *orCellRetain(orCell *cell);
void orCellRelease(orCell *cell);
static inline bool orCellDone(const orCell *cell) {
  return atomic_load_explicit(&cell->state, memory_order_acquire) & OR_CELL_DONE;
}
/* Once. Wakes everybody who waits. */
void orCellComplete(orCell *cell, orError_t status);
/* By a worker, of the stream it runs: true if the cell is done; false if the stream now waits and
 * is no longer the worker's. */
bool orCellWaitOrPark(orCell *cell, orStream *stream);
/* That it was recorded on; null: external. */
orStream *orCellStream(const orCell *cell);
/* Takes a waiting stream off the cell's list, if it is there. Stream lock held. */
void orCellForget(orCell *cell, orStream *stream);
/* A new external event and its cell (a reference for the caller). */
orError_t orEventMakeExternal(int device, orEvent_t *event, orCell **cell);
/* Destroys it, which no other thread may. */
void orEventEndTask(orEvent_t event);
/* The newest cell with a reference for the caller, or null, and the event's flags. */
orError_t orEventCell(orEvent_t event, orCell **cell, unsigned *flags);

/* ---- context.c ---- */

/* Makes device `index` ready for use (first use), or fails naming the index and the range. */
orError_t orDeviceUse(int index);
orError_t orDeviceDefaultStream(int device, orStream_t *stream);

/* ---- failure.c ---- */

/* Keeps the first asynchronous failure of a device, counts the others; orErrorDeviceLost comes
 * before any and loses the device. Its cause is what the thread has set. Any thread, no lock
 * held. */
void orDeviceNoteFailure(int index, orError_t error, const char *kernel, const char *detail);
/* Forgets what the calling thread has set as the cause of a failure that it then did not note. No
 * lock held. */
void orFailureForgetCause(void);
/* Called at the end of every call that synchronises: hands the failure out once, that of a lost
 * device each time. */
orError_t orDeviceTakeFailure(int index);
bool orDeviceIsLost(int index);
/* orSuccess, or orErrorDeviceLost with its text. */
orError_t orDeviceCheckLost(int index);
void orDeviceForgetFailure(int index);

/* ---- memory.c ---- */

/* A region of a device that is made ready for use; notes that it is lost. */
orError_t orMemoryAllocate(int device, size_t bytes, bool cached, void **ptr);

/* ---- host_wait.c ---- */

enum { OR_SPIN_NS = 20000 }; /* a host that waits, before it sleeps */

/* What a host thread may wait for: `count` tasks of a stream have finished, or, where there is
 * none, an external event's cell is done. A recorded event has all three: it is over when its
 * record is, which completes its cell just before. */
typedef struct orWaitGoal {
  orStream *stream;
  uint64_t count;
  orCell *cell;
} orWaitGoal;

bool orIsOver(const orWaitGoal *goal);
/* Blocks until it is over, or fails because it will not be (the process exits); helps with the
 * pieces of large tasks meanwhile. */
orError_t orHostAwait(const orWaitGoal *goal);
orError_t orHostAwaitTasks(orStream *stream, uint64_t count);
/* For a host that asks, and it was not over: orErrorNotReady, or why it will not be. Whoever asks
 * again gets another answer in the end. */
orError_t orHostAwaitStep(const orWaitGoal *goal);
/* Blocks until the task `number` has finished (true), or no thread is at it and none will come to
 * it: it is cancelled instead. After an error of orHostAwait, by the thread that queued it. */
bool orHostAwaitOrCancel(orStream *stream, orTask *task, uint64_t number);
/* Wakes whoever sleeps for the stream's progress, to help with a copy; false if nobody does. */
bool orStreamAskForHelp(orStream *stream);
void orStreamWakeSleepers(orStream *stream); /* whatever they wait for */

/* A host thread that sleeps, until orSleeperEnd; for nothing that it named: for what a schedule
 * has chosen to run. */
typedef struct orSleeper {
  struct orSleeper *next, **at;
  orWaitGoal goal;
  orStream_t stream;
  uint64_t since;
  int thread;
  bool reported;
} orSleeper;
void orSleeperBegin(orSleeper *wait, const orWaitGoal *goal);
void orSleeperEnd(orSleeper *wait);
void orSleepersEach(void (*fn)(orSleeper *wait, void *context), void *context);
void orSleepersWake(void); /* all of them, to look around */

/* Where a host waits, and has for long; a hint. Negative: nowhere. */
extern OR_HIDDEN _Atomic int orHostCore;
/* Not 0: the system has refused a thread, and no worker has been started since (worker.c). */
extern OR_HIDDEN _Atomic uint32_t orWorkersRefused;
/* By a constructor: `fn` tries again for a host that waits, and while no worker is alive runs what
 * a host may run. An error: what it waits for needs a worker. Else the host may sleep while
 * `orWorkersRefused` is `*refused`. */
void orHostSetStandIn(orError_t (*fn)(const orWaitGoal *goal, uint32_t *refused));

/* ---- worker.c ---- */

/* Puts a stream that has just become READY into the list and sees to it that a worker runs. No lock
 * held. */
void orWorkerSchedule(orStream *stream);
/* Wakes up to `count` sleeping workers to look for pieces of copies. */
void orWorkerWakeIdle(int count);

/* Of a dispatcher: hands a stream that can run to worker 0, which calls `serve` with it; `refuse`
 * takes it back if the system refuses worker 0 a thread. */
void orWorkerServe(orStream *stream, void (*serve)(orStream *stream),
                   void (*refuse)(orStream *stream));

/* Tries again for the streams that are ready; true if any worker is alive, or about to be. */
bool orWorkerStartRefused(void);
static inline void orWorkerTryAgain(void) {
  if (OR_UNLIKELY(atomic_load_explicit(&orWorkersRefused, memory_order_relaxed)))
    orWorkerStartRefused();
}
/* orErrorSystem, for work that waits for a worker. */
orError_t orWorkerRefuse(void);
enum { OR_HOST = -1 }; /* in place of a worker's index: a host thread */
/* Runs a stream that the calling thread has taken, until `count` of its tasks have finished, and
 * gives it back; false if it waits before. */
bool orWorkerRun(orStream *stream, uint64_t count, int worker);
/* By the thread that runs it, in the midst of its first task: somebody else may come first. */
void orWorkerGiveBack(orStream *stream);
/* The first task of a stream that is ready and in nobody's list. */
const orTask *orWorkerFirst(orStream *stream);
/* By a host thread: takes a stream that is ready; false if a worker has come before, or a task of
 * it is for workers. */
bool orWorkerTake(orStream *stream);

/* ---- task.c ---- */

/* Not for events and waits, which are for whoever comes. */
static inline bool orTaskIsForWorkers(const orTask *task) {
  return task->kind <= OR_KIND_SET && !task->any_thread;
}
/* Whether work of a device (-1: of none) may be run by a host thread that waits for it. */
bool orTaskAnyThread(int device);
/* Runs the first task of a stream, number `number` of it, and lets go of its arguments; false if
 * the stream waits and is no longer the worker's. */
bool orTaskRun(orStream *stream, orTask *task, uint64_t number, int worker);
/* Instead of running: completes its event, lets go of its arguments. */
void orTaskCancel(orTask *task);

/* Of a stream's task: unlike any other's, as a slot's counters never start again. */
enum { OR_NUMBER_BITS = 64 - OR_INDEX_BITS };
static inline uint64_t orCorrelation(orStream_t stream, uint64_t number) {
  return (uint64_t)orHandleIndex(stream) << OR_NUMBER_BITS |
         orHandleBits(number, 0, OR_NUMBER_BITS);
}
/* The task that the calling thread is running: its stream, and its number there (from 1). */
bool orTaskCurrent(orStream_t *stream, uint64_t *number);
orStream *orTaskStream(void); /* null outside a task */
const char *orTaskName(void); /* that the thread is running, or null; for signal handlers */

#include "stream/dispatch.h"
#include "stream/graph.h"

#endif
