#include "sync_debug.h"

#include <torch/csrc/Exceptions.h>

#include "gil.h"

namespace torch_openreg {

std::atomic<SyncDebugMode> syncDebugMode{SyncDebugMode::Default};

thread_local int SyncNoted::depth_ = 0;

void warnOrThrowOnSynchronization(const std::string &operation) {
  if (SyncNoted::depth_ != 0 || !interpreterRuns()) return;
  const std::string text = "called a synchronizing openreg operation: " + operation;
  TORCH_CHECK(syncDebugMode.load(std::memory_order_relaxed) != SyncDebugMode::Error, text);
  // Some of PyTorch's bindings have no handler of their own, and would print to stderr.
  torch::PyWarningHandler handler;
  c10::warn(c10::Warning(c10::UserWarning(), {nullptr, nullptr, 0}, text, false));
}

}  // namespace torch_openreg
