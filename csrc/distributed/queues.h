/*
 * The queues of a process group's collectives, and the threads that serve them.
 */
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <openreg.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "hooks.h"
#include "peers.h"

namespace torch_openreg {

class Collective;

/* Collectives of one queue begin one after the other. Sends and receives have a queue for each peer
 * and tag, because they may wait for another one of this process. */
using QueueKey = std::tuple<char, int, int>;
inline QueueKey collectives() { return {'c', 0, 0}; }
inline QueueKey sendsTo(int peer, int tag) { return {'s', peer, tag}; }
inline QueueKey receivesFrom(int peer, int tag) { return {'r', peer, tag}; }

/* Gloo and the queues in front of it, shared by the group and the threads. A group may be destroyed
 * while collectives are under way, which then end normally. */
class CollectiveQueues : public std::enable_shared_from_this<CollectiveQueues> {
 public:
  CollectiveQueues(c10::intrusive_ptr<c10d::Backend> gloo, Peers peers);
  ~CollectiveQueues();

  void push(const QueueKey &key, c10::intrusive_ptr<Collective> work);
  /* No more collectives will come. */
  void close();

  c10d::Backend &gloo() { return *gloo_; }
  const Peers &peers() const { return peers_; }
  const std::shared_ptr<GroupHooks> &hooks() const { return hooks_; }
  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }

  /* Streams of our own, because the program shares the pool's. */
  enum class Use {
    after,   // work after a collective
    copies,  // a collective's own copies, which must not queue behind its waiters
    device,  // waits for collectives, so that synchronising the device covers them
    own      // one for each queue: where the sanitizer and a schedule see its collectives
  };
  c10::Stream sideStream(Use use, c10::DeviceIndex device, const QueueKey &queue = collectives());
  /* Completes `future`: a wait for it makes a stream wait for `events`. */
  c10::intrusive_ptr<c10::ivalue::Future> completeAfter(
      c10::intrusive_ptr<c10::ivalue::Future> future, c10::Device device,
      c10::ArrayRef<orEvent_t> events, std::vector<at::Tensor> outputs);

 private:
  struct Queue {
    std::deque<c10::intrusive_ptr<Collective>> works;
    std::condition_variable news;
  };
  static void serve(std::shared_ptr<CollectiveQueues> self, QueueKey key);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const Peers peers_;
  const std::shared_ptr<GroupHooks> hooks_ = std::make_shared<GroupHooks>();
  // Guards the following fields; no lock is taken under it but the core's, for a new stream.
  std::mutex mutex_;
  std::map<QueueKey, Queue> queues_;  // each has a thread
  std::map<std::tuple<Use, c10::DeviceIndex, QueueKey>, orStream_t> sideStreams_;
  bool closed_ = false;
};

c10::intrusive_ptr<c10::ivalue::Future> futureOn(c10::Device device);

}  // namespace torch_openreg
