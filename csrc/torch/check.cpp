#include "check.h"

#include <openreg_package.h>

#include <cctype>
#include <string>

#include "device.h"
#include "kernel_failures.h"
#include "texts.h"

namespace torch_openreg {

namespace {

/* The core writes the device's own name; this puts the current one in its place. */
std::string withDeviceName(std::string text) {
  const std::string own = std::string(orDevicesName()) + ":", name = deviceName() + ":";
  if (name == own) return text;
  for (size_t at = text.find(own); at != std::string::npos; at = text.find(own, at + 1)) {
    const size_t after = at + own.size();
    if (after < text.size() && std::isdigit(static_cast<unsigned char>(text[after])))
      text.replace(at, own.size(), name);
  }
  return text;
}

}  // namespace

std::string outOfMemory() {
  return (deviceName() == "cuda" ? "CUDA" : deviceName()) + " out of memory";
}

void throwError(orError_t error, c10::SourceLocation location) {
  // orErrorNotReady records no message: the present message and failure are an earlier call's.
  const bool isNoted = error != orErrorNotReady;
  if (isNoted) throwFailure();
  const char *detail = isNoted ? orGetLastErrorMessage() : nullptr;
  if (detail == nullptr || *detail == '\0') detail = orGetErrorString(error);
  std::string text = withDeviceName(std::string(orGetErrorName(error)) + ": " + detail);
  orGetLastError();  // an error that is thrown must not stay as the thread's last error
  text = errorText(text);
  if (error == orErrorMemoryAllocation)
    throw c10::OutOfMemoryError(location, outOfMemory() + ". " + text);
  if (error == orErrorNotSupported) throw c10::NotImplementedError(location, std::move(text));
  if (error == orErrorDeviceLost) throw c10::AcceleratorError(location, error, std::move(text));
  throw c10::Error(location, std::move(text));
}

}  // namespace torch_openreg
