/*
 * Fast path for the common case; anything unusual falls through to fallback.cpp. No shared state.
 */
#include "fast_path.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <utility>

#include "../torch/device.h"
#include "../torch/fork.h"
#include "../torch/stream.h"
#include "../task/tensor_components.h"
#include "../task/tensor_metadata.h"
#include "device_kernel.h"
#include "output_cache.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::IValue;

bool hasItsMemory(const at::Tensor &tensor) {
  if (isPlain(tensor)) return tensor._is_zerotensor() || fitsStorage(tensor);
  const Components parts = componentsOf(tensor);
  return std::all_of(parts.begin(), parts.end(), hasItsMemory);
}

}  // namespace

void ArgumentScan::add(const at::Tensor &tensor, bool mayBeNumber, bool index) {
  if (!tensor.defined()) return;
  if (index && (tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte)) {
    facts_ |= kHasMask;
  }
  constexpr c10::DispatchKeySet kSpecial({DispatchKey::ZeroTensor, DispatchKey::Sparse,
                                          DispatchKey::SparseCsr, DispatchKey::Quantized,
                                          DispatchKey::NestedTensor});
  const bool special = tensor.key_set().has_any(kSpecial);
  if (C10_UNLIKELY(special) && tensor._is_zerotensor()) facts_ |= kHasZeros;
  const c10::Device device = tensor.device();
  if (!device.is_privateuseone()) {
    if (!mayBeNumber || !device.is_cpu() || tensor.dim() != 0) facts_ |= kMixed;
    return;
  }
  if (!found_) device_ = device;
  found_ = true;
  if (device != device_) facts_ |= kMixed;
  if (!(C10_UNLIKELY(special) ? hasItsMemory(tensor) : fitsStorage(tensor))) facts_ |= kLacksMemory;
}

void ArgumentScan::scan(const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue &value = arguments[i];
    // For a foreach operator a number on the host makes the arguments mixed, and the members are
    // then run one by one.
    const bool mayBeNumber = !traits.isWritten[i] && !traits.isForeach;
    if (C10_LIKELY(value.isTensor())) {
      add(value.toTensor(), mayBeNumber, false);
    } else if (value.isDevice()) {
      asked_ = value.toDevice();
      if (!asked_->is_privateuseone()) facts_ |= kAsksOther;
    } else if (value.isList()) {
      const bool indices = holdsOptionalTensors(value);
      if (!indices && !value.isTensorList()) continue;
      for (const IValue &item : value.toListRef()) {
        if (item.isNone()) continue;
        const at::Tensor &tensor = item.toTensor();
        add(tensor, mayBeNumber, indices && traits.masksDecide);
        if (indices && tensor.defined() && tensor.scalar_type() == c10::kByte) {
          facts_ |= kHasByteIndex;
        }
      }
    }
  }
}

c10::Device ArgumentScan::device() const {
  if (found_) return device_;
  const bool ours = asked_.has_value() && asked_->is_privateuseone();
  return {c10::DeviceType::PrivateUse1, indexOrCurrent(ours ? asked_->index() : -1)};
}

bool tryFastPath(const c10::OperatorHandle &op, const OpTraits &traits,
                 c10::ArrayRef<IValue> arguments, ArgumentScan &scan, Results &results) {
  refuseInForkedChild();
  scan.scan(traits, arguments);
  if (!scan.isUsual() || !traits.predictable || traits.draws || traits.alerts) return false;
  CallKey key;
  if (!makeKey(key, traits, arguments)) return false;
  std::shared_ptr<const OutputSpec> spec = findOutputs(key);
  if (spec == nullptr || !spec->usable) return false;
  const c10::Device device = scan.device();
  const orStream_t stream = currentStreamHandle(device.index());
  const bool maps = canMap(device.index());
  if (C10_UNLIKELY(!maps || hasDeviceKernel(op))) {
    if (auto call = DeviceCall::make(op, traits, *spec, device, stream, arguments)) {
      countWrites(traits, arguments);
      results = DeviceCall::queue(std::move(call), traits.name, arguments,
                                  [](size_t) { return uint64_t{0}; });
      return true;
    }
    if (!maps) return false;
  }
  countWrites(traits, arguments);
  queueOperator(op, traits, traits.name, key, std::move(spec), device, stream, arguments, results);
  return true;
}

void countWritesToLists(const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!traits.isWritten[i] || !arguments[i].isTensorList()) continue;
    eachTensor(arguments[i], [](const at::Tensor &tensor) {
      if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

}  // namespace torch_openreg
