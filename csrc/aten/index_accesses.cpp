#include "index_accesses.h"

#include <openreg_sanitizer.h>

#include <ATen/ExpandUtils.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>

#include "../torch/check.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IValue;

constexpr int64_t kIndices = 4096;  // more are not read
constexpr size_t kRuns = 64;
constexpr size_t kPeeked = 1 << 16;  // elements of an index tensor with gaps

enum class Selects { kRows, kElements, kFlatElements };

/* The positions of an operator's arguments. */
struct Form {
  std::string_view name;
  int dim;  // the argument; -1: the dimension is the first
  int index;
  Selects selects;
};

constexpr Selects kRows = Selects::kRows, kElements = Selects::kElements;
constexpr Selects kFlatElements = Selects::kFlatElements;

constexpr std::array kForms{
    Form{"aten::index_select", 1, 2, kRows},
    Form{"aten::index_copy_", 1, 2, kRows},
    Form{"aten::index_add_", 1, 2, kRows},
    Form{"aten::index_fill_", 1, 2, kRows},
    Form{"aten::index_reduce_", 1, 2, kRows},
    Form{"aten::embedding", -1, 1, kRows},
    Form{"aten::embedding_bag", -1, 1, kRows},
    Form{"aten::_embedding_bag", -1, 1, kRows},
    Form{"aten::_embedding_bag_forward_only", -1, 1, kRows},
    Form{"aten::embedding_renorm_", -1, 1, kRows},
    Form{"aten::index", -1, 1, kRows},
    Form{"aten::_unsafe_index", -1, 1, kRows},
    Form{"aten::index_put_", -1, 1, kRows},
    Form{"aten::_index_put_impl_", -1, 1, kRows},
    Form{"aten::index_copy", 1, 2, kRows},
    Form{"aten::index_add", 1, 2, kRows},
    Form{"aten::index_reduce", 1, 2, kRows},
    Form{"aten::gather", 1, 2, kElements},
    Form{"aten::scatter_", 1, 2, kElements},
    Form{"aten::scatter_add_", 1, 2, kElements},
    Form{"aten::scatter_reduce_", 1, 2, kElements},
    Form{"aten::scatter", 1, 2, kElements},
    Form{"aten::scatter_add", 1, 2, kElements},
    Form{"aten::scatter_reduce", 1, 2, kElements},
    Form{"aten::take", -1, 1, kFlatElements},
    Form{"aten::put_", -1, 1, kFlatElements},
};

const Form *formOf(std::string_view name) {
  const auto *found = std::find_if(kForms.begin(), kForms.end(),
                                   [&](const Form &form) { return form.name == name; });
  return found == kForms.end() ? nullptr : found;
}

template <typename T>
std::vector<int64_t> widened(const std::vector<char> &bytes) {
  const auto *first = reinterpret_cast<const T *>(bytes.data());
  return {first, first + bytes.size() / sizeof(T)};
}

/* The bytes of the indices; empty if they are not known. */
std::vector<char> bytesOf(const Tensor &index) {
  const char *data = firstByte(index);
  if (index.is_cpu()) return {data, data + index.nbytes()};
  if (index.is_privateuseone()) return peekedBytes(data, index.nbytes());
  return {};
}

std::optional<std::vector<int64_t>> numbersOf(const Tensor &index) {
  if (!index.defined() || !index.has_storage() || index.numel() > kIndices) return std::nullopt;
  const bool wide = index.scalar_type() == at::kLong;
  if (!wide && index.scalar_type() != at::kInt) return std::nullopt;
  if (index.numel() == 0) return std::vector<int64_t>();
  if (!index.is_non_overlapping_and_dense()) return std::nullopt;
  const std::vector<char> bytes = bytesOf(index);
  if (bytes.empty()) return std::nullopt;
  return wide ? widened<int64_t>(bytes) : widened<int32_t>(bytes);
}

/* Returns false for an index out of range, which the kernel reports, and for too many runs. */
bool addRuns(Rows &rows, std::vector<int64_t> numbers, int64_t size) {
  for (int64_t &number : numbers) {
    if (number < 0) number += size;
    if (number < 0 || number >= size) return false;
  }
  std::sort(numbers.begin(), numbers.end());
  for (const int64_t number : numbers) {
    if (rows.runs.empty() || number > rows.runs.back().second) {
      rows.runs.emplace_back(number, number + 1);
    } else {
      rows.runs.back().second = number + 1;
    }
  }
  return rows.runs.size() <= kRuns;
}

/* The index tensor; of a list, the first that is defined. With several, only some bytes of the rows
 * are accessed. */
Tensor indexOf(const IValue &value, Rows &rows) {
  if (value.isTensor()) return value.toTensor();
  Tensor first;
  const auto list = value.toListRef();
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].isTensor() || !list[i].toTensor().defined()) continue;
    if (first.defined()) {
      rows.exact = false;
    } else {
      first = list[i].toTensor();
      rows.dim = static_cast<int64_t>(i);
    }
  }
  return first;
}

// ---- Late accesses -----------------------------------------------------------------------------

using Sizes = c10::SmallVector<int64_t, 8>;

/* The index tensors, each with the dimension that it indexes. None if one of them cannot be read:
 * it is a mask, or too large. */
using Indices = c10::SmallVector<std::pair<int64_t, Tensor>, 2>;

bool isReadable(const Tensor &index) {
  return (index.scalar_type() == at::kLong || index.scalar_type() == at::kInt) &&
         index.has_storage() && index.layout() == c10::kStrided && index.numel() <= kIndices;
}

std::optional<Indices> indicesOf(const Form &form, c10::ArrayRef<IValue> arguments) {
  const Tensor &self = arguments[0].toTensor();
  int64_t dim = form.dim < 0 ? 0 : arguments[form.dim].toInt();
  if (dim < 0) dim += self.dim();
  if (dim < 0 || dim >= self.dim() || self.dim() > OR_ACCESS_DIMS) return std::nullopt;
  Indices indices;
  const IValue &given = arguments[form.index];
  if (given.isTensor()) {
    indices.emplace_back(dim, given.toTensor());
  } else {
    const auto list = given.toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].isTensor() || !list[i].toTensor().defined()) continue;
      indices.emplace_back(static_cast<int64_t>(i), list[i].toTensor());
    }
  }
  const bool readable = std::all_of(indices.begin(), indices.end(), [](const auto &entry) {
    return entry.second.defined() && isReadable(entry.second);
  });
  if (indices.empty() || !readable) return std::nullopt;
  if (form.selects == kElements && indices[0].second.dim() != self.dim()) return std::nullopt;
  return indices;
}

/* Those of all index tensors together. */
Sizes sizesOf(const Indices &indices) {
  std::vector<int64_t> sizes;
  for (const auto &entry : indices) sizes = at::infer_size(sizes, entry.second.sizes());
  return {sizes.begin(), sizes.end()};
}

/* Calls `visit` with each place in a tensor of these sizes, in order. */
template <typename F>
void eachPlace(const Sizes &sizes, F visit) {
  Sizes place(sizes.size(), 0);
  int64_t left = c10::multiply_integers(sizes);
  for (; left > 0; --left) {
    visit(place);
    for (size_t i = sizes.size(); i-- > 0;) {
      if (++place[i] < sizes[i]) break;
      place[i] = 0;
    }
  }
}

/* The distance of a place from the first element, where the tensor is expanded to as many
 * dimensions as the place has. */
int64_t distanceOf(const Tensor &tensor, const Sizes &place) {
  int64_t distance = 0;
  const size_t more = place.size() - static_cast<size_t>(tensor.dim());
  for (size_t i = more; i < place.size(); ++i) {
    const auto dim = static_cast<int64_t>(i - more);
    if (tensor.size(dim) != 1) distance += place[i] * tensor.stride(dim);
  }
  return distance;
}

/* The numbers of an index tensor that is expanded to these sizes; none if they are not known. */
std::optional<std::vector<int64_t>> expandedNumbers(const Tensor &index, const Sizes &sizes) {
  std::vector<int64_t> numbers;
  if (index.numel() == 0) return numbers;
  Sizes last(index.sizes().begin(), index.sizes().end());
  for (int64_t &size : last) --size;
  const auto elements = static_cast<size_t>(distanceOf(index, last)) + 1;
  const char *data = firstByte(index);
  std::vector<char> peeked;
  if (!index.is_cpu()) {
    if (elements > kPeeked) return std::nullopt;
    peeked = peekedBytes(data, elements * index.itemsize());
    if (peeked.empty()) return std::nullopt;
    data = peeked.data();
  }
  const bool wide = index.scalar_type() == at::kLong;
  eachPlace(sizes, [&](const Sizes &place) {
    const int64_t at = distanceOf(index, place);
    numbers.push_back(wide ? reinterpret_cast<const int64_t *>(data)[at]
                           : reinterpret_cast<const int32_t *>(data)[at]);
  });
  return numbers;
}

/* Counts negative indices from the end. Returns false for one out of range. */
bool wrap(int64_t &number, int64_t size) {
  if (number < 0) number += size;
  return number >= 0 && number < size;
}

/* The distance from `self`'s first element to one that is counted in the order of the sizes. */
int64_t flatDistance(const Tensor &self, int64_t number) {
  int64_t distance = 0;
  for (int64_t dim = self.dim(); dim-- > 0; number /= self.size(dim)) {
    distance += number % self.size(dim) * self.stride(dim);
  }
  return distance;
}

/* Adds to each distance what the indices of one dimension select. Returns false for an index out
 * of range. */
bool addDistances(Selects selects, const Tensor &self, int64_t dim, const Sizes &sizes,
                  const std::vector<int64_t> &numbers, std::vector<size_t> &distances) {
  size_t next = 0;
  bool valid = true;
  const int64_t size = selects == kFlatElements ? self.numel() : self.size(dim);
  eachPlace(sizes, [&](Sizes place) {
    int64_t number = numbers[next];
    if (!wrap(number, size)) {
      valid = false;
      number = 0;
    }
    int64_t distance = 0;
    if (selects == kFlatElements) {
      distance = flatDistance(self, number);
    } else if (selects == kElements) {
      place[static_cast<size_t>(dim)] = number;
      distance = distanceOf(self, place);
    } else {
      distance = number * self.stride(dim);
    }
    distances[next++] += static_cast<size_t>(distance) * self.itemsize();
  });
  return valid;
}

/* What each place of the indices selects. */
orMemoryAccess sliceOf(Selects selects, const Tensor &self, const Indices &indices) {
  orMemoryAccess slice{};
  slice.width = self.itemsize();
  for (int64_t dim = 0; selects == kRows && dim < self.dim(); ++dim) {
    const bool indexed = std::any_of(indices.begin(), indices.end(),
                                     [&](const auto &entry) { return entry.first == dim; });
    if (indexed) continue;
    slice.count[slice.dims] = static_cast<size_t>(self.size(dim));
    slice.stride[slice.dims++] = static_cast<size_t>(self.stride(dim)) * self.itemsize();
  }
  return slice;
}

}  // namespace

std::vector<char> peekedBytes(const void *data, size_t size) {
  std::vector<char> bytes(size);
  if (orSanitizerPeek(bytes.data(), data, size) != orSuccess) {
    orGetLastError();
    bytes.clear();
  }
  return bytes;
}

bool takesIndices(std::string_view name) { return formOf(name) != nullptr; }

Rows rowsOf(std::string_view name, c10::ArrayRef<IValue> arguments) {
  const Form &form = *formOf(name);
  Rows rows;
  rows.exact = form.selects == kRows;
  const Tensor &self = arguments[0].toTensor();
  if (form.selects == kFlatElements || self.dim() == 0) return rows;
  if (form.dim >= 0) rows.dim = arguments[form.dim].toInt();
  if (rows.dim < 0) rows.dim += self.dim();
  const Tensor index = indexOf(arguments[form.index], rows);
  if (rows.dim < 0 || rows.dim >= self.dim()) return rows;
  const auto numbers = numbersOf(index);
  rows.known = numbers && addRuns(rows, *numbers, self.size(rows.dim));
  return rows;
}

bool canResolve(std::string_view name, c10::ArrayRef<IValue> arguments) {
  const auto indices = indicesOf(*formOf(name), arguments);
  return indices && c10::multiply_integers(sizesOf(*indices)) <= kIndices;
}

void LateAccess::resolve(std::string_view name, c10::ArrayRef<IValue> arguments) const {
  const Form &form = *formOf(name);
  const Tensor &self = arguments[0].toTensor();
  const auto indices = indicesOf(form, arguments);
  if (!indices) return;
  const Sizes sizes = sizesOf(*indices);
  std::vector<size_t> distances(static_cast<size_t>(c10::multiply_integers(sizes)), 0);
  bool valid = true;
  for (const auto &[dim, index] : *indices) {
    const auto numbers = expandedNumbers(index, sizes);
    if (!numbers) return;
    valid &= addDistances(form.selects, self, dim, sizes, *numbers, distances);
  }
  const orMemoryAccess slice = sliceOf(form.selects, self, *indices);
  // The kernel reports an index out of range, and touches nothing then.
  OPENREG_CHECK(orSanitizerResolve(get(), &slice, distances.data(), valid ? distances.size() : 0));
}

}  // namespace torch_openreg
