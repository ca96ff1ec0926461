#include "device.h"

#include <array>
#include <atomic>

namespace torch_openreg {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

[[noreturn]] C10_NOINLINE void throwOutOfRange(int64_t index, int count) {
  TORCH_CHECK(count > 0, deviceName(), " device index ", index, " is out of range: there is no ",
              deviceName(), " device (see OPENREG_DEVICE_COUNT)");
  TORCH_CHECK(false, deviceName(), " device index ", index,
              " is out of range: it must be from 0 to ", count - 1, ", there ",
              count == 1 ? "is 1 device" : "are ",
              count == 1 ? std::string() : std::to_string(count) + " devices");
}

}  // namespace

std::string deviceName() { return c10::get_privateuse1_backend(); }

std::string aDevice() {
  const std::string name = deviceName();
  return (name.starts_with('o') ? "an " : "a ") + name + " device";
}

c10::DeviceIndex checkedDeviceCount() {
  // The number of devices never changes once they are made, and the core makes them under a lock.
  static std::atomic<int> known{-1};
  int count = known.load(std::memory_order_relaxed);
  if (C10_LIKELY(count >= 0)) return static_cast<c10::DeviceIndex>(count);
  OPENREG_CHECK(orGetDeviceCount(&count));
  known.store(count, std::memory_order_relaxed);
  return static_cast<c10::DeviceIndex>(count);
}

c10::DeviceIndex deviceCount() noexcept {
  int count = 0;
  if (orGetDeviceCount(&count) == orSuccess) return static_cast<c10::DeviceIndex>(count);
  orGetLastError();
  return 0;
}

c10::DeviceIndex checkIndex(int64_t index) {
  const int count = checkedDeviceCount();
  if (C10_UNLIKELY(index < 0 || index >= count)) throwOutOfRange(index, count);
  return static_cast<c10::DeviceIndex>(index);
}

c10::DeviceIndex checkDevice(c10::Device device) {
  TORCH_CHECK(device.type() == kType, "expected ", aDevice(), ", got ", device);
  return checkIndex(device.index());
}

c10::DeviceIndex indexOrCurrent(int64_t index) {
  return index == -1 ? currentDevice() : checkIndex(index);
}

c10::DeviceIndex currentDevice() {
  int index = 0;
  OPENREG_CHECK(orGetDevice(&index));
  return static_cast<c10::DeviceIndex>(index);
}

void setDevice(c10::DeviceIndex index) {
  checkIndex(index);
  OPENREG_CHECK(orSetDevice(index));
}

c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) {
  checkIndex(index);
  const c10::DeviceIndex previous = currentDevice();
  if (previous != index) OPENREG_CHECK(orSetDevice(index));
  return previous;
}

bool canMap(c10::DeviceIndex index) {
  // 0: not asked yet
  static std::array<std::atomic<char>, OPENREG_MAX_DEVICES> known{};
  std::atomic<char> &entry = known.at(static_cast<size_t>(index));
  char answer = entry.load(std::memory_order_relaxed);
  if (answer == 0) {
    auto properties = sized<orDeviceProperties>();
    OPENREG_CHECK(orGetDeviceProperties(&properties, index));
    answer = properties.can_map ? 'y' : 'n';
    entry.store(answer, std::memory_order_relaxed);
  }
  return answer == 'y';
}

void initialize() {
  orStream_t stream = 0;
  OPENREG_CHECK(orStreamGetDefault(&stream, currentDevice()));
}

}  // namespace torch_openreg
