/*
 * The two factories of the host ("CPU"): the plain one, and one with pinned host memory for
 * devices.
 *
 * No state. A description's `self` is null.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "device/pinned_alias.h"

static orError_t createHosts(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  size_t limit;
  OR_TRY(orHostMemoryLimit(&limit));
  for (int i = 0; i < count; i++) {
    devices[i].memory_limit = limit;
    devices[i].numa_node = -1;
    devices[i].self = NULL;
  }
  return orSuccess;
}

static orError_t computeHost(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}

/* Private, so that a forked reader of the parent's data has its own copy. */
static orError_t allocPinned(void *device, size_t bytes, void **ptr) {
  (void)device;
  *ptr = NULL;
  if (bytes == 0) return orSuccess;
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return orFail(orErrorMemoryAllocation,
                  "cannot map %zu bytes of pinned host memory: %s (errno %d)", bytes,
                  strerror(errno), errno);
  orAliasNew(memory, bytes);
  *ptr = memory;
  return orSuccess;
}

static orError_t freePinned(void *device, void *ptr, size_t bytes) {
  (void)device;
  if (!ptr) return orSuccess;
  orAliasForget(ptr);
  orUnmap(ptr, bytes);
  return orSuccess;
}

const orDeviceFactory orPlainHostFactory = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "host",
    .create_devices = createHosts,
    .compute = computeHost,
};

const orDeviceFactory orPinnedHostFactory = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "host with pinned memory",
    .create_devices = createHosts,
    .compute = computeHost,
    .alloc_host = allocPinned,
    .free_host = freePinned,
};
