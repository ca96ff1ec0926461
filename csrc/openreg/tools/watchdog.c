/*
 * The watchdog: prints the hang report when a stream or host thread stands still, and at a signal.
 *
 * Its thread is started at the first use of a device if a setting asks for it. That thread alone
 * reads and writes `dog`; host threads that sleep are listed in host_wait.c. `asked` counts
 * signals, and is the thread's futex: the handler increments it, wakes the thread, and calls the
 * previous handler. In a forked child it only calls that. `previous` is written before the handler
 * is installed.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/hang.h"

enum { OR_LEAST_PERIOD_NS = 1000000, OR_MOST_PERIOD_NS = 1000000000 };

/* ---- stalls ---- */

/* A slot of the table of streams, as last read. */
typedef struct orWatched {
  uint64_t round; /* the last round in which it had work */
  uint64_t completed, since;
  bool reported;
} orWatched;

static struct {
  orWatched *watched;
  uint32_t count;
  uint64_t round;
} dog = {.round = 1}; /* no slot had work in round 0 and the next */

static bool growWatched(uint32_t count) {
  if (count <= dog.count) return true;
  orWatched *watched = realloc(dog.watched, count * sizeof *watched);
  if (!watched) return false;
  memset(watched + dog.count, 0, (count - dog.count) * sizeof *watched);
  dog.watched = watched;
  dog.count = count;
  return true;
}

/* True if the stream has stood still for too long and no report has covered it. */
static bool standsStill(uint32_t slot, uint64_t now) {
  orStream *s = orHandleSlotAt(&orStreamTable, slot);
  orWatched *w = &dog.watched[slot];
  uint64_t completed = atomic_load_explicit(&s->completed, memory_order_acquire);
  if (atomic_load_explicit(&s->queued, memory_order_acquire) == completed) return false;
  if (w->round + 1 != dog.round || w->completed != completed)
    *w = (orWatched){.completed = completed, .since = now};
  w->round = dog.round;
  return !w->reported && now - w->since >= orConfigGet()->watchdog_ns;
}

static bool streamStandsStill(uint64_t now) {
  uint32_t used = atomic_load_explicit(&orStreamTable.used, memory_order_acquire);
  bool still = false;
  dog.round++;
  if (!growWatched(used)) return false;
  for (uint32_t i = 0; orHandleNext(&orStreamTable, &i) && i <= used;)
    still |= standsStill(i - 1, now);
  return still;
}

static void waitsForLong(orSleeper *w, void *waits) {
  uint64_t now = orNow();
  *(bool *)waits |= !w->reported && now - w->since >= orConfigGet()->watchdog_ns;
}

static void setHostReported(orSleeper *w, void *context) {
  (void)context;
  w->reported = true;
}

/* The report covers all that stands still now, which is then no reason for another. */
static void setReported(void) {
  for (uint32_t i = 0; i < dog.count; i++)
    dog.watched[i].reported = dog.watched[i].round == dog.round;
  orSleepersEach(setHostReported, NULL);
}

static void lookForStalls(void) {
  char why[96];
  uint64_t now = orNow();
  double limit = (double)orConfigGet()->watchdog_ns / 1e9;
  bool still = !orDispatching() && streamStandsStill(now), waits = false;
  orSleepersEach(waitsForLong, &waits);
  if (!still && !waits) return;
  snprintf(why, sizeof why, ": %s for %g s (OPENREG_WATCHDOG_S)",
           still ? "a stream with work has finished no task" : "a host thread has waited", limit);
  setReported();
  orHangPrint(why);
}

/* ---- the thread and the signal ---- */

static _Atomic uint32_t asked;
static struct sigaction previous;

static void callPrevious(int number, siginfo_t *info, void *context) {
  if (previous.sa_flags & SA_SIGINFO)
    previous.sa_sigaction(number, info, context);
  else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
    previous.sa_handler(number);
}

static void onSignal(int number, siginfo_t *info, void *context) {
  int error = errno;
  if (!orInForkedChild()) {
    atomic_fetch_add_explicit(&asked, 1, memory_order_relaxed);
    orFutexWake(&asked, 1);
  } else if (!(previous.sa_flags & SA_SIGINFO) && previous.sa_handler == SIG_DFL) {
    sigaction(number, &previous, NULL);
    raise(number); /* delivered when this handler returns */
  }
  callPrevious(number, info, context);
  errno = error;
}

static void installHandler(int number) {
  struct sigaction action = {.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
  action.sa_sigaction = onSignal;
  sigfillset(&action.sa_mask);
  sigaction(number, NULL, &previous);
  if (sigaction(number, &action, NULL))
    orWarn("no handler for signal %d: %s", number, strerror(errno));
}

static void *watch(void *context) {
  const orConfig *config = orConfigGet();
  uint64_t period = config->watchdog_ns / 8;
  uint32_t answered = 0;
  (void)context;
  pthread_setname_np(pthread_self(), "openreg-watch");
  if (period < OR_LEAST_PERIOD_NS) period = OR_LEAST_PERIOD_NS;
  if (period > OR_MOST_PERIOD_NS) period = OR_MOST_PERIOD_NS;
  if (!config->watchdog_ns) period = 0;
  for (;;) {
    orFutexWait(&asked, answered, period);
    while (orProcessExiting()) pause();
    uint32_t count = atomic_load_explicit(&asked, memory_order_relaxed);
    if (count != answered) orHangPrint(": asked for by a signal (OPENREG_WATCHDOG_SIGNAL)");
    answered = count;
    if (config->watchdog_ns) lookForStalls();
  }
  return NULL;
}

static void onStarts(orProbe *p) {
  atomic_store_explicit(&p->slot->began, orNow(), memory_order_relaxed);
}

static void onFirstUse(orProbe *p);
static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse, [OR_PROBE_STARTS] = onStarts}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

static orError_t start(void) {
  const orConfig *config = orConfigGet();
  if (!config->watchdog_ns && !config->watchdog_signal) return orSuccess;
  int failed = orThreadStart(watch, NULL);
  if (failed)
    return orFail(orErrorSystem, "the watchdog's thread cannot be started: %s", strerror(failed));
  orToolSwitch(&tool, true);
  if (config->watchdog_signal) installHandler(config->watchdog_signal);
  return orSuccess;
}

static void onFirstUse(orProbe *p) {
  static bool started; /* under the lock of first uses */
  if (started) return;
  orError_t error = start();
  if (error) p->error = error;
  started = !error;
}
