#include "tensor_metadata.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <utility>

namespace torch_openreg {

using c10::ScalarType;

TensorMetadata metadataOf(const at::Tensor &tensor) {
  if (!tensor.defined()) return {};
  return {tensor.sizes(),   tensor.strides(), tensor.scalar_type(),
          tensor.is_conj(), tensor.is_neg(),  tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

size_t TensorMetadata::bytes() const {
  return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
}

bool TensorMetadata::describesSizes(const at::Tensor &tensor) const {
  if (!tensor.defined()) return dtype == ScalarType::Undefined;
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.is_conj() == conj &&
         tensor.is_neg() == neg;
}

bool TensorMetadata::describes(const at::Tensor &tensor) const {
  return describesSizes(tensor) && (!tensor.defined() || tensor.strides() == strides);
}

bool TensorMetadata::hasPlaces(c10::IntArrayRef otherStrides) const {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && strides[i] != otherStrides[i]) return false;
  }
  return true;
}

KeptMetadata::KeptMetadata(const TensorMetadata &from)
    : dims_(from.sizes.begin(), from.sizes.end()),
      dtype_(from.dtype),
      conj_(from.conj),
      neg_(from.neg),
      bytes_(isDefined() ? from.bytes() : 0) {
  dims_.append(from.strides.begin(), from.strides.end());
}

c10::Storage cpuStorage(void *address, size_t bytes, bool resizable) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(address, c10::Device(c10::DeviceType::CPU)),
                      c10::GetCPUAllocator(), resizable);
}

at::Tensor tensorOf(c10::Storage storage, c10::DispatchKey backend, const TensorMetadata &metadata,
                    int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend), c10::scalarTypeToTypeMeta(metadata.dtype));
  c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(metadata.sizes, metadata.strides, offset);
  if (metadata.conj) tensor._set_conj(true);
  if (metadata.neg) tensor._set_neg(true);
  if (metadata.wrapped) impl->set_wrapped_number(true);
  return tensor;
}

void checkFitsStorage(const at::Tensor &tensor, const char *what) {
  if (C10_LIKELY(fitsStorage(tensor))) return;
  TORCH_CHECK(false, what, ": a tensor of sizes ", tensor.sizes(), " and strides ",
              tensor.strides(), " at offset ", tensor.storage_offset(), " needs ",
              bytesNeeded(tensor), " bytes, but its storage on ", tensor.device(), " has ",
              tensor.storage().nbytes(), ": it was freed or shrunk");
}

}  // namespace torch_openreg
