/*
 * The way that nearly every call takes: an operator in its usual form, whose results are remembered.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "operator_task.h"
#include "op_traits.h"

namespace torch_openreg {

/* Queues the call and makes its results; or returns false, and has done nothing. The arguments are left as they are and
 * may be borrowed. */
bool takeFastPath(const c10::OperatorHandle &op, const OpTraits &traits,
                  c10::ArrayRef<c10::IValue> arguments, Results &results);

}  // namespace torch_openreg
