/*
 * Workers: the threads that run tasks, and the choice of what runs next.
 *
 * A worker takes the most urgent ready stream and runs its tasks in order. After each task it gives
 * the stream back if a more urgent one is ready, or one of equal priority has been ready for longer
 * than a millisecond. Workers belong to the process and serve any device. Worker 0 is the wide one
 * (its kernels may use several threads) and is woken first.
 *
 * `lock` is the last in the order of locks and guards everything in `sched` except the atomics,
 * which are written under it and read without it as hints:
 *   ready_mask    bit p: a stream of priority p is ready
 *   oldest[p]     since when the first stream of that list has been ready
 *   looking       the workers that look for a stream, a byte each: 0, or the core's number + 1; set
 *                 without the lock
 *   chosen        the stream that a dispatcher has chosen. Only worker 0 takes it, and first; its
 *                 bit in the mask is OR_CHOSEN
 *
 * Note [No lost wake-up]: a stream enters its list under the lock, and a worker goes to sleep under
 * the lock after finding the lists empty. A thread that adds a stream wakes a worker only if none
 * is looking for one. A worker that takes a stream and leaves others behind wakes the next. A
 * worker may set its `looking` byte at any time, and does so before it gives up an empty stream, as
 * that stream's next task would otherwise wake another worker. It clears the byte under the lock,
 * after checking the lists. A wake-up changes the worker's own futex word, so a worker that is
 * about to sleep does not.
 *
 * Note [Spinning workers]: a worker without work spins briefly before it sleeps. It spins for
 * longer if it was last woken soon after it fell asleep, as by a host that waits for each result,
 * and if that takes no core from a worker that computes. It does not spin on the core of a host
 * that waits, where each would keep the other from running.
 *
 * Note [Wake-up on the launching core]: the system often wakes a worker on the core of the thread
 * that wakes it, though another core is idle: a virtual machine's halted core does not count as
 * idle, and waking it costs more than switching threads. A worker therefore asks for a short slice
 * of processor time, so that the system preempts the waking thread for it. It does not spin on that
 * core, and moves to another one before it helps with pieces of a task whose owner also works on
 * them. A looking worker counts only for threads on other cores, as it may be waiting for the
 * caller's core.
 *
 * Note [Refused threads]: the system may refuse a thread (a limit of the user, of a control group).
 * The worker then counts as not started, and `orWorkersRefused` is not 0 until a worker is started.
 * Every launch and every wait tries again for the ready streams. While no worker is alive, a host
 * that waits or queries runs what any thread may run (standIn), of all streams. It fails with
 * orErrorSystem if its goal needs a worker; queued work stays queued. Each stream that becomes
 * ready then increments `orWorkersRefused` and wakes all hosts to check again. A host reads its
 * futex, checks, and compares that count before it sleeps. A thread that leaves a stream to a
 * worker that another thread is starting sets `relied`: if that start is refused, hosts are woken
 * too. A dispatcher's stream goes back to the dispatcher (`refuse`).
 *
 * model/wait.pml is a model of the scheduling of streams and the sleep of workers (`make model`):
 * change them together.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stream/stream.h"

enum {
  OR_SHORT_SPIN_NS = 10000,
  OR_LONG_SPIN_NS = 100000,
  OR_SOON_NS = 300000, /* a wake-up takes a good part of this */
  OR_FAIR_NS = 1000000,
  OR_SLICE_NS = 200000,
  OR_LOOKS = 3,
  OR_LOOK_PAUSES = 32,
  OR_CHOSEN = 1 << OR_PRIORITIES
};

typedef struct orWorker {
  _Alignas(OR_CACHE_LINE) _Atomic uint32_t awake; /* futex; 0: asleep */
  int index;
  bool eager;       /* the worker's own: spin for long */
  uint64_t looking; /* the worker's own: its byte of sched.looking, in place */
  int waker; /* the core of the thread that last chose it; written under the lock while it sleeps */
  void (*serves)(orStream *stream); /* the worker's own: `serve`, or null */
} orWorker;

static struct {
  orMutex lock;
  orStream *first[OR_PRIORITIES], *last[OR_PRIORITIES];
  orStream *chosen;
  void (*serve)(orStream *stream); /* the dispatcher's, called with `chosen` */
  void (*refuse)(orStream *stream);
  unsigned idle;    /* bit i: worker i sleeps */
  unsigned threads; /* bit i: worker i has a thread, or is being given one */
  int alive;        /* workers that have a running thread */
  bool relied; /* some stream relies on a thread that is being started, while no worker is alive */
  int coming;  /* workers that were chosen and have not arrived yet */
  int why;     /* the errno of the latest refused thread */
  void (*hook)(int worker, int wide);
  orWorker workers[OR_MAX_WORKERS];
  _Atomic unsigned ready_mask;
  _Atomic uint64_t oldest[OR_PRIORITIES];
  /* a byte a worker; cleared and acted on under the lock, set without it */
  _Atomic uint64_t looking;
} sched = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_WORKERS)};

static void *workerMain(void *worker);

/* Lock held. */
static int startedWorkers(void) { return __builtin_popcount(sched.threads); }

/* ---- ready streams (lock held) ---- */

/* Level 0 is the most urgent. */
static int levelOf(const orStream *s) { return s->priority + OR_PRIORITIES - 1; }

static void push(orStream *s) {
  int p = levelOf(s);
  s->ready_next = NULL;
  s->ready_since = orNow();
  if (sched.first[p]) {
    sched.last[p]->ready_next = s;
  } else {
    sched.first[p] = s;
    atomic_store_explicit(&sched.oldest[p], s->ready_since, memory_order_relaxed);
    atomic_fetch_or_explicit(&sched.ready_mask, 1u << p, memory_order_relaxed);
  }
  sched.last[p] = s;
}

static orStream *removeFirst(int p) {
  orStream *s = sched.first[p];
  sched.first[p] = s->ready_next;
  if (sched.first[p])
    atomic_store_explicit(&sched.oldest[p], sched.first[p]->ready_since, memory_order_relaxed);
  else
    atomic_fetch_and_explicit(&sched.ready_mask, ~(1u << p), memory_order_relaxed);
  return s;
}

/* Removes the stream that runs next. */
static orStream *pop(void) {
  unsigned mask = atomic_load_explicit(&sched.ready_mask, memory_order_relaxed) & ~OR_CHOSEN;
  return mask ? removeFirst(__builtin_ctz(mask)) : NULL;
}

/* False if the stream is not in the list: a worker has it, or had it. */
static bool removeReady(const orStream *s, int p) {
  orStream *before = NULL, *at = sched.first[p];
  while (at && at != s) {
    before = at;
    at = at->ready_next;
  }
  if (!at) return false;
  if (!before) return removeFirst(p);
  before->ready_next = at->ready_next;
  if (sched.last[p] == at) sched.last[p] = before;
  return true;
}

static orStream *takeChosen(void) {
  orStream *s = sched.chosen;
  sched.chosen = NULL;
  atomic_fetch_and_explicit(&sched.ready_mask, ~(unsigned)OR_CHOSEN, memory_order_relaxed);
  return s;
}

static orStream *popFor(orWorker *l) {
  l->serves = sched.chosen && !l->index ? sched.serve : NULL;
  return OR_LIKELY(!l->serves) ? pop() : takeChosen();
}

static bool shouldYield(const orStream *s) {
  unsigned mask = atomic_load_explicit(&sched.ready_mask, memory_order_relaxed);
  int p = levelOf(s);
  if (OR_LIKELY(!mask)) return false;
  if (mask & (((1u << p) - 1) | OR_CHOSEN)) return true;
  return (mask & 1u << p) &&
         orNow() - atomic_load_explicit(&sched.oldest[p], memory_order_relaxed) > OR_FAIR_NS;
}

/* ---- waking workers ---- */

/* The byte of a worker that looks from the calling thread's core. */
static uint64_t byteOfCore(void) { return 1 + (uint64_t)sched_getcpu() % UINT8_MAX; }

/* Whether a worker looks from another core; one on this core may not be running. */
static bool somebodyLooks(void) {
  uint64_t looking = atomic_load_explicit(&sched.looking, memory_order_relaxed);
  if (!looking) return false;
  for (uint64_t here = byteOfCore(); looking; looking >>= 8)
    if ((looking & UINT8_MAX) && (looking & UINT8_MAX) != here) return true;
  return false;
}

/* See Note [No lost wake-up]. */
static void startLooking(orWorker *l) {
  if (l->looking) return;
  l->looking = byteOfCore() << 8 * l->index;
  atomic_fetch_or_explicit(&sched.looking, l->looking, memory_order_relaxed);
}

/* Lock held. */
static void stopLooking(orWorker *l) {
  if (!l->looking) return;
  uint64_t before = atomic_fetch_xor_explicit(&sched.looking, l->looking, memory_order_relaxed);
  OR_ASSERT(before & (uint64_t)UINT8_MAX << 8 * l->index, ==, l->looking);
  l->looking = 0;
}

/* Lock held. */
static orWorker *choose(int index) {
  orWorker *l = &sched.workers[index];
  sched.idle &= ~(1u << index);
  sched.threads |= 1u << index;
  l->index = index;
  l->waker = sched_getcpu();
  sched.coming++;
  return l;
}

/* Chooses a sleeping worker or one to be started. The caller passes it to `wake`. Lock held. */
static orWorker *chooseWorker(bool *start) {
  *start = false;
  if (sched.idle) return choose(__builtin_ctz(sched.idle));
  if (startedWorkers() >= orWorkerLimit()) return NULL;
  *start = true;
  return choose(__builtin_ctz(~sched.threads));
}

static void wakeHosts(void) {
  atomic_fetch_add_explicit(&orWorkersRefused, 1, memory_order_seq_cst);
  orSleepersWake();
}

/* See Note [Refused threads]. */
static void noteRefused(orWorker *l, int why) {
  uint32_t none = 0;
  orMutexLock(&sched.lock);
  sched.coming--;
  sched.threads &= ~(1u << l->index);
  sched.why = why;
  atomic_compare_exchange_strong_explicit(&orWorkersRefused, &none, 1, memory_order_seq_cst,
                                          memory_order_relaxed);
  bool wakes = !sched.threads && sched.relied;
  if (wakes) sched.relied = false;
  orStream *chosen = l->index ? NULL : takeChosen();
  void (*refuse)(orStream *) = sched.refuse;
  orMutexUnlock(&sched.lock);
  if (chosen) refuse(chosen);
  if (wakes) wakeHosts();
}

/* False if the system refuses the thread. */
static bool startWorker(orWorker *l) {
  atomic_store_explicit(&l->awake, 1, memory_order_relaxed);
  int failed = orThreadStart(workerMain, l);
  if (OR_UNLIKELY(failed)) noteRefused(l, failed);
  return !failed;
}

/* Wakes or starts the chosen worker. Lock not held. True if a worker comes. */
static bool wake(orWorker *l, bool start) {
  if (!l) return false;
  if (start) return startWorker(l);
  atomic_store_explicit(&l->awake, 1, memory_order_release);
  orFutexWake(&l->awake, 1);
  return true;
}

void orWorkerSchedule(orStream *s) {
  bool start = false;
  if (OR_UNLIKELY(orProcessExiting())) return; /* no thread runs it */
  const orDispatcher *d = orDispatching();
  if (OR_UNLIKELY(d != NULL) && d->hold(s)) return;
  orMutexLock(&sched.lock);
  push(s);
  orWorker *l = somebodyLooks() ? NULL : chooseWorker(&start);
  bool none = !sched.alive;
  if (OR_UNLIKELY(none) && !l) sched.relied = true;
  orMutexUnlock(&sched.lock);
  if (OR_UNLIKELY(!wake(l, start) && l && none)) wakeHosts();
}

void orWorkerServe(orStream *s, void (*serve)(orStream *), void (*refuse)(orStream *)) {
  orMutexLock(&sched.lock);
  sched.chosen = s;
  sched.serve = serve;
  sched.refuse = refuse;
  atomic_fetch_or_explicit(&sched.ready_mask, OR_CHOSEN, memory_order_relaxed);
  /* If worker 0 is awake, it checks the lists again before it sleeps. */
  bool start = !(sched.threads & 1);
  orWorker *l = start || (sched.idle & 1) ? choose(0) : NULL;
  orMutexUnlock(&sched.lock);
  wake(l, start);
}

/* ---- the worker ---- */

/* See Note [The end of the process]. Lock held at entry. */
static _Noreturn void standStill(void) {
  orMutexUnlock(&sched.lock);
  for (;;) pause();
}

static bool somethingToDo(void) {
  return atomic_load_explicit(&sched.ready_mask, memory_order_relaxed) || orSplitWantsHelp();
}

/* See Note [Wake-up on the launching core]. */
static bool sharesCoreWithWaker(const orWorker *l) { return l->waker == sched_getcpu(); }

static void spin(uint64_t ns) {
  uint64_t end = orNow() + ns;
  do {
    for (int i = 0; i < 32 && !somethingToDo(); i++) orPause();
  } while (!somethingToDo() && orNow() < end);
}

/* Lock held. */
static bool othersRun(void) {
  int looking = 0;
  for (uint64_t l = atomic_load_explicit(&sched.looking, memory_order_relaxed); l; l >>= 8)
    looking += (l & UINT8_MAX) != 0;
  return __builtin_popcount(sched.idle) + sched.coming + looking < startedWorkers();
}

/* Lock held at entry and return. */
static void sleepWorker(orWorker *l) {
  stopLooking(l);
  sched.idle |= 1u << l->index;
  atomic_store_explicit(&l->awake, 0, memory_order_relaxed);
  orMutexUnlock(&sched.lock);
  uint64_t asleep = orNow();
  while (!atomic_load_explicit(&l->awake, memory_order_acquire)) orFutexWait(&l->awake, 0, 0);
  l->eager = orNow() - asleep < OR_SOON_NS;
  orMutexLock(&sched.lock);
  sched.coming--;
}

/* Wakes another worker for the remaining streams. Lock held at entry, not at return. */
static void leaveTheRest(orWorker *l) {
  stopLooking(l);
  bool more = atomic_load_explicit(&sched.ready_mask, memory_order_relaxed);
  bool start = false;
  orWorker *next = more && !somebodyLooks() ? chooseWorker(&start) : NULL;
  orMutexUnlock(&sched.lock);
  wake(next, start);
}

static bool sharesCoreWithHost(void) {
  return atomic_load_explicit(&orHostCore, memory_order_relaxed) == sched_getcpu();
}

/* Lock held at entry and return. */
static void spinUnlocked(uint64_t ns) {
  orMutexUnlock(&sched.lock);
  spin(ns);
  orMutexLock(&sched.lock);
}

/* Moves the calling thread to another core by excluding this one for a moment; the kernel has no
 * other call for that. A change of the affinity by another thread meanwhile is lost. No effect if
 * this is the only core. */
static void leaveCore(int core) {
  size_t size;
  cpu_set_t *set = orHostCoreSet(&size);
  if (set && CPU_ISSET_S(core, size, set) && CPU_COUNT_S(size, set) > 1) {
    CPU_CLR_S(core, size, set);
    sched_setaffinity(0, size, set);
    CPU_SET_S(core, size, set);
    sched_setaffinity(0, size, set);
  }
  CPU_FREE(set);
}

/* True if it has helped. Lock held at entry and return. See Note [Spinning workers]. */
static bool spinAndHelp(orWorker *l) {
  if (sharesCoreWithHost()) return false;
  if (!sharesCoreWithWaker(l)) {
    startLooking(l);
    spinUnlocked(OR_SHORT_SPIN_NS);
    if (!somethingToDo() && l->eager && !othersRun()) spinUnlocked(OR_LONG_SPIN_NS);
  }
  if (atomic_load_explicit(&sched.ready_mask, memory_order_relaxed) || !orSplitWantsHelp())
    return false;
  leaveTheRest(l); /* pieces may take long */
  if (sharesCoreWithWaker(l)) leaveCore(l->waker);
  bool helped = orSplitHelp();
  orMutexLock(&sched.lock);
  return helped;
}

/* Waits until there is a stream to run. A worker that has just worked spins before it sleeps. One
 * that was woken for nothing, or too late to help, goes back to sleep. */
static orStream *pick(orWorker *l) {
  orStream *s;
  bool spin_first = true;
  orMutexLock(&sched.lock);
  while (!(s = popFor(l))) {
    if (OR_UNLIKELY(orProcessExiting())) standStill();
    if (spin_first) {
      spin_first = spinAndHelp(l);
    } else {
      sleepWorker(l);
      spin_first = orSplitWantsHelp();
    }
  }
  leaveTheRest(l);
  return s;
}

void orWorkerGiveBack(orStream *s) {
  orMutexLock(&s->lock);
  s->state = OR_STREAM_READY;
  orMutexUnlock(&s->lock);
  orWorkerSchedule(s);
}

/* Called by the thread that runs the stream. Other tasks are read under its lock (hang.c). */
static orTask *frontTask(orStream *s) {
  orChunk *emptied;
  OR_ASSERT(s->state, ==, OR_STREAM_RUNNING);
  orTask *t = orQueueFront(&s->out, &emptied);
  if (OR_UNLIKELY(emptied != NULL)) {
    orMutexLock(&s->lock);
    atomic_store_explicit(&s->head, NULL, memory_order_relaxed);
    orQueueReuse(&s->in, emptied);
    orMutexUnlock(&s->lock);
  }
  atomic_store_explicit(&s->head, t, memory_order_relaxed);
  return t;
}

const orTask *orWorkerFirst(orStream *s) {
  orMutexLock(&s->lock);
  const orTask *first = orQueuePeek(&s->out);
  orMutexUnlock(&s->lock);
  return first;
}

/* Polls briefly for tasks past the last one seen. Otherwise a producer as fast as the worker would
 * pay for the scheduler with each task. It polls seldom, as each read takes the cache line of the
 * stream's lock away from the producer: with a microsecond between reads, several tasks share that
 * price. */
static bool seeMore(orStream *s, uint64_t number) {
  for (int i = 0; i < OR_LOOKS; i++) {
    s->seen = atomic_load_explicit(&s->queued, memory_order_acquire);
    if (number <= s->seen) return true;
    if (atomic_load_explicit(&sched.ready_mask, memory_order_relaxed)) return false;
    for (int k = 0; k < OR_LOOK_PAUSES; k++) orPause();
  }
  return false;
}

/* Runs a task; false if the stream waits and is no longer the worker's. */
static bool runTask(orStream *s, orTask *t, uint64_t number, int worker) {
  bool gives_up = t->kind == OR_KIND_WAIT;
  if (OR_LIKELY(orTaskRun(s, t, number, worker))) return true;
  /* A reset just before the stream began to wait found it running and did not resume it. */
  if (gives_up && number <= atomic_load_explicit(&s->cancel_until, memory_order_acquire))
    orStreamResume(s);
  return false;
}

/* True if the stream was empty and is no longer the worker's. */
static bool letGoIfEmpty(orWorker *l, orStream *s) {
  startLooking(l);
  if (orStreamTryIdle(s)) return true;
  orMutexLock(&sched.lock);
  leaveTheRest(l);
  return false;
}

/* Runs or cancels the first task; false if the stream waits and is no longer the worker's. */
static inline bool runFront(orStream *s, uint64_t number, int worker) {
  orTask *t = frontTask(s);
  OR_PROBE(OR_PROBE_STARTS, .slot = s);
  /* Work that a vendor's device has started is waited for, like any running task. */
  bool cancels = number <= atomic_load_explicit(&s->cancel_until, memory_order_acquire);
  bool cancelled = atomic_load_explicit(&t->cancelled, memory_order_relaxed);
  if (OR_UNLIKELY((cancels && !t->completion) || cancelled))
    orTaskCancel(t);
  else if (!runTask(s, t, number, worker))
    return false;
  orStreamFinishTask(s, t);
  return true;
}

/* Runs tasks until the stream is empty, waits, or has to make way. */
static void runStream(orStream *s, orWorker *l) {
  for (bool ran = false;; ran = true) {
    uint64_t number = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
    if (number > s->seen && !seeMore(s, number)) {
      if (letGoIfEmpty(l, s)) return;
      continue;
    }
    if (OR_UNLIKELY(ran && shouldYield(s))) {
      orWorkerGiveBack(s);
      return;
    }
    if (OR_UNLIKELY(orProcessExiting())) {
      orWorkerGiveBack(s);
      return;
    }
    if (!runFront(s, number, l->index)) return;
  }
}

static void becomeRunning(orStream *s, int worker) {
  orMutexLock(&s->lock);
  s->state = OR_STREAM_RUNNING;
  s->worker = worker;
  orMutexUnlock(&s->lock);
}

bool orWorkerRun(orStream *s, uint64_t count, int worker) {
  becomeRunning(s, worker);
  s->seen = atomic_load_explicit(&s->queued, memory_order_acquire);
  for (;;) {
    uint64_t number = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
    if (number > count || orProcessExiting()) break;
    if (!runFront(s, number, worker)) return false;
  }
  if (!orStreamTryIdle(s)) orWorkerGiveBack(s);
  return true;
}

/* Between the locks, a worker may run all of the stream and its slot may become another stream's,
 * with its own level. If that stream is taken instead, it is given back at once: its count of tasks
 * is past the one that the caller waits for. */
bool orWorkerTake(orStream *s) {
  orMutexLock(&s->lock);
  int p = levelOf(s);
  bool may = s->state == OR_STREAM_READY &&
             s->worker_until <= atomic_load_explicit(&s->completed, memory_order_relaxed);
  orMutexUnlock(&s->lock);
  if (!may) return false;
  orMutexLock(&sched.lock);
  bool taken = removeReady(s, p);
  orMutexUnlock(&sched.lock);
  return taken;
}

/* ---- where no worker is alive: Note [Refused threads] ---- */

/* Whether any thread may deal with the stream's first task: run it, cancel it, or note that a
 * vendor's device has finished it. The stream is in a list and no thread can take it meanwhile.
 * Lock held. */
static bool mayStandIn(const orStream *s) {
  (void)atomic_load_explicit(&s->queued, memory_order_acquire); /* acquires the record */
  const orTask *first = orQueuePeek(&s->out);
  uint64_t number = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
  return !orTaskIsForWorkers(first) || first->completion ||
         atomic_load_explicit(&first->cancelled, memory_order_relaxed) ||
         number <= atomic_load_explicit(&s->cancel_until, memory_order_acquire);
}

/* Lock held. */
static orStream *takeForHost(void) {
  for (int p = 0; p < OR_PRIORITIES; p++)
    for (orStream *s = sched.first[p]; s; s = s->ready_next)
      if (mayStandIn(s)) {
        removeReady(s, p);
        return s;
      }
  return NULL;
}

/* True if the goal is behind a task that only a worker may run. */
static bool needsWorker(const orWaitGoal *a) {
  orStream *end = a->stream;
  for (orStream *other; end && (other = orStreamBlocker(end));) end = other;
  bool needs = false;
  orMutexLock(&sched.lock);
  for (int p = 0; p < OR_PRIORITIES && end; p++)
    for (const orStream *s = sched.first[p]; s; s = s->ready_next)
      needs |= s == end && !mayStandIn(s);
  orMutexUnlock(&sched.lock);
  return needs;
}

/* Passes streams that were ready before the dispatcher began to it. */
static void handOver(void) {
  while (orDispatching()) {
    orMutexLock(&sched.lock);
    orStream *s = pop();
    orMutexUnlock(&sched.lock);
    if (!s) return;
    orWorkerSchedule(s);
  }
}

bool orWorkerStartRefused(void) {
  bool start = false;
  orMutexLock(&sched.lock);
  unsigned mask = atomic_load_explicit(&sched.ready_mask, memory_order_relaxed) & ~OR_CHOSEN;
  orWorker *l = mask ? chooseWorker(&start) : NULL;
  orMutexUnlock(&sched.lock);
  wake(l, start);
  orMutexLock(&sched.lock);
  bool any = sched.threads;
  if (any && !sched.alive) sched.relied = true;
  orMutexUnlock(&sched.lock);
  return any;
}

orError_t orWorkerRefuse(void) {
  orMutexLock(&sched.lock);
  int why = sched.why;
  orMutexUnlock(&sched.lock);
  return orFail(orErrorSystem,
                "the system refused a thread for queued work, which stays queued: %s (errno %d)",
                strerror(why), why);
}

/* Another thread may change the streams while this one checks them. It then increments
 * `orWorkersRefused`. */
static orError_t standIn(const orWaitGoal *a, uint32_t *refused) {
  for (;;) {
    if (orWorkerStartRefused() || orIsOver(a)) return orSuccess;
    if (orDispatching()) return handOver(), orSuccess;
    *refused = atomic_load_explicit(&orWorkersRefused, memory_order_seq_cst);
    orMutexLock(&sched.lock);
    orStream *s = takeForHost();
    orMutexUnlock(&sched.lock);
    if (!s && !needsWorker(a)) return orSuccess;
    if (s)
      orStreamRunHere(s, atomic_load_explicit(&s->completed, memory_order_relaxed) + 1);
    else if (*refused == atomic_load_explicit(&orWorkersRefused, memory_order_seq_cst))
      return orWorkerRefuse();
  }
}

/* With a short slice, a thread that wakes up preempts one with a longer slice (Linux 6.12 and
 * later; no effect before). The slice does not change its share of time. Threads that it starts,
 * such as OpenMP's, have the usual slice. */
static void askForShortSlice(void) {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline, period;
  } a;
  /* Nothing else changes. A thread with another policy keeps it. */
  if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) || a.policy != SCHED_OTHER) return;
  a.flags |= 1; /* SCHED_FLAG_RESET_ON_FORK */
  a.slice_ns = OR_SLICE_NS;
  syscall(SYS_sched_setattr, 0, &a, 0);
}

/* Asks for help with a task that the calling thread runs: first a host that sleeps for its stream,
 * then workers. */
static void callForPieces(int missing) {
  orStream *s = orTaskStream();
  if (s && orStreamAskForHelp(s)) missing--;
  while (missing-- > 0) {
    bool start = false;
    orMutexLock(&sched.lock);
    orWorker *l = chooseWorker(&start);
    orMutexUnlock(&sched.lock);
    if (!wake(l, start)) return;
  }
}

static void atExit(void) {
  orStream *s = orTaskStream();
  if (s) orWorkerGiveBack(s); /* a task that calls exit() does not return to it */
  orSleepersWake();
  orDispatchNotice();
  for (int i = 0; i < OPENREG_MAX_DEVICES; i++) {
    const orDevice *d = orDeviceIsActive(i) ? orDeviceAt(i) : NULL;
    if (d && d->factory->shutdown) d->factory->shutdown(d->desc.self);
  }
}

__attribute__((constructor)) static void setCalls(void) {
  orSplitSetCall(callForPieces);
  orHostSetStandIn(standIn);
  orProcessSetAtExit(atExit);
}

/* Marks the hook as a task, so that waits in it are refused: this worker may have to run what they
 * wait for. */
static void callHook(void (*hook)(int worker, int wide), int worker) {
  orProcessSetTask(OR_TASK_HOST_FUNC);
  hook(worker, worker == 0);
  orProcessSetTask(OR_TASK_NONE);
}

static void *workerMain(void *arg) {
  orWorker *l = arg;
  char name[16];
  snprintf(name, sizeof name, "openreg-%d", l->index);
  pthread_setname_np(pthread_self(), name);
  askForShortSlice();
  orMutexLock(&sched.lock);
  void (*hook)(int, int) = sched.hook;
  sched.coming--;
  sched.alive++;
  atomic_store_explicit(&orWorkersRefused, 0, memory_order_seq_cst);
  orMutexUnlock(&sched.lock);
  if (hook) callHook(hook, l->index);
  for (;;) {
    orStream *s = pick(l);
    if (OR_UNLIKELY(l->serves)) {
      l->serves(s);
    } else if (orDispatching()) {
      orWorkerSchedule(s); /* it was ready when the dispatcher began */
    } else {
      becomeRunning(s, l->index);
      runStream(s, l);
      /* A dispatcher that began meanwhile may have a host asleep that waits for this stream. */
      orDispatchNotice();
    }
  }
  return NULL;
}

/* ---- public ---- */

orError_t orSetWorkerHook(void (*hook)(int worker, int wide)) {
  OR_TRY(orEnter());
  orMutexLock(&sched.lock);
  bool late = sched.threads != 0;
  if (!late) sched.hook = hook;
  orMutexUnlock(&sched.lock);
  return late ? orFail(orErrorAlreadyInitialized,
                       "orSetWorkerHook: workers have been started already")
              : orSuccess;
}

static void addQueued(orStream *s, uint64_t queued, void *total) {
  uint64_t completed = atomic_load_explicit(&s->completed, memory_order_relaxed);
  if (queued > completed) *(size_t *)total += queued - completed;
}

orError_t orGetWorkerInfo(orWorkerInfo *info) {
  if (!info) return orFail(orErrorInvalidValue, "orGetWorkerInfo: null result");
  OR_TRY(orEnter());
  orWorkerInfo from = {.limit = orWorkerLimit()};
  orStreamForEach(-1, addQueued, &from.queued);
  orMutexLock(&sched.lock);
  from.started = startedWorkers();
  orMutexUnlock(&sched.lock);
  return OR_FILL(orWorkerInfo, info, &from, queued);
}
