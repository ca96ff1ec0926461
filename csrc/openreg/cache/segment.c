/*
 * The caching allocator's segments: how memory is taken from the device and returned, its limit,
 * and what happens when it runs short.
 *
 * When memory is short, what is cached and idle returns to the device. If that is not enough, the
 * thread waits for queued work that uses the rest; then `shortage_hook` releases one private pool
 * after the other. Only then is it out of memory. `held` counts every byte of a segment from before
 * it is requested until after it is returned, so that threads that grow at the same time do not
 * pass the limit together. All fields are the cache's, under its lock (cache.h). Regions are made
 * and released, and the hook, which is atomic and set by any thread, is called, without it.
 */
#include <stdio.h>

#include "cache/cache.h"
#include "openreg_graph.h"
#include "openreg_package.h"

#define MIB ((size_t)1 << 20)

static const size_t small_segment = 2 * MIB;
static const size_t large_segment = 20 * MIB; /* for requests below large_limit */
static const size_t large_limit = 10 * MIB;
static const size_t large_rounding = 2 * MIB; /* from large_limit on */

/* ---- Memory from the device and back ---- */

/* True if no queued work can reach a free block. */
static inline bool isOver(const orBlock *block) {
  return block->reuse_from <= 1 || orCacheCompleted(block->owner->stream, block->reuse_from - 1);
}

enum { OR_BATCH = 64 };

typedef struct orBatch {
  void *segment[OR_BATCH];
  size_t bytes;
  int count;
} orBatch;

/* The idle list begins with the newest segment. The oldest goes back to the device first. */
static orBlock *oldestIdle(const orCache *cache) {
  orBlock *block = cache->blocks.idle;
  while (block && block->idle_next) block = block->idle_next;
  return block;
}

/* Takes up to `bytes` of segments that no queued work can reach off the cache. Lock held. */
static void collectIdle(orCache *cache, const orMemPool *mempool, size_t bytes, orBatch *batch) {
  batch->bytes = 0;
  batch->count = 0;
  for (orBlock *block = oldestIdle(cache), *newer;
       block && batch->count < OR_BATCH && batch->bytes < bytes; block = newer) {
    newer = block->idle_prev;
    if (block->owner->mempool != mempool || !isOver(block)) continue;
    batch->segment[batch->count++] = (void *)block->start;
    batch->bytes += block->size;
    orCacheNote(cache, orCacheActionSegmentFree, block->start, block->size, block->owner->stream,
                mempool);
    orBlocksRemoveSegment(&cache->blocks, block);
  }
}

/* Returns segments of `bytes` together, or all. Lock held, released meanwhile. */
static void releaseIdle(orCache *cache, const orMemPool *mempool, size_t bytes) {
  orBatch batch;
  for (; bytes; bytes -= batch.bytes < bytes ? batch.bytes : bytes) {
    collectIdle(cache, mempool, bytes, &batch);
    if (!batch.count) return;
    atomic_fetch_add(&cache->releasing, 1);
    orCacheUnlock(cache);
    for (int i = 0; i < batch.count; i++) orRegionRelease(batch.segment[i]);
    orCacheLock(cache);
    cache->held -= batch.bytes;
    if (atomic_fetch_sub(&cache->releasing, 1) == 1) orFutexWake(&cache->releasing, INT32_MAX);
  }
}

/* As above for the whole cache; also waits for what other threads are returning, unless the process
 * exits. Lock held, released meanwhile. */
static void releaseAll(orCache *cache, const orMemPool *mempool) {
  releaseIdle(cache, mempool, SIZE_MAX);
  for (uint32_t n; (n = atomic_load(&cache->releasing)) && !orProcessExiting();) {
    orCacheUnlock(cache);
    void *token = orBlockEnter();
    orFutexWait(&cache->releasing, n, 0);
    orBlockLeave(token);
    orCacheLock(cache);
  }
}

/* Returns segments that have been idle for long before a new one is made. */
static void collectGarbage(const orRequest *r) {
  orCache *cache = r->cache;
  size_t capacity = orDeviceAt(r->device)->desc.memory_limit;
  orCacheLock(cache);
  double threshold = cache->options.garbage_collection_threshold;
  if (threshold > 0) {
    size_t allowed = cache->allowed < capacity ? cache->allowed : capacity;
    size_t goal = (size_t)(threshold * (double)allowed);
    if (cache->held > goal) releaseIdle(cache, NULL, cache->held - goal);
  }
  orCacheUnlock(cache);
}

/* A task that must finish before a pending-free block or an idle segment can be returned. Lock
 * held. */
static bool nextWait(const orCache *cache, const orMemPool *mempool, orStream_t *stream,
                     uint64_t *number) {
  const orBlockStream *s = cache->blocks.waiting;
  if (s) { /* also if it has finished since the last poll */
    *stream = s->stream;
    *number = s->last->number;
    return true;
  }
  for (const orBlock *block = cache->blocks.idle; block; block = block->idle_next) {
    if (block->owner->mempool != mempool || isOver(block)) continue;
    *stream = block->owner->stream;
    *number = block->reuse_from - 1;
    return true;
  }
  return false;
}

/* Sleeps until no queued work uses what is free now, or fails as orHostAwait. Lock held, released
 * meanwhile. The number of waits is bounded, whatever other threads free in the meantime. */
static orError_t awaitAll(orCache *cache, const orMemPool *mempool) {
  orStream_t stream;
  uint64_t number;
  cache->blocks.stats.sync_all_streams++;
  orCachePoll(cache);
  /* The end of each released pool waits too, for any stream. */
  size_t left =
      cache->blocks.count + atomic_load_explicit(&orStreamTable.used, memory_order_relaxed);
  orError_t error = orSuccess;
  for (; left && !error && nextWait(cache, mempool, &stream, &number); left--) {
    orCacheUnlock(cache);
    error = orCacheAwait(stream, number);
    orCacheLock(cache);
    orCachePoll(cache);
  }
  return error;
}

static void uncharge(orCache *cache, size_t size) {
  orCacheLock(cache);
  cache->held -= size;
  orCacheUnlock(cache);
}

/* Allocates a region within the cache's limit. */
static orError_t reserve(const orRequest *r, size_t size, void **base) {
  orCache *cache = r->cache;
  size_t capacity = orDeviceAt(r->device)->desc.memory_limit;
  orCacheLock(cache);
  bool fits =
      size <= capacity && cache->held < cache->allowed && size <= cache->allowed - cache->held;
  if (fits) cache->held += size;
  orCacheUnlock(cache);
  if (!fits)
    return orFail(orErrorMemoryAllocation, "%s:%d: past the memory fraction or the capacity",
                  orDevicesName(), r->device);
  orError_t error = orMemoryAllocate(r->device, size, true, base);
  if (error) uncharge(cache, size);
  return error;
}

static size_t segmentSize(const orRequest *r) {
  if (r->pool == OR_POOL_SMALL) return small_segment;
  if (r->size >= large_limit) return orRoundUp(r->size, large_rounding);
  orCacheLock(r->cache);
  size_t size = r->cache->options.large_segment_size;
  orCacheUnlock(r->cache);
  return size ? size : large_segment;
}

/* Allocates a segment of the usual size, or of just the requested one if that does not fit. */
static orError_t allocateSegment(const orRequest *r, void **base, size_t *size) {
  size_t exact = orWholePages(r->size);
  *size = segmentSize(r);
  orError_t error = reserve(r, *size, base);
  if (error != orErrorMemoryAllocation || exact == *size) return error;
  *size = exact;
  return reserve(r, exact, base);
}

/* Takes a block from a new segment. No lock held. */
static orError_t grow(orRequest *r, void **ptr) {
  void *base;
  size_t size;
  OR_TRY(allocateSegment(r, &base, &size));
  orCache *cache = r->cache;
  orBlock *block = NULL;
  orCacheLock(cache);
  if (orBlocksReserve(&cache->blocks, 2))
    block =
        orBlocksAddSegment(&cache->blocks, r->stream, r->mempool, (uintptr_t)base, size, r->pool);
  if (block) {
    orCacheWidenRange(cache, (uintptr_t)base, (uintptr_t)base + size);
    orCacheNote(cache, orCacheActionSegmentAlloc, block->start, size, r->stream, r->mempool);
    r->fresh = orBlocksTake(&cache->blocks, block, r->size, r->bytes, r->origin);
    orCacheNote(cache, orCacheActionAlloc, block->start, r->bytes, r->stream, r->mempool);
  }
  orCacheUnlock(cache);
  if (block) {
    *ptr = base;
    return orSuccess;
  }
  orRegionRelease(base);
  uncharge(cache, size);
  return orFail(orErrorSystem, "no host memory for the caching allocator's tables");
}

static const char *bytesText(char text[32], size_t bytes) {
  static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    snprintf(text, 32, "%zu bytes", bytes);
    return text;
  }
  int unit = 0;
  double value = (double)bytes / 1024;
  for (; value >= 1024 && unit < 5; unit++) value /= 1024;
  snprintf(text, 32, "%.2f %s", value, units[unit]);
  return text;
}

/* The memory fraction's limit, if there is one. */
static const char *allowedText(char text[64], size_t allowed) {
  char bytes[32];
  text[0] = 0;
  if (allowed != SIZE_MAX)
    snprintf(text, 64, " (%s allowed by the memory fraction)", bytesText(bytes, allowed));
  return text;
}

static orError_t refuseMemory(const orRequest *r) {
  char asked[32], unused[32], total[32], allocated[32], reserved[32], allowed[64];
  orCacheStats stats;
  orCacheLock(r->cache);
  r->cache->blocks.stats.ooms++;
  orCacheNote(r->cache, orCacheActionOutOfMemory, 0, r->bytes, r->stream, r->mempool);
  orBlocksStats(&r->cache->blocks, &stats);
  allowedText(allowed, r->cache->allowed);
  orCacheUnlock(r->cache);
  size_t capacity = orDeviceAt(r->device)->desc.memory_limit;
  return orFail(orErrorMemoryAllocation,
                "%s:%d is out of memory: tried to allocate %s; %s is free of a capacity of "
                "%s%s, %s is allocated and %s reserved by the caching allocator%s%s%s",
                orDevicesName(), r->device, bytesText(asked, r->bytes),
                bytesText(unused, capacity - orRegionUsed(r->device)), bytesText(total, capacity),
                allowed, bytesText(allocated, (size_t)stats.allocated_bytes[0].current),
                bytesText(reserved, (size_t)stats.reserved_bytes[0].current),
                r->refused ? " (" : "", r->refused ? r->refused : "", r->refused ? ")" : "");
}

static _Atomic(int (*)(int device)) shortage_hook;

orError_t orSetShortageHook(int (*hook)(int device)) {
  OR_TRY(orEnter());
  atomic_store_explicit(&shortage_hook, hook, memory_order_release);
  return orSuccess;
}

/* No pools are released for a request that a tool refuses. */
static bool poolsWereLetGo(const orRequest *r) {
  int (*hook)(int) = atomic_load_explicit(&shortage_hook, memory_order_acquire);
  return hook && !r->refused && hook(r->device);
}

/* When memory is short: returns what is cached, then what queued work still uses, then pools that
 * their owners can do without, which end when queued work has. A task does not wait, as others may
 * wait for it; neither does a request larger than the device. */
static orError_t reclaim(orRequest *r, void **ptr) {
  orCache *cache = r->cache;
  bool fits = r->bytes <= orDeviceAt(r->device)->desc.memory_limit;
  orCacheLock(cache);
  cache->blocks.stats.alloc_retries++;
  orBlocksSetRetired(&cache->blocks, false);
  orCacheUnlock(cache);
  orIpcSweep(SIZE_MAX);
  orCacheLock(cache);
  for (bool waited = false;; waited = true) {
    orCachePoll(cache);
    bool found = !r->refused && orCacheTake(r, ptr);
    if (!found) releaseAll(cache, NULL);
    orCacheUnlock(cache);
    if (found) return orSuccess;
    orError_t error = r->refused || !fits ? orErrorMemoryAllocation : grow(r, ptr);
    if (error != orErrorMemoryAllocation) return error;
    if (!fits || orProcessTask() != OR_TASK_NONE) return refuseMemory(r);
    if (waited && !poolsWereLetGo(r)) return refuseMemory(r);
    orCacheLock(cache);
    error = awaitAll(cache, NULL);
    if (!error) continue;
    orCacheUnlock(cache);
    return error;
  }
}

/* A failure on the way to a success is not left as the last error. */
orError_t orCacheAllocateSlow(orRequest *r, void **ptr) {
  orError_t before = orPeekAtLastError();
  if (OR_UNLIKELY(r->refused != NULL)) return reclaim(r, ptr);
  if (!r->size) return refuseMemory(r);
  if (r->bytes > orDeviceAt(r->device)->desc.memory_limit) return reclaim(r, ptr);
  collectGarbage(r);
  orError_t error = grow(r, ptr);
  if (error == orErrorMemoryAllocation) error = reclaim(r, ptr);
  if (!error && !before) orGetLastError();
  return error;
}

/* ---- Public ---- */

/* After a reset: returns what no queued work can reach. It does not wait, as another device's work
 * may never end. */
static void onReset(orProbe *p) {
  orCache *cache = &orCaches[p->device];
  orCacheLock(cache);
  orCachePoll(cache);
  releaseAll(cache, NULL);
  orCacheUnlock(cache);
}

static orTool tool = {.on = {[OR_PROBE_IS_RESET] = onReset}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

orError_t orCacheGiveBack(orCache *cache, const orMemPool *mempool) {
  orCacheLock(cache);
  orError_t error = awaitAll(cache, mempool);
  releaseAll(cache, mempool);
  orCacheUnlock(cache);
  return error;
}

orError_t orCacheEmpty(int device) {
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  orIpcSweep(SIZE_MAX);
  return orCacheGiveBack(&orCaches[device], NULL);
}

orError_t orCacheSetFraction(int device, double fraction) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  if (!(fraction >= 0 && fraction <= 1))
    return orFail(orErrorInvalidValue, "memory fraction %g is out of range: 0 to 1", fraction);
  size_t capacity = orDeviceAt(device)->desc.memory_limit;
  orCache *cache = &orCaches[device];
  orCacheLock(cache);
  cache->fraction = fraction;
  cache->allowed = fraction < 1 ? (size_t)(fraction * (double)capacity) : SIZE_MAX;
  orCacheUnlock(cache);
  return orSuccess;
}

orError_t orCacheGetFraction(double *fraction, int device) {
  OR_TRY(orEnter());
  if (!fraction) return orFail(orErrorInvalidValue, "orCacheGetFraction: null result");
  OR_TRY(orDeviceCheck(device));
  orCacheLock(&orCaches[device]);
  *fraction = orCaches[device].fraction;
  orCacheUnlock(&orCaches[device]);
  return orSuccess;
}

static orError_t checkOptions(const orCacheOptions *options) {
  double threshold = options->garbage_collection_threshold;
  if (!(threshold >= 0 && threshold < 1))
    return orFail(orErrorInvalidValue,
                  "garbage_collection_threshold is %g; allowed is 0 to below 1", threshold);
  size_t split = options->max_split_size, segment = options->large_segment_size;
  if (split && split < large_segment)
    return orFail(orErrorInvalidValue, "max_split_size is %zu; allowed are 0 and %zu or more",
                  split, large_segment);
  if (segment && (segment < large_segment || segment % orPageSize()))
    return orFail(orErrorInvalidValue,
                  "large_segment_size is %zu; allowed are 0 and whole pages of %zu or more",
                  segment, large_segment);
  return orSuccess;
}

orError_t orCacheSetOptions(const orCacheOptions *given) {
  orCacheOptions room;
  OR_TRY(orEnter());
  const orCacheOptions *options = OR_VERSIONED(orCacheOptions, given, &room, size);
  if (!options) return orErrorInvalidValue;
  OR_TRY(checkOptions(options));
  bool round = false;
  for (int i = 0; i < 16; i++) round |= options->roundup_power2_divisions[i] > 1;
  for (int device = 0; device < OPENREG_MAX_DEVICES; device++) {
    orCache *cache = &orCaches[device];
    orCacheLock(cache);
    cache->options = *options;
    cache->round = round;
    orBlocksSetMaxSplit(&cache->blocks,
                        options->max_split_size ? options->max_split_size : SIZE_MAX);
    orCacheUnlock(cache);
  }
  return orSuccess;
}
