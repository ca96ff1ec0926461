/*
 * The exceptions of failed kernels, so that the synchronising call that reports the core's first
 * failure throws the same type. Each is the cause that the core keeps with its failure.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "stacks.h"

namespace torch_openreg {

/* A kernel has followed a pointer to memory that it cannot reach. */
struct StrayPointer : c10::Error {
  using c10::Error::Error;
};

/* Sets the exception that the reporting call throws. Called inside a task that is about to return
 * an error, or before orEventSignal with one. `name` is the operator's or the collective's. */
void setFailure(std::string name, c10::DeviceIndex device, std::exception_ptr exception);

/* The stack of the call, if it was kept, for this thread's next setFailure. */
void setFailureStack(PythonStack stack);

/* Throws the exception that was set for this thread's last error; returns if there is none. */
void throwFailure();

}  // namespace torch_openreg
