#include "extent.h"

#include <c10/util/Exception.h>

namespace torch_openreg {

void checkFitsStorage(const at::Tensor &tensor, const char *what) {
  if (C10_LIKELY(fitsStorage(tensor))) return;
  TORCH_CHECK(false, what, ": a tensor of sizes ", tensor.sizes(), " and strides ",
              tensor.strides(), " at offset ", tensor.storage_offset(), " needs ",
              bytesNeeded(tensor), " bytes, but its storage on ", tensor.device(), " has ",
              tensor.storage().nbytes(), ": it was freed or shrunk");
}

}  // namespace torch_openreg
