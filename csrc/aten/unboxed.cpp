/*
 * Kernels with unboxed arguments: one template, with an instance for each signature. They try the
 * fast path with borrowed arguments, and do not put owned ones on a stack. Other calls go through
 * the fallback.
 *
 * An Entry is made for each operator and never destroyed; `traits` is looked up at its first call.
 */
#include "fallback.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fast_path.h"
#include "op_traits.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using c10::Scalar;
using torch::jit::Stack;

struct Entry {
  explicit Entry(const OperatorHandle &handle) : op(handle) {}
  const OpTraits &getTraits() {
    const OpTraits *known = traits.load(std::memory_order_acquire);
    if (C10_UNLIKELY(known == nullptr))
      traits.store(known = &opTraits(op), std::memory_order_release);
    return *known;
  }

  const OperatorHandle op;
  std::atomic<const OpTraits *> traits{nullptr};
};

IValue borrow(const Tensor &tensor) {
  return IValue(c10::MaybeOwnedTraits<Tensor>::createBorrow(tensor));
}
IValue borrow(const Scalar &number) { return IValue(number); }

/* Arguments without ownership. */
template <size_t count>
class Borrowed : Uncopyable {
 public:
  template <typename... Args>
  explicit Borrowed(const Args &...args) : values_{borrow(args)...} {}
  ~Borrowed() {
    // Numbers are not borrowed: a complex one owns its value.
    for (IValue &value : values_) {
      if (value.isTensor()) c10::MaybeOwnedTraits<IValue>::destroyBorrow(value);
    }
  }
  c10::ArrayRef<IValue> values() const { return values_; }

 private:
  std::array<IValue, count> values_;
};

/* The one argument that is written. */
template <typename First, typename... Rest>
Tensor &writtenOf(First &first, Rest &...rest) {
  if constexpr (std::is_same_v<First, Tensor>) {
    return first;
  } else {
    return writtenOf(rest...);
  }
}

template <typename Result, typename... Args>
struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const OperatorHandle &op) : entry(*new Entry(op)) {}

  Result operator()(Args... args) {
    ArgumentScan scan;
    Results results;
    if (!queue(scan, results, args...)) {
      Stack stack{IValue(args)...};
      runScanned(entry.op, entry.getTraits(), scan, &stack);
      results.push_back(std::move(stack.back()));
    }
    if constexpr (std::is_reference_v<Result>) {
      return writtenOf(args...);
    } else {
      return std::move(results[0]).toTensor();
    }
  }
  bool queue(ArgumentScan &scan, Results &results, const std::remove_cvref_t<Args> &...args) {
    const Borrowed<sizeof...(Args)> borrowed(args...);
    return tryFastPath(entry.op, entry.getTraits(), borrowed.values(), scan, results);
  }

  Entry &entry;
};

/* The argument as the type that the kernel takes. */
template <typename Arg>
decltype(auto) argumentOf(IValue &value) {
  if constexpr (std::is_same_v<Arg, const Scalar &>) {
    return value.toScalar();
  } else {
    return value.toTensor();
  }
}

template <typename Result, typename... Args, size_t... I>
CpuCall cpuCall(const c10::TypedOperatorHandle<Result(Args...)> &op, std::index_sequence<I...>) {
  return [op](Stack &arguments) {
    op.redispatch(c10::DispatchKeySet(DispatchKey::CPU), argumentOf<Args>(arguments[I])...);
  };
}

/* A signature, as one letter for each argument and the result: T tensor, S number, W tensor that is
 * written. */
struct Signature {
  std::string_view letters;
  c10::KernelFunction (*kernel)(const OperatorHandle &op);
  c10::impl::CppSignature (*type)();
  CpuCall (*call)(const OperatorHandle &op);
};

template <typename Result, typename... Args>
constexpr Signature signature(std::string_view letters) {
  return {letters,
          [](const OperatorHandle &op) {
            using Functor = Kernel<Result, Args...>;
            return c10::KernelFunction::makeFromUnboxedFunctor<false, Functor>(
                std::make_unique<Functor>(op));
          },
          [] { return c10::impl::CppSignature::make<Result(Args...)>(); },
          [](const OperatorHandle &op) {
            return cpuCall(op.typed<Result(Args...)>(), std::index_sequence_for<Args...>());
          }};
}

using T = const Tensor &;
using S = const Scalar &;
using W = Tensor &;
constexpr Signature kSignatures[] = {
    signature<Tensor, T>("TT"),
    signature<Tensor, T, T>("TTT"),
    signature<Tensor, T, S>("TST"),
    signature<Tensor, T, T, S>("TTST"),
    signature<Tensor, T, T, T, S, S>("TTTSST"),
    signature<W, T, W>("TWW"),
    signature<W, T, T, W>("TTWW"),
    signature<W, T, T, S, W>("TTSWW"),
    signature<W, W>("WW"),
    signature<W, W, T>("WTW"),
    signature<W, W, S>("WSW"),
    signature<W, W, T, S>("WTSW"),
    signature<W, W, T, T, S>("WTTSW"),
};

char letterOf(const c10::Argument &argument) {
  const c10::TypeKind kind = argument.real_type()->kind();
  if (kind == c10::TypeKind::TensorType && argument.alias_info() == nullptr) return 'T';
  if (kind == c10::TypeKind::TensorType && isWritten(argument)) return 'W';
  return kind == c10::TypeKind::NumberType ? 'S' : '-';
}

std::string lettersOf(const c10::FunctionSchema &schema) {
  std::string letters;
  if (schema.returns().size() != 1) return letters;
  for (const c10::Argument &argument : schema.arguments()) letters += letterOf(argument);
  return letters + letterOf(schema.returns()[0]);
}

/* Null if the signature is not in kSignatures. */
const Signature *signatureOf(const OperatorHandle &op) {
  const std::string letters = lettersOf(op.schema());
  const auto *found = std::ranges::find(kSignatures, letters, &Signature::letters);
  return found == std::end(kSignatures) ? nullptr : found;
}

}  // namespace

bool registerUnboxed(const OperatorHandle &op) {
  const Signature *signature = signatureOf(op);
  if (signature == nullptr) return false;
  // Never removed, because an operator has one kernel of its own for a device.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), DispatchKey::PrivateUse1, signature->kernel(op), signature->type(),
      nullptr, "registered in csrc/aten/unboxed.cpp"));
  return true;
}

CpuCall unboxedCall(const OperatorHandle &op) {
  const Signature *signature = signatureOf(op);
  return signature != nullptr ? signature->call(op) : nullptr;
}

}  // namespace torch_openreg
