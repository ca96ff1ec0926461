/*
 * Makes and reads the key of an operator's call: everything that its results' metadata can depend
 * on.
 *
 * The key holds dtype, sizes, strides and bits of tensors, and the overlaps of written tensors with
 * others. For a number (Scalar, float) it holds the type, the sign, the dtypes that hold it, the
 * same for its difference from the previous number, and how it compares with 1. Kernels refuse
 * numbers for no other reason, and an optimizer's numbers change at each step, so their values are
 * left out. Other arguments are in the key by value. The key of an operator that reads no tensor
 * (arange) holds the values of its numbers.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "../task/tensor_metadata.h"
#include "op_traits.h"

namespace torch_openreg {

using CallKey = c10::SmallVector<int64_t, 64>;

/* Makes the key of a call; returns false if the call cannot have one. A task takes the key along to
 * its worker, as the description of its tensors. */
bool makeKey(CallKey &key, const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Reads the arguments that a key of makeKey describes, in order. */
class KeyReader {
 public:
  enum Kind { kTensor, kUndefined, kTensors, kOptionalTensors, kOther };
  explicit KeyReader(const CallKey &key);
  /* Reads the next argument, or the next item of a list. */
  Kind next();
  /* Call after a list: the number of items that follow. */
  size_t count() const { return static_cast<size_t>(word_ >> 8); }
  /* Call after a tensor: its metadata. */
  TensorMetadata tensor() const {
    return {{dims_, count_},
            {dims_ + count_, count_},
            static_cast<c10::ScalarType>(word_ >> 8 & 0xff),
            (word_ >> 16 & 1) != 0,
            (word_ >> 17 & 1) != 0,
            (word_ >> 18 & 1) != 0};
  }
  bool isCpu() const { return (word_ >> 19 & 1) != 0; }

 private:
  const int64_t *next_;
  int64_t word_ = 0;
  const int64_t *dims_ = nullptr;
  size_t count_ = 0;
};

/* The kind of the number in a CPU tensor without dimensions: its sign and the dtypes that hold it.
 * 0 for other tensors. */
int64_t kindOfNumber(const at::Tensor &tensor);

/* Appends a value that is no tensor; returns false if it cannot be part of a key. `kindOnly`: of a
 * number, appends the kind and not the value. */
bool appendToKey(CallKey &key, const c10::IValue &value, bool kindOnly);

}  // namespace torch_openreg
