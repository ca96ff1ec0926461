/* Plugins that go wrong in the way that OPENREG_TEST_PLUGIN names. */
#include <stdlib.h>
#include <string.h>

#include "openreg.h"

static orError_t create(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  return orErrorNotSupported;
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
  (void)device, (void)kernel, (void)done;
  return orSuccess;
}

static orDeviceFactory factory = {.size = sizeof(orDeviceFactory),
                                  .abi_version = OPENREG_ABI_VERSION,
                                  .name = "bad plugin",
                                  .create_devices = create,
                                  .alloc = alloc,
                                  .free = release,
                                  .copy = copy,
                                  .set = set,
                                  .compute = compute};

OR_API orError_t orPluginInit(void) {
  const char *mode = getenv("OPENREG_TEST_PLUGIN");
  int priority = 100;
  if (!mode || !strcmp(mode, "nothing")) return orSuccess;
  if (!strcmp(mode, "error")) return orErrorNotPermitted;
  if (!strcmp(mode, "version")) factory.abi_version = 999;
  if (!strcmp(mode, "size")) factory.size = 16;
  if (!strcmp(mode, "equal") || !strcmp(mode, "equal ignored")) priority = 0;
  orError_t error = orRegisterDeviceFactory("openreg", priority, &factory);
  if (!strcmp(mode, "equal ignored")) return orSuccess;
  if (!strcmp(mode, "late error")) return orErrorSystem;
  if (!strcmp(mode, "asks")) {
    int count;
    return orGetDeviceCount(&count);
  }
  return error;
}
