/*
 * Devices: how many, which is current, and the check of an index that every entry point makes.
 */
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "check.h"

namespace torch_openreg {

/* 0 when the devices cannot be made (a bad setting, a plugin that fails): never throws. */
OPENREG_EXPORT c10::DeviceIndex deviceCount() noexcept;
/* Throws the core's error where deviceCount() is 0 because of one. */
OPENREG_EXPORT c10::DeviceIndex checkedDeviceCount();

/* The index, or an error that names it and the range. A negative one is an error too. */
OPENREG_EXPORT c10::DeviceIndex checkIndex(int64_t index);
/* The same for a device, which has to be an openreg device. */
OPENREG_EXPORT c10::DeviceIndex checkDevice(c10::Device device);
/* The device's name, as the program has it: "cuda" under as_cuda(). */
OPENREG_EXPORT std::string deviceName();
/* "an openreg device", "a cuda device". */
OPENREG_EXPORT std::string aDevice();
/* Written as "openreg:1". */
inline c10::Device deviceAt(c10::DeviceIndex index) {
  return {c10::DeviceType::PrivateUse1, index};
}

/* -1 is the current device; any other index is checked. */
OPENREG_EXPORT c10::DeviceIndex indexOrCurrent(int64_t index);

/* Of the calling thread. */
OPENREG_EXPORT c10::DeviceIndex currentDevice();
OPENREG_EXPORT void setDevice(c10::DeviceIndex index);
/* Makes `index` current and returns what was current before. */
OPENREG_EXPORT c10::DeviceIndex exchangeDevice(c10::DeviceIndex index);

/* First use of the current device, for a caller that asks for it: workers may start from here on.
 */
OPENREG_EXPORT void initialize();

/* Whether kernels can reach the device's memory (orMapForKernel); else everything is copied. */
bool canMap(c10::DeviceIndex index);

/* Makes `index` current until the end of the scope, also when it is left by an exception. */
class DeviceSwitch {
 public:
  explicit DeviceSwitch(c10::DeviceIndex index) : previous_(exchangeDevice(index)), index_(index) {}
  ~DeviceSwitch() {
    if (previous_ != index_) orSetDevice(previous_);
  }
  DeviceSwitch(const DeviceSwitch &) = delete;
  DeviceSwitch &operator=(const DeviceSwitch &) = delete;

 private:
  c10::DeviceIndex previous_;
  c10::DeviceIndex index_;
};

}  // namespace torch_openreg
