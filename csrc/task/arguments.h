/*
 * Finds the tensors among the arguments of a call.
 */
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace torch_openreg {

/* Whether a list holds tensors, some of which may be None. Checks its items, because TorchScript
 * makes such lists with a type object of its own, which IValue::isOptionalTensorList does not
 * recognise. */
inline bool holdsOptionalTensors(const c10::IValue &list) {
  if (list.isTensorList()) return false;
  for (const c10::IValue &item : list.toListRef()) {
    if (!item.isNone()) return item.isTensor();
  }
  return false;
}

inline bool holdsTensors(const c10::IValue &value) {
  return value.isTensor() ||
         (value.isList() && (value.isTensorList() || holdsOptionalTensors(value)));
}

/* Visits the tensors of an argument or a result. */
template <typename F>
void eachTensor(const c10::IValue &value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (!value.isList()) {
    return;
  } else if (value.isTensorList()) {
    for (const at::Tensor &tensor : value.toTensorList()) visit(tensor);
  } else if (holdsOptionalTensors(value)) {
    for (const c10::IValue &item : value.toListRef()) {
      if (!item.isNone()) visit(item.toTensor());
    }
  }
}

/* Whether `is` holds for any tensor of the values. */
template <typename F>
bool anyTensor(c10::ArrayRef<c10::IValue> values, F is) {
  bool any = false;
  for (const c10::IValue &value : values) {
    eachTensor(value, [&](const at::Tensor &tensor) { any = any || is(tensor); });
  }
  return any;
}

/* Whether the tensor has a floating-point dtype. A Python number has no dtype of its own. */
inline bool isFloating(const at::Tensor &tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
         !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

/* Replaces the tensors of an argument by the results of `other`, and this device by the CPU. */
template <typename F>
c10::IValue argumentForCpu(const c10::IValue &value, F other) {
  if (value.isTensor()) return other(value.toTensor());
  if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(c10::kCPU);
  if (!value.isList()) return value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor &tensor : value.toTensorList()) list.push_back(other(tensor));
    return list;
  }
  if (!holdsOptionalTensors(value)) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue &item : value.toListRef()) {
    list.push_back(item.isNone() ? std::nullopt : std::optional(other(item.toTensor())));
  }
  return list;
}

}  // namespace torch_openreg
