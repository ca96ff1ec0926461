/*
 * Products of 16-bit matrices with a float32 result (`out_dtype`), which only CUDA and XPU have:
 * the CPU's product of the matrices in float32.
 */
#include "../registration.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::ScalarType;

void checkFactors(const Tensor &left, const Tensor &right, ScalarType type) {
  const ScalarType given = left.scalar_type();
  TORCH_CHECK(right.scalar_type() == given, "expected two matrices of the same dtype, but got ",
              given, " and ", right.scalar_type());
  TORCH_CHECK(type == given || (type == c10::kFloat && c10::isReducedFloatingType(given)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, but got ",
              type, " for ", given);
}

/* The operator of the same name without `out_dtype`, over operands of that type: the matrix that is
 * added, if there is one, and the factors. Autocast does not cast the call. */
void product(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const auto &schema = op.schema();
  const auto place = static_cast<size_t>(schema.argumentIndexWithName("out_dtype").value());
  torch::jit::Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const ScalarType type = arguments[place].toScalarType();
  const bool hasOut = schema.arguments().back().is_out();
  if (hasOut) {
    const ScalarType out = arguments.back().toTensor().scalar_type();
    TORCH_CHECK(out == type, "out_dtype must be the same as the dtype of the provided out tensor, ",
                "but got ", type, " and ", out);
  }
  const Tensor left = arguments[place - 2].toTensor();
  checkFactors(left, arguments[place - 1].toTensor(), type);
  const ScalarType added = arguments[0].toTensor().scalar_type();
  TORCH_CHECK(added == type || added == left.scalar_type(),
              "self must have the dtype of the matrices or out_dtype, but got ", added);
  for (size_t i = 0; i < place; ++i) arguments[i] = arguments[i].toTensor().to(type);
  arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(place));
  const c10::impl::ExcludeDispatchKeyGuard exact(c10::autocast_dispatch_keyset);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(schema.name().c_str(), hasOut ? "out" : "")
      .callBoxed(&arguments);
  torch::jit::push(*stack, std::move(arguments[0]));
}

}  // namespace

}  // namespace torch_openreg

// PyTorch has these only for CUDA and XPU.
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  implBoxed<&product>(m, {"mm.dtype", "mm.dtype_out", "bmm.dtype", "bmm.dtype_out", "addmm.dtype",
                          "addmm.dtype_out", "baddbmm.dtype", "baddbmm.dtype_out"});
}
