/*
 * Everything here belongs to the calling thread.
 */
#include "lane.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include <openreg.h>

#include "../torch/fork.h"
#include "../torch/gil.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace torch_openreg {

namespace {

// ---- What a thread's floating point unit does with denormal numbers.

#if defined(__SSE2__)
constexpr unsigned kFlushBits = _MM_FLUSH_ZERO_ON | 0x40;  // and denormals-are-zero
unsigned flushMode() { return _mm_getcsr() & kFlushBits; }
void setFlushMode(unsigned mode) {
  if (flushMode() != mode) _mm_setcsr((_mm_getcsr() & ~kFlushBits) | mode);
}
#else
unsigned flushMode() { return 0; }
void setFlushMode(unsigned) {}
#endif

// ---- How many threads a kernel uses.

using SetThreads = void (*)(int);
struct ThreadControl {
  SetThreads openmp = nullptr;
  int (*mklLocal)(int) = nullptr;
  int (*endTeam)(int) = nullptr;  // of the calling thread
};

bool isFromGomp(void *function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && std::strstr(info.dli_fname, "libgomp") != nullptr;
}

/* PyTorch's own OpenMP runtime is the one that libtorch_cpu is linked to; a process may hold others. */
const ThreadControl &threadControl() {
  static const ThreadControl control = [] {
    ThreadControl found;
    Dl_info info{};
    if (dladdr(reinterpret_cast<void *>(&at::get_num_threads), &info) == 0) return found;
    void *library = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return found;
    found.openmp = reinterpret_cast<SetThreads>(dlsym(library, "omp_set_num_threads"));
    found.mklLocal = reinterpret_cast<int (*)(int)>(dlsym(library, "MKL_Set_Num_Threads_Local"));
    // Elsewhere it concerns every thread's team.
    void *pause = dlsym(library, "omp_pause_resource_all");
    if (isFromGomp(pause)) found.endTeam = reinterpret_cast<int (*)(int)>(pause);
    return found;
  }();
  return control;
}

thread_local bool onLane = false, wideLane = false;

/* Of the calling thread. */
void setThreads(int count) {
  if (threadControl().openmp != nullptr) threadControl().openmp(count);
  if (threadControl().mklLocal != nullptr) threadControl().mklLocal(count);
}

/* Trips PyTorch's lazy initialisation of this thread, which would undo what is set afterwards. In a forked child the first
 * one makes PyTorch's pool of threads anew, with no lock (caffe2::pthreadpool): whoever comes meanwhile finds none, and
 * throws. */
void initialiseThread() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  at::get_num_threads();
}

void startLane(int, int wide) {
  KernelScope here;
  initialiseThread();
  onLane = true;
  wideLane = wide != 0;
  if (!wideLane) setThreads(1);
}

void useThreads(int count) {
  // MKL's own count is the process's, and may have changed since the task was queued.
  thread_local int set = 0;
  if (!wideLane || set == count) return;
  set = count;
  setThreads(count);
}

/* libgomp's threads stop spinning between parallel regions once its teams together have more threads than there are
 * cores, and every region of the wide lane costs two futex calls then (a transformer layer's step: 27 ms instead of
 * 15). So a thread of the host does not keep its team while it sleeps. Its next region makes a new one in 50 to 100 us,
 * hence the interval. Nothing happens to a thread that has no team or is inside a region. */
void endTeamOfSleeper() {
  constexpr auto interval = std::chrono::milliseconds(5);
  constexpr int soft = 1;  // omp_pause_soft: what the program has set stays
  thread_local std::chrono::steady_clock::time_point last{};
  const auto now = std::chrono::steady_clock::now();
  if (threadControl().endTeam == nullptr || now - last < interval) return;
  last = now;
  threadControl().endTeam(soft);
}

// ---- A thread that runs a kernel, or a piece of one, in the midst of anything.

/* What it computes opens no team. */
class OneThread {
 public:
  OneThread() {
    if (before_ == 1) return;
    if (threadControl().openmp != nullptr) threadControl().openmp(1);
    if (threadControl().mklLocal != nullptr) mkl_ = threadControl().mklLocal(1);
  }
  ~OneThread() {
    if (before_ == 1) return;
    if (threadControl().openmp != nullptr) threadControl().openmp(before_);
    if (threadControl().mklLocal != nullptr) threadControl().mklLocal(mkl_);
  }
  OneThread(const OneThread &) = delete;
  OneThread &operator=(const OneThread &) = delete;

 private:
  const int before_ = at::get_num_threads();
  int mkl_ = 0;
};

/* c10::AutoGradMode, with one look-up of the thread's state for all that it does. */
class NoGrad {
 public:
  NoGrad() { state_.set_grad_mode(false); }
  ~NoGrad() { state_.set_grad_mode(before_); }
  NoGrad(const NoGrad &) = delete;
  NoGrad &operator=(const NoGrad &) = delete;

 private:
  c10::AutogradState &state_ = c10::AutogradState::get_tls_state();
  const bool before_ = state_.get_grad_mode();
};

/* No mode, no layer of functorch or autocast, no profiler that belongs to what the thread is doing. */
class AsLane {
 private:
  c10::impl::ForceDispatchKeyGuard keys_{c10::default_included_set, c10::default_excluded_set};
  const bool inference_ = autograd().get_inference_mode();
  at::RecordFunctionGuard unrecorded_{false};
  OneThread alone_;
  static c10::AutogradState &autograd() { return c10::AutogradState::get_tls_state(); }

 public:
  AsLane() { autograd().set_inference_mode(false); }
  ~AsLane() { autograd().set_inference_mode(inference_); }
  AsLane(const AsLane &) = delete;
  AsLane &operator=(const AsLane &) = delete;
};

class WarningCollector final : public c10::WarningHandler {
 public:
  explicit WarningCollector(std::vector<c10::Warning> &warnings) : warnings_(warnings) {}
  void process(const c10::Warning &warning) override { warnings_.push_back(warning); }

 private:
  std::vector<c10::Warning> &warnings_;
};

/* Before a sleep of a host's thread. */
void *fallAsleep() {
  void *gil = letGoOfGil();
  endTeamOfSleeper();
  return gil;
}

constexpr orBlockHooks kBlockHooks{fallAsleep, takeGilBack};
[[maybe_unused]] const bool hooked =
    (orSetLaneHook(&startLane), orSetBlockHooks(&kBlockHooks), true);

}  // namespace

DenormalMode::DenormalMode(unsigned flush) : before_(flushMode()) { setFlushMode(flush); }

DenormalMode::~DenormalMode() { setFlushMode(before_); }

CallerState CallerState::now() { return {at::get_num_threads(), flushMode()}; }

void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel) {
  KernelScope here;
  std::optional<AsLane> likeLane;
  if (!onLane) likeLane.emplace();
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
  setThreads(1);
}

void asNarrowLane(c10::function_ref<void()> function) {
  AsLane likeLane;
  function();
}

}  // namespace torch_openreg
