/*
 * A structured operator has a kernel for every backend (kInferringKeys), which makes the results
 * and calls the out= form. When that call reaches the fallback on this thread, `inferring`
 * identifies it.
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

/* The operator whose result is being inferred. When its out= form is called, the output has the
 * right size. Composite kernels, which are registered under the same key, call other operators. */
thread_local const OpTraits *inferring = nullptr;

}  // namespace

/* False if the CPU's kernel may give its result other strides: it casts first, and the cast tensors
 * are dense. */
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
  // A profile shows the call and not its out= form, which is all that a structured operator calls.
  // An operator without a meta kernel has a composite one, whose operators CUDA's profiles show
  // too.
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
