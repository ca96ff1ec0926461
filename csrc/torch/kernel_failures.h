/*
 * The exceptions of kernels that failed, so that the synchronising call that reports the core's first failure throws the
 * same type.
 */
#pragma once

#include <c10/core/Device.h>

#include <exception>
#include <string>

namespace torch_openreg {

/* Keeps the exception for the call that reports the core's failure of `name` on the device, with this text; none: with any. */
void keepFailure(const char *name, c10::DeviceIndex device, std::exception_ptr exception,
                 std::string text = {});

/* Forgets the exceptions of a device that was reset. */
void forgetFailures(c10::DeviceIndex device);

/* Throws what was kept for the core's report; returns if nothing was. */
void throwFailure(const std::string &report);

}  // namespace torch_openreg
