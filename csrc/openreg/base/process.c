/*
 * The state of the process, which every entry point checks first: a forked child, a process that is
 * exiting, and a caller that is a task are refused.
 *
 * activated, forked and exiting are atomic flags of the process that only go from false to true;
 * first_uses is a count; no lock. `kept` and at_exit are written by constructors. `forked` is
 * written by the child's only thread before any other can exist. task_kind and ours belong to their
 * thread.
 *
 * Note [The end of the process]: exit() calls handlers and destructors of static objects, the
 * newest first. The library's handler is registered at the first use of a device; those registered
 * before that run after it. From then on no task begins, because kernels may use objects that are
 * being destroyed: a worker ends the task that it runs, gives the stream back and stops for good.
 * Every wait for unfinished work returns orErrorNotPermitted, whether it begins then or began
 * before (a destructor may join its thread). Memory that unfinished work may use stays mapped. One
 * wait still blocks: that of a call whose own task is running, as the task refers to the call's
 * stack. The thread that runs the handlers makes no such call.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "openreg_package.h"

static atomic_bool activated;
static _Atomic int first_uses; /* threads that make the devices, or wait for them */
static atomic_bool forked;
static atomic_bool exiting;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static _Thread_local int task_kind = OR_TASK_NONE;
static _Thread_local bool ours;

/* ---- fork ---- */

/* Added by constructors. No thread holds two of them at once. */
static orMutex *kept[4];
static size_t kept_count;

void orForkKeep(orMutex *m) {
  OR_ASSERT(kept_count, <, sizeof(kept) / sizeof(kept[0]));
  kept[kept_count++] = m;
}

/* Locks the pthread mutexes directly: no code runs under these locks, so ranks do not matter. */
static void beforeFork(void) {
  for (size_t i = 0; i < kept_count; i++) pthread_mutex_lock(&kept[i]->mutex);
}

static void afterFork(void) {
  for (size_t i = 0; i < kept_count; i++) pthread_mutex_unlock(&kept[i]->mutex);
}

/* A fork duplicates only the calling thread. Once devices are in use, the child lacks the workers,
 * and their locks may be held for ever. While devices are made, it lacks the thread that makes
 * them, and a plugin's work may be half done. Such a child can only be refused. */
static void inForkedChild(void) {
  afterFork();
  if (atomic_load_explicit(&activated, memory_order_relaxed) ||
      atomic_load_explicit(&first_uses, memory_order_relaxed))
    atomic_store_explicit(&forked, true, memory_order_release);
}

/* Called before any lock of the library can be held: as it is loaded or, if memory was short then,
 * before a first use. */
static int installForkHandlers(void) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static bool installed;
  pthread_mutex_lock(&lock);
  int error = installed ? 0 : pthread_atfork(beforeFork, afterFork, inForkedChild);
  installed = !error;
  pthread_mutex_unlock(&lock);
  return error;
}

__attribute__((constructor)) static void onLoad(void) { installForkHandlers(); }

orError_t orProcessBeginUse(void) {
  int error = installForkHandlers();
  if (error)
    return orFail(orErrorMemoryAllocation, "pthread_atfork failed: %s (errno %d)", strerror(error),
                  error);
  atomic_fetch_add_explicit(&first_uses, 1, memory_order_seq_cst);
  return orSuccess;
}

void orProcessEndUse(void) { atomic_fetch_sub_explicit(&first_uses, 1, memory_order_seq_cst); }

/* ---- exit ---- */

static void (*at_exit)(void);

void orProcessSetAtExit(void (*fn)(void)) { at_exit = fn; }

/* In a forked child, any lock may be held for ever. */
static void atProcessExit(void) {
  atomic_store_explicit(&exiting, true, memory_order_seq_cst);
  if (at_exit && !orInForkedChild()) at_exit();
}

static void installHandlers(void) {
  if (atexit(atProcessExit))
    orWarn("atexit failed: work that is queued when the process ends may run during its end");
}

void orProcessActivate(void) {
  if (OR_LIKELY(atomic_load_explicit(&activated, memory_order_acquire))) return;
  pthread_once(&handlers_once, installHandlers);
  atomic_store_explicit(&activated, true, memory_order_release);
}

bool orProcessExiting(void) { return atomic_load_explicit(&exiting, memory_order_acquire); }

orError_t orProcessRefuseExiting(void) {
  if (OR_LIKELY(!orProcessExiting())) return orSuccess;
  return orFail(orErrorNotPermitted, "the process is exiting: queued work will not run");
}

int orInForkedChild(void) { return atomic_load_explicit(&forked, memory_order_acquire); }

typedef struct orThreadBody {
  void *(*body)(void *);
  void *context;
} orThreadBody;

static void *runThread(void *arg) {
  orThreadBody b = *(orThreadBody *)arg;
  free(arg);
  ours = true;
  return b.body(b.context);
}

bool orThreadIsOurs(void) { return ours; }

/* Leaves out the signals of a thread's own faults, which no other thread gets. If one is blocked,
 * the system ends the process and calls no handler (Python's faulthandler). */
static void allSignalsFromElsewhere(sigset_t *set) {
  static const int own[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
  sigfillset(set);
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(set, own[i]);
}

int orThreadStart(void *(*body)(void *), void *context) {
  sigset_t blocked, before;
  pthread_t thread;
  orThreadBody *b = malloc(sizeof *b);
  if (!b) return ENOMEM;
  *b = (orThreadBody){body, context};
  allSignalsFromElsewhere(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  int failed = pthread_create(&thread, NULL, runThread, b);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed)
    free(b);
  else
    pthread_detach(thread);
  return failed;
}

void orProcessSetTask(int kind) { task_kind = kind; }

int orProcessTask(void) { return task_kind; }

void orCallDestroy(void (*destroy)(void *), void *argument) {
  orMutexAssertNone();
  int before = task_kind;
  task_kind = OR_TASK_HOST_FUNC;
  destroy(argument);
  task_kind = before;
}

static orError_t refuseForked(void) {
  return orFail(orErrorForked,
                "cannot re-initialize %s in forked subprocess:\n"
                "  the parent had used a device before the fork, or was about to; use the 'spawn' "
                "start method",
                orDevicesName());
}

orError_t orEnter(void) {
  if (OR_UNLIKELY(orInForkedChild())) return refuseForked();
  if (OR_UNLIKELY(task_kind == OR_TASK_HOST_FUNC))
    return orFail(
        orErrorNotPermitted,
        "a host function, a worker hook or a destroy callback may not call the openreg API");
  return orSuccess;
}

orError_t orEnterBlocking(void) {
  OR_TRY(orEnter());
  if (OR_UNLIKELY(task_kind != OR_TASK_NONE))
    return orFail(orErrorNotPermitted,
                  "a kernel may not call functions that wait for work or queue it");
  return orSuccess;
}
