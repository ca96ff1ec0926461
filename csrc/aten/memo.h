/*
 * What an operator's results will look like, remembered from an earlier call with like arguments.
 *
 * Sizes, strides and dtypes of results follow from the arguments' metadata for every operator
 * that is not tagged as depending on data. The key holds that metadata: of tensors dtype, sizes, strides and
 * bits; of numbers (Scalar) the type only, because an optimizer's change at each step; of all
 * else the value. An operator without tensors to read (arange) has its numbers' values in the key.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "opinfo.h"

namespace torch_openreg {

using MemoKey = c10::SmallVector<int64_t, 64>;

/* The key of a call; false if it cannot have one. A task carries it to its lane, as the description of its tensors. */
bool makeKey(MemoKey &key, const OpInfo &info, c10::ArrayRef<c10::IValue> arguments);

/* Walks the arguments that a key of makeKey describes. */
class KeyReader {
 public:
  enum Kind { kTensor, kUndefined, kTensors, kOptionalTensors, kOther };
  explicit KeyReader(const MemoKey &key);
  /* Of the next argument, or of the next item of a list. */
  Kind next();
  /* Of a list: how many items follow. */
  size_t count() const { return static_cast<size_t>(word_ >> 8); }
  /* Of a tensor. */
  c10::ScalarType dtype() const { return static_cast<c10::ScalarType>(word_ >> 8 & 0xff); }
  bool isConj() const { return (word_ >> 16 & 1) != 0; }
  bool isNeg() const { return (word_ >> 17 & 1) != 0; }
  bool isWrapped() const { return (word_ >> 18 & 1) != 0; }
  bool isCpu() const { return (word_ >> 19 & 1) != 0; }
  c10::IntArrayRef sizes() const { return {dims_, count_}; }
  c10::IntArrayRef strides() const { return {dims_ + count_, count_}; }

 private:
  const int64_t *next_;
  int64_t word_ = 0;
  const int64_t *dims_ = nullptr;
  size_t count_ = 0;
};

/* A tensor's metadata. `dims` is sizes, then strides. */
struct Layout {
  c10::SmallVector<int64_t, 8> dims;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool conj = false, neg = false;

  Layout() = default;
  explicit Layout(const at::Tensor &tensor);
  bool describes(const at::Tensor &tensor) const;
  bool describesSizes(const at::Tensor &tensor) const;  // all but strides
  void measure();                                       // sets `bytes`
  c10::IntArrayRef sizes() const { return {dims.data(), dims.size() / 2}; }
  c10::IntArrayRef strides() const { return {dims.data() + dims.size() / 2, dims.size() / 2}; }
  size_t bytes = 0;  // of a storage that holds it and no more
};

struct Result {
  int argument = -1;  // the caller's own tensor (in place, out=); -1: fresh ones
  bool isList = false;
  std::vector<Layout> fresh;  // one, or those of a list; undefined ones have no dtype
};

/* An empty output (out=) that gets its size from the call. */
struct Resize {
  size_t argument;
  Layout layout;
};

struct Memo {
  bool usable = false;  // false: results share memory, or are views, or resize: not to be promised
  std::vector<Result> results;
  std::vector<Resize> resizes;
  bool exactStrides = true;  // of fresh results; else what has others is copied
};

/* The tensors of an argument, or of a result. */
template <typename F>
void eachTensor(const c10::IValue &value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (!value.isList()) {
    return;
  } else if (value.isTensorList()) {
    for (const at::Tensor &tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) visit(*tensor);
    }
  }
}

/* Thread-safe and bounded. Null: never seen. */
std::shared_ptr<const Memo> findMemo(const MemoKey &key);
void addMemo(const MemoKey &key, std::shared_ptr<const Memo> memo);

/* Appends a value that is no tensor; false if it cannot be part of a key. `typeOnly`: of numbers. */
bool appendToKey(MemoKey &key, const c10::IValue &value, bool typeOnly);

}  // namespace torch_openreg
