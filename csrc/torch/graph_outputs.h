/*
 * The outputs of graphed callables. All calls of one return the same memory, so a tensor of an
 * earlier call shows the values of the latest. While the sanitizer is on, the tensors of each call
 * have a storage of their own over that memory, and a read through an earlier one is reported. A
 * backward pass of an earlier call, which reads what the latest has saved, is reported as well.
 */
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>

namespace torch_openreg {

/* The number of such storages. */
extern std::atomic<int> graphOutputs;

/* Called when the calling thread is about to queue a read of the storage. */
void noteOutputRead(const c10::StorageImpl *storage);

inline void readsStorage(const c10::StorageImpl *storage) {
  if (C10_UNLIKELY(graphOutputs.load(std::memory_order_relaxed) != 0)) noteOutputRead(storage);
}

}  // namespace torch_openreg
