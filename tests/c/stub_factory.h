/*
 * A device factory whose devices have no memory: an allocation fails, copies and fills do nothing,
 * a kernel runs at once.
 */
#ifndef STUB_FACTORY_H
#define STUB_FACTORY_H

#include "openreg.h"

static inline orError_t stubCreate(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  return orSuccess;
}
static inline orError_t stubAlloc(void *device, size_t bytes, void **ptr) {
  (void)device, (void)bytes, (void)ptr;
  return orErrorMemoryAllocation;
}
static inline orError_t stubFree(void *device, void *ptr, size_t bytes) {
  (void)device, (void)ptr, (void)bytes;
  return orSuccess;
}
static inline orError_t stubCopy(void *device, void *dst, const void *src, size_t bytes,
                                 orMemcpyKind kind, orEvent_t done) {
  (void)device, (void)dst, (void)src, (void)bytes, (void)kind, (void)done;
  return orSuccess;
}
static inline orError_t stubSet(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)device, (void)dst, (void)value, (void)bytes, (void)done;
  return orSuccess;
}
static inline orError_t stubCompute(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}

#define STUB_FACTORY(text, create)     \
  {.size = sizeof(orDeviceFactory),    \
   .abi_version = OPENREG_ABI_VERSION, \
   .name = text,                       \
   .create_devices = create,           \
   .alloc = stubAlloc,                 \
   .free = stubFree,                   \
   .copy = stubCopy,                   \
   .set = stubSet,                     \
   .compute = stubCompute}

#endif
