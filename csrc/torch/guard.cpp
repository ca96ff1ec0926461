#include "guard.h"

#include "allocator.h"
#include "autograd.h"
#include "backward_caller.h"
#include "device.h"
#include "event.h"
#include "graph.h"
#include "stream.h"
#include "sync_debug.h"
#include "warnings.h"

namespace torch_openreg {

namespace {

/* A device without an index is the current one. */
c10::DeviceIndex indexOf(c10::Device device) {
  TORCH_CHECK(device.type() == OpenRegGuardImpl::static_type, "expected ", aDevice(), ", got ",
              device);
  return indexOrCurrent(device.index());
}

/* PYTORCH_DEFAULT takes no time, BACKEND_DEFAULT does. */
unsigned eventFlags(c10::EventFlag flag) {
  if (flag == c10::EventFlag::PYTORCH_DEFAULT) return orEventDisableTiming;
  TORCH_CHECK(flag == c10::EventFlag::BACKEND_DEFAULT, deviceName(),
              " events take the flag PYTORCH_DEFAULT or BACKEND_DEFAULT, got ",
              static_cast<int>(flag));
  return orEventDefault;
}

}  // namespace

c10::Device OpenRegGuardImpl::exchangeDevice(c10::Device device) const {
  return deviceAt(torch_openreg::exchangeDevice(indexOf(device)));
}

c10::Device OpenRegGuardImpl::getDevice() const { return deviceAt(currentDevice()); }

void OpenRegGuardImpl::setDevice(c10::Device device) const {
  torch_openreg::setDevice(indexOf(device));
}

void OpenRegGuardImpl::uncheckedSetDevice(c10::Device device) const noexcept {
  if (device.index() < 0) return;
  if (orSetDevice(device.index()) != orSuccess) orGetLastError();
}

c10::DeviceIndex OpenRegGuardImpl::deviceCount() const noexcept {
  return hidesDevicesFromAutograd() ? 0 : torch_openreg::deviceCount();
}

c10::DeviceCapability OpenRegGuardImpl::getDeviceCapability(c10::Device device) const {
  indexOf(device);
  return c10::DeviceCapability();  // every dtype, as on the CPU that computes
}

void OpenRegGuardImpl::synchronizeDevice(const c10::DeviceIndex device_index) const {
  DeviceSwitch device(indexOrCurrent(device_index));
  noteSynchronization("torch.accelerator.synchronize", currentStreamHandle(currentDevice()));
  OPENREG_CHECK_SYNCHRONIZED(orDeviceSynchronize());
}

c10::Stream OpenRegGuardImpl::getStream(c10::Device device) const {
  return getCurrentOpenRegStream(indexOf(device));
}

c10::Stream OpenRegGuardImpl::getDefaultStream(c10::Device device) const {
  return getDefaultOpenRegStream(indexOf(device));
}

c10::Stream OpenRegGuardImpl::getStreamFromGlobalPool(c10::Device device,
                                                      bool isHighPriority) const {
  return getStreamFromPool(isHighPriority, indexOf(device));
}

c10::Stream OpenRegGuardImpl::getNewStream(c10::Device device, int priority) const {
  return getStreamFromPool(priority, indexOf(device));
}

/* Autograd calls this on its own thread before each node with a stream. */
c10::Stream OpenRegGuardImpl::exchangeStream(c10::Stream stream) const {
  takeOverFromBackwardCaller();
  const OpenRegStream next(stream);
  const c10::Stream previous = getCurrentOpenRegStream(next.device_index());
  setCurrentOpenRegStream(next);
  return previous;
}

void *OpenRegGuardImpl::getStreamNativeHandle(const c10::Stream stream) const {
  return reinterpret_cast<void *>(static_cast<uintptr_t>(OpenRegStream(stream).stream()));
}

bool OpenRegGuardImpl::queryStream(const c10::Stream &stream) const {
  return OpenRegStream(stream).query();
}

void OpenRegGuardImpl::synchronizeStream(const c10::Stream &stream) const {
  OpenRegStream(stream).synchronize();
}

bool OpenRegGuardImpl::isStreamCapturing(const c10::Stream &stream) const {
  return torch_openreg::isCapturing(OpenRegStream(stream).stream());
}

void OpenRegGuardImpl::recordDataPtrOnStream(const c10::DataPtr &data,
                                             const c10::Stream &stream) const {
  recordStream(data, stream);
}

void OpenRegGuardImpl::record(void **event, const c10::Stream &stream,
                              const c10::DeviceIndex device_index,
                              const c10::EventFlag flag) const {
  const OpenRegStream target(stream);
  TORCH_CHECK(device_index == -1 || device_index == target.device_index(), "the event belongs to ",
              deviceAt(device_index), " and cannot be recorded on a stream of ", target.device());
  const orStream_t handle = target.stream();
  if (*event != nullptr) {
    OPENREG_CHECK(orEventRecord(eventHandle(*event), handle));
    return;
  }
  OwnedEvent fresh(target.device_index(), eventFlags(flag));
  OPENREG_CHECK(orEventRecord(fresh.get(), handle));
  *event = eventPointer(fresh.release());
}

void OpenRegGuardImpl::block(void *event, const c10::Stream &stream) const {
  const orStream_t handle = OpenRegStream(stream).stream();
  if (event != nullptr) OPENREG_CHECK(orStreamWaitEvent(handle, eventHandle(event)));
}

bool OpenRegGuardImpl::queryEvent(void *event) const {
  return event == nullptr || torch_openreg::queryEvent(eventHandle(event));
}

void OpenRegGuardImpl::synchronizeEvent(void *event) const {
  if (event == nullptr) return;
  noteSynchronization("Event.synchronize", OR_STREAM_DEFAULT);  // the core detects a captured event
  OPENREG_CHECK_SYNCHRONIZED(orEventSynchronize(eventHandle(event)));
}

void OpenRegGuardImpl::destroyEvent(void *event, const c10::DeviceIndex) const noexcept {
  if (event != nullptr && orEventDestroy(eventHandle(event)) != orSuccess) orGetLastError();
}

double OpenRegGuardImpl::elapsedTime(void *start, void *end, const c10::DeviceIndex) const {
  TORCH_CHECK(start != nullptr, "the start event has not been recorded");
  TORCH_CHECK(end != nullptr, "the end event has not been recorded");
  float milliseconds = 0;
  OPENREG_CHECK(orEventElapsedTime(&milliseconds, eventHandle(start), eventHandle(end)));
  return milliseconds;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, OpenRegGuardImpl)

}  // namespace torch_openreg
