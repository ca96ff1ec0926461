#include "check.h"

#include <string>

#include "kernel_failures.h"

namespace torch_openreg {

void throwError(orError_t error, c10::SourceLocation location) {
  // orErrorNotReady leaves no message behind: the one that is there is about an earlier call.
  const char *detail = error == orErrorNotReady ? nullptr : orGetLastErrorMessage();
  if (detail == nullptr || *detail == '\0') detail = orGetErrorString(error);
  if (error == orErrorLaunchFailure) throwFailure(detail);
  std::string text = std::string(orGetErrorName(error)) + ": " + detail;
  orGetLastError();  // what is raised is not left behind as the thread's last error
  if (error == orErrorMemoryAllocation) throw c10::OutOfMemoryError(location, std::move(text));
  if (error == orErrorNotSupported) throw c10::NotImplementedError(location, std::move(text));
  if (error == orErrorDeviceLost) throw c10::AcceleratorError(location, error, std::move(text));
  throw c10::Error(location, std::move(text));
}

}  // namespace torch_openreg
