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
 * The task waits for the end, for a moment, as a peer may be late. Where tasks are torn, so is this
 * one: after its first half the ranks have exchanged copies, and its second half writes what they
 * have received, so what another stream does in between is lost, or comes too late to be sent.
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

#include <openreg_schedule.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../torch/event.h"
#include "agreement.h"
#include "peers.h"
#include "progress.h"

namespace torch_openreg {

/* Collectives of one queue begin one after the other. Sends and receives have a queue for each peer
 * and tag: they may wait for what another one of this process does. */
using QueueKey = std::tuple<char, int, int>;
inline QueueKey collectives() { return {'c', 0, 0}; }
inline QueueKey sendsTo(int peer, int tag) { return {'s', peer, tag}; }
inline QueueKey receivesFrom(int peer, int tag) { return {'r', peer, tag}; }

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

class CollectiveQueues;

/* What a worker leaves for the queue's thread. It has no tensors, since a worker may be the last to
 * let go of it. */
struct HandOver {
  struct Range {
    const void *device;
    size_t bytes;
    c10::ScalarType dtype;
    void *kernel;  // where kernels reach the memory
  };
  enum State { pending, ready, dropped };

  std::mutex mutex;
  std::condition_variable changed;
  State state = pending;
  std::vector<Range> ranges;  // of inputs, then of outputs
  bool maps = true;
  bool receives = false;   // something that may be kept before it is written
  orStream_t chosen = 0;   // where a schedule's task for it is; 0: there is none
  bool begun = false;      // by that task
  bool torn = false;       // it has begun by its first half,
  bool exchanged = false;  // has got that far,
  bool lands = false;      // and its second half has come
  bool over = false;

  void finish(State to);
  /* False if the task never ran. */
  bool await();
  /* Of a torn one: until its second half. False if that never ran. */
  bool awaitLanding();
  bool wasDropped();
  bool isTorn();
  /* By the schedule's task, and for the time of it. */
  void begin(orPart part);
  void drop();
  void end();

 private:
  template <class Condition>
  void awaitChosen(std::unique_lock<std::mutex> &lock, Condition come);
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
  void orderTold() const;
  void tellSanitizer() const;
  orStream_t toldStream() const;  // where the sanitizer sees it
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
  std::exception_ptr dropped() const;  // by any thread
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
  const std::shared_ptr<HandOver> handOver_ = std::make_shared<HandOver>();
  OwnedEvent signalled_;  // by the queue's thread
  Progress progress_;
  std::vector<at::Tensor> copies_;  // host copies, on a device that kernels cannot reach
  int source_ = -1;                 // under mutex_
  const c10::intrusive_ptr<c10::ivalue::Future> outcome_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/* What a caller has: a collective, or several that are waited for as one, and their outputs. Not
 * empty. */
class CollectiveWork final : public c10d::Work {
 public:
  using Works = std::vector<c10::intrusive_ptr<Collective>>;
  CollectiveWork(c10d::OpType type, Works works, std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return works_.front()->sourceRank(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /* Complete at once, like CUDA's: who waits for it makes a stream wait. Of a sparse tensor, when
   * its size is known. */
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /* Of one: complete when it is. */
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return works_.front()->getSequencenumber(); }

  const Works &works() const { return works_; }

 private:
  const Works works_;
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // under mutex_
};

/* Gloo and the queues in front of it. The group and the threads share it: a group may be destroyed
 * while collectives are under way, and they end as they would have. */
class CollectiveQueues : public std::enable_shared_from_this<CollectiveQueues> {
 public:
  CollectiveQueues(c10::intrusive_ptr<c10d::Backend> gloo, Peers peers);
  ~CollectiveQueues();

  void push(const QueueKey &key, c10::intrusive_ptr<Collective> work);
  /* Nothing more will come. */
  void close();

  c10d::Backend &gloo() { return *gloo_; }
  const Peers &peers() const { return peers_; }
  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }

  /* Streams of our own, since those of the pool are also others'. One for what comes after a
   * collective; one for what a collective itself copies: it must not be behind what waits for it;
   * one that only waits for collectives, for who synchronises the device; and one of each queue for
   * the sanitizer, which sees collectives there. */
  enum class Use { after, copies, device, told };
  c10::Stream sideStream(Use use, c10::DeviceIndex device, const QueueKey &queue = collectives());

 private:
  struct Queue {
    std::deque<c10::intrusive_ptr<Collective>> works;
    std::condition_variable news;
  };
  static void serve(std::shared_ptr<CollectiveQueues> self, QueueKey key);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const Peers peers_;
  // Guards what follows; no other lock is taken under it, but the core's for a new stream.
  std::mutex mutex_;
  std::map<QueueKey, Queue> queues_;  // each has a thread
  std::map<std::tuple<Use, c10::DeviceIndex, QueueKey>, orStream_t> sideStreams_;
  bool closed_ = false;
};

}  // namespace torch_openreg
