/*
 * A plugin without orPluginInit: its factory registers itself, at the priority that the setting
 * says.
 *
 * OPENREG_TEST_GATE: the address of an atomic_int. The library's first constructor makes it 1 and
 * waits until it is 2; its last one then uses the devices.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "../stub_factory.h"

static const orDeviceFactory factory = STUB_FACTORY("registered at load", stubCreate);

static atomic_int *gate(void) {
  const char *text = getenv("OPENREG_TEST_GATE");
  void *address = NULL;
  if (text && sscanf(text, "%p", &address) != 1) abort();
  return address;
}

__attribute__((constructor(101))) static void await(void) {
  if (!gate()) return;
  atomic_store(gate(), 1);
  while (atomic_load(gate()) != 2) sched_yield();
}

OR_REGISTER_DEVICE_FACTORY("openreg", atoi(getenv("OPENREG_TEST_PRIORITY")), &factory)

__attribute__((constructor)) static void use(void) {
  int count;
  if (gate() && orGetDeviceCount(&count)) abort();
}
