/*
 * Reports to the sanitizer which memory of tensors is read and written. Called only while the
 * sanitizer is active.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <openreg_sanitizer.h>

#include <cstdint>
#include <utility>

namespace torch_openreg {

/* Whether the tensor has elements in its own memory or a base's. */
bool hasMemory(const at::Tensor &tensor);

/* A tensor with more dimensions than an access counts as more memory: its last dimensions, mostly
 * the innermost, become one range. */
orMemoryAccess accessOf(const at::Tensor &tensor, bool write);
/* The rows from `run.first` to `run.second` along `dim`. */
orMemoryAccess accessOfRows(const at::Tensor &tensor, int64_t dim, std::pair<int64_t, int64_t> run,
                            bool write);

/* Reports that `operation`, which is no operator, writes and reads these tensors. `moves`: it
 * copies what it reads unchanged. Throws what raiseRaces throws. */
void reportTensors(const char *operation, orStream_t stream, c10::ArrayRef<at::Tensor> written,
                   c10::ArrayRef<at::Tensor> read, bool moves = false);

}  // namespace torch_openreg
