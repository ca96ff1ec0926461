/*
 * `failures` is by device. Its mutex is a leaf; nothing is thrown under it.
 */
#include "kernel_failures.h"

#include <c10/util/Exception.h>

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"

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

}  // namespace

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
