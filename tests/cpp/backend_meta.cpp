/*
 * A vendor's metadata of a tensor, through PyTorch's registry, which takes one owner for the
 * device: torch_openreg leaves it to the vendor.
 */
#include <torch/csrc/jit/serialization/pickler_helper.h>

namespace {

struct Layout : c10::BackendMeta {};

void save(const at::Tensor &tensor, std::unordered_map<std::string, bool> &fields) {
  if (tensor.unsafeGetTensorImpl()->get_backend_meta() != nullptr) fields["vendor_layout"] = true;
}

void load(const at::Tensor &tensor, std::unordered_map<std::string, bool> &fields) {
  if (fields.count("vendor_layout") == 0) return;
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Layout>());
}

}  // namespace

extern "C" int registerBackendMeta() {
  torch::jit::TensorBackendMetaRegistry(c10::DeviceType::PrivateUse1, save, load);
  return 0;
}
