/*
 * Finds the rows or elements of its first argument that an operator with a tensor of indices reads
 * or writes: at the call where the host has the indices, else when the task runs.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <openreg_late.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "../task/tensor_metadata.h"

namespace torch_openreg {

/* Slices [begin, end) along a dimension. */
struct Rows {
  int64_t dim = 0;
  std::vector<std::pair<int64_t, int64_t>> runs;  // disjoint, ascending
  bool known = false;                             // otherwise any of the tensor's bytes
  bool exact = false;                             // otherwise some bytes of the runs
};

/* The address of a tensor's first element. */
inline const char *firstByte(const at::Tensor &tensor) {
  return static_cast<const char *>(tensor.storage().data()) + bytesBefore(tensor);
}

/* A copy of device memory; empty if a write that the host is not ordered after may change it. Does
 * not wait. */
std::vector<char> peekedBytes(const void *data, size_t size);

/* Whether indices decide which bytes the operator of this schema name accesses. */
bool takesIndices(std::string_view name);

/* The rows of `arguments[0]`. They are known if, by the order that the program has asked for, every
 * write of the indices is over; the answer is therefore the same each time. Does not wait. */
Rows rowsOf(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

/* The access of a task to its first argument, whose indices decide the bytes (openreg_late.h). */
class LateAccess {
 public:
  /* `data`: of the first argument. */
  void begin(const void *data) { access_.reset(orSanitizerLate(data)); }
  explicit operator bool() const { return access_ != nullptr; }
  orLateAccess *get() const { return access_.get(); }

  /* Reads the indices: before the access is reported, if the host has them, or in the task, where
   * all arguments are the CPU's. */
  void resolve(std::string_view name, c10::ArrayRef<c10::IValue> arguments) const;

 private:
  struct Over {
    void operator()(orLateAccess *access) const { orSanitizerLateOver(access); }
  };
  std::unique_ptr<orLateAccess, Over> access_;
};

/* Whether the indices can be read in the task, by their number, dtype and place. */
bool canResolve(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
