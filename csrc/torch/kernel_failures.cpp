/*
 * `failures` is by device. Its mutex is a leaf; nothing is thrown under it.
 */
#include "kernel_failures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"

namespace torch_openreg {

namespace {

struct Failure {
  std::string name, text;
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

/* What the core reports: "aten::embedding on openreg:0 failed: index out of range in self (and 2 more failed after it)". */
struct Report {
  std::string name, text, more;
  size_t device = OPENREG_MAX_DEVICES;

  explicit Report(std::string report) {
    if (report.ends_with(" more failed after it)")) {
      more = report.substr(report.rfind(" (and "));
      report.resize(report.size() - more.size());
    }
    const size_t failed = report.find(" failed: "), on = report.rfind(" on openreg:", failed);
    if (failed == std::string::npos || on == std::string::npos) return;
    name = report.substr(0, on);
    device = std::stoul(report.substr(on + std::strlen(" on openreg:")));
    text = report.substr(failed + std::strlen(" failed: "));
  }

  /* The core keeps the beginning of a text. */
  bool isOf(const Failure &failure) const {
    return failure.name == name && (failure.text.empty() || failure.text.starts_with(text));
  }
};

/* Those that the core has counted beside it are reported with it, and never again. */
std::exception_ptr takeFailure(const Report &report) {
  if (report.device >= OPENREG_MAX_DEVICES) return nullptr;
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  const std::vector<Failure> kept = std::move(f.byDevice[report.device]);
  f.byDevice[report.device].clear();
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const Failure &failure) { return report.isOf(failure); });
  return found == kept.end() ? nullptr : found->exception;
}

}  // namespace

void throwFailure(const std::string &text) {
  const Report report(text);
  const std::exception_ptr exception = takeFailure(report);
  if (!exception) return;
  orGetLastError();
  try {
    std::rethrow_exception(exception);
  } catch (c10::DistBackendError &) {
    throw;  // a collective's, which names where it comes from itself
  } catch (c10::Error &error) {
    error.add_context("raised by " + text.substr(0, text.find(" failed: ")) + ", queued earlier" +
                      report.more);
    throw;
  }
}

void keepFailure(const char *name, c10::DeviceIndex device, std::exception_ptr exception,
                 std::string text) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  auto &kept = f.byDevice.at(static_cast<size_t>(device));
  if (kept.size() < kMostFailures) kept.push_back({name, std::move(text), std::move(exception)});
}

void forgetFailures(c10::DeviceIndex device) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  f.byDevice.at(static_cast<size_t>(device)).clear();
}

}  // namespace torch_openreg
