/*
 * Devices: their number, the current one, and the check that every entry point makes of an index.
 */
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "check.h"

namespace torch_openreg {

/* Never throws. Returns 0 when the devices cannot be made (a bad setting, a plugin that fails). */
OPENREG_EXPORT c10::DeviceIndex deviceCount() noexcept;
/* Throws the core's error where deviceCount() returns 0 because of one. */
OPENREG_EXPORT c10::DeviceIndex checkedDeviceCount();

/* Returns the index, or throws an error that names it and the range. Negative ones are errors. */
OPENREG_EXPORT c10::DeviceIndex checkIndex(int64_t index);
/* The same for a device, which has to be an openreg device. */
OPENREG_EXPORT c10::DeviceIndex checkDevice(c10::Device device);
/* The device's name, as the program has it: "cuda" under as_cuda(). */
OPENREG_EXPORT std::string deviceName();
/* "an openreg device" or "a cuda device". */
OPENREG_EXPORT std::string aDevice();
/* A device that is written as "openreg:1". */
inline c10::Device deviceAt(c10::DeviceIndex index) {
  return {c10::DeviceType::PrivateUse1, index};
}

/* -1 is the current device; any other index is checked. */
OPENREG_EXPORT c10::DeviceIndex indexOrCurrent(int64_t index);

/* The calling thread's current device. */
OPENREG_EXPORT c10::DeviceIndex currentDevice();
OPENREG_EXPORT void setDevice(c10::DeviceIndex index);
/* Makes `index` current and returns the device that was current before. */
OPENREG_EXPORT c10::DeviceIndex exchangeDevice(c10::DeviceIndex index);

/* Uses the current device for the first time, at the caller's request: workers may start from here
 * on. */
OPENREG_EXPORT void initialize();

/* Whether kernels can reach the device's memory (orMapForKernel); else everything is copied. */
bool canMap(c10::DeviceIndex index);

/* Makes `index` current until the end of the scope, exceptions included. */
class DeviceSwitch : Uncopyable {
 public:
  explicit DeviceSwitch(c10::DeviceIndex index) : previous_(exchangeDevice(index)), index_(index) {}
  ~DeviceSwitch() {
    if (previous_ != index_) orSetDevice(previous_);
  }

 private:
  c10::DeviceIndex previous_;
  c10::DeviceIndex index_;
};

}  // namespace torch_openreg
