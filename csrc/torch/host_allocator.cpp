/*
 * PyTorch's caching host allocator over orMallocHost.
 *
 * The base class removes a block from the cache under its own locks, but orFreeHost waits for the
 * devices, and a thread that waits may let in another that holds the GIL and needs those locks. So
 * free_block only adds the block to `retired`, which is freed later, with no lock held and never
 * from a deleter. Retired storages are released there too; their mutex is a leaf.
 */
#include "host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include "event.h"
#include "fork.h"
#include "sanitizer.h"
#include "stream.h"

namespace torch_openreg {

namespace {

using Block = at::HostBlock<c10::Stream>;
using Base = at::CachingHostAllocatorImpl<c10::Stream, OwnedEvent, Block>;

struct RetiredStorages {
  std::mutex mutex;
  std::vector<c10::Storage> all;
};

RetiredStorages &retiredStorages() { return leaked<RetiredStorages>(); }

std::vector<c10::Storage> takeRetiredStorages() {
  std::lock_guard<std::mutex> lock(retiredStorages().mutex);
  return std::exchange(retiredStorages().all, {});
}

class PinnedMemory final : public Base {
 public:
  std::pair<void *, void *> allocate(size_t size) override {
    refuseInForkedChild();
    takeRetiredStorages().clear();
    giveBackRetired();
    const auto block = Base::allocate(size);
    if (sanitizerActive() && block.first != nullptr) {
      OPENREG_CHECK(orSanitizerHostBlock(block.first));  // may be a reused block
    }
    return block;
  }

  /* A deleter: runs on any thread, at exit, in a forked child. */
  void free(void *context) override {
    if (orInForkedChild()) return;
    if (sanitizerActive() && context != nullptr) forgetUses(*static_cast<Block *>(context));
    Base::free(context);
  }

  void empty_cache() override {
    refuseInForkedChild();
    takeRetiredStorages().clear();
    Base::empty_cache();
    giveBackRetired();
  }

  void copy_data(void *dest, const void *src, std::size_t count) const override {
    std::memcpy(dest, src, count);
  }

 private:
  /* The block is reused only after these uses. The reuse orders nothing else. */
  static void forgetUses(Block &block) {
    std::lock_guard<std::mutex> lock(block.mutex_);
    forgetUses(block, 0);
    for (const c10::Stream &stream : block.streams_) {
      forgetUses(block, OpenRegStream(stream).stream());
    }
  }

  static void forgetUses(const Block &block, orStream_t stream) {
    try {
      OPENREG_CHECK(orSanitizerUsed(block.ptr_, block.size_, stream));
    } catch (const c10::Error &) {  // as in record_stream
    }
  }

  void allocate_host_memory(size_t size, void **ptr) override {
    const orError_t error = orMallocHost(ptr, size);
    if (error != orErrorMemoryAllocation) return check(error, {__func__, __FILE__, __LINE__});
    empty_cache();
    OPENREG_CHECK(orMallocHost(ptr, size));
  }

  void free_block(Block *block) override { retire(block->ptr_); }

  void retire(void *ptr) {
    std::lock_guard<std::mutex> lock(retiredMutex_);
    retired_.push_back(ptr);
  }

  void giveBackRetired() {
    std::vector<void *> blocks;
    {
      std::lock_guard<std::mutex> lock(retiredMutex_);
      blocks.swap(retired_);
    }
    const OwnWait own;
    orError_t first = orSuccess;
    for (void *block : blocks) {
      const orError_t error = orFreeHost(block);
      if (error != orSuccess) retire(block);  // until the next time
      if (first == orSuccess) first = error;
    }
    OPENREG_CHECK(first);
  }

  /* Runs in a deleter. If a stream was destroyed or the process is ending, the block is kept. */
  void record_stream(std::optional<std::vector<OwnedEvent>> &events, c10::Stream stream) override {
    try {
      OwnedEvent event(stream.device_index(), orEventDisableTiming);
      OPENREG_CHECK(orEventRecord(event.get(), OpenRegStream(stream).stream()));
      events->push_back(std::move(event));
    } catch (const c10::Error &) {
    }
  }

  bool query_event(OwnedEvent &event) override {
    const OwnWait own;
    return queryEvent(event.get());
  }

  c10::Stream get_current_stream() const override { return getCurrentOpenRegStream(); }

  bool stream_is_capturing(c10::Stream) const override { return false; }

  std::mutex retiredMutex_;
  std::vector<void *> retired_;
};

void deletePinned(void *context);

using HostAllocator = at::CachingHostAllocatorInterface<PinnedMemory, deletePinned>;

/* A tensor may outlive every static object. */
HostAllocator *hostAllocator() { return &leaked<HostAllocator>(); }

void deletePinned(void *context) { hostAllocator()->free(context); }

REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, hostAllocator())

}  // namespace

c10::Allocator *getPinnedMemoryAllocator() { return hostAllocator(); }

void retirePinned(std::vector<c10::Storage> storages) {
  if (storages.empty()) return;
  RetiredStorages &retired = retiredStorages();
  std::lock_guard<std::mutex> lock(retired.mutex);
  std::move(storages.begin(), storages.end(), std::back_inserter(retired.all));
}

bool recordPinnedUse(void *data, void *context, c10::Stream stream) {
  return hostAllocator()->record_event(data, context, stream);
}

bool isPinned(const void *data) {
  auto attributes = sized<orPointerAttributes>();
  if (orPointerGetAttributes(&attributes, data) == orSuccess)
    return attributes.type == orMemoryTypeHost;
  orGetLastError();
  return false;
}

}  // namespace torch_openreg
