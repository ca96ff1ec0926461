/*
 * Private pools of device memory: PyTorch's ids of them, who holds them, and which allocations are
 * theirs. Their memory is the core's (orMemPool_t). For graphs, torch.openreg.MemPool and
 * use_mem_pool; what c10/cuda's allocator offers, by the same names.
 *
 * An id is a name alone, and the same one on every device. {0, 0} is the device's own memory.
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

/* One that there has not been: {0, n} for a user (MemPool, graph_pool_handle), {n, 0} for a graph's
 * own. */
c10::MempoolId_t newMemPoolId(bool user);

/* Holds the pool on a device; the first holder makes it there. */
void retainPool(c10::DeviceIndex device, c10::MempoolId_t id);
/* After the last holder, the pool's memory is the device's own, as soon as all that has been queued
 * there by then is over. Never waits. Throws if nobody holds it. */
void releasePool(c10::DeviceIndex device, c10::MempoolId_t id);
/* 0 if there is no such pool. */
uint64_t poolUseCount(c10::DeviceIndex device, c10::MempoolId_t id);

/* From now on what any thread allocates on the device for a stream that the filter accepts is the
 * pool's, which the caller holds until endAllocateToPool. Of several, the one that began last is
 * asked first. The filter is called under a lock, with a live stream or one that was destroyed: it
 * may ask the core about streams, and neither allocate nor call these functions. What a kernel
 * allocates for itself is never a pool's. */
using StreamFilter = std::function<bool(orStream_t)>;
void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id, StreamFilter filter);
/* Ends the latest that the calling thread has begun, or else anybody has. Throws if there is
 * none. */
void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id);

/* How many of these are on. */
extern std::atomic<int> poolRoutes;
orMemPool_t routedPool(c10::DeviceIndex device, orStream_t stream);
/* Where an allocation comes from: 0 is the device's own memory. */
inline orMemPool_t poolFor(c10::DeviceIndex device, orStream_t stream) {
  if (C10_LIKELY(poolRoutes.load(std::memory_order_relaxed) == 0)) return 0;
  return routedPool(device, stream);
}

/* {0, 0} for 0, and for one that is gone. */
c10::MempoolId_t poolId(orMemPool_t pool);
/* The device's pools that somebody holds. */
std::vector<std::pair<c10::MempoolId_t, orMemPool_t>> poolsOf(c10::DeviceIndex device);
/* Gives what is idle of the pool back, on every device, and waits for what is queued there. Throws
 * where it is in use, as a graph's addresses must stay: anybody but MemPool objects holds it. */
void emptyPool(c10::MempoolId_t id);

}  // namespace torch_openreg
