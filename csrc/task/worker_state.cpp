/*
 * Sets and restores the state of the calling thread; nothing here is shared.
 */
#include "worker_state.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <optional>
#include <utility>

#include <openreg.h>

#include "../torch/fork.h"
#include "../torch/gil.h"

namespace torch_openreg {

namespace {

// ---- How many threads a kernel uses.

thread_local bool onWorker = false, onWideWorker = false, forDevice = false;

void startWorker(int, int wide) {
  KernelScope here;
  initialiseThread();
  // Observers of all threads would treat what kernels call as operators of the program.
  at::enableRecordFunction(false);
  onWorker = true;
  onWideWorker = wide != 0;
  if (!onWideWorker) setThreads(1, 1);
}

void useThreads(int count) {
  // MKL's own count is global, and may have changed since the task was queued.
  thread_local int set = 0;
  if (!onWideWorker || set == count) return;
  set = count;
  setThreads(count, count);
}

/* Note [Teams of sleeping threads]. libgomp's threads stop spinning between parallel regions once
 * its teams together have more threads than there are cores. Then every region of the wide worker
 * costs two futex calls (a transformer layer's step: 27 ms instead of 15). So a host thread gives
 * up its team while it sleeps. Its next region makes a new one in 50 to 100 us, hence the interval.
 * A thread without a team, or inside a region, is not affected. */
void endTeamOfSleeper() {
  constexpr auto interval = std::chrono::milliseconds(5);
  constexpr int soft = 1;  // omp_pause_soft: keeps the program's settings
  thread_local std::chrono::steady_clock::time_point last{};
  const auto now = std::chrono::steady_clock::now();
  if (threadControl().endTeam == nullptr || now - last < interval) return;
  last = now;
  threadControl().endTeam(soft);
}

// ---- A thread that runs a kernel, or a piece of one, in the middle of other work.

/* Its computations open no team. */
class OneThread : Uncopyable {
 public:
  OneThread() {
    if (before_ != 1) mkl_ = setThreads(1, 1);
  }
  ~OneThread() {
    if (before_ != 1) setThreads(before_, mkl_);
  }

 private:
  const int before_ = at::get_num_threads();
  int mkl_ = 0;
};

/* c10::AutoGradMode, with a single look-up of the thread's state. */
class NoGrad : Uncopyable {
 public:
  NoGrad() { state_.set_grad_mode(false); }
  ~NoGrad() { state_.set_grad_mode(before_); }

 private:
  c10::AutogradState &state_ = c10::AutogradState::get_tls_state();
  const bool before_ = state_.get_grad_mode();
};

/* Removes every mode, layer of functorch or autocast, and profiler that belongs to the thread's
 * other work. */
class AsWorker {
 private:
  c10::impl::ForceDispatchKeyGuard keys_{c10::default_included_set, c10::default_excluded_set};
  const bool inference_ = autograd().get_inference_mode();
  const ForDevice forDevice_;
  at::RecordFunctionGuard unrecorded_{false};
  OneThread alone_;
  static c10::AutogradState &autograd() { return c10::AutogradState::get_tls_state(); }

 public:
  AsWorker() { autograd().set_inference_mode(false); }
  ~AsWorker() { autograd().set_inference_mode(inference_); }
};

class WarningCollector final : public c10::WarningHandler {
 public:
  explicit WarningCollector(std::vector<c10::Warning> &warnings) : warnings_(warnings) {}
  void process(const c10::Warning &warning) override { warnings_.push_back(warning); }

 private:
  std::vector<c10::Warning> &warnings_;
};

/* Called before a host thread sleeps. */
void *fallAsleep() {
  void *gil = letGoOfGil();
  endTeamOfSleeper();
  return gil;
}

constexpr orBlockHooks kBlockHooks{fallAsleep, takeGilBack};
[[maybe_unused]] const bool hooked =
    (orSetWorkerHook(&startWorker), orSetBlockHooks(&kBlockHooks), true);

}  // namespace

void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel) {
  KernelScope here;
  std::optional<AsWorker> asWorker;
  if (!onWorker) asWorker.emplace();
  DenormalMode denormals(caller.flush);
  useThreads(caller.threads);
  WarningCollector collector(warnings);
  c10::WarningUtils::WarningHandlerGuard handler(&collector);
  at::AutoDispatchBelowADInplaceOrView below;
  NoGrad noGrad;
  kernel();
}

void useOneThread() {
  initialiseThread();
  setThreads(1, 1);
}

ForDevice::ForDevice() : before_(std::exchange(forDevice, true)) {}

ForDevice::~ForDevice() { forDevice = before_; }

bool computesForDevice() { return onWorker || forDevice || inKernel(); }

void asNarrowWorker(c10::function_ref<void()> function) {
  AsWorker asWorker;
  function();
}

}  // namespace torch_openreg
