/*
 * How a host thread waits for tasks of a stream or for an external event.
 *
 * It spins briefly, helps with the pieces of large tasks, then sleeps. A dispatcher runs tasks
 * meanwhile in its own way (dispatch.h).
 *
 * Note [Sleeping for progress]: a stream's `wake_at` is the smallest count that any thread sleeps
 * for. A sleeper reads `wake_word`, lowers `wake_at`, reads `completed` once more and sleeps on
 * `wake_word`. The worker stores `completed` and loads `wake_at`; if the count is reached, it
 * resets `wake_at`, changes `wake_word` and wakes all. The store and the load on each side are
 * seq_cst, so one of the two sees the other. If the reset erases a request, its sleeper has read
 * `wake_word` before it changed, and does not sleep. A stream's counters never restart, so a thread
 * that sleeps for an old count is woken too. For an external event, the futex is its cell's state.
 *
 * `hosts` lists the sleepers, for the hang report and for calls that wake all of them, and is
 * guarded by `lock`. An entry is on its sleeper's stack and has a reference to its cell.
 *
 * model/wait.pml and model/wait.cpp are models of the sleep and of the wake-up, model/dispatch.cpp
 * of a schedule that begins meanwhile (`make model`): change them together.
 */
#include <limits.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stream/stream.h"

enum { OR_LOOK_AGAIN_NS = 1000000, OR_NO_CORE = -2 };

_Atomic(const orDispatcher *) orDispatcherNow;
_Atomic uint32_t orWorkersRefused;
_Atomic int orHostCore = OR_NO_CORE;

static orError_t (*stand_in)(const orWaitGoal *goal, uint32_t *refused);

void orHostSetStandIn(orError_t (*fn)(const orWaitGoal *goal, uint32_t *refused)) { stand_in = fn; }

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orSleeper *hosts;

static bool hasFinished(const orStream *s, uint64_t count) {
  return atomic_load_explicit(&s->completed, memory_order_seq_cst) >= count;
}

bool orIsOver(const orWaitGoal *a) {
  return a->stream ? hasFinished(a->stream, a->count) : orCellDone(a->cell);
}

/* ---- who sleeps ---- */

void orSleeperBegin(orSleeper *w, const orWaitGoal *goal) {
  static _Thread_local int thread;
  if (!thread) thread = (int)syscall(SYS_gettid);
  *w = (orSleeper){.goal = *goal, .since = orNow(), .thread = thread};
  if (goal->stream) {
    orMutexLock(&goal->stream->lock);
    w->stream = goal->stream->last_handle;
    orMutexUnlock(&goal->stream->lock);
  }
  orMutexLock(&lock);
  w->next = hosts;
  w->at = &hosts;
  if (hosts) hosts->at = &w->next;
  hosts = w;
  orMutexUnlock(&lock);
}

void orSleeperEnd(orSleeper *w) {
  orMutexLock(&lock);
  *w->at = w->next;
  if (w->next) w->next->at = w->at;
  orMutexUnlock(&lock);
}

void orSleepersEach(void (*fn)(orSleeper *, void *), void *context) {
  orMutexLock(&lock);
  for (orSleeper *w = hosts; w; w = w->next) fn(w, context);
  orMutexUnlock(&lock);
}

/* ---- waking ---- */

void orStreamWakeSleepers(orStream *s) {
  atomic_store_explicit(&s->wake_at, UINT64_MAX, memory_order_seq_cst);
  atomic_fetch_add_explicit(&s->wake_word, 1, memory_order_seq_cst);
  orFutexWake(&s->wake_word, INT_MAX);
}

bool orStreamAskForHelp(orStream *s) {
  if (atomic_load_explicit(&s->wake_at, memory_order_seq_cst) == UINT64_MAX) return false;
  orStreamWakeSleepers(s);
  return true;
}

static void wake(orSleeper *w, void *context) {
  (void)context;
  orCell *cell = w->goal.cell;
  if (w->goal.stream) {
    orStreamWakeSleepers(w->goal.stream);
  } else if (cell) {
    atomic_fetch_add_explicit(&cell->state, OR_CELL_LOOK, memory_order_acq_rel);
    orFutexWake(&cell->state, INT_MAX);
  }
}

void orSleepersWake(void) { orSleepersEach(wake, NULL); }

/* ---- waiting ---- */

/* The calling thread has waited for long, or waits no more. */
static void noteCore(bool waits) {
  if (waits)
    atomic_store_explicit(&orHostCore, sched_getcpu(), memory_order_relaxed);
  else if (atomic_load_explicit(&orHostCore, memory_order_relaxed) != OR_NO_CORE)
    atomic_store_explicit(&orHostCore, OR_NO_CORE, memory_order_relaxed);
}

/* Returns true if the goal is over, and false after a while or when a task needs help. */
static bool spin(const orWaitGoal *a) {
  uint64_t start = orNow(), now = start;
  do {
    for (int i = 0; i < 64; i++) {
      if (i % 8 == 0 && orIsOver(a)) return true;
      orPause();
    }
    if (now - start > OR_SPIN_NS / 2) {
      noteCore(true);
      sched_yield();
    }
    now = orNow();
  } while (!orSplitWantsHelp() && now - start < OR_SPIN_NS);
  return false;
}

/* From now on a change of the futex wakes the sleeper: Note [Sleeping for progress]. */
static _Atomic uint32_t *announceToStream(orStream *s, uint64_t count, uint32_t *value) {
  *value = atomic_load_explicit(&s->wake_word, memory_order_seq_cst);
  uint64_t at = atomic_load_explicit(&s->wake_at, memory_order_seq_cst);
  while (count < at && !atomic_compare_exchange_weak_explicit(
                           &s->wake_at, &at, count, memory_order_seq_cst, memory_order_seq_cst)) {
  }
  return &s->wake_word;
}

static _Atomic uint32_t *announceSleep(const orWaitGoal *a, uint32_t *value) {
  if (a->stream) return announceToStream(a->stream, a->count, value);
  *value = OR_CELL_SLEEPERS |
           atomic_fetch_or_explicit(&a->cell->state, OR_CELL_SLEEPERS, memory_order_acq_rel);
  return &a->cell->state;
}

/* The exit handler wakes the threads in the list. A thread that enters later reads its futex first,
 * and then sees that the process is exiting. */
static void sleepUntilOver(const orWaitGoal *a, uint32_t refused) {
  orSleeper wait;
  uint32_t value;
  void *token = orBlockEnter();
  orSleeperBegin(&wait, a);
  for (;;) {
    _Atomic uint32_t *word = announceSleep(a, &value);
    if (orDispatching() || orIsOver(a) || orProcessExiting()) break;
    if (refused != atomic_load_explicit(&orWorkersRefused, memory_order_seq_cst)) break;
    /* After helping, spin: other threads run the last pieces. */
    if (!orSplitHelp())
      orFutexWait(word, value, 0);
    else if (spin(a))
      break;
  }
  orSleeperEnd(&wait);
  orBlockLeave(token);
}

orError_t orHostAwait(const orWaitGoal *a) {
  orError_t error = orSuccess;
  uint32_t refused;
  while (!error && !orIsOver(a) && !(error = orProcessRefuseExiting())) {
    refused = atomic_load_explicit(&orWorkersRefused, memory_order_relaxed);
    if (OR_UNLIKELY(refused)) error = stand_in(a, &refused);
    const orDispatcher *d = orDispatching();
    if (OR_UNLIKELY(d != NULL))
      error = d->await(a);
    else if (!error && !spin(a))
      sleepUntilOver(a, refused);
  }
  noteCore(false);
  return error;
}

orError_t orHostAwaitTasks(orStream *stream, uint64_t count) {
  return orHostAwait(&(orWaitGoal){.stream = stream, .count = count});
}

orError_t orHostAwaitStep(const orWaitGoal *a) {
  uint32_t refused = atomic_load_explicit(&orWorkersRefused, memory_order_relaxed);
  OR_TRY(orProcessRefuseExiting());
  if (OR_UNLIKELY(refused) && orProcessTask() == OR_TASK_NONE) OR_TRY(stand_in(a, &refused));
  const orDispatcher *d = orDispatching();
  if (OR_UNLIKELY(d != NULL)) OR_TRY(d->step(a));
  return orErrorNotReady;
}

/* ---- waiting no more ---- */

/* Whether a vendor's device runs the task; its stream waits for that, or is ready to check again.
 * Lock held, and no thread runs the stream. */
static bool isAtDevice(const orTask *task) {
  return task->completion && !orCellDone(task->completion);
}

/* True if no thread runs the task and none will begin it. */
static bool cancel(orStream *s, orTask *task, uint64_t number) {
  orMutexLock(&s->lock);
  bool over = atomic_load_explicit(&s->completed, memory_order_relaxed) >= number;
  bool idle = !over && s->state != OR_STREAM_RUNNING && !isAtDevice(task);
  if (idle) {
    atomic_store_explicit(&task->cancelled, true, memory_order_relaxed);
    task->was_cancelled = NULL;
  }
  orMutexUnlock(&s->lock);
  return idle;
}

/* This polls: a thread that gives the stream back (no worker, or process exit) wakes no thread. */
bool orHostAwaitOrCancel(orStream *s, orTask *task, uint64_t number) {
  bool cancelled = false;
  void *token = orBlockEnter();
  for (uint32_t value;;) {
    _Atomic uint32_t *word = announceToStream(s, number, &value);
    if (hasFinished(s, number) || (cancelled = cancel(s, task, number))) break;
    orFutexWait(word, value, OR_LOOK_AGAIN_NS);
  }
  orBlockLeave(token);
  return !cancelled;
}
