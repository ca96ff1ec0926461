/*
 * An operator as a task that nobody waits for.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <openreg.h>

#include <memory>

#include "op_traits.h"
#include "output_cache.h"

namespace torch_openreg {

using Results = c10::SmallVector<c10::IValue, 4>;

/* Queues the CPU kernel of `op`, whose arguments `key` describes (and goes on to, where outputs get
 * a size), on `stream`, and makes the results that `spec` promises. A kernel that fails, or makes
 * something else than was promised, is the device's error, raised with its type at the next call
 * that synchronises. `name` is the program's for the call. `warned`: what it warns of is known
 * already. */
void queueOperator(const c10::OperatorHandle &op, const OpTraits &traits, const char *name,
                   CallKey &key, std::shared_ptr<const OutputSpec> spec, c10::Device device,
                   orStream_t stream, c10::ArrayRef<c10::IValue> arguments, Results &results,
                   bool warned = false);

/* How many tasks there is memory for, in use or kept. For tests. */
size_t taskBlocks();

}  // namespace torch_openreg
