/*
 * `live` maps a kernel's address to the block behind it, for blocks that are still CPU memory:
 * temporaries of running kernels, and memory that a kernel has kept for itself. `mutex` guards it.
 * It is a leaf, and held across a fork so that the child's map is complete.
 *
 * [lowest, highest) covers every kernel address ever handed out. It is read without the lock, so
 * that ordinary memory is freed as fast as before. It only grows, so a pointer outside is certainly
 * not ours: a thread that frees a block got it from the thread that widened the range.
 */
#include "cpu_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "../torch/allocator.h"
#include "../torch/fork.h"
#include "kernel_memory.h"

namespace torch_openreg {

namespace {

/* The host has this much for a dry run on a small device, where a kernel's temporaries may be
 * larger than any result. */
constexpr size_t kSpare = size_t{1} << 30;

/* The request of the thread's AllocationScope. */
struct Redirection {
  bool active = false;
  bool toDevice = false;  // WorkerMemory
  orStream_t stream = 0;
  c10::DeviceIndex device = 0;
  Reserved *first = nullptr;  // WorkerOutputs
  size_t count = 0;
  size_t most = SIZE_MAX;  // DryMemory
};
thread_local Redirection redirection;

struct Block {
  void *address;  // null for a promised result, which its caller owns
  c10::DeviceIndex device;
};

struct State {
  std::mutex mutex;
  ska::flat_hash_map<void *, Block> live;
  std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};
  c10::Allocator *former = nullptr;
  c10::DeleterFnPtr formerDeleter = nullptr;
};

State &state() { return leaked<State>(); }  // memory is freed until the very end

void widen(uintptr_t begin, uintptr_t end) {
  State &s = state();
  uintptr_t seen = s.lowest.load(std::memory_order_relaxed);
  while (begin < seen && !s.lowest.compare_exchange_weak(seen, begin, std::memory_order_relaxed)) {
  }
  seen = s.highest.load(std::memory_order_relaxed);
  while (end > seen && !s.highest.compare_exchange_weak(seen, end, std::memory_order_relaxed)) {
  }
}

bool take(void *kernelAddress, Block *block) {
  State &s = state();
  const auto address = reinterpret_cast<uintptr_t>(kernelAddress);
  if (C10_LIKELY(address < s.lowest.load(std::memory_order_relaxed) ||
                 address >= s.highest.load(std::memory_order_relaxed))) {
    return false;
  }
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.live.find(kernelAddress);
  if (found == s.live.end()) return false;
  *block = found->second;
  s.live.erase(found);
  return true;
}

void deleteCpuMemory(void *pointer) {
  Block block;
  if (!take(pointer, &block)) return state().formerDeleter(pointer);
  if (block.address != nullptr) ownBlock(block.address, block.device).clear();
}

c10::DataPtr enter(void *address, Block block) {
  State &s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.live[address] = block;
  }
  return {address, address, &deleteCpuMemory, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr allocateForWorker(size_t bytes) {
  c10::DataPtr owner =
      ownBlock(allocateBlock(bytes, redirection.stream, redirection.device), redirection.device);
  void *address = KernelMemory(owner.get(), bytes).address();
  const auto begin = reinterpret_cast<uintptr_t>(address);
  widen(begin, begin + bytes);
  c10::DataPtr data = enter(address, Block{owner.get(), redirection.device});
  owner.release_context();
  return data;
}

/* Null if no result of that size is expected. */
c10::DataPtr allocateReserved(size_t bytes) {
  for (size_t i = 0; i < redirection.count; ++i) {
    Reserved &result = redirection.first[i];
    if (result.taken || result.bytes != bytes) continue;
    result.taken = true;
    const auto begin = reinterpret_cast<uintptr_t>(result.address);
    widen(begin, begin + bytes);
    return enter(result.address, Block{nullptr, 0});
  }
  return {};
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_UNLIKELY(redirection.active && bytes != 0)) {
      if (redirection.toDevice) return allocateForWorker(bytes);
      if (bytes > redirection.most) throw TooLarge(bytes);
      if (c10::DataPtr data = allocateReserved(bytes)) return data;
    }
    c10::DataPtr data = state().former->allocate(bytes);
    // The raw interface needs one deleter for both kinds of memory.
    (void)data.compare_exchange_deleter(state().formerDeleter, &deleteCpuMemory);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleteCpuMemory; }
  void copy_data(void *dest, const void *src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

void install() {
  State &s = state();
  s.former = c10::GetCPUAllocator();
  s.formerDeleter = s.former->raw_deleter();
  // Without a deleter of its own the former allocator has no raw interface, which kernels need:
  // then results are copied.
  if (s.formerDeleter == nullptr) return;
  const auto before = [] {
    pauseKernels();  // first: a kernel may need the mutex
    state().mutex.lock();
  };
  const auto inParent = [] {
    state().mutex.unlock();
    resumeKernels();
  };
  // fork.cpp counts the child's kernels anew, and nothing of the parent's must be taken back.
  const auto inChild = [] { state().mutex.unlock(); };
  pthread_atfork(before, inParent, inChild);
  c10::SetCPUAllocator(new CpuAllocator(), UINT8_MAX);
}

}  // namespace

void installCpuAllocator() {
  static const bool installed = (install(), true);
  (void)installed;
}

AllocationScope::~AllocationScope() { redirection = {}; }

WorkerMemory::WorkerMemory(orStream_t stream, c10::DeviceIndex device) {
  redirection = {.active = true, .toDevice = true, .stream = stream, .device = device};
}

WorkerOutputs::WorkerOutputs(Reserved *first, size_t count) {
  redirection = {.active = count != 0, .first = first, .count = count};
}

DryMemory::DryMemory(c10::DeviceIndex device) {
  auto properties = sized<orDeviceProperties>();
  OPENREG_CHECK(orGetDeviceProperties(&properties, device));
  redirection = {.active = true, .most = std::max(properties.total_memory, kSpare)};
}

c10::DataPtr takeWorkerMemory(c10::DataPtr &data) {
  Block block;
  if (data.get_context() == nullptr || data.get_deleter() != &deleteCpuMemory ||
      !take(data.get_context(), &block)) {
    return {};
  }
  data.release_context();
  data.clear();
  return ownBlock(block.address, block.device);
}

}  // namespace torch_openreg
