/*
 * A collective on its way from a stream to Gloo and back.
 *
 *   the caller's thread   queues a hand-over on the current stream, behind what makes the inputs,
 *                         and returns
 *   a worker                runs the hand-over: tells where kernels see the tensors, and goes on
 *   a queue's thread      takes its collectives in order: waits for the hand-over, and for every
 *                         rank to say the same of the collective (agreement.h), calls Gloo with CPU
 *                         tensors over the same memory, waits for Gloo, and signals the
 *                         collective's event
 *   wait()                makes the caller's current stream wait for that event
 *   a stream of our own   waits for it too, so that synchronising the device covers the collective
 *
 * So neither a worker nor the host waits for a peer, and a stream that does holds no thread.
 *
 * Under a schedule the collective begins when that comes to a task of its own, on a stream that has
 * nothing else: so it is decided by the schedule what comes before a collective and what after it.
 * The task waits for the end, for a moment, as a peer may be late. Where tasks are split, so is
 * this one: after its first half the ranks have exchanged copies, and its second half writes what
 * they have received, so what another stream does in between is lost, or comes too late to be sent.
 * Where the schedule does not come to it, since the host waits for a peer by other means, the
 * queue's thread sees to it.
 *
 * Who keeps the memory of a collective's tensors, beside the program:
 *
 *   from the call on      the Collective, all of it
 *   from wait() on        nobody: the stream that waits has its next task behind the collective, so
 *                         what was allocated on it may go to the next tensor at once. Memory of
 *                         another stream's is the program's to keep, as for any kernel that runs
 *                         elsewhere, and as on CUDA. The queue's thread has its addresses
 *   nobody ever waits     the Collective until it has run, whose thread then lets go of it
 *   meanwhile             what the caller got (CollectiveWork) keeps the outputs, for result() and
 *                         the future
 *
 * On a device that kernels cannot reach the thread copies in its turn, from and to memory that has
 * to be somebody's: there the Collective keeps it until it has run. A cached block's memory goes
 * back to the system when its own stream is through, so not before the collective that this stream
 * waits for.
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
/* Calls Gloo with one flat CPU tensor for each of `in`, then for each of `out`; of a sparse tensor
 * it leaves what it is from now on. */
using Issue = std::function<GlooWork(c10d::Backend &gloo, std::vector<at::Tensor> &host)>;

struct Call {
  c10d::OpType type;
  const char *name;                 // a literal
  std::vector<at::Tensor> in, out;  // dense, of one device; `out` may be read as well
  bool sends = false;               // `out` is read alone: this is a broadcast's source
  bool bytes = true;                // Gloo sees bytes and not elements
  bool average = false;             // a sum becomes one
  double factor = 1;                // each rank's floats are multiplied by it before they are added
  QueueKey queue = collectives();
  std::vector<int> peers = {};  // to whom it talks
  bool blocks = false;          // wait() holds the host
  // One or none: gets what comes out, whose size nobody knows before.
  std::vector<at::Tensor> sparse = {};
  Announcement says = {};  // what the ranks have to agree about; no message's
};

/* What the queue has. */
class Collective final : public c10d::Work {
 public:
  /* Queues the hand-over on the device's current stream. */
  Collective(std::shared_ptr<CollectiveQueues> queues, std::string group, uint64_t sequence,
             c10::Device device, Call call, Issue issue);

  bool isCompleted() override;
  int sourceRank() const override;
  /* The sparse tensor, if it has one. */
  std::vector<at::Tensor> result() override { return sparse_; }
  /* The current stream of the collective's device waits; the host does not. */
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  /* synchronize(), or the exception of a collective that is known to have failed. With a time-out,
   * and for what the host has to know (a barrier, the sender of a message from anybody), the host
   * waits too. */
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /* Of a sparse tensor: complete when its size is known. Else null. */
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  /* Complete when the collective is. */
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  c10::Device device() const { return device_; }
  /* What a stream has to wait for. */
  orEvent_t done() const { return signalled_.get(); }
  const std::shared_ptr<CollectiveQueues> &queues() const { return queues_; }

  /* Synchronising the device covers it from now on. Once it is in its queue, whose thread will
   * signal it. */
  void joinDevice() const;
  /* A schedule may begin it from now on. Once it is in its queue. */
  void letBegin() const;
  /* On the queue's thread. */
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

  const std::shared_ptr<CollectiveQueues> queues_;
  const std::string group_;
  const uint64_t sequence_;
  const c10::Device device_;
  Call call_;                       // without tensors
  const size_t inputs_;             // tensors that are read alone
  std::vector<at::Tensor> memory_;  // of inputs, then of outputs; under mutex_
  Issue issue_;
  const std::vector<at::Tensor> sparse_;  // of `call_`
  const bool reach_;                      // kernels reach the device's memory
  const std::shared_ptr<HandOver> handOver_;
  OwnedEvent signalled_;  // by the queue's thread
  Progress progress_;
  std::vector<at::Tensor> copies_;  // host copies, on a device that kernels cannot reach
  int source_ = -1;                 // under mutex_
  const c10::intrusive_ptr<c10::ivalue::Future> outcome_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/* Lets go of tensors on the queue's thread, where PyTorch may need the GIL for it. */
void letGo(std::vector<at::Tensor> &tensors);

}  // namespace torch_openreg
