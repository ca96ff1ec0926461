/*
 * Tensors that share memory until one of them is written (torch._lazy_clone).
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>

namespace torch_openreg {

inline bool isLazyClone(const at::Tensor &tensor) {
  return tensor.defined() && tensor.has_storage() &&
         c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr());
}

/* Before a write is queued: gives the tensor's storage memory of its own, with a copy on the current stream of its device. */
inline void makeWritable(const at::Tensor &tensor) {
  if (C10_UNLIKELY(isLazyClone(tensor))) {
    tensor.storage().unsafeGetStorageImpl()->mutable_data();
  }
}

}  // namespace torch_openreg
