/*
 * `History` is one leaked object. `mutex` guards its containers and is held for a few operations on
 * them, never during a request for Python's lock; threads that hold Python's lock take it too. The
 * thread inside a HistoryScope owns the scope's State.
 *
 * Records of one device reach the hook out of order when several threads allocate (the core numbers
 * them under its lock). So only a record with a later number replaces or removes an address's
 * stack, and a device's records are sorted when they are read.
 */
#include <Python.h>

#include "memory_history.h"

#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

#include "gil.h"

namespace torch_openreg {

std::atomic<bool> HistoryScope::enabled{false};

struct HistoryScope::State {
  Stack stack;
  State *outer;
};

struct History {
  struct Origin {
    Stack stack;
    uint64_t sequence;
  };
  using Origins = std::unordered_map<const void *, Origin>;

  std::mutex mutex;
  HistoryOptions options;
  std::array<std::vector<HistoryEntry>, OPENREG_MAX_DEVICES> entries;
  std::array<size_t, OPENREG_MAX_DEVICES> next{};  // the oldest entry, once all are in use
  Origins blocks, segments;
  std::shared_ptr<const std::string> metadata;

  // What a scope reads before it may take a lock.
  std::atomic<HistoryStacks> stacks{HistoryStacks::None};
  std::atomic<bool> cpp{false};

  thread_local static HistoryScope::State *current;

  void configure(const std::optional<HistoryOptions> &given, bool clear);
  void note(const orCacheRecord &record);
  Stack follow(const orCacheRecord &record, const Stack &here);
  void keep(const orCacheRecord &record, Stack stack);
};

thread_local HistoryScope::State *History::current = nullptr;

namespace {

History &history() { return leaked<History>(); }

void noteRecord(const orCacheRecord *record) {
  try {
    history().note(*record);
  } catch (const std::bad_alloc &) {  // the history has a gap
  }
}

void setOrigin(History::Origins &origins, const orCacheRecord &record, const Stack &stack) {
  History::Origin &origin = origins[record.address];
  if (origin.sequence < record.sequence) origin = {stack, record.sequence};
}

/* The record that ends a life removes its stack, unless a later life has begun. */
Stack endOrigin(History::Origins &origins, const orCacheRecord &record, bool remove) {
  const auto found = origins.find(record.address);
  if (found == origins.end() || found->second.sequence > record.sequence) return nullptr;
  Stack stack = found->second.stack;
  if (remove) origins.erase(found);
  return stack;
}

/* Requires the lock. */
Stack findOrigin(const History::Origins &origins, const void *address) {
  const auto found = origins.find(address);
  return found == origins.end() ? nullptr : found->second.stack;
}

}  // namespace

void History::configure(const std::optional<HistoryOptions> &given, bool clear) {
  // Dropped entries are destroyed after the lock is released: there may be many.
  std::array<std::vector<HistoryEntry>, OPENREG_MAX_DEVICES> dropped;
  Origins noBlocks, noSegments;
  std::lock_guard<std::mutex> lock(mutex);
  if (given) options = *given;
  for (size_t device = 0; device < entries.size(); ++device) {
    // A ring of another size starts with the remaining entries of the old one, oldest first.
    auto &ring = entries[device];
    std::rotate(ring.begin(), ring.begin() + static_cast<ptrdiff_t>(next[device]), ring.end());
    next[device] = 0;
    if (!given || clear || !options.trace) ring.swap(dropped[device]);
    if (ring.size() > options.max_entries)
      ring.erase(ring.begin(), ring.end() - static_cast<ptrdiff_t>(options.max_entries));
  }
  if (!given) {
    blocks.swap(noBlocks);
    segments.swap(noSegments);
  }
  stacks.store(given ? given->stacks : HistoryStacks::None, std::memory_order_relaxed);
  cpp.store(given && given->cpp, std::memory_order_relaxed);
}

/* Keeps the stacks of live blocks; returns the stack that the record shows. */
Stack History::follow(const orCacheRecord &record, const Stack &here) {
  switch (record.action) {
    case orCacheActionAlloc:
      setOrigin(blocks, record, here);
      return here;
    case orCacheActionSegmentAlloc:
      setOrigin(segments, record, here);
      return here;
    case orCacheActionFreeRequested:
    case orCacheActionFreeCompleted:
    case orCacheActionSegmentFree: {
      const Stack origin = endOrigin(record.action == orCacheActionSegmentFree ? segments : blocks,
                                     record, record.action != orCacheActionFreeRequested);
      return options.stacks == HistoryStacks::All && here ? here : origin;
    }
    default:
      return here;
  }
}

void History::keep(const orCacheRecord &record, Stack stack) {
  auto &ring = entries[static_cast<size_t>(record.device)];
  size_t &at = next[static_cast<size_t>(record.device)];
  HistoryEntry entry{record, poolId(record.pool), std::move(stack), metadata};
  if (ring.size() < options.max_entries) {
    ring.push_back(std::move(entry));
  } else if (!ring.empty()) {
    ring[at] = std::move(entry);
    at = (at + 1) % ring.size();
  }
}

void History::note(const orCacheRecord &record) {
  const Stack here = current != nullptr ? current->stack : nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (!HistoryScope::enabled.load(std::memory_order_relaxed)) return;
  Stack stack = follow(record, here);
  if (!options.trace || (options.skipped >> record.action & 1) != 0) return;
  if (options.stacks < HistoryStacks::Allocations) stack = nullptr;
  keep(record, std::move(stack));
}

void HistoryScope::enter(Reason reason) noexcept {
  if (orInForkedChild()) return;  // another thread's locks may be held for ever
  const History &all = history();
  const HistoryStacks wanted = all.stacks.load(std::memory_order_relaxed);
  const bool gathers = wanted >= (reason == Free ? HistoryStacks::All : HistoryStacks::Live);
  // Code that runs inside the gathering (Python's garbage collection) has its own scope, or none.
  try {
    Stack stack;
    if (gathers) {
      // This waits for Python's lock, which PyTorch releases before it frees a tensor's memory.
      const bool python = mayBeInPython();
      const bool cpp = all.cpp.load(std::memory_order_relaxed);
      // TorchScript also runs on its own threads.
      if (python || cpp || !torch::jit::currentCallstack().empty())
        stack = torch::CapturedTraceback::gather(python, /*script=*/true, cpp);
    }
    state_ = new State{std::move(stack), History::current};
    History::current = state_;
  } catch (...) {  // an action without a stack
  }
}

void HistoryScope::leave() noexcept {
  History::current = state_->outer;
  delete state_;
}

void recordMemoryHistory(const std::optional<HistoryOptions> &options, bool clear) {
  if (!options) {
    HistoryScope::enabled.store(false, std::memory_order_relaxed);
    OPENREG_CHECK(orSetCacheHook(nullptr));
  }
  history().configure(options, clear);
  if (options) {
    HistoryScope::enabled.store(true, std::memory_order_relaxed);
    OPENREG_CHECK(orSetCacheHook(noteRecord));
  }
}

void setMemoryMetadata(std::string metadata) {
  auto shared = metadata.empty() ? nullptr : std::make_shared<const std::string>(metadata);
  std::lock_guard<std::mutex> lock(history().mutex);
  history().metadata = std::move(shared);
}

std::string memoryMetadata() {
  std::lock_guard<std::mutex> lock(history().mutex);
  return history().metadata ? *history().metadata : std::string();
}

std::vector<HistoryEntry> memoryHistory(c10::DeviceIndex device) {
  std::vector<HistoryEntry> all;
  {
    std::lock_guard<std::mutex> lock(history().mutex);
    all = history().entries[static_cast<size_t>(device)];
  }
  std::sort(all.begin(), all.end(), [](const HistoryEntry &a, const HistoryEntry &b) {
    return a.record.sequence < b.record.sequence;
  });
  return all;
}

Stack stackOfBlock(const void *address) {
  std::lock_guard<std::mutex> lock(history().mutex);
  return findOrigin(history().blocks, address);
}

Stack stackOfSegment(const void *address, bool in_use) {
  std::lock_guard<std::mutex> lock(history().mutex);
  if (!in_use && history().options.stacks == HistoryStacks::Live) return nullptr;
  return findOrigin(history().segments, address);
}

}  // namespace torch_openreg
