/* Plugins that go wrong in the way that OPENREG_TEST_PLUGIN names. */
#include <stdlib.h>
#include <string.h>

#include "../stub_factory.h"

static orError_t create(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  return orErrorNotSupported;
}

static orDeviceFactory factory = STUB_FACTORY("bad plugin", create);

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
