/*
 * Running a C++ function as a task of a stream, and waiting for it.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <openreg.h>

namespace torch_openreg {

/* Runs `kernel` on a lane, after everything queued on `stream`, and returns when it has run. The GIL,
 * if held, is released while the caller sleeps. On the lane the function has the caller's thread
 * count (on the wide lane) and flush-denormal mode, no autograd and no dispatch modes. What it throws
 * is thrown here, type kept; warnings it raises are issued here. `name` must outlive the process. */
void runOnLane(orStream_t stream, const char *name, c10::function_ref<void()> kernel);

/* Whether kernels can reach the device's memory (orMapForKernel); else everything is copied. */
bool canMap(c10::DeviceIndex device);

}  // namespace torch_openreg
