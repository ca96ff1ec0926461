/*
 * The way that nearly every call takes: an operator in its usual form, whose results are remembered.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "async.h"
#include "opinfo.h"

namespace torch_openreg {

/* Queues the call and makes its results; or returns false, and has done nothing. The arguments are left as they are and
 * may be borrowed. */
bool queueKnown(const c10::OperatorHandle &op, const OpInfo &info,
                c10::ArrayRef<c10::IValue> arguments, Results &results);

}  // namespace torch_openreg
