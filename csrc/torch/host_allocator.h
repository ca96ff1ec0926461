/*
 * Pinned host memory: what tensor.pin_memory() and DataLoader(pin_memory=True) allocate from.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <vector>

#include "check.h"

namespace torch_openreg {

/* Caching: a block is handed out again once every stream noted for it has finished. */
OPENREG_EXPORT c10::Allocator *getPinnedMemoryAllocator();

/* Notes that work queued so far on `stream` uses the pinned block behind `data`, so that it is not
 * handed out again before that is done. `context` is its storage's DataPtr context, which counts
 * for slices too. False if the block is not one of getPinnedMemoryAllocator()'s. */
OPENREG_EXPORT bool recordPinnedUse(void *data, void *context, c10::Stream stream);

/* Lets go of storages of pinned memory, on any thread: of each the last holder may be an object of
 * Python's, which no worker ends. Whoever allocates pinned memory next, or empties its cache,
 * does. */
void retirePinned(std::vector<c10::Storage> storages);

/* Whether the address lies in pinned host memory. False for anything else and never an error. */
OPENREG_EXPORT bool isPinned(const void *data);

}  // namespace torch_openreg
