/*
 * Nothing here is shared. What is found to be unusual in any way is left to the fallback, which takes everything.
 */
#include "fast_path.h"

#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <optional>

#include "../torch/device.h"
#include "../torch/stream.h"
#include "extent.h"
#include "output_cache.h"
#include "versions.h"

namespace torch_openreg {

namespace {

using c10::IValue;

/* Looks for the device of a call, as long as there is nothing to object to. */
class Survey {
 public:
  explicit Survey(const OpTraits &traits) : traits_(traits) {}

  /* The tensors are of one device, but for numbers, and have memory, and enough; no index is a mask. */
  bool isUsual(const IValue &value, bool written);
  c10::Device device() const {
    if (found_) return device_;
    return {c10::DeviceType::PrivateUse1, indexOrCurrent(asked_)};
  }

 private:
  bool isUsual(const at::Tensor &tensor, bool written, bool index);

  const OpTraits &traits_;
  bool found_ = false;
  c10::Device device_{c10::DeviceType::PrivateUse1};  // of the first tensor
  c10::DeviceIndex asked_ = -1;                       // by a device argument
};

bool Survey::isUsual(const at::Tensor &tensor, bool written, bool index) {
  if (!tensor.defined()) return true;
  if (tensor._is_zerotensor()) return false;
  const c10::ScalarType dtype = tensor.scalar_type();
  if (index && traits_.masksDecide && (dtype == c10::kBool || dtype == c10::kByte)) return false;
  const c10::Device device = tensor.device();
  if (!device.is_privateuseone()) return device.is_cpu() && tensor.dim() == 0 && !written;
  if (!found_) device_ = device;
  found_ = true;
  return device == device_ && fitsStorage(tensor);
}

bool Survey::isUsual(const IValue &value, bool written) {
  if (C10_LIKELY(value.isTensor())) return isUsual(value.toTensor(), written, false);
  if (value.isDevice()) {
    asked_ = value.toDevice().index();
    return value.toDevice().is_privateuseone();
  }
  if (!value.isList()) return true;
  const bool indices = holdsOptionalTensors(value);
  if (!indices && !value.isTensorList()) return true;
  const auto items = value.toListRef();
  return std::all_of(items.begin(), items.end(), [&](const IValue &item) {
    return item.isNone() || isUsual(item.toTensor(), written, indices);
  });
}

}  // namespace

bool takeFastPath(const c10::OperatorHandle &op, const OpTraits &traits,
                  c10::ArrayRef<IValue> arguments, Results &results) {
  // With another default dtype, a kernel that makes it of integers may run when it has changed back.
  const bool ordinary = c10::get_default_dtype_as_scalartype() == c10::kFloat;
  if (!traits.predictable || traits.draws || traits.alerts || !ordinary) return false;
  Survey survey(traits);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!survey.isUsual(arguments[i], traits.isWritten[i])) return false;
  }
  CallKey key;
  if (!makeKey(key, traits, arguments)) return false;
  std::shared_ptr<const OutputSpec> spec = findOutputs(key);
  if (spec == nullptr || !spec->usable) return false;
  const c10::Device device = survey.device();
  if (!canMap(device.index())) return false;
  const orStream_t stream = currentStreamHandle(device.index());
  countWrites(traits, arguments);
  queueOperator(op, traits, key, std::move(spec), device, stream, arguments, results);
  return true;
}

}  // namespace torch_openreg
