/*
 * Device memory for PyTorch. The bookkeeping is the core's caching allocator (orCacheMalloc); this
 * is its face towards c10::DeviceAllocator.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

#include "check.h"

namespace torch_openreg {

/* The one that is registered for the device type; never destroyed. */
c10::DeviceAllocator &deviceAllocator();

/* The memory behind `data` (any address inside a live block) is not reused before what is queued on
 * `stream` so far is done. Nothing for a null pointer. */
void recordStream(const c10::DataPtr &data, c10::Stream stream);

/* Is told of an allocation that fails, before c10::OutOfMemoryError is thrown: the device, the
 * bytes asked for, those that the allocator may hold, those that are free. On the thread that
 * allocates; what it throws is thrown instead. */
using OutOfMemoryObserver = std::function<void(int64_t, int64_t, int64_t, int64_t)>;
/* For the process's life. */
void attachOutOfMemoryObserver(OutOfMemoryObserver observer);

/* A block of `bytes` of `device` for work on `stream`, or c10::OutOfMemoryError with the figures.
 * Also inside a task. */
void *allocateBlock(size_t bytes, orStream_t stream, c10::DeviceIndex device);
/* The same for work on the device's current stream; 0 bytes is a null pointer. */
c10::DataPtr allocateOn(c10::DeviceIndex device, size_t bytes);
/* Gives the block back when the DataPtr dies. */
c10::DataPtr ownBlock(void *block, c10::DeviceIndex device);

}  // namespace torch_openreg
