/*
 * What an operator's results will look like, remembered from an earlier call with like arguments.
 *
 * Sizes, strides and dtypes of results follow from the arguments' metadata for every operator that is not
 * tagged as depending on data. The key holds that metadata: of tensors dtype, sizes, strides and bits, and
 * where they overlap what is written; of numbers (Scalar, float) type, sign, which dtypes hold it, whether it is
 * less than the one before and how it compares with 1, because an optimizer's change at each step and kernels
 * refuse numbers for nothing else; of all else the value. An operator without tensors to read (arange) has its
 * numbers' values in the key.
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

/* An output (out=) that gets its size from the call. */
struct Resize {
  size_t argument;
  Layout layout;
};

struct Memo {
  bool usable = false;  // false: results share memory, or are views: not to be promised
  std::vector<Result> results;
  std::vector<Resize> resizes;
};

/* Promises the tensors that are written, as they are, and nothing else. */
std::shared_ptr<Memo> memoOfOutputs(const OpInfo &info);

/* The same elements at the same places: a dimension of one element may have any stride. */
bool sameStrides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b);

/* Of a list: whether it holds tensors, some of which may be None. By its items, because TorchScript makes such lists
 * with a type object of its own, which IValue::isOptionalTensorList does not know. */
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

/* The tensors of an argument, or of a result. */
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

/* An argument with other tensors in place of its own, and the CPU in place of this device. */
template <typename F>
c10::IValue forCpu(const c10::IValue &value, F other) {
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

/* Thread-safe and bounded. Null: never seen. */
std::shared_ptr<const Memo> findMemo(const MemoKey &key);
void addMemo(const MemoKey &key, std::shared_ptr<const Memo> memo);

/* Appends a value that is no tensor; false if it cannot be part of a key. `kindOnly`: of numbers. */
bool appendToKey(MemoKey &key, const c10::IValue &value, bool kindOnly);

}  // namespace torch_openreg
