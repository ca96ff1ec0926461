/*
 * Makes the results of structured operators before they run, by PyTorch's meta functions in C++.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include "op_traits.h"
#include "output_cache.h"

namespace torch_openreg {

/* Whether the meta function gives the metadata that the call's results will have. */
bool canInfer(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Makes the results by the operator's meta function, caches them under `key`, and runs the out=
 * form. That call finds its operator by inferredBy. */
void inferAndRun(const c10::OperatorHandle &op, const OpTraits &traits, torch::jit::Stack *stack,
                 const CallKey &key);

/* If inferAndRun is calling this out= form, whose outputs have the right sizes: returns, once, the
 * operator that the program called. Otherwise null. */
const OpTraits *inferredBy(const c10::OperatorHandle &op, const OpTraits &traits);

}  // namespace torch_openreg
