/*
 * The versions of tensors that are written by way of a list. Autograd compares a tensor's version with the one that it
 * has saved, and PyTorch counts those of single arguments only: for lists it leaves that to a backend's kernel.
 */
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "op_traits.h"

namespace torch_openreg {

void countWritesToLists(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Before anything is queued: an inference tensor may be refused. */
inline void countWrites(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  if (C10_UNLIKELY(traits.writesLists)) countWritesToLists(traits, arguments);
}

}  // namespace torch_openreg
