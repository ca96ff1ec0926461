#include "hooks.h"

#include <algorithm>

#include "allocator.h"
#include "autograd.h"
#include "device.h"
#include "generator.h"
#include "gil.h"
#include "host_allocator.h"
#include "sanitizer.h"
#include "stream.h"

namespace torch_openreg {

bool OpenRegHooks::isAvailable() const { return torch_openreg::deviceCount() > 0; }

void OpenRegHooks::init() const { initialize(); }

bool OpenRegHooks::hasPrimaryContext(c10::DeviceIndex device_index) const {
  if (orDeviceIsActive(checkIndex(device_index)) == 0) return false;
  // The autograd engine asks this at the start of each backward().
  WithoutGil unlocked;
  startAutogradDeviceThreads();
  return true;
}

c10::DeviceIndex OpenRegHooks::deviceCount() const { return torch_openreg::deviceCount(); }

c10::DeviceIndex OpenRegHooks::getCurrentDevice() const { return currentDevice(); }

void OpenRegHooks::setCurrentDevice(c10::DeviceIndex device) const {
  if (device >= 0) setDevice(device);
}

c10::DeviceIndex OpenRegHooks::exchangeDevice(c10::DeviceIndex device) const {
  return torch_openreg::exchangeDevice(device);
}

c10::DeviceIndex OpenRegHooks::maybeExchangeDevice(c10::DeviceIndex device) const {
  return device < 0 ? currentDevice() : torch_openreg::exchangeDevice(device);
}

bool OpenRegHooks::isPinnedPtr(const void *data) const { return isPinned(data); }

c10::Allocator *OpenRegHooks::getPinnedMemoryAllocator() const {
  return torch_openreg::getPinnedMemoryAllocator();
}

c10::Device OpenRegHooks::getDeviceFromPtr(void *data) const {
  orPointerAttributes attributes{};
  OPENREG_CHECK(orPointerGetAttributes(&attributes, data));
  TORCH_CHECK(attributes.type == orMemoryTypeDevice, "the pointer ", data,
              " is not memory of an openreg device");
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(attributes.device));
}

const at::Generator &OpenRegHooks::getDefaultGenerator(c10::DeviceIndex device_index) const {
  return torch_openreg::getDefaultGenerator(device_index);
}

at::Generator OpenRegHooks::getNewGenerator(c10::DeviceIndex device_index) const {
  return createGenerator(device_index);
}

void OpenRegHooks::resizePrivateUse1Bytes(const c10::Storage &storage, size_t newsize) const {
  c10::StorageImpl *impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable() && impl->allocator() != nullptr, "this openreg storage of ",
              impl->nbytes(), " bytes cannot be resized to ", newsize);
  DeviceSwitch device(checkDevice(storage.device()));
  c10::DataPtr fresh = impl->allocator()->allocate(newsize);
  const size_t kept = std::min(impl->nbytes(), newsize);
  if (kept > 0) {
    const OpenRegStream stream = getCurrentOpenRegStream();
    SanitizedAs name("aten::resize_");
    OPENREG_CHECK(
        orMemcpyAsync(fresh.get(), storage.data(), kept, orMemcpyDeviceToDevice, stream.stream()));
    // The old block goes back to the stream that it was allocated on, which may be another one.
    recordStream(storage.data_ptr(), stream);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(newsize);
}

void registerHooks() {
  static auto *hooks = new OpenRegHooks();
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace torch_openreg
