/*
 * What a finished call teaches: how its results will look when it is called with like arguments again.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "output_cache.h"
#include "op_traits.h"

namespace torch_openreg {

/* Taken before the call. */
std::vector<TensorMetadata> metadataOf(c10::ArrayRef<c10::IValue> arguments);

/* The spec of a call: unusable where results are not simply fresh memory. */
std::shared_ptr<OutputSpec> describeOutputs(const OpTraits &traits,
                                            c10::ArrayRef<c10::IValue> arguments,
                                            const std::vector<TensorMetadata> &before,
                                            c10::ArrayRef<c10::IValue> results);

}  // namespace torch_openreg
