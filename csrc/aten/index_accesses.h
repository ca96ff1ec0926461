/*
 * What operators touch that take the places from a tensor of indices: of their first argument some
 * rows.
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
  std::vector<std::pair<int64_t, int64_t>> runs;  // apart, ascending
  bool known = false;                             // else it may be any of the tensor's bytes
  bool exact = false;                             // else it is some bytes of the runs
};

/* By the name of the schema. */
bool takesIndices(std::string_view name);

/* The rows of the first of `arguments`. They are known where the host knows the indices: by the
 * order that the program has asked for, so that the answer is the same each time. Waits for
 * nothing. */
Rows rowsOf(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
