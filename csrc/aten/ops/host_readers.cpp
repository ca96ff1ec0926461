/*
 * Operators for which PyTorch has one composite kernel for all backends that accesses memory on the
 * host's thread. Here it runs on a worker over aliases, as the CPU's kernels do; or the operator is
 * refused by its name.
 *
 * The dispatcher would find a composite kernel before autograd, so such an operator gets a kernel
 * for autograd's key too. Tensors without memory to alias (a wrapper subclass) go to PyTorch's
 * kernel, and `__torch_dispatch__` sees the same as on CUDA.
 */
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>
#include <initializer_list>
#include <string>

#include "../../torch/device.h"
#include "../../task/arguments.h"
#include "../fallback.h"
#include "../op_traits.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool lacksMemory(const at::Tensor &tensor) {
  return tensor.defined() && !(tensor.key_set() & at::kTensorSubclassLike).empty();
}

void runOverAliases(const OperatorHandle &op, Stack *stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (anyTensor(arguments, lacksMemory)) return op.redispatchBoxed(kInferringKeys, stack);
  at::AutoDispatchBelowADInplaceOrView below;
  runCpuKernel(op, stack);
}

/* It reads only the new sizes, and its result is a view with a gradient. */
void reshapeFromTensor(const OperatorHandle &op, Stack *stack) {
  IValue &sizes = torch::jit::peek(*stack, 1, 2);
  if (!lacksMemory(sizes.toTensor())) sizes = sizes.toTensor().cpu();
  op.redispatchBoxed(kInferringKeys, stack);
}

void refuse(const OperatorHandle &op, Stack *) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "Could not run ", op.operator_name(), " on ", deviceName(),
      ": it packs weights for the CPU's kernels, or computes with packed weights. "
      "Call it with CPU tensors (x.cpu())");
}

using BoxedKernel = void(const OperatorHandle &, Stack *);

template <BoxedKernel *kernel>
void registerReaders(torch::Library &library, DispatchKey key,
                     std::initializer_list<const char *> names) {
  for (const char *name : names) {
    const char *dot = std::strchr(name, '.');
    const auto op = c10::Dispatcher::singleton().findOp(
        {"aten::" + (dot ? std::string(name, dot) : std::string(name)), dot ? dot + 1 : ""});
    if (!op) continue;  // not in this version of PyTorch
    const bool early = op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    if (key == DispatchKey::PrivateUse1 || early) {
      implBoxed<kernel>(library, {name});
    }
  }
}

void registerAll(torch::Library &library, DispatchKey key) {
  // PyTorch's composite kernels access memory on the host's thread.
  registerReaders<&runOverAliases>(
      library, key,
      {"range.out_", "_grid_sampler_2d_cpu_fallback", "_grid_sampler_2d_cpu_fallback_backward",
       "_rowwise_prune", "_saturate_weight_to_fp16", "choose_qparams_optimized",
       "fbgemm_linear_quantize_weight", "_sobol_engine_draw", "_sobol_engine_ff_",
       "_sobol_engine_scramble_", "_sobol_engine_initialize_state_"});
  // PyTorch's kernel reads the new sizes on the host's thread.
  registerReaders<&reshapeFromTensor>(library, key, {"_reshape_from_tensor"});
  // PyTorch's kernels pack weights on the host's thread, or compute with such weights.
  registerReaders<&refuse>(
      library, key,
      {"fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix",
       "fbgemm_pack_quantized_matrix.KN", "fbgemm_linear_int8_weight",
       "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_fp16_weight",
       "fbgemm_linear_fp16_weight.out", "fbgemm_linear_fp16_weight_fp32_activation",
       "fbgemm_linear_fp16_weight_fp32_activation.out"});
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  torch_openreg::registerAll(m, c10::DispatchKey::PrivateUse1);
}
OPENREG_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  torch_openreg::registerAll(m, c10::DispatchKey::AutogradPrivateUse1);
}
