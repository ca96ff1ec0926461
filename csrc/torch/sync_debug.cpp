#include "sync_debug.h"

#include "device.h"
#include "gil.h"
#include "warnings.h"

namespace torch_openreg {

std::atomic<SyncDebugMode> syncDebugMode{SyncDebugMode::Default};

thread_local int SyncNoted::depth_ = 0;

void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream) {
  if (SyncNoted::depth_ != 0 || !interpreterRuns()) return;
  refuseInCapture(operation, stream);
  if (syncDebugMode.load(std::memory_order_relaxed) == SyncDebugMode::Default) return;
  const std::string text = "called a synchronizing " + deviceName() + " operation: " + operation;
  TORCH_CHECK(syncDebugMode.load(std::memory_order_relaxed) != SyncDebugMode::Error, text);
  issueWarning(text);
}

}  // namespace torch_openreg
