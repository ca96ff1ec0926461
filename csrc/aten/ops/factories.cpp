/*
 * Operators that make, inspect or rearrange tensors without reading their memory: they run on the
 * calling thread and queue nothing. Two others access memory: resize_, in stream order, and the
 * value of a tensor, which waits for its stream.
 */
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_has_compatible_shallow_copy_type_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include <optional>

#include "../../torch/allocator.h"
#include "../../torch/device.h"
#include "../../torch/graph_outputs.h"
#include "../../torch/host_access.h"
#include "../../torch/stream.h"
#include "../../torch/sync_debug.h"
#include "../../torch/warnings.h"
#include "../../task/tensor_metadata.h"
#include "../fallback.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::ScalarType;
using c10::TensorImpl;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex checkOptions(std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                              std::optional<bool> pin) {
  registerOperators();  // for programs in C++; Python does it at the first use
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(c10::kStrided) == c10::kStrided, "layout ", *layout,
                              " is not supported on ", deviceName());
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return indexOrCurrent(device.has_value() ? device->index() : -1);
}

/* Whether fresh memory is filled, as on every device. */
bool fills() {
  return C10_UNLIKELY(at::globalContext().deterministicAlgorithms() &&
                      at::globalContext().deterministicFillUninitializedMemory());
}

Tensor filled(at::TensorBase fresh) {
  Tensor tensor(std::move(fresh));
  if (fills()) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

/* As at::detail::empty_generic, for a device that need not be the current one. */
Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  const c10::DeviceIndex index = checkOptions(layout, device, pin);
  if (C10_UNLIKELY(dtype == c10::kComplexHalf)) {  // it warns
    DeviceSwitch current(index);
    return filled(at::detail::empty_generic(size, &deviceAllocator(), kKeys, *dtype, format));
  }
  at::detail::check_size_nonnegative(size);
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, type.itemsize());
  describeNextBlock(type.toScalarType());
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                            allocateOn(index, bytes), &deviceAllocator(), true);
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), kKeys, type);
  if (size.size() != 1 || size[0] != 0)
    tensor.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  if (format.has_value() && *format != c10::MemoryFormat::Contiguous)
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return filled(std::move(tensor));
}

Tensor emptyStrided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                    std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                    std::optional<bool> pin) {
  DeviceSwitch current(checkOptions(layout, device, pin));
  describeNextBlock(c10::dtype_or_default(dtype));
  return filled(at::detail::empty_strided_generic(size, stride, &deviceAllocator(), kKeys,
                                                  c10::dtype_or_default(dtype)));
}

/* Zeros without memory, for the gradients of operators that are flat everywhere. */
Tensor efficientZeros(IntArrayRef size, std::optional<ScalarType> dtype,
                      std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                      std::optional<bool> pin) {
  const c10::DeviceIndex index = checkOptions(layout, device, pin);
  at::native::ZeroTensorAllocator nothing(c10::Device(c10::DeviceType::PrivateUse1, index));
  return Tensor(at::detail::empty_generic(size, &nothing, kKeys.add(c10::DispatchKey::ZeroTensor),
                                          c10::dtype_or_default(dtype), std::nullopt));
}

/* Grows the storage to the tensor's present description. */
void growStorage(TensorImpl *tensor) {
  if (tensor->numel() == 0) return;
  const size_t bytes = at::detail::computeStorageNbytes(
      tensor->sizes(), tensor->strides(), tensor->itemsize(), tensor->storage_offset());
  const c10::Storage &storage = tensor->unsafe_storage();
  if (bytes > storage.nbytes()) at::native::resize_bytes_nocuda(storage, bytes);
}

const Tensor &resize(const Tensor &self, IntArrayRef size,
                     std::optional<c10::MemoryFormat> format) {
  TensorImpl *impl = self.unsafeGetTensorImpl();
  const size_t before = self.storage().nbytes();
  if (self.sizes() != size) {
    at::detail::check_size_nonnegative(size);
    impl->set_sizes_contiguous(size);
    growStorage(impl);
  }
  if (format.has_value()) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  if (fills()) at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
  return self;
}

Tensor &setStorage(Tensor &self, c10::Storage storage, int64_t offset, IntArrayRef size,
                   IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  TensorImpl *impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  growStorage(impl);
  return self;
}

Tensor &setNothing(Tensor &self) {
  DeviceSwitch current(self.device().index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &deviceAllocator(), true);
  return setStorage(self, std::move(storage), 0, {0}, {});
}

/* `set_` of the CPU, which reaches setStorage through the dispatcher. */
Tensor &setSource(Tensor &self, c10::Storage source) {
  return at::native::set_(self, std::move(source));
}

/* Copies at once: a copy at the first write could not be ordered after the streams and graphs that
 * use the shared memory. */
Tensor lazyClone(const Tensor &self) {
  const DeviceSwitch current(self.device().index());
  c10::Allocator *allocator = self.storage().allocator();
  const size_t bytes = self.storage().nbytes();
  c10::Storage copy(c10::Storage::use_byte_size_t(), bytes,
                    allocator->clone(self.storage().data(), bytes), allocator, true);
  auto impl = c10::make_intrusive<TensorImpl>(std::move(copy), self.key_set(), self.dtype());
  impl->set_sizes_and_strides(self.sizes(), self.strides(), self.storage_offset());
  return Tensor(std::move(impl));
}

at::Scalar localScalar(const Tensor &self) {
  noteSynchronization("aten::_local_scalar_dense (item)",
                      currentStreamHandle(self.device().index()));
  checkFitsStorage(self, "aten::_local_scalar_dense (item)");
  const Tensor host = at::detail::empty_cpu({}, self.scalar_type());
  const OpenRegStream stream = getCurrentOpenRegStream(self.device().index());
  SanitizedAs name("aten::_local_scalar_dense");
  readsStorage(self.storage().unsafeGetStorageImpl());
  // The host memory is pageable: when the call returns, the value is there and a failed kernel has
  // been reported.
  OPENREG_CHECK_SYNCHRONIZED(orMemcpyAsync(host.data_ptr(), self.data_ptr(), self.itemsize(),
                                           orMemcpyDeviceToHost, stream.stream()));
  return at::native::_local_scalar_dense_cpu(host);
}

/* Whether `tensor.data = from` is allowed. It is with the CPU's dense tensors too, as for CUDA:
 * otherwise Module.to makes new parameters, which unties shared ones and leaves an optimizer with
 * the old. */
bool mayReplaceData(const Tensor &self, const Tensor &from) {
  static constexpr c10::DispatchKeySet kDense(c10::DispatchKey::Dense);
  const auto isDense = [](const Tensor &tensor) {
    return tensor.key_set().has_any(kDense) && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return (isDense(self) && isDense(from)) ||
         at::native::_has_compatible_shallow_copy_type(self, from);
}

void recordTensorStream(Tensor &self, c10::Stream stream) {
  recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  // PyTorch allocates memory only for the devices in its own list.
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &emptyStrided);
  m.impl("_efficientzerotensor", &efficientZeros);
  // The CPU's kernels would give the tensor host memory.
  m.impl("resize_", &resize);
  m.impl("set_", &setNothing);
  m.impl("set_.source_Storage", &setSource);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &setStorage);
  // PyTorch's functions work for any device, but are registered only for those in its list. Through
  // the fallback a view would be a task that its caller waits for.
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("as_strided_", &at::native::as_strided__symint);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  // PyTorch's composite kernel copies at the first write, which is not ordered after the streams.
  m.impl("_lazy_clone", &lazyClone);
  // The CPU's kernel reads the memory at once, without regard to streams.
  m.impl("_local_scalar_dense", &localScalar);
  // PyTorch's composite kernel accepts dense CPU tensors only beside the devices in its list.
  m.impl("_has_compatible_shallow_copy_type", &mayReplaceData);
  // PyTorch has it only for CUDA.
  m.impl("record_stream", &recordTensorStream);
}

// On every device __torch_dispatch__ sees no composite operator, so ours is registered above it.
OPENREG_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &torch_openreg::mayReplaceData);
}

// PyTorch's kernels for these bits would record a resolved copy instead of the tensor.
OPENREG_FALL_THROUGH(Conjugate, "record_stream")
OPENREG_FALL_THROUGH(Negative, "record_stream")
