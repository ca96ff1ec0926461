#include "collective_work.h"

#include <algorithm>
#include <utility>

namespace torch_openreg {

using c10::ivalue::Future;

CollectiveWork::CollectiveWork(c10d::OpType type, Works works, std::vector<at::Tensor> outputs)
    : Work(works.front()->queues()->rank(), type),
      works_(std::move(works)),
      outputs_(std::move(outputs)),
      completion_(std::make_shared<Completion>(works_.front()->queues()->hooks(), works_.size())) {
  for (const auto &work : works_) work->reportTo(completion_);
}

bool CollectiveWork::isCompleted() {
  return std::ranges::all_of(works_, [](const auto &work) { return work->isCompleted(); });
}

bool CollectiveWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const auto &work) { return work->isSuccess(); });
}

std::exception_ptr CollectiveWork::exception() const {
  for (const auto &work : works_) {
    if (const std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

void CollectiveWork::synchronize() {
  for (const auto &work : works_) work->synchronize();
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  for (const auto &work : works_) work->wait(timeout);
  return true;
}

c10::intrusive_ptr<Future> CollectiveWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  if (works_.size() == 1) future_ = works_.front()->getFuture();
  if (future_) return future_;
  std::vector<orEvent_t> events;
  for (const auto &work : works_) events.push_back(work->done());
  const c10::Device device = works_.front()->device();
  CollectiveQueues &queues = *works_.front()->queues();
  return future_ = queues.completeAfter(futureOn(device), device, events, outputs_);
}

c10::intrusive_ptr<Future> CollectiveWork::getFutureResult() {
  return works_.size() == 1 ? works_.front()->getFutureResult() : Work::getFutureResult();
}

}  // namespace torch_openreg
