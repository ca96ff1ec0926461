/*
 * Additions to PyTorch's own kernels (sparse.cpp) for sparse, quantized and nested tensors: copies
 * through the CPU, record_stream, and replacements for kernels that would access memory outside any
 * task. Opaque tensors are refused.
 */
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_sparse_mm_reduce_impl.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <optional>
#include <string>
#include <tuple>

#include "../../torch/allocator.h"
#include "../../torch/fork.h"
#include "../../task/tensor_components.h"
#include "../fallback.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;

void resizeLike(const Tensor &tensor, const Tensor &like) {
  c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  const size_t bytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(),
                                                        impl->itemsize(), impl->storage_offset());
  const c10::Storage &storage = impl->unsafe_storage();
  if (bytes > storage.nbytes()) at::native::resize_bytes_nocuda(storage, bytes);
}

/* Copies back what the CPU has made of a tensor, where kernels do not reach the device. Memory that
 * is large enough stays. That of a quantized tensor is resized in place, because PyTorch makes no
 * plain tensor of its dtype. */
Tensor copyBack(const Tensor &src, const Tensor &dst) {
  const Components before = componentsOf(dst);
  Components parts = componentsOf(src);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (dst.is_quantized() && i == 0 && before[0].sizes() != parts[0].sizes()) {
      resizeLike(before[0], parts[0]);
    }
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

/* Sizes of nested tensors are CPU tensors on every device; those from a file may have been mapped
 * with the rest. */
Tensor nestedView(const Tensor &self, const Tensor &sizes, const Tensor &strides,
                  const Tensor &offsets) {
  return at::native::_nested_view_from_buffer(self, sizes.cpu(), strides.cpu(), offsets.cpu());
}

/* PyTorch's kernel for every device does the same, but refuses the sizes. */
Tensor nestedViewCopy(const Tensor &self, const Tensor &sizes, const Tensor &strides,
                      const Tensor &offsets) {
  return nestedView(self, sizes, strides, offsets).clone(c10::MemoryFormat::Contiguous);
}

/* A layout that only the CPU has. */
Tensor toMkldnn(const Tensor &self, std::optional<c10::ScalarType>) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "to_mkldnn of a tensor on ", self.device(),
                              ": only CPU tensors can be opaque (layout Mkldnn)");
}

/* The CPU's kernel accesses memory outside any task. */
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

/* PyTorch's own makes a tensor without a quantizer, on every device; the copy into it fails. */
Tensor pinQuantized(const Tensor &self, std::optional<c10::Device> device) {
  Components parts = componentsOf(self);
  for (Tensor &part : parts) part = part.pin_memory(device);
  return assemble(self, parts);
}

/* The CPU's kernel stores the places of the maxima, which its derivative reads, only if autograd is
 * on: so the tensors are copied for it. */
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

}  // namespace

}  // namespace torch_openreg

namespace at::native {
// From a header that PyTorch does not install. It checks that indices are coalesced.
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

// The CPU's kernel stores what its derivative needs only if autograd is on.
OPENREG_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  torch_openreg::implBoxed<&torch_openreg::sparseMmReduce>(m, {"_sparse_mm_reduce_impl"});
}

// The CPU's kernel accesses memory outside any task.
OPENREG_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  m.impl("copy_", &torch_openreg::copyQuantized);
  m.impl("_copy_from", &torch_openreg::copyFromQuantized);
}

// PyTorch's composite kernel makes a tensor without a quantizer.
OPENREG_LIBRARY_IMPL(aten, QuantizedCPU, m) { m.impl("_pin_memory", &torch_openreg::pinQuantized); }

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // PyTorch's own refuses sizes on the device, which a loaded file's may be.
  m.impl("_nested_view_from_buffer", &torch_openreg::nestedView);
  m.impl("_nested_view_from_buffer_copy", &torch_openreg::nestedViewCopy);
  // The CPU's kernel makes a layout that no device has.
  m.impl("to_mkldnn", &torch_openreg::toMkldnn);
}

// The fallback copies through these where kernels do not reach the device, and PyTorch records the
// streams only of strided tensors.
#define WITH_COMPONENTS(key)                                   \
  OPENREG_LIBRARY_IMPL(aten, key, m) {                         \
    m.impl("_copy_from_and_resize", &torch_openreg::copyBack); \
    m.impl("record_stream", &torch_openreg::recordComponents); \
  }
WITH_COMPONENTS(SparsePrivateUse1)
WITH_COMPONENTS(SparseCsrPrivateUse1)
WITH_COMPONENTS(QuantizedPrivateUse1)
WITH_COMPONENTS(NestedTensorPrivateUse1)
