/*
 * PyTorch's device guard: torch.accelerator, torch.Stream, torch.Event and every operator use it to
 * reach devices, streams and events. Each device argument is checked to be an openreg device in
 * range. A method that needs another current device switches and restores.
 */
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "check.h"

namespace torch_openreg {

struct OPENREG_EXPORT OpenRegGuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override { return static_type; }

  // Devices.
  c10::Device exchangeDevice(c10::Device device) const override;
  c10::Device getDevice() const override;
  /* A negative index is a no-op, as torch.accelerator.set_device_index documents. */
  void setDevice(c10::Device device) const override;
  void uncheckedSetDevice(c10::Device device) const noexcept override;
  c10::DeviceIndex deviceCount() const noexcept override;
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override;
  void synchronizeDevice(const c10::DeviceIndex device_index) const override;

  // Streams. An index of -1 is the current device where a stream is made, and an error elsewhere.
  c10::Stream getStream(c10::Device device) const override;
  c10::Stream getDefaultStream(c10::Device device) const override;
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool isHighPriority) const override;
  c10::Stream getNewStream(c10::Device device, int priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  void *getStreamNativeHandle(const c10::Stream stream) const override;
  bool queryStream(const c10::Stream &stream) const override;
  void synchronizeStream(const c10::Stream &stream) const override;
  bool isStreamCapturing(const c10::Stream &stream) const override;
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override;

  // Events.
  void record(void **event, const c10::Stream &stream, const c10::DeviceIndex device_index,
              const c10::EventFlag flag) const override;
  void block(void *event, const c10::Stream &stream) const override;
  bool queryEvent(void *event) const override;
  void synchronizeEvent(void *event) const override;
  void destroyEvent(void *event, const c10::DeviceIndex device_index) const noexcept override;
  double elapsedTime(void *start, void *end, const c10::DeviceIndex device_index) const override;
};

}  // namespace torch_openreg
