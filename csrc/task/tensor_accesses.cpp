#include "tensor_accesses.h"

#include <c10/util/SmallVector.h>

#include "../torch/graph_outputs.h"
#include "../torch/sanitizer.h"
#include "../torch/touched_types.h"

namespace torch_openreg {

namespace {

using at::Tensor;

orMemoryAccess accessAt(const Tensor &tensor, c10::IntArrayRef sizes, int64_t offset, bool write) {
  orMemoryAccess access{};
  const size_t item = tensor.itemsize();
  access.data =
      static_cast<const char *>(tensor.storage().data()) + static_cast<size_t>(offset) * item;
  touchedTypes.add(access.data, tensor.scalar_type());
  access.write = write;
  access.width = item;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const auto count = static_cast<size_t>(sizes[static_cast<size_t>(i)]);
    const size_t stride = static_cast<size_t>(tensor.stride(i)) * item;
    if (count == 1) continue;
    if (access.dims == OR_ACCESS_DIMS) {
      access.width += (count - 1) * stride;
      if (checksFresh.load(std::memory_order_relaxed)) access.write |= OR_ACCESS_PARTIAL;
    } else {
      access.count[access.dims] = count;
      access.stride[access.dims++] = stride;
    }
  }
  return access;
}

}  // namespace

bool hasMemory(const Tensor &tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor._is_zerotensor() &&
         tensor.storage().data() != nullptr && tensor.numel() != 0;
}

orMemoryAccess accessOf(const Tensor &tensor, bool write) {
  if (!write) readsStorage(tensor.storage().unsafeGetStorageImpl());
  return accessAt(tensor, tensor.sizes(), tensor.storage_offset(), write);
}

orMemoryAccess accessOfRows(const Tensor &tensor, int64_t dim, std::pair<int64_t, int64_t> run,
                            bool write) {
  c10::SmallVector<int64_t, 6> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[static_cast<size_t>(dim)] = run.second - run.first;
  return accessAt(tensor, sizes, tensor.storage_offset() + run.first * tensor.stride(dim), write);
}

void reportTensors(const char *operation, orStream_t stream, c10::ArrayRef<Tensor> written,
                   c10::ArrayRef<Tensor> read, bool moves) {
  c10::SmallVector<orMemoryAccess, 8> accesses;
  for (const Tensor &tensor : read) {
    if (!hasMemory(tensor)) continue;
    accesses.push_back(accessOf(tensor, false));
    if (moves) accesses.back().write |= OR_ACCESS_MOVES;
  }
  // The bytes keep their order if the layouts are the same. Otherwise earlier reads cannot be
  // attributed to the bytes that are written.
  const bool inOrder = moves && written[0].strides() == read[0].strides();
  for (const Tensor &tensor : written) {
    if (hasMemory(tensor)) {
      accesses.insert(inOrder ? accesses.end() : accesses.begin(), accessOf(tensor, true));
    }
  }
  raiseRaces();
  OPENREG_CHECK(orSanitizerAccess(stream, operation, accesses.data(), accesses.size()));
  raiseRaces();
}

}  // namespace torch_openreg
