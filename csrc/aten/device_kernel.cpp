/*
 * A DeviceCall has the structures of the call in its arena. It belongs to the thread that makes it.
 * From `queue` on it belongs to the queue, which deletes it whether or not the kernel ran. By then
 * it holds no tensor: the order of the stream keeps the memory alive, as for every task.
 */
#include "device_kernel.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Scalar.h>
#include <c10/util/flat_hash_map.h>

#include <openreg_operator.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../task/arguments.h"
#include "../torch/check.h"
#include "../torch/device.h"
#include "../torch/sanitizer.h"
#include "operator_accesses.h"
#include "recycled_memory.h"

namespace torch_openreg {

namespace {

using c10::IValue;
using c10::ScalarType;

std::span<const orOperatorKernel> kernels() {
  static const std::span<const orOperatorKernel> all = [] {
    const orOperatorKernel *first = nullptr;
    size_t count = 0;
    OPENREG_CHECK(orGetOperatorKernels(&first, &count));
    return std::span(first, count);
  }();
  return all;
}

/* Null if there is none. */
const orOperatorKernel *kernelNamed(std::string_view name) {
  const auto named = [&](const orOperatorKernel &kernel) { return kernel.name == name; };
  const auto found = std::find_if(kernels().begin(), kernels().end(), named);
  return found == kernels().end() ? nullptr : &*found;
}

const orOperatorKernel *kernelOf(const c10::OperatorHandle &op) {
  thread_local ska::flat_hash_map<c10::OperatorHandle, const orOperatorKernel *> known;
  const auto found = known.find(op);
  if (C10_LIKELY(found != known.end())) return found->second;
  return known[op] = kernelNamed(c10::toString(op.operator_name()));
}

std::optional<orDtype> dtypeOf(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return orUint8;
    case ScalarType::Char:
      return orInt8;
    case ScalarType::Short:
      return orInt16;
    case ScalarType::Int:
      return orInt32;
    case ScalarType::Long:
      return orInt64;
    case ScalarType::Half:
      return orFloat16;
    case ScalarType::BFloat16:
      return orBfloat16;
    case ScalarType::Float:
      return orFloat32;
    case ScalarType::Double:
      return orFloat64;
    case ScalarType::ComplexFloat:
      return orComplex64;
    case ScalarType::ComplexDouble:
      return orComplex128;
    case ScalarType::Bool:
      return orBool;
    default:
      return std::nullopt;
  }
}

bool isDtype(const c10::Argument &argument) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::ScalarTypeType;
}

/* Gives empty outputs their sizes, as a composite kernel's temporaries have none. Takes them back
 * if the call is not made: the kernel that runs instead would warn of them. */
class EmptyOutputs : Uncopyable {
 public:
  EmptyOutputs(const OutputSpec &spec, c10::ArrayRef<IValue> arguments)
      : spec_(spec), arguments_(arguments) {}
  ~EmptyOutputs() {
    for (size_t i = 0; i < before_.size() && !kept_; ++i) {
      impl(spec_.resizes[i])->set_sizes_and_strides(before_[i].first, before_[i].second);
    }
  }
  /* False if the call changes the sizes of another tensor: a warning is due then. */
  bool resize() {
    for (const Resize &r : spec_.resizes) {
      if (impl(r)->numel() != 0) return false;
    }
    for (const Resize &r : spec_.resizes) {
      before_.emplace_back(impl(r)->sizes().vec(), impl(r)->strides().vec());
      arguments_[r.argument].toTensor().resize_(r.metadata.sizes());
      impl(r)->set_sizes_and_strides(r.metadata.sizes(), r.metadata.strides());
    }
    return true;
  }
  void keep() { kept_ = true; }

 private:
  c10::TensorImpl *impl(const Resize &r) const {
    return arguments_[r.argument].toTensor().unsafeGetTensorImpl();
  }

  const OutputSpec &spec_;
  const c10::ArrayRef<IValue> arguments_;
  std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> before_;
  bool kept_ = false;
};

struct Nothing {};
using CallMemory = RecycledMemory<Nothing>;
thread_local CallMemory callMemory;

/* Thrown and caught here alone: a C structure cannot describe an argument. */
struct Indescribable {};

class Call final : public DeviceCall {
 public:
  Call(const c10::OperatorHandle &op, const OpTraits &traits, const orOperatorKernel &kernel,
       orStream_t stream)
      : op_(op), traits_(traits) {
    call_.kernel = &kernel;
    call_.stream = stream;
  }

  static void *operator new(size_t bytes) { return callMemory.take(bytes); }
  static void operator delete(void *memory) { CallMemory::give(memory, {}); }

  void describe(const OutputSpec &spec, c10::Device device, c10::ArrayRef<IValue> arguments) {
    auto *described = allocate<orArgument>(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      described[i] = traits_.isGenerator[i] ? seed() : argumentOf(arguments[i], i);
    }
    call_.arguments = described;
    call_.argument_count = arguments.size();
    makeResults(spec, device, arguments);
  }
  bool isAccepted() const {
    int accepts = 0;
    OPENREG_CHECK(orAcceptsOperator(&accepts, &call_));
    return accepts != 0;
  }
  Results launch(std::unique_ptr<DeviceCall> &self, const char *name,
                 c10::ArrayRef<IValue> arguments, c10::function_ref<uint64_t(size_t)> draw) {
    for (size_t i = 0; i < call_.argument_count; ++i) {
      auto &argument = const_cast<orArgument &>(call_.arguments[i]);
      if (argument.kind == orArgumentSeed) argument.value.seed = draw(i);
    }
    Results made = std::move(results_);
    if (sanitizerActive()) reportOperator(op_, call_.stream, arguments, made);
    traits_.counters->queued.fetch_add(1, std::memory_order_relaxed);
    traits_.counters->own.fetch_add(1, std::memory_order_relaxed);
    int queued = 0;
    const orError_t error = orLaunchOperator(
        &call_, name, static_cast<DeviceCall *>(this),
        [](void *owner) { delete static_cast<DeviceCall *>(owner); }, &queued);
    if (queued != 0) (void)self.release();
    OPENREG_CHECK(error);
    return made;
  }

 private:
  template <typename T>
  T *allocate(size_t count) {
    return new (arena_.allocate(sizeof(T) * (count + 1), alignof(T))) T[count]();
  }

  template <typename T, typename List>
  const T *copyOf(const List &list) {
    T *copy = allocate<T>(list.size());
    size_t next = 0;
    for (const auto &item : list) copy[next++] = item;
    return copy;
  }

  orOperatorTensor tensorOf(const at::Tensor &tensor) {
    orOperatorTensor described{};
    described.ndim = -1;
    if (!tensor.defined()) return described;
    const auto dtype = dtypeOf(tensor.scalar_type());
    if (!dtype || !tensor.is_privateuseone() || tensor.is_conj() || tensor.is_neg() ||
        tensor.is_quantized() || tensor.layout() != c10::kStrided) {
      throw Indescribable();
    }
    described.data = tensor.numel() == 0 ? nullptr : const_cast<void *>(tensor.const_data_ptr());
    described.dtype = *dtype;
    described.ndim = static_cast<int>(tensor.dim());
    described.numel = tensor.numel();
    described.sizes = copyOf<int64_t>(tensor.sizes());
    described.strides = copyOf<int64_t>(tensor.strides());
    return described;
  }

  static orArgument numberOf(const c10::Scalar &number) {
    orArgument argument{};
    if (number.isBoolean()) {
      argument.kind = orArgumentBool;
      argument.value.integer = number.toBool() ? 1 : 0;
    } else if (number.isIntegral(/*includeBool=*/false) && number.type() != ScalarType::UInt64) {
      argument.kind = orArgumentInt;
      argument.value.integer = number.toLong();
    } else if (number.isFloatingPoint()) {
      argument.kind = orArgumentFloat;
      argument.value.number = number.toDouble();
    } else {
      throw Indescribable();
    }
    return argument;
  }

  static orArgument seed() {
    orArgument argument{};
    argument.kind = orArgumentSeed;
    return argument;
  }

  orArgument tensorArgument(const at::Tensor &tensor) {
    orArgument argument{};
    if (!tensor.defined()) return argument;
    if (tensor.is_cpu() && tensor.dim() == 0) return numberOf(tensor.item());
    auto *described = allocate<orOperatorTensor>(1);
    *described = tensorOf(tensor);
    argument.kind = orArgumentTensor;
    argument.count = 1;
    argument.value.tensors = described;
    return argument;
  }

  orArgument listArgument(const IValue &value) {
    orArgument argument{};
    if (value.isTensorList() || holdsOptionalTensors(value)) {
      const auto items = value.toListRef();
      auto *described = allocate<orOperatorTensor>(items.size());
      for (size_t i = 0; i < items.size(); ++i) {
        described[i] = tensorOf(items[i].isNone() ? at::Tensor() : items[i].toTensor());
      }
      argument.kind = orArgumentTensors;
      argument.count = items.size();
      argument.value.tensors = described;
    } else if (value.isIntList()) {
      argument.kind = orArgumentInts;
      const auto items = value.toIntVector();
      argument.count = items.size();
      argument.value.integers = copyOf<int64_t>(items);
    } else if (value.isDoubleList()) {
      argument.kind = orArgumentFloats;
      const auto items = value.toDoubleVector();
      argument.count = items.size();
      argument.value.numbers = copyOf<double>(items);
    } else if (value.isBoolList()) {
      argument.kind = orArgumentBools;
      argument.count = value.toBoolList().size();
      argument.value.integers = copyOf<int64_t>(value.toBoolList().vec());
    } else {
      throw Indescribable();
    }
    return argument;
  }

  orArgument argumentOf(const IValue &value, size_t position) {
    orArgument argument{};
    if (value.isNone() || value.isDevice()) return argument;
    if (value.isTensor()) return tensorArgument(value.toTensor());
    if (value.isList()) return listArgument(value);
    if (value.isString()) {
      const std::string &text = value.toStringRef();
      argument.kind = orArgumentText;
      argument.value.text = copyOf<char>(std::string_view(text.c_str(), text.size() + 1));
      return argument;
    }
    if (!value.isScalar()) throw Indescribable();
    argument = numberOf(value.toScalar());
    if (isDtype(op_.schema().arguments()[position])) {
      const auto dtype = dtypeOf(static_cast<ScalarType>(value.toInt()));
      argument.value.integer = dtype ? static_cast<int64_t>(*dtype) : -1;
    }
    return argument;
  }

  void makeResults(const OutputSpec &spec, c10::Device device, c10::ArrayRef<IValue> arguments) {
    const auto fresh = [&](const KeptMetadata &metadata) {
      KernelMemory memory;
      return allocateResult(metadata, device, call_.stream, memory);
    };
    size_t count = 0;
    for (const ResultSpec &result : spec.results) {
      if (result.argument >= 0) {
        results_.push_back(arguments[static_cast<size_t>(result.argument)]);
      } else if (result.isList) {
        c10::List<at::Tensor> list;
        for (const KeptMetadata &metadata : result.fresh) list.push_back(fresh(metadata));
        results_.emplace_back(std::move(list));
      } else {
        results_.emplace_back(fresh(result.fresh[0]));
      }
      eachTensor(results_.back(), [&](const at::Tensor &) { ++count; });
    }
    auto *described = allocate<orOperatorTensor>(count);
    call_.results = described;
    call_.result_count = count;
    for (const IValue &result : results_) {
      eachTensor(result, [&](const at::Tensor &tensor) { *described++ = tensorOf(tensor); });
    }
  }

  const c10::OperatorHandle op_;
  const OpTraits &traits_;
  Results results_;
  orOperatorCall call_{};
  alignas(16) std::array<std::byte, 1536> room_;
  std::pmr::monotonic_buffer_resource arena_{room_.data(), room_.size()};
};

}  // namespace

bool runsOwnKernels(c10::DeviceIndex index) { return !canMap(index) && !kernels().empty(); }

bool hasDeviceKernel(const c10::OperatorHandle &op) {
  return !kernels().empty() && kernelOf(op) != nullptr;
}

std::unique_ptr<DeviceCall> DeviceCall::make(const c10::OperatorHandle &op, const OpTraits &traits,
                                             const OutputSpec &spec, c10::Device device,
                                             orStream_t stream, c10::ArrayRef<IValue> arguments) {
  const orOperatorKernel *kernel = kernels().empty() ? nullptr : kernelOf(op);
  // A kernel computes with integers in float32 where PyTorch would in another default dtype.
  const bool inOther =
      !spec.inDefaultDtype.empty() && c10::get_default_dtype_as_scalartype() != ScalarType::Float;
  EmptyOutputs outputs(spec, arguments);
  if (kernel == nullptr || inOther || !outputs.resize()) return nullptr;
  auto call = std::make_unique<Call>(op, traits, *kernel, stream);
  try {
    call->describe(spec, device, arguments);
  } catch (const Indescribable &) {
    return nullptr;
  }
  if (!call->isAccepted()) return nullptr;
  outputs.keep();
  return call;
}

Results DeviceCall::queue(std::unique_ptr<DeviceCall> call, const char *name,
                          c10::ArrayRef<IValue> arguments,
                          c10::function_ref<uint64_t(size_t)> draw) {
  return static_cast<Call &>(*call).launch(call, name, arguments, draw);
}

}  // namespace torch_openreg
