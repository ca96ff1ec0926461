/*
 * torch.autocast("openreg"): PyTorch's lists of operators that run in lower precision, in float32,
 * and in the widest type of their arguments.
 */
#include <ATen/autocast_mode.h>

#include "../../torch/compat.h"
#include "../fallback.h"
#include "../registration.h"

namespace torch_openreg {
namespace {
at::Tensor refuseBinaryCrossEntropy(const at::Tensor &, const at::Tensor &,
                                    const std::optional<at::Tensor> &, int64_t) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
      "the logarithm of a probability that was rounded to half precision overflows. Use "
      "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss on "
      "the logits, or leave autocast for the loss.");
}
}  // namespace
}  // namespace torch_openreg

#define OPENREG_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define OPENREG_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPENREG_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define OPENREG_FP32_APPEND_DTYPE(...) \
  KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define OPENREG_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

// The lists name types of this namespace.
namespace at::autocast {

// PyTorch registers its lists only for the devices that it names.
static void registerLists(torch::Library &m) {
  AT_FORALL_LOWER_PRECISION_FP(OPENREG_LOWER_PRECISION)
  OPENREG_FORALL_FP32(OPENREG_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPENREG_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(OPENREG_FP32_APPEND_DTYPE)
  AT_FORALL_PROMOTE(OPENREG_PROMOTE)
  // PyTorch's function that refuses it is not in a header.
  m.impl("binary_cross_entropy", &torch_openreg::refuseBinaryCrossEntropy);
}

}  // namespace at::autocast

namespace torch_openreg {

namespace {

void registerAll() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  libraryOf("_", key).fallback(torch::CppFunction::makeFallthrough());
  at::autocast::registerLists(libraryOf("aten", key));
}

[[maybe_unused]] const bool added = (registerAutocast = &registerAll, true);

}  // namespace

}  // namespace torch_openreg
