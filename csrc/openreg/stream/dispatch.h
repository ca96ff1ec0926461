/*
 * The choice of what runs next, where it is not the workers' own.
 *
 * Workers run streams that are ready as they come (worker.c). A dispatcher takes that over: it
 * holds what becomes ready, and hands it to worker 0, stream by stream, while host threads are
 * inside calls (orWorkerServe). schedule.c is one. Whoever waits or asks looks at `orDispatcherNow`
 * and, if there is one, leaves it to it. It may change at any time: `hold` says no once it has, and
 * `notice` comes after every change that a thread inside `await` should look at.
 *
 * model/dispatch.cpp is a model of its change (`make model`).
 */
#ifndef OPENREG_DISPATCH_H
#define OPENREG_DISPATCH_H

/* All are called with no lock held. */
typedef struct orDispatcher {
  bool (*hold)(orStream *stream); /* that has become ready; false: the workers' after all */
  void (*point)(void);            /* a host thread is inside a call: tasks may run */
  /* a host has asked, and it was not over: one task, if any can run */
  orError_t (*step)(const orWaitGoal *goal);
  /* returns when it is over, or the workers choose again; these two fail if there can be no worker
   * 0 */
  orError_t (*await)(const orWaitGoal *goal);
  void (*forced)(void); /* a host thread has queued what is no choice: it may run */
  bool (*splits)(void); /* the running task is to be run in two halves; on its thread */
  void (*notice)(void); /* something has changed that threads which wait should look at */
} orDispatcher;

extern OR_HIDDEN _Atomic(const orDispatcher *) orDispatcherNow; /* host_wait.c; null: the workers */

static inline const orDispatcher *orDispatching(void) {
  return atomic_load_explicit(&orDispatcherNow, memory_order_relaxed);
}
static inline void orDispatchPoint(void) {
  const orDispatcher *d = orDispatching();
  if (OR_UNLIKELY(d != NULL)) d->point();
}
/* Sequentially consistent: a dispatcher that begins looks at who has work after it is there. */
static inline void orDispatchNotice(void) {
  const orDispatcher *d = atomic_load_explicit(&orDispatcherNow, memory_order_seq_cst);
  if (OR_UNLIKELY(d != NULL)) d->notice();
}

#endif
