#include "graph.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/DeviceType.h>

namespace torch_openreg {

namespace {

std::unique_ptr<at::GraphImplInterface> refuse(at::GraphImplArgs) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "torch.accelerator.Graph is not implemented for openreg devices");
}

}  // namespace

void registerGraph() {
  const auto name = c10::DeviceTypeName(c10::DeviceType::PrivateUse1, /*lower_case=*/false);
  if (!at::GraphImplRegistry()->Has(name)) at::GraphImplRegistry()->Register(name, &refuse);
}

}  // namespace torch_openreg
