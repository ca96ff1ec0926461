/*
 * Tensors that are not one piece of memory with strides, taken apart and put together.
 *
 *   sparse COO                      indices, values
 *   sparse CSR, CSC, BSR, BSC       compressed indices, plain indices, values
 *   quantized                       its integers; scales and zero points of channels
 *   nested                          its buffer (sizes, strides, offsets are CPU tensors everywhere)
 *
 * Components share memory with the tensor. All are ordinary tensors, whose rules apply.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/SmallVector.h>

namespace torch_openreg {

using Components = c10::SmallVector<at::Tensor, 3>;

inline bool isPlain(const at::Tensor &tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet others({DispatchKey::Sparse, DispatchKey::SparseCsr,
                                        DispatchKey::Quantized, DispatchKey::NestedTensor});
  return !tensor.key_set().has_any(others);
}

/* Returns the parts of a tensor that is not plain; none for a layout that cannot be taken apart. */
Components componentsOf(const at::Tensor &tensor);

/* Makes a tensor like `like` from these parts, on their backend. */
at::Tensor assemble(const at::Tensor &like, const Components &parts);

/* Gives `tensor` the properties of `like`, with these parts. */
void reassemble(const at::Tensor &tensor, const at::Tensor &like, const Components &parts);

/* Whether two tensors are the same apart from their parts' contents. */
bool isDescribedAs(const at::Tensor &tensor, const at::Tensor &like);

}  // namespace torch_openreg
