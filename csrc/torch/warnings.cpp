/*
 * Keeps the warnings of kernels until a thread has waited for the device.
 *
 * `mutex` guards `warnings` and is a leaf: no warning is issued under it. `any` is read without it,
 * so that a call that has nothing to issue takes no lock. A thread that has waited for a task sees
 * the warnings of that task.
 */
#include "warnings.h"

#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <mutex>

#include "gil.h"

namespace torch_openreg {

namespace {

constexpr size_t kMost = 100;

struct Kept {
  std::mutex mutex;
  std::vector<c10::Warning> warnings;
  std::atomic<bool> any{false};
};

Kept &kept() { return leaked<Kept>(); }

std::vector<c10::Warning> takeKept() {
  Kept &k = kept();
  std::lock_guard<std::mutex> lock(k.mutex);
  k.any.store(false, std::memory_order_relaxed);
  return std::move(k.warnings);
}

}  // namespace

void keepWarnings(std::vector<c10::Warning> &warnings) {
  Kept &k = kept();
  std::lock_guard<std::mutex> lock(k.mutex);
  for (c10::Warning &warning : warnings) {
    if (k.warnings.size() < kMost) k.warnings.push_back(std::move(warning));
  }
  k.any.store(true, std::memory_order_release);
}

void issueWarning(const std::string &text) {
  // Some of PyTorch's bindings have no handler of their own and would print to stderr.
  torch::PyWarningHandler handler;
  c10::warn(c10::Warning(c10::UserWarning(), {nullptr, nullptr, 0}, text, false));
}

void issueKeptWarnings(bool besideError) {
  if (C10_LIKELY(!kept().any.load(std::memory_order_acquire))) return;
  if (!interpreterRuns()) return;
  torch::PyWarningHandler handler;  // see issueWarning
  if (besideError) handler.set_in_exception();
  for (const c10::Warning &warning : takeKept()) c10::warn(warning);
}

void checkSynchronized(orError_t error, c10::SourceLocation location) {
  try {
    check(error, location);
  } catch (...) {
    issueKeptWarnings(/*besideError=*/true);
    throw;
  }
  issueKeptWarnings();
  if (sanitizerActive()) raiseRaces();
}

}  // namespace torch_openreg
