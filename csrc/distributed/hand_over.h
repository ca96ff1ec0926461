/*
 * How a collective passes from tasks of its device's streams to the thread of its queue.
 *
 * One task, behind what makes the inputs, finds out where kernels see the tensors. Under a schedule
 * a second task, on a stream that has nothing else, decides when the collective begins, and where
 * that task is split, when its outputs are written (collective.h). The thread waits for both.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <openreg.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "../task/kernel_memory.h"

namespace torch_openreg {

/* Whether a schedule decides what runs next. It runs tasks only while some thread calls the core,
 * and a peer may wait for what this process has queued. */
bool isScheduled();

/* Has no tensors, because a worker may be the last to let go of it. The fields are set before a
 * task is queued; `state_`, under the mutex, says who may read what the other side has written. */
class HandOver : public std::enable_shared_from_this<HandOver> {
 public:
  struct Range {
    KernelMemory memory;
    c10::ScalarType dtype;
    void *kernel = nullptr;  // where kernels reach the memory
  };
  std::vector<Range> ranges;  // of inputs, then of outputs
  bool maps = true;           // kernels reach the device's memory
  bool receives = false;      // something that may be kept before it is written

  /* `chosen`: where a schedule's task for it is; 0: there is none. */
  explicit HandOver(orStream_t chosen) : chosen_(chosen) {}

  /* Queues the first task. */
  void queueOn(orStream_t stream, const char *name, c10::Device device);
  /* Whether there is a second one. */
  bool hasBeginning() const;
  /* Queues it, once the collective is in its queue. */
  void queueBeginning(const char *name, c10::Device device);
  /* It runs no more: it has, or was dropped, or could not be queued. */
  void giveUpBeginning();

  /* By the queue's thread. False if a task that it waits for was dropped. */
  bool await();
  /* Whether it has begun by the first half of a task that is split. */
  bool isSplit() const;
  /* The copies have been exchanged: waits for the second half. False if that was dropped. */
  bool awaitLanding();
  void finish();

  /* By any thread. */
  bool isCancelled() const;

 private:
  /* In the order in which they come. */
  enum class State {
    queued,     // the first task has not run
    ready,      // the second has not
    begun,      // the thread may go on with all of it,
    split,      // or with copies of it, as the first half of the second task has run
    exchanged,  // the copies have been exchanged
    landing,    // the second half has run: what was received may be written
    over,
    cancelled,       // the first task was dropped
    cancelledInHalf  // the second half was
  };

  struct Step;
  void map();
  void cancel();
  void begin();
  /* The mutex is held. */
  void enter(State state);
  void awaitAtLeast(std::unique_lock<std::mutex> &lock, State state);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::queued;
  orStream_t chosen_;
};

}  // namespace torch_openreg
