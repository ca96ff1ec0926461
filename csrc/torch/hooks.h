/*
 * PyTorch's hooks: what generic code asks of an accelerator outside of a device guard.
 */
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "check.h"

namespace torch_openreg {

struct OPENREG_EXPORT OpenRegHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override;
  /* First use of the current device. */
  void init() const override;
  /* True only after the first use of the device; asking is none. */
  bool hasPrimaryContext(c10::DeviceIndex device_index) const override;

  c10::DeviceIndex deviceCount() const override;
  c10::DeviceIndex getCurrentDevice() const override;
  /* Negative: no-op, as torch.accelerator documents. */
  void setCurrentDevice(c10::DeviceIndex device) const override;
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override;
  /* Negative: no-op, and the current device is returned. */
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override;

  bool isPinnedPtr(const void *data) const override;
  c10::Allocator *getPinnedMemoryAllocator() const override;
  /* Of device memory, any interior pointer. */
  c10::Device getDeviceFromPtr(void *data) const override;

  const at::Generator &getDefaultGenerator(c10::DeviceIndex device_index = -1) const override;
  at::Generator getNewGenerator(c10::DeviceIndex device_index = -1) const override;

  /* Keeps the first min(old, new) bytes; ordered on the current stream of the storage's device. */
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t newsize) const override;
};

/* Tells PyTorch of them, once. */
void registerHooks();

}  // namespace torch_openreg
