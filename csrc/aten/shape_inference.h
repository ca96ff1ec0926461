/*
 * Structured operators: PyTorch can tell in C++, before they run, what their results will be.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include "op_traits.h"
#include "output_cache.h"

namespace torch_openreg {

/* Whether its meta function is right about the call's results. */
bool canInfer(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Makes the results by way of the operator's meta function, remembers them as those of `key`, and
 * runs its out= form, for which inferredBy tells the operator once. */
void inferAndRun(const c10::OperatorHandle &op, const OpTraits &traits, torch::jit::Stack *stack,
                 const CallKey &key);

/* If the call is that of the out= form, whose outputs have the right sizes: the operator that the
 * program has called. Else null. */
const OpTraits *inferredBy(const c10::OperatorHandle &op, const OpTraits &traits);

}  // namespace torch_openreg
