/*
 * Nothing here has state. One thread at a time uses the tensors, as in cpu_alias.cpp.
 */
#include "tensor_components.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>

#include "../torch/device.h"
#include "tensor_metadata.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

template <typename Impl>
Impl &implOf(const Tensor &tensor) {
  return *static_cast<Impl *>(tensor.unsafeGetTensorImpl());
}

bool isCompressed(const Tensor &tensor) { return tensor.key_set().has(DispatchKey::SparseCsr); }

/* The key of `like`'s kind on the backend of a part. */
DispatchKeySet keysOf(const Tensor &like, const Tensor &part) {
  const DispatchKey kind = like.is_sparse()      ? DispatchKey::Sparse
                           : isCompressed(like)  ? DispatchKey::SparseCsr
                           : like.is_quantized() ? DispatchKey::Quantized
                                                 : DispatchKey::NestedTensor;
  return DispatchKeySet(c10::toRuntimePerBackendFunctionalityKey(
      kind, part.is_cpu() ? c10::BackendComponent::CPUBit : c10::BackendComponent::PrivateUse1Bit));
}

/* Null if all channels share one scale. */
const at::PerChannelAffineQuantizer *perChannel(const Tensor &tensor) {
  return dynamic_cast<const at::PerChannelAffineQuantizer *>(
      implOf<at::QTensorImpl>(tensor).quantizer().get());
}

Components quantizedComponents(const Tensor &tensor) {
  const DispatchKey backend = tensor.is_cpu() ? DispatchKey::CPU : DispatchKey::PrivateUse1;
  Components parts{
      tensorOf(tensor.storage(), backend, metadataOf(tensor), tensor.storage_offset())};
  if (const auto *quantizer = perChannel(tensor)) {
    parts.push_back(quantizer->scales());
    parts.push_back(quantizer->zero_points());
  }
  return parts;
}

at::QuantizerPtr quantizerLike(const Tensor &like, const Components &parts) {
  const auto *quantizer = perChannel(like);
  if (quantizer == nullptr) return implOf<at::QTensorImpl>(like).quantizer();
  if (quantizer->qscheme() == c10::kPerChannelAffine) {
    return c10::make_intrusive<at::PerChannelAffineQuantizer>(quantizer->scalar_type(), parts[1],
                                                              parts[2], quantizer->axis());
  }
  return c10::make_intrusive<at::PerChannelAffineFloatQParamsQuantizer>(
      quantizer->scalar_type(), parts[1], parts[2], quantizer->axis());
}

/* The number of elements of its buffer that a nested tensor reaches. */
int64_t reachOf(const at::native::NestedTensorImpl &nested) {
  const Tensor &sizes = nested.get_nested_sizes(), &strides = nested.get_nested_strides();
  const auto *size = sizes.const_data_ptr<int64_t>(), *stride = strides.const_data_ptr<int64_t>();
  const auto *offset = nested.get_storage_offsets().const_data_ptr<int64_t>();
  int64_t reach = 0;
  for (int64_t i = 0; sizes.dim() == 2 && i < sizes.size(0); ++i) {
    int64_t last = offset[i];
    bool isEmpty = false;
    for (int64_t d = 0; d < sizes.size(1); ++d, ++size, ++stride) {
      last += (*size - 1) * *stride;
      isEmpty = isEmpty || *size == 0;
    }
    if (!isEmpty) reach = std::max(reach, last + 1);
  }
  return reach;
}

}  // namespace

Components componentsOf(const Tensor &tensor) {
  if (tensor.is_sparse()) {
    const auto &impl = implOf<at::SparseTensorImpl>(tensor);
    return {impl.indices(), impl.values()};
  }
  if (isCompressed(tensor)) {
    const auto &impl = implOf<at::SparseCsrTensorImpl>(tensor);
    return {impl.compressed_indices(), impl.plain_indices(), impl.values()};
  }
  if (tensor.is_quantized()) return quantizedComponents(tensor);
  if (!tensor.is_nested()) return {};
  const Tensor buffer = implOf<at::native::NestedTensorImpl>(tensor).get_unsafe_storage_as_tensor();
  const c10::InferenceMode asIs(tensor.is_inference());
  int64_t size = buffer.numel();
  // The size is the storage's, which may have been shrunk: then the buffer does not fit.
  if (!tensor.is_cpu())
    size = std::max(size, reachOf(implOf<at::native::NestedTensorImpl>(tensor)));
  return {tensorOf(buffer.storage(), tensor.is_cpu() ? DispatchKey::CPU : DispatchKey::PrivateUse1,
                   {{size}, {1}, tensor.scalar_type()})};
}

Tensor assemble(const Tensor &like, const Components &parts) {
  const DispatchKeySet keys = keysOf(like, parts[0]);
  if (like.is_nested()) {
    const auto &impl = implOf<at::native::NestedTensorImpl>(like);
    // A view is an inference tensor exactly if its base is one, whatever the present mode is.
    const c10::InferenceMode asItsBuffer(parts[0].is_inference());
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        parts[0], impl.get_nested_sizes(), impl.get_nested_strides(), impl.get_storage_offsets());
  }
  // A sparse tensor starts with parts on the current device.
  std::optional<DeviceSwitch> current;
  if (!parts[0].is_cpu()) current.emplace(parts[0].device().index());
  Tensor tensor;
  if (like.is_quantized()) {
    tensor = at::detail::make_tensor<at::QTensorImpl>(c10::Storage(parts[0].storage()), keys,
                                                      like.dtype(), quantizerLike(like, parts));
  } else if (like.is_sparse()) {
    tensor = at::detail::make_tensor<at::SparseTensorImpl>(keys, like.dtype());
  } else {
    tensor = at::detail::make_tensor<at::SparseCsrTensorImpl>(keys, parts[0].device(),
                                                              like.layout(), like.dtype());
  }
  reassemble(tensor, like, parts);
  return tensor;
}

void reassemble(const Tensor &tensor, const Tensor &like, const Components &parts) {
  if (tensor.is_sparse()) {
    auto &impl = implOf<at::SparseTensorImpl>(tensor);
    const auto &from = implOf<at::SparseTensorImpl>(like);
    impl.raw_resize_(from.sparse_dim(), from.dense_dim(), like.sizes());
    impl.set_indices_and_values_unsafe(parts[0], parts[1]);
    impl.set_coalesced(from.coalesced());
  } else if (isCompressed(tensor)) {
    implOf<at::SparseCsrTensorImpl>(tensor).set_member_tensors(parts[0], parts[1], parts[2],
                                                               like.sizes());
  } else if (tensor.is_quantized()) {
    auto &impl = implOf<at::QTensorImpl>(tensor);
    impl.set_storage_keep_dtype(c10::Storage(parts[0].storage()));
    impl.set_sizes_and_strides(parts[0].sizes(), parts[0].strides(), parts[0].storage_offset());
    impl.set_quantizer_(quantizerLike(like, parts));
  }
}

bool isDescribedAs(const Tensor &tensor, const Tensor &like) {
  if (tensor.is_nested()) return true;
  if (tensor.is_quantized()) {
    return perChannel(like) != nullptr ||
           implOf<at::QTensorImpl>(tensor).quantizer() == implOf<at::QTensorImpl>(like).quantizer();
  }
  if (tensor.sizes() != like.sizes()) return false;
  if (!tensor.is_sparse()) return true;
  const auto &a = implOf<at::SparseTensorImpl>(tensor), &b = implOf<at::SparseTensorImpl>(like);
  return a.sparse_dim() == b.sparse_dim() && a.coalesced() == b.coalesced();
}

}  // namespace torch_openreg
