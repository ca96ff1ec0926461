/*
 * A device's compute: a kernel on a stream of an openreg device, at once on any other.
 *
 * No state.
 */
#include <strings.h>

#include "core.h"

static orError_t runQueued(void *args) {
  const orKernel *kernel = args;
  return kernel->fn(kernel->args);
}

static orError_t computeQueued(const orDevice *device, const orKernel *kernel, orStream_t stream) {
  int index = device->desc.index, owner = index;
  if (stream == OR_STREAM_DEFAULT)
    OR_TRY(orStreamGetDefault(&stream, index));
  else
    OR_TRY(orStreamGetDevice(stream, &owner));
  if (owner != index)
    return orFail(orErrorInvalidResourceHandle, "the stream belongs to %s, the kernel is for %s",
                  orDeviceAt(owner)->name, device->name);
  orLaunch launch = {.size = sizeof(launch),
                     .stream = stream,
                     .fn = runQueued,
                     .args = kernel,
                     .args_size = sizeof(*kernel),
                     .name = kernel->name};
  return orLaunchKernelEx(&launch);
}

static orError_t computeAtOnce(const orDevice *device, const orKernel *kernel) {
  const char *name = kernel->name ? kernel->name : "kernel";
  uint64_t began = orProbeOn(OR_PROBE_RAN) ? orNow() : 0;
  uint64_t noted = orNotedErrors();
  orError_t error = device->factory->compute(device->desc.self, kernel, 0);
  if (OR_UNLIKELY(began))
    OR_PROBE(OR_PROBE_RAN, .task = &(orTask){.kind = OR_KIND_KERNEL, .name = name}, .lane = OR_HOST,
             .began = began, .ended = orNow());
  if (!error) return orSuccess;
  if (error == orErrorNotReady)
    return orFail(orErrorNotSupported, "%s has no streams: '%s' cannot complete later",
                  device->name, name);
  return orFail(error, "kernel '%s' failed on %s: %s", name, device->name,
                orErrorDetail(error, noted));
}

orError_t orDeviceCompute(orDevice *device, const orKernel *kernel, orStream_t stream) {
  if (!kernel || !kernel->fn)
    return orFail(orErrorInvalidValue, "orDeviceCompute: the kernel is null");
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceIsValid(device));
  if (!strcasecmp(device->type, "openreg")) return computeQueued(device, kernel, stream);
  if (stream)
    return orFail(orErrorInvalidResourceHandle,
                  "%s has no streams: the stream must be 0, not %#llx", device->name,
                  (unsigned long long)stream);
  return computeAtOnce(device, kernel);
}
