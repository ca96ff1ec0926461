/*
 * Work in pieces, which a running task shares with idle threads.
 *
 * The worker that runs the task puts a job on its stack into the list of jobs and takes a piece,
 * during which threads that look for work may join. If fewer have joined than may, it wakes others
 * (a host that sleeps for this very stream, idle workers), which costs as much as a piece or two.
 * It takes pieces until none is left, takes the job out of the list and waits for the helpers
 * inside. No more threads work on a job than there are cores: a helper that is preempted with a
 * piece keeps all others waiting.
 *
 * `lock` guards the list and joining a job; `next` hands out pieces; `helpers` counts the threads
 * inside. Only the owner waits for it, after no thread can join any more. `open_jobs` counts the
 * jobs in the list with pieces left. The thread that takes a job's last piece decrements it, so
 * that no thread looks in vain while that piece runs.
 */
#include <string.h>

#include "base/base.h"

/* Longer than other waits: where others compute, a sleeper loses its core for milliseconds, and
 * these pieces end soon. */
enum { OR_LAST_PIECE_NS = 200000 };

typedef struct orJob {
  orPieceFn piece;
  void *context;
  size_t count;
  _Atomic size_t next;
  _Atomic uint32_t helpers;
  uint32_t most_helpers;
  struct orJob *link;
} orJob;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orJob *jobs;
static _Atomic unsigned open_jobs; /* a hint */
static void (*call)(int missing);  /* set before main */

void orSplitSetCall(void (*fn)(int missing)) { call = fn; }

bool orSplitWantsHelp(void) { return atomic_load_explicit(&open_jobs, memory_order_relaxed) != 0; }

static bool takePiece(orJob *j) {
  size_t i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
  if (i >= j->count) return false;
  if (i == j->count - 1 && j->most_helpers)
    atomic_fetch_sub_explicit(&open_jobs, 1, memory_order_relaxed);
  j->piece(j->context, i);
  return true;
}

static bool takePieces(orJob *j) {
  bool any = false;
  while (takePiece(j)) any = true;
  return any;
}

static bool wantsHelper(const orJob *j) {
  return atomic_load_explicit(&j->next, memory_order_relaxed) < j->count &&
         atomic_load_explicit(&j->helpers, memory_order_relaxed) < j->most_helpers;
}

bool orSplitHelp(void) {
  if (!orSplitWantsHelp()) return false;
  orMutexLock(&lock);
  orJob *j = jobs;
  while (j && !wantsHelper(j)) j = j->link;
  if (j) atomic_fetch_add_explicit(&j->helpers, 1, memory_order_relaxed);
  orMutexUnlock(&lock);
  if (!j) return false;
  bool any = takePieces(j);
  /* After this the job may no longer exist: only its address is used. */
  if (atomic_fetch_sub_explicit(&j->helpers, 1, memory_order_release) == 1)
    orFutexWake(&j->helpers, 1);
  return any;
}

static void publish(orJob *j) {
  orMutexLock(&lock);
  j->link = jobs;
  jobs = j;
  atomic_fetch_add_explicit(&open_jobs, 1, memory_order_relaxed);
  orMutexUnlock(&lock);
}

static void withdraw(orJob *j) {
  orMutexLock(&lock);
  orJob **p = &jobs;
  while (*p != j) p = &(*p)->link;
  *p = j->link;
  orMutexUnlock(&lock);
  uint64_t start = orNow();
  for (uint32_t n; (n = atomic_load_explicit(&j->helpers, memory_order_acquire));) {
    orPause();
    if (orNow() - start > OR_LAST_PIECE_NS) orFutexWait(&j->helpers, n, 0);
  }
}

static void callHelpers(orJob *j) {
  if (!wantsHelper(j) || !call) return;
  call((int)(j->most_helpers - atomic_load_explicit(&j->helpers, memory_order_relaxed)));
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void runPieces(orPieceFn piece, void *context, size_t count) {
  size_t others = count ? smaller(count, (size_t)orHostCores()) - 1 : 0;
  orJob j = {.piece = piece, .context = context, .count = count, .most_helpers = (uint32_t)others};
  if (others) {
    publish(&j);
    takePiece(&j);
    callHelpers(&j);
  }
  takePieces(&j);
  if (others) withdraw(&j);
}

/* ---- bytes ---- */

enum { OR_SPLIT_BYTES = 1 << 20, OR_PIECE_BYTES = 256 << 10 };

typedef struct orBytes {
  char *dst;
  const char *src;
  size_t count;
} orBytes;

static void copyPiece(void *context, size_t index) {
  const orBytes *b = context;
  size_t at = index * OR_PIECE_BYTES;
  memcpy(b->dst + at, b->src + at, smaller(b->count - at, OR_PIECE_BYTES));
}

void orCopyBytes(void *dst, const void *src, size_t bytes) {
  bool apart = (size_t)((char *)dst - (const char *)src) >= bytes &&
               (size_t)((const char *)src - (char *)dst) >= bytes;
  if (bytes < OR_SPLIT_BYTES || !apart) {
    memmove(dst, src, bytes);
    return;
  }
  orBytes b = {dst, src, bytes};
  runPieces(copyPiece, &b, (bytes + OR_PIECE_BYTES - 1) / OR_PIECE_BYTES);
}

/* ---- public ---- */

orError_t orRunPieces(orPieceFn piece, void *context, size_t count) {
  if (!piece) return orFail(orErrorInvalidValue, "orRunPieces: null function");
  if (orProcessTask() != OR_TASK_KERNEL)
    return orFail(orErrorNotPermitted, "orRunPieces: only a kernel may call it");
  runPieces(piece, context, count);
  return orSuccess;
}
