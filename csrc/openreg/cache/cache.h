/*
 * What the files of the caching allocator share: cache.c (when a block may be used again),
 * segment.c (memory from the device and back), history.c (what happened). cache.c's head has the
 * rules.
 */
#ifndef OPENREG_CACHE_H
#define OPENREG_CACHE_H

#include "cache/block.h"

enum { OR_POISON = 0xFF }; /* all ones is a NaN in every floating-point type */

/* Actions of one stretch under the lock, to be told after it. */
typedef struct orCacheLog {
  orCacheRecord *records;
  size_t count, capacity;
} orCacheLog;

/* Of one device; all of it under `lock`. */
typedef struct orCache {
  _Alignas(OR_CACHE_LINE) orMutex lock;
  /* futex: threads that hold memory on its way back; written under `lock` */
  _Atomic uint32_t releasing;
  bool round;           /* some of options.roundup_power2_divisions are above 1 */
  orBlock *dirty;       /* pending free, only to be poisoned; linked by idle_next */
  orMemPool *postponed; /* released, but short of host memory for their end */
  orBlockUse *deferred; /* by streams that captured at the free; linked by next */
  uint64_t ended;       /* captures that had ended when `deferred` was last looked through */
  orCacheLog log;       /* empty while nobody has the lock */
  uint64_t sequence;    /* of the latest record */
  orBlocks blocks;
  size_t held;    /* bytes of segments, with those that are being asked for or given back */
  size_t allowed; /* most that may be held */
  double fraction;
  orCacheOptions options; /* max_split_size: blocks.max_split instead */
} orCache;

typedef struct orRequest {
  orCache *cache;
  orStream_t stream;
  orMemPool *mempool; /* null: the device's own memory */
  uint64_t task;      /* that asks, if it is one of the stream's own; else OR_TASK_ANY */
  size_t bytes, size;
  const orOrigin *origin;
  uintptr_t fresh; /* set: from where on nobody has had before what it was given */
  int device, pool;
  const char *refused; /* why, if a tool has had it refused */
} orRequest;

extern orCache orCaches[OPENREG_MAX_DEVICES] OR_HIDDEN;

static inline int orCacheDevice(const orCache *cache) { return (int)(cache - orCaches); }
static inline size_t orRoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/* ---- history.c ---- */

extern _Atomic(void (*)(const orCacheRecord *)) orCacheHook OR_HIDDEN;

void orCacheNoteSlow(orCache *cache, orCacheAction action, uintptr_t address, size_t bytes,
                     orStream_t stream, const orMemPool *mempool);
void orCacheCallHook(orCache *cache);

/* Lock held. */
static inline void orCacheNote(orCache *cache, orCacheAction action, uintptr_t address,
                               size_t bytes, orStream_t stream, const orMemPool *mempool) {
  if (OR_UNLIKELY(atomic_load_explicit(&orCacheHook, memory_order_relaxed) != NULL))
    orCacheNoteSlow(cache, action, address, bytes, stream, mempool);
}

static inline void orCacheLock(orCache *cache) { orMutexLock(&cache->lock); }
/* Unlocks, and tells what has happened since the lock was taken. */
static inline void orCacheUnlock(orCache *cache) {
  if (OR_UNLIKELY(cache->log.count))
    orCacheCallHook(cache);
  else
    orMutexUnlock(&cache->lock);
}

/* ---- cache.c ---- */

typedef struct orCacheReuse {
  /* What there is now is not handed out, so that neither the values in what was freed before nor
   * the gaps between what is alive change anything; until a call without this, or until memory is
   * short. */
  bool fresh_only;
  bool in_stream_order; /* a freed block waits until its stream has done all that was queued */
  bool poison;
} orCacheReuse;
/* How all caches use memory again. No lock held. */
void orCacheSetReuse(orCacheReuse reuse);
/* Whether memory is poisoned: by the setting, orCachePoison, or orCacheSetReuse. */
bool orCachePoisons(void);
/* The block of any device that has an address, for a signal handler: see orBlocksAt. */
bool orCacheAt(uintptr_t address, orTouched *place);
/* Moves on what queued work has finished with. Lock held; released meanwhile for poison. */
void orCachePoll(orCache *cache);
/* From what is cached; lock held. */
bool orCacheTake(orRequest *request, void **ptr);
/* Whoever is handed an address in it finds the cache. Lock held. */
void orCacheWidenRange(orCache *cache, uintptr_t low, uintptr_t high);
/* Their block is pending free until each stream has finished what it has been given by now. Lock
 * held. */
void orCacheQueueUses(orCache *cache, orBlockUse *uses);
/* True if the task `number` of a stream, and all before it, have finished. */
bool orCacheCompleted(orStream_t stream, uint64_t number);
/* Sleeps until a stream has completed `number` tasks; no lock held. Counters outlive the
 * stream's handle. */
orError_t orCacheAwait(orStream_t stream, uint64_t number);
/* Fills a range in stream order; the number of the task that does. */
uint64_t orCacheQueuePoison(orStream_t stream, void *ptr, size_t bytes, int device);

/* ---- segment.c ---- */

/* The cache had nothing: a block from fresh memory, or what can be had by waiting. A request
 * that is to be refused ends as one that cannot be served. No lock held. */
orError_t orCacheAllocateSlow(orRequest *request, void **ptr);
/* Gives back what is idle of a private pool, or of the device's own memory (null), and waits for
 * queued work that keeps it from being so. Where that wait fails the memory stays. */
orError_t orCacheGiveBack(orCache *cache, const orMemPool *mempool);

/* ---- private_pool.c ---- */

/* Whether a graph may use the pool's memory at any time, whatever of it the program has freed. */
static inline bool orMemPoolIsGraphs(const orMemPool *mempool) {
  return mempool && atomic_load_explicit(&mempool->captured, memory_order_relaxed);
}
/* For an allocation on a stream: the pool is held until orMemPoolLetGo. No lock held. */
orError_t orMemPoolHold(orMemPool_t pool, orStream_t stream, orMemPool **held);
void orMemPoolLetGo(orMemPool *mempool);

/* No launched work can use the memory of a pool that was released any more. Lock held. */
void orMemPoolEnd(orCache *cache, orBlock *end);
/* Pools whose end was short of memory end anew. Lock held. */
void orMemPoolsEndPostponed(orCache *cache);
/* Calls `fn` for the reserved bytes of each of a device's private pools. Lock held. */
void orMemPoolsForEach(orCache *cache, void (*fn)(orCacheStat *reserved_bytes));

#endif
