/* A plugin without orPluginInit: its factory registers itself, at the priority that the setting says. */
#include <stdlib.h>

#include "../stub_factory.h"

static const orDeviceFactory factory = STUB_FACTORY("registered at load", stubCreate);

OR_REGISTER_DEVICE_FACTORY("openreg", atoi(getenv("OPENREG_TEST_PRIORITY")), &factory)
