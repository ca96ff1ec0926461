/*
 * A Task belongs to the thread that queues it, and from then on to the queue, which deletes it
 * whether or not it ran. An AwaitedTask is on the stack of the thread that waits for it in
 * orLaunchKernelEx (orLaunchWaits).
 */
#include "task.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../torch/check.h"
#include "../torch/kernel_failures.h"
#include "../torch/stream.h"
#include "../torch/warnings.h"

namespace torch_openreg {

namespace {

orError_t runTask(void *args) {
  Task &kernel = **static_cast<Task **>(args);
  std::vector<c10::Warning> warnings;
  orError_t result = orSuccess;
  try {
    runAsCaller(kernel.caller, warnings, [&] { kernel.run(); });
  } catch (const std::exception &error) {
    std::string text = error.what();
    text.resize(std::min(text.size(), text.find('\n')));
    orSetTaskErrorMessage(text.c_str());
    setFailure(kernel.name, kernel.device.index(), std::current_exception());
    result = orErrorLaunchFailure;
  } catch (...) {
    result = orErrorLaunchFailure;
  }
  if (!warnings.empty() && !std::exchange(kernel.warned, true)) keepWarnings(warnings);
  return result;
}

void destroyTask(void *args) { delete *static_cast<Task **>(args); }

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

/* OPENREG_LAUNCH_BLOCKING, which the core reads once. */
bool launchesBlock() {
  static const bool block = [] {
    auto setting = sized<orSetting>();
    for (int i = 0; orGetSetting(i, &setting) == orSuccess; ++i) {
      if (std::string_view(setting.name) == "OPENREG_LAUNCH_BLOCKING")
        return std::string_view(setting.value) == "1";
    }
    return false;
  }();
  return block;
}

/* Queues `run`, whose argument points to `task`. The queue calls `destroy` once, whether or not the
 * task ran; `queued` is set to whether it will (orLaunch). */
orError_t launchOnWorker(orStream_t stream, const char *name, orKernelFn run,
                         void (*destroy)(void *), void *task, c10::ArrayRef<orAccess> accesses,
                         unsigned flags, int *queued = nullptr) {
  orLaunch launch{};
  launch.size = sizeof(launch);
  launch.stream = stream;
  launch.fn = run;
  launch.args = &task;
  launch.args_size = sizeof(task);
  launch.drop = destroy;
  launch.accesses = accesses.data();
  launch.access_count = accesses.size();
  launch.name = name;
  launch.flags = flags | orLaunchTold;  // callers report accesses (tensor_accesses.h)
  launch.queued = queued;
  return orLaunchKernelEx(&launch);
}

}  // namespace

void launchTask(std::unique_ptr<Task> kernel, orStream_t stream, c10::ArrayRef<orAccess> accesses,
                unsigned flags) {
  const c10::DeviceIndex device = kernel->device.index();
  int queued = 0;
  const orError_t error = launchOnWorker(stream, kernel->name, &runTask, &destroyTask, kernel.get(),
                                         accesses, flags, &queued);
  if (queued) (void)kernel.release();
  if (C10_UNLIKELY(error == orErrorInvalidResourceHandle)) {
    getCurrentOpenRegStream(device).stream();  // throws an error that names the stream
  }
  if (C10_UNLIKELY(launchesBlock()))
    return checkSynchronized(error, {__func__, __FILE__, __LINE__});
  OPENREG_CHECK(error);
}

void runOnWorker(orStream_t stream, const char *name, bool serial,
                 c10::function_ref<void()> kernel) {
  AwaitedTask task(kernel);
  if (serial) task.caller.threads = 1;
  const unsigned flags = serial ? orLaunchAnyThread | orLaunchWaits : orLaunchWaits;
  OPENREG_CHECK(launchOnWorker(stream, name, &runAwaited, nullptr, &task, {}, flags));
  // Kept warnings of other kernels are issued with those kernels' errors, which they must not hide.
  for (const c10::Warning &warning : task.warnings) c10::warn(warning);
  if (task.error) {
    issueKeptWarnings(/*besideError=*/true);
    std::rethrow_exception(task.error);
  }
  if (task.ran) return;
  OPENREG_CHECK(orStreamSynchronize(stream));
  TORCH_CHECK(false, name, " was not run by its device");
}

}  // namespace torch_openreg
