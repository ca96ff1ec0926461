/*
 * Copies: one entry, and one strategy (choose) that is selected before any data moves.
 *
 *   same data, no elements                          nothing
 *   same dtype, bits and dense order                one memcpy task
 *   one device, or host and device                  one kernel task: strides, dtype, conj, neg
 *   two devices, and one's kernels reach the other  one kernel task
 *   two devices otherwise                           contiguous temporaries, cast where fewer bytes
 *                                                   travel or bits differ; a memcpy
 *   a device whose memory no kernel can reach       the device's own kernel, if it has one that
 *                                                   accepts the copy, otherwise by way of copies
 *                                                   in host memory
 *
 * Tasks run on the current stream of their device. Between two devices they run on the source's,
 * after earlier and before later work of the destination's current stream; the host does not wait.
 * A blocking copy with host memory synchronises its stream, as CUDA's does, and any copy to
 * pageable memory does too. A non_blocking one from pageable memory takes the source along, or
 * waits until it has been read, which orders nothing.
 */
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <optional>

#include "../../torch/device.h"
#include "../../torch/event.h"
#include "../../torch/fork.h"
#include "../../torch/graph.h"
#include "../../torch/graph_outputs.h"
#include "../../torch/host_allocator.h"
#include "../../torch/stream.h"
#include "../../torch/sync_debug.h"
#include "../../torch/warnings.h"
#include "../../task/host_copies.h"
#include "../../task/kernel_memory.h"
#include "../../task/task.h"
#include "../../task/tensor_accesses.h"
#include "../../task/tensor_metadata.h"
#include "../device_kernel.h"
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

/* A storage may claim too large a size. The core checks the end of memory, not of a block. */
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

/* Whether the bytes of both are the same elements in the same order, without gaps. */
bool isMemcpy(const Tensor &dst, const Tensor &src) {
  if (dst.scalar_type() != src.scalar_type() || dst.is_conj() != src.is_conj() ||
      dst.is_neg() != src.is_neg()) {
    return false;
  }
  if (dst.is_contiguous() && src.is_contiguous()) return true;
  return metadataOf(dst).hasPlaces(src.strides()) && dst.is_non_overlapping_and_dense();
}

/* Whether kernels of `device` reach memory of `peer`; if so, access is enabled from then on. */
bool reachesPeer(c10::DeviceIndex device, c10::DeviceIndex peer) {
  int can = 0;
  OPENREG_CHECK(orDeviceCanAccessPeer(&can, device, peer));
  if (can != 0) OPENREG_CHECK(orDeviceEnablePeerAccess(device, peer));
  return can != 0;
}

CopyStrategy choose(const Tensor &dst, const Tensor &src) {
  if (dst.numel() == 0 || isSameData(dst, src)) return CopyStrategy::kNothing;
  if (isMemcpy(dst, src)) return CopyStrategy::kMemcpy;
  const c10::DeviceIndex to = (dst.is_cpu() ? src : dst).device().index();
  const c10::DeviceIndex from = (src.is_cpu() ? dst : src).device().index();
  if (from == to) return canMap(to) ? CopyStrategy::kKernel : CopyStrategy::kHostCopies;
  return canMap(from) && canMap(to) && reachesPeer(from, to) ? CopyStrategy::kKernel
                                                             : CopyStrategy::kTemporaries;
}

/* Makes later work on `later` wait for the work queued on `earlier` so far, without the host. */
void order(const OpenRegStream &earlier, const OpenRegStream &later) {
  const OwnedEvent event(earlier.device_index(), orEventDisableTiming);
  OPENREG_CHECK(orEventRecord(event.get(), earlier.stream()));
  OPENREG_CHECK(orStreamWaitEvent(later.stream(), event.get()));
}

/* Calls `queue`, which queues on the source's current stream, so that its work comes between the
 * earlier and the later work of the destination's current stream. */
void betweenStreams(const CopyFacts &facts, c10::function_ref<void()> queue) {
  if (facts.src.device() == facts.dst.device()) return queue();
  const OpenRegStream to = getCurrentOpenRegStream(facts.dst.device().index());
  for (const orStream_t stream : {facts.handle, to.stream()}) {
    if (C10_LIKELY(!isCapturing(stream))) continue;
    OPENREG_CHECK(
        orStreamRefuseCapture(stream, "aten::copy_ between devices",
                              "a graph has one device: copy before the capture or after a replay"));
  }
  order(to, facts.stream);
  queue();
  order(facts.stream, to);
}

/* Keeps pinned memory as long as work queued on the stream so far, or a graph, may use it; also if
 * the host's tensor is a slice of it. */
void keepPinned(const CopyFacts &facts) {
  const Tensor &host = *facts.host;
  if (C10_UNLIKELY(facts.isCaptured)) {
    if (const auto graph = graphBeingCaptured(facts.handle)) return graph->keep(host.storage());
  }
  recordPinnedUse(const_cast<void *>(host.const_data_ptr()),
                  host.storage().data_ptr().get_context(), facts.stream.unwrap());
}

/* As in the core's memcpy: copies up to this size are made at the call. */
constexpr int64_t kStageBytes = 64 << 10;

/* Reports to the sync-debug mode that the host is about to wait for the device. */
void noteBlockingCopy(const CopyFacts &facts) {
  if (!notesSynchronization()) return;
  const bool toDevice = facts.host == &facts.src;
  const bool staged =
      toDevice && static_cast<int64_t>(facts.src.nbytes()) <= kStageBytes && !facts.isCaptured;
  if (facts.nonBlocking && (facts.isPinned || staged)) return;
  const char *memory = facts.isPinned ? "pinned" : "pageable";
  noteSynchronization(
      (toDevice
           ? c10::str("aten::copy_ (from ", memory, " host memory to ", facts.dst.device(), ")")
           : c10::str("aten::copy_ (from ", facts.src.device(), " to ", memory, " host memory)"))
          .c_str(),
      facts.handle);
}

void memcpyWithHost(const CopyFacts &facts) {
  noteBlockingCopy(facts);
  const auto kind = facts.host == &facts.src ? orMemcpyHostToDevice : orMemcpyDeviceToHost;
  void *to = facts.dst.data_ptr();
  const void *from = facts.src.const_data_ptr();
  const size_t bytes = facts.src.nbytes();
  if (!facts.nonBlocking) {
    OPENREG_CHECK_SYNCHRONIZED(orMemcpyWithStream(to, from, bytes, kind, facts.handle));
    return;
  }
  OPENREG_CHECK(orMemcpyAsync(to, from, bytes, kind, facts.handle));
  keepPinned(facts);
}

void copyBytes(const CopyFacts &facts) {
  const Tensor &dst = facts.dst, &src = facts.src;
  SanitizedAs name("aten::copy_");
  readsStorage(src.storage().unsafeGetStorageImpl());
  if (facts.host != nullptr) {
    memcpyWithHost(facts);
  } else {
    betweenStreams(facts, [&] {
      OPENREG_CHECK(orMemcpyPeerAsync(dst.data_ptr(), dst.device().index(), src.const_data_ptr(),
                                      src.device().index(), src.nbytes(), facts.handle));
    });
  }
  if (sanitizerActive()) raiseRaces();
}

void copyBytes(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  copyBytes({dst, src, nonBlocking, CopyStrategy::kMemcpy});
}

/* The range of memory from the first to the last element, as a 1-d tensor. */
Tensor stretch(const Tensor &tensor) {
  const auto bytes = static_cast<int64_t>(
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()));
  Tensor flat = at::native::as_strided_tensorimpl(
      tensor, {bytes / static_cast<int64_t>(tensor.itemsize())}, {1}, tensor.storage_offset());
  flat._set_conj(false);
  flat._set_neg(false);
  return flat;
}

/* `tensor` as it would be over this range. */
Tensor over(const Tensor &flat, const Tensor &tensor) {
  Tensor image = at::native::as_strided_tensorimpl(flat, tensor.sizes(), tensor.strides(), 0);
  image._set_conj(tensor.is_conj());
  image._set_neg(tensor.is_neg());
  return image;
}

void kernelWithHost(const CopyFacts &facts) {
  const Tensor &src = facts.src;
  const bool fromHost = facts.host == &src;
  // A graph would copy the same bytes in every replay.
  if (fromHost && !facts.isPinned && facts.nonBlocking && !facts.isCaptured) {
    const Tensor source = stretch(src);
    if (static_cast<int64_t>(source.nbytes()) <= kStageBytes) {
      return enqueueCopy(facts, /*awaited=*/false, over(source.clone(), src));
    }
  }
  noteBlockingCopy(facts);
  const bool blocks = !facts.isPinned || !facts.nonBlocking;
  enqueueCopy(facts, blocks);
  if (!blocks) return keepPinned(facts);
  std::optional<OwnWait> own;
  if (fromHost && facts.nonBlocking) own.emplace();  // as of the core's copies
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(facts.handle));
}

void copyByKernel(const CopyFacts &facts) {
  at::assert_no_internal_overlap(facts.dst);
  if (facts.host != nullptr) return kernelWithHost(facts);
  betweenStreams(facts, [&] { enqueueCopy(facts); });
}

/* Whether it is contiguous, of this dtype, and without conj and neg bits. */
bool isPlain(const Tensor &tensor, c10::ScalarType dtype) {
  return tensor.scalar_type() == dtype && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg();
}

bool hasBits(const Tensor &tensor) { return tensor.is_conj() || tensor.is_neg(); }

/* The same memory with these bits cleared. */
Tensor cleared(const Tensor &tensor, bool conj, bool neg) {
  Tensor other = at::native::as_strided_tensorimpl(tensor, tensor.sizes(), tensor.strides(),
                                                   tensor.storage_offset());
  other._set_conj(tensor.is_conj() && !conj);
  other._set_neg(tensor.is_neg() && !neg);
  return other;
}

/* The dtype of the bytes that travel. A bit is resolved in the destination's dtype, as in a kernel:
 * negation differs between dtypes. */
c10::ScalarType travelsAs(const Tensor &dst, const Tensor &src) {
  const bool castFirst = dst.itemsize() < src.itemsize() || hasBits(dst) || hasBits(src);
  return (castFirst ? dst : src).scalar_type();
}

void copyByTemporaries(const Tensor &dst, const Tensor &src) {
  // Bits of both sides cancel out, as in a kernel; some dtypes need them.
  const bool conj = dst.is_conj() && src.is_conj(), neg = dst.is_neg() && src.is_neg();
  if (conj || neg) return copyByTemporaries(cleared(dst, conj, neg), cleared(src, conj, neg));
  at::assert_no_internal_overlap(dst);
  const c10::ScalarType dtype = travelsAs(dst, src);
  Tensor from = src, to = dst;
  if (!isPlain(src, dtype)) {
    from = at::empty(src.sizes(), src.options().dtype(dtype));
    from.copy_(src);
  }
  if (!isPlain(dst, dtype)) to = at::empty(dst.sizes(), dst.options().dtype(dtype));
  copyBytes(to, from, true);
  if (!to.is_same(dst)) dst.copy_(to);
}

/* The same tensor of pinned memory for a task: the sanitizer guards it from the host. */
Tensor aliasOf(const Tensor &pinned) {
  c10::StorageImpl &storage = *pinned.storage().unsafeGetStorageImpl();
  return tensorOf(cpuStorage(KernelMemory(storage).address(), storage.nbytes()),
                  c10::DispatchKey::CPU, metadataOf(pinned), pinned.storage_offset());
}

/* If the elements of `dst` lie in too many pieces, other streams must not write what is between
 * them meanwhile. */
void copyByHostCopies(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  at::assert_no_internal_overlap(dst);
  const CopyFacts facts(dst, src, nonBlocking, CopyStrategy::kHostCopies);
  if (facts.host != nullptr)
    noteBlockingCopy(facts);
  else
    noteSynchronization("aten::copy_", facts.handle);
  if (sanitizerActive()) {
    const bool moves = facts.host == nullptr && src.scalar_type() == dst.scalar_type();
    reportTensors("aten::copy_", facts.handle, dst, src, moves);
  }
  {
    const StreamTurn turn(facts.handle);
    HostCopies copies(facts.handle);
    if (!src.is_cpu()) copies.fetch(src);
    if (!dst.is_cpu() && HostCopies::isWrittenAsRange(dst))
      copies.fetch(dst);
    else if (!dst.is_cpu())
      copies.reserve(*dst.storage().unsafeGetStorageImpl());
    const auto reached = [&](const Tensor &tensor) {
      if (!tensor.is_cpu()) return copies.of(tensor);
      return facts.isPinned ? aliasOf(tensor) : tensor;
    };
    const bool small = dst.numel() <= kSerial;
    runOnWorker(facts.handle, "aten::copy_", small, [&] {
      const at::AutoDispatchBelowADInplaceOrView kernel;  // the caller's copy_ has counted it
      reached(dst).copy_(reached(src));
    });
    if (!dst.is_cpu()) copies.write(dst);
  }
  const bool toPageable = dst.is_cpu() && !facts.isPinned;
  if (facts.host != nullptr && (!nonBlocking || toPageable))
    OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(facts.handle));
}

const c10::OperatorHandle &copyOperator() {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  return op;
}

/* From the host by way of a contiguous tensor of the device, whose own kernel writes no gaps. */
void copyByOwnKernel(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const CopyFacts facts(dst, src, nonBlocking, CopyStrategy::kHostCopies);
  noteBlockingCopy(facts);
  Tensor from = src;
  if (facts.isPinned && !isPlain(src, travelsAs(dst, src))) {
    // The host reads it, after the work on the stream that may write it.
    if (sanitizerActive()) reportTensors("aten::copy_", facts.handle, {}, src);
    from = at::detail::empty_cpu(src.sizes(), src.scalar_type());
    from._set_conj(src.is_conj());
    from._set_neg(src.is_neg());
    runOnWorker(facts.handle, "aten::copy_", src.numel() <= kSerial, [&] {
      const at::AutoDispatchBelowADInplaceOrView kernel;
      from.copy_(aliasOf(src));
    });
  }
  copyByTemporaries(dst, from);
  if (!nonBlocking) OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(facts.handle));
}

/* By the device's own kernel; false if it has none for this copy. */
bool copyOnDevice(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const c10::OperatorHandle &op = copyOperator();
  if (dst.device() != src.device() || !hasDeviceKernel(op)) return false;
  const OpTraits &traits = opTraits(op);
  at::assert_no_internal_overlap(dst);
  static const auto spec = writtenOutputs(traits);
  const std::array<c10::IValue, 3> arguments{dst, src, nonBlocking};
  const c10::Device device = dst.device();
  auto call =
      DeviceCall::make(op, traits, *spec, device, currentStreamHandle(device.index()), arguments);
  if (call == nullptr) return false;
  DeviceCall::queue(std::move(call), traits.name, arguments, [](size_t) { return uint64_t{0}; });
  return true;
}

void copy(const Tensor &dst, const Tensor &src, bool nonBlocking) {
  const CopyStrategy strategy = choose(dst, src);
  if (strategy == CopyStrategy::kNothing) return;
  checkExtent(dst);
  checkExtent(src);
  switch (strategy) {
    case CopyStrategy::kNothing:
      return;
    case CopyStrategy::kMemcpy:
      return copyBytes({dst, src, nonBlocking, strategy});
    case CopyStrategy::kKernel:
      if (copyOnDevice(dst, src, nonBlocking)) return;
      return copyByKernel({dst, src, nonBlocking, strategy});
    case CopyStrategy::kTemporaries:
      return copyByTemporaries(dst, src);
    case CopyStrategy::kHostCopies:
      if (copyOnDevice(dst, src, nonBlocking)) return;
      if (src.is_cpu() && HostCopies::isWrittenAsRange(dst) && hasDeviceKernel(copyOperator()))
        return copyByOwnKernel(dst, src, nonBlocking);
      return copyByHostCopies(dst, src, nonBlocking);
  }
}

Tensor copyFrom(const Tensor &src, const Tensor &dst, bool nonBlocking) {
  checkCopyable(src);
  checkCopyable(dst);
  if (src.is_same(dst)) return dst;
  if (src._is_zerotensor()) return dst.zero_();
  // With an expanded source overlap could not be determined.
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

// For an out-of-tree backend, aten::copy_ and aten::to call these two operators and no others.
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &torch_openreg::copyFrom);
  m.impl("_copy_from_and_resize", &torch_openreg::copyFromAndResize);
}

// PyTorch's kernels for these bits resolve them by a copy, which would recurse for ever.
OPENREG_FALL_THROUGH(Conjugate, "_copy_from")
OPENREG_FALL_THROUGH(Negative, "_copy_from")

// Without these a copy would fail with a list of other backends' kernels.
OPENREG_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { m.impl("_copy_from", &torch_openreg::copyFrom); }
OPENREG_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("_copy_from", &torch_openreg::copyFrom);
}
