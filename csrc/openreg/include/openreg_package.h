/*
 * For a package that offers a device of its own name, made by its own factory:
 * `python -m torch_openreg new-device` writes one.
 */
#ifndef OPENREG_PACKAGE_H
#define OPENREG_PACKAGE_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the devices of type "openreg" another name, which messages and the names of devices then
 * have: lower-case letters, digits and underscores, at most 23 characters. Their factory is the
 * plugin's at that path, unless OPENREG_PLUGIN is set. Once, and before any setting was read:
 * afterwards orErrorAlreadyInitialized. */
OR_API orError_t orNameDevices(const char *name, const char *plugin);
/* "openreg", or what orNameDevices was given. */
OR_API const char *orDevicesName(void);

#ifdef __cplusplus
}
#endif

#endif
