/*
 * Passes a collective from tasks of its device's streams to the thread of its queue.
 *
 * One task, behind what makes the inputs, stores the tensors' addresses for kernels. Under a
 * schedule a second task, on a stream with no other work, decides when the collective begins and,
 * if that task is split, when its outputs are written (collective.h). The thread waits for both.
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
 * and a peer may wait for work that this process has queued. */
bool isScheduled();

/* Holds no tensors, because a worker may release it last. The fields are set before a task is
 * queued; `state_`, under the mutex, determines which side may read what the other has written. */
class HandOver : public std::enable_shared_from_this<HandOver> {
 public:
  struct Range {
    KernelMemory memory;
    c10::ScalarType dtype;
    void *kernel = nullptr;  // where kernels access the memory
  };
  std::vector<Range> ranges;  // of inputs, then of outputs
  bool maps = true;           // kernels reach the device's memory
  bool receives = false;      // something that may be kept before it is written

  /* `chosen`: the stream of the schedule's task for it; 0: there is none. */
  explicit HandOver(orStream_t chosen) : chosen_(chosen) {}

  /* Queues the first task. */
  void queueOn(orStream_t stream, const char *name, c10::Device device);
  /* Whether there is a second task. */
  bool hasBeginning() const;
  /* Queues the second task, once the collective is in its queue. */
  void queueBeginning(const char *name, c10::Device device);
  /* The second task runs no more: it has run, was cancelled, or could not be queued. */
  void giveUpBeginning();

  /* Called by the queue's thread. False if a task that it waits for was cancelled. */
  bool await();
  /* Whether the first half of a split task has begun it. */
  bool isSplit() const;
  /* Called when the copies have been exchanged: waits for the second half. False if cancelled. */
  bool awaitLanding();
  void finish();

  /* Callable on any thread. */
  bool isCancelled() const;

 private:
  /* In the order in which they occur. */
  enum class State {
    queued,     // the first task has not run
    ready,      // the second has not
    begun,      // the thread may go on with all of it,
    split,      // or with copies of it, as the first half of the second task has run
    exchanged,  // the copies have been exchanged
    landing,    // the second half has run: what was received may be written
    over,
    cancelled,       // the first task was cancelled
    cancelledInHalf  // the second half was
  };

  struct Step;
  void map();
  void cancel();
  void begin();
  /* Requires the mutex. */
  void enter(State state);
  void awaitAtLeast(std::unique_lock<std::mutex> &lock, State state);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::queued;
  orStream_t chosen_;
};

}  // namespace torch_openreg
