/*
 * Allocates and frees memory for callers, device memory and pinned host memory, registers host
 * memory, and describes pointers.
 *
 * It has no state. A free waits for all devices first, because each can reach the memory; if that
 * wait fails, the memory stays as it is.
 */
#include "openreg_package.h"
#include "stream/stream.h"

orError_t orMemoryAllocate(int device, size_t bytes, bool cached, void **ptr) {
  *ptr = NULL;
  if (!bytes) return orSuccess;
  OR_TRY(orDeviceUse(device));
  OR_TRY(orDeviceCheckLost(device));
  orError_t error = orRegionAllocate(device, bytes, cached, ptr);
  if (OR_LIKELY(error != orErrorDeviceLost)) return error;
  orDeviceNoteFailure(device, error, "alloc", NULL);
  OR_TRY(orDeviceCheckLost(device));
  return orFail(error, "%s:%d was lost while it allocated, and has been reset", orDevicesName(),
                device);
}

orError_t orMalloc(void **ptr, size_t bytes) {
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orMalloc: null result");
  int device = orCurrentDevice();
  orProbe asked = {.device = device, .bytes = bytes};
  if (orProbeOn(OR_PROBE_ALLOCATION) && bytes) orProbeCall(OR_PROBE_ALLOCATION, &asked);
  if (OR_LIKELY(!asked.fails)) return orMemoryAllocate(device, bytes, false, ptr);
  *ptr = NULL;
  return orFail(orErrorMemoryAllocation, "%s:%d: cannot allocate %zu bytes (%s)", orDevicesName(),
                device, bytes, asked.fails);
}

orError_t orFree(void *ptr) {
  orRegion r;
  if (!ptr) return orSuccess;
  OR_TRY(orEnterBlocking());
  OR_TRY(orRegionCheck(ptr, orMemoryTypeDevice, false, &r));
  if (r.cached)
    return orFail(orErrorInvalidValue, "%p belongs to the caching allocator: use orCacheFree", ptr);
  if (r.imported)
    return orFail(orErrorInvalidValue, "%p belongs to another process: use orIpcRelease", ptr);
  /* Every device can reach every other's memory, so wait for all. */
  OR_TRY(orStreamSynchronizeDevice(NULL, -1));
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
  uint64_t noted = orNotedErrors();
  void *memory = NULL;
  orError_t error = host->factory->alloc_host(host->desc.self, bytes, &memory);
  if (error) return orDeviceFailed(host, "alloc_host", error, noted);
  OR_TRY(orRegionAdopt(
      host, "alloc_host",
      (orRegion){.base = memory, .size = bytes, .type = orMemoryTypeHost, .device = -1}));
  *ptr = memory;
  return orSuccess;
}

orError_t orFreeHost(void *ptr) {
  orRegion r;
  if (!ptr) return orSuccess;
  OR_TRY(orEnterBlocking());
  OR_TRY(orRegionCheck(ptr, orMemoryTypeHost, false, &r));
  OR_TRY(orStreamSynchronizeDevice(NULL, -1));
  OR_TRY(orRegionTake(ptr, orMemoryTypeHost, false, &r));
  orDevice *host = orHostDevice();
  uint64_t noted = orNotedErrors();
  orError_t error = host->factory->free_host(host->desc.self, r.base, r.size);
  return orDeviceFailed(host, "free_host", error, noted);
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
  return orRegionEnter((orRegion){
      .base = ptr, .size = bytes, .type = orMemoryTypeHost, .device = -1, .registered = true});
}

orError_t orHostUnregister(void *ptr) {
  orRegion r;
  OR_TRY(orEnterBlocking());
  OR_TRY(orRegionCheck(ptr, orMemoryTypeHost, true, &r));
  OR_TRY(orStreamSynchronizeDevice(NULL, -1));
  OR_TRY(orRegionTake(ptr, orMemoryTypeHost, true, &r));
  return orSuccess;
}

orError_t orPointerGetAttributes(orPointerAttributes *attributes, const void *ptr) {
  orRegion r;
  OR_TRY(orEnter());
  if (!attributes) return orFail(orErrorInvalidValue, "orPointerGetAttributes: null result");
  orPointerAttributes from = {.type = orMemoryTypeUnregistered, .device = -1};
  if (orRegionFind(ptr, &r))
    from =
        (orPointerAttributes){.type = r.type, .device = r.device, .base = r.base, .size = r.size};
  return OR_FILL(orPointerAttributes, attributes, &from, size);
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
