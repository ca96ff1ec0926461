/*
 * Kernels with their operators' own C++ signatures, for the operators that are called most.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_openreg {

/* Registers a kernel that takes its arguments as they are, where the fallback would get them in boxes; false if the
 * operator's signature is not among those there is a kernel for. */
bool registerUnboxed(const c10::OperatorHandle &op);

}  // namespace torch_openreg
