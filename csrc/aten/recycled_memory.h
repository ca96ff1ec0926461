/*
 * Reuses the memory of objects that one thread makes and another destroys, which is slow with
 * malloc.
 *
 * `dropped` has the memory of destroyed objects. A thread takes the whole list into its own
 * `taken_`, so that no pop races with a push. The list has at most kMost entries, because a thread
 * that ends returns its own, which other threads had to replace by new ones. `keeps` misses entries
 * that are added during a take.
 */
#pragma once

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstddef>
#include <new>
#include <utility>

#include "../torch/check.h"

namespace torch_openreg {

/* Memory for objects of one size. Each thread has one, as a thread_local. `Kept` is what a
 * destroyed object leaves behind until its memory is used again. */
template <typename Kept>
class RecycledMemory : Uncopyable {
 public:
  ~RecycledMemory() {
    while (Free *free = pop()) give(free);
  }

  void *take(size_t bytes) {
    if (taken_ == nullptr) {
      taken_ = dropped.exchange(nullptr, std::memory_order_acquire);
      keeps.store(0, std::memory_order_relaxed);
    }
    Free *free = pop();
    if (free == nullptr) {
      live.fetch_add(1, std::memory_order_relaxed);
      return ::operator new(bytes);
    }
    free->~Free();
    return free;
  }
  static void give(void *memory, Kept kept) { give(new (memory) Free{nullptr, std::move(kept)}); }
  static inline std::atomic<size_t> live{0};  // in use or kept

 private:
  struct Free {
    Free *next;
    Kept kept;
  };
  static constexpr size_t kMost = 1024;  // as many as wait in a stream
  static void give(Free *free) {
    if (C10_UNLIKELY(keeps.load(std::memory_order_relaxed) >= kMost)) {
      free->~Free();
      ::operator delete(free);
      live.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    keeps.fetch_add(1, std::memory_order_relaxed);
    free->next = dropped.load(std::memory_order_relaxed);
    while (!dropped.compare_exchange_weak(free->next, free, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
  }
  Free *pop() {
    Free *first = taken_;
    if (first == nullptr) return nullptr;
    taken_ = first->next;
    __builtin_prefetch(taken_);  // another thread wrote it
    return first;
  }
  static inline std::atomic<Free *> dropped{nullptr};
  static inline std::atomic<size_t> keeps{0};  // in the list
  Free *taken_ = nullptr;
};

}  // namespace torch_openreg
