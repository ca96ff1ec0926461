/*
 * Private pools of device memory: PyTorch's ids of them, their holders, and which allocations they
 * serve. The memory belongs to the core (orMemPool_t). Used by graphs, torch.openreg.MemPool and
 * use_mem_pool; the functions have the names of c10/cuda's allocator.
 *
 * An id is only a name, the same on every device. {0, 0} is the device's own memory.
 */
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "check.h"

namespace torch_openreg {

/* Returns an unused id: {0, n} for a user (MemPool, graph_pool_handle), {n, 0} for a graph's
 * own. */
c10::MempoolId_t newMemPoolId(bool user);

/* Holds the pool on a device; the first holder creates it there. `object`: for a MemPool. */
void retainPool(c10::DeviceIndex device, c10::MempoolId_t id, bool object = false);
/* After the last holder, the pool's memory becomes the device's own as soon as all work queued
 * there by then has finished. Never waits. Throws if the pool has no holder. */
void releasePool(c10::DeviceIndex device, c10::MempoolId_t id, bool object = false);
/* 0 if there is no such pool. */
uint64_t poolUseCount(c10::DeviceIndex device, c10::MempoolId_t id);

/* From now on the pool serves what any thread allocates on the device for a stream that the filter
 * accepts. The caller holds the pool until endAllocateToPool. Of several filters the newest is
 * asked first. A filter is called under a lock, with a live or destroyed stream: it may ask the
 * core about streams, and must not allocate or call these functions. A pool never serves what a
 * kernel allocates for itself. */
using StreamFilter = std::function<bool(orStream_t)>;
void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id, StreamFilter filter);
/* Ends the newest route of the calling thread, or else of any thread. Throws if there is none. */
void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id);

/* The number of active routes. */
extern std::atomic<int> poolRoutes;
orMemPool_t routedPool(c10::DeviceIndex device, orStream_t stream);
/* The pool of an allocation; 0 is the device's own memory. */
inline orMemPool_t poolFor(c10::DeviceIndex device, orStream_t stream) {
  if (C10_LIKELY(poolRoutes.load(std::memory_order_relaxed) == 0)) return 0;
  return routedPool(device, stream);
}

/* {0, 0} for 0 and for a pool that is gone. */
c10::MempoolId_t poolId(orMemPool_t pool);
/* The device's pools that have a holder. */
std::vector<std::pair<c10::MempoolId_t, orMemPool_t>> poolsOf(c10::DeviceIndex device);
/* Returns the pool's idle memory on every device, and waits for work that is queued there. Throws
 * if any holder is not a MemPool: a graph's addresses must stay. */
void emptyPool(c10::MempoolId_t id);

}  // namespace torch_openreg
