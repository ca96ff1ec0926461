/*
 * The key of an operator's call: all that its results' metadata can depend on.
 *
 * The key holds dtype, sizes, strides and bits of tensors, and where they overlap tensors that are
 * written. Of a number (Scalar, float) it holds type, sign, the dtypes that hold it, the same of
 * its difference from the number before it, and how it compares with 1: kernels refuse numbers for
 * nothing else, and an optimizer's numbers change at each step. Other arguments count by their
 * value. The key of an operator that reads no tensor (arange) holds the values of its numbers.
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

/* Makes the key of a call; false if it cannot have one. A task carries the key to its worker, as
 * the description of its tensors. */
bool makeKey(CallKey &key, const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Reads the arguments that a key of makeKey describes, in order. */
class KeyReader {
 public:
  enum Kind { kTensor, kUndefined, kTensors, kOptionalTensors, kOther };
  explicit KeyReader(const CallKey &key);
  /* Reads the next argument, or the next item of a list. */
  Kind next();
  /* After a list: how many items follow. */
  size_t count() const { return static_cast<size_t>(word_ >> 8); }
  /* After a tensor. */
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

/* What kernels ask about the number in a CPU tensor without dimensions; 0 for other tensors. */
int64_t kindOfNumber(const at::Tensor &tensor);

/* Appends a value that is no tensor; false if it cannot be part of a key. `kindOnly`: numbers count
 * by their kind. */
bool appendToKey(CallKey &key, const c10::IValue &value, bool kindOnly);

}  // namespace torch_openreg
