/*
 * Operators of sparse, quantized and nested tensors that do not wait: those whose sizes are known
 * before they run, as on CUDA.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_openreg {

/* Of an operator that waits: whether CUDA's synchronises too, so that it orders what comes
 * later. */
bool synchronizesElsewhere(const c10::OperatorHandle &op, c10::DispatchKey kernel);

/* Takes the operator's arguments from the stack and leaves its results there, or leaves the stack
 * alone (false) for who waits. `kernel` is the CPU's key for the tensors. */
bool runWithoutWait(const c10::OperatorHandle &op, torch::jit::Stack *stack,
                    c10::DispatchKey kernel);

}  // namespace torch_openreg
