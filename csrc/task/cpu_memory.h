/*
 * Gives a CPU kernel that runs on a worker its memory.
 *
 * A CPU kernel allocates its results from PyTorch's CPU allocator. While a WorkerMemory exists,
 * that allocator returns device memory to its thread, at the kernel's address, so that a result
 * becomes a device tensor without a copy. Other threads are not affected.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <exception>

#include "../torch/check.h"

namespace torch_openreg {

/* Wraps the CPU allocator, once, at the first use of a device: without one it is not replaced. */
void installCpuAllocator();

/* Redirects the CPU allocations of the calling thread until the end of the scope. */
class AllocationScope : Uncopyable {
 protected:
  AllocationScope() = default;
  ~AllocationScope();
};

/* Inside a task of `stream`: allocations return device memory. */
class WorkerMemory final : AllocationScope {
 public:
  WorkerMemory(orStream_t stream, c10::DeviceIndex device);
};

/* Memory that is promised to a queued kernel for a result. */
struct Reserved {
  void *address;  // the kernel's
  size_t bytes;
  bool taken = false;
};

/* An allocation of exactly as many bytes as a promised result gets that result's memory. All
 * others, a kernel's temporaries, get ordinary memory. The host may have freed blocks that queued
 * tasks will read, so a kernel without a waiting caller takes nothing from the device's cache. */
class WorkerOutputs final : AllocationScope {
 public:
  WorkerOutputs(Reserved *first, size_t count);
};

/* Thrown for an allocation of a dry run. */
struct TooLarge final : std::exception {
  explicit TooLarge(size_t asked) : bytes(asked) {}
  const size_t bytes;
};

/* In a dry run, an allocation larger than the device could ever hold throws TooLarge, because the
 * host would run out of memory first. */
class DryMemory final : AllocationScope {
 public:
  explicit DryMemory(c10::DeviceIndex device);
};

/* If `data` is memory from a WorkerMemory, empties `data` and returns the same memory as device
 * memory; otherwise null. */
c10::DataPtr takeWorkerMemory(c10::DataPtr &data);

}  // namespace torch_openreg
