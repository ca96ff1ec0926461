/*
 * Stateless: every block, statistic and lock belongs to the core. A DataPtr's context is the block's
 * own address, so that the raw interface works, and its deleter may run anywhere: with the GIL, at
 * exit, on a lane, in a forked child.
 */
#include "allocator.h"

#include <cstdint>

#include "device.h"
#include "stream.h"

namespace torch_openreg {

namespace {

void deleteBlock(void *block) {
  // A child inherits the tensors of its parent but not the memory.
  if (block == nullptr || orInForkedChild()) return;
  orCacheFree(block);  // a deleter has nobody to report an error to
}

using c10::CachingAllocator::format_size;

[[noreturn]] void throwOutOfMemory(size_t bytes, c10::DeviceIndex device) {
  orGetLastError();  // what is raised is not left behind as the thread's last error
  size_t free = 0, capacity = 0;
  orCacheStats stats{};
  {
    DeviceSwitch current(device);
    OPENREG_CHECK(orMemGetInfo(&free, &capacity));
  }
  OPENREG_CHECK(orCacheGetStats(&stats, device));
  TORCH_CHECK_WITH(OutOfMemoryError, false, "openreg out of memory. Tried to allocate ",
                   format_size(bytes), " on openreg:", static_cast<int>(device), ": ",
                   format_size(free), " is free of a capacity of ", format_size(capacity), ", ",
                   format_size(stats.allocated_bytes[0].current), " is allocated by PyTorch and ",
                   format_size(stats.reserved_bytes[0].current),
                   " is reserved by PyTorch (allocated blocks included).");
}

void copyStat(c10::CachingAllocator::StatArray &to, const orCacheStat (&from)[3]) {
  for (size_t pool = 0; pool < to.size(); ++pool) {
    to[pool].current = from[pool].current;
    to[pool].peak = from[pool].peak;
    to[pool].allocated = from[pool].allocated;
    to[pool].freed = from[pool].freed;
  }
}

}  // namespace

void *allocateBlock(size_t bytes, orStream_t stream, c10::DeviceIndex device) {
  TORCH_CHECK(bytes <= PTRDIFF_MAX, "cannot allocate ", static_cast<int64_t>(bytes),
              " bytes on openreg:", static_cast<int>(device), ": a size is 0 or more");
  void *block = nullptr;
  const orError_t error = orCacheMalloc(&block, bytes, stream);
  if (C10_UNLIKELY(error == orErrorMemoryAllocation)) throwOutOfMemory(bytes, device);
  OPENREG_CHECK(error);
  return block;
}

c10::DataPtr ownBlock(void *block, c10::DeviceIndex device) {
  return {block, block, &deleteBlock, c10::Device(c10::DeviceType::PrivateUse1, device)};
}

c10::DataPtr OpenRegAllocator::allocate(size_t bytes) {
  const c10::DeviceIndex device = currentDevice();
  void *block = nullptr;
  if (bytes != 0) block = allocateBlock(bytes, getCurrentOpenRegStream(device).stream(), device);
  return ownBlock(block, device);
}

c10::DeleterFnPtr OpenRegAllocator::raw_deleter() const { return &deleteBlock; }

void OpenRegAllocator::copy_data(void *dest, const void *src, std::size_t count) const {
  if (count == 0) return;
  orPointerAttributes owner{};
  OPENREG_CHECK(orPointerGetAttributes(&owner, dest));
  TORCH_CHECK(owner.type == orMemoryTypeDevice, "copy_data: ", dest, " is not openreg memory");
  DeviceSwitch current(static_cast<c10::DeviceIndex>(owner.device));
  OPENREG_CHECK(
      orMemcpyAsync(dest, src, count, orMemcpyDeviceToDevice, getCurrentOpenRegStream().stream()));
}

bool OpenRegAllocator::initialized() {
  for (c10::DeviceIndex device = 0; device < deviceCount(); ++device) {
    if (orDeviceIsActive(device)) return true;
  }
  return false;
}

void OpenRegAllocator::emptyCache(c10::MempoolId_t mempool_id) {
  TORCH_CHECK_NOT_IMPLEMENTED(mempool_id == c10::MempoolId_t(0, 0),
                              "openreg has no private memory pools yet");
  const c10::DeviceIndex count = checkedDeviceCount();
  for (c10::DeviceIndex device = 0; device < count; ++device) {
    if (orDeviceIsActive(device)) OPENREG_CHECK(orCacheEmpty(device));
  }
}

void OpenRegAllocator::recordStream(const c10::DataPtr &ptr, c10::Stream stream) {
  torch_openreg::recordStream(ptr, stream);
}

c10::CachingDeviceAllocator::DeviceStats OpenRegAllocator::getDeviceStats(c10::DeviceIndex device) {
  orCacheStats from{};
  OPENREG_CHECK(orCacheGetStats(&from, device));
  c10::CachingDeviceAllocator::DeviceStats to;
  copyStat(to.allocation, from.allocation);
  copyStat(to.segment, from.segment);
  copyStat(to.active, from.active);
  copyStat(to.inactive_split, from.inactive_split);
  copyStat(to.allocated_bytes, from.allocated_bytes);
  copyStat(to.reserved_bytes, from.reserved_bytes);
  copyStat(to.active_bytes, from.active_bytes);
  copyStat(to.inactive_split_bytes, from.inactive_split_bytes);
  copyStat(to.requested_bytes, from.requested_bytes);
  to.num_alloc_retries = from.alloc_retries;
  to.num_ooms = from.ooms;
  to.num_sync_all_streams = from.sync_all_streams;
  to.num_device_alloc = from.device_alloc;
  to.num_device_free = from.device_free;
  return to;
}

void OpenRegAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  OPENREG_CHECK(orCacheResetAccumulatedStats(device));
}

void OpenRegAllocator::resetPeakStats(c10::DeviceIndex device) {
  OPENREG_CHECK(orCacheResetPeakStats(device));
}

std::pair<size_t, size_t> OpenRegAllocator::getMemoryInfo(c10::DeviceIndex device) {
  DeviceSwitch current(device);
  size_t free = 0, capacity = 0;
  OPENREG_CHECK(orMemGetInfo(&free, &capacity));
  return {free, capacity};
}

OpenRegAllocator &deviceAllocator() {
  static auto *allocator = new OpenRegAllocator();
  return *allocator;
}

void recordStream(const c10::DataPtr &data, c10::Stream stream) {
  if (data.get() == nullptr) return;
  OPENREG_CHECK(orCacheRecordStream(data.get(), OpenRegStream(stream).stream()));
}

namespace {
[[maybe_unused]] const bool registered =
    (c10::SetAllocator(c10::DeviceType::PrivateUse1, &deviceAllocator()), true);
}

}  // namespace torch_openreg
