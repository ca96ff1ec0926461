/*
 * Registers PyTorch's hooks: what generic code asks of an accelerator without a device guard.
 */
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>

#include "allocator.h"
#include "autograd.h"
#include "device.h"
#include "generator.h"
#include "gil.h"
#include "host_allocator.h"
#include "module.h"
#include "sanitizer.h"
#include "stream.h"

namespace torch_openreg {

namespace {

struct OpenRegHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return torch_openreg::deviceCount() > 0; }
  /* Uses the current device for the first time. */
  void init() const override { initialize(); }
  /* True only after the first use of the device; this call does not use it. */
  bool hasPrimaryContext(c10::DeviceIndex device_index) const override {
    if (orDeviceIsActive(checkIndex(device_index)) == 0) return false;
    // The autograd engine asks this at the start of each backward().
    WithoutGil unlocked;
    startAutogradDeviceThreads();
    return true;
  }

  c10::DeviceIndex deviceCount() const override { return torch_openreg::deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  /* Negative: no-op, as torch.accelerator documents. */
  void setCurrentDevice(c10::DeviceIndex device) const override {
    if (device >= 0) setDevice(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return torch_openreg::exchangeDevice(device);
  }
  /* Negative: no-op, and the current device is returned. */
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? currentDevice() : torch_openreg::exchangeDevice(device);
  }

  bool isPinnedPtr(const void *data) const override { return isPinned(data); }
  c10::Allocator *getPinnedMemoryAllocator() const override {
    return torch_openreg::getPinnedMemoryAllocator();
  }
  /* For device memory, accepts any interior pointer. */
  c10::Device getDeviceFromPtr(void *data) const override {
    auto attributes = sized<orPointerAttributes>();
    OPENREG_CHECK(orPointerGetAttributes(&attributes, data));
    TORCH_CHECK(attributes.type == orMemoryTypeDevice, "the pointer ", data, " is not memory of ",
                aDevice());
    return deviceAt(static_cast<c10::DeviceIndex>(attributes.device));
  }

  const at::Generator &getDefaultGenerator(c10::DeviceIndex device_index = -1) const override {
    return torch_openreg::getDefaultGenerator(device_index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device_index = -1) const override {
    return createGenerator(device_index);
  }

  /* Keeps the first min(old, new) bytes; ordered on the current stream of the storage's device. */
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t newsize) const override {
    c10::StorageImpl *impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable() && impl->allocator() != nullptr, "this ", deviceName(),
                " storage of ", impl->nbytes(), " bytes cannot be resized to ", newsize);
    DeviceSwitch device(checkDevice(storage.device()));
    c10::DataPtr fresh = impl->allocator()->allocate(newsize);
    const size_t kept = std::min(impl->nbytes(), newsize);
    if (kept > 0) {
      const OpenRegStream stream = getCurrentOpenRegStream();
      SanitizedAs name("aten::resize_");
      OPENREG_CHECK(orMemcpyAsync(fresh.get(), storage.data(), kept, orMemcpyDeviceToDevice,
                                  stream.stream()));
      // The old block returns to the stream that it was allocated on, which may be another one.
      recordStream(storage.data_ptr(), stream);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(newsize);
  }
};

}  // namespace

void registerHooks() {
  if (!at::isPrivateUse1HooksRegistered())
    at::RegisterPrivateUse1HooksInterface(&leaked<OpenRegHooks>());
}

}  // namespace torch_openreg
