/*
 * Nothing here is shared but the table of memos. A memo of types has its own kind of key, and of its
 * layouts only the dtypes mean anything.
 */
#include "infer.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/DimVector.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <optional>

#include "strides.h"

namespace torch_openreg {

namespace {

using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;
using Sizes = c10::DimVector;

constexpr int64_t kOfTypes = -1;  // no OpInfo is at this address

/* The tensors that a ruled operator reads, in its kernel's order; false if it has other ones than single tensors. */
bool readTensors(const OpInfo &info, Arguments arguments, bool inPlace,
                 c10::SmallVectorImpl<const at::Tensor *> &tensors) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensorList() || arguments[i].isOptionalTensorList()) return false;
    if (!arguments[i].isTensor() || (info.isWritten[i] && !inPlace)) continue;
    const at::Tensor &tensor = arguments[i].toTensor();
    if (tensor.defined()) tensors.push_back(&tensor);
  }
  if (info.reversed) std::reverse(tensors.begin(), tensors.end());
  return !tensors.empty();
}

bool broadcast(c10::ArrayRef<const at::Tensor *> tensors, Sizes &sizes) {
  for (const at::Tensor *tensor : tensors) {
    const c10::IntArrayRef given = tensor->sizes();
    if (given.size() > sizes.size()) sizes.insert(sizes.begin(), given.size() - sizes.size(), 1);
    for (size_t i = 0; i < given.size(); ++i) {
      int64_t &size = sizes[sizes.size() - given.size() + i];
      if (size == 1) size = given[i];
      if (given[i] != 1 && given[i] != size) return false;
    }
  }
  return true;
}

std::optional<Layout> pointwiseLayout(const OpInfo &info, Arguments arguments) {
  c10::SmallVector<const at::Tensor *, 4> tensors;
  Sizes sizes;
  if (!readTensors(info, arguments, false, tensors) || !broadcast(tensors, sizes)) return {};
  const std::optional<Sizes> strides = pointwiseStrides(tensors, sizes);
  if (!strides) return {};
  Layout layout;
  layout.dims.append(sizes.begin(), sizes.end());
  layout.dims.append(strides->begin(), strides->end());
  return layout;
}

/* By dimension, whether it is reduced; false for what a kernel would refuse. */
bool reducedDims(const IValue &given, int64_t dims, c10::SmallVectorImpl<bool> &reduced) {
  const auto mark = [&](int64_t dim) {
    if (dim < 0) dim += dims;
    if (dim < 0 || dim >= dims) return false;
    reduced[static_cast<size_t>(dim)] = true;
    return true;
  };
  if (given.isInt()) return mark(given.toInt());
  if (given.isIntList() && !given.toIntList().empty()) {
    const auto list = given.toIntVector();
    return std::all_of(list.begin(), list.end(), mark);
  }
  std::fill(reduced.begin(), reduced.end(), true);
  return given.isNone() || given.isIntList();
}

std::optional<Layout> reducedLayout(const OpInfo &info, Arguments arguments) {
  if (!arguments[0].isTensor() || !arguments[0].toTensor().defined()) return {};
  const c10::IntArrayRef sizes = arguments[0].toTensor().sizes();
  c10::SmallVector<bool, 8> reduced(sizes.size(), false);
  const IValue all;
  const IValue &dim = info.dim >= 0 ? arguments[static_cast<size_t>(info.dim)] : all;
  if (!reducedDims(dim, static_cast<int64_t>(sizes.size()), reduced)) return {};
  const bool keep = info.keepdim >= 0 && arguments[static_cast<size_t>(info.keepdim)].toBool();
  Layout layout;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!reduced[i]) layout.dims.push_back(sizes[i]);
    if (reduced[i] && keep) layout.dims.push_back(1);
  }
  const Sizes strides = c10::contiguous_strides(layout.dims);
  layout.dims.append(strides.begin(), strides.end());
  return layout;
}

/* In place there is nothing to promise: what does not fit is for the kernel to judge. */
std::optional<Layout> ruledLayout(const OpInfo &info, Arguments arguments) {
  if (info.inPlace) return {};
  if (info.rule == SizeRule::kPointwise) return pointwiseLayout(info, arguments);
  if (info.rule == SizeRule::kReduction) return reducedLayout(info, arguments);
  return {};
}

bool makeTypeKey(const OpInfo &info, Arguments arguments, MemoKey &key) {
  key.push_back(kOfTypes);
  key.push_back(reinterpret_cast<intptr_t>(&info));
  key.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) {
      if (!appendToKey(key, arguments[i], info.isNumber[i])) return false;
      continue;
    }
    if (!arguments[i].toTensor().defined()) {
      key.push_back(-1);
      continue;
    }
    const at::Tensor &tensor = arguments[i].toTensor();
    key.push_back(static_cast<int64_t>(tensor.scalar_type()) | tensor.is_conj() << 8 |
                  tensor.is_neg() << 9 | (tensor.dim() == 0) << 10 | tensor.is_cpu() << 11 |
                  tensor.unsafeGetTensorImpl()->is_wrapped_number() << 12);
  }
  return true;
}

bool sameSizes(const Layout &a, const Layout &b) { return a.sizes() == b.sizes(); }

/* Strides and dtype of a promised result. */
Layout completed(const Layout &rule, const Layout &typed) {
  Layout layout = rule;
  layout.dtype = typed.dtype;
  layout.conj = typed.conj;
  layout.neg = typed.neg;
  layout.measure();
  return layout;
}

/* Outputs of the inputs' own dtype need no promotion, so nothing has to be learnt before. */
bool writesOneDtype(const OpInfo &info, Arguments arguments) {
  std::optional<c10::ScalarType> dtype;
  bool writes = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (info.isNumber[i] && arguments[i].isComplexDouble()) return false;
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const at::Tensor &tensor = arguments[i].toTensor();
    writes |= info.isWritten[i];
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && !tensor.is_complex()) continue;
    if (!dtype) dtype = tensor.scalar_type();
    if (*dtype != tensor.scalar_type() || !c10::isFloatingType(*dtype)) return false;
  }
  return writes;
}

/* An output of the right size stays as it is; an empty one is made to fit, which warns of nothing. */
bool fitOutput(const at::Tensor &output, size_t argument, const Layout &rule, Memo &memo) {
  if (output.sizes() == rule.sizes()) return true;
  if (output.numel() != 0) return false;
  memo.resizes.push_back({argument, completed(rule, Layout(output))});
  return true;
}

bool overlapsItself(const at::Tensor &tensor) {
  return at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

bool isPlainNumber(const at::Tensor &tensor) {
  return !tensor.defined() || (tensor.dim() == 0 && !tensor.is_complex());
}

bool fitsItem(const IValue &item, const at::Tensor &self, bool written) {
  if (!item.isTensor()) return !item.isComplexDouble();
  const at::Tensor &tensor = item.toTensor();
  return tensor.defined() && tensor.scalar_type() == self.scalar_type() &&
         c10::isFloatingType(tensor.scalar_type()) &&
         (tensor.dim() == 0 || tensor.sizes() == self.sizes()) &&
         !(written && overlapsItself(tensor));
}

/* Lists that no kernel refuses: as long as the first, and item by item of its size and its floating dtype. */
bool listsFit(const OpInfo &info, Arguments arguments) {
  const auto self = arguments[0].toListRef();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue &value = arguments[i];
    if (value.isComplexDouble()) return false;
    if (value.isTensor() && !isPlainNumber(value.toTensor())) return false;
    if (!value.isList()) continue;
    const auto items = value.toListRef();
    if (items.empty() && !info.isForeach) continue;  // what a fused optimizer does not keep
    if (items.size() != self.size()) return false;
    for (size_t k = 0; k < items.size(); ++k) {
      if (!fitsItem(items[k], self[k].toTensor(), info.isWritten[i])) return false;
    }
  }
  return true;
}

}  // namespace

std::shared_ptr<Memo> memoOfOutputs(const OpInfo &info) {
  auto memo = std::make_shared<Memo>();
  memo->usable = true;
  for (size_t i = 0; i < info.isWritten.size(); ++i) {
    if (info.isWritten[i]) memo->results.push_back(Result{static_cast<int>(i), false, {}});
  }
  return memo;
}

bool metaKnowsStrides(const OpInfo &info, Arguments arguments) {
  c10::SmallVector<const at::Tensor *, 4> tensors;
  Sizes sizes;
  return info.inPlace || info.rule != SizeRule::kPointwise ||
         !readTensors(info, arguments, false, tensors) || !broadcast(tensors, sizes) ||
         pointwiseStrides(tensors, sizes).has_value();
}

std::shared_ptr<const Memo> inferByRule(const OpInfo &info, Arguments arguments) {
  const std::optional<Layout> rule = ruledLayout(info, arguments);
  MemoKey key;
  if (!rule || !makeTypeKey(info, arguments, key)) return nullptr;
  const std::shared_ptr<const Memo> typed =
      writesOneDtype(info, arguments) ? memoOfOutputs(info) : findMemo(key);
  if (typed == nullptr || !typed->usable) return nullptr;
  auto memo = std::make_shared<Memo>();
  memo->usable = true;
  memo->exactStrides = false;
  for (const Result &result : typed->results) {
    if (result.argument < 0) {
      memo->results.push_back(Result{-1, false, {completed(*rule, result.fresh[0])}});
      continue;
    }
    const auto argument = static_cast<size_t>(result.argument);
    if (!fitOutput(arguments[argument].toTensor(), argument, *rule, *memo)) return nullptr;
    memo->results.push_back(result);
  }
  return memo;
}

void learnTypes(const OpInfo &info, Arguments arguments, const Memo &memo) {
  const std::optional<Layout> rule = ruledLayout(info, arguments);
  MemoKey key;
  if (!rule || !memo.usable || !makeTypeKey(info, arguments, key)) return;
  auto typed = std::make_shared<Memo>();
  typed->usable = std::all_of(memo.results.begin(), memo.results.end(), [&](const Result &result) {
    if (result.isList) return false;
    if (result.argument < 0) return sameSizes(result.fresh[0], *rule);
    return arguments[static_cast<size_t>(result.argument)].toTensor().sizes() == rule->sizes();
  });
  typed->results = memo.results;
  addMemo(key, std::move(typed));
}

bool fitsInPlace(const OpInfo &info, Arguments arguments) {
  if (arguments[0].isTensorList()) return listsFit(info, arguments);
  if (info.rule != SizeRule::kPointwise) return true;
  c10::SmallVector<const at::Tensor *, 4> tensors;
  Sizes sizes;
  if (!readTensors(info, arguments, true, tensors)) return true;
  if (overlapsItself(arguments[0].toTensor())) return false;
  return broadcast(tensors, sizes) && arguments[0].toTensor().sizes() == c10::IntArrayRef(sizes);
}

}  // namespace torch_openreg
