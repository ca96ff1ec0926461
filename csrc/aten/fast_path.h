/*
 * Queues a call in the usual form whose results are known from an earlier call. Nearly every call
 * takes this path.
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
    kMixed = 1,        // tensors of several devices, or host tensors that are not mere numbers
    kLacksMemory = 2,  // a storage was freed or shrunk
    kHasZeros = 4,     // a tensor that has no memory and needs none
    kHasMask = 8,      // a mask among indices
    kAsksOther = 16,   // a device argument for another kind of device
    kHasByteIndex = 32,
  };
  void scan(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);
  /* Apart from numbers, all tensors are on one device and have their memory, and no index is a
   * mask. */
  bool isUsual() const { return facts_ == 0; }
  bool has(Fact fact) const { return (facts_ & fact) != 0; }
  /* The first tensor's device, else a device argument's, else the current device. */
  c10::Device device() const;
  bool asksCpu() const { return asked_.has_value() && asked_->is_cpu(); }

 private:
  void add(const at::Tensor &tensor, bool mayBeNumber, bool index);

  unsigned facts_ = 0;
  bool found_ = false;
  c10::Device device_{c10::DeviceType::PrivateUse1};  // of the first tensor
  std::optional<c10::Device> asked_;
};

/* Queues the call and makes its results. If it cannot, returns false and has done nothing but
 * `scan.scan`. The arguments are not changed and may be borrowed. */
bool tryFastPath(const c10::OperatorHandle &op, const OpTraits &traits,
                 c10::ArrayRef<c10::IValue> arguments, ArgumentScan &scan, Results &results);

/* Increments the versions of tensors that are written through a list. Autograd compares a tensor's
 * version with the one that it has saved. PyTorch increments the versions of single arguments only,
 * and leaves lists to a backend's kernel. Call it before anything is queued, because it throws for
 * an inference tensor. */
void countWritesToLists(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

inline void countWrites(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  if (C10_UNLIKELY(traits.writesLists)) countWritesToLists(traits, arguments);
}

}  // namespace torch_openreg
