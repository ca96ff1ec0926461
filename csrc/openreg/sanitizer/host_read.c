/*
 * orSanitizerPeek: reads device memory without waiting, if all work that was to write it happens
 * before the calling thread.
 *
 * `pending` is what was queued before the sanitizer was enabled, which the clocks do not cover. All
 * under orSanitizerMutex.
 */
#include <string.h>

#include "sanitizer/private.h"

typedef struct orPending {
  orStream *slot;
  uint64_t queued;
} orPending;

static orPending *pending;
static size_t pending_count, pending_room;

static void addPending(orStream *slot, uint64_t queued, void *context) {
  (void)context;
  orMutexLock(&orSanitizerMutex);
  if (pending_count == pending_room) {
    pending_room = pending_room ? pending_room * 2 : 16;
    pending = orSanitizerResize(pending, pending_room * sizeof *pending);
  }
  pending[pending_count++] = (orPending){slot, queued};
  orMutexUnlock(&orSanitizerMutex);
}

/* Lock held, for this and the next one. */
static bool isPending(void) {
  while (pending_count &&
         atomic_load_explicit(&pending[pending_count - 1].slot->completed, memory_order_acquire) >=
             pending[pending_count - 1].queued)
    pending_count--;
  return pending_count;
}

orError_t orSanitizerPeek(void *to, const void *from, size_t bytes) {
  orRegion region;
  void *mapped;
  OR_TRY(orEnter());
  if (!to || !orRegionFind(from, &region) || region.type != orMemoryTypeDevice ||
      bytes > region.size - (size_t)((const char *)from - (const char *)region.base))
    return orFail(orErrorInvalidValue, "orSanitizerPeek: [%p, +%zu) is not in device memory", from,
                  bytes);
  orDevice *d = orDeviceAt(region.device);
  if (!d->can_map)
    return orFail(orErrorNotSupported, "device %d has no mapped memory", region.device);
  orThreadsIdentify();
  orMutexLock(&orSanitizerMutex);
  bool known = orSanitizerIsOn() && !isPending() &&
               !orShadowIsWritten((uintptr_t)from, (uintptr_t)from + bytes);
  orMutexUnlock(&orSanitizerMutex);
  if (!known) return orErrorNotReady;
  OR_TRY(orDeviceMap(d, from, bytes, &mapped));
  memcpy(to, mapped, bytes);
  return orSuccess;
}

void orPeekBegin(void) { orStreamForEach(-1, addPending, NULL); }

void orPeekForget(void) { pending_count = 0; }
