/*
 * Where a CPU kernel that runs on a worker gets its memory from.
 *
 * A CPU kernel allocates its results from PyTorch's CPU allocator. While a WorkerMemory is alive,
 * that allocator hands its thread device memory instead, at the kernel's address, so that a result
 * becomes a device tensor without a copy. Every other thread gets what it got before.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <openreg.h>

#include <cstddef>
#include <exception>

namespace torch_openreg {

/* Wraps the CPU allocator, once, at the first use of a device: a program that uses none keeps
 * its allocator. */
void installCpuAllocator();

/* Redirects the CPU allocations of the calling thread until the end of the scope. */
class AllocationScope {
 public:
  AllocationScope(const AllocationScope &) = delete;
  AllocationScope &operator=(const AllocationScope &) = delete;

 protected:
  AllocationScope() = default;
  ~AllocationScope();
};

/* Inside a task of `stream`: they get device memory. */
class WorkerMemory final : AllocationScope {
 public:
  WorkerMemory(orStream_t stream, c10::DeviceIndex device);
};

/* Memory that a queued kernel has been promised for a result. */
struct Reserved {
  void *address;  // the kernel's
  size_t bytes;
  bool taken = false;
};

/* An allocation of just as many bytes as a result is promised gets that result's memory; all
 * others, a kernel's temporaries, get ordinary memory. The host may have freed blocks that tasks
 * still to run read, so a kernel that nobody waits for takes nothing from the device's cache. */
class WorkerOutputs final : AllocationScope {
 public:
  WorkerOutputs(Reserved *first, size_t count);
};

/* An allocation of a dry run. */
struct TooLarge final : std::exception {
  explicit TooLarge(size_t asked) : bytes(asked) {}
  const size_t bytes;
};

/* In a dry run: to ask for more than the device could ever hold throws TooLarge, because the host
 * would run out of memory first. */
class DryMemory final : AllocationScope {
 public:
  explicit DryMemory(c10::DeviceIndex device);
};

/* If `data` is memory that a WorkerMemory gave, empties `data` and returns the same memory as
 * device memory; null if it is not. */
c10::DataPtr takeWorkerMemory(c10::DataPtr &data);

}  // namespace torch_openreg
