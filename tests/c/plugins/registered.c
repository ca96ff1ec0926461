/* A plugin without orPluginInit: its factory registers itself, at the priority that the setting says. */
#include <stdlib.h>

#include "openreg.h"

static orError_t create(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; ++i) devices[i].memory_limit = 4096;
  return orSuccess;
}
static orError_t alloc(void *device, size_t bytes, void **ptr) {
  (void)device, (void)bytes, (void)ptr;
  return orErrorMemoryAllocation;
}
static orError_t release(void *device, void *ptr, size_t bytes) {
  (void)device, (void)ptr, (void)bytes;
  return orSuccess;
}
static orError_t copy(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                      orEvent_t done) {
  (void)device, (void)dst, (void)src, (void)bytes, (void)kind, (void)done;
  return orSuccess;
}
static orError_t set(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)device, (void)dst, (void)value, (void)bytes, (void)done;
  return orSuccess;
}
static orError_t compute(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}

static const orDeviceFactory factory = {.size = sizeof(orDeviceFactory),
                                        .abi_version = OPENREG_ABI_VERSION,
                                        .name = "registered at load",
                                        .create_devices = create,
                                        .alloc = alloc,
                                        .free = release,
                                        .copy = copy,
                                        .set = set,
                                        .compute = compute};

OR_REGISTER_DEVICE_FACTORY("openreg", atoi(getenv("OPENREG_TEST_PRIORITY")), &factory)
