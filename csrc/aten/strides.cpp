/*
 * Nothing here is shared. The cases and the sort are TensorIterator's, which PyTorch offers with a result to allocate
 * only.
 */
#include "strides.h"

#include <c10/core/MemoryFormat.h>
#include <c10/util/SmallVector.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

namespace torch_openreg {

namespace {

using c10::DimVector;
using c10::IntArrayRef;
using Tensors = c10::ArrayRef<const at::Tensor *>;
using Operands =
    c10::SmallVector<DimVector, 4>;  // strides by the result's dimensions, 0 where broadcast

/* Where nothing has to be sorted: all have the result's sizes, and agree. */
std::optional<DimVector> agreedStrides(Tensors tensors, IntArrayRef sizes) {
  const auto all = [&](auto holds) { return std::all_of(tensors.begin(), tensors.end(), holds); };
  if (!all([&](const at::Tensor *tensor) { return tensor->sizes() == sizes; })) return {};
  if (all([](const at::Tensor *tensor) { return tensor->is_contiguous(); })) {
    return c10::contiguous_strides(sizes);
  }
  constexpr auto channelsLast = c10::MemoryFormat::ChannelsLast;
  if (all([](const at::Tensor *tensor) { return tensor->is_contiguous(channelsLast); })) {
    return DimVector(IntArrayRef(c10::get_channels_last_strides_2d(sizes)));
  }
  const IntArrayRef first = tensors[0]->strides();
  const bool dense = all([&](const at::Tensor *tensor) {
    return tensor->is_non_overlapping_and_dense() && tensor->strides() == first;
  });
  if (!dense) return {};
  return DimVector(first);
}

/* Positive if `a` belongs outside of `b`, negative if inside, 0 if no operand decides. */
int compared(c10::ArrayRef<DimVector> operands, IntArrayRef sizes, size_t a, size_t b) {
  for (const DimVector &strides : operands) {
    if (strides[a] == 0 || strides[b] == 0) continue;
    if (strides[a] != strides[b]) return strides[a] < strides[b] ? -1 : 1;
    if (sizes[a] > sizes[b]) return 1;
  }
  return 0;
}

/* Dense strides in the operands' order. Undecided pairs make this no order that another sort would give too. */
DimVector sortedStrides(c10::ArrayRef<DimVector> operands, IntArrayRef sizes) {
  c10::SmallVector<size_t, 5> inner;
  for (size_t dim = sizes.size(); dim-- > 0;) inner.push_back(dim);
  for (size_t i = 1; i < inner.size(); ++i) {
    size_t moving = i;
    for (size_t k = i; k-- > 0;) {
      const int order = compared(operands, sizes, inner[k], inner[moving]);
      if (order < 0) break;
      if (order == 0) continue;
      std::swap(inner[k], inner[moving]);
      moving = k;
    }
  }
  DimVector strides(sizes.size());
  int64_t stride = 1;
  for (const size_t dim : inner) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

DimVector broadcastStrides(IntArrayRef own, IntArrayRef strides, IntArrayRef sizes) {
  DimVector made(sizes.size(), 0);
  const size_t leading = sizes.size() - own.size();
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] != 1 || sizes[leading + i] == 1) made[leading + i] = strides[i];
  }
  return made;
}

/* Integers may be cast to what the result is. */
bool mayCast(Tensors tensors) {
  const c10::ScalarType dtype = tensors[0]->scalar_type();
  return c10::isIntegralType(dtype, /*includeBool=*/true) ||
         std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor *tensor) { return tensor->scalar_type() != dtype; });
}

/* A cast keeps the strides of a dense tensor. Which of the others are cast is not known here. */
bool castsDiffer(Tensors tensors, IntArrayRef sizes, const Operands &operands, IntArrayRef strides) {
  c10::SmallVector<size_t, 4> loose;
  Operands cast;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor &tensor = *tensors[i];
    if (tensor.is_non_overlapping_and_dense()) continue;
    const DimVector dense = sortedStrides({DimVector(tensor.strides())}, tensor.sizes());
    loose.push_back(i);
    cast.push_back(broadcastStrides(tensor.sizes(), dense, sizes));
  }
  for (size_t choice = 1; choice < size_t{1} << loose.size(); ++choice) {
    Operands chosen = operands;
    for (size_t k = 0; k < loose.size(); ++k) {
      if ((choice >> k & 1) != 0) chosen[loose[k]] = cast[k];
    }
    if (!sameStrides(sizes, sortedStrides(chosen, sizes), strides)) return true;
  }
  return false;
}

}  // namespace

bool sameStrides(IntArrayRef sizes, IntArrayRef a, IntArrayRef b) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

std::optional<DimVector> pointwiseStrides(Tensors tensors, IntArrayRef sizes) {
  if (auto agreed = agreedStrides(tensors, sizes)) return agreed;
  Operands operands;
  for (const at::Tensor *tensor : tensors) {
    operands.push_back(broadcastStrides(tensor->sizes(), tensor->strides(), sizes));
  }
  DimVector strides = sortedStrides(operands, sizes);
  if (mayCast(tensors) && castsDiffer(tensors, sizes, operands, strides)) return {};
  return strides;
}

}  // namespace torch_openreg
