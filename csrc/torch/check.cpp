#include "check.h"

#include <string>

#include "kernel_failures.h"

namespace torch_openreg {

void throwError(orError_t error, c10::SourceLocation location) {
  // orErrorNotReady leaves nothing behind: the message and the failure that are there are an earlier call's.
  const bool isNoted = error != orErrorNotReady;
  if (isNoted) throwFailure();
  const char *detail = isNoted ? orGetLastErrorMessage() : nullptr;
  if (detail == nullptr || *detail == '\0') detail = orGetErrorString(error);
  std::string text = std::string(orGetErrorName(error)) + ": " + detail;
  orGetLastError();  // what is raised is not left behind as the thread's last error
  if (error == orErrorMemoryAllocation) throw c10::OutOfMemoryError(location, std::move(text));
  if (error == orErrorNotSupported) throw c10::NotImplementedError(location, std::move(text));
  if (error == orErrorDeviceLost) throw c10::AcceleratorError(location, error, std::move(text));
  throw c10::Error(location, std::move(text));
}

}  // namespace torch_openreg
