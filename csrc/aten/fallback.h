/*
 * Every operator that has no registration of its own.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

#include "fast_path.h"
#include "op_traits.h"

namespace torch_openreg {

/* Runs the CPU kernel of `op` on a worker, in place of the device's: takes its arguments from the
 * stack and leaves its results there. Returns at once where the results' metadata is known; else
 * when it has run. */
void runCpuKernel(const c10::OperatorHandle &op, torch::jit::Stack *stack);

/* The same for a call that is not on the fast path. `kernel`: the CPU's key. */
void runScanned(const c10::OperatorHandle &op, const OpTraits &traits, const ArgumentScan &scan,
                torch::jit::Stack *stack, c10::DispatchKey kernel = c10::DispatchKey::CPU);

/* The same for sparse, quantized or nested tensors among the arguments: `kernel` is the CPU's key
 * for them. It always waits: how much memory their parts take is known when the kernel has run. */
void runCpuKernelWithComponents(const c10::OperatorHandle &op, torch::jit::Stack *stack,
                                c10::DispatchKey kernel);

/* Registers a kernel that takes its arguments as they are, where the fallback would get them in
 * boxes; false if the operator's signature is not among those there is a kernel for. */
bool registerUnboxed(const c10::OperatorHandle &op);

/* Runs an operator's kernel for the CPU with arguments that stay in the list, and drops its
 * result. */
using CpuCall = std::function<void(torch::jit::Stack &arguments)>;
/* Empty for the signatures that registerUnboxed has no kernel for. */
CpuCall unboxedCall(const c10::OperatorHandle &op);

/* Registers, at the import, the operators that may make a program's first tensor.
 * registerOperators registers the rest. */
void registerMakers();

/* Registers torch.autocast's lists. Called at the first use, because writing them into the tables
 * of all operators takes milliseconds. Set by ops/autocast.cpp as it is loaded. */
inline void (*registerAutocast)() = nullptr;

/* Registers kernels for operators that a composite one would be found for before the fallback.
 * Before the first tensor is made, and not at import, as it takes a walk over all operators. Once:
 * further calls do nothing. */
void registerOperators();

}  // namespace torch_openreg
