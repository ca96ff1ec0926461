/*
 * Copies: one entry, and one plan (choose) that is made before anything moves.
 *
 *   same data, no elements                          nothing
 *   same dtype, bits and dense order                one memcpy task
 *   one device, or host and device                  one kernel task: strides, dtype, conj, neg
 *   two devices, and one's kernels reach the other  one kernel task
 *   two devices otherwise                           contiguous temporaries, cast where fewer bytes
 *                                                   travel or bits differ; a memcpy
 *   a device whose memory no kernel can reach       by way of an image in host memory
 *
 * Tasks run on the current stream of their device; between two devices on the source's, after the
 * destination's current stream and before what comes later there, without the host. A blocking copy
 * with host memory synchronises its stream, as CUDA's does; so does one to pageable memory. One
 * from pageable memory that is non_blocking takes the source along, or waits until it has been
 * read, which orders nothing.
 */
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <optional>

#include "../../torch/device.h"
#include "../../torch/event.h"
#include "../../torch/fork.h"
#include "../../torch/graph.h"
#include "../../torch/host_allocator.h"
#include "../../torch/stream.h"
#include "../../torch/sync_debug.h"
#include "../../torch/warnings.h"
#include "../../task/tensor_metadata.h"
#include "../registration.h"
#include "copy_kernel.h"

namespace torch_openreg {

namespace {

using at::Tensor;

void checkCopyable(const Tensor &tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "copy_ of a tensor with layout ",
                              tensor.layout(), " is not supported on ", deviceName());
  TORCH_CHECK(tensor.is_cpu() || tensor.is_privateuseone(), deviceName(),
              " cannot copy to or from ", tensor.device(), ": copy through the CPU");
}

/* A storage may say that it is larger than it is. The core knows where memory ends, but is not told
 * of its block. */
void checkExtent(const Tensor &tensor) {
  checkFitsStorage(tensor, "copy_");
  if (!tensor.is_privateuseone()) return;
  const size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                       static_cast<size_t>(tensor.storage_offset()));
  OPENREG_CHECK(orCacheCheck(tensor.storage().data(), bytes));
}

bool isSameData(const Tensor &dst, const Tensor &src) {
  return dst.is_alias_of(src) && dst.storage_offset() == src.storage_offset() &&
         dst.strides() == src.strides() && dst.sizes() == src.sizes() &&
         dst.scalar_type() == src.scalar_type() && dst.is_conj() == src.is_conj() &&
         dst.is_neg() == src.is_neg();
}

bool haveSameStrides(const Tensor &dst, const Tensor &src) {
  for (int64_t i = 0; i < dst.dim(); ++i) {
    if (dst.size(i) != 1 && dst.stride(i) != src.stride(i)) return false;
  }
  return true;
}

/* The bytes of both are the same elements in the same order, without gaps. */
bool isMemcpy(const Tensor &dst, const Tensor &src) {
  if (dst.scalar_type() != src.scalar_type() || dst.is_conj() != src.is_conj() ||
      dst.is_neg() != src.is_neg()) {
    return false;
  }
  if (dst.is_contiguous() && src.is_contiguous()) return true;
  return haveSameStrides(dst, src) && dst.is_non_overlapping_and_dense();
}

/* Whether kernels of `device` reach memory of `peer`, which they are allowed to from then on. */
bool reachesPeer(c10::DeviceIndex device, c10::DeviceIndex peer) {
  int can = 0;
  OPENREG_CHECK(orDeviceCanAccessPeer(&can, device, peer));
  if (can != 0) OPENREG_CHECK(orDeviceEnablePeerAccess(device, peer));
  return can != 0;
}

enum class Way { kNothing, kMemcpy, kKernel, kTemporaries, kHostImages };

Way choose(const Tensor &dst, const Tensor &src) {
  if (dst.numel() == 0 || isSameData(dst, src)) return Way::kNothing;
  if (isMemcpy(dst, src)) return Way::kMemcpy;
  const c10::DeviceIndex to = (dst.is_cpu() ? src : dst).device().index();
  const c10::DeviceIndex from = (src.is_cpu() ? dst : src).device().index();
  if (from == to) return canMap(to) ? Way::kKernel : Way::kHostImages;
  return canMap(from) && canMap(to) && reachesPeer(from, to) ? Way::kKernel : Way::kTemporaries;
}

/* What comes after on `later` waits for what is queued on `earlier` so far; the host does not. */
void order(const OpenRegStream &earlier, const OpenRegStream &later) {
  const OwnedEvent event(earlier.device_index(), orEventDisableTiming);
  OPENREG_CHECK(orEventRecord(event.get(), earlier.stream()));
  OPENREG_CHECK(orStreamWaitEvent(later.stream(), event.get()));
}

/* Queues on the source's current stream, in the order of the destination's too. */
void betweenStreams(const Tensor &dst, const Tensor &src,
                    c10::function_ref<void(const OpenRegStream &)> queue) {
  const OpenRegStream from = getCurrentOpenRegStream(src.device().index());
  if (src.device() == dst.device()) return queue(from);
  const OpenRegStream to = getCurrentOpenRegStream(dst.device().index());
  for (const OpenRegStream &stream : {from, to}) {
    if (C10_LIKELY(!isCapturing(stream.stream()))) continue;
    OPENREG_CHECK(
        orStreamRefuseCapture(stream.stream(), "aten::copy_ between devices",
                              "a graph has one device: copy before the capture or after a replay"));
  }
  order(to, from);
  queue(from);
  order(from, to);
}

/* Pinned memory that work queued so far on the stream uses, or a graph, also if `host` is a slice
 * of it. */
void keepPinned(const Tensor &host, const OpenRegStream &stream) {
  if (const auto graph = graphBeingCaptured(stream.stream())) return graph->keep(host.storage());
  recordPinnedUse(const_cast<void *>(host.const_data_ptr()),
                  host.storage().data_ptr().get_context(), stream.unwrap());
}

/* As the core does for a memcpy: what is as small as this is copied at the call. */
constexpr int64_t kStageBytes = 64 << 10;

/* For the sync-debug mode: whether the host is about to wait for the device. */
void noteBlockingCopy(const Tensor &dst, const Tensor &src, bool nonBlocking, orStream_t stream) {
  if (!notesSynchronization()) return;
  const bool toDevice = dst.is_privateuseone();
  const bool pinned = isPinned((toDevice ? src : dst).const_data_ptr());
  const bool staged =
      toDevice && static_cast<int64_t>(src.nbytes()) <= kStageBytes && !isCapturing(stream);
  if (nonBlocking && (pinned || staged)) return;
  const char *memory = pinned ? "pinned" : "pageable";
  noteSynchronization(
      (toDevice ? c10::str("aten::copy_ (from ", memory, " host memory to ", dst.device(), ")")
                : c10::str("aten::copy_ (from ", src.device(), " to ", memory, " host memory)"))
          .c_str(),
      stream);
}

void synchronize(const OpenRegStream &stream) {
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream.stream()));
}

void copyWithHost(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const bool toDevice = dst.is_privateuseone();
  const Tensor &host = toDevice ? src : dst;
  const OpenRegStream stream = getCurrentOpenRegStream((toDevice ? dst : src).device().index());
  noteBlockingCopy(dst, src, nonBlocking, stream.stream());
  const auto kind = toDevice ? orMemcpyHostToDevice : orMemcpyDeviceToHost;
  void *to = dst.data_ptr();
  const void *from = src.const_data_ptr();
  if (!nonBlocking) {
    OPENREG_CHECK_SYNCHRONIZED(orMemcpyWithStream(to, from, src.nbytes(), kind, stream.stream()));
    return;
  }
  OPENREG_CHECK(orMemcpyAsync(to, from, src.nbytes(), kind, stream.stream()));
  keepPinned(host, stream);
}

void queueBytes(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  if (dst.is_cpu() || src.is_cpu()) return copyWithHost(dst, src, nonBlocking);
  betweenStreams(dst, src, [&](const OpenRegStream &stream) {
    OPENREG_CHECK(orMemcpyPeerAsync(dst.data_ptr(), dst.device().index(), src.const_data_ptr(),
                                    src.device().index(), src.nbytes(), stream.stream()));
  });
}

void copyBytes(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  SanitizedAs name("aten::copy_");
  queueBytes(dst, src, nonBlocking);
  if (sanitizerActive()) raiseRaces();
}

/* The stretch of memory from the first to the last element, as a 1-d tensor. */
Tensor stretch(const Tensor &tensor) {
  const auto bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()));
  Tensor flat = at::native::as_strided_tensorimpl(
      tensor, {bytes / static_cast<int64_t>(tensor.itemsize())}, {1}, tensor.storage_offset());
  flat._set_conj(false);
  flat._set_neg(false);
  return flat;
}

/* `tensor` as it would be over this stretch. */
Tensor over(const Tensor &flat, const Tensor &tensor) {
  Tensor image = at::native::as_strided_tensorimpl(flat, tensor.sizes(), tensor.strides(), 0);
  image._set_conj(tensor.is_conj());
  image._set_neg(tensor.is_neg());
  return image;
}

void kernelWithHost(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const Tensor &host = dst.is_cpu() ? dst : src;
  const OpenRegStream stream = getCurrentOpenRegStream((dst.is_cpu() ? src : dst).device().index());
  const bool pinned = isPinned(host.const_data_ptr());
  // A graph would copy the same bytes again and again.
  if (src.is_cpu() && !pinned && nonBlocking && !isCapturing(stream.stream())) {
    const Tensor source = stretch(src);
    if (static_cast<int64_t>(source.nbytes()) <= kStageBytes) {
      return enqueueCopyOwning(dst, over(source.clone(), src), stream.stream());
    }
  }
  noteBlockingCopy(dst, src, nonBlocking, stream.stream());
  const bool blocks = !pinned || !nonBlocking;
  enqueueCopy(dst, src, stream.stream(), blocks);
  if (!blocks) return keepPinned(host, stream);
  std::optional<OwnWait> own;
  if (src.is_cpu() && nonBlocking) own.emplace();  // as of the core's copies
  synchronize(stream);
}

void copyByKernel(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  at::assert_no_internal_overlap(dst);
  if (dst.is_cpu() || src.is_cpu()) return kernelWithHost(dst, src, nonBlocking);
  betweenStreams(dst, src,
                 [&](const OpenRegStream &stream) { enqueueCopy(dst, src, stream.stream()); });
}

/* Contiguous, of this dtype and without bits. */
bool isPlain(const Tensor &tensor, c10::ScalarType dtype) {
  return tensor.scalar_type() == dtype && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

bool hasBits(const Tensor &tensor) { return tensor.is_conj() || tensor.is_neg(); }

/* The same memory, with these bits off. */
Tensor cleared(const Tensor &tensor, bool conj, bool neg) {
  Tensor other = at::native::as_strided_tensorimpl(tensor, tensor.sizes(), tensor.strides(),
                                                   tensor.storage_offset());
  other._set_conj(tensor.is_conj() && !conj);
  other._set_neg(tensor.is_neg() && !neg);
  return other;
}

void copyByTemporaries(const Tensor &dst, const Tensor &src) {
  // Bits of both sides cancel out, as in a kernel; some dtypes cannot do without.
  const bool conj = dst.is_conj() && src.is_conj(), neg = dst.is_neg() && src.is_neg();
  if (conj || neg) return copyByTemporaries(cleared(dst, conj, neg), cleared(src, conj, neg));
  at::assert_no_internal_overlap(dst);
  // A bit is resolved in the destination's dtype, as in a kernel: negation is not the same in every
  // dtype.
  const bool castFirst = dst.itemsize() < src.itemsize() || hasBits(dst) || hasBits(src);
  const c10::ScalarType dtype = (castFirst ? dst : src).scalar_type();
  Tensor from = src, to = dst;
  if (!isPlain(src, dtype)) {
    from = at::empty(src.sizes(), src.options().dtype(dtype));
    from.copy_(src);
  }
  if (!isPlain(dst, dtype)) to = at::empty(dst.sizes(), dst.options().dtype(dtype));
  copyBytes(to, from, true);
  if (!to.is_same(dst)) dst.copy_(to);
}

void copyByHostImages(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  at::assert_no_internal_overlap(dst);
  const auto image = [](const Tensor &tensor, bool filled) {
    const Tensor device = stretch(tensor);
    const Tensor flat = at::detail::empty_cpu(device.sizes(), tensor.scalar_type());
    if (filled) copyBytes(flat, device, false);
    return flat;
  };
  const Tensor from = src.is_cpu() ? src : over(image(src, true), src);
  if (dst.is_cpu()) return asKernel([&] { dst.copy_(from); });
  // What lies in the gaps stays.
  const Tensor flat = image(dst, !dst.is_non_overlapping_and_dense());
  asKernel([&] { over(flat, dst).copy_(from); });
  copyBytes(stretch(dst), flat, nonBlocking || !src.is_cpu());
}

void copy(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const Way way = choose(dst, src);
  if (way == Way::kNothing) return;
  checkExtent(dst);
  checkExtent(src);
  switch (way) {
    case Way::kNothing:
      return;
    case Way::kMemcpy:
      return copyBytes(dst, src, nonBlocking);
    case Way::kKernel:
      return copyByKernel(dst, src, nonBlocking);
    case Way::kTemporaries:
      return copyByTemporaries(dst, src);
    case Way::kHostImages:
      return copyByHostImages(dst, src, nonBlocking);
  }
}

Tensor copyFrom(const Tensor &src, const Tensor &dst, bool nonBlocking) {
  checkCopyable(src);
  checkCopyable(dst);
  if (src.is_same(dst)) return dst;
  if (src._is_zerotensor()) return dst.zero_();
  // Of an expanded source nobody could tell.
  if (dst.is_alias_of(src)) at::assert_no_partial_overlap(dst, src);
  copy(dst, src.sizes() == dst.sizes() ? src : src.expand(dst.sizes()), nonBlocking);
  return dst;
}

Tensor copyFromAndResize(const Tensor &src, const Tensor &dst) {
  dst.resize_(src.sizes());
  return copyFrom(src, dst, false);
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &torch_openreg::copyFrom);
  m.impl("_copy_from_and_resize", &torch_openreg::copyFromAndResize);
}

// Resolving the bit is a copy itself: without these it would end in itself.
OPENREG_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
OPENREG_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Refused by name, instead of by a list of what other backends have.
OPENREG_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { m.impl("_copy_from", &torch_openreg::copyFrom); }
OPENREG_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("_copy_from", &torch_openreg::copyFrom);
}
