/*
 * Stateless: every block, statistic and lock belongs to the core. A DataPtr's context is the
 * block's own address, so that the raw interface works. Its deleter may run anywhere: with the GIL,
 * at exit, on a worker, in a forked child.
 */
#include "allocator.h"

#include <c10/core/AllocatorConfig.h>
#include <openreg_package.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "fork.h"
#include "memory_history.h"
#include "mempool.h"
#include "sanitizer.h"
#include "stream.h"
#include "sync_debug.h"
#include "texts.h"
#include "unwinding.h"

namespace torch_openreg {

namespace {

/* Reports a block that was made, or is about to be freed, to torch.profiler's memory profile. */
void reportBlock(void *block, bool made) {
  size_t bytes = 0;
  auto owner = sized<orPointerAttributes>();
  auto stats = sized<orCacheStats>();
  if (orCacheBlockSize(&bytes, block) != orSuccess ||
      orPointerGetAttributes(&owner, block) != orSuccess ||
      orCacheGetStats(&stats, owner.device) != orSuccess) {
    orGetLastError();
    return;
  }
  const auto size = static_cast<int64_t>(bytes);
  const int64_t allocated = stats.allocated_bytes[0].current - (made ? 0 : size);
  c10::reportMemoryUsageToProfiler(block, made ? size : -size, static_cast<size_t>(allocated),
                                   static_cast<size_t>(stats.reserved_bytes[0].current),
                                   deviceAt(static_cast<c10::DeviceIndex>(owner.device)));
}

void deleteBlock(void *block) {
  if (block == nullptr) return;
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) reportBlock(block, false);
  HistoryScope scope(HistoryScope::Free);
  std::optional<OwnWait> unjudged;
  if (sanitizerActive() && unwinds()) unjudged.emplace();
  // A deleter has no caller to report an error to: a forked child inherits its parent's tensors but
  // not the memory.
  if (C10_UNLIKELY(orCacheFree(block) != orSuccess)) orGetLastError();
}

using c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::format_size;

/* Passes PYTORCH_ALLOC_CONF's settings for device memory to the core. */
void applySettings() {
  orCacheOptions options{};
  options.size = sizeof(options);
  const size_t split = AcceleratorAllocatorConfig::max_split_size();
  options.max_split_size = split == SIZE_MAX ? 0 : split;
  options.max_non_split_rounding = AcceleratorAllocatorConfig::max_non_split_rounding_size();
  options.large_segment_size = AcceleratorAllocatorConfig::large_segment_size();
  options.garbage_collection_threshold = AcceleratorAllocatorConfig::garbage_collection_threshold();
  const auto &divisions = AcceleratorAllocatorConfig::roundup_power2_divisions();
  const size_t count = std::min(divisions.size(), std::size(options.roundup_power2_divisions));
  std::transform(divisions.begin(), divisions.begin() + static_cast<ptrdiff_t>(count),
                 options.roundup_power2_divisions,
                 [](size_t steps) { return static_cast<uint32_t>(steps); });
  OPENREG_CHECK(orCacheSetOptions(&options));
}

/* Called before the first block is allocated. Later changes call applySettings. */
void settingsAreApplied() {
  static const bool applied = [] {
    applySettings();
    return true;
  }();
  (void)applied;
}

struct Observers {
  std::mutex mutex;
  std::vector<OutOfMemoryObserver> all;
};

Observers &observers() { return leaked<Observers>(); }

/* Calls the observers without a lock: they may allocate, and attach others. */
void tellObservers(c10::DeviceIndex device, size_t bytes, double allowed, size_t free) {
  std::vector<OutOfMemoryObserver> all;
  {
    std::lock_guard<std::mutex> lock(observers().mutex);
    all = observers().all;
  }
  for (const OutOfMemoryObserver &observer : all)
    observer(device, static_cast<int64_t>(bytes), static_cast<int64_t>(allowed),
             static_cast<int64_t>(free));
}

orCacheStats statsOf(c10::DeviceIndex device) {
  auto stats = sized<orCacheStats>();
  OPENREG_CHECK(orCacheGetStats(&stats, device));
  return stats;
}

[[noreturn]] void throwOutOfMemory(size_t bytes, c10::DeviceIndex device) {
  orGetLastError();  // an error that is thrown must not stay as the thread's last error
  std::string injected = orGetLastErrorMessage();
  injected.erase(0, injected.find(" (injected fault"));
  if (!injected.empty()) injected.replace(0, 1, "\n  ");
  const auto [free, capacity] = deviceAllocator().getMemoryInfo(device);
  double fraction = 1;
  const orCacheStats stats = statsOf(device);
  OPENREG_CHECK(orCacheGetFraction(&fraction, device));
  c10::reportOutOfMemoryToProfiler(
      static_cast<int64_t>(bytes), static_cast<size_t>(stats.allocated_bytes[0].current),
      static_cast<size_t>(stats.reserved_bytes[0].current), deviceAt(device));
  const double limit = fraction * static_cast<double>(capacity);
  tellObservers(device, bytes, limit, free);
  std::string allowed;
  if (fraction < 1)
    allowed = " (" + format_size(static_cast<uint64_t>(limit)) + " allowed by the memory fraction)";
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, outOfMemory(), ". Tried to allocate ", format_size(bytes), " on ",
      deviceAt(device), ":\n  ", format_size(free), " is free of a capacity of ",
      format_size(capacity), allowed, ",\n  ", format_size(stats.allocated_bytes[0].current),
      " is allocated by PyTorch and ", format_size(stats.reserved_bytes[0].current),
      " is reserved by PyTorch (allocated blocks included).", injected, memoryText(device));
}

void copyStat(c10::CachingAllocator::Stat &to, const orCacheStat &from) {
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
}

void copyStat(c10::CachingAllocator::StatArray &to, const orCacheStat (&from)[3]) {
  for (size_t pool = 0; pool < to.size(); ++pool) copyStat(to[pool], from[pool]);
}

/* How often the cache has waited for all streams, because memory was short. */
int64_t waitsForMemory(c10::DeviceIndex device) { return statsOf(device).sync_all_streams; }

void noteWaitForMemory(void *block, size_t bytes, orStream_t stream, c10::DeviceIndex device) {
  c10::DataPtr owner = ownBlock(block, device);
  noteSynchronization(("an allocation of " + format_size(bytes) + " on " + deviceAt(device).str() +
                       " that had to wait for memory")
                          .c_str(),
                      stream);
  owner.release_context();
}

}  // namespace

void *allocateBlock(size_t bytes, orStream_t stream, c10::DeviceIndex device) {
  TORCH_CHECK(bytes <= PTRDIFF_MAX, "cannot allocate ", static_cast<int64_t>(bytes), " bytes on ",
              deviceAt(device), ": the size must be 0 or more");
  settingsAreApplied();
  HistoryScope scope(HistoryScope::Allocation);
  void *block = nullptr;
  // A kernel's own allocation while its caller waits is part of that wait.
  const bool noted = notesSynchronization() && !inKernel();
  const int64_t waits = noted ? waitsForMemory(device) : 0;
  const orMemPool_t pool = poolFor(device, stream);
  const orError_t error = orCacheMallocFromPool(&block, bytes, stream, pool);
  if (C10_LIKELY(error == orSuccess)) {
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) reportBlock(block, true);
    if (C10_UNLIKELY(noted) && waits != waitsForMemory(device))
      noteWaitForMemory(block, bytes, stream, device);
    return block;
  }
  if (error == orErrorMemoryAllocation) throwOutOfMemory(bytes, device);
  if (error == orErrorInvalidResourceHandle)
    getCurrentOpenRegStream(device).stream();  // throws an error that names the stream
  OPENREG_CHECK(error);
  return block;
}

void attachOutOfMemoryObserver(OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> lock(observers().mutex);
  observers().all.push_back(std::move(observer));
}

c10::DataPtr ownBlock(void *block, c10::DeviceIndex device) {
  return {block, block, &deleteBlock, deviceAt(device)};
}

c10::DataPtr allocateOn(c10::DeviceIndex device, size_t bytes) {
  void *block = nullptr;
  if (bytes != 0)
    block = allocateBlock(bytes, currentStreamHandle(device), device);
  else
    orCacheSetOrigin(nullptr);  // no block is made that would use it up
  return ownBlock(block, device);
}

namespace {

class OpenRegAllocator final : public c10::DeviceAllocator {
 public:
  /* On the current device, for work on its current stream. 0 bytes is a null pointer. */
  c10::DataPtr allocate(size_t bytes) override { return allocateOn(currentDevice(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &deleteBlock; }
  /* Ordered on the current stream of the destination's device. */
  void copy_data(void *dest, const void *src, std::size_t count) const override {
    if (count == 0) return;
    auto owner = sized<orPointerAttributes>();
    OPENREG_CHECK(orPointerGetAttributes(&owner, dest));
    TORCH_CHECK(owner.type == orMemoryTypeDevice, "copy_data: ", dest, " is not ", deviceName(),
                " memory");
    DeviceSwitch current(static_cast<c10::DeviceIndex>(owner.device));
    OPENREG_CHECK(orMemcpyAsync(dest, src, count, orMemcpyDeviceToDevice,
                                getCurrentOpenRegStream().stream()));
  }

  bool initialized() override {
    for (c10::DeviceIndex device = 0; device < deviceCount(); ++device) {
      if (orDeviceIsActive(device)) return true;
    }
    return false;
  }
  void emptyCache(c10::MempoolId_t mempool_id = {0, 0}) override {
    const c10::DeviceIndex count = checkedDeviceCount();
    if (notesSynchronization())
      warnOrThrowOnSynchronization(c10::str("torch.", orDevicesName(), ".empty_cache"),
                                   currentStreamHandle(currentDevice()));
    HistoryScope scope(HistoryScope::Allocation);
    if (mempool_id != c10::MempoolId_t(0, 0)) return emptyPool(mempool_id);
    for (c10::DeviceIndex device = 0; device < count; ++device) {
      if (orDeviceIsActive(device)) OPENREG_CHECK(orCacheEmpty(device));
    }
  }
  void recordStream(const c10::DataPtr &ptr, c10::Stream stream) override {
    torch_openreg::recordStream(ptr, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const orCacheStats from = statsOf(device);
    c10::CachingDeviceAllocator::DeviceStats to;
    copyStat(to.allocation, from.allocation);
    copyStat(to.segment, from.segment);
    copyStat(to.active, from.active);
    copyStat(to.inactive_split, from.inactive_split);
    copyStat(to.allocated_bytes, from.allocated_bytes);
    copyStat(to.reserved_bytes, from.reserved_bytes);
    for (const auto &[id, pool] : poolsOf(device)) {
      auto of = sized<orMemPoolStats>();
      if (orMemPoolGetStats(&of, pool) == orSuccess)
        copyStat(to.reserved_bytes_by_private_pools[id], of.reserved_bytes);
      else
        orGetLastError();  // another thread has released the pool meanwhile
    }
    copyStat(to.active_bytes, from.active_bytes);
    copyStat(to.inactive_split_bytes, from.inactive_split_bytes);
    copyStat(to.requested_bytes, from.requested_bytes);
    to.num_alloc_retries = from.alloc_retries;
    to.num_ooms = from.ooms;
    to.num_sync_all_streams = from.sync_all_streams;
    to.num_device_alloc = from.device_alloc;
    to.num_device_free = from.device_free;
    copyStat(to.oversize_allocations, from.oversize_allocations);
    copyStat(to.oversize_segments, from.oversize_segments);
    to.max_split_size = static_cast<int64_t>(AcceleratorAllocatorConfig::max_split_size());
    return to;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    OPENREG_CHECK(orCacheResetAccumulatedStats(device));
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    OPENREG_CHECK(orCacheResetPeakStats(device));
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    DeviceSwitch current(device);
    size_t free = 0, capacity = 0;
    OPENREG_CHECK(orMemGetInfo(&free, &capacity));
    return {free, capacity};
  }
};

}  // namespace

c10::DeviceAllocator &deviceAllocator() { return leaked<OpenRegAllocator>(); }

void recordStream(const c10::DataPtr &data, c10::Stream stream) {
  if (data.get() == nullptr) return;
  OPENREG_CHECK(orCacheRecordStream(data.get(), OpenRegStream(stream).stream()));
}

namespace {
[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &deviceAllocator());
  // PyTorch has already parsed the text, and this device adds no keys.
  AcceleratorAllocatorConfig::registerDeviceConfigParserHook(
      [](const std::string &) { applySettings(); }, {});
  return true;
}();
}  // namespace

}  // namespace torch_openreg
