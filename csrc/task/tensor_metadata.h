/*
 * A tensor's properties without its memory, in one form for a live tensor, for the key of a call,
 * and for a promised result. Also checks whether a storage holds what its tensor describes: a
 * program may free or shrink it (as FSDP does with parameters) while tensors still describe the old
 * contents.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstddef>

namespace torch_openreg {

/* Does not own sizes and strides. An undefined tensor has no dtype. */
struct TensorMetadata {
  c10::IntArrayRef sizes{}, strides{};
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool conj = false, neg = false;
  bool wrapped = false;  // a Python number

  /* The size of a storage that holds exactly this. */
  size_t bytes() const;
  /* Compares everything but strides. */
  bool describesSizes(const at::Tensor &tensor) const;
  bool describes(const at::Tensor &tensor) const;
  /* Whether the elements have the same places: a dimension of one element may have any stride. */
  bool hasPlaces(c10::IntArrayRef otherStrides) const;
};

TensorMetadata metadataOf(const at::Tensor &tensor);

/* Owns its sizes and strides. */
class KeptMetadata {
 public:
  KeptMetadata(const TensorMetadata &from);
  operator TensorMetadata() const { return {sizes(), strides(), dtype_, conj_, neg_}; }
  bool isDefined() const { return dtype_ != c10::ScalarType::Undefined; }
  c10::IntArrayRef sizes() const { return {dims_.data(), dims_.size() / 2}; }
  c10::IntArrayRef strides() const { return {dims_.data() + dims_.size() / 2, dims_.size() / 2}; }
  size_t bytes() const { return bytes_; }

 private:
  c10::SmallVector<int64_t, 8> dims_;  // sizes, then strides
  c10::ScalarType dtype_;
  bool conj_, neg_;
  size_t bytes_;
};

/* A storage over memory with another owner, at a kernel's address. */
c10::Storage cpuStorage(void *address, size_t bytes, bool resizable = false);

/* Makes a tensor over existing memory. */
at::Tensor tensorOf(c10::Storage storage, c10::DispatchKey backend, const TensorMetadata &metadata,
                    int64_t offset = 0);

/* Bytes from the start of the storage to the first element. */
inline size_t bytesBefore(const at::Tensor &tensor) {
  return static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
}

/* Bytes from the start of the storage to the end of the last element; 0 without elements. */
inline size_t bytesNeeded(const at::Tensor &tensor) {
  const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  int64_t elements = impl->numel();
  if (elements == 0) return 0;
  if (!impl->is_non_overlapping_and_dense()) {
    elements = 1;
    for (int64_t i = 0; i < impl->dim(); ++i) elements += (impl->size(i) - 1) * impl->stride(i);
  }
  return static_cast<size_t>(impl->storage_offset() + elements) * impl->itemsize();
}

/* For a tensor that has a storage. */
inline bool fitsStorage(const at::Tensor &tensor) {
  return bytesNeeded(tensor) <= tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
}

/* Throws an error with the sizes if the tensor does not fit. `what`: its place in the call. */
void checkFitsStorage(const at::Tensor &tensor, const char *what);

}  // namespace torch_openreg
