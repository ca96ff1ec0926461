/*
 * Private pools: how long one is held, and what becomes of its memory afterwards.
 *
 *       create           release          what was queued then has finished
 *    ------------> HELD ------------> ENDING ---------------------------------> gone
 *
 * A pool is one more key, beside the stream, of the owners of segments (block.c). Its blocks are
 * cut, merged and handed out as others are, to requests for the pool alone. While it is held its
 * memory stays. After the release only launched work may use it, on any stream, as a graph's
 * last replay may still run. The pool's `end`, a block without memory, is therefore pending free
 * until each stream of the device has finished what it was given by then. Then all memory of the
 * pool becomes the device's own.
 *
 * All but `slot` and `captured` is under the lock of the device's cache. A slot is recycled when
 * the pool is gone. If the host has no memory for the uses of `end`, or for an owner, the pool is
 * put into the cache's list `postponed`, and ends when the cache is next polled.
 */
#include <inttypes.h>
#include <string.h>

#include "cache/cache.h"

enum { OR_MOST_MEM_POOLS = 1 << 16 };

static orHandleTable table = {
    .kind = OR_HANDLE_MEM_POOL,
    .what = "memory pool",
    .slot_size = (sizeof(orMemPool) + OR_CACHE_LINE - 1) & ~(OR_CACHE_LINE - 1),
    .limit = OR_MOST_MEM_POOLS,
    .walked = true,
    .lock = OR_MUTEX_INITIALIZER(OR_RANK_HANDLES)};

/* Returns the pool, with the lock of its cache held. */
static orError_t lockPool(orMemPool_t pool, orMemPool **mempool) {
  *mempool = orHandleFind(&table, pool);
  if (!*mempool) return orErrorInvalidResourceHandle;
  orCache *cache = &orCaches[orHandleDevice(pool)];
  orCacheLock(cache);
  if (OR_LIKELY(orHandleIs(&(*mempool)->slot, pool))) return orSuccess;
  orCacheUnlock(cache);
  return orHandleRefuse(&table, pool);
}

static orCache *cacheOf(const orMemPool *mempool) {
  return &orCaches[orHandleDevice(mempool->handle)];
}

/* ---- The end ---- */

static void reportOver(const orBlock *block) {
  OR_PROBE(OR_PROBE_RANGE_OVER, .dst = (const void *)block->start, .bytes = block->size);
}

static void reportNothing(const orBlock *block) { (void)block; }

static void postpone(orCache *cache, orMemPool *mempool) {
  mempool->postponed = cache->postponed;
  cache->postponed = mempool;
}

/* A graph's ranges are reported as over here, as their frees were not. */
void orMemPoolEnd(orCache *cache, orBlock *end) {
  orMemPool *mempool = (orMemPool *)((char *)end - offsetof(orMemPool, end));
  bool graphs = orMemPoolIsGraphs(mempool);
  if (orBlocksDissolve(&cache->blocks, mempool, graphs ? reportOver : reportNothing))
    orHandleRecycle(&table, &mempool->slot);
  else
    postpone(cache, mempool);
}

typedef struct orEnding {
  orMemPool *mempool;
  bool complete;
} orEnding;

/* If the slot is another stream's by now, the one with the work has finished it. */
static void addUse(orStream *s, uint64_t queued, void *context) {
  orEnding *e = context;
  orBlocks *blocks = &cacheOf(e->mempool)->blocks;
  (void)queued;
  e->complete &= orBlocksAddUse(blocks, &e->mempool->end, orStreamHandleOf(s));
}

/* Lock held. */
static void end(orCache *cache, orMemPool *mempool) {
  orEnding e = {.mempool = mempool, .complete = true};
  orStreamForEach(orCacheDevice(cache), addUse, &e);
  if (!e.complete) {
    postpone(cache, mempool);
    return;
  }
  orBlockUse *use = mempool->end.uses;
  mempool->end.uses = NULL;
  if (use)
    orCacheQueueUses(cache, use);
  else
    orMemPoolEnd(cache, &mempool->end);
}

void orMemPoolsEndPostponed(orCache *cache) {
  orMemPool *mempool = cache->postponed;
  cache->postponed = NULL;
  for (orMemPool *next; mempool; mempool = next) {
    next = mempool->postponed;
    end(cache, mempool);
  }
}

/* Called with the lock held when the pool is released or a call on it ends. */
static void endIfUnused(orCache *cache, orMemPool *mempool) {
  if (!mempool->held && !mempool->users) end(cache, mempool);
}

orError_t orMemPoolHold(orMemPool_t pool, orStream_t stream, orMemPool **held) {
  int device = orHandleDevice(pool), wanted = orHandleDevice(stream);
  OR_TRY(lockPool(pool, held));
  if (device == wanted) {
    (*held)->users++;
    if (orStreamCaptures(stream))
      atomic_store_explicit(&(*held)->captured, true, memory_order_relaxed);
  }
  orCacheUnlock(&orCaches[device]);
  if (device == wanted) return orSuccess;
  return orFail(orErrorInvalidValue,
                "memory pool 0x%" PRIx64 " belongs to device %d but stream 0x%" PRIx64
                " to device %d",
                pool, device, stream, wanted);
}

void orMemPoolLetGo(orMemPool *mempool) {
  orCache *cache = cacheOf(mempool);
  orCacheLock(cache);
  mempool->users--;
  endIfUnused(cache, mempool);
  orCacheUnlock(cache);
}

void orMemPoolsForEach(orCache *cache, void (*fn)(orCacheStat *reserved_bytes)) {
  uint32_t i = 0;
  for (orMemPool *mempool; (mempool = orHandleNext(&table, &i));) {
    uint64_t handle = atomic_load_explicit(&mempool->slot.handle, memory_order_acquire);
    if (handle && orHandleDevice(handle) == orCacheDevice(cache)) fn(mempool->reserved_bytes);
  }
}

/* ---- Public ---- */

orError_t orMemPoolCreate(orMemPool_t *pool, int device) {
  void *slot;
  uint64_t handle;
  OR_TRY(orEnter());
  if (!pool) return orFail(orErrorInvalidValue, "orMemPoolCreate: null result");
  *pool = 0;
  OR_TRY(orDeviceCheck(device));
  OR_TRY(orHandleReserve(&table, device, &slot, &handle));
  orMemPool *mempool = slot;
  orCacheLock(&orCaches[device]);
  mempool->handle = handle;
  mempool->held = true;
  OR_ASSERT(mempool->users, ==, 0);
  atomic_store_explicit(&mempool->captured, false, memory_order_relaxed);
  for (int i = 0; i <= OR_POOL_COUNT; i++) mempool->reserved_bytes[i] = (orCacheStat){0};
  mempool->end = (orBlock){.state = OR_BLOCK_PENDING_FREE};
  orHandlePublish(&mempool->slot, handle);
  orCacheUnlock(&orCaches[device]);
  *pool = handle;
  return orSuccess;
}

orError_t orMemPoolRelease(orMemPool_t pool) {
  orMemPool *mempool;
  OR_TRY(orEnter());
  OR_TRY(lockPool(pool, &mempool));
  orCache *cache = cacheOf(mempool);
  mempool->held = false;
  orHandleInvalidate(&mempool->slot);
  endIfUnused(cache, mempool);
  orCacheUnlock(cache);
  return orSuccess;
}

orError_t orCacheEmptyPool(orMemPool_t pool) {
  orMemPool *mempool;
  OR_TRY(orEnterBlocking());
  OR_TRY(lockPool(pool, &mempool));
  mempool->users++;
  orCacheUnlock(cacheOf(mempool));
  orError_t error = orMemPoolIsGraphs(mempool) ? orStreamsAwait(orHandleDevice(pool)) : orSuccess;
  if (!error) error = orCacheGiveBack(cacheOf(mempool), mempool);
  orMemPoolLetGo(mempool);
  return error;
}

orError_t orMemPoolGetStats(orMemPoolStats *stats, orMemPool_t pool) {
  orMemPool *mempool;
  OR_TRY(orEnter());
  if (!stats) return orFail(orErrorInvalidValue, "orMemPoolGetStats: null result");
  OR_TRY(lockPool(pool, &mempool));
  orMemPoolStats from;
  memcpy(from.reserved_bytes, mempool->reserved_bytes, sizeof from.reserved_bytes);
  orCacheUnlock(cacheOf(mempool));
  orStatComplete(from.reserved_bytes);
  return OR_FILL(orMemPoolStats, stats, &from, reserved_bytes);
}
