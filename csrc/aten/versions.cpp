/*
 * Nothing here is shared.
 */
#include "versions.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "output_cache.h"

namespace torch_openreg {

void countWritesToLists(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!traits.isWritten[i] || !arguments[i].isTensorList()) continue;
    eachTensor(arguments[i], [](const at::Tensor &tensor) {
      if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

}  // namespace torch_openreg
