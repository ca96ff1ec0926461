/*
 * A Task belongs to the thread that queues it, or, once it is queued, to the queue, whose `drop` deletes it,
 * whether or not it ran.
 *
 * `failures` keeps the exceptions of kernels that failed, by device, so that the synchronising call that reports the
 * core's first failure throws the same type. Its mutex is a leaf; nothing is thrown under it.
 */
#include "task.h"

#include <c10/util/Exception.h>

#include <array>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "../torch/check.h"
#include "../torch/stream.h"
#include "../torch/warnings.h"

namespace torch_openreg {

namespace {

struct Failure {
  std::string name;
  std::exception_ptr exception;
};

struct Failures {
  std::mutex mutex;
  std::array<std::vector<Failure>, OPENREG_MAX_DEVICES> byDevice;
};

Failures &failures() {
  static auto *instance = new Failures();
  return *instance;
}

constexpr size_t kMostFailures = 8;

/* The core says "aten::embedding on openreg:0 failed: ...". */
bool isOf(const std::string &report, const std::string &name, size_t device) {
  return report.rfind(name + " on openreg:" + std::to_string(device) + " failed", 0) == 0;
}

std::exception_ptr takeFailure(const std::string &report) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  for (size_t device = 0; device < f.byDevice.size(); ++device) {
    auto &kept = f.byDevice[device];
    for (const Failure &failure : kept) {
      if (!isOf(report, failure.name, device)) continue;
      std::exception_ptr exception = failure.exception;
      kept.clear();
      return exception;
    }
  }
  return nullptr;
}

void throwFailure(const std::string &report) {
  const std::exception_ptr exception = takeFailure(report);
  if (!exception) return;
  orGetLastError();
  try {
    std::rethrow_exception(exception);
  } catch (c10::DistBackendError &) {
    throw;  // a collective's, which names where it comes from itself
  } catch (c10::Error &error) {
    const bool more = report.ends_with(" more failed after it)");
    error.add_context("raised by " + report.substr(0, report.find(" failed: ")) +
                      ", queued earlier" + (more ? report.substr(report.rfind(" (and ")) : ""));
    throw;
  }
}

[[maybe_unused]] const bool handled = (setKernelFailureHandler(&throwFailure), true);

orError_t runTask(void *args) {
  Task &kernel = **static_cast<Task **>(args);
  std::vector<c10::Warning> warnings;
  orError_t result = orSuccess;
  try {
    runAsCaller(kernel.caller, warnings, [&] { kernel.run(); });
  } catch (const std::exception &error) {
    const std::string text = error.what();
    orSetTaskErrorMessage(text.substr(0, text.find('\n')).c_str());
    keepFailure(kernel.name, kernel.device.index(), std::current_exception());
    result = orErrorLaunchFailure;
  } catch (...) {
    result = orErrorLaunchFailure;
  }
  if (!warnings.empty() && !kernel.warned) keepWarnings(warnings);
  return result;
}

void dropTask(void *args) { delete *static_cast<Task **>(args); }

/* OPENREG_LAUNCH_BLOCKING, which the core reads once. */
bool launchesBlock() {
  static const bool block = [] {
    orSetting setting{};
    for (int i = 0; orGetSetting(i, &setting) == orSuccess; ++i) {
      if (std::string_view(setting.name) == "OPENREG_LAUNCH_BLOCKING")
        return std::string_view(setting.value) == "1";
    }
    return false;
  }();
  return block;
}

}  // namespace

void launchTask(std::unique_ptr<Task> kernel, orStream_t stream, c10::ArrayRef<orAccess> accesses,
                unsigned flags) {
  const c10::DeviceIndex device = kernel->device.index();
  int queued = 0;
  const orError_t error = launchOnLane(stream, kernel->name, &runTask, &dropTask, kernel.get(),
                                       accesses, flags, &queued);
  if (queued) (void)kernel.release();
  if (C10_UNLIKELY(error == orErrorInvalidResourceHandle)) {
    getCurrentOpenRegStream(device).stream();  // says which
  }
  if (C10_UNLIKELY(launchesBlock()))
    return checkSynchronized(error, {__func__, __FILE__, __LINE__});
  OPENREG_CHECK(error);
}

void keepFailure(const char *name, c10::DeviceIndex device, std::exception_ptr exception) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  auto &kept = f.byDevice.at(static_cast<size_t>(device));
  if (kept.size() < kMostFailures) kept.push_back({name, std::move(exception)});
}

void forgetFailures(c10::DeviceIndex device) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  f.byDevice.at(static_cast<size_t>(device)).clear();
}

}  // namespace torch_openreg
