/*
 * A collective on its way from a stream to Gloo and back.
 *
 *   the caller's thread   queues a hand-over on the current stream, behind what makes the inputs,
 *                         and returns
 *   a worker              runs the hand-over: stores the kernels' addresses of the tensors
 *   a queue's thread      takes its collectives in order: waits for the hand-over, and for every
 *                         rank to announce the same collective (agreement.h), calls Gloo with CPU
 *                         tensors over the same memory, waits for Gloo, and signals the
 *                         collective's event
 *   wait()                makes the caller's current stream wait for that event
 *   a stream of our own   waits for it too, so that synchronising the device covers the collective
 *
 * So neither a worker nor the host waits for a peer, and a stream that does holds no thread.
 *
 * Note [Collectives under a schedule]. The collective begins when the schedule runs a task of its
 * own, on a stream with no other work. So the schedule decides what precedes a collective and what
 * follows it. The task waits only for a moment for the end, because a peer may be late. Where tasks
 * are split, this one is too: after its first half the ranks have exchanged copies, and its second
 * half writes what they have received. What another stream does in between is lost, or comes too
 * late to be sent. If the schedule does not reach the task, because the host waits for a peer by
 * other means, the queue's thread makes the schedule run it.
 *
 * Note [Memory of a collective]. Beside the program, its tensors' memory is kept
 *
 *   from the call on      by the Collective, all of it
 *   from wait() on        by nothing: the waiting stream's next task comes after the collective, so
 *                         what was allocated on it may go to the next tensor at once. The program
 *                         keeps another stream's memory, as for any kernel that runs elsewhere, and
 *                         as on CUDA. The queue's thread has its addresses
 *   without a wait()      by the Collective until it has run, whose thread then releases it
 *   meanwhile             the outputs by what the caller got (CollectiveWork), for result() and
 *                         the future
 *
 * On a device whose memory kernels cannot reach, the thread copies in its turn, from and to memory
 * that needs an owner: there the Collective keeps it until it has run. A cached block's memory
 * returns to the system when its own stream has finished, so not before the collective that this
 * stream waits for.
 */
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../torch/event.h"
#include "agreement.h"
#include "hand_over.h"
#include "progress.h"
#include "queues.h"

namespace torch_openreg {

using GlooWork = c10::intrusive_ptr<c10d::Work>;
/* Calls Gloo with one flat CPU tensor for each of `in`, then for each of `out`; for a sparse tensor
 * it replaces the list by the result. */
using Issue = std::function<GlooWork(c10d::Backend &gloo, std::vector<at::Tensor> &host)>;

struct Call {
  c10d::OpType type;
  const char *name;                 // a literal
  std::vector<at::Tensor> in, out;  // dense, on one device; `out` may be read as well
  bool sends = false;               // `out` is only read: this is a broadcast's source
  bool bytes = true;                // Gloo sees bytes and not elements
  bool average = false;             // a sum becomes one
  double factor = 1;                // each rank's floats are multiplied by it before they are added
  QueueKey queue = collectives();
  std::vector<int> peers = {};  // the ranks that it exchanges data with
  bool blocks = false;          // wait() holds the host
  // One tensor or none: it receives the result, whose size is unknown before.
  std::vector<at::Tensor> sparse = {};
  Announcement announcement = {};  // what the ranks have to agree on; unused by messages
};

/* A collective in its queue. */
class Collective final : public c10d::Work {
 public:
  /* Queues the hand-over on the device's current stream. */
  Collective(std::shared_ptr<CollectiveQueues> queues, std::string group, uint64_t sequence,
             c10::Device device, Call call, Issue issue);

  bool isCompleted() override;
  int sourceRank() const override;
  /* The sparse tensor, if it has one. */
  std::vector<at::Tensor> result() override { return sparse_; }
  /* Makes the current stream of the collective's device wait, and not the host. */
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  /* Calls synchronize(), or throws the exception of a collective that has failed by now. The host
   * waits too if there is a time-out, and for results that the host needs (a barrier, the sender of
   * a message from any rank). */
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /* For a sparse tensor: complete when its size is known. Otherwise null. */
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  /* Complete when the collective is. */
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  c10::Device device() const { return device_; }
  /* The event that a stream has to wait for. */
  orEvent_t done() const { return signalled_.get(); }
  const std::shared_ptr<CollectiveQueues> &queues() const { return queues_; }

  /* Synchronising the device covers it from now on. Call it once it is in its queue, whose thread
   * will signal it. */
  void joinDevice() const;
  /* Allows a schedule to begin it from now on. Call it once it is in its queue. */
  void letBegin() const;
  /* `completion` learns of its success. */
  void reportTo(std::shared_ptr<Completion> completion);
  /* Called on the queue's thread. */
  void run(c10d::Backend &gloo);

 private:
  bool isMessage() const { return std::get<0>(call_.queue) != 'c'; }
  void agree(c10d::Backend &gloo);
  std::vector<at::Tensor> hostTensors();
  void orderOwnStream() const;
  void reportToSanitizer() const;
  orStream_t ownStream() const;  // where the sanitizer and a schedule see it
  void stageInputs();
  void copyBack();
  void exchange(c10d::Backend &gloo, std::vector<at::Tensor> &host);
  bool exchangeCopies(c10d::Backend &gloo, std::vector<at::Tensor> &host);
  void replaceSparse(const at::Tensor &from);
  void markFuture();
  std::vector<at::Tensor> takeMemory();
  void scale(std::vector<at::Tensor> &host) const;
  void divide(std::vector<at::Tensor> &host) const;
  std::exception_ptr failure(const char *what, const std::vector<int> &peers) const;
  std::exception_ptr cancelled() const;  // by any thread
  void complete(std::exception_ptr error, bool ofDevice);
  void reportCompletion();

  const std::shared_ptr<CollectiveQueues> queues_;
  const std::string group_;
  const uint64_t sequence_;
  const c10::Device device_;
  Call call_;                       // without tensors
  const size_t inputs_;             // tensors that are only read
  std::vector<at::Tensor> memory_;  // of inputs, then of outputs; under mutex_
  Issue issue_;
  const std::vector<at::Tensor> sparse_;  // of `call_`
  const bool reach_;                      // kernels reach the device's memory
  const std::shared_ptr<HandOver> handOver_;
  OwnedEvent signalled_;  // by the queue's thread
  Progress progress_;
  std::vector<at::Tensor> copies_;  // host copies, on a device that kernels cannot reach
  int source_ = -1;                 // under mutex_
  std::vector<std::shared_ptr<Completion>> completions_;  // until it is complete; under mutex_
  const c10::intrusive_ptr<c10::ivalue::Future> outcome_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/* Releases tensors on the queue's thread, where PyTorch may need the GIL for it. */
void letGo(std::vector<at::Tensor> &tensors);

}  // namespace torch_openreg
