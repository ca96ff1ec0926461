/*
 * PyTorch's allocator for device memory: c10::DeviceAllocator over the core's caching allocator
 * (orCacheMalloc), which does the bookkeeping.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

#include "check.h"

namespace torch_openreg {

/* The allocator that is registered for the device type. It is never destroyed. */
c10::DeviceAllocator &deviceAllocator();

/* Keeps the memory behind `data` (any address inside a live block) from being reused before the
 * work that is queued on `stream` so far has finished. Does nothing for a null pointer. */
void recordStream(const c10::DataPtr &data, c10::Stream stream);

/* Called when an allocation fails, before c10::OutOfMemoryError is thrown, on the thread that
 * allocates. Receives the device, the bytes requested, the bytes that the allocator may hold and
 * the free bytes. An exception that it throws replaces the error. */
using OutOfMemoryObserver = std::function<void(int64_t, int64_t, int64_t, int64_t)>;
/* The observer stays attached for the process's life. */
void attachOutOfMemoryObserver(OutOfMemoryObserver observer);

/* Returns a block of `bytes` on `device` for work on `stream`, or throws c10::OutOfMemoryError with
 * the figures. May be called inside a task. */
void *allocateBlock(size_t bytes, orStream_t stream, c10::DeviceIndex device);
/* The same for work on the device's current stream; 0 bytes is a null pointer. */
c10::DataPtr allocateOn(c10::DeviceIndex device, size_t bytes);
/* The DataPtr frees the block when it is destroyed. */
c10::DataPtr ownBlock(void *block, c10::DeviceIndex device);

}  // namespace torch_openreg
