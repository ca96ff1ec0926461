/*
 * Keeps the kernels that a program registers from Python for the CPU's dispatch keys away from the
 * device: they are for the program's own CPU tensors.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_openreg {

/* Whether the kernel for `key` is Python's and has replaced none. */
bool hasPythonKernelAlone(const c10::OperatorHandle &op, c10::DispatchKey key);

}  // namespace torch_openreg
