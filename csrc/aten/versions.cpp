/*
 * Nothing here is shared.
 */
#include "versions.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "memo.h"

namespace torch_openreg {

void countWritesToLists(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!info.isWritten[i] || !arguments[i].isTensorList()) continue;
    eachTensor(arguments[i], [](const at::Tensor &tensor) {
      if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

}  // namespace torch_openreg
