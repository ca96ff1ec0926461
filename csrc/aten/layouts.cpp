/*
 * Operators of sparse, quantized and nested tensors that look at them, make them or copy them part by part. PyTorch's
 * kernels for them are the same for every backend: they call operators of the parts, which are queued, so that
 * nothing waits here. All others of these tensors are the CPU's (runCpuKernelWithComponents). Opaque ones are refused.
 */
#include <ATen/native/DispatchStub.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_empty_affine_quantized_native.h>
#include <ATen/ops/_empty_per_channel_affine_quantized_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_sparse_mm_reduce_impl.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_quantized_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/q_per_channel_axis_native.h>
#include <ATen/ops/q_per_channel_scales_native.h>
#include <ATen/ops/q_per_channel_zero_points_native.h>
#include <ATen/ops/q_scale_native.h>
#include <ATen/ops/q_zero_point_native.h>
#include <ATen/ops/qscheme_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unbind_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zero_native.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "../torch/allocator.h"
#include "../torch/device.h"
#include "../torch/fork.h"
#include "fallback.h"
#include "tensor_components.h"

namespace torch_openreg {

namespace {

using at::Tensor;

template <typename T>
void noteDevice(std::optional<c10::Device> &found, const T &argument) {
  if constexpr (std::is_same_v<T, std::optional<c10::Device>>) {
    if (argument.has_value()) found = argument;
  } else if constexpr (std::is_same_v<T, Tensor>) {
    if (!found && argument.is_privateuseone()) found = argument.device();
  }
}

/* These kernels make parts on the current device: a device argument's, else the first tensor's. */
template <auto kernel>
struct OnDevice;
template <typename Result, typename... Arguments, Result (*kernel)(Arguments...)>
struct OnDevice<kernel> {
  static Result call(Arguments... arguments) {
    std::optional<c10::Device> device;
    (noteDevice(device, arguments), ...);
    if (!device || !device->is_privateuseone())
      return kernel(std::forward<Arguments>(arguments)...);
    DeviceSwitch current(indexOrCurrent(device->index()));
    return kernel(std::forward<Arguments>(arguments)...);
  }
};

/* Of what the CPU has made of a tensor, where kernels do not reach the device. Memory that is large enough stays. */
Tensor copyBack(const Tensor &src, const Tensor &dst) {
  const Components before = componentsOf(dst);
  Components parts = componentsOf(src);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool fits = i < before.size() && before[i].sizes() == parts[i].sizes() &&
                      before[i].scalar_type() == parts[i].scalar_type();
    parts[i] = fits ? before[i].copy_(parts[i]) : parts[i].to(dst.device());
  }
  reassemble(dst, src, parts);
  return dst;
}

void recordComponents(Tensor &self, c10::Stream stream) {
  for (const Tensor &part : componentsOf(self)) recordStream(part.storage().data_ptr(), stream);
}

/* Sizes of nested tensors are CPU tensors on every device; those of a file may have been mapped with the rest. */
Tensor nestedView(const Tensor &self, const Tensor &sizes, const Tensor &strides,
                  const Tensor &offsets) {
  return at::native::_nested_view_from_buffer(self, sizes.cpu(), strides.cpu(), offsets.cpu());
}

/* A layout of the CPU's own, which no device has. */
Tensor toMkldnn(const Tensor &self, std::optional<c10::ScalarType>) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "to_mkldnn of a tensor on ", self.device(),
                              ": opaque tensors (layout Mkldnn) are the CPU's alone");
}

/* Its kernel on the CPU reads and writes memory outside of any task. */
Tensor &copyQuantized(Tensor &self, const Tensor &src, bool nonBlocking) {
  TORCH_CHECK(self.is_quantized(), "copy_ of a quantized tensor (", src.toString(), ") to ",
              self.toString(), " is not supported: dequantize it first");
  if (!src.is_quantized()) {
    Tensor host = self.cpu();
    host.copy_(src.cpu());
    return copyQuantized(self, host, false);
  }
  TORCH_CHECK(self.qscheme() == src.qscheme() && self.scalar_type() == src.scalar_type(),
              "copy_ of a quantized tensor takes one of the same scheme and dtype, not ",
              c10::toString(src.qscheme()), " ", src.scalar_type(), " to ",
              c10::toString(self.qscheme()), " ", self.scalar_type());
  Components parts = componentsOf(src);
  parts[0] = componentsOf(self)[0].copy_(parts[0], nonBlocking);
  for (Tensor &part : parts) part = part.to(self.device());
  reassemble(self, src, parts);
  return self;
}

Tensor copyFromQuantized(const Tensor &src, const Tensor &dst, bool nonBlocking) {
  Tensor to = dst;
  return copyQuantized(to, src, nonBlocking);
}

/* The CPU's kernel keeps where each maximum was, which its derivative reads, only where it sees autograd: for it alone
 * the tensors are copied. */
void sparseMmReduce(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const Tensor self = torch::jit::peek(*stack, 0, 3).toTensor();
  const Tensor other = torch::jit::peek(*stack, 1, 3).toTensor();
  const std::string reduce = torch::jit::peek(*stack, 2, 3).toStringRef();
  const bool derivative =
      at::GradMode::is_enabled() && (self.requires_grad() || other.requires_grad());
  if (!derivative || (reduce != "amax" && reduce != "amin")) {
    return runCpuKernelWithComponents(op, stack, c10::DispatchKey::SparseCsrCPU);
  }
  const Tensor a = self.cpu().set_requires_grad(self.requires_grad());
  const Tensor b = other.cpu().set_requires_grad(other.requires_grad());
  Tensor result, places;
  asKernel([&] { std::tie(result, places) = at::_sparse_mm_reduce_impl(a, b, reduce); });
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, result.detach().to(self.device()), places.to(self.device()));
}

template <auto kernel>
void add(torch::Library &library, const char *name) {
  library.impl(name, &OnDevice<kernel>::call);
}

}  // namespace

}  // namespace torch_openreg

namespace at::native {
// Of a header that PyTorch does not install. Indices are checked to be coalesced with it.
DECLARE_DISPATCH(Tensor (*)(const Tensor &, IntArrayRef), flatten_indices_stub)
namespace {
Tensor flattenIndices(const Tensor &indices, IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  Tensor flat = at::zeros({indices.size(1)}, indices.options());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    flat.add_(indices.select(0, static_cast<int64_t>(dim)), strides[dim]);
  }
  return flat;
}
REGISTER_PRIVATEUSE1_DISPATCH(flatten_indices_stub, &flattenIndices)
}  // namespace
}  // namespace at::native

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  using namespace at::native;
  using torch_openreg::add;
  add<&_nnz_sparse>(m, "_nnz");
  add<&_indices_sparse>(m, "_indices");
  add<&_values_sparse>(m, "_values");
  add<&indices_sparse>(m, "indices");
  add<&values_sparse>(m, "values");
  add<&sparse_dim_sparse>(m, "sparse_dim");
  add<&sparse_dim_sparse>(m, "_dimI");
  add<&dense_dim_sparse>(m, "dense_dim");
  add<&dense_dim_sparse>(m, "_dimV");
  add<&is_coalesced_sparse>(m, "is_coalesced");
  add<&_coalesced_sparse_>(m, "_coalesced_");
  add<&empty_sparse>(m, "empty.memory_format");
  add<&empty_like_sparse_coo>(m, "empty_like");
  add<&new_with_dims_sparse>(m, "_sparse_coo_tensor_with_dims");
  add<&new_with_dims_and_tensor_sparse_symint>(m, "_sparse_coo_tensor_with_dims_and_tensors");
  add<&copy_sparse_wrapper_>(m, "copy_");
  add<&copy_sparse_>(m, "copy_sparse_to_sparse_");
  add<&clone_sparse>(m, "clone");
  add<&zero_sparse_>(m, "zero_");
  add<&sparse_resize_>(m, "sparse_resize_");
  add<&sparse_resize_and_clear_>(m, "sparse_resize_and_clear_");
  add<&resize_as_sparse_>(m, "resize_as_sparse_");
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  using namespace at::native;
  using torch_openreg::add;
  add<&_nnz_sparse_csr>(m, "_nnz");
  add<&values_sparse_csr>(m, "values");
  add<&crow_indices_sparse_csr>(m, "crow_indices");
  add<&col_indices_sparse_csr>(m, "col_indices");
  add<&ccol_indices_sparse_csr>(m, "ccol_indices");
  add<&row_indices_sparse_csr>(m, "row_indices");
  add<&sparse_dim_sparse_csr>(m, "sparse_dim");
  add<&dense_dim_sparse_csr>(m, "dense_dim");
  add<&empty_sparse_compressed>(m, "empty.memory_format");
  add<&empty_like_sparse_csr>(m, "empty_like");
  add<&copy_sparse_compressed_>(m, "copy_");
  add<&clone_sparse_compressed>(m, "clone");
  add<&zero_sparse_csr_>(m, "zero_");
  add<&resize_as_sparse_compressed_>(m, "resize_as_sparse_");
  m.impl("_sparse_mm_reduce_impl",
         torch::CppFunction::makeFromBoxedFunction<&torch_openreg::sparseMmReduce>());
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  using namespace at::native;
  using torch_openreg::add;
  add<&q_scale_quant>(m, "q_scale");
  add<&q_zero_point_quant>(m, "q_zero_point");
  add<&q_per_channel_scales>(m, "q_per_channel_scales");
  add<&q_per_channel_zero_points>(m, "q_per_channel_zero_points");
  add<&q_per_channel_axis>(m, "q_per_channel_axis");
  add<&qscheme_quant>(m, "qscheme");
  add<&empty_unknown_quantized>(m, "empty.memory_format");
  add<&empty_strided_unknown_quantized>(m, "empty_strided");
  add<&empty_affine_quantized>(m, "_empty_affine_quantized");
  add<&empty_per_channel_affine_quantized>(m, "_empty_per_channel_affine_quantized");
  add<&empty_quantized>(m, "empty_quantized");
  add<&empty_like_quantized>(m, "empty_like");
  add<&quantized_clone>(m, "clone");
  m.impl("copy_", &torch_openreg::copyQuantized);
  m.impl("_copy_from", &torch_openreg::copyFromQuantized);
  add<&as_strided_qtensorimpl>(m, "as_strided");
  add<&_reshape_alias>(m, "_reshape_alias");
  add<&view>(m, "view");
  add<&unfold>(m, "unfold");
  add<&set_storage_quantized_>(m, "set_.source_Storage_storage_offset");
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  using namespace at::native;
  using torch_openreg::add;
  add<&_nested_tensor_size>(m, "_nested_tensor_size");
  add<&_nested_tensor_strides>(m, "_nested_tensor_strides");
  add<&_nested_tensor_storage_offsets>(m, "_nested_tensor_storage_offsets");
  add<&_to_copy_nested>(m, "_to_copy");
  add<&empty_like_nested>(m, "empty_like");
  add<&copy_nested_>(m, "copy_");
  add<&clone_nested>(m, "clone");
  add<&zero_nested_>(m, "zero_");
  add<&values_nested>(m, "values");
  add<&alias_nested>(m, "alias");
  add<&NestedTensor_unbind>(m, "unbind.int");
  add<&view_nested>(m, "view");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_view_from_buffer", &torch_openreg::nestedView);
  m.impl("to_mkldnn", &torch_openreg::toMkldnn);
}

#define WITH_COMPONENTS(key)                                   \
  TORCH_LIBRARY_IMPL(aten, key, m) {                           \
    m.impl("_copy_from_and_resize", &torch_openreg::copyBack); \
    m.impl("record_stream", &torch_openreg::recordComponents); \
  }
WITH_COMPONENTS(SparsePrivateUse1)
WITH_COMPONENTS(SparseCsrPrivateUse1)
WITH_COMPONENTS(QuantizedPrivateUse1)
WITH_COMPONENTS(NestedTensorPrivateUse1)
