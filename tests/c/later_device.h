/*
 * A vendor's device that finishes a copy when the test signals `asked`, the event that the copy was
 * given.
 */
#ifndef LATER_DEVICE_H
#define LATER_DEVICE_H

#include <stdatomic.h>
#include <stdlib.h>

#include "harness.h"
#include "stub_factory.h"

static _Atomic orEvent_t asked;

static orError_t createLater(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; i++) devices[i].memory_limit = 1 << 20;
  return orSuccess;
}
static orError_t allocLater(void *device, size_t bytes, void **ptr) {
  (void)device;
  *ptr = aligned_alloc(4096, bytes);
  return orSuccess;
}
static orError_t freeLater(void *device, void *ptr, size_t bytes) {
  (void)device, (void)bytes;
  free(ptr);
  return orSuccess;
}
static orError_t copyLater(void *device, void *dst, const void *src, size_t bytes,
                           orMemcpyKind kind, orEvent_t done) {
  (void)device, (void)dst, (void)src, (void)bytes, (void)kind;
  atomic_store(&asked, done);
  return orErrorNotReady;
}

static const orDeviceFactory later = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "later",
    .create_devices = createLater,
    .alloc = allocLater,
    .free = freeLater,
    .copy = copyLater,
    .set = stubSet,
    .compute = stubCompute,
};

#endif
