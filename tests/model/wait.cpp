/*
 * A model for Relacy of the orders by which a waiting host and the thread that ends its wait see
 * each other: host_wait.c's orIsOver, announceSleep, sleepUntilOver, orStreamWakeSleepers and
 * orStreamAskForHelp, stream.c's orStreamFinishTask, event.c's orCellComplete.
 *
 * A worker finishes two tasks of a stream and completes the cell of an external event. One host
 * waits for the first task, one for the second, one for the event. A fourth thread asks for help.
 *
 * PLANT 1: orStreamFinishTask loads wake_at relaxed
 * PLANT 2: orStreamFinishTask stores `completed` with release
 * PLANT 3: orIsOver loads `completed` with acquire, after an exchange of wake_at with release
 * PLANT 4: orStreamWakeSleepers changes wake_word before it resets wake_at
 * PLANT 5: announceSleep reads wake_word after it has lowered wake_at and looked
 * PLANT 6: orCellComplete sets the cell done relaxed
 * PLANT 7: orCellDone loads the state relaxed
 */
#include "model.hpp"

using namespace rl;

static const unsigned NOBODY = 1000, DONE = 1, SLEEPERS = 2;

struct Wait : test_suite<Wait, 5> {
  atomic<unsigned> completed, wake_at, wake_word, state;
  var<int> result[3], status;
  Futex of_stream, of_cell;

  void before() {
    completed($) = 0;
    wake_at($) = NOBODY;
    wake_word($) = 0;
    state($) = 0;
    status($) = 0;
    for (auto &one : result) one($) = 0;
  }

  void orStreamWakeSleepers() {
    if (plant == 4) wake_word.fetch_add(1, memory_order_seq_cst);
    wake_at.store(NOBODY, memory_order_seq_cst);
    if (plant != 4) wake_word.fetch_add(1, memory_order_seq_cst);
    of_stream.wake();
  }

  void orStreamFinishTask(unsigned number) {
    completed.store(number, unlessPlanted(2, mo_seq_cst, mo_release), $);
    if (number >= wake_at.load(unlessPlanted(1, mo_seq_cst, mo_relaxed), $)) orStreamWakeSleepers();
  }

  void orCellComplete() {
    status($) = 7;
    unsigned before = state.fetch_or(DONE, unlessPlanted(6, mo_acq_rel, mo_relaxed), $);
    if (before & SLEEPERS) of_cell.wake();
  }

  void worker() {
    for (unsigned number = 1; number <= 2; number++) {
      result[number]($) = 7;
      orStreamFinishTask(number);
    }
    orCellComplete();
  }

  void orStreamAskForHelp() {
    if (wake_at.load(memory_order_seq_cst) != NOBODY) orStreamWakeSleepers();
  }

  bool orIsOver(unsigned count) {
    return completed.load(unlessPlanted(3, mo_seq_cst, mo_acquire), $) >= count;
  }

  unsigned announceSleep(unsigned count) {
    unsigned value = wake_word.load(memory_order_seq_cst);
    unsigned at = wake_at.load(unlessPlanted(3, mo_seq_cst, mo_relaxed), $);
    memory_order order = unlessPlanted(3, mo_seq_cst, mo_release);
    while (count < at && !wake_at.compare_exchange_weak(at, count, order, $)) {
    }
    return value;
  }

  void awaitTasks(unsigned count) {
    while (!orIsOver(count)) {
      unsigned value = announceSleep(count);
      if (orIsOver(count)) break;
      if (plant == 5) value = wake_word.load(memory_order_seq_cst);
      of_stream.wait(wake_word, value);
    }
    RL_ASSERT(result[count]($) == 7);
  }

  bool orCellDone() { return state.load(unlessPlanted(7, mo_acquire, mo_relaxed), $) & DONE; }

  void awaitEvent() {
    while (!orCellDone()) {
      unsigned value = SLEEPERS | state.fetch_or(SLEEPERS, memory_order_acq_rel);
      if (orCellDone()) break;
      of_cell.wait(state, value);
    }
    RL_ASSERT(status($) == 7);
  }

  void thread(unsigned number) {
    if (number == 0)
      worker();
    else if (number <= 2)
      awaitTasks(number);
    else if (number == 3)
      awaitEvent();
    else
      orStreamAskForHelp();
  }
};

int main(int argc, char **argv) { return runModel<Wait>(argc, argv); }
