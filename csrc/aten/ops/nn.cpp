/*
 * Operators that do not reach the fallback by themselves. Either PyTorch requires a device's own
 * kernel (convolution), or a composite kernel hides a better CPU kernel, or one calls what only
 * CUDA has (recurrent cells), or it draws random numbers without a generator argument.
 */
#include "../fallback.h"

#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/TracerMode.h>
#include <ATen/core/List.h>
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/max_pool1d_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/strides.h>

#include <optional>
#include <tuple>
#include <vector>

#include "../device_kernel.h"
#include "../op_traits.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

c10::OperatorHandle operatorNamed(const char *name, const char *overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

/* torch.jit.trace is still active here where it records not the operator (convolution) but what the
 * composite kernel calls. */
void cpuKernel(const c10::OperatorHandle &op, Stack *stack) {
  if (C10_UNLIKELY(at::tracer::impl::is_dispatch_enabled())) {
    return op.redispatchBoxed(kInferringKeys, stack);
  }
  runCpuKernel(op, stack);
}

void convolution(const c10::OperatorHandle &, Stack *stack) {
  static const c10::OperatorHandle op = operatorNamed("aten::convolution");
  runCpuKernel(op, stack);  // the same arguments
}

/* convolution_backward has an additional argument: the bias's sizes, if it needs a gradient. */
void convolutionBackward(const c10::OperatorHandle &, Stack *stack) {
  static const c10::OperatorHandle op = operatorNamed("aten::convolution_backward");
  constexpr size_t kArguments = 10, kTransposed = 6, kGroups = 8, kMask = 9;
  constexpr size_t kWeight = 2, kBiasSizes = 3;
  const auto arguments = torch::jit::last(*stack, kArguments);
  IValue biasSizes;
  if (arguments[kMask].toBoolList().get(2)) {
    const Tensor &weight = arguments[kWeight].toTensor();
    const bool transposed = arguments[kTransposed].toBool();
    const int64_t channels =
        transposed ? weight.size(1) * arguments[kGroups].toInt() : weight.size(0);
    biasSizes = c10::List<int64_t>({channels});
  }
  stack->insert(stack->end() - static_cast<int64_t>(kArguments - kBiasSizes), std::move(biasSizes));
  runCpuKernel(op, stack);
}

std::tuple<Tensor, Tensor> dropout(const Tensor &input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  }
  if (p == 1) {
    return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(c10::kBool))};
  }
  // Allocates all memory first: if that fails, no random number is drawn.
  Tensor mask = at::empty_like(input, input.options().dtype(c10::kBool));
  Tensor result = at::empty_like(input);
  mask.bernoulli_(1 - p);
  return {at::mul_out(result, input, mask).mul_(1 / (1 - p)), mask};
}

Tensor withBias(const Tensor &gates, const std::optional<Tensor> &bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

/* chunk() may return fewer. */
std::vector<Tensor> gatesOf(const Tensor &gates, int64_t count) {
  TORCH_CHECK(gates.dim() > 1 && gates.size(1) % count == 0,
              "a recurrent cell cannot divide gates of size ", gates.sizes(), " by ", count);
  return gates.chunk(count, 1);
}

/* Recurrent cells as composites: gates are input, forget, cell, output. */
std::tuple<Tensor, Tensor, Tensor> lstmCell(const Tensor &inputGates, const Tensor &hiddenGates,
                                            const Tensor &cx,
                                            const std::optional<Tensor> &inputBias,
                                            const std::optional<Tensor> &hiddenBias) {
  const Tensor gates = withBias(inputGates, inputBias) + withBias(hiddenGates, hiddenBias);
  const auto part = gatesOf(gates, 4);
  const Tensor cy = part[1].sigmoid() * cx + part[0].sigmoid() * part[2].tanh();
  return {part[3].sigmoid() * cy.tanh(), cy, gates};
}

/* Gates are reset, update, new. */
std::tuple<Tensor, Tensor> gruCell(const Tensor &inputGates, const Tensor &hiddenGates,
                                   const Tensor &hx, const std::optional<Tensor> &inputBias,
                                   const std::optional<Tensor> &hiddenBias) {
  const auto input = gatesOf(withBias(inputGates, inputBias), 3);
  const auto hidden = gatesOf(withBias(hiddenGates, hiddenBias), 3);
  const Tensor reset = (input[0] + hidden[0]).sigmoid();
  const Tensor update = (input[1] + hidden[1]).sigmoid();
  const Tensor fresh = (input[2] + reset * hidden[2]).tanh();
  return {(hx - fresh) * update + fresh, fresh};
}

/* On every device but the CPU, PyTorch requests the indices too, with results of other strides. */
Tensor maxPool1d(const Tensor &self, c10::IntArrayRef kernel, c10::IntArrayRef stride,
                 c10::IntArrayRef padding, c10::IntArrayRef dilation, bool ceil) {
  Tensor pooled = at::native::max_pool1d(self, kernel, stride, padding, dilation, ceil);
  const bool asOnTheCpu =
      pooled.requires_grad() || pooled._fw_grad(0).defined() || pooled.is_quantized() ||
      at::isTensorSubclassLike(pooled) ||
      pooled.strides() == c10::IntArrayRef(c10::contiguous_strides(pooled.sizes()));
  return asOnTheCpu ? pooled : pooled.clone(c10::MemoryFormat::Contiguous);
}

/* If the caller gives the size, it is known without the data, and the call does not wait, as on
 * CUDA. The check that it is the sum of `repeats` follows when they are there. */
void repeatInterleave(const c10::OperatorHandle &op, Stack *stack) {
  const auto arguments = torch::jit::last(*stack, 2);
  const Tensor repeats = arguments[0].toTensor();
  const bool taken = repeats.dim() == 1 && repeats.numel() > 0 &&
                     (repeats.scalar_type() == c10::kLong || repeats.scalar_type() == c10::kInt);
  if (arguments[1].isNone() || arguments[1].toInt() < 0 || !taken) return runCpuKernel(op, stack);
  const int64_t size = arguments[1].toInt();
  torch::jit::drop(*stack, 2);
  const Tensor ends = repeats.cumsum(0);
  at::_assert_async(repeats.ge(0).all(), "repeats can not be negative");
  at::_assert_async(ends[-1].eq(size), "allocated size does not match required size");
  const Tensor places = at::arange(size, ends.options());
  const bool isInt = repeats.scalar_type() == c10::kInt;
  stack->emplace_back(at::searchsorted(ends, places, isInt, /*right=*/true));
}

/* A learning rate of one element on the CPU is used as a number, whatever its shape, as on CUDA. */
void fusedStep(const c10::OperatorHandle &op, Stack *stack) {
  const int index = op.schema().argumentIndexWithName("lr").value();
  const size_t count = op.schema().arguments().size();
  IValue &rate = torch::jit::peek(*stack, static_cast<size_t>(index), count);
  if (rate.toTensor().is_cpu() && rate.toTensor().numel() == 1) {
    rate = rate.toTensor().reshape(c10::IntArrayRef());
  }
  runCpuKernel(op, stack);
}

}  // namespace

}  // namespace torch_openreg

namespace at::native {
namespace {
/* Whether the tensor is a DTensor, and not a FakeTensor, whose memory is meta. */
bool isDivided(const Tensor &tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
         !tensor.storage().device().is_meta();
}

/* The CPU's choice of an attention kernel, so that results and memory are the CPU's. But DTensor
 * does not place a mask with the rest for any of them: it passes keyword arguments unchanged. A
 * device with kernels of its own has them for the operators of the formula. */
int64_t chooseAttention(const Tensor &query, const Tensor &key, const Tensor &value,
                        const std::optional<Tensor> &mask, double dropout, bool isCausal,
                        std::optional<double> scale, bool enableGqa) {
  const bool allowed = at::globalContext().userEnabledMathSDP();
  if (mask && mask->defined() && isDivided(query)) {
    return static_cast<int64_t>(allowed ? at::SDPBackend::math : at::SDPBackend::error);
  }
  if (allowed && torch_openreg::runsOwnKernels(query.device().index())) {
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  return _fused_sdp_choice_cpp(query, key, value, mask, dropout, isCausal, scale, enableGqa);
}

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &chooseAttention)
}  // namespace
}  // namespace at::native

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  // PyTorch has no kernel for these on any device: it requires a backend's own.
  implBoxed<&convolution>(m, {"convolution_overrideable"});
  implBoxed<&convolutionBackward>(m, {"convolution_backward_overrideable"});
  // The CPU's kernel draws from the CPU's generator, because the operator has no argument for one.
  m.impl("native_dropout", &dropout);
  // The CPU's kernel reads the sum of `repeats`, which would make the caller wait.
  implBoxed<&repeatInterleave>(m, {"repeat_interleave.Tensor"});
  // PyTorch's composite kernels are less exact, take more steps, or fail under another operator's
  // name.
  implBoxed<&cpuKernel>(m, {"_stack", "_stack.out", "addr", "addr.out", "all.dims_out",
                            "any.dims_out", "native_group_norm", "native_layer_norm",
                            "linalg__powsum", "convolution", "convolution_backward", "embedding",
                            "mode.values", "mish_backward", "addr_", "conj_physical_"});
  // The CPU's kernels accept a learning rate without dimensions; CUDA's accept any shape.
  implBoxed<&fusedStep>(m, {"_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr",
                            "_fused_sgd_.tensor_lr", "_fused_adagrad_.tensor_lr"});
  // The composite kernel multiplies by a power, which may overflow; the CPU has a kernel that
  // cannot.
  implBoxed<&cpuKernel>(m, {"ldexp.Tensor", "ldexp_", "ldexp.out"});
  // PyTorch's composite kernel calls a stub that each device has to provide.
  implBoxed<&cpuKernel>(m, {"kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"});
}

// PyTorch's derivatives of the cells call kernels that only CUDA has: here the parts are
// differentiated. max_pool1d: see maxPool1d.
static void registerComposites(torch::Library &m) {
  m.impl("max_pool1d", &torch_openreg::maxPool1d);
  m.impl("_thnn_fused_lstm_cell", &torch_openreg::lstmCell);
  m.impl("_thnn_fused_gru_cell", &torch_openreg::gruCell);
}
OPENREG_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { registerComposites(m); }
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) { registerComposites(m); }
