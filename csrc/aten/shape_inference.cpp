/*
 * A structured operator has a kernel for every backend (kInferringKeys) that makes the results and
 * calls the out= form. `inferring` is how that call is known when it comes back to the fallback on
 * this thread.
 */
#include "shape_inference.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "../torch/sanitizer.h"
#include "operator_accesses.h"

namespace torch_openreg {

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

/* The operator whose result is being inferred. When its out= form is called its output has the
 * right size; composite kernels, which are registered in the same place, call others. */
thread_local const OpTraits *inferring = nullptr;

}  // namespace

/* Not where the CPU's kernel may give its result other strides, as it casts first, and what it has
 * cast is dense. */
bool canInfer(const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
  if (!traits.inferable || !traits.pointwise || traits.inPlace) return traits.inferable;
  std::optional<c10::ScalarType> dtype;
  bool casts = false, dense = true;
  for (const IValue &value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor &tensor = value.toTensor();
    if (!dtype) dtype = tensor.scalar_type();
    casts |= tensor.scalar_type() != *dtype || c10::isIntegralType(*dtype, /*includeBool=*/true);
    dense &= tensor.is_non_overlapping_and_dense();
  }
  return dense || !casts;
}

const OpTraits *inferredBy(const OperatorHandle &op, const OpTraits &traits) {
  if (inferring == nullptr) return nullptr;
  const std::string_view functional(inferring->name);
  if (traits.name != functional.substr(0, functional.size() - inferring->inPlace)) return nullptr;
  const OpTraits *called = std::exchange(inferring, nullptr);
  return writtenOutputs(traits)->results.size() == op.schema().returns().size() ? called : nullptr;
}

void inferAndRun(const OperatorHandle &op, const OpTraits &traits, Stack *stack,
                 const CallKey &key) {
  struct Inferring {
    explicit Inferring(const OpTraits &functional) { inferring = &functional; }
    ~Inferring() { inferring = nullptr; }
  } scope(traits);
  // A profile shows the call itself. CUDA's profiles also show the operators that a composite
  // kernel calls. A structured operator, which has a meta kernel, calls only its out= form.
  std::optional<at::RecordFunctionGuard> unrecorded;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) unrecorded.emplace(false);
  std::optional<ReportedAs> reported;
  if (sanitizerActive()) reported.emplace(op);
  const Stack arguments(stack->end() - static_cast<int64_t>(traits.isWritten.size()), stack->end());
  const std::vector<KeptMetadata> before = keptMetadata(arguments);
  op.redispatchBoxed(kInferringKeys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  cacheOutputs(key, describeOutputs(traits, arguments, before, results));
}

}  // namespace torch_openreg
