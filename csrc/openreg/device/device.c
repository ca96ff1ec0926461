/*
 * Devices as a caller sees them: the thread's current device, properties, peers.
 */
#include <stdio.h>

#include "device/device.h"
#include "openreg_package.h"

static _Thread_local int current;

int orCurrentDevice(void) { return current; }

static int deviceCount(void) {
  int n = 0;
  while (orDeviceAt(n)) n++;
  return n;
}

orError_t orDeviceCheck(int index) {
  OR_TRY(orDevicesInit());
  if (index >= 0 && orDeviceAt(index)) return orSuccess;
  int n = deviceCount();
  if (!n)
    return orFail(orErrorNoDevice, "device index %d: there is no %s device", index,
                  orDevicesName());
  return orFail(orErrorInvalidDevice, "device index %d is out of range: it must be 0 to %d", index,
                n - 1);
}

/* ---- what a factory returns ---- */

orError_t orDeviceFailed(const orDevice *d, const char *call, orError_t error, uint64_t before) {
  error = orFactoryResult(d->factory, call, error);
  if (!error || orNotedErrors() != before) return error;
  return orFail(error, "%s of the device factory \"%s\": %s", call, d->factory->name,
                orGetErrorString(error));
}

orError_t orDeviceCheckAddress(const orDevice *d, const char *call, const void *address,
                               const void *ptr, size_t bytes) {
  uintptr_t at = (uintptr_t)address;
  if (OR_LIKELY(at && (at ^ (uintptr_t)ptr) % OR_ALIGNMENT == 0 && bytes <= UINTPTR_MAX - at))
    return orSuccess;
  return orFail(orErrorSystem,
                "%s of the device factory \"%s\" returned %p for %zu bytes; allowed are addresses "
                "that are not null, %zu past a multiple of %d, and end within the address space",
                call, d->factory->name, address, bytes, (size_t)((uintptr_t)ptr % OR_ALIGNMENT),
                OR_ALIGNMENT);
}

orError_t orDeviceMap(const orDevice *d, const void *ptr, size_t bytes, void **address) {
  uint64_t noted = orNotedErrors();
  *address = NULL;
  orError_t error = d->factory->map(d->desc.self, ptr, bytes, address);
  if (OR_UNLIKELY(error)) return orDeviceFailed(d, "map", error, noted);
  return orDeviceCheckAddress(d, "map", *address, ptr, bytes);
}

/* ---- public ---- */

orError_t orGetDeviceCount(int *count) {
  if (!count) return orFail(orErrorInvalidValue, "orGetDeviceCount: null result");
  *count = 0;
  OR_TRY(orDevicesInit());
  *count = deviceCount();
  return orSuccess;
}

orError_t orGetDevice(int *device) {
  OR_TRY(orEnter());
  if (!device) return orFail(orErrorInvalidValue, "orGetDevice: null result");
  *device = current;
  return orSuccess;
}

orError_t orSetDevice(int device) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  current = device;
  return orSuccess;
}

/* The factory gets a structure of its own, so that it changes nothing else. */
static orError_t askProperties(const orDevice *d, orDeviceProperties *p) {
  orDeviceProperties own = {.size = sizeof own};
  if (!d->factory->properties) return orSuccess;
  uint64_t noted = orNotedErrors();
  orError_t error = d->factory->properties(d->desc.self, &own);
  if (error) return orDeviceFailed(d, "properties", error, noted);
  snprintf(p->model, sizeof p->model, "%.63s", own.model);
  p->major = own.major;
  p->minor = own.minor;
  return orSuccess;
}

orError_t orGetDeviceProperties(orDeviceProperties *p, int device) {
  if (!p) return orFail(orErrorInvalidValue, "orGetDeviceProperties: null result");
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  const orDevice *d = orDeviceAt(device);
  orDeviceProperties from = {.total_memory = d->desc.memory_limit,
                             .index = device,
                             .numa_node = d->desc.numa_node,
                             .lanes = orWorkerLimit(),
                             .host_cores = orHostCores(),
                             .can_map = d->can_map};
  snprintf(from.name, sizeof from.name, "%s", d->name);
  snprintf(from.factory, sizeof from.factory, "%s", d->factory->name);
  OR_TRY(askProperties(d, &from));
  return OR_FILL(orDeviceProperties, p, &from, integrated);
}

static bool couldReach(int device, int peer) {
  return device != peer && orConfigGet()->peer_access &&
         orDeviceAt(device)->factory == orDeviceAt(peer)->factory;
}

orError_t orDeviceCanAccessPeer(int *can, int device, int peer) {
  if (!can) return orFail(orErrorInvalidValue, "orDeviceCanAccessPeer: null result");
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  OR_TRY(orDeviceCheck(peer));
  *can = couldReach(device, peer);
  return orSuccess;
}

orError_t orDeviceEnablePeerAccess(int device, int peer) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  OR_TRY(orDeviceCheck(peer));
  if (!couldReach(device, peer))
    return orFail(orErrorNotSupported, "device %d has no peer access to device %d", device, peer);
  atomic_fetch_or_explicit(&orDeviceAt(device)->peers, UINT64_C(1) << peer, memory_order_relaxed);
  return orSuccess;
}

bool orDeviceReachesPeer(int device, int peer) {
  return atomic_load_explicit(&orDeviceAt(device)->peers, memory_order_relaxed) >> peer & 1;
}
