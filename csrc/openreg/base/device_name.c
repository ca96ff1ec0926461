/* The name of the devices in messages: "openreg", or a package's (orNameDevices in config.c). */
#include "base/base.h"
#include "openreg_package.h"

static _Atomic(const char *) devices_name = "openreg";

void orSetDevicesName(const char *name) {
  atomic_store_explicit(&devices_name, name, memory_order_release);
}

const char *orDevicesName(void) {
  return atomic_load_explicit(&devices_name, memory_order_acquire);
}
