/*
 * A task holds a reference of its own, which the queue destroys after it has run or in its place.
 */
#include "hand_over.h"

#include <chrono>
#include <utility>

#include "../torch/check.h"
#include "../torch/sanitizer.h"
#include "../task/task.h"

namespace torch_openreg {

namespace {

using Reference = std::shared_ptr<HandOver>;

HandOver &of(void *args) { return ***static_cast<Reference **>(args); }

size_t queuedTasks() {
  auto info = sized<orWorkerInfo>();
  orGetWorkerInfo(&info);
  return info.queued;
}

/* Until the stream is through, or nothing can run. The program has asked for none of it. */
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

orError_t HandOver::run(void *args) {
  HandOver &handOver = of(args);
  for (Range &range : handOver.ranges) {
    if (!handOver.maps) continue;
    if (const orError_t error = range.memory.map(&range.kernel)) return error;
  }
  const std::lock_guard<std::mutex> lock(handOver.mutex_);
  if (handOver.state_ == State::queued) {
    handOver.enter(handOver.chosen_ != 0 ? State::ready : State::begun);
  }
  return orSuccess;
}

void HandOver::destroy(void *args) {
  const std::unique_ptr<Reference> handOver(*static_cast<Reference **>(args));
  const std::lock_guard<std::mutex> lock((*handOver)->mutex_);
  if ((*handOver)->state_ == State::queued) (*handOver)->enter(State::cancelled);
}

orError_t HandOver::runBeginning(void *args) {
  HandOver &handOver = of(args);
  handOver.begin(handOver.receives ? orTaskPart() : orPartWhole);
  return orSuccess;
}

void HandOver::destroyBeginning(void *args) {
  const std::unique_ptr<Reference> handOver(*static_cast<Reference **>(args));
  (*handOver)->giveUpBeginning();
}

void HandOver::queue(orStream_t stream, const char *name, orKernelFn run, void (*destroy)(void *)) {
  auto task = std::make_unique<Reference>(shared_from_this());
  int queued = 0;
  const orError_t error = launchOnWorker(stream, name, run, destroy, task.get(), {}, 0, &queued);
  if (queued) (void)task.release();
  OPENREG_CHECK(error);
}

void HandOver::queueOn(orStream_t stream, const char *name) { queue(stream, name, &run, &destroy); }

bool HandOver::hasBeginning() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return chosen_ != 0;
}

void HandOver::queueBeginning(const char *name) {
  queue(chosen_, name, &runBeginning, &destroyBeginning);
}

void HandOver::enter(State state) {
  state_ = state;
  changed_.notify_all();
}

/* Waits for no longer than a moment, as a peer may be late. */
void HandOver::begin(orPart part) {
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
