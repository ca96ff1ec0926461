#include "autograd.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "gil.h"

namespace torch_openreg {

namespace {

using torch::autograd::Engine;

thread_local bool hiding = false;

/* The state of the engine's device threads. */
enum class Threads {
  kPyTorchs,  // started and stopped by PyTorch
  kMissing,   // from startAutogradWithoutDevices on
  kRun,       // from startAutogradDeviceThreads on
  kStopped,   // for good
};
std::atomic<Threads> threads{Threads::kPyTorchs};

/* start_device_threads is protected; a subclass may call it. */
struct EngineAccess : Engine {
  static void startDeviceThreads(Engine &engine) {
    (engine.*(&EngineAccess::start_device_threads))();
  }
};

/* Whether a file of this name, in a folder inside `folder`, begins with this text. */
bool anyBegins(const char *folder, const char *name, std::string_view text) {
  std::error_code error;
  for (std::filesystem::directory_iterator each(folder, error), end; !error && each != end;
       each.increment(error)) {
    std::ifstream file(each->path() / name);
    std::string line;
    if (std::getline(file, line) && line.starts_with(text)) return true;
  }
  return false;
}

/* Finds the threads by the name that the engine gives them. */
bool deviceThreadsExist() { return anyBegins("/proc/self/task", "comm", "pt_autograd_"); }

bool otherDevicesAreThere() {
  for (auto type : {c10::DeviceType::XPU, c10::DeviceType::MTIA, c10::DeviceType::HPU,
                    c10::DeviceType::XLA, c10::DeviceType::MPS}) {
    if (c10::impl::hasDeviceGuardImpl(type)) return true;
  }
  return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) && mayHaveGpu();
}

/* Takes CUDA's guard out of the list while the engine counts devices at import. In a CUDA build of
 * PyTorch on a machine without a GPU, that guard would try to load the driver. (The engine's
 * threads ask it when they start.) */
class CudaHidden : Uncopyable {
 public:
  CudaHidden() : guard_(slot().exchange(nullptr)) {}
  ~CudaHidden() { slot().store(guard_); }

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface *> &slot() {
    return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  }

  const c10::impl::DeviceGuardImplInterface *guard_;
};

}  // namespace

/* Checks for the files that drivers create (NVIDIA's node in /dev may appear as late as the first
 * use; Tegra's, Windows', AMD's), because a call of CUDA itself would load the driver. */
bool mayHaveGpu() {
  for (const char *place : {"/dev/nvidiactl", "/proc/driver/nvidia", "/sys/module/nvidia",
                            "/dev/nvmap", "/dev/dxg", "/dev/kfd"}) {
    if (access(place, F_OK) == 0) return true;
  }
  return anyBegins("/sys/bus/pci/devices", "vendor", "0x10de");  // NVIDIA
}

bool hidesDevicesFromAutograd() noexcept { return hiding; }

void startAutogradWithoutDevices() {
  // Threads for another accelerator would have to start here, at import: PyTorch's own way is kept.
  if (otherDevicesAreThere()) return;
  const CudaHidden hidden;
  hiding = true;
  try {
    Engine::get_default_engine().initialize_device_threads_pool();
  } catch (const c10::Error &) {
    // In a forked child whose parent's engine runs, backward() raises PyTorch's own error.
    hiding = false;
    return;
  }
  hiding = false;
  threads.store(Threads::kMissing, std::memory_order_release);
}

void startAutogradDeviceThreads() {
  if (C10_LIKELY(threads.load(std::memory_order_acquire) != Threads::kMissing)) return;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (threads.load(std::memory_order_relaxed) != Threads::kMissing) return;
  EngineAccess::startDeviceThreads(Engine::get_default_engine());
  threads.store(Threads::kRun, std::memory_order_release);
}

void stopAutogradDeviceThreads() {
  Threads before = Threads::kRun;
  if (!threads.compare_exchange_strong(before, Threads::kStopped) || orInForkedChild() != 0) return;
  WithoutGil unlocked;
  Engine::get_default_engine().stop();
  // A thread takes the GIL once more, to delete its state, after `stop` has seen that it ends.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (deviceThreadsExist() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace torch_openreg
