/*
 * Operators with other arguments on CUDA than on the CPU: histc accepts integers and reads its
 * bounds at the call; decompositions accept CUDA's drivers where the device has that name.
 */
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/histc.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>

#include "../../torch/device.h"
#include "../fallback.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

IValue &argument(const c10::OperatorHandle &op, Stack *stack, const char *name) {
  const size_t place = static_cast<size_t>(op.schema().argumentIndexWithName(name).value());
  return torch::jit::peek(*stack, place, op.schema().arguments().size());
}

/* Equal bounds mean the data's bounds, for which the host waits. */
void histc(const c10::OperatorHandle &op, Stack *stack) {
  const Tensor self = argument(op, stack, "self").toTensor();
  IValue &min = argument(op, stack, "min"), &max = argument(op, stack, "max");
  if (self.numel() > 0 && min.toScalar().equal(max.toScalar().toDouble())) {
    min = self.min().item();
    max = self.max().item();
  }
  if (!c10::isIntegralType(self.scalar_type(), /*includeBool=*/false))
    return runCpuKernel(op, stack);
  const int64_t bins = argument(op, stack, "bins").toInt();
  const Tensor counts =
      at::histc(self.to(at::kDouble), bins, min.toScalar().toLong(), max.toScalar().toLong())
          .to(self.scalar_type());
  Tensor out = op.schema().arguments().back().is_out() ? torch::jit::peek(*stack, 4, 5).toTensor()
                                                       : Tensor();
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(out.defined() ? out.resize_(counts.sizes()).copy_(counts) : counts);
}

bool isCudas() { return deviceName() == "cuda"; }

/* The CPU's kernel has no choice of driver. */
void svd(const c10::OperatorHandle &op, Stack *stack) {
  IValue &driver = argument(op, stack, "driver");
  if (!driver.isNone() && isCudas()) {
    constexpr std::array<std::string_view, 3> kKnown{"gesvd", "gesvdj", "gesvda"};
    const std::string name = driver.toStringRef();
    TORCH_CHECK(std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end(),
                "torch.linalg.svd: unknown svd driver ", name,
                " in svd_cusolver computation. Only None, gesvd, gesvdj, gesvda are supported");
    driver = IValue();
  }
  runCpuKernel(op, stack);
}

void lstsq(const c10::OperatorHandle &op, Stack *stack) {
  const IValue &driver = argument(op, stack, "driver");
  if (!driver.isNone() && isCudas()) {
    std::string name = driver.toStringRef();
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    TORCH_CHECK(name == "gels",
                "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA");
  }
  runCpuKernel(op, stack);
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  // The CPU's kernel refuses integers, and reads the data for equal bounds.
  implBoxed<&histc>(m, {"histc", "histc.out"});
  // The CPU's kernels refuse the drivers that CUDA's accept.
  implBoxed<&svd>(m, {"_linalg_svd", "_linalg_svd.U"});
  implBoxed<&lstsq>(m, {"linalg_lstsq.out"});
}
