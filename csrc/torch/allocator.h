/*
 * Device memory for PyTorch. The bookkeeping is the core's caching allocator (orCacheMalloc); this
 * is its face towards c10::DeviceAllocator.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "check.h"

namespace torch_openreg {

/* The one that is registered for the device type; never destroyed. */
c10::DeviceAllocator &deviceAllocator();

/* The memory behind `data` (any address inside a live block) is not reused before what is queued on
 * `stream` so far is done. Nothing for a null pointer. */
void recordStream(const c10::DataPtr &data, c10::Stream stream);

/* A block of `bytes` of `device` for work on `stream`, or c10::OutOfMemoryError with the figures.
 * Also inside a task. */
void *allocateBlock(size_t bytes, orStream_t stream, c10::DeviceIndex device);
/* The same for work on the device's current stream; 0 bytes is a null pointer. */
c10::DataPtr allocateOn(c10::DeviceIndex device, size_t bytes);
/* Gives the block back when the DataPtr dies. */
c10::DataPtr ownBlock(void *block, c10::DeviceIndex device);

}  // namespace torch_openreg
