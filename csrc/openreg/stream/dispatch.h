/*
 * The interface of a dispatcher, which chooses what runs next in place of the workers.
 *
 * Without one, workers run streams in the order in which they become ready (worker.c). A dispatcher
 * holds ready streams instead, and gives them to worker 0 one by one while host threads are inside
 * calls (orWorkerServe); tools/schedule.c is one. Waits and queries read `orDispatcherNow` and
 * leave the choice to the dispatcher, if there is one. It may change at any time: `hold` then
 * returns false, and `notice` is called after every change that a thread inside `await` must see.
 *
 * model/dispatch.cpp is a model of its change (`make model`).
 */
#pragma once

/* All are called with no lock held. */
typedef struct orDispatcher {
  /* takes a stream that became ready; false leaves it to the workers */
  bool (*hold)(orStream *stream);
  void (*point)(void); /* a host thread is inside a call: tasks may run */
  /* after a query whose goal is not over: runs one task, if any can run */
  orError_t (*step)(const orWaitGoal *goal);
  /* runs tasks until the goal is over or the workers choose again; fails, as `step` does, if worker
   * 0 cannot be started */
  orError_t (*await)(const orWaitGoal *goal);
  void (*forced)(void); /* a host thread has queued a task that runs without being chosen */
  bool (*splits)(void); /* whether to run the present task in two halves; called on its thread */
  void (*notice)(void); /* something changed that waiting threads have to check */
} orDispatcher;

/* in host_wait.c; null: the workers choose */
extern OR_HIDDEN _Atomic(const orDispatcher *) orDispatcherNow;

static inline const orDispatcher *orDispatching(void) {
  return atomic_load_explicit(&orDispatcherNow, memory_order_relaxed);
}
static inline void orDispatchPoint(void) {
  const orDispatcher *d = orDispatching();
  if (OR_UNLIKELY(d != NULL)) d->point();
}
/* Sequentially consistent: a dispatcher reads which streams have work after it has been set. */
static inline void orDispatchNotice(void) {
  const orDispatcher *d = atomic_load_explicit(&orDispatcherNow, memory_order_seq_cst);
  if (OR_UNLIKELY(d != NULL)) d->notice();
}
