#include "sync_debug.h"

#include <pybind11/pybind11.h>

#include "device.h"
#include "gil.h"
#include "module.h"
#include "warnings.h"

namespace torch_openreg {

std::atomic<SyncDebugMode> syncDebugMode{SyncDebugMode::Default};

thread_local int SyncNoted::depth_ = 0;

namespace {

/* Above 0 while this thread waits for a tool and not for the program: see internal_waits(). */
thread_local int internalWaits = 0;

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  m.def("_internal_waits", [](bool begin) { internalWaits += begin ? 1 : -1; });
});

}  // namespace

void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream) {
  if (SyncNoted::depth_ != 0 || !interpreterRuns()) return;
  refuseInCapture(operation, stream);
  if (internalWaits != 0) return;
  if (syncDebugMode.load(std::memory_order_relaxed) == SyncDebugMode::Default) return;
  const std::string text = "called a synchronizing " + deviceName() + " operation: " + operation;
  TORCH_CHECK(syncDebugMode.load(std::memory_order_relaxed) != SyncDebugMode::Error, text);
  issueWarning(text);
}

}  // namespace torch_openreg
