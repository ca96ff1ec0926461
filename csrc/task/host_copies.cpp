/*
 * A turn is not a lock: a thread has it across waits. `mutex` guards the set of turns that are
 * taken, alone. No thread waits for a turn while it has another one, so turns cannot be in a cycle;
 * and who has a turn waits for its stream, behind which any other call on it would wait, too.
 */
#include "host_copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../torch/fork.h"
#include "../torch/gil.h"
#include "../torch/sanitizer.h"
#include "../torch/warnings.h"
#include "tensor_metadata.h"
#include "worker_state.h"

namespace torch_openreg {

namespace {

/* Each element of an expanded tensor once. */
at::Tensor elementsOf(const at::Tensor &tensor) {
  TensorMetadata elements = metadataOf(tensor);
  std::vector<int64_t> sizes = tensor.sizes().vec();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0) sizes[d] = 1;
  }
  elements.sizes = sizes;
  return tensorOf(tensor.storage(), c10::DispatchKey::PrivateUse1, elements,
                  tensor.storage_offset());
}

/* A command takes some 20 us: more of them would take too long. */
constexpr size_t kPieces = 256;

/* How the elements of a tensor lie in its storage. */
struct Pieces {
  std::vector<std::pair<size_t, size_t>> loops{};  // over the pieces: stride, size
  size_t side = 1;                                 // elements side by side in each
  size_t count = 1;                                // of the pieces; kPieces + 1 stands for more
};

Pieces piecesOf(const at::Tensor &tensor) {
  std::vector<std::pair<size_t, size_t>> loops;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) loops.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(loops.begin(), loops.end());
  Pieces pieces;
  auto outer = loops.begin();
  while (outer != loops.end() && outer->first == pieces.side) pieces.side *= (outer++)->second;
  pieces.loops.assign(outer, loops.end());
  for (const auto &[stride, size] : pieces.loops) {
    pieces.count = std::min(pieces.count * size, kPieces + 1);
  }
  return pieces;
}

ByteRanges rangesOf(const Pieces &pieces, const at::Tensor &tensor) {
  ByteRanges ranges;
  for (size_t piece = 0; piece < pieces.count; ++piece) {
    auto begin = static_cast<size_t>(tensor.storage_offset());
    size_t rest = piece;
    for (const auto &[stride, size] : pieces.loops) {
      begin += rest % size * stride;
      rest /= size;
    }
    ranges.add(begin * tensor.itemsize(), (begin + pieces.side) * tensor.itemsize());
  }
  return ranges;
}

struct Turns {
  std::mutex mutex;
  std::condition_variable ended;
  std::unordered_set<orStream_t> taken;
};
Turns &turns() { return leaked<Turns>(); }
thread_local bool hasTurn = false;

void takeTurn(orStream_t stream) {
  const WithoutGil released;
  std::unique_lock<std::mutex> lock(turns().mutex);
  turns().ended.wait(lock, [&] { return turns().taken.insert(stream).second; });
}

}  // namespace

StreamTurn::StreamTurn(orStream_t stream) : stream_(stream), first_(!hasTurn) {
  refuseInForkedChild();
  if (!first_) return;
  takeTurn(stream);
  hasTurn = true;
}

StreamTurn::~StreamTurn() {
  if (!first_) return;
  hasTurn = false;
  {
    const std::lock_guard<std::mutex> lock(turns().mutex);
    turns().taken.erase(stream_);
  }
  turns().ended.notify_all();
}

void ByteRanges::add(size_t begin, size_t end) {
  auto next = ranges_.upper_bound(begin);
  if (next != ranges_.begin() && std::prev(next)->second >= begin) --next;
  while (next != ranges_.end() && next->first <= end) {
    begin = std::min(begin, next->first);
    end = std::max(end, next->second);
    next = ranges_.erase(next);
  }
  ranges_.emplace(begin, end);
}

bool ByteRanges::has(size_t begin, size_t end) const {
  const auto next = ranges_.upper_bound(begin);
  return next != ranges_.begin() && std::prev(next)->second >= end;
}

HostCopies::Place HostCopies::place(const void *memory) {
  const auto *address = static_cast<const char *>(memory);
  const auto next = copies_.upper_bound(address);
  if (next == copies_.begin()) return {nullptr, 0};
  auto &[begin, copy] = *std::prev(next);
  const auto offset = static_cast<size_t>(address - begin);
  return {offset < copy.bytes ? &copy : nullptr, offset};
}

void HostCopies::reserve(const c10::StorageImpl &storage) {
  const auto *begin = static_cast<const char *>(storage.data());
  if (begin == nullptr || storage.nbytes() == 0) return;
  const char *end = begin + storage.nbytes();
  const Place known = place(begin);
  if (known.copy != nullptr && known.offset + storage.nbytes() <= known.copy->bytes) return;
  auto first = copies_.lower_bound(begin);
  if (known.copy != nullptr) begin = (--first)->first;
  auto last = first;
  for (; last != copies_.end() && last->first < end; ++last)
    end = std::max(end, last->first + last->second.bytes);
  const auto bytes = static_cast<size_t>(end - begin);
  HostCopy joined{c10::GetCPUAllocator()->allocate(bytes), bytes};
  for (auto old = first; old != last; ++old) {
    const auto shift = static_cast<size_t>(old->first - begin);
    for (const auto &[from, to] : old->second.fetched) {
      std::memcpy(static_cast<char *>(joined.data.get()) + shift + from,
                  static_cast<const char *>(old->second.data.get()) + from, to - from);
      joined.fetched.add(shift + from, shift + to);
    }
  }
  copies_.erase(first, last);
  copies_.emplace(begin, std::move(joined));
}

void HostCopies::fetch(const c10::StorageImpl &storage, size_t begin, size_t end) {
  const auto *device = static_cast<const char *>(storage.data());
  if (device == nullptr || begin == end) return;
  reserve(storage);
  const Place to = place(device);
  if (to.copy->fetched.has(to.offset + begin, to.offset + end)) return;
  const OwnWait own;
  OPENREG_CHECK_SYNCHRONIZED(orMemcpyWithStream(to.now() + begin, device + begin, end - begin,
                                                orMemcpyDeviceToHost, stream_));
  to.copy->fetched.add(to.offset + begin, to.offset + end);
}

void HostCopies::fetch(const at::Tensor &tensor) {
  const c10::StorageImpl &storage = *tensor.storage().unsafeGetStorageImpl();
  reserve(storage);  // also for a tensor without elements, which a kernel may resize
  const size_t begin = bytesBefore(tensor);
  fetch(storage, begin, std::max(begin, bytesNeeded(tensor)));
}

void HostCopies::fetchRest(const c10::StorageImpl &storage, char *memory, size_t bytes,
                           ByteRanges known) {
  const auto *device = static_cast<const char *>(storage.data());
  const Place from = place(device);
  if (from.copy == nullptr) return;
  for (const auto &[begin, end] : from.copy->fetched) {
    if (end > from.offset) known.add(std::max(begin, from.offset) - from.offset, end - from.offset);
  }
  const size_t size = std::min(bytes, storage.nbytes());
  known.add(size, size);  // where the last gap ends
  const OwnWait own;
  size_t gap = 0;
  for (const auto &[begin, end] : known) {
    const size_t stop = std::min(begin, size);
    if (stop > gap) {
      OPENREG_CHECK_SYNCHRONIZED(orMemcpyWithStream(memory + gap, device + gap, stop - gap,
                                                    orMemcpyDeviceToHost, stream_));
    }
    gap = end;
  }
}

char *HostCopies::find(const void *memory) {
  const Place found = place(memory);
  return found.copy == nullptr ? nullptr : found.now();
}

void HostCopies::keep(const c10::StorageImpl &storage) {
  const Place found = place(storage.data());
  if (found.copy == nullptr || found.copy->before) return;
  found.copy->before = c10::GetCPUAllocator()->clone(found.copy->data.get(), found.copy->bytes);
}

void HostCopies::writeChanges(const at::Tensor &tensor) {
  const c10::StorageImpl &storage = *tensor.storage().unsafeGetStorageImpl();
  const Place found = place(storage.data());
  if (found.copy == nullptr || !found.copy->before) return;
  const char *now = found.now();
  char *before = found.before();
  const size_t size = tensor.itemsize();
  const auto isSame = [&](size_t at) { return std::memcmp(now + at, before + at, size) == 0; };
  size_t begin = 0, end = storage.nbytes() / size * size;
  if (std::memcmp(now, before, end) == 0) return;
  while (isSame(begin)) begin += size;
  while (isSame(end - size)) end -= size;
  ByteRanges changed;
  for (size_t at = begin; at < end && changed.count() <= kPieces; at += size) {
    if (!isSame(at)) changed.add(at, at + size);
  }
  auto *memory = static_cast<char *>(tensor.storage().mutable_data());
  if (changed.count() <= kPieces) {
    uploadPieces(memory, changed);
  } else {
    HostCopies present(stream_);
    present.fetch(storage, begin, end);
    char *merged = present.find(memory);
    for (size_t at = begin; at < end; at += size) {
      if (!isSame(at)) std::memcpy(merged + at, now + at, size);
    }
    upload(memory + begin, merged + begin, end - begin);
  }
  std::memcpy(before + begin, now + begin, end - begin);
}

void HostCopies::upload(void *device, const void *host, size_t bytes) const {
  const OwnWait own;
  OPENREG_CHECK_SYNCHRONIZED(
      orMemcpyWithStream(device, host, bytes, orMemcpyHostToDevice, stream_));
}

at::Tensor HostCopies::of(const at::Tensor &tensor) {
  const c10::Storage &storage = tensor.storage();
  return tensorOf(cpuStorage(find(storage.data()), storage.nbytes()), c10::DispatchKey::CPU,
                  metadataOf(tensor), tensor.storage_offset());
}

void HostCopies::uploadPieces(char *device, const ByteRanges &pieces) {
  const char *host = find(device);
  const OwnWait own;
  for (const auto &[begin, end] : pieces) {
    OPENREG_CHECK(
        orMemcpyAsync(device + begin, host + begin, end - begin, orMemcpyHostToDevice, stream_));
  }
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream_));
}

bool HostCopies::isWrittenAsRange(const at::Tensor &tensor) {
  return piecesOf(tensor).count > kPieces;
}

void HostCopies::write(const at::Tensor &tensor) {
  auto *device = static_cast<char *>(tensor.storage().mutable_data());
  const Pieces pieces = piecesOf(tensor);
  if (pieces.count > 1 && pieces.count <= kPieces)
    return uploadPieces(device, rangesOf(pieces, tensor));
  const size_t begin = bytesBefore(tensor);
  upload(device + begin, find(device) + begin, bytesNeeded(tensor) - begin);
}

void HostCopies::writeBack(const at::Tensor &tensor) {
  if (tensor.numel() == 0) return;
  const c10::InferenceMode ordinary(false);  // or other threads could not write these tensors
  const at::Tensor written = elementsOf(tensor);
  const c10::Storage &storage = tensor.storage();
  const Place found = place(storage.data());
  at::Tensor before;
  if (found.copy->before) {
    before = tensorOf(cpuStorage(found.before(), storage.nbytes()), c10::DispatchKey::CPU,
                      metadataOf(written), written.storage_offset());
  }
  const OwnWait own;
  const at::AutoDispatchBelowADInplaceOrView unseen;  // the call has counted its writes
  if (isWrittenAsRange(written))
    written.copy_(of(written));
  else
    write(written);
  if (before.defined()) asNarrowWorker([&] { before.copy_(of(written)); });
}

}  // namespace torch_openreg
