#include "queues.h"

#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <chrono>
#include <thread>
#include <utility>

#include "../torch/device.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../task/worker_state.h"
#include "collective.h"

namespace torch_openreg {

using c10::ivalue::Future;

CollectiveQueues::CollectiveQueues(c10::intrusive_ptr<c10d::Backend> gloo, Peers peers)
    : gloo_(std::move(gloo)), peers_(std::move(peers)) {}

CollectiveQueues::~CollectiveQueues() {
  for (const auto &[key, stream] : sideStreams_) orStreamDestroy(stream);
}

void CollectiveQueues::push(const QueueKey &key, c10::intrusive_ptr<Collective> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [queue, fresh] = queues_.try_emplace(key);
  if (fresh) {
    try {
      std::thread(&serve, shared_from_this(), key).detach();
    } catch (...) {
      queues_.erase(queue);
      throw;
    }
  }
  queue->second.works.push_back(std::move(work));
  queue->second.news.notify_one();
}

void CollectiveQueues::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (auto &[key, queue] : queues_) queue.news.notify_one();
}

/* A queue that is idle for this long ends its thread. */
constexpr auto kIdle = std::chrono::seconds(10);

void CollectiveQueues::serve(std::shared_ptr<CollectiveQueues> self, QueueKey key) {
  pthread_setname_np(pthread_self(), "openreg-c10d");
  useOneThread();
  orSanitizerIgnore(1);  // its accesses were reported at the call
  std::unique_lock<std::mutex> lock(self->mutex_);
  Queue &queue = self->queues_.at(key);
  const auto woken = [&] { return self->closed_ || !queue.works.empty(); };
  while (queue.news.wait_for(lock, kIdle, woken) && !queue.works.empty()) {
    c10::intrusive_ptr<Collective> work = std::move(queue.works.front());
    queue.works.pop_front();
    lock.unlock();
    work->run(*self->gloo_);
    std::vector<at::Tensor> outputs = work->result();
    work.reset();
    letGo(outputs);
    lock.lock();
  }
  self->queues_.erase(key);
}

c10::Stream CollectiveQueues::sideStream(Use use, c10::DeviceIndex device, const QueueKey &queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  orStream_t &stream = sideStreams_[{use, device, queue}];
  if (stream == 0) {
    DeviceSwitch here(device);
    OPENREG_CHECK(orStreamCreate(&stream));
  }
  return getStreamFromExternal(stream, device);
}

c10::intrusive_ptr<Future> CollectiveQueues::completeAfter(c10::intrusive_ptr<Future> future,
                                                           c10::Device device,
                                                           c10::ArrayRef<orEvent_t> events,
                                                           std::vector<at::Tensor> outputs) {
  const c10::StreamGuard side(sideStream(Use::after, device.index()));
  const orStream_t handle = currentStreamHandle(device.index());
  for (const orEvent_t event : events) OPENREG_CHECK(orStreamWaitEvent(handle, event));
  future->markCompleted(c10::IValue(std::move(outputs)));
  return future;
}

c10::intrusive_ptr<Future> futureOn(c10::Device device) {
  return c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{device});
}

}  // namespace torch_openreg
