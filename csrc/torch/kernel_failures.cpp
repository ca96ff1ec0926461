/*
 * `failures` is by device. Its mutex is a leaf; nothing is thrown under it.
 */
#include "kernel_failures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <typeinfo>
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
constexpr size_t kMostOfName = 95;  // orFailure's

/* What the core reports: "aten::embedding on openreg:0 failed: index out of range in self (and 2 more failed after it)". */
struct Report {
  std::string name, text, more;
  size_t device = OPENREG_MAX_DEVICES, others = 0;

  explicit Report(std::string report) {
    const size_t end = report.rfind(" (and ");
    if (end != std::string::npos && report.ends_with(" more failed after it)") &&
        std::sscanf(&report[end], " (and %zu", &others) == 1) {
      more = report.substr(end);
      report.resize(end);
    }
    const size_t failed = report.find(" failed: "), on = report.rfind(" on openreg:", failed);
    if (failed == std::string::npos || on == std::string::npos) return;
    name = report.substr(0, on);
    device = std::stoul(report.substr(on + std::strlen(" on openreg:")));
    text = report.substr(failed + std::strlen(" failed: "));
  }

  /* The core keeps the beginning of a name and of a text. */
  bool isOf(const Failure &failure) const {
    return failure.name.compare(0, kMostOfName, name) == 0 &&
           (failure.text.empty() || failure.text.starts_with(text));
  }
};

/* As many as the core has counted beside it are reported with it, and never again: the oldest, as a kernel's is kept before
 * the core counts it. */
std::exception_ptr takeFailure(const Report &report) {
  if (report.device >= OPENREG_MAX_DEVICES) return nullptr;
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  std::vector<Failure> &kept = f.byDevice[report.device];
  std::exception_ptr exception;
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const Failure &failure) { return report.isOf(failure); });
  if (found != kept.end()) {
    exception = std::move(found->exception);
    kept.erase(found);
  }
  kept.erase(kept.begin(), kept.begin() + std::min(report.others, kept.size()));
  return exception;
}

}  // namespace

void throwFailure(const std::string &text) {
  const Report report(text);
  const std::exception_ptr exception = takeFailure(report);
  if (!exception) return;
  orGetLastError();
  const std::string context = "raised by " + report.name +
                              " on openreg:" + std::to_string(report.device) + ", queued earlier" +
                              report.more;
  try {
    std::rethrow_exception(exception);
  } catch (c10::DistBackendError &) {
    throw;  // a collective's, which names where it comes from itself
  } catch (c10::Error &error) {
    error.add_context(context);
    throw;
  } catch (const std::runtime_error &error) {
    if (typeid(error) != typeid(std::runtime_error)) throw;
    // A compiled kernel's.
    throw c10::Error({__func__, __FILE__, __LINE__}, error.what() + (" (" + context + ")"));
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
