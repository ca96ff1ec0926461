/*
 * A device as an object: its allocators by attributes, tensors made from bytes, and its compute (a
 * kernel on a stream of an openreg device, a direct call on any other).
 *
 * An orAllocator is part of its orDevice, written under `lock` when the first one is requested and
 * read-only after; `self` is the device. `lock` also guards `foreign_memory`, which lists what
 * factories of types other than "CPU" and "openreg" have allocated. It is not held around a
 * factory's call.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "stream/stream.h"

enum { OR_MAX_DIMENSIONS = sizeof(((orTensor *)0)->shape) / sizeof(int64_t) };

/* ---- The three kinds ---- */

static orError_t allocDevice(void *self, size_t bytes, void **ptr) {
  const orDevice *device = self;
  if (!ptr) return orFail(orErrorInvalidValue, "alloc: ptr is null");
  *ptr = NULL;
  OR_TRY(orEnter());
  return orMemoryAllocate(device->desc.index, bytes, false, ptr);
}

static orError_t freeDevice(void *self, void *ptr) {
  const orDevice *device = self;
  OR_TRY(orEnter());
  orRegion region;
  if (ptr && orRegionFind(ptr, &region) && region.device != device->desc.index)
    return orFail(orErrorInvalidValue, "%p is not memory of %s", ptr, device->name);
  return orFree(ptr);
}

static orError_t allocPageable(void *self, size_t bytes, void **ptr) {
  (void)self;
  if (!ptr) return orFail(orErrorInvalidValue, "alloc: ptr is null");
  *ptr = bytes ? malloc(bytes) : NULL;
  if (bytes && !*ptr)
    return orFail(orErrorMemoryAllocation, "cannot allocate %zu bytes of host memory", bytes);
  return orSuccess;
}

static orError_t freePageable(void *self, void *ptr) {
  (void)self;
  free(ptr);
  return orSuccess;
}

static orError_t allocPinned(void *self, size_t bytes, void **ptr) {
  (void)self;
  return orMallocHost(ptr, bytes);
}

static orError_t freePinned(void *self, void *ptr) {
  (void)self;
  return orFreeHost(ptr);
}

/* The factory needs the size again when this is freed. */
typedef struct orForeign {
  struct orForeign *next;
  const orDevice *device;
  void *ptr;
  size_t bytes;
} orForeign;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orForeign *foreign_memory;

static orError_t checkForeign(const orDevice *device, void *ptr, size_t bytes) {
  orError_t error = orDeviceCheckAddress(device, "alloc", ptr, NULL, bytes);
  if (error && ptr) device->factory->free(device->desc.self, ptr, bytes);
  return error;
}

static orError_t allocForeign(void *self, size_t bytes, void **ptr) {
  const orDevice *device = self;
  if (!ptr) return orFail(orErrorInvalidValue, "alloc: ptr is null");
  *ptr = NULL;
  OR_TRY(orEnter());
  if (!bytes) return orSuccess;
  orForeign *entry = malloc(sizeof(*entry));
  if (!entry) return orFail(orErrorMemoryAllocation, "no host memory for an allocation's entry");
  uint64_t noted = orNotedErrors();
  orError_t error = device->factory->alloc(device->desc.self, bytes, ptr);
  if (!error) error = checkForeign(device, *ptr, bytes);
  if (error) {
    free(entry);
    *ptr = NULL;
    return orFail(error, "%zu bytes of %s: %s", bytes, device->name, orErrorDetail(error, noted));
  }
  *entry = (orForeign){.device = device, .ptr = *ptr, .bytes = bytes};
  orMutexLock(&lock);
  entry->next = foreign_memory;
  foreign_memory = entry;
  orMutexUnlock(&lock);
  return orSuccess;
}

static orForeign *takeForeign(const orDevice *device, const void *ptr) {
  orMutexLock(&lock);
  orForeign **at = &foreign_memory;
  while (*at && ((*at)->device != device || (*at)->ptr != ptr)) at = &(*at)->next;
  orForeign *entry = *at;
  if (entry) *at = entry->next;
  orMutexUnlock(&lock);
  return entry;
}

/* The entry is removed first: as soon as the factory has the memory back, it may hand the address
 * to another thread, which adds an entry. With two entries for one address, memory could be freed
 * with the wrong size. Memory that a factory fails to free therefore cannot be freed again. */
static orError_t freeForeign(void *self, void *ptr) {
  const orDevice *device = self;
  OR_TRY(orEnter());
  if (!ptr) return orSuccess;
  orForeign *entry = takeForeign(device, ptr);
  if (!entry)
    return orFail(orErrorInvalidValue, "%p is not the start of live memory of %s", ptr,
                  device->name);
  size_t bytes = entry->bytes;
  free(entry);
  return device->factory->free(device->desc.self, ptr, bytes);
}

/* Lock held. */
static void fillAllocators(orDevice *device) {
  if (device->allocators[0].alloc) return;
  orAllocator pageable = {allocPageable, freePageable, device, "pageable host memory"};
  orAllocator pinned = {allocPinned, freePinned, device, "pinned host memory"};
  orAllocator own = {allocDevice, freeDevice, device, "device memory"};
  orAllocator foreign = {allocForeign, freeForeign, device, "device memory"};
  bool host = !strcasecmp(device->type, "CPU"), openreg = !strcasecmp(device->type, "openreg");
  device->allocators[0] = host ? pageable : openreg ? own : foreign;
  device->allocators[1] = pageable;
  device->allocators[2] = pinned;
}

/* 0: the device's, 1: pageable, 2: pinned. */
static orError_t chooseAllocator(const orDevice *device, unsigned attributes, int *which) {
  if (attributes != orAllocatorDevice && attributes != orAllocatorOnHost &&
      attributes != (orAllocatorOnHost | orAllocatorPinned))
    return orFail(
        orErrorInvalidValue,
        "allocator attributes %#x of %s: allowed are 0 (device), %#x (on host) and %#x (on host, "
        "pinned)",
        attributes, device->name, orAllocatorOnHost, orAllocatorOnHost | orAllocatorPinned);
  *which = attributes & orAllocatorPinned ? 2 : attributes & orAllocatorOnHost ? 1 : 0;
  if (*which == 2 && !orHostDevice()->factory->alloc_host)
    return orFail(orErrorNotSupported,
                  "device factory '%s', which serves the host, has no pinned memory",
                  orHostDevice()->factory->name);
  return orSuccess;
}

orError_t orDeviceGetAllocator(orDevice *device, unsigned attributes,
                               const orAllocator **allocator) {
  if (!allocator) return orFail(orErrorInvalidValue, "orDeviceGetAllocator: allocator is null");
  OR_TRY(orEnter());
  OR_TRY(orDeviceIsValid(device));
  int which;
  OR_TRY(chooseAllocator(device, attributes, &which));
  orMutexLock(&lock);
  fillAllocators(device);
  orMutexUnlock(&lock);
  *allocator = &device->allocators[which];
  return orSuccess;
}

/* ---- Tensors from bytes ---- */

static const struct {
  size_t size;
  const char *name;
} dtypes[] = {
#define OR_X(name, size, text) {size, text},
    OR_DTYPE_LIST(OR_X)
#undef OR_X
};

enum { OR_DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };
OR_COVERS(dtypes, orBool + 1);

static void writeShape(const orTensorProto *proto, char *text, size_t size) {
  size_t length = (size_t)snprintf(text, size, "[");
  for (int i = 0; i < proto->ndim && length < size; i++)
    length += (size_t)snprintf(text + length, size - length, "%s%" PRId64, i ? ", " : "",
                               proto->shape[i]);
  if (length < size) snprintf(text + length, size - length, "]");
}

static orError_t checkShape(const orTensorProto *proto, size_t *bytes) {
  char shape[256];
  writeShape(proto, shape, sizeof(shape));
  const char *dtype = dtypes[proto->dtype].name;
  size_t need = dtypes[proto->dtype].size;
  bool empty = false, overflow = false;
  for (int i = 0; i < proto->ndim; i++) {
    int64_t extent = proto->shape[i];
    if (extent < 0)
      return orFail(orErrorInvalidValue, "dimension %d of shape %s is negative", i, shape);
    if (extent == 0)
      empty = true;
    else
      overflow |= __builtin_mul_overflow(need, (size_t)extent, &need);
  }
  if (empty)
    need = 0;
  else if (overflow)
    return orFail(orErrorInvalidValue, "a tensor of %s with shape %s is larger than any memory",
                  dtype, shape);
  if (need != proto->nbytes)
    return orFail(orErrorInvalidValue,
                  "a tensor of %s with shape %s needs %zu bytes, %zu were given", dtype, shape,
                  need, proto->nbytes);
  *bytes = need;
  return orSuccess;
}

static orError_t checkProto(const orTensorProto *proto, size_t *bytes) {
  if ((unsigned)proto->dtype >= OR_DTYPES)
    return orFail(orErrorInvalidValue, "dtype %d is out of range: 0 to %d", (int)proto->dtype,
                  OR_DTYPES - 1);
  if (proto->ndim < 0 || proto->ndim > OR_MAX_DIMENSIONS)
    return orFail(orErrorInvalidValue, "%d dimensions are out of range: 0 to %d", proto->ndim,
                  OR_MAX_DIMENSIONS);
  if (proto->ndim && !proto->shape)
    return orFail(orErrorInvalidValue, "a tensor of %d dimensions has a null shape", proto->ndim);
  OR_TRY(checkShape(proto, bytes));
  if (*bytes && !proto->bytes)
    return orFail(orErrorInvalidValue, "a tensor of %zu bytes has a null pointer to them", *bytes);
  const unsigned char *at = proto->bytes;
  for (size_t i = 0; proto->dtype == orBool && i < *bytes; i++)
    if (at[i] > 1)
      return orFail(orErrorInvalidValue, "element %zu of a bool tensor is %u: allowed are 0 and 1",
                    i, at[i]);
  return orSuccess;
}

/* A blocking copy runs on the current device's default stream, so make this device current. */
static orError_t copyToDevice(int device, void *dst, const void *src, size_t bytes) {
  int current = orCurrentDevice();
  OR_TRY(orSetDevice(device));
  orError_t error = orMemcpy(dst, src, bytes, orMemcpyHostToDevice);
  orError_t restored = orSetDevice(current);
  return error ? error : restored;
}

static orError_t copyToForeign(const orDevice *device, void *dst, const void *src, size_t bytes) {
  uint64_t noted = orNotedErrors();
  orError_t error =
      device->factory->copy(device->desc.self, dst, src, bytes, orMemcpyHostToDevice, 0);
  if (error == orErrorNotReady)
    return orFail(orErrorNotSupported, "%s has no streams: its copy cannot complete later",
                  device->name);
  if (!error) return orSuccess;
  return orFail(error, "copy of %zu bytes to %s: %s", bytes, device->name,
                orErrorDetail(error, noted));
}

static orError_t fillTensor(const orAllocator *allocator, const orTensorProto *proto, void *data) {
  const orDevice *device = allocator->self;
  if (allocator->alloc == allocForeign)
    return copyToForeign(device, data, proto->bytes, proto->nbytes);
  if (allocator->alloc == allocDevice)
    return copyToDevice(device->desc.index, data, proto->bytes, proto->nbytes);
  memcpy(data, proto->bytes, proto->nbytes);
  return orSuccess;
}

orError_t orDeviceMakeTensor(orDevice *device, const orTensorProto *proto, unsigned attributes,
                             orTensor *tensor) {
  if (!proto || !tensor)
    return orFail(orErrorInvalidValue, "orDeviceMakeTensor: an argument is null");
  OR_TRY(orEnterBlocking());
  orTensor from = {0};
  OR_TRY(OR_FILL(orTensor, tensor, &from, shape));
  const orAllocator *allocator;
  OR_TRY(orDeviceGetAllocator(device, attributes, &allocator));
  size_t bytes = 0;
  OR_TRY(checkProto(proto, &bytes));
  void *data;
  OR_TRY(allocator->alloc(allocator->self, bytes, &data));
  orError_t error = bytes ? fillTensor(allocator, proto, data) : orSuccess;
  if (error) {
    char text[256];
    snprintf(text, sizeof(text), "%s", orGetLastErrorMessage());
    allocator->free(allocator->self, data);
    return orFail(error, "%s", text);
  }
  from = (orTensor){.data = data, .nbytes = bytes, .dtype = proto->dtype, .ndim = proto->ndim};
  for (int i = 0; i < proto->ndim; i++) from.shape[i] = proto->shape[i];
  return OR_FILL(orTensor, tensor, &from, shape);
}

/* ---- Compute ---- */

static orError_t runQueued(void *args) {
  const orKernel *kernel = args;
  return kernel->fn(kernel->args);
}

static orError_t computeQueued(const orDevice *device, const orKernel *kernel, orStream_t stream) {
  int index = device->desc.index, owner = index;
  if (stream == OR_STREAM_DEFAULT)
    OR_TRY(orStreamGetDefault(&stream, index));
  else
    OR_TRY(orStreamGetDevice(stream, &owner));
  if (owner != index)
    return orFail(orErrorInvalidResourceHandle,
                  "orDeviceCompute: the stream belongs to %s but the kernel is for %s",
                  orDeviceAt(owner)->name, device->name);
  orLaunch launch = {.size = sizeof(launch),
                     .stream = stream,
                     .fn = runQueued,
                     .args = kernel,
                     .args_size = sizeof(*kernel),
                     .name = kernel->name};
  return orLaunchKernelEx(&launch);
}

static orError_t computeAtOnce(const orDevice *device, const orKernel *kernel) {
  const char *name = kernel->name ? kernel->name : "kernel";
  uint64_t began = orProbeOn(OR_PROBE_RAN) ? orNow() : 0;
  uint64_t noted = orNotedErrors();
  orError_t error = device->factory->compute(device->desc.self, kernel, 0);
  if (OR_UNLIKELY(began))
    OR_PROBE(OR_PROBE_RAN, .task = &(orTask){.kind = OR_KIND_KERNEL, .name = name},
             .worker = OR_HOST, .began = began, .ended = orNow());
  if (!error) return orSuccess;
  if (error == orErrorNotReady)
    return orFail(orErrorNotSupported, "%s has no streams: '%s' cannot complete later",
                  device->name, name);
  return orFail(error, "kernel '%s' failed on %s: %s", name, device->name,
                orErrorDetail(error, noted));
}

orError_t orDeviceCompute(orDevice *device, const orKernel *kernel, orStream_t stream) {
  if (!kernel || !kernel->fn)
    return orFail(orErrorInvalidValue, "orDeviceCompute: the kernel is null");
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceIsValid(device));
  if (!strcasecmp(device->type, "openreg")) return computeQueued(device, kernel, stream);
  if (stream)
    return orFail(orErrorInvalidResourceHandle,
                  "%s has no streams: the stream must be 0, not %#llx", device->name,
                  (unsigned long long)stream);
  return computeAtOnce(device, kernel);
}
