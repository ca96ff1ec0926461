/*
 * Copies: one entry, and one plan that is chosen before anything moves.
 *
 *   same data, no elements                            nothing
 *   same dtype, bits and dense layout, one device     a memcpy task on its current stream
 *     ... host and device                             the same; the host waits unless non_blocking
 *     ... two devices                                 a memcpy on the source's stream, between two events
 *   one device, anything else                         a kernel on its current stream
 *   a number of the host to a device                  the same
 *   pinned memory and non_blocking, anything else     contiguous temporaries, then a memcpy
 *   host and device, anything else                    a kernel that the host waits for
 *   two devices, anything else                        contiguous temporaries, then a memcpy
 *   a device whose memory kernels cannot reach        by way of an image in host memory
 *
 * Pageable memory is the core's matter: a pageable source has been read, and a pageable destination
 * written, when orMemcpyAsync returns.
 */
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../torch/event.h"
#include "../torch/host_allocator.h"
#include "../torch/stream.h"
#include "../torch/warnings.h"
#include "alias.h"
#include "cpu_memory.h"
#include "fallback.h"
#include "lane.h"

namespace torch_openreg {

namespace {

using at::Tensor;

void checkCopyable(const Tensor &tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "copy_ of a tensor with layout ",
                              tensor.layout(), " is not supported on openreg");
  TORCH_CHECK(tensor.is_cpu() || tensor.is_privateuseone(), "openreg cannot copy to or from ",
              tensor.device(), ": copy by way of the CPU");
}

bool isSameData(const Tensor &dst, const Tensor &src) {
  return dst.is_alias_of(src) && dst.storage_offset() == src.storage_offset() &&
         dst.strides() == src.strides() && dst.sizes() == src.sizes() &&
         dst.scalar_type() == src.scalar_type() && dst.is_conj() == src.is_conj() &&
         dst.is_neg() == src.is_neg();
}

/* The bytes of both are the same elements in the same order, without gaps. */
bool isMemcpy(const Tensor &dst, const Tensor &src) {
  if (dst.scalar_type() != src.scalar_type() || dst.is_conj() != src.is_conj() ||
      dst.is_neg() != src.is_neg()) {
    return false;
  }
  if (dst.is_contiguous() && src.is_contiguous()) return true;
  return dst.strides() == src.strides() && dst.is_non_overlapping_and_dense();
}

/* What comes after on `later` waits for what is queued on `earlier` so far; the host does not. */
void order(const OpenRegStream &earlier, const OpenRegStream &later) {
  const OwnedEvent event(earlier.device_index(), orEventDisableTiming);
  OPENREG_CHECK(orEventRecord(event.get(), earlier.stream()));
  OPENREG_CHECK(orStreamWaitEvent(later.stream(), event.get()));
}

void copyBetweenDevices(const Tensor &dst, const Tensor &src) {
  const OpenRegStream from = getCurrentOpenRegStream(src.device().index());
  const OpenRegStream to = getCurrentOpenRegStream(dst.device().index());
  order(to, from);
  OPENREG_CHECK(orMemcpyPeerAsync(dst.data_ptr(), dst.device().index(), src.data_ptr(),
                                  src.device().index(), src.nbytes(), from.stream()));
  order(from, to);
}

void copyWithHost(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const bool toDevice = dst.is_privateuseone();
  const Tensor &host = toDevice ? src : dst;
  const c10::DeviceIndex device = (toDevice ? dst : src).device().index();
  const OpenRegStream stream = getCurrentOpenRegStream(device);
  OPENREG_CHECK(orMemcpyAsync(dst.data_ptr(), src.data_ptr(), src.nbytes(),
                              toDevice ? orMemcpyHostToDevice : orMemcpyDeviceToHost,
                              stream.stream()));
  if (nonBlocking) {
    recordPinnedUse(host.data_ptr(), host.storage().data_ptr().get_context(), stream.unwrap());
  } else if (isPinned(host.data_ptr())) {
    stream.synchronize();
  }
  if (!toDevice && !nonBlocking) issueKeptWarnings();
}

void copyBytes(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  if (dst.device() != src.device()) {
    if (dst.is_cpu() || src.is_cpu()) return copyWithHost(dst, src, nonBlocking);
    return copyBetweenDevices(dst, src);
  }
  if (dst.is_alias_of(src)) at::assert_no_partial_overlap(dst, src);
  OPENREG_CHECK(orMemcpyAsync(dst.data_ptr(), src.data_ptr(), src.nbytes(), orMemcpyDeviceToDevice,
                              getCurrentOpenRegStream(dst.device().index()).stream()));
}

/* Strides, dtype, conj and neg are the CPU copy's matter. One device; a number of the host is taken by value. */
void queueCopy(const Tensor &dst, const Tensor &src) {
  at::assert_no_internal_overlap(dst);
  if (dst.is_alias_of(src)) at::assert_no_partial_overlap(dst, src);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{dst, src, false};
  runCpuKernel(op, &stack);
}

/* The same between host and device, which the host waits for. */
void copyByKernel(const Tensor &dst, const Tensor &src) {
  const c10::DeviceIndex device = (dst.is_cpu() ? src : dst).device().index();
  const orStream_t stream = getCurrentOpenRegStream(device).stream();
  installCpuAllocator();
  runOnLane(stream, "aten::copy_", [&] {
    Aliases aliases(stream, device);
    Tensor to = dst.is_cpu() ? dst : aliases.of(dst);
    to.copy_(src.is_cpu() ? src : aliases.of(src));
  });
}

/* Contiguous, without bits, on the tensor's own device; the tensor itself if it is that already. */
bool isPlain(const Tensor &tensor, c10::ScalarType dtype) {
  return tensor.scalar_type() == dtype && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

void copyByTemporaries(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  // The cast happens where fewer bytes have to travel.
  const c10::ScalarType dtype =
      c10::elementSize(src.scalar_type()) <= c10::elementSize(dst.scalar_type()) ? src.scalar_type()
                                                                                 : dst.scalar_type();
  Tensor from = src, to = dst;
  if (!isPlain(src, dtype)) {
    from = at::empty(src.sizes(), src.options().dtype(dtype).pinned_memory(false));
    from.copy_(src, nonBlocking);
  }
  if (!isPlain(dst, dtype)) {
    to = at::empty(dst.sizes(), dst.options().dtype(dtype).pinned_memory(false));
  }
  copyBytes(to, from, nonBlocking);
  if (!to.is_same(dst)) dst.copy_(to, nonBlocking);
}

/* The stretch of memory from the first to the last element of a device tensor, as a 1-d tensor. */
Tensor stretch(const Tensor &tensor) {
  const auto bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()));
  Tensor flat = at::native::as_strided_tensorimpl(
      tensor, {bytes / static_cast<int64_t>(tensor.itemsize())}, {1}, tensor.storage_offset());
  flat._set_conj(false);
  flat._set_neg(false);
  return flat;
}

void copyByHost(const Tensor &dst, const Tensor &src) {
  const auto image = [](const Tensor &tensor) {
    const Tensor device = stretch(tensor);
    Tensor flat = at::detail::empty_cpu(device.sizes(), tensor.scalar_type());
    copyBytes(flat, device, false);
    Tensor host = at::native::as_strided_tensorimpl(flat, tensor.sizes(), tensor.strides(), 0);
    host._set_conj(tensor.is_conj());
    host._set_neg(tensor.is_neg());
    return std::pair(flat, host);
  };
  const Tensor from = src.is_cpu() ? src : image(src).second;
  if (dst.is_cpu()) {
    dst.copy_(from);
    return;
  }
  const auto [flat, to] = image(dst);
  to.copy_(from);
  copyBytes(stretch(dst), flat, false);
}

bool isPinnedMemory(const Tensor &tensor) { return tensor.is_cpu() && isPinned(tensor.data_ptr()); }

void copy(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  if (dst.numel() == 0 || isSameData(dst, src)) return;
  if (isMemcpy(dst, src)) return copyBytes(dst, src, nonBlocking);
  const bool twoDevices = !dst.is_cpu() && !src.is_cpu() && dst.device() != src.device();
  const Tensor &device = dst.is_cpu() ? src : dst;
  if (twoDevices || (nonBlocking && (isPinnedMemory(dst) || isPinnedMemory(src)))) {
    return copyByTemporaries(dst, src, nonBlocking);
  }
  if (!canMap(device.device().index())) return copyByHost(dst, src);
  if (!dst.is_cpu() && !src.is_cpu()) return queueCopy(dst, src);
  if (src.is_cpu() && src.storage().nbytes() == src.itemsize()) {
    return queueCopy(dst, at::native::as_strided_tensorimpl(src, {}, {}, src.storage_offset()));
  }
  copyByKernel(dst, src);
}

Tensor copyFrom(const Tensor &src, const Tensor &dst, bool nonBlocking) {
  checkCopyable(src);
  checkCopyable(dst);
  if (src.is_same(dst)) return dst;
  if (src._is_zerotensor()) return dst.zero_();
  copy(dst, src.sizes() == dst.sizes() ? src : src.expand(dst.sizes()), nonBlocking);
  return dst;
}

Tensor copyFromAndResize(const Tensor &src, const Tensor &dst) {
  dst.resize_(src.sizes());
  return copyFrom(src, dst, false);
}

}  // namespace

}  // namespace torch_openreg

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &torch_openreg::copyFrom);
  m.impl("_copy_from_and_resize", &torch_openreg::copyFromAndResize);
}

// Resolving the bit is a copy itself: without these it would end in itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
