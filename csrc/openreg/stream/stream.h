/*
 * The interface of stream/: queued work, the threads that run it, and how hosts wait for it.
 */
#pragma once

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
  int device; /* the device whose factory copies; -1: host to host */
} orCopyArgs;

typedef struct orSetArgs {
  void *dst;
  size_t bytes;
  int value;
  int device; /* -1: pinned host memory */
} orSetArgs;

/* A task's record in a queue. Its arguments follow it. */
typedef struct orTask {
  size_t size; /* record and header; a multiple of 16 */
  const char *name;
  void (*destroy)(void *args);
  union {
    orKernelFn kernel;
    void (*host)(void *);
    orCell *cell;  /* of an event's record or wait, with a reference */
    uint32_t slot; /* of a node's record or wait: index into a replay's cells */
    orCopyArgs copy;
    orSetArgs set;
  } u;
  union {
    void *user_data; /* of a host function */
    /* of a vendor's operation under way: when it started, if a tool needs that */
    uint64_t began;
  };
  orCell *completion;  /* of a vendor's operation under way */
  bool *was_cancelled; /* set to true if the task is cancelled; belongs to the waiting thread */
  orEvent_t done;      /* its event */
  orTaskKind kind;
  uint32_t fault;   /* not 0: a planted fault; OR_PROBE_INJECT comes before the task runs */
  bool any_thread;  /* of a kernel, copy or fill: a host thread may run it */
  bool awaited;     /* the thread that queues the task waits for it, and may run it */
  bool internal;    /* the allocator's own; no schedule chooses when it runs */
  bool split;       /* its first half has run, or is running */
  bool is_operator; /* of a kernel: the arguments are an orOperatorCall's address and its owner */
  /* to be cancelled instead of run; written under the stream's lock, while no thread runs the
   * stream */
  _Atomic bool cancelled;
} orTask;

#define OR_TASK_HEADER ((sizeof(orTask) + 15) & ~(size_t)15)
static inline void *orTaskArgs(orTask *task) { return (char *)task + OR_TASK_HEADER; }

typedef struct orChunk orChunk;
/* The two ends are on two cache lines, so that producers and the worker do not share one. */
typedef struct orQueueIn { /* under the stream's lock */
  orChunk *tail;
  orChunk *spare; /* in no list, or null */
} orQueueIn;
typedef struct orQueueOut { /* the worker that runs the stream */
  orChunk *head;
  size_t offset;
} orQueueOut;

/* Room for a record with `args_size` bytes of arguments; null when memory is short. A record that
 * is not committed is reused by the next reservation. Stream lock held. */
orTask *orQueueReserve(orQueueIn *in, size_t args_size);
/* The latest reserved record becomes part of the queue; the caller then publishes the count of
 * tasks. Stream lock held. */
void orQueueCommit(orQueueIn *in, orQueueOut *out, const orTask *task);
/* The oldest record. The caller has read a count of tasks that includes it. */
orTask *orQueueFront(orQueueOut *out, orChunk **emptied);
void orQueuePop(orQueueOut *out, size_t size);
/* The oldest record of a queue that is not empty, while no worker runs the stream. Stream lock
 * held. */
const orTask *orQueuePeek(const orQueueOut *out);
/* Frees the memory of an empty queue, while no worker runs the stream. Stream lock held. */
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

/* Why a task runs without a schedule choosing it. Events' records and waits are forced under a tape
 * only, the allocator's poison always. */
typedef enum orScheduleForced {
  OR_FORCED_NOT,
  OR_FORCED_RECORD,
  OR_FORCED_POISON
} orScheduleForced;

enum { OR_PRIORITIES = 4 }; /* 0, -1, -2, -3 */

/* The owner of a stream. orStreamDestroy destroys only a caller's streams. */
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
  _Atomic uint64_t wake_at;      /* for sleepers: see host_wait.c */
  _Atomic uint32_t wake_word;
  /* Under `lock`. The counters continue when the slot is reused. */
  _Alignas(OR_CACHE_LINE) orMutex lock;
  orStreamState state;
  bool dying;              /* destroyed, still draining */
  bool lost;               /* its device is lost: nothing more is queued */
  int worker;              /* while RUNNING, its worker, or OR_HOST */
  _Atomic uint64_t queued; /* tasks; read by all */
  uint64_t worker_until;   /* the number of the last task that only a worker may run */
  uint64_t room_until;     /* the queue is not full before this count; as last computed */
  size_t bytes_in;         /* of all records ever queued */
  size_t bytes_until;
  orBranch *capturing; /* not null: its work is captured there */
  orQueueIn in;
  orCell *waits_for; /* while WAITING */
  /* The thread that runs the stream. */
  _Alignas(OR_CACHE_LINE) _Atomic uint64_t completed; /* tasks; read by all */
  _Atomic size_t bytes_out;                           /* read by all */
  uint64_t seen;                                      /* `queued`, as last read */
  _Atomic(const orTask *) head; /* the running or latest task, or null; valid under `lock` */
  _Atomic uint64_t began;       /* when it was started, if a tool needs that */
  orQueueOut out;
  /* Under the scheduler's lock. */
  _Alignas(OR_CACHE_LINE) struct orStream *ready_next;
  uint64_t ready_since;
  /* Under the schedule's lock. */
  uint64_t schedule_epoch;
  uint32_t schedule_number;
  orScheduleForced schedule_forced; /* while the schedule holds it: its first task's */
  /* Under the lock of the cell it waits for. */
  struct orStream *waiter_next;
} orStream;

extern orHandleTable orStreamTable;

/* A record to fill, in a stream that is locked until orStreamCommit. With `hold` (kernels and
 * copies) it may block while the queue is full. */
orError_t orStreamBegin(orStream_t handle, bool hold, size_t args_size, orStream **stream,
                        orTask **task);
/* For the allocator's own tasks: never blocks, and queues the task even if the stream captures. */
orError_t orStreamBeginInternal(orStream_t handle, orStream **stream, orTask **task);
/* The stream, locked; 0 is the current device's default one. */
orError_t orStreamLock(orStream_t handle, orStream **stream);
/* Publishes the record, unlocks the stream and schedules it. Returns the task's number on its
 * stream; 0 in a capture. */
uint64_t orStreamCommit(orStream *stream, orTask *task);
/* How orStreamSubmit waits. A wait that the API does not promise must not be treated as a
 * synchronisation point. */
typedef enum orWaitMode {
  OR_WAIT_NOT,
  OR_WAIT_RUN,     /* not promised, and takes no failure of the device */
  OR_WAIT_UNASKED, /* not promised */
  OR_WAIT_PROMISED
} orWaitMode;
/* Commits a kernel, copy or fill. If it waits, or with OPENREG_LAUNCH_BLOCKING, it returns when the
 * task is done, with the device's failure as any call that synchronises; or an error if the task
 * was cancelled. */
orError_t orStreamSubmit(orStream *stream, orTask *task, orWaitMode waits);
/* Tasks to copy into the queue. Those of events and waits name their cells by slots. */
typedef struct orSequence {
  const orTask *const *tasks;
  size_t count, bytes; /* total of the records, or more */
  orCell *const *cells;
} orSequence;
/* Queues all of them, with nothing between, or none. Never blocks. If `asked`, the caller named
 * this stream, which may refuse. Else they follow work on another stream, and are cancelled if the
 * device is lost. */
orError_t orStreamQueueAll(orStream_t handle, bool asked, const orSequence *records);
/* Reserves room for records of `bytes` together. The next orStreamQueueAll then lacks no memory,
 * unless another call queues on the stream first. */
orError_t orStreamReserve(orStream_t handle, size_t bytes);
/* Blocks while the queue is full. */
orError_t orStreamAwaitRoom(orStream_t handle);
/* Makes a waiting stream runnable, which then checks its wait again. No effect on others. */
void orStreamResume(orStream *stream);
/* Called by a worker when one more task has finished. */
void orStreamFinishTask(orStream *stream, const orTask *task);
/* Called by the worker that runs the stream. True if the stream was empty: it is now idle, and no
 * longer the worker's. */
bool orStreamTryIdle(orStream *stream);
/* The handle of the slot's present or latest owner. */
orStream_t orStreamHandleOf(orStream *stream);
/* Calls `fn` for each stream of a device (-1: of all) with unfinished tasks, destroyed ones too,
 * with its count of tasks so far. No lock is held meanwhile. By the time `fn` runs, the slot may be
 * another stream's. */
void orStreamForEach(int device, void (*fn)(orStream *stream, uint64_t queued, void *context),
                     void *context);
/* Waits until all that is queued now on a device (-1: all) has finished, or fails as
 * orHostAwait. */
orError_t orStreamsAwait(int device);
/* The same for a host, as the tools see it. `call`: the public call that promises this, or null. */
orError_t orStreamSynchronizeDevice(const char *call, int device);
/* Marks every stream of a device as lost and cancels its work, or as usable again. The caller has
 * set the flag that orStreamMake reads for later streams. */
void orStreamsSetLost(int device, bool lost);
/* Makes every waiting stream of a device check its wait again. */
void orStreamsGiveUpWaits(int device);
/* The stream whose record `stream` waits for, or null. */
orStream *orStreamBlocker(orStream *stream);
/* Runs a stream that the calling host thread has taken, until `count` of its tasks have
 * finished. */
void orStreamRunHere(orStream *stream, uint64_t count);
/* Waits until every stream is idle and no worker runs one. */
orError_t orStreamSettle(void);
orError_t orStreamMake(int device, int priority, orStreamOwner owner, orStream_t *handle);
/* Destroys a stream that the library owns. Any thread, also in a task. */
void orStreamUnmake(orStream_t handle);
/* "the default stream", "a stream of the pool" or "a stream of a graph"; null: a caller's. */
const char *orStreamOwnerName(orStreamOwner owner);
int orClampPriority(int priority);
/* Tasks queued and finished so far. For a destroyed stream that has drained: 0 and UINT64_MAX. */
orError_t orStreamQueued(orStream_t stream, uint64_t *count);
orError_t orStreamCompleted(orStream_t stream, uint64_t *count);
const char *orLastQueued(void); /* by the calling thread, or null; for signal handlers */

/* ---- event.c ---- */

typedef struct orGraphNode orGraphNode;

/* One completion of an event. Pooled; freed with its last reference. */
struct orCell {
  _Atomic uint32_t refs;
  _Atomic uint32_t state; /* futex: OR_CELL_* */
  orMutex lock;           /* guards `waiters`, and is held while `state` becomes done */
  orStream *waiters;
  uint64_t time_ns;    /* written before done */
  orError_t status;    /* written before done */
  char *message;       /* what an error's signal said; written before done; or null */
  uint64_t began_ns;   /* when the hardware began, if it was measured; written before done */
  orStream_t stream;   /* where it was recorded; 0: external */
  uint64_t number;     /* its record's number there */
  orEvent_t event;     /* the event it was made for */
  orCell *next;        /* pool */
  void *kept;          /* a tool's data, under its lock, until OR_PROBE_CELL_FREED */
  orCapture *capture;  /* not null: recorded in this capture, so nothing completes it */
  orGraphNode *record; /* its node there, while the capture is active */
};
/* The bits from LOOK on count how often sleepers were woken to check again. */
enum { OR_CELL_PENDING = 0, OR_CELL_DONE = 1, OR_CELL_SLEEPERS = 2, OR_CELL_LOOK = 4 };

/* A cell with that many references; null if memory is short. */
orCell *orCellNew(uint32_t refs);
orCell *orCellRetain(orCell *cell);
void orCellRelease(orCell *cell);
static inline bool orCellDone(const orCell *cell) {
  return atomic_load_explicit(&cell->state, memory_order_acquire) & OR_CELL_DONE;
}
/* Called once. Wakes all that wait. */
void orCellComplete(orCell *cell, orError_t status);
/* Called by the worker that runs the stream: true if the cell is done; false if the stream now
 * waits and is no longer the worker's. */
bool orCellWaitOrPark(orCell *cell, orStream *stream);
/* The stream of its record; null: external. */
orStream *orCellStream(const orCell *cell);
/* Takes a waiting stream off the cell's list, if it is there. Stream lock held. */
void orCellForget(orCell *cell, orStream *stream);
/* A new event by which a factory completes `task`, and its cell (a reference for the caller). */
orError_t orEventMakeCompletion(int device, const char *task, orEvent_t *event, orCell **cell);
/* Destroys an external event that the library made for a task. */
void orEventEndTask(orEvent_t event);
/* The newest cell with a reference for the caller, or null, and the event's flags. */
orError_t orEventCell(orEvent_t event, orCell **cell, unsigned *flags);

/* ---- context.c ---- */

/* Makes device `index` ready for use (first use), or fails naming the index and the range. */
orError_t orDeviceUse(int index);
orError_t orDeviceDefaultStream(int device, orStream_t *stream);

/* ---- failure.c ---- */

/* Keeps the first asynchronous failure of a device and counts the others. orErrorDeviceLost
 * replaces any other and loses the device. The cause is what the calling thread has set. Any
 * thread, no lock held. */
void orDeviceNoteFailure(int index, orError_t error, const char *kernel, const char *detail);
/* Forgets what the calling thread has set as the cause of a failure that it then did not note. No
 * lock held. */
void orFailureForgetCause(void);
/* Keeps a copy of what an error's signal said, before the cell is done; without memory, nothing. */
void orFailureKeepText(orCell *cell, const char *text);
/* Called at the end of every call that synchronises: returns the failure once, that of a lost
 * device each time. */
orError_t orDeviceTakeFailure(int index);
bool orDeviceIsLost(int index);
/* orSuccess, or orErrorDeviceLost with its text. */
orError_t orDeviceCheckLost(int index);
void orDeviceForgetFailure(int index);

/* ---- memory.c ---- */

/* Allocates a region of a device, which is made ready for use first. A loss that the factory
 * reports is noted. */
orError_t orMemoryAllocate(int device, size_t bytes, bool cached, void **ptr);

/* ---- host_wait.c ---- */

enum { OR_SPIN_NS = 20000 }; /* how long a waiting host spins before it sleeps */

/* What a host thread waits for: `count` finished tasks of a stream or, without a stream, an
 * external event's cell. A recorded event has all three: it is over when its record is, which
 * completes the cell just before. */
typedef struct orWaitGoal {
  orStream *stream;
  uint64_t count;
  orCell *cell;
} orWaitGoal;

bool orIsOver(const orWaitGoal *goal);
/* Blocks until the goal is over, helping with pieces of large tasks meanwhile. Fails if it will not
 * be over, as when the process exits. */
orError_t orHostAwait(const orWaitGoal *goal);
orError_t orHostAwaitTasks(orStream *stream, uint64_t count);
/* For a query whose goal is not over: orErrorNotReady, or why it will not be over. Under a schedule
 * it lets a task run, so that repeated queries succeed in the end. */
orError_t orHostAwaitStep(const orWaitGoal *goal);
/* Whether a query of the cell, or of the stream if that is null, answers that it is done, if it is:
 * a tool may want the other answer. */
static inline bool orQueryAnswers(orStream_t stream, orCell *cell, bool done) {
  orProbe asked = {.stream = stream, .cell = cell, .number = done};
  if (orProbeOn(OR_PROBE_HOST_QUERIES)) orProbeCall(OR_PROBE_HOST_QUERIES, &asked);
  return done && !asked.fails;
}
/* Blocks until the task `number` has finished (true), or cancels it if no thread runs it. Called
 * after an error of orHostAwait, by the thread that queued the task. */
bool orHostAwaitOrCancel(orStream *stream, orTask *task, uint64_t number);
/* Wakes hosts that sleep for the stream's progress, to help with a copy; false if none do. */
bool orStreamAskForHelp(orStream *stream);
void orStreamWakeSleepers(orStream *stream); /* whatever count they wait for */

/* A host thread that sleeps, until orSleeperEnd. An empty goal: it waits for what a schedule has
 * chosen to run. */
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
void orSleepersWake(void); /* all of them, to check again */

/* The core on which a host has waited for long, as a hint; negative: none. */
extern OR_HIDDEN _Atomic int orHostCore;
/* Not 0: the system refused a thread, and no worker has started since: Note [Refused threads]. */
extern OR_HIDDEN _Atomic uint32_t orWorkersRefused;
/* Called by a constructor: registers `fn`, which a waiting host calls. It tries to start a worker
 * again and, while no worker exists, runs what a host may run. It fails if the goal needs a worker;
 * otherwise the host may sleep while `orWorkersRefused` is `*refused`. */
void orHostSetStandIn(orError_t (*fn)(const orWaitGoal *goal, uint32_t *refused));

/* ---- worker.c ---- */

/* Puts a stream that has just become READY into the list and makes sure that a worker runs. No lock
 * held. */
void orWorkerSchedule(orStream *stream);

/* For a dispatcher: passes worker 0 a stream that can run, for which it calls `serve`. `refuse`
 * takes the stream back if the system refuses worker 0 a thread. */
void orWorkerServe(orStream *stream, void (*serve)(orStream *stream),
                   void (*refuse)(orStream *stream));

/* Tries again to start a worker for ready streams; true if any is alive, or about to be. */
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
/* Called by the thread that runs the stream: other streams may now run before its first task. */
void orWorkerGiveBack(orStream *stream);
/* The first task of a stream that is ready and in no list. */
const orTask *orWorkerFirst(orStream *stream);
/* Called by a host thread: takes a ready stream. False if a worker took it first, or a task on it
 * is for workers alone. */
bool orWorkerTake(orStream *stream);

/* ---- task.c ---- */

/* Whether workers alone may run a task. Any thread may run events' records and waits. */
static inline bool orTaskIsForWorkers(const orTask *task) {
  return task->kind <= OR_KIND_SET && !task->any_thread;
}
/* Whether a host thread that waits may run work of a device (-1: of none). */
bool orTaskAnyThread(int device);
/* Runs the first task of a stream, of number `number` there, and destroys its arguments. False if
 * the stream waits and is no longer the worker's. */
bool orTaskRun(orStream *stream, orTask *task, uint64_t number, int worker);
/* Instead of running a task: completes its event and destroys its arguments. */
void orTaskCancel(orTask *task);

/* Unique for each task, as a slot's counters never start again. */
enum { OR_NUMBER_BITS = 64 - OR_INDEX_BITS };
static inline uint64_t orCorrelation(orStream_t stream, uint64_t number) {
  return (uint64_t)orHandleIndex(stream) << OR_NUMBER_BITS |
         orHandleBits(number, 0, OR_NUMBER_BITS);
}
/* The task that the calling thread is running: its stream, and its number there (from 1). */
bool orTaskCurrent(orStream_t *stream, uint64_t *number);
orStream *orTaskStream(void); /* null outside a task */
/* the task that the thread is running, or null; for signal handlers */
const char *orTaskName(void);

#include "stream/dispatch.h"
#include "stream/graph.h"
