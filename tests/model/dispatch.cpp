/*
 * A model for Relacy of a schedule that begins, and may end, while a host waits for a task that has
 * just become ready. It covers dispatch.h's orDispatching and orDispatchNotice, schedule.c's hold,
 * begin, change, notice, start and pursue, host_wait.c's orHostAwait, sleepUntilOver and
 * orSleepersWake, worker.c's orWorkerSchedule and the end of workerMain's loop.
 *
 * A worker runs the task, or the schedule holds it and the host has to have it run. If the host
 * sleeps in one way when a change of schedule makes the other one right, it has to be woken.
 *
 * PLANT 1: orDispatchNotice loads orDispatcherNow relaxed
 * PLANT 2: change does not call notice
 * PLANT 3: change does not call orSleepersWake
 * PLANT 4: pursue reads `word` after it has checked whether the task is over
 * PLANT 5: sleepUntilOver enters the list of hosts after it has checked for a dispatcher
 */
#include "model.hpp"

using namespace rl;

static const unsigned NOBODY = 1000;

struct Dispatch : test_suite<Dispatch, 3> {
  atomic<unsigned> completed, wake_at, wake_word, dispatcher, word;
  var<int> result, listed, held;
  mutex hosts_lock, plan_lock;
  Futex of_stream, of_plan;

  void before() {
    completed($) = 0;
    wake_at($) = NOBODY;
    wake_word($) = 0;
    dispatcher($) = 0;
    word($) = 0;
    result($) = listed($) = held($) = 0;
  }

  void orStreamWakeSleepers() {
    wake_at.store(NOBODY, memory_order_seq_cst);
    wake_word.fetch_add(1, memory_order_seq_cst);
    of_stream.wake();
  }

  void notice() {
    word.fetch_add(1, memory_order_release);
    of_plan.wake();
  }

  bool orDispatching() { return dispatcher.load(memory_order_relaxed); }
  bool orIsOver() { return completed.load(memory_order_seq_cst) >= 1; }

  void orDispatchNotice() {
    if (dispatcher.load(unlessPlanted(1, mo_seq_cst, mo_relaxed), $)) notice();
  }

  void run() {
    result($) = 7;
    completed.store(1, memory_order_seq_cst);
    if (1 >= wake_at.load(memory_order_seq_cst)) orStreamWakeSleepers();
    orDispatchNotice();
  }

  bool hold() {
    plan_lock.lock($);
    bool on = orDispatching();
    if (on) held($) = 1;
    plan_lock.unlock($);
    if (on) notice();
    return on;
  }

  /* Also runs the worker that the call wakes. */
  void orWorkerSchedule() {
    if (!orDispatching() || !hold()) run();
  }

  void orSleepersWake() {
    hosts_lock.lock($);
    if (listed($)) orStreamWakeSleepers();
    hosts_lock.unlock($);
  }

  void change(unsigned to) {
    plan_lock.lock($);
    dispatcher.store(to, memory_order_seq_cst);
    int left = held($);
    held($) = 0;
    plan_lock.unlock($);
    if (left) orWorkerSchedule();
    if (plant != 2) notice();
    if (plant != 3) orSleepersWake();
  }

  bool start() {
    plan_lock.lock($);
    int taken = held($);
    held($) = 0;
    plan_lock.unlock($);
    return taken;
  }

  void pursue() {
    for (;;) {
      unsigned seen = word.load(memory_order_acquire);
      if (!orDispatching() || orIsOver()) return;
      if (start())
        run(); /* worker 0 runs it while the host waits */
      else if (plant == 4)
        of_plan.wait(word, word.load(memory_order_acquire));
      else
        of_plan.wait(word, seen);
    }
  }

  void list(int in) {
    hosts_lock.lock($);
    listed($) = in;
    hosts_lock.unlock($);
  }

  void sleepUntilOver() {
    if (plant != 5) list(1);
    while (!orIsOver()) {
      unsigned value = wake_word.load(memory_order_seq_cst);
      unsigned at = wake_at.load(memory_order_seq_cst);
      while (1 < at && !wake_at.compare_exchange_weak(at, 1u, memory_order_seq_cst)) {
      }
      if (orDispatching() || orIsOver()) break;
      if (plant == 5) list(1);
      of_stream.wait(wake_word, value);
    }
    list(0);
  }

  void orHostAwait() {
    while (!orIsOver()) {
      if (orDispatching())
        pursue();
      else
        sleepUntilOver();
    }
    RL_ASSERT(result($) == 7);
  }

  void thread(unsigned number) {
    if (number == 0)
      orWorkerSchedule();
    else if (number == 1)
      orHostAwait();
    else {
      change(1);
      if (rand(2)) change(0);
    }
  }
};

int main(int argc, char **argv) { return runModel<Dispatch>(argc, argv); }
