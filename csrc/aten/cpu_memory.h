/*
 * Where a CPU kernel that runs on a lane gets its memory from.
 *
 * A CPU kernel allocates its results from PyTorch's CPU allocator. While a LaneMemory is alive, that
 * allocator hands its thread device memory instead, at the kernel's address, so that a result becomes
 * a device tensor without a copy. Every other thread gets what it got before.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <openreg.h>

namespace torch_openreg {

/* Wraps the CPU allocator, once, at the first use of a device: a program that uses none keeps
 * its allocator. */
void installCpuAllocator();

/* Inside a task of `stream`, for the calling thread. */
class LaneMemory {
 public:
  LaneMemory(orStream_t stream, c10::DeviceIndex device);
  ~LaneMemory();
  LaneMemory(const LaneMemory &) = delete;
  LaneMemory &operator=(const LaneMemory &) = delete;
};

/* If `data` is memory that a LaneMemory gave, empties `data` and returns the same memory as device
 * memory; null if it is not. */
c10::DataPtr takeLaneMemory(c10::DataPtr &data);

}  // namespace torch_openreg
