/*
 * What the models for Relacy share: the planted fault, a futex, and the main program.
 *
 * Relacy runs a model's threads under the memory model of C11, in schedules that it draws, with
 * loads that return any value the orders allow. `make model` runs each model as it is, then once
 * with each fault that its head lists as PLANT, which must be found.
 */
#ifndef OPENREG_MODEL_HPP
#define OPENREG_MODEL_HPP

#include <cstdio>
#include <cstdlib>
#include <relacy/relacy.hpp>

static int plant;

/* The order of an access, or a weaker one if that is the planted fault. */
static rl::memory_order unlessPlanted(int number, rl::memory_order order, rl::memory_order weaker) {
  return plant == number ? weaker : order;
}

/* The kernel's futex: it compares the word under the lock of its queue. */
struct Futex {
  rl::mutex lock;
  rl::condition_variable queue;

  void wait(rl::atomic<unsigned> &word, unsigned value) {
    lock.lock($);
    if (word.load(rl::memory_order_relaxed) == value) queue.wait(lock, $);
    lock.unlock($);
  }

  void wake() {
    lock.lock($);
    queue.notify_all($);
    lock.unlock($);
  }
};

/* Arguments: PROGRAM [PLANT [SCHEDULES]]. Returns 0 if nothing was found. */
template <typename Model>
static int runModel(int argc, char **argv) {
  rl::test_params parameters;
  plant = argc > 1 ? atoi(argv[1]) : 0;
  parameters.iteration_count = argc > 2 ? (rl::iteration_t)atoi(argv[2]) : 200000;
  parameters.search_type = rl::random_scheduler_type;
  return rl::simulate<Model>(parameters) ? 0 : 1;
}

#endif
