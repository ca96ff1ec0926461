/*
 * A group's transport between threads of one process. Its ranks share a Room. Rank 0 makes it and
 * passes its number through the store, as Gloo passes addresses.
 *
 * A collective has one thread of each rank. Each shows its tensors; when all have, each reads the
 * others', and no call returns before all have read. ProcessGroupOpenReg has compared the calls
 * before, so the sizes agree. A message is read by its receiver from the sender's memory: neither
 * call returns without the other.
 *
 * A rank that leaves ends every wait for it. The room's mutex is a leaf, and tensors are read
 * outside of it.
 */
#include "thread_transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../torch/check.h"
#include "../torch/fork.h"

namespace torch_openreg {

namespace {

using c10d::ReduceOp;
using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Read = c10::function_ref<void(const Lists &shown)>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Message {
  int from, tag;
  at::Tensor data;
  bool read = false;
};
using MessagePtr = std::shared_ptr<Message>;

class Room : Uncopyable {
 public:
  explicit Room(int size) : places_(static_cast<size_t>(size)), shown_(places_.size()) {}

  /* Shows this rank's tensors to all, and lets it read those of all. */
  void exchange(int rank, Tensors tensors, milliseconds timeout, Read read);
  MessagePtr show(int from, int to, int tag, at::Tensor data);
  void awaitReader(Message &message, int to, milliseconds timeout);
  /* Without an error: takes the message back, or waits until its reader is done. */
  void takeBack(Message &message, int to);
  /* `from` -1: any rank. Returns the sender. */
  int receive(int rank, int from, int tag, at::Tensor &into, milliseconds timeout);
  void leave(int rank);

 private:
  struct Place {
    bool gone = false;
    std::deque<MessagePtr> inbox;
    std::condition_variable news;  // a message has come, or one of this rank's has been read
  };
  Place &at(int rank) { return places_[static_cast<size_t>(rank)]; }
  bool isGone(int rank, int peer);
  bool remove(const Message &message, int to);
  /* Returns once all ranks have called it. */
  bool arrive();
  template <typename Over, typename Lost>
  void await(std::unique_lock<std::mutex> &lock, std::condition_variable &news,
             milliseconds timeout, Over over, Lost lost);

  std::mutex mutex_;  // guards what follows; `shown_` only until all have shown
  std::vector<Place> places_;
  Lists shown_;
  std::condition_variable turned_;
  size_t arrived_ = 0;
  uint64_t turn_ = 0;  // how often all have arrived
  bool lost_ = false;  // a rank has left: no collective can begin
};

/* Requires the lock. Waits until `over`; throws after the time-out, or where it cannot come. */
template <typename Over, typename Lost>
void Room::await(std::unique_lock<std::mutex> &lock, std::condition_variable &news,
                 milliseconds timeout, Over over, Lost lost) {
  if (!news.wait_for(lock, timeout, [&] { return over() || lost(); }))
    throw std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms");
  if (!over()) throw std::runtime_error("a rank has left the group");
}

/* Requires the lock. */
bool Room::arrive() {
  if (++arrived_ < places_.size()) return false;
  arrived_ = 0;
  ++turn_;
  turned_.notify_all();
  return true;
}

void Room::exchange(int rank, Tensors tensors, milliseconds timeout, Read read) {
  std::unique_lock<std::mutex> lock(mutex_);
  shown_[static_cast<size_t>(rank)] = std::move(tensors);
  const uint64_t turn = turn_;
  if (!arrive()) {
    try {
      await(lock, turned_, timeout, [&] { return turn_ != turn; }, [&] { return lost_; });
    } catch (...) {
      --arrived_;
      lost_ = true;
      turned_.notify_all();
      throw;
    }
  }
  lock.unlock();
  std::exception_ptr error;
  try {
    asKernel([&] { read(shown_); });
  } catch (...) {
    error = std::current_exception();
  }
  // The others read this rank's memory until they arrive, which depends on no one.
  lock.lock();
  const uint64_t reading = turn_;
  if (!arrive()) turned_.wait(lock, [&] { return turn_ != reading; });
  shown_[static_cast<size_t>(rank)].clear();
  if (error) std::rethrow_exception(error);
}

MessagePtr Room::show(int from, int to, int tag, at::Tensor data) {
  auto message = std::make_shared<Message>(Message{from, tag, std::move(data)});
  std::lock_guard<std::mutex> lock(mutex_);
  at(to).inbox.push_back(message);
  at(to).news.notify_all();
  return message;
}

/* Requires the lock. */
bool Room::isGone(int rank, int peer) {
  if (at(rank).gone) return true;
  if (peer >= 0) return at(peer).gone;
  return std::count_if(places_.begin(), places_.end(),
                       [](const Place &place) { return !place.gone; }) < 2;
}

/* Requires the lock. False if a reader has it. */
bool Room::remove(const Message &message, int to) {
  auto &inbox = at(to).inbox;
  const auto found = std::find_if(inbox.begin(), inbox.end(),
                                  [&](const MessagePtr &other) { return other.get() == &message; });
  if (found == inbox.end()) return false;
  inbox.erase(found);
  return true;
}

void Room::awaitReader(Message &message, int to, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  await(
      lock, at(message.from).news, timeout, [&] { return message.read; },
      [&] { return isGone(message.from, to); });
}

void Room::takeBack(Message &message, int to) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (message.read || remove(message, to)) return;
  at(message.from).news.wait(lock, [&] { return message.read; });
}

int Room::receive(int rank, int from, int tag, at::Tensor &into, milliseconds timeout) {
  auto &inbox = at(rank).inbox;
  auto found = inbox.end();
  const auto find = [&] {
    found = std::find_if(inbox.begin(), inbox.end(), [&](const MessagePtr &message) {
      return message->tag == tag && (from < 0 || message->from == from);
    });
    return found != inbox.end();
  };
  std::unique_lock<std::mutex> lock(mutex_);
  await(lock, at(rank).news, timeout, find, [&] { return isGone(rank, from); });
  const MessagePtr message = std::move(*found);
  inbox.erase(found);
  lock.unlock();
  asKernel([&] { into.copy_(message->data); });
  lock.lock();
  message->data.reset();
  message->read = true;
  at(message->from).news.notify_all();
  return message->from;
}

void Room::leave(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  at(rank).gone = lost_ = true;
  turned_.notify_all();
  for (Place &place : places_) place.news.notify_all();
}

/* Kept until all ranks have entered, as the first may have left by then. One that a failed rank
 * never enters stays, a few hundred bytes. */
struct Entrance {
  std::shared_ptr<Room> room;
  int awaited;
};

struct Rooms {
  std::mutex mutex;
  int64_t made = 0;
  std::map<int64_t, Entrance> byNumber;
};

Rooms &rooms() { return leaked<Rooms>(); }

std::shared_ptr<Room> enterRoom(c10d::Store &store, int rank, int size) {
  const std::string key = "openreg_room";
  if (rank == 0) {
    auto room = std::make_shared<Room>(size);
    std::string number;
    {
      std::lock_guard<std::mutex> lock(rooms().mutex);
      ++rooms().made;
      if (size > 1) rooms().byNumber[rooms().made] = {room, size - 1};
      number = std::to_string(rooms().made);
    }
    store.set(key, std::vector<uint8_t>(number.begin(), number.end()));
    return room;
  }
  const std::vector<uint8_t> number = store.get(key);
  std::lock_guard<std::mutex> lock(rooms().mutex);
  const auto found = rooms().byNumber.find(std::stoll(std::string(number.begin(), number.end())));
  TORCH_CHECK(found != rooms().byNumber.end(), "all ranks have entered the group before");
  auto room = found->second.room;
  if (--found->second.awaited == 0) rooms().byNumber.erase(found);
  return room;
}

struct Done : c10d::Work {
  Done() { finish(); }
};

class Sent final : public c10d::Work {
 public:
  Sent(std::shared_ptr<Room> room, MessagePtr message, int to, milliseconds timeout)
      : room_(std::move(room)), message_(std::move(message)), to_(to), timeout_(timeout) {}
  ~Sent() override { room_->takeBack(*message_, to_); }

  bool wait(milliseconds timeout) override {
    room_->awaitReader(*message_, to_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }

 private:
  const std::shared_ptr<Room> room_;
  const MessagePtr message_;
  const int to_;
  const milliseconds timeout_;
};

/* Reads in wait(). */
class Received final : public c10d::Work {
 public:
  Received(std::shared_ptr<Room> room, int rank, int from, int tag, at::Tensor into,
           milliseconds timeout)
      : room_(std::move(room)),
        into_(std::move(into)),
        rank_(rank),
        from_(from),
        tag_(tag),
        timeout_(timeout) {}

  bool wait(milliseconds timeout) override {
    from_ = room_->receive(rank_, from_, tag_, into_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }
  int sourceRank() const override { return from_; }

 private:
  const std::shared_ptr<Room> room_;
  at::Tensor into_;
  const int rank_;
  int from_;
  const int tag_;
  const milliseconds timeout_;
};

void combine(at::Tensor &sum, const at::Tensor &other, ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
      sum.add_(other);
      return;
    case ReduceOp::PRODUCT:
      sum.mul_(other);
      return;
    case ReduceOp::MIN:
      at::minimum_out(sum, sum, other);
      return;
    case ReduceOp::MAX:
      at::maximum_out(sum, sum, other);
      return;
    case ReduceOp::BAND:
      sum.bitwise_and_(other);
      return;
    case ReduceOp::BOR:
      sum.bitwise_or_(other);
      return;
    case ReduceOp::BXOR:
      sum.bitwise_xor_(other);
      return;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "a reduction of kind ", static_cast<int>(op));
  }
}

/* Reduces `part(tensors)` of each rank's tensors, in the order of the ranks. */
at::Tensor reduced(const Lists &shown, ReduceOp::RedOpType op,
                   c10::function_ref<at::Tensor(const Tensors &)> part) {
  at::Tensor sum = part(shown[0]).clone();
  for (size_t rank = 1; rank < shown.size(); ++rank) combine(sum, part(shown[rank]), op);
  return sum;
}

/* An output may be a part of the input. */
void copyTo(const at::Tensor &to, const at::Tensor &from) {
  if (to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
}

class ThreadTransport final : public c10d::Backend {
 public:
  ThreadTransport(c10d::Store &store, int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), options_(std::move(options)), room_(enterRoom(store, rank, size)) {
    setTimeout(options_->timeout);
  }
  ~ThreadTransport() override { room_->leave(getRank()); }

  const std::string getBackendName() const override { return "threads"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { room_->leave(getRank()); }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store> &store,
                                    const std::vector<int> &ranks,
                                    const c10::intrusive_ptr<Options> &options) override {
    const auto own = std::find(ranks.begin(), ranks.end(), getRank());
    if (own == ranks.end()) return nullptr;
    return makeThreadTransport(*store, static_cast<int>(own - ranks.begin()),
                               static_cast<int>(ranks.size()), options);
  }

  WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
    return exchange(tensors, [&](const Lists &shown) {
      copyTo(tensors[0], shown[static_cast<size_t>(options.rootRank)][0]);
    });
  }

  WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
    return reduceAll(tensors[0], options.reduceOp);
  }

  WorkPtr allreduce_coalesced(Tensors &tensors,
                              const c10d::AllreduceCoalescedOptions &options) override {
    for (at::Tensor &tensor : tensors) reduceAll(tensor, options.reduceOp);
    return c10::make_intrusive<Done>();
  }

  WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
    const bool root = options.rootRank == getRank();
    at::Tensor sum;
    exchange(tensors, [&](const Lists &shown) {
      if (root) sum = reduced(shown, options.reduceOp, [](const Tensors &all) { return all[0]; });
    });
    if (root) asKernel([&] { tensors[0].copy_(sum); });
    return c10::make_intrusive<Done>();
  }

  WorkPtr allgather(Lists &outputs, Tensors &inputs, const c10d::AllgatherOptions &) override {
    return gatherInto(outputs[0], inputs);
  }

  WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                          const c10d::AllgatherOptions &) override {
    return gatherInto(parts(output), {input});
  }

  WorkPtr allgather_coalesced(Lists &outputs, Tensors &inputs,
                              const c10d::AllgatherOptions &) override {
    return exchange(inputs, [&](const Lists &shown) {
      for (size_t rank = 0; rank < shown.size(); ++rank)
        for (size_t i = 0; i < inputs.size(); ++i) copyTo(outputs[rank][i], shown[rank][i]);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::AllgatherOptions &) override {
    for (size_t i = 0; i < inputs.size(); ++i) gatherInto(parts(outputs[i]), {inputs[i]});
    return c10::make_intrusive<Done>();
  }

  WorkPtr gather(Lists &outputs, Tensors &inputs, const c10d::GatherOptions &) override {
    return gatherInto(outputs.empty() ? Tensors() : outputs[0], inputs);
  }

  WorkPtr scatter(Tensors &outputs, Lists &inputs, const c10d::ScatterOptions &options) override {
    return exchange(inputs.empty() ? Tensors() : inputs[0], [&](const Lists &shown) {
      copyTo(outputs[0], shown[static_cast<size_t>(options.rootRank)][own()]);
    });
  }

  WorkPtr reduce_scatter(Tensors &outputs, Lists &inputs,
                         const c10d::ReduceScatterOptions &options) override {
    return reduceParts(outputs[0], inputs[0], options.reduceOp);
  }

  WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                               const c10d::ReduceScatterOptions &options) override {
    return reduceParts(output, parts(input), options.reduceOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::ReduceScatterOptions &options) override {
    for (size_t i = 0; i < inputs.size(); ++i)
      reduceParts(outputs[i], parts(inputs[i]), options.reduceOp);
    return c10::make_intrusive<Done>();
  }

  WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &outputSizes,
                        std::vector<int64_t> &inputSizes, const c10d::AllToAllOptions &) override {
    return exchangeParts(output.split_with_sizes(outputSizes), input.split_with_sizes(inputSizes));
  }

  WorkPtr alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &) override {
    return exchangeParts(outputs, inputs);
  }

  WorkPtr send(Tensors &tensors, int to, int tag) override {
    auto message = room_->show(getRank(), to, tag, tensors[0]);
    return c10::make_intrusive<Sent>(room_, std::move(message), to, timeout_);
  }

  WorkPtr recv(Tensors &tensors, int from, int tag) override {
    return c10::make_intrusive<Received>(room_, getRank(), from, tag, tensors[0], timeout_);
  }

  WorkPtr recvAnysource(Tensors &tensors, int tag) override { return recv(tensors, -1, tag); }

  WorkPtr barrier(const c10d::BarrierOptions &) override {
    return exchange({}, [](const Lists &) {});
  }

 private:
  size_t own() const { return static_cast<size_t>(getRank()); }
  /* One for each rank; the last ones may be shorter. */
  Tensors parts(const at::Tensor &flat) const { return flat.tensor_split(getSize()); }

  WorkPtr exchange(Tensors tensors, Read read) {
    room_->exchange(getRank(), std::move(tensors), timeout_, read);
    return c10::make_intrusive<Done>();
  }

  /* `outputs` has one for each rank, or none. */
  WorkPtr gatherInto(const Tensors &outputs, Tensors inputs) {
    return exchange(std::move(inputs), [&](const Lists &shown) {
      for (size_t rank = 0; rank < outputs.size(); ++rank) copyTo(outputs[rank], shown[rank][0]);
    });
  }

  WorkPtr exchangeParts(const Tensors &outputs, Tensors inputs) {
    return exchange(std::move(inputs), [&](const Lists &shown) {
      for (size_t rank = 0; rank < outputs.size(); ++rank)
        copyTo(outputs[rank], shown[rank][own()]);
    });
  }

  WorkPtr reduceParts(const at::Tensor &output, Tensors inputs, const ReduceOp &op) {
    at::Tensor sum;
    exchange(std::move(inputs), [&](const Lists &shown) {
      sum = reduced(shown, op, [&](const Tensors &all) { return all[own()]; });
    });
    asKernel([&] { output.copy_(sum); });  // which may be a part of the input
    return c10::make_intrusive<Done>();
  }

  /* Each rank reduces a part, and gathers the others. A sparse tensor has no parts. */
  WorkPtr reduceAll(at::Tensor &tensor, const ReduceOp &op) {
    at::Tensor sum;
    if (tensor.is_sparse()) {
      exchange({tensor}, [&](const Lists &shown) {
        sum = reduced(shown, op, [](const Tensors &all) { return all[0]; });
      });
      asKernel([&] { tensor.copy_(sum.coalesce()); });
      return c10::make_intrusive<Done>();
    }
    const Tensors all = parts(tensor);
    exchange(all, [&](const Lists &shown) {
      sum = reduced(shown, op, [&](const Tensors &theirs) { return theirs[own()]; });
    });
    return gatherInto(all, {sum});
  }

  const c10::intrusive_ptr<Options> options_;
  std::atomic<milliseconds> timeout_{};
  const std::shared_ptr<Room> room_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> makeThreadTransport(
    c10d::Store &store, int rank, int size, c10::intrusive_ptr<c10d::Backend::Options> options) {
  return c10::make_intrusive<ThreadTransport>(store, rank, size, std::move(options));
}

}  // namespace torch_openreg
