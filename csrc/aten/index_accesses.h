/*
 * Finds the rows of its first argument that an operator with a tensor of indices reads or writes.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace torch_openreg {

/* Slices [begin, end) along a dimension. */
struct Rows {
  int64_t dim = 0;
  std::vector<std::pair<int64_t, int64_t>> runs;  // disjoint, ascending
  bool known = false;                             // otherwise any of the tensor's bytes
  bool exact = false;                             // otherwise some bytes of the runs
};

/* Whether indices decide which bytes the operator of this schema name accesses. */
bool takesIndices(std::string_view name);

/* The rows of `arguments[0]`. They are known if, by the order that the program has asked for, every
 * write of the indices is over; the answer is therefore the same each time. Does not wait. */
Rows rowsOf(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
