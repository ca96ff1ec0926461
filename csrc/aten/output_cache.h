/*
 * What an operator's results will look like, remembered from an earlier call with like arguments.
 *
 * Sizes, strides and dtypes of results follow from the arguments' metadata for every operator that
 * is not tagged as depending on data. The key holds that metadata: of tensors dtype, sizes, strides
 * and bits, and where they overlap what is written; of numbers (Scalar, float) type, sign, which
 * dtypes hold it, the same of its difference from the one before, and how it compares with 1,
 * because an optimizer's change at each step and kernels refuse numbers for nothing else; of all
 * else the value. An operator without tensors to read (arange) has its numbers' values in the key.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../task/arguments.h"
#include "../task/tensor_metadata.h"
#include "op_traits.h"

namespace torch_openreg {

using CallKey = c10::SmallVector<int64_t, 64>;

/* The key of a call; false if it cannot have one. A task carries it to its worker, as the
 * description of its tensors. */
bool makeKey(CallKey &key, const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments);

/* Walks the arguments that a key of makeKey describes. */
class KeyReader {
 public:
  enum Kind { kTensor, kUndefined, kTensors, kOptionalTensors, kOther };
  explicit KeyReader(const CallKey &key);
  /* Of the next argument, or of the next item of a list. */
  Kind next();
  /* Of a list: how many items follow. */
  size_t count() const { return static_cast<size_t>(word_ >> 8); }
  /* Of a tensor. */
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

struct ResultSpec {
  int argument = -1;  // the caller's own tensor (in place, out=); -1: fresh ones
  bool isList = false;
  std::vector<KeptMetadata> fresh;  // one, or those of a list; undefined ones have no dtype
};

/* An output (out=) that gets its size from the call. */
struct Resize {
  size_t argument;
  KeptMetadata metadata;
};

/* Where a kernel computes with integers in the default dtype: empty, or one for the call, or one
 * for each member of the lists of a foreach operator, which computes with each member by itself. */
using InDefaultDtype = c10::SmallVector<bool, 8>;

struct OutputSpec {
  bool usable = false;  // false: results share memory, or are views: not to be promised
  InDefaultDtype inDefaultDtype;
  std::vector<ResultSpec> results;
  std::vector<Resize> resizes;
  /* What its kernel warns of them, if that is known: some give their outputs a size in silence, or
   * in words of their own. */
  std::optional<std::vector<c10::Warning>> resizeWarnings;
};

/* Taken before the call. */
std::vector<KeptMetadata> keptMetadata(c10::ArrayRef<c10::IValue> arguments);

/* What a finished call teaches: how its results will look when it is called with like arguments
 * again. Unusable where results are not simply fresh memory. */
std::shared_ptr<OutputSpec> describeOutputs(const OpTraits &traits,
                                            c10::ArrayRef<c10::IValue> arguments,
                                            const std::vector<KeptMetadata> &before,
                                            c10::ArrayRef<c10::IValue> results);

/* Where floats are made of integers, or integers compared with a floating number. */
InDefaultDtype inDefaultDtype(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments,
                              c10::ArrayRef<c10::IValue> results);

/* Promises the tensors that are written, as they are, and nothing else. */
std::shared_ptr<OutputSpec> writtenOutputs(const OpTraits &traits);

/* Thread-safe and bounded. Null: never seen. */
std::shared_ptr<const OutputSpec> findOutputs(const CallKey &key);
void cacheOutputs(const CallKey &key, std::shared_ptr<const OutputSpec> spec);

/* Of a CPU tensor without dimensions, what kernels ask of its number; of others 0. */
int64_t kindOfNumber(const at::Tensor &tensor);

/* Appends a value that is no tensor; false if it cannot be part of a key. `kindOnly`: of
 * numbers. */
bool appendToKey(CallKey &key, const c10::IValue &value, bool kindOnly);

}  // namespace torch_openreg
