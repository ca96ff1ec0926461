/*
 * The history of device memory, for PyTorch's memory viewer: what the allocator did, and the stack
 * that requested it. The core reports what happened (orSetCacheHook); stacks are kept here.
 *
 * A stack is gathered before the core is called, because that may take Python's lock; the hook
 * finds it on the same thread. With the history off, a HistoryScope is one relaxed load.
 */
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mempool.h"

namespace torch_openreg {

/* The level from which on stacks are gathered. */
enum class HistoryStacks : uint8_t { None, Live, Allocations, All };

struct HistoryOptions {
  bool trace = true; /* keep actions, not only the stacks of live blocks */
  HistoryStacks stacks = HistoryStacks::All;
  bool cpp = true; /* C++ frames too */
  uint64_t max_entries = UINT64_MAX;
  uint32_t skipped = 0; /* bit a: actions `a` of orCacheAction are not kept */
};

/* Null switches the history off and deletes it. `clear` deletes what was kept until now. */
void recordMemoryHistory(const std::optional<HistoryOptions> &options, bool clear);

/* Added to each action from now on. */
void setMemoryMetadata(std::string metadata);
std::string memoryMetadata();

using Stack = std::shared_ptr<c10::GatheredContext>;

struct HistoryEntry {
  orCacheRecord record;
  c10::MempoolId_t pool; /* its id at the time */
  Stack stack;
  std::shared_ptr<const std::string> metadata; /* may be null */
};
/* A device's kept actions, in order. */
std::vector<HistoryEntry> memoryHistory(c10::DeviceIndex device);
/* The stack of the allocation at a block's or a segment's start; null if none was gathered. Where
 * stacks of live blocks alone are kept, a segment has one while a block in it is in use. */
Stack stackOfBlock(const void *address);
Stack stackOfSegment(const void *address, bool in_use);

/* Surrounds a call of the core that may allocate or free: its records carry this thread's stack. */
class HistoryScope : Uncopyable {
 public:
  enum Reason { Allocation, Free };
  explicit HistoryScope(Reason reason) {
    if (C10_UNLIKELY(enabled.load(std::memory_order_relaxed))) enter(reason);
  }
  ~HistoryScope() {
    if (C10_UNLIKELY(state_ != nullptr)) leave();
  }

  static std::atomic<bool> enabled;

 private:
  struct State;
  friend struct History;
  void enter(Reason reason) noexcept;
  void leave() noexcept;
  State *state_ = nullptr;
};

}  // namespace torch_openreg
