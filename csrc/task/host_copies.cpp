/*
 * A turn is not a lock: a thread has it across waits. `mutex` guards the set of turns that are
 * taken, alone. No thread waits for a turn while it has another one, so turns cannot be in a cycle;
 * and who has a turn waits for its stream, behind which any other call on it would wait, too.
 */
#include "host_copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "../torch/fork.h"
#include "../torch/gil.h"
#include "../torch/sanitizer.h"
#include "../torch/warnings.h"
#include "tensor_metadata.h"

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

void HostCopies::reserve(const c10::StorageImpl &storage) {
  HostCopy &copy = copies_[storage.data()];
  if (copy.bytes >= storage.nbytes()) return;
  copy = {c10::GetCPUAllocator()->allocate(storage.nbytes()), storage.nbytes()};
}

void HostCopies::fetch(const c10::StorageImpl &storage, size_t begin, size_t end) {
  const auto *device = static_cast<const char *>(storage.data());
  if (device == nullptr) return;
  reserve(storage);
  HostCopy &copy = copies_.at(device);
  if (begin >= copy.begin && end <= copy.end) return;
  const OwnWait own;
  auto *host = static_cast<char *>(copy.data.get());
  OPENREG_CHECK_SYNCHRONIZED(
      orMemcpyWithStream(host + begin, device + begin, end - begin, orMemcpyDeviceToHost, stream_));
  if (copy.end != 0 && (begin > copy.end || end < copy.begin)) return;
  copy.begin = copy.end == 0 ? begin : std::min(begin, copy.begin);
  copy.end = std::max(end, copy.end);
}

void HostCopies::fetch(const at::Tensor &tensor) {
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  fetch(*tensor.storage().unsafeGetStorageImpl(), begin, std::max(begin, bytesNeeded(tensor)));
}

char *HostCopies::find(const void *memory) const {
  const auto found = copies_.find(memory);
  return found == copies_.end() ? nullptr : static_cast<char *>(found->second.data.get());
}

void HostCopies::keep(const c10::StorageImpl &storage) {
  HostCopy &copy = copies_[storage.data()];
  if (copy.bytes == 0 || copy.before) return;
  copy.before = c10::GetCPUAllocator()->clone(copy.data.get(), copy.bytes);
}

void HostCopies::writeChanges(const at::Tensor &tensor) const {
  const c10::StorageImpl &storage = *tensor.storage().unsafeGetStorageImpl();
  const auto found = copies_.find(storage.data());
  if (found == copies_.end()) return;
  const auto *now = static_cast<const char *>(found->second.data.get());
  const auto *before = static_cast<const char *>(found->second.before.get());
  const size_t size = tensor.itemsize();
  const auto isSame = [&](size_t at) { return std::memcmp(now + at, before + at, size) == 0; };
  size_t begin = 0, end = storage.nbytes() / size * size;
  while (begin < end && isSame(begin)) begin += size;
  while (begin < end && isSame(end - size)) end -= size;
  if (begin == end) return;
  HostCopies present(stream_);
  present.fetch(storage, begin, end);
  char *merged = present.find(storage.data());
  for (size_t at = begin; at < end; at += size) {
    if (!isSame(at)) std::memcpy(merged + at, now + at, size);
  }
  auto *memory = static_cast<char *>(tensor.storage().mutable_data());
  upload(memory + begin, merged + begin, end - begin);
}

void HostCopies::upload(void *device, const void *host, size_t bytes) const {
  const OwnWait own;
  OPENREG_CHECK_SYNCHRONIZED(
      orMemcpyWithStream(device, host, bytes, orMemcpyHostToDevice, stream_));
}

at::Tensor HostCopies::of(const at::Tensor &tensor) const {
  const c10::Storage &storage = tensor.storage();
  return tensorOf(cpuStorage(find(storage.data()), storage.nbytes()), c10::DispatchKey::CPU,
                  metadataOf(tensor), tensor.storage_offset());
}

void HostCopies::writeRange(const at::Tensor &tensor) const {
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  auto *device = static_cast<char *>(tensor.storage().mutable_data());
  upload(device + begin, find(device) + begin, bytesNeeded(tensor) - begin);
}

void HostCopies::writeBack(const at::Tensor &tensor) const {
  if (tensor.numel() == 0) return;
  const at::Tensor written = elementsOf(tensor);
  if (written.is_non_overlapping_and_dense()) return writeRange(written);
  const OwnWait own;
  const at::AutoDispatchBelowADInplaceOrView unseen;  // the call has counted its writes
  written.copy_(of(written));
}

}  // namespace torch_openreg
