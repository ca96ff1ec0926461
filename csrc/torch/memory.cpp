/*
 * torch.openreg.memory's part of torch_openreg._C: snapshots as the dictionaries that PyTorch's
 * memory viewer reads, limits, raw blocks, figures of pinned memory.
 */
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <openreg_host_access.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "compat.h"
#include "device.h"
#include "gil.h"
#include "memory_history.h"
#include "mempool.h"
#include "module.h"
#include "stacks.h"
#include "stream.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using c10::CachingAllocator::AcceleratorAllocatorConfig;

at::HostAllocator &hostAllocator() { return *at::getHostAllocator(c10::DeviceType::PrivateUse1); }

// ---- Snapshots ----------------------------------------------------------------------------------

/* Collects stacks and turns all of them into Python frames at once, which is much cheaper. */
class Frames {
 public:
  /* A list that symbolize() fills. */
  py::list of(const Stack &stack) {
    py::list frames;
    if (!stack) return frames;
    stacks_.push_back(stack);
    tracebacks_.push_back(torch::getCapturedTracebackFromContext(stack));
    targets_.push_back(frames);
    return frames;
  }

  void symbolize() {
    if (tracebacks_.empty()) return;
    std::vector<torch::CapturedTraceback *> unique(tracebacks_);
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    const std::vector<py::object> all = linesOf(unique);
    for (size_t i = 0; i < targets_.size(); ++i) {
      const auto found = std::lower_bound(unique.begin(), unique.end(), tracebacks_[i]);
      targets_[i].attr("extend")(all[static_cast<size_t>(found - unique.begin())]);
    }
  }

 private:
  std::vector<Stack> stacks_;
  std::vector<torch::CapturedTraceback *> tracebacks_;
  std::vector<py::list> targets_;
};

std::vector<orCacheBlock> blocksOf(c10::DeviceIndex device) {
  std::vector<orCacheBlock> blocks;
  for (size_t count = 0;; blocks.resize(count + count / 8 + 16)) {
    count = blocks.size();
    OPENREG_CHECK(orCacheSnapshot(blocks.data(), sizeof(orCacheBlock), &count, device));
    if (count > blocks.size()) continue;
    blocks.resize(count);
    // Sorts by segment, that is by its start; within a segment the blocks are already in order.
    std::stable_sort(
        blocks.begin(), blocks.end(),
        [](const orCacheBlock &a, const orCacheBlock &b) { return a.segment < b.segment; });
    return blocks;
  }
}

uintptr_t number(const void *address) { return reinterpret_cast<uintptr_t>(address); }

/* PyTorch's id of a stream that may have been destroyed: the default stream is 0. */
int64_t streamId(orStream_t stream, c10::DeviceIndex device) {
  if (stream == 0 || stream == getDefaultOpenRegStream(device).stream()) return 0;
  return static_cast<int64_t>(stream);
}

py::dict describe(const orCacheBlock &block, Frames &frames) {
  static const char *const states[] = {"inactive", "active_allocated", "active_pending_free"};
  py::dict entry;
  entry["address"] = number(block.address);
  entry["size"] = block.bytes;
  entry["requested_size"] = block.requested;
  entry["state"] = states[block.state];
  entry["frames"] =
      frames.of(block.state == orCacheBlockInactive ? nullptr : stackOfBlock(block.address));
  return entry;
}

/* One segment: blocks[first, last). */
py::dict describe(const std::vector<orCacheBlock> &blocks, size_t first, size_t last,
                  c10::DeviceIndex device, Frames &frames) {
  size_t total = 0, allocated = 0, active = 0, requested = 0;
  py::list parts;
  for (size_t i = first; i < last; ++i) {
    const orCacheBlock &block = blocks[i];
    total += block.bytes;
    requested += block.requested;
    if (block.state == orCacheBlockAllocated) allocated += block.bytes;
    if (block.state != orCacheBlockInactive) active += block.bytes;
    parts.append(describe(block, frames));
  }
  py::dict segment;
  segment["device"] = static_cast<int>(device);
  segment["address"] = number(blocks[first].segment);
  segment["total_size"] = total;
  segment["allocated_size"] = allocated;
  segment["active_size"] = active;
  segment["requested_size"] = requested;
  segment["stream"] = streamId(blocks[first].stream, device);
  segment["segment_type"] = blocks[first].large != 0 ? "large" : "small";
  segment["segment_pool_id"] = poolId(blocks[first].pool);
  segment["is_expandable"] = false;
  segment["frames"] = frames.of(stackOfSegment(blocks[first].segment, active != 0));
  segment["blocks"] = parts;
  return segment;
}

void describeSegments(c10::DeviceIndex device, py::list &segments, Frames &frames) {
  const std::vector<orCacheBlock> blocks = blocksOf(device);
  for (size_t first = 0, last = 0; first < blocks.size(); first = last) {
    while (last < blocks.size() && blocks[last].segment == blocks[first].segment) ++last;
    segments.append(describe(blocks, first, last, device, frames));
  }
}

/* Converts the core's clock to microseconds since 1970. */
int64_t wallMicroseconds(uint64_t ns) {
  timespec monotonic{}, wall{};
  clock_gettime(CLOCK_MONOTONIC, &monotonic);
  clock_gettime(CLOCK_REALTIME, &wall);
  const int64_t ago =
      (monotonic.tv_sec * 1000000000LL + monotonic.tv_nsec) - static_cast<int64_t>(ns);
  return (wall.tv_sec * 1000000000LL + wall.tv_nsec - ago) / 1000;
}

constexpr const char *kActions[] = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "snapshot",
    "oom"};
static_assert(std::size(kActions) == orCacheActionOutOfMemory + 1);

py::dict describe(const HistoryEntry &entry, c10::DeviceIndex device, Frames &frames) {
  const orCacheRecord &record = entry.record;
  py::dict action;
  action["action"] = kActions[record.action];
  if (record.action == orCacheActionOutOfMemory) {
    action["device_free"] = record.device_free;
  } else {
    action["addr"] = number(record.address);
  }
  action["size"] = record.bytes;
  action["stream"] = streamId(record.stream, device);
  action["time_us"] = wallMicroseconds(record.time_ns);
  action["compile_context"] = "";
  action["user_metadata"] = entry.metadata ? *entry.metadata : std::string();
  action["pool_id"] = entry.pool;
  action["frames"] = frames.of(entry.stack);
  return action;
}

py::dict allocatorSettings() {
  const AcceleratorAllocatorConfig &config = AcceleratorAllocatorConfig::instance();
  py::dict settings, divisions;
  const auto &all = config.roundup_power2_divisions();
  for (size_t i = 0; i < all.size(); ++i) divisions[py::str(std::to_string(1ULL << i))] = all[i];
  const size_t split = AcceleratorAllocatorConfig::max_split_size();
  settings["PYTORCH_ALLOC_CONF"] = c10::CachingAllocator::getAllocatorSettings();
  settings["max_split_size"] = split == SIZE_MAX ? -1 : static_cast<int64_t>(split);
  settings["garbage_collection_threshold"] =
      AcceleratorAllocatorConfig::garbage_collection_threshold();
  settings["roundup_power2_divisions"] = divisions;
  settings["expandable_segments"] = false;
  settings["pinned_use_background_threads"] =
      AcceleratorAllocatorConfig::pinned_use_background_threads();
  return settings;
}

/* (file, line) of the call that allocated a live block, or None. */
py::object originOfBlock(uintptr_t address) {
  const orOrigin *origin = orCacheGetOrigin(reinterpret_cast<const void *>(address));
  if (origin == nullptr || origin->file == nullptr) return py::none();
  return py::make_tuple(origin->file, origin->line);
}

#if OPENREG_TORCH_SINCE(14)
// PyTorch's host allocator keeps its own history. It calls `gatherHostStack` with no lock held.

std::atomic<bool> hostStacksHaveCpp{false};
uint64_t hostEntries = 0;  // the most that are kept; under Python's lock

Stack gatherHostStack() {
  const bool python = mayBeInPython();
  return torch::CapturedTraceback::gather(python, /*script=*/true, hostStacksHaveCpp.load());
}

/* A block of pinned memory is a segment of its own. */
py::dict describe(const at::HostSegmentInfo &block, Frames &frames) {
  const size_t allocated = block.allocated ? block.size : 0, active = block.active ? block.size : 0;
  const char *busy = block.allocated ? "active_allocated" : "active_pending_free";
  py::dict part;
  part["address"] = block.address;
  part["size"] = block.size;
  part["requested_size"] = allocated;
  part["state"] = block.active ? busy : "inactive";
  part["frames"] = frames.of(block.active ? block.context_when_allocated : nullptr);
  py::list parts;
  parts.append(part);
  py::dict segment;
  segment["device"] = -1;
  segment["address"] = block.address;
  segment["total_size"] = block.size;
  segment["allocated_size"] = allocated;
  segment["active_size"] = active;
  segment["requested_size"] = allocated;
  segment["stream"] = 0;
  segment["segment_type"] = "large";
  segment["segment_pool_id"] = block.owner_private_pool_id;
  segment["is_expandable"] = false;
  segment["frames"] = py::list();
  segment["blocks"] = parts;
  return segment;
}

py::dict describe(const c10::CachingDeviceAllocator::TraceEntry &entry, Frames &frames) {
  py::dict action;
  action["action"] = kActions[entry.action_];
  action["addr"] = entry.addr_;
  action["size"] = entry.size_;
  action["stream"] = 0;
  action["time_us"] = entry.time_.t_;
  action["compile_context"] = "";
  action["user_metadata"] = "";
  action["pool_id"] = entry.mempool_;
  action["frames"] = frames.of(entry.context_);
  return action;
}

void addHost(py::dict &all) {
  std::vector<at::HostSegmentInfo> blocks;
  std::vector<c10::CachingDeviceAllocator::TraceEntry> entries;
  {
    const WithoutGil released;
    blocks = hostAllocator().get_segments();
    if (hostEntries != 0) entries = hostAllocator().get_traces();
  }
  const bool on = hostAllocator().is_history_enabled();
  for (auto &block : blocks) {
    if (!on) block.context_when_allocated = nullptr;
  }
  Frames frames;
  py::list segments, trace;
  for (const auto &block : blocks) segments.append(describe(block, frames));
  for (const auto &entry : entries) trace.append(describe(entry, frames));
  frames.symbolize();
  all["host_segments"] = segments;
  all["host_traces"] = trace;
}

/* Null switches the history off. It is off while its size changes, and empty afterwards: PyTorch's
 * ring writes beyond its end where it shrinks with entries in it. */
void recordHost(const std::optional<HistoryOptions> &options, bool clear) {
  using c10::CachingDeviceAllocator::RecordContext;
  const HistoryOptions given = options.value_or(HistoryOptions());
  const uint64_t size = given.trace ? given.max_entries : 0;
  if (clear || size != std::exchange(hostEntries, size))
    hostAllocator().record_history(false, &gatherHostStack, 0, RecordContext::NEVER, true);
  if (!options) return;
  hostStacksHaveCpp.store(given.cpp);
  hostAllocator().record_history(true, &gatherHostStack, size,
                                 static_cast<RecordContext>(given.stacks), false);
}
#else
void addHost(py::dict &) {}
void recordHost(const std::optional<HistoryOptions> &options, bool) {
  TORCH_CHECK_NOT_IMPLEMENTED(!options, "PyTorch ", TORCH_VERSION,
                              " keeps no history of pinned memory; from 2.14 on it does");
}
#endif

py::dict snapshot(bool include_traces) {
  py::list segments, traces;
  Frames frames;
  const c10::DeviceIndex count = checkedDeviceCount();
  for (c10::DeviceIndex device = 0; device < count; ++device) {
    py::list trace;
    describeSegments(device, segments, frames);
    if (include_traces) {
      for (const HistoryEntry &entry : memoryHistory(device))
        trace.append(describe(entry, device, frames));
    }
    traces.append(trace);
  }
  frames.symbolize();
  py::dict all;
  all["segments"] = segments;
  all["device_traces"] = traces;
  all["allocator_settings"] = allocatorSettings();
  all["external_annotations"] = py::list();
  if (include_traces) addHost(all);
  return all;
}

py::object allocationTraceback(uintptr_t address) {
  const Stack stack = stackOfBlock(reinterpret_cast<const void *>(address));
  if (!stack) return py::none();
  Frames frames;
  py::list list = frames.of(stack);
  frames.symbolize();
  return list;
}

// ---- History ------------------------------------------------------------------------------------

HistoryStacks stacksNamed(const std::optional<std::string> &context) {
  if (!context) return HistoryStacks::None;
  if (*context == "state") return HistoryStacks::Live;
  if (*context == "alloc") return HistoryStacks::Allocations;
  TORCH_CHECK_VALUE(*context == "all", "context is '", *context,
                    "'; allowed are None, 'state', 'alloc' and 'all'");
  return HistoryStacks::All;
}

uint32_t actionsNamed(const std::vector<std::string> &names) {
  uint32_t bits = 0;
  for (const std::string &name : names) {
    const auto found = std::find(std::begin(kActions), std::end(kActions), name);
    TORCH_CHECK_VALUE(found != std::end(kActions), "skip_actions has '", name,
                      "'; allowed are alloc, free_requested, free_completed, segment_alloc, "
                      "segment_free, snapshot and oom");
    bits |= 1U << (found - std::begin(kActions));
  }
  return bits;
}

void record(const std::optional<std::string> &enabled, const std::optional<std::string> &context,
            const std::string &stacks, uint64_t max_entries, bool clear,
            const std::vector<std::string> &skip_actions, bool device, bool pinned) {
  TORCH_CHECK_VALUE(!enabled || *enabled == "state" || *enabled == "all", "enabled is '",
                    enabled.value_or(""), "'; allowed are None, 'state' and 'all'");
  TORCH_CHECK_VALUE(stacks == "python" || stacks == "all", "stacks is '", stacks,
                    "'; allowed are 'python' and 'all'");
  HistoryOptions options;
  options.trace = enabled && *enabled == "all";
  options.stacks = stacksNamed(context);
  options.cpp = stacks == "all";
  options.max_entries = max_entries;
  options.skipped = actionsNamed(skip_actions);
  const auto given = enabled ? std::optional(options) : std::nullopt;
  if (pinned || !enabled) recordHost(given, clear || !enabled);
  if (device) recordMemoryHistory(given, clear);
}

// ---- Limits, raw blocks, figures ----------------------------------------------------------------

void setFraction(int64_t index, double fraction) {
  OPENREG_CHECK(orCacheSetFraction(checkIndex(index), fraction));
}

double getFraction(int64_t index) {
  double fraction = 0;
  OPENREG_CHECK(orCacheGetFraction(&fraction, checkIndex(index)));
  return fraction;
}

uintptr_t allocateRaw(size_t bytes, int64_t index, c10::StreamId stream) {
  const c10::DeviceIndex device = checkIndex(index);
  const OpenRegStream owner(c10::Stream(c10::Stream::UNSAFE, deviceAt(device), stream));
  return bytes == 0 ? 0 : number(allocateBlock(bytes, owner.stream(), device));
}

void freeRaw(uintptr_t address) {
  HistoryScope scope(HistoryScope::Free);
  OPENREG_CHECK(orCacheFree(reinterpret_cast<void *>(address)));
}

py::dict describe(const c10::CachingAllocator::Stat &stat) {
  py::dict entry;
  entry["current"] = stat.current;
  entry["peak"] = stat.peak;
  entry["allocated"] = stat.allocated;
  entry["freed"] = stat.freed;
  return entry;
}

py::dict describe(const c10::CachingAllocator::DurationStat &stat) {
  py::dict entry;
  entry["total"] = stat.total;
  entry["max"] = stat.max;
  entry["min"] = stat.min;
  entry["count"] = stat.count;
  entry["avg"] = stat.count == 0 ? 0 : stat.total / stat.count;
  return entry;
}

py::dict describe(const c10::CachingAllocator::StatArray &pools) {
  static const char *const names[] = {"all", "small_pool", "large_pool"};
  py::dict entry;
  for (size_t i = 0; i < pools.size(); ++i) entry[names[i]] = describe(pools[i]);
  return entry;
}

py::dict reservedByPrivatePools(int64_t index) {
  py::dict all;
  for (const auto &[id, stat] :
       deviceAllocator().getDeviceStats(checkIndex(index)).reserved_bytes_by_private_pools)
    all[py::cast(id)] = describe(stat);
  return all;
}

/* The object is never released: its observer stays attached. */
void attachObserver(py::object observer) {
  PyObject *called = observer.release().ptr();
  attachOutOfMemoryObserver([called](int64_t device, int64_t bytes, int64_t allowed, int64_t free) {
    int state = 0;
    if (!takeGil(state)) return;
    const auto giveBack = c10::make_scope_exit([state] { giveGilBack(state); });
    const py::handle function(called);
    function(device, bytes, allowed, free);
  });
}

py::dict hostStats() {
  const at::HostStats stats = hostAllocator().get_stats();
  py::dict all;
  all["num_host_alloc"] = stats.num_host_alloc;
  all["num_host_free"] = stats.num_host_free;
  all["allocations"] = describe(stats.allocations);
  all["active_requests"] = describe(stats.active_requests);
  all["allocated_bytes"] = describe(stats.allocated_bytes);
  all["active_bytes"] = describe(stats.active_bytes);
  all["host_alloc_time"] = describe(stats.host_alloc_time);
  all["host_free_time"] = describe(stats.host_free_time);
  return all;
}

/* The result for torch.cuda.cudart(): 0, or CUDA's number of an error that the caller made. */
int cudasNumber(orError_t error, int invalid) {
  if (error == orErrorAlreadyExists || error == orErrorInvalidValue) {
    orGetLastError();
    return error == orErrorInvalidValue ? invalid : 712;
  }
  OPENREG_CHECK(error);
  return 0;
}

int registerHost(uintptr_t ptr, size_t bytes) {
  // Until this call PyTorch takes every tensor to be unpinned and asks no device.
  at::globalContext().lazyInitDevice(c10::DeviceType::PrivateUse1);
  return cudasNumber(orHostRegister(reinterpret_cast<void *>(ptr), bytes), 1);
}

/* Waits for all devices. */
int unregisterHost(uintptr_t ptr) {
  orError_t error;
  {
    const WithoutGil released;
    error = orHostUnregister(reinterpret_cast<void *>(ptr));
  }
  return cudasNumber(error, 713);
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_host_register", &registerHost);
  m.def("_host_unregister", &unregisterHost);
  m.def("_memory_snapshot", &snapshot);
  m.def("_memory_origin", &originOfBlock);
  m.def("_memory_traceback", &allocationTraceback);
  m.def("_memory_record_history", &record);
  m.def("_memory_set_metadata", &setMemoryMetadata);
  m.def("_memory_get_metadata", &memoryMetadata);
  m.def("_memory_reserved_by_private_pools", &reservedByPrivatePools);
  m.def("_memory_attach_observer", &attachObserver);
  m.def("_memory_set_fraction", &setFraction);
  m.def("_memory_get_fraction", &getFraction);
  m.def("_memory_alloc", &allocateRaw);
  m.def("_memory_free", &freeRaw);
  m.def("_memory_host_stats", &hostStats);
  m.def("_memory_reset_accumulated_host_stats", [] { hostAllocator().reset_accumulated_stats(); });
  m.def("_memory_reset_peak_host_stats", [] { hostAllocator().reset_peak_stats(); });
});

}  // namespace

}  // namespace torch_openreg
