/*
 * The strides that a pointwise kernel of the CPU (PyTorch's TensorIterator) gives a fresh result, told from its
 * arguments' metadata.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include <optional>

namespace torch_openreg {

/* `sizes` are those of the result. Nothing if it depends on which arguments the kernel casts: it looks at the strides
 * of what it has cast, which is dense, where other devices cast as they read. */
std::optional<c10::DimVector> pointwiseStrides(c10::ArrayRef<const at::Tensor *> tensors,
                                               c10::IntArrayRef sizes);

/* The same elements at the same places: a dimension of one element may have any stride. */
bool sameStrides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b);

}  // namespace torch_openreg
