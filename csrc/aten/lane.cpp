/*
 * An AwaitedTask lives on the stack of the thread that waits for it in orLaunchKernelEx (orLaunchWaits).
 *
 * `running` counts kernels, `pauses` the forks that wait for it to be 0. A kernel counts itself first and looks
 * at `pauses` then, a fork the other way round (sequentially consistent), so that one of them sees the other. A piece of
 * a kernel's work is counted with the kernel, which waits for it.
 */
#include "lane.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <vector>

#include "../torch/check.h"
#include "../torch/gil.h"
#include "../torch/warnings.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace torch_openreg {

namespace {

// ---- What a thread's floating point unit does with denormal numbers.

#if defined(__SSE2__)
constexpr unsigned kFlushBits = _MM_FLUSH_ZERO_ON | 0x40;  // and denormals-are-zero
unsigned flushMode() { return _mm_getcsr() & kFlushBits; }
void setFlushMode(unsigned mode) { _mm_setcsr((_mm_getcsr() & ~kFlushBits) | mode); }
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

// ---- Forks.

std::atomic<int> running{0}, pauses{0};
thread_local bool counted = false;  // this thread is in a kernel, and may itself fork

class Running {
 public:
  Running() {
    if (nested_) return;
    while (running.fetch_add(1), pauses.load() != 0) {
      leave();
      for (int n = pauses.load(); n != 0; n = pauses.load()) pauses.wait(n);
    }
    counted = true;
  }
  ~Running() {
    if (nested_) return;
    counted = false;
    leave();
  }
  Running(const Running &) = delete;
  Running &operator=(const Running &) = delete;

 private:
  static void leave() {
    if (running.fetch_sub(1) == 1 && pauses.load() != 0) running.notify_all();
  }
  const bool nested_ = counted;
};

thread_local bool onLane = false, wideLane = false;

/* Of the calling thread. */
void setThreads(int count) {
  if (threadControl().openmp != nullptr) threadControl().openmp(count);
  if (threadControl().mklLocal != nullptr) threadControl().mklLocal(count);
}

void startLane(int, int wide) {
  Running here;
  // Trips PyTorch's lazy initialisation of this thread, which would undo what follows.
  at::get_num_threads();
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

// ---- A task and its waiter.

class WarningCollector final : public c10::WarningHandler {
 public:
  explicit WarningCollector(std::vector<c10::Warning> &warnings) : warnings_(warnings) {}
  void process(const c10::Warning &warning) override { warnings_.push_back(warning); }

 private:
  std::vector<c10::Warning> &warnings_;
};

struct AwaitedTask {
  explicit AwaitedTask(c10::function_ref<void()> function) : kernel(function) {}

  c10::function_ref<void()> kernel;
  CallerState caller = CallerState::now();
  bool ran = false;
  std::exception_ptr error;
  std::vector<c10::Warning> warnings;
};

orError_t runAwaited(void *args) {
  AwaitedTask &task = **static_cast<AwaitedTask **>(args);
  try {
    runAsCaller(task.caller, task.warnings, task.kernel);
  } catch (...) {
    task.error = std::current_exception();
  }
  task.ran = true;
  return orSuccess;  // the exception is the caller's, not the device's
}

/* In a forked child, which has none of the threads that were counted. */
void startCountAnew() {
  running.store(counted ? 1 : 0);
  pauses.store(0);
}

constexpr orBlockHooks kBlockHooks{fallAsleep, takeGilBack};
[[maybe_unused]] const bool hooked =
    (orSetLaneHook(&startLane), orSetBlockHooks(&kBlockHooks),
     pthread_atfork(&pauseKernels, &resumeKernels, &startCountAnew), true);

}  // namespace

CallerState CallerState::now() { return {at::get_num_threads(), flushMode()}; }

void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel) {
  Running here;
  std::optional<AsLane> likeLane;
  if (!onLane) likeLane.emplace();
  struct FlushGuard {
    const unsigned before = flushMode();
    ~FlushGuard() { setFlushMode(before); }
  } flush;
  setFlushMode(caller.flush);
  useThreads(caller.threads);
  WarningCollector collector(warnings);
  c10::WarningUtils::WarningHandlerGuard handler(&collector);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode gradMode(false);
  kernel();
}

orError_t launchOnLane(orStream_t stream, const char *name, orKernelFn run, void (*drop)(void *),
                       void *task, c10::ArrayRef<orAccess> accesses, unsigned flags, int *queued) {
  orLaunch launch{};
  launch.size = sizeof(launch);
  launch.stream = stream;
  launch.fn = run;
  launch.args = &task;
  launch.args_size = sizeof(task);
  launch.drop = drop;
  launch.accesses = accesses.data();
  launch.access_count = accesses.size();
  launch.name = name;
  launch.flags = flags;
  launch.queued = queued;
  return orLaunchKernelEx(&launch);
}

void runOnLane(orStream_t stream, const char *name, bool serial, c10::function_ref<void()> kernel) {
  AwaitedTask task(kernel);
  if (serial) task.caller.threads = 1;
  const unsigned flags = serial ? orLaunchAnyThread | orLaunchWaits : orLaunchWaits;
  OPENREG_CHECK(launchOnLane(stream, name, &runAwaited, nullptr, &task, {}, flags));
  // The kept ones of other kernels come where those kernels' errors do, which they must not hide.
  for (const c10::Warning &warning : task.warnings) c10::warn(warning);
  if (task.error) {
    issueKeptWarnings(/*besideError=*/true);
    std::rethrow_exception(task.error);
  }
  if (task.ran) return;
  OPENREG_CHECK(orStreamSynchronize(stream));
  TORCH_CHECK(false, name, " was not run by its device");
}

void *fallAsleep() {
  void *gil = letGoOfGil();
  endTeamOfSleeper();
  return gil;
}

void useOneThread() {
  at::get_num_threads();  // as in startLane
  setThreads(1);
}

void asNarrowLane(c10::function_ref<void()> function) {
  AsLane likeLane;
  function();
}

void asKernel(c10::function_ref<void()> function) {
  Running here;
  function();
}

bool inKernel() { return counted; }

void pauseKernels() {
  if (counted) return;
  pauses.fetch_add(1);
  for (int n = running.load(); n != 0; n = running.load()) running.wait(n);
}

void resumeKernels() {
  if (!counted && pauses.fetch_sub(1) == 1) pauses.notify_all();
}

bool canMap(c10::DeviceIndex device) {
  // 0: not asked yet
  static std::array<std::atomic<char>, OPENREG_MAX_DEVICES> known{};
  std::atomic<char> &entry = known.at(static_cast<size_t>(device));
  char answer = entry.load(std::memory_order_relaxed);
  if (answer == 0) {
    orDeviceProperties properties{};
    OPENREG_CHECK(orGetDeviceProperties(&properties, device));
    answer = properties.can_map ? 'y' : 'n';
    entry.store(answer, std::memory_order_relaxed);
  }
  return answer == 'y';
}

}  // namespace torch_openreg
