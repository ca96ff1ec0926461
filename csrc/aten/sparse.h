/*
 * Runs operators of sparse, quantized and nested tensors without a wait where their sizes are known
 * before they run, as on CUDA.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_openreg {

/* Whether CUDA's kernel of an operator that waits here synchronises too, so that the call orders
 * later work. */
bool synchronizesElsewhere(const c10::OperatorHandle &op, c10::DispatchKey kernel);

/* Takes the operator's arguments from the stack and leaves its results there. Returns false, with
 * the stack unchanged, for an operator that has to wait. `kernel` is the CPU's key for the
 * tensors. */
bool runWithoutWait(const c10::OperatorHandle &op, torch::jit::Stack *stack,
                    c10::DispatchKey kernel);

}  // namespace torch_openreg
