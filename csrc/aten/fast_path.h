/*
 * The fast path of nearly every call: an operator in its usual form, whose results are known from
 * an earlier call.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "op_traits.h"
#include "operator_task.h"

namespace torch_openreg {

/* Facts about a call's arguments, collected in one pass. It keeps no argument. */
class ArgumentScan {
 public:
  enum Fact : unsigned {
    kMixed = 1,        // tensors of several devices, or of the host that are more than a number
    kLacksMemory = 2,  // a storage was freed or shrunk
    kHasZeros = 4,     // a tensor that has no memory and needs none
    kHasMask = 8,      // among indices
    kAsksOther = 16,   // a device argument for another kind of device
    kHasByteIndex = 32,
  };
  void scan(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);
  /* Tensors of one device, but for numbers, with their memory, and no mask. */
  bool isUsual() const { return facts_ == 0; }
  bool has(Fact fact) const { return (facts_ & fact) != 0; }
  /* The first tensor's, else a device argument's, else the current one. */
  c10::Device device() const;
  bool asksCpu() const { return asked_.has_value() && asked_->is_cpu(); }

 private:
  void add(const at::Tensor &tensor, bool mayBeNumber, bool index);

  unsigned facts_ = 0;
  bool found_ = false;
  c10::Device device_{c10::DeviceType::PrivateUse1};  // of the first tensor
  std::optional<c10::Device> asked_;
};

/* Queues the call and makes its results; or returns false after nothing but `scan.scan`. The
 * arguments are not changed and may be borrowed. */
bool tryFastPath(const c10::OperatorHandle &op, const OpTraits &traits,
                 c10::ArrayRef<c10::IValue> arguments, ArgumentScan &scan, Results &results);

/* The versions of tensors that are written by way of a list. Autograd compares a tensor's version
 * with the one that it has saved, and PyTorch counts those of single arguments only: for lists it
 * leaves that to a backend's kernel. Before anything is queued: an inference tensor may be
 * refused. */
void countWritesToLists(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

inline void countWrites(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  if (C10_UNLIKELY(traits.writesLists)) countWritesToLists(traits, arguments);
}

}  // namespace torch_openreg
