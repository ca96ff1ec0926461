/*
 * The exceptions of kernels that failed, so that the synchronising call that reports the core's
 * first failure throws the same type: each is the cause that the core keeps with its failure.
 */
#pragma once

#include <c10/core/Device.h>

#include <exception>
#include <string>

namespace torch_openreg {

/* Inside a task that is about to return an error, or before orEventSignal with one: what the call
 * that reports it throws. `name`: the operator's, or the collective's. */
void setFailure(std::string name, c10::DeviceIndex device, std::exception_ptr exception);

/* Throws what was set for the failure that this thread's last error reports; returns if nothing
 * was. */
void throwFailure();

}  // namespace torch_openreg
