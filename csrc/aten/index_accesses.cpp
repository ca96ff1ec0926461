#include "index_accesses.h"

#include <openreg_sanitizer.h>

#include <algorithm>
#include <array>

#include "../torch/check.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IValue;

constexpr int64_t kIndices = 4096;  // more are not read
constexpr size_t kRuns = 64;

/* The positions of an operator's arguments. */
struct Form {
  std::string_view name;
  int dim;    // the argument; -1: the dimension is the first
  int index;  // -1: the indices do not select slices
  bool exact;
};

constexpr std::array kForms{
    Form{"aten::index_select", 1, 2, true},   Form{"aten::index_copy_", 1, 2, true},
    Form{"aten::index_add_", 1, 2, true},     Form{"aten::index_fill_", 1, 2, true},
    Form{"aten::index_reduce_", 1, 2, true},  Form{"aten::embedding", -1, 1, true},
    Form{"aten::embedding_bag", -1, 1, true}, Form{"aten::_embedding_bag", -1, 1, true},
    Form{"aten::index", -1, 1, true},         Form{"aten::_unsafe_index", -1, 1, true},
    Form{"aten::index_put_", -1, 1, true},    Form{"aten::_index_put_impl_", -1, 1, true},
    Form{"aten::gather", 1, 2, false},        Form{"aten::scatter_", 1, 2, false},
    Form{"aten::scatter_add_", 1, 2, false},  Form{"aten::scatter_reduce_", 1, 2, false},
    Form{"aten::index_copy", 1, 2, true},     Form{"aten::index_add", 1, 2, true},
    Form{"aten::index_reduce", 1, 2, true},   Form{"aten::scatter", 1, 2, false},
    Form{"aten::scatter_add", 1, 2, false},   Form{"aten::scatter_reduce", 1, 2, false},
    Form{"aten::take", -1, -1, false},        Form{"aten::put_", -1, -1, false},
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
  std::vector<char> bytes(index.nbytes());
  const char *data = static_cast<const char *>(index.storage().data()) +
                     static_cast<size_t>(index.storage_offset()) * index.itemsize();
  if (index.is_cpu()) {
    std::copy_n(data, bytes.size(), bytes.data());
  } else if (!index.is_privateuseone() ||
             orSanitizerPeek(bytes.data(), data, bytes.size()) != orSuccess) {
    orGetLastError();
    bytes.clear();
  }
  return bytes;
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

}  // namespace

bool takesIndices(std::string_view name) { return formOf(name) != nullptr; }

Rows rowsOf(std::string_view name, c10::ArrayRef<IValue> arguments) {
  const Form &form = *formOf(name);
  Rows rows;
  rows.exact = form.exact;
  const Tensor &self = arguments[0].toTensor();
  if (form.index < 0 || self.dim() == 0) return rows;
  if (form.dim >= 0) rows.dim = arguments[form.dim].toInt();
  if (rows.dim < 0) rows.dim += self.dim();
  const Tensor index = indexOf(arguments[form.index], rows);
  if (rows.dim < 0 || rows.dim >= self.dim()) return rows;
  const auto numbers = numbersOf(index);
  rows.known = numbers && addRuns(rows, *numbers, self.size(rows.dim));
  return rows;
}

}  // namespace torch_openreg
