#include "hand_over.h"

#include <openreg_schedule.h>

#include <chrono>
#include <utility>

#include "../torch/check.h"
#include "../torch/sanitizer.h"
#include "../task/task.h"

namespace torch_openreg {

namespace {

size_t queuedTasks() {
  auto info = sized<orWorkerInfo>();
  orGetWorkerInfo(&info);
  return info.queued;
}

/* Runs tasks until the stream is done or no task can run. The program requested none. */
void runScheduled(orStream_t stream) {
  if (!isScheduled()) return;
  const OwnWait own;
  for (size_t before = queuedTasks(), now = 0;
       orStreamQuery(stream) == orErrorNotReady && (now = queuedTasks()) < before; before = now) {
  }
}

/* How long a schedule waits for a collective that it has begun, and a collective for the
 * schedule. */
constexpr auto kMoment = std::chrono::milliseconds(20);

}  // namespace

bool isScheduled() {
  orSchedulePolicy policy = orScheduleFair;
  uint64_t seed = 0;
  return orScheduleGet(&policy, &seed) == orSuccess && policy != orScheduleFair;
}

/* One of the two tasks. */
struct HandOver::Step final : Task {
  using Action = void (HandOver::*)();
  Step(const char *kernelName, c10::Device on, std::shared_ptr<HandOver> owner, Action atRun,
       Action atEnd)
      : Task(kernelName, on), handOver(std::move(owner)), action(atRun), end(atEnd) {}
  ~Step() override { (handOver.get()->*end)(); }
  void run() override { (handOver.get()->*action)(); }

  const std::shared_ptr<HandOver> handOver;
  const Action action, end;  // `end` after it has run, or was cancelled
};

void HandOver::queueOn(orStream_t stream, const char *name, c10::Device device) {
  launchTask(
      std::make_unique<Step>(name, device, shared_from_this(), &HandOver::map, &HandOver::cancel),
      stream);
}

bool HandOver::hasBeginning() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return chosen_ != 0;
}

void HandOver::queueBeginning(const char *name, c10::Device device) {
  launchTask(std::make_unique<Step>(name, device, shared_from_this(), &HandOver::begin,
                                    &HandOver::giveUpBeginning),
             chosen_);
}

void HandOver::enter(State state) {
  state_ = state;
  changed_.notify_all();
}

void HandOver::map() {
  for (Range &range : ranges) {
    if (maps) range.kernel = range.memory.address();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::queued) enter(chosen_ != 0 ? State::ready : State::begun);
}

void HandOver::cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::queued) enter(State::cancelled);
}

/* Waits only for a moment, because a peer may be late. */
void HandOver::begin() {
  const orPart part = receives ? orTaskPart() : orPartWhole;
  std::unique_lock<std::mutex> lock(mutex_);
  if (part == orPartSecond) {
    if (state_ == State::split || state_ == State::exchanged) enter(State::landing);
  } else if (state_ == State::ready) {
    enter(part == orPartFirst ? State::split : State::begun);
  }
  const State end = part == orPartFirst ? State::exchanged : State::over;
  changed_.wait_for(lock, kMoment, [&] { return state_ >= end; });
}

void HandOver::giveUpBeginning() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::queued) chosen_ = 0;
  if (state_ == State::ready) enter(State::begun);
  if (state_ == State::split || state_ == State::exchanged) enter(State::cancelledInHalf);
}

void HandOver::awaitAtLeast(std::unique_lock<std::mutex> &lock, State state) {
  const auto come = [&] { return state_ >= state; };
  while (chosen_ != 0 && !changed_.wait_for(lock, kMoment, come)) {
    const orStream_t stream = chosen_;
    lock.unlock();
    runScheduled(stream);
    lock.lock();
  }
  changed_.wait(lock, come);
}

bool HandOver::await() {
  std::unique_lock<std::mutex> lock(mutex_);
  awaitAtLeast(lock, State::begun);
  return state_ < State::cancelled;
}

bool HandOver::isSplit() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return (state_ >= State::split && state_ <= State::landing) || state_ == State::cancelledInHalf;
}

bool HandOver::awaitLanding() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::split) enter(State::exchanged);
  awaitAtLeast(lock, State::landing);
  return state_ == State::landing;
}

void HandOver::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ < State::over) enter(State::over);
}

bool HandOver::isCancelled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_ >= State::cancelled;
}

}  // namespace torch_openreg
