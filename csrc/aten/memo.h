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
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_openreg {

using MemoKey = c10::SmallVector<int64_t, 64>;

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

/* Thread-safe and bounded. Null: never seen. */
std::shared_ptr<const Memo> findMemo(const MemoKey &key);
void addMemo(const MemoKey &key, std::shared_ptr<const Memo> memo);

/* Appends an argument to a key; false if the argument cannot be part of one. `typeOnly`: of numbers. */
bool appendToKey(MemoKey &key, const c10::IValue &value, bool typeOnly);

}  // namespace torch_openreg
