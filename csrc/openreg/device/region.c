/*
 * Regions: which addresses are allocated, on which device, by which allocator.
 *
 * One tree, ordered by address, holds every live region of the process: device memory of all
 * devices (simulated or a vendor's), pinned host memory and registered host memory. Pointer queries
 * and the checks of copies use it. No two regions overlap.
 *
 * `lock` guards the tree, its nodes and `used`. The factories' functions are called outside it. An
 * allocation charges the capacity, then calls the factory, then enters the region. A release does
 * the reverse, so that an address is in the tree only while its owner has it.
 *
 * A region does not change while it is in the tree, so each thread caches the latest ones that it
 * found: kernels ask for the same few again and again. The cache is valid until any region leaves
 * the tree, which changes `taken` (written under the lock).
 */
#include <stdlib.h>

#include "base/interval_tree.h"
#include "device/device.h"
#include "device/shared_file.h"

typedef struct orNode {
  orTreeNode node; /* first, so that its address is the orNode's */
  orRegion region;
} orNode;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_REGIONS);
static orTree tree = OR_TREE_INITIALIZER;
static size_t used[OPENREG_MAX_DEVICES];
static _Atomic uint64_t taken = 1;

enum { OR_RECENT = 8, OR_RECENT_SHIFT = 21 }; /* the shift of a segment of small blocks */
static _Thread_local struct {
  uint64_t taken; /* `taken` when it was found; 0: none */
  orRegion region;
} recent[OR_RECENT];

/* ---- regions ---- */

static orNode *find(const void *ptr) {
  return (orNode *)orTreeFind(&tree, (uintptr_t)ptr, (uintptr_t)ptr + 1);
}

bool orRegionFind(const void *ptr, orRegion *region) {
  size_t i = (uintptr_t)ptr >> OR_RECENT_SHIFT & (OR_RECENT - 1);
  if (OR_LIKELY(recent[i].taken == atomic_load_explicit(&taken, memory_order_acquire)) &&
      OR_LIKELY((uintptr_t)ptr - (uintptr_t)recent[i].region.base < recent[i].region.size)) {
    *region = recent[i].region;
    return true;
  }
  orMutexLock(&lock);
  orNode *n = find(ptr);
  if (n) {
    *region = recent[i].region = n->region;
    recent[i].taken = atomic_load_explicit(&taken, memory_order_relaxed);
  }
  orMutexUnlock(&lock);
  return n != NULL;
}

bool orRegionIs(const void *ptr, orMemoryType type) {
  orRegion region;
  return orRegionFind(ptr, &region) && region.type == type;
}

size_t orRegionUsed(int device) {
  orMutexLock(&lock);
  size_t n = used[device];
  orMutexUnlock(&lock);
  return n;
}

/* Capacity is charged in pages, as an allocation occupies whole pages. */
static orError_t charge(int device, size_t bytes) {
  size_t limit = orDeviceAt(device)->desc.memory_limit;
  orMutexLock(&lock);
  size_t in_use = used[device];
  bool fits = bytes <= limit && orWholePages(bytes) <= limit - in_use;
  if (fits) used[device] += orWholePages(bytes);
  orMutexUnlock(&lock);
  if (fits) return orSuccess;
  return orFail(orErrorMemoryAllocation, "device %d: %zu bytes were requested, %zu of %zu are free",
                device, bytes, limit - in_use, limit);
}

static void refund(int device, size_t bytes) {
  orMutexLock(&lock);
  used[device] -= orWholePages(bytes);
  orMutexUnlock(&lock);
}

orError_t orRegionEnter(orRegion region) {
  orNode *n = malloc(sizeof *n);
  if (!n) return orFail(orErrorMemoryAllocation, "no host memory for an allocation's entry");
  n->region = region;
  uintptr_t begin = (uintptr_t)region.base, end = begin + region.size;
  orMutexLock(&lock);
  bool taken = orTreeFind(&tree, begin, end) != NULL;
  if (!taken) orTreeInsert(&tree, &n->node, begin, end);
  orMutexUnlock(&lock);
  if (!taken) return orSuccess;
  free(n);
  return orFail(orErrorAlreadyExists,
                "[%p, +%zu) overlaps memory that is allocated or registered already", region.base,
                region.size);
}

/* Null if no such region starts there. Lock held. */
static orNode *findStart(const void *ptr, orMemoryType type, bool registered) {
  orNode *n = find(ptr);
  return n && n->region.base == ptr && n->region.type == type && n->region.registered == registered
             ? n
             : NULL;
}

static orError_t refuseStart(const void *ptr, orMemoryType type, bool registered) {
  return orFail(orErrorInvalidValue, "%p is not the start of a %s", ptr,
                type == orMemoryTypeDevice ? "live device allocation"
                : registered               ? "registered range"
                                           : "live pinned allocation");
}

orError_t orRegionCheck(const void *ptr, orMemoryType type, bool registered, orRegion *region) {
  orMutexLock(&lock);
  orNode *n = findStart(ptr, type, registered);
  if (n) *region = n->region;
  orMutexUnlock(&lock);
  return n ? orSuccess : refuseStart(ptr, type, registered);
}

orError_t orRegionTake(const void *ptr, orMemoryType type, bool registered, orRegion *region) {
  orMutexLock(&lock);
  orNode *n = findStart(ptr, type, registered);
  if (n) {
    *region = n->region;
    orTreeRemove(&tree, &n->node);
    atomic_fetch_add_explicit(&taken, 1, memory_order_release);
  }
  orMutexUnlock(&lock);
  if (!n) return refuseStart(ptr, type, registered);
  free(n);
  OR_PROBE(OR_PROBE_RANGE_OVER, .dst = region->base, .bytes = region->size);
  return orSuccess;
}

/* Memory that overlaps another region is not given back: it may belong to another owner. */
orError_t orRegionAdopt(const orDevice *d, const char *call, orRegion region) {
  orError_t error = orDeviceCheckAddress(d, call, region.base, NULL, region.size);
  if (!error) error = orRegionEnter(region);
  if (error == orErrorAlreadyExists)
    return orFail(
        error,
        "%s of the device factory \"%s\" returned [%p, +%zu), which overlaps memory that is "
        "allocated or registered already",
        call, d->factory->name, region.base, region.size);
  if (!error || !region.base) return error;
  bool host = region.type == orMemoryTypeHost;
  (host ? d->factory->free_host : d->factory->free)(d->desc.self, region.base, region.size);
  return error;
}

orError_t orRegionAllocate(int device, size_t bytes, bool cached, void **ptr) {
  OR_TRY(charge(device, bytes));
  const orDevice *d = orDeviceAt(device);
  uint64_t noted = orNotedErrors();
  orError_t error = d->factory->alloc(d->desc.self, bytes, ptr);
  bool own_file = !error && cached && d->factory == &orSimulatedFactory;
  int file = own_file ? orSharedFileMake(device, *ptr, bytes) : 0;
  error = error ? orDeviceFailed(d, "alloc", error, noted)
                : orRegionAdopt(d, "alloc",
                                (orRegion){.base = *ptr,
                                           .size = bytes,
                                           .type = orMemoryTypeDevice,
                                           .device = device,
                                           .cached = cached,
                                           .file = file});
  if (!error) return orSuccess;
  if (file) orSharedFileEnd(file);
  refund(device, bytes);
  *ptr = NULL;
  return error;
}

orError_t orRegionImport(int device, size_t bytes, int file, void **ptr) {
  const orDevice *d = orDeviceAt(device);
  OR_TRY(d->factory->alloc(d->desc.self, bytes, ptr));
  return orRegionAdopt(d, "alloc",
                       (orRegion){.base = *ptr,
                                  .size = bytes,
                                  .type = orMemoryTypeDevice,
                                  .device = device,
                                  .imported = true,
                                  .file = file});
}

orError_t orRegionRelease(void *ptr) {
  orRegion r;
  OR_TRY(orRegionTake(ptr, orMemoryTypeDevice, false, &r));
  orDevice *d = orDeviceAt(r.device);
  uint64_t noted = orNotedErrors();
  orError_t error = orSuccess;
  /* Addresses where another process's memory stays mapped are not used again. */
  if (!r.file || orSharedFileEnd(r.file)) error = d->factory->free(d->desc.self, r.base, r.size);
  if (!r.imported) refund(r.device, r.size);
  return orDeviceFailed(d, "free", error, noted);
}
