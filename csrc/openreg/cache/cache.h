/*
 * Declarations that the files of the caching allocator share: cache.c (when a block may be reused),
 * segment.c (memory from the device and back), history.c (what happened). The rules are at the head
 * of cache.c.
 */
#pragma once

#include "cache/block.h"

enum { OR_POISON = 0xFF }; /* all ones is a NaN in every floating-point type */

/* Actions of one critical section, reported after it. */
typedef struct orCacheLog {
  orCacheRecord *records;
  size_t count, capacity;
} orCacheLog;

/* Of one device; all of it under `lock`. */
typedef struct orCache {
  _Alignas(OR_CACHE_LINE) orMutex lock;
  /* futex: threads that are returning memory; written under `lock` */
  _Atomic uint32_t releasing;
  bool round;                    /* some of options.roundup_power2_divisions are above 1 */
  orBlock *dirty;                /* pending free, only until poisoned; linked by idle_next */
  orMemPool *postponed;          /* released; their end was short of host memory */
  orBlock *shared, *shared_last; /* pending free for other processes; linked by idle_next */
  orBlockUse *deferred;          /* uses by streams that captured at the free; linked by next */
  uint64_t ended;                /* captures that had ended when `deferred` was last checked */
  orCacheLog log;                /* empty while the lock is free */
  uint64_t sequence;             /* the latest record's */
  orBlocks blocks;
  size_t held;    /* bytes of segments, also of those being allocated or returned */
  size_t allowed; /* the most that may be held */
  double fraction;
  orCacheOptions options; /* max_split_size: blocks.max_split instead */
} orCache;

typedef struct orRequest {
  orCache *cache;
  orStream_t stream;
  orMemPool *mempool; /* null: the device's own memory */
  uint64_t task;      /* the asking task, if it is one of the stream's own; else OR_TASK_ANY */
  size_t bytes, size;
  size_t most; /* of a block that may serve it */
  const orOrigin *origin;
  uintptr_t fresh; /* set: from here on the bytes were never handed out */
  int device, pool;
  const char *refused; /* a tool refused it, for this reason */
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
/* Unlocks, and reports what has happened since the lock was taken. */
static inline void orCacheUnlock(orCache *cache) {
  if (OR_UNLIKELY(cache->log.count))
    orCacheCallHook(cache);
  else
    orMutexUnlock(&cache->lock);
}

/* ---- cache.c ---- */

typedef struct orCacheReuse {
  /* Present memory is not handed out, so that results depend neither on its values nor on the gaps
   * in it; until a call without this, or until memory is short. */
  bool fresh_only;
  bool in_stream_order; /* a freed block waits until its stream has done all that was queued */
  bool poison;
} orCacheReuse;
/* Sets how all caches reuse memory. No lock held. */
void orCacheSetReuse(orCacheReuse reuse);
typedef struct orCacheFound {
  uintptr_t begin;
  size_t bytes;
  bool is_graphs; /* of a pool that a graph may use at any time */
} orCacheFound;
/* The live block around an address. False if there is none. No lock held. */
bool orCacheFind(const void *ptr, orCacheFound *found);
/* The block of any device that has an address, for a signal handler: see orBlocksAt. */
bool orCacheAt(uintptr_t address, orTouched *place);
/* Frees blocks that queued work has finished with. Called with the lock held; releases it while
 * poison is queued. */
void orCachePoll(orCache *cache);
/* Returns the cache, locked, and the block of any state around an address; or null. */
orCache *orCacheLockAround(const void *ptr, orBlock **block);
/* Appends a block, pending free, to those that other processes may hold. Lock held. */
void orCacheKeepShared(orCache *cache, orBlock *block);
/* Ends what sharing added to the `waits` of a block. Lock held. */
void orCacheEndShare(orCache *cache, orBlock *block);
/* Takes a block from what is cached. Lock held. */
bool orCacheTake(orRequest *request, void **ptr);
/* Makes the cache findable for addresses in the range. Lock held. */
void orCacheWidenRange(orCache *cache, uintptr_t low, uintptr_t high);
/* Their block is pending free until each stream has finished what it has been given. Lock held. */
void orCacheQueueUses(orCache *cache, orBlockUse *uses);
/* True if the task `number` of a stream, and all before it, have finished. */
bool orCacheCompleted(orStream_t stream, uint64_t number);
/* Sleeps until a stream has completed `number` tasks; no lock held. Counters outlive the
 * stream's handle. */
orError_t orCacheAwait(orStream_t stream, uint64_t number);

/* ---- segment.c ---- */

/* When the cache has nothing: a block from fresh memory, or what can be had by waiting. A request
 * that a tool refuses ends as one that cannot be served. No lock held. */
orError_t orCacheAllocateSlow(orRequest *request, void **ptr);
/* Returns idle memory of a private pool, or of the device's own (null), after waiting for queued
 * work that uses it. If that wait fails, the memory stays. */
orError_t orCacheGiveBack(orCache *cache, const orMemPool *mempool);

/* ---- ipc.c ---- */

/* Returns shared blocks that no process holds any more, of at most `most` that are looked at. No
 * lock held. */
void orIpcSweep(size_t most);

/* ---- private_pool.c ---- */

/* Whether a graph may use the pool's memory at any time, even where the program has freed it. */
static inline bool orMemPoolIsGraphs(const orMemPool *mempool) {
  return mempool && atomic_load_explicit(&mempool->captured, memory_order_relaxed);
}
/* Holds the pool for an allocation on a stream, until orMemPoolLetGo. No lock held. */
orError_t orMemPoolHold(orMemPool_t pool, orStream_t stream, orMemPool **held);
void orMemPoolLetGo(orMemPool *mempool);

/* Called when no launched work can use a released pool's memory any more. Lock held. */
void orMemPoolEnd(orCache *cache, orBlock *end);
/* Retries the end of pools that were short of memory. Lock held. */
void orMemPoolsEndPostponed(orCache *cache);
/* Calls `fn` for the reserved bytes of each of a device's private pools. Lock held. */
void orMemPoolsForEach(orCache *cache, void (*fn)(orCacheStat *reserved_bytes));
