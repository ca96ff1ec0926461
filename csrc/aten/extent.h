/*
 * Whether a tensor's storage holds all that the tensor says it has. A program may free or shrink a storage (as FSDP does
 * with parameters) while tensors still describe what was there.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>

namespace torch_openreg {

/* Bytes from the storage's begin to the end of the last element; 0 without elements. */
inline size_t bytesNeeded(const at::Tensor &tensor) {
  const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  int64_t elements = impl->numel();
  if (elements == 0) return 0;
  if (!impl->is_non_overlapping_and_dense()) {
    elements = 1;
    for (int64_t i = 0; i < impl->dim(); ++i) elements += (impl->size(i) - 1) * impl->stride(i);
  }
  return static_cast<size_t>(impl->storage_offset() + elements) * impl->itemsize();
}

/* Of a tensor that has a storage. */
inline bool fitsStorage(const at::Tensor &tensor) {
  return bytesNeeded(tensor) <= tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
}

/* Throws an error that names sizes, unless it fits. `what`: the tensor's place in the call. */
void checkFitsStorage(const at::Tensor &tensor, const char *what);

}  // namespace torch_openreg
