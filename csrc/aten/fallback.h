/*
 * Runs every operator that has no registration of its own.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

#include "fast_path.h"
#include "op_traits.h"

namespace torch_openreg {

/* Runs the CPU kernel of `op` on a worker, in place of the device's: takes its arguments from the
 * stack and leaves its results there. Returns at once if the results' metadata is known, and
 * otherwise when the kernel has run. */
void runCpuKernel(const c10::OperatorHandle &op, torch::jit::Stack *stack);

/* The same for a call that is not on the fast path. `kernel`: the CPU's key. */
void runScanned(const c10::OperatorHandle &op, const OpTraits &traits, const ArgumentScan &scan,
                torch::jit::Stack *stack, c10::DispatchKey kernel = c10::DispatchKey::CPU);

/* The same for sparse, quantized or nested tensors among the arguments: `kernel` is the CPU's key
 * for them. Returns at once for the operators of sparse.h. For others it waits, because the sizes
 * of the results' components are known only after the kernel. */
void runCpuKernelWithComponents(const c10::OperatorHandle &op, torch::jit::Stack *stack,
                                c10::DispatchKey kernel);

/* Registers a kernel that takes its arguments unboxed. Returns false if there is no such kernel for
 * the operator's signature. */
bool registerUnboxed(const c10::OperatorHandle &op);

/* Runs an operator's kernel for the CPU with arguments that stay in the list, and drops its
 * result. */
using CpuCall = std::function<void(torch::jit::Stack &arguments)>;
/* Empty for a signature for which registerUnboxed has no kernel. */
CpuCall unboxedCall(const c10::OperatorHandle &op);

/* Registers, at the import, the operators that may make a program's first tensor.
 * registerOperators registers the rest. */
void registerMakers();

/* Registers torch.autocast's lists. Called at the first use, because writing them into the tables
 * of all operators takes milliseconds. Set by ops/autocast.cpp as it is loaded. */
inline void (*registerAutocast)() = nullptr;

/* Registers kernels for the operators for which the dispatcher would find a composite kernel before
 * the fallback. Called before the first tensor is made, and not at import, because it visits all
 * operators. Further calls do nothing. */
void registerOperators();

}  // namespace torch_openreg
