/*
 * Pinned host memory, for tensor.pin_memory() and DataLoader(pin_memory=True).
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <vector>

#include "check.h"

namespace torch_openreg {

/* A caching allocator: it reuses a block once every stream recorded for it has finished. */
OPENREG_EXPORT c10::Allocator *getPinnedMemoryAllocator();

/* Records that work queued so far on `stream` uses the pinned block behind `data`, so that the
 * block is not reused before that work is done. `context` is the DataPtr context of its storage,
 * which covers slices too. Returns false if the block is not from getPinnedMemoryAllocator(). */
OPENREG_EXPORT bool recordPinnedUse(void *data, void *context, c10::Stream stream);

/* Releases storages of pinned memory, on any thread. A storage's last holder may be a Python
 * object, which a worker must not destroy. So the next thread that allocates pinned memory, or
 * empties its cache, destroys them. */
void retirePinned(std::vector<c10::Storage> storages);

/* Whether the address lies in pinned host memory. Never fails: any other address is false. */
OPENREG_EXPORT bool isPinned(const void *data);

}  // namespace torch_openreg
