/*
 * Work in pieces: what a running task shares with whoever has nothing else to do.
 *
 * The lane that runs the task puts a job on its stack into the list of jobs, wakes whoever may help (idle lanes; a
 * host that sleeps for this very stream), takes pieces itself until none is left, takes the job out of the list
 * and waits for the helpers inside. No more threads work on a job than there are cores: one that is preempted with a
 * piece in hand keeps all the others waiting.
 *
 * `lock` guards the list and joining a job; `next` hands out pieces; `helpers` counts who is inside, and the owner,
 * which is the only one to wait for it, does so after nobody can join any more.
 */
#include "core.h"

typedef struct orJob {
  orPieceFn piece;
  void *context;
  size_t count;
  _Atomic size_t next;
  _Atomic uint32_t helpers;
  uint32_t most_helpers;
  struct orJob *link;
} orJob;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static orJob *jobs;
static _Atomic unsigned job_count; /* written under the lock; a hint elsewhere */

bool orSplitWantsHelp(void) { return atomic_load_explicit(&job_count, memory_order_relaxed) != 0; }

static bool takePieces(orJob *j) {
  bool any = false;
  for (;;) {
    size_t i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
    if (i >= j->count) return any;
    j->piece(j->context, i);
    any = true;
  }
}

static bool wantsHelper(const orJob *j) {
  return atomic_load_explicit(&j->next, memory_order_relaxed) < j->count &&
         atomic_load_explicit(&j->helpers, memory_order_relaxed) < j->most_helpers;
}

bool orSplitHelp(void) {
  if (!orSplitWantsHelp()) return false;
  pthread_mutex_lock(&lock);
  orJob *j = jobs;
  while (j && !wantsHelper(j)) j = j->link;
  if (j) atomic_fetch_add_explicit(&j->helpers, 1, memory_order_relaxed);
  pthread_mutex_unlock(&lock);
  if (!j) return false;
  bool any = takePieces(j);
  /* The job may be gone after this: only its address is used. */
  if (atomic_fetch_sub_explicit(&j->helpers, 1, memory_order_release) == 1)
    orFutexWake(&j->helpers, 1);
  return any;
}

static void publish(orJob *j) {
  pthread_mutex_lock(&lock);
  j->link = jobs;
  jobs = j;
  atomic_fetch_add_explicit(&job_count, 1, memory_order_relaxed);
  pthread_mutex_unlock(&lock);
}

static void withdraw(orJob *j) {
  pthread_mutex_lock(&lock);
  orJob **p = &jobs;
  while (*p != j) p = &(*p)->link;
  *p = j->link;
  atomic_fetch_sub_explicit(&job_count, 1, memory_order_relaxed);
  pthread_mutex_unlock(&lock);
  for (uint32_t n; (n = atomic_load_explicit(&j->helpers, memory_order_acquire));)
    orFutexWait(&j->helpers, n, 0);
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

void orSplitRun(orPieceFn piece, void *context, size_t count) {
  size_t others = count ? smaller(count, (size_t)orHostCores()) - 1 : 0;
  orJob j = {.piece = piece, .context = context, .count = count, .most_helpers = (uint32_t)others};
  if (others) {
    publish(&j);
    orStream *s = orTaskStream();
    if (s && orStreamStir(s)) others--;
    orLaneWakeIdle((int)others);
  }
  takePieces(&j);
  if (j.most_helpers) withdraw(&j);
}

/* ---- public ---- */

orError_t orRunPieces(orPieceFn piece, void *context, size_t count) {
  if (!piece) return orFail(orErrorInvalidValue, "orRunPieces: null function");
  if (orProcessTask() != OR_TASK_KERNEL)
    return orFail(orErrorNotPermitted, "orRunPieces: work is split inside a kernel only");
  orSplitRun(piece, context, count);
  return orSuccess;
}
