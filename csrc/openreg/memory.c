/*
 * Regions: which addresses are allocated, on which device, by which allocator.
 *
 * One tree, ordered by address, holds every live region of the process: device memory of all
 * devices (simulated or a vendor's), pinned host memory and registered host memory. It answers what
 * any pointer is, and every copy is checked against it. It is a treap: its shape is that of random
 * insertion whatever the order of addresses, so look-ups stay logarithmic without rebalancing
 * rules.
 *
 * `lock` guards the tree, its nodes and `used`. The factories' functions are called outside it: an
 * allocation first charges the capacity, then asks the factory, then enters the tree; a release
 * goes the other way round, so that an address is in the tree only while its owner has it.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct orNode {
  orRegion region;
  uint32_t priority;
  struct orNode *left, *right;
} orNode;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_REGIONS);
static orNode *root;
static size_t used[OPENREG_MAX_DEVICES];

/* ---- the tree ---- */

static uint32_t nextPriority(void) {
  static uint32_t last = OR_TREE_SEED;
  return last = orTreePriority(last);
}

static uintptr_t address(const orNode *n) { return (uintptr_t)n->region.base; }

/* Parts a tree into what lies below `at` and what does not. */
static void split(orNode *n, uintptr_t at, orNode **below, orNode **rest) {
  while (n) {
    if (address(n) < at) {
      *below = n;
      below = &n->right;
      n = n->right;
    } else {
      *rest = n;
      rest = &n->left;
      n = n->left;
    }
  }
  *below = *rest = NULL;
}

static orNode *join(orNode *a, orNode *b) {
  orNode *result, **at = &result;
  while (a && b) {
    if (a->priority > b->priority) {
      *at = a;
      at = &a->right;
      a = a->right;
    } else {
      *at = b;
      at = &b->left;
      b = b->left;
    }
  }
  *at = a ? a : b;
  return result;
}

static void insert(orNode *node) {
  orNode **at = &root;
  while (*at && (*at)->priority >= node->priority)
    at = address(node) < address(*at) ? &(*at)->left : &(*at)->right;
  split(*at, address(node), &node->left, &node->right);
  *at = node;
}

/* The node with the greatest base at or below `p`. */
static orNode *floorNode(uintptr_t p) {
  orNode *best = NULL;
  for (orNode *n = root; n;) {
    if (address(n) <= p) {
      best = n;
      n = n->right;
    } else {
      n = n->left;
    }
  }
  return best;
}

static orNode *find(const void *ptr) {
  orNode *n = floorNode((uintptr_t)ptr);
  return n && (uintptr_t)ptr - address(n) < n->region.size ? n : NULL;
}

static void removeNode(orNode *node) {
  orNode **at = &root;
  while (*at != node) at = address(node) < address(*at) ? &(*at)->left : &(*at)->right;
  *at = join(node->left, node->right);
}

static bool overlaps(const void *base, size_t size) {
  orNode *n = floorNode((uintptr_t)base + size - 1);
  return n && address(n) + n->region.size > (uintptr_t)base;
}

/* ---- regions ---- */

bool orRegionFind(const void *ptr, orRegion *region) {
  orMutexLock(&lock);
  orNode *n = find(ptr);
  if (n) *region = n->region;
  orMutexUnlock(&lock);
  return n != NULL;
}

size_t orRegionUsed(int device) {
  orMutexLock(&lock);
  size_t n = used[device];
  orMutexUnlock(&lock);
  return n;
}

/* Capacity is charged in pages, because that is what an allocation occupies. */
static size_t pages(size_t bytes) { return (bytes + OR_PAGE - 1) & ~(size_t)(OR_PAGE - 1); }

static orError_t charge(int device, size_t bytes) {
  size_t limit = orDeviceAt(device)->desc.memory_limit;
  orMutexLock(&lock);
  size_t in_use = used[device];
  bool fits = bytes <= limit && pages(bytes) <= limit - in_use;
  if (fits) used[device] += pages(bytes);
  orMutexUnlock(&lock);
  if (fits) return orSuccess;
  return orFail(orErrorMemoryAllocation, "device %d: %zu bytes asked for, %zu of %zu are free",
                device, bytes, limit - in_use, limit);
}

static void refund(int device, size_t bytes) {
  orMutexLock(&lock);
  used[device] -= pages(bytes);
  orMutexUnlock(&lock);
}

static orError_t enter(orRegion region) {
  orNode *n = malloc(sizeof *n);
  if (!n) return orFail(orErrorMemoryAllocation, "no host memory for an allocation's entry");
  *n = (orNode){.region = region};
  orMutexLock(&lock);
  bool taken = overlaps(region.base, region.size);
  if (!taken) {
    n->priority = nextPriority();
    insert(n);
  }
  orMutexUnlock(&lock);
  if (!taken) return orSuccess;
  free(n);
  return orFail(orErrorAlreadyExists,
                "[%p, +%zu) overlaps memory that is allocated or registered already", region.base,
                region.size);
}

/* Takes the region that starts at `ptr` out of the tree. */
static orError_t take(const void *ptr, orMemoryType type, bool registered, orRegion *region) {
  orMutexLock(&lock);
  orNode *n = find(ptr);
  bool ok =
      n && n->region.base == ptr && n->region.type == type && n->region.registered == registered;
  if (ok) {
    *region = n->region;
    removeNode(n);
  }
  orMutexUnlock(&lock);
  if (ok) {
    free(n);
    return orSuccess;
  }
  return orFail(orErrorInvalidValue, "%p is not the start of a live %s", ptr,
                type == orMemoryTypeDevice ? "device allocation"
                : registered               ? "registered range"
                                           : "pinned allocation");
}

orError_t orRegionAllocate(int device, size_t bytes, bool cached, void **ptr) {
  *ptr = NULL;
  if (!bytes) return orSuccess;
  OR_TRY(orDeviceUse(device));
  OR_TRY(orDeviceCheckLost(device));
  OR_TRY(charge(device, bytes));
  orDevice *d = orDeviceAt(device);
  orError_t error = d->factory->alloc(d->desc.self, bytes, ptr);
  if (!error) {
    error = enter((orRegion){
        .base = *ptr, .size = bytes, .type = orMemoryTypeDevice, .device = device, .cached = cached});
    if (error) d->factory->free(d->desc.self, *ptr, bytes);
  }
  if (error) {
    refund(device, bytes);
    *ptr = NULL;
  }
  if (OR_LIKELY(error != orErrorDeviceLost)) return error;
  orDeviceNoteFailure(device, error, "alloc", NULL);
  OR_TRY(orDeviceCheckLost(device));
  return orFail(error, "openreg:%d was lost while it allocated, and has been reset", device);
}

orError_t orRegionRelease(void *ptr) {
  orRegion r;
  OR_TRY(take(ptr, orMemoryTypeDevice, false, &r));
  if (orSanitizerOn()) orSanitizerNoteRelease((uintptr_t)r.base, r.size);
  orDevice *d = orDeviceAt(r.device);
  orError_t error = d->factory->free(d->desc.self, r.base, r.size);
  refund(r.device, r.size);
  return error;
}

/* ---- public ---- */

orError_t orMalloc(void **ptr, size_t bytes) {
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orMalloc: null result");
  int device = orCurrentDevice();
  if (OR_UNLIKELY(bytes && orFaultAllocation(device, bytes))) {
    *ptr = NULL;
    return orFail(orErrorMemoryAllocation, "openreg:%d: no %zu bytes" OR_FAULT_OOM_TEXT, device,
                  bytes);
  }
  return orRegionAllocate(device, bytes, false, ptr);
}

orError_t orFree(void *ptr) {
  orRegion r;
  if (!ptr) return orSuccess;
  OR_TRY(orEnterBlocking());
  if (!orRegionFind(ptr, &r) || r.base != ptr || r.type != orMemoryTypeDevice)
    return orFail(orErrorInvalidValue, "%p is not the start of a live device allocation", ptr);
  if (r.cached)
    return orFail(orErrorInvalidValue, "%p belongs to the caching allocator: use orCacheFree", ptr);
  /* Every device can reach every other's memory: wait for all of them. */
  orStreamSynchronizeDevice(-1);
  return orRegionRelease(ptr);
}

orError_t orMallocHost(void **ptr, size_t bytes) {
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orMallocHost: null result");
  *ptr = NULL;
  if (!bytes) return orSuccess;
  OR_TRY(orDevicesInit());
  orDevice *host = orHostDevice();
  if (!host->factory->alloc_host)
    return orFail(orErrorNotSupported, "the host factory \"%s\" has no pinned memory",
                  host->factory->name);
  orProcessActivate();
  OR_TRY(host->factory->alloc_host(host->desc.self, bytes, ptr));
  orError_t error =
      enter((orRegion){.base = *ptr, .size = bytes, .type = orMemoryTypeHost, .device = -1});
  if (error) {
    host->factory->free_host(host->desc.self, *ptr, bytes);
    *ptr = NULL;
  }
  return error;
}

orError_t orFreeHost(void *ptr) {
  orRegion r;
  if (!ptr) return orSuccess;
  OR_TRY(orEnterBlocking());
  if (!orRegionFind(ptr, &r) || r.base != ptr || r.type != orMemoryTypeHost || r.registered)
    return orFail(orErrorInvalidValue, "%p is not the start of a live pinned allocation", ptr);
  orStreamSynchronizeDevice(-1);
  OR_TRY(take(ptr, orMemoryTypeHost, false, &r));
  if (orSanitizerOn()) orSanitizerNoteRelease((uintptr_t)r.base, r.size);
  orDevice *host = orHostDevice();
  return host->factory->free_host(host->desc.self, r.base, r.size);
}

orError_t orHostRegister(void *ptr, size_t bytes) {
  OR_TRY(orEnter());
  if (!ptr || !bytes)
    return orFail(orErrorInvalidValue, "orHostRegister(%p, %zu): an empty range", ptr, bytes);
  if ((uintptr_t)ptr + bytes < (uintptr_t)ptr)
    return orFail(orErrorInvalidValue,
                  "orHostRegister(%p, %zu): the range ends past the address space", ptr, bytes);
  OR_TRY(orDevicesInit());
  orProcessActivate();
  return enter((orRegion){
      .base = ptr, .size = bytes, .type = orMemoryTypeHost, .device = -1, .registered = true});
}

orError_t orHostUnregister(void *ptr) {
  orRegion r;
  OR_TRY(orEnterBlocking());
  if (!orRegionFind(ptr, &r) || r.base != ptr || !r.registered)
    return orFail(orErrorInvalidValue, "%p is not the start of a registered range", ptr);
  orStreamSynchronizeDevice(-1);
  OR_TRY(take(ptr, orMemoryTypeHost, true, &r));
  if (orSanitizerOn()) orSanitizerNoteRelease((uintptr_t)r.base, r.size);
  return orSuccess;
}

orError_t orPointerGetAttributes(orPointerAttributes *attributes, const void *ptr) {
  orRegion r;
  OR_TRY(orEnter());
  if (!attributes) return orFail(orErrorInvalidValue, "orPointerGetAttributes: null result");
  *attributes = (orPointerAttributes){.type = orMemoryTypeUnregistered, .device = -1};
  if (orRegionFind(ptr, &r))
    *attributes =
        (orPointerAttributes){.type = r.type, .device = r.device, .base = r.base, .size = r.size};
  return orSuccess;
}

orError_t orMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  OR_TRY(orEnter());
  if (!free_bytes || !total_bytes) return orFail(orErrorInvalidValue, "orMemGetInfo: null result");
  int device = orCurrentDevice();
  OR_TRY(orDeviceCheck(device));
  *total_bytes = orDeviceAt(device)->desc.memory_limit;
  *free_bytes = *total_bytes - orRegionUsed(device);
  return orSuccess;
}
