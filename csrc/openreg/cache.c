/*
 * The caching allocator: memory for work on a stream, kept when it is freed and handed out again.
 *
 * A block's life:
 *
 *              orCacheMalloc                orCacheFree
 *      FREE  ----------------->  LIVE  ------------------->  LIMBO
 *       ^                                                      |
 *       +------ recorded streams are done, poison is queued ---+   (at once, mostly)
 *
 * Blocks are cut from segments (regions of memory.c), each for one stream, small or large requests;
 * neighbours that are free merge. block.c keeps them; here is when a block may be used again, and
 * what happens when memory runs short. The rules are those of PyTorch's CUDA allocator.
 *
 * Order. Time on a stream is the number of its tasks. A block freed by the host when n tasks were
 * queued may be read by all of them: reuse_from = n + 1, the first task that may have it. A block
 * freed inside task k of its own stream may be had from task k on. Merged blocks take the later of
 * the two. A host's orCacheMalloc is for work yet to be queued, after everything: any free block
 * will do. A malloc inside task k of that stream may have blocks with reuse_from <= k only, or
 * fresh memory. A task of another stream counts as a host: what it allocates is for work yet to be
 * queued, and what it frees may be in use by all that is queued. A stream recorded on a block is
 * remembered with the number of its tasks at the time of the free, and the block stays in limbo
 * until that many have finished: no event is made, nothing is queued, nothing blocks. Every malloc
 * and free looks at the first block in limbo of each such stream. Memory goes back to the device
 * when all tasks before reuse_from have finished, which a stream that has been destroyed answers
 * too.
 *
 * Ownership. caches[d] is device d's, all of it under its lock. The lock is held for a few table
 * and list operations (and, when a table grows, a host allocation); it is dropped for regions
 * (system calls, a vendor's functions), for waiting, and to queue tasks. Under it only stream locks
 * are taken, to read counters. A block in limbo that is in no list belongs to the thread that took
 * it off. ranges[d] only widens: written under the lock, read by anybody to find the device of an
 * address.
 *
 * Memory that was taken off the cache and is on its way back to the device is counted in
 * `releasing`: a thread that is short of memory waits for it (a few system calls) before it gives
 * up.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "block.h"

#define MIB ((size_t)1 << 20)

enum { POISON = 0xFF }; /* all ones is a NaN in every floating-point type */

static const size_t smallLimit = MIB; /* requests up to here go to the small pool */
static const size_t smallSegment = 2 * MIB;
static const size_t largeSegment = 20 * MIB; /* for requests below largeLimit */
static const size_t largeLimit = 10 * MIB;
static const size_t largeRounding = 2 * MIB; /* from there on */

typedef struct orCache {
  _Alignas(OR_CACHE_LINE) pthread_mutex_t lock;
  pthread_cond_t released;
  unsigned releasing; /* threads that hold memory on its way back */
  bool poison;        /* the setting; known before there is a block */
  orBlock *dirty;     /* limbo, only to be poisoned; linked by idle_next */
  orBlocks blocks;
} orCache;

/* Addresses that segments of a device have had. Two devices may overlap; nearly always none
 * does. */
typedef struct orCacheRange {
  _Atomic uintptr_t low, high; /* high is 0 before the first segment */
} orCacheRange;

static orCache caches[OPENREG_MAX_DEVICES] = {
    [0 ... OPENREG_MAX_DEVICES - 1] = {.lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
                                       .released = PTHREAD_COND_INITIALIZER}};
static orCacheRange ranges[OPENREG_MAX_DEVICES];
static _Atomic int rangeCount; /* devices that have had one, and those below them */

typedef struct orRequest {
  orCache *cache;
  orStream_t stream;
  uint64_t task; /* that asks, if it is one of the stream's own; else OR_TASK_ANY */
  size_t bytes, size;
  int device, pool;
} orRequest;

static inline int deviceOf(const orCache *cache) { return (int)(cache - caches); }

static inline size_t roundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* ---- Order ---- */

static inline uint64_t taskOf(orStream_t stream) {
  orStream_t current;
  uint64_t number;
  return orTaskCurrent(&current, &number) && current == stream ? number : OR_TASK_ANY;
}

/* A live stream's count is read without its lock. Should the stream be destroyed in between, and
 * its slot used again, the count read is a later one: counts only grow, and waiting for more
 * than one must is safe. */
static inline uint64_t queuedOn(orStream_t stream) {
  orStream *s = orHandleSlotAt(&orStreamTable, orHandleIndex(stream));
  if (OR_LIKELY(atomic_load_explicit(&s->slot.handle, memory_order_acquire) == stream))
    return atomic_load_explicit(&s->queued, memory_order_acquire);
  uint64_t count = 0;
  return orStreamQueued(stream, &count) ? 0 : count;
}

static inline bool hasCompleted(orStream_t stream, uint64_t number) {
  uint64_t count = 0;
  return !number || (!orStreamCompleted(stream, &count) && count >= number);
}

static inline uint64_t reuseFrom(orStream_t stream) {
  uint64_t task = taskOf(stream);
  return task == OR_TASK_ANY ? queuedOn(stream) + 1 : task;
}

/* True if no queued work can reach a free block. */
static inline bool isOver(const orBlock *block) {
  return block->reuse_from <= 1 || hasCompleted(block->owner->stream, block->reuse_from - 1);
}

/* Sleeps until a stream has completed `number` tasks; no lock held. Counters outlive the
 * stream's handle. */
static void await(orStream_t stream, uint64_t number) {
  orStreamAwait(orHandleSlotAt(&orStreamTable, orHandleIndex(stream)), number);
}

/* ---- Limbo ---- */

static void pushDirty(orCache *cache, orBlock *block) {
  block->idle_next = cache->dirty;
  cache->dirty = block;
}

/* Fills a range in stream order. A marker's way into the queue: it is never held up by a full
 * one. */
static uint64_t queuePoison(orStream_t stream, void *ptr, size_t bytes, int device) {
  uint64_t before = orNotedErrors();
  orStream *s;
  orTask *task;
  if (orStreamBegin(stream, false, 0, &s, &task)) {
    if (before != orNotedErrors()) orGetLastError();
    return queuedOn(stream); /* destroyed: nobody will be handed the block */
  }
  task->kind = OR_KIND_SET;
  task->name = "poison";
  task->u.set = (orSetArgs){.dst = ptr, .bytes = bytes, .value = POISON, .device = device};
  return orStreamCommit(s, task);
}

/* Lock held, dropped meanwhile. */
static void poisonDirty(orCache *cache) {
  for (orBlock *block; (block = cache->dirty);) {
    cache->dirty = block->idle_next;
    orStream_t stream = block->owner->stream;
    pthread_mutex_unlock(&cache->lock);
    uint64_t number = queuePoison(stream, (void *)block->start, block->size, deviceOf(cache));
    pthread_mutex_lock(&cache->lock);
    block->reuse_from = number + 1;
    orBlocksFree(&cache->blocks, block);
  }
}

static inline void leaveLimbo(orCache *cache, orBlock *block) {
  if (OR_UNLIKELY(cache->poison))
    pushDirty(cache, block);
  else
    orBlocksFree(&cache->blocks, block);
}

/* Frees what recorded streams have finished with. Lock held. */
static void pollLimbo(orCache *cache) {
  for (orBlockStream **at = &cache->blocks.waiting, *s; (s = *at);) {
    uint64_t count;
    if (!orStreamCompleted(s->stream, &count))
      while (*at == s && s->first->number <= count) {
        orBlock *block = orBlocksEndUse(&cache->blocks, at);
        if (!block->waits) leaveLimbo(cache, block);
      }
    if (*at == s) at = &s->waiting;
  }
}

static inline void poll(orCache *cache) {
  if (OR_UNLIKELY(cache->blocks.waiting)) pollLimbo(cache);
  if (OR_UNLIKELY(cache->dirty)) poisonDirty(cache);
}

/* ---- Addresses ---- */

/* Lock held. Whoever is handed the address sees the range: both come from this thread. */
static void widenRange(orCache *cache, uintptr_t low, uintptr_t high) {
  int device = deviceOf(cache);
  orCacheRange *range = &ranges[device];
  uintptr_t old = atomic_load_explicit(&range->high, memory_order_relaxed);
  if (!old || low < atomic_load_explicit(&range->low, memory_order_relaxed))
    atomic_store_explicit(&range->low, low, memory_order_relaxed);
  if (high > old) atomic_store_explicit(&range->high, high, memory_order_release);
  int count = atomic_load_explicit(&rangeCount, memory_order_relaxed);
  while (count <= device &&
         !atomic_compare_exchange_weak_explicit(&rangeCount, &count, device + 1,
                                                memory_order_release, memory_order_relaxed)) {
  }
}

static inline bool mayHold(int device, uintptr_t address) {
  const orCacheRange *range = &ranges[device];
  return address < atomic_load_explicit(&range->high, memory_order_acquire) &&
         address >= atomic_load_explicit(&range->low, memory_order_relaxed);
}

/* The block that starts at `ptr`, with the lock of its cache held; or null. */
static orCache *lockBlock(const void *ptr, orBlock **block) {
  int count = atomic_load_explicit(&rangeCount, memory_order_acquire);
  for (int device = 0; device < count; device++) {
    if (!mayHold(device, (uintptr_t)ptr)) continue;
    orCache *cache = &caches[device];
    pthread_mutex_lock(&cache->lock);
    *block = orBlocksFind(&cache->blocks, (uintptr_t)ptr);
    if (OR_LIKELY(*block != NULL)) return cache;
    pthread_mutex_unlock(&cache->lock);
  }
  return NULL;
}

/* The same for an address anywhere in a block: a segment starts with its region. */
static orCache *lockBlockAround(const void *ptr, orBlock **block) {
  orRegion region;
  orCache *cache = lockBlock(ptr, block);
  if (cache || !orRegionFind(ptr, &region) || region.type != orMemoryTypeDevice) return cache;
  cache = lockBlock(region.base, block);
  while (cache && *block && (uintptr_t)ptr - (*block)->start >= (*block)->size)
    *block = (*block)->next;
  if (!cache || *block) return cache;
  pthread_mutex_unlock(&cache->lock);
  return NULL;
}

static orError_t refusePointer(const char *call, const void *ptr, bool known) {
  return orFail(
      orErrorInvalidValue,
      known ? "%s: %p has been freed already" : "%s: %p is not a block of the caching allocator",
      call, ptr);
}

/* A live stream's handle in place of 0. */
static inline orError_t resolveStream(orStream_t *stream) {
  if (*stream == OR_STREAM_DEFAULT) return orStreamGetDefault(stream, orCurrentDevice());
  return orHandleFind(&orStreamTable, *stream) ? orSuccess : orErrorInvalidResourceHandle;
}

/* ---- Memory from the device and back ---- */

/* Gives back whole free segments that no queued work can reach. Lock held, dropped meanwhile. */
static void releaseIdle(orCache *cache) {
  void *batch[64];
  for (;;) {
    int count = 0;
    for (orBlock *block = cache->blocks.idle, *next; block && count < 64; block = next) {
      next = block->idle_next;
      if (!isOver(block)) continue;
      batch[count++] = (void *)block->start;
      orBlocksDropSegment(&cache->blocks, block);
    }
    if (!count) return;
    cache->releasing++;
    pthread_mutex_unlock(&cache->lock);
    for (int i = 0; i < count; i++) orRegionRelease(batch[i]);
    pthread_mutex_lock(&cache->lock);
    if (!--cache->releasing) pthread_cond_broadcast(&cache->released);
  }
}

/* Something that has to finish before a limbo block or an idle segment is free to go. Lock held. */
static bool nextWait(const orCache *cache, orStream_t *stream, uint64_t *number) {
  for (const orBlockStream *s = cache->blocks.waiting; s; s = s->waiting) {
    *stream = s->stream;
    *number = s->last->number;
    if (!hasCompleted(*stream, *number)) return true;
  }
  for (const orBlock *block = cache->blocks.idle; block; block = block->idle_next) {
    if (isOver(block)) continue;
    *stream = block->owner->stream;
    *number = block->reuse_from - 1;
    return true;
  }
  return false;
}

/* Sleeps until nothing of what is free now is in use by queued work. Lock held, dropped
 * meanwhile; what other threads free in the meantime does not keep it for ever. */
static void awaitAll(orCache *cache) {
  orStream_t stream;
  uint64_t number;
  cache->blocks.stats.sync_all_streams++;
  poll(cache);
  for (size_t left = cache->blocks.count; left && nextWait(cache, &stream, &number); left--) {
    pthread_mutex_unlock(&cache->lock);
    await(stream, number);
    pthread_mutex_lock(&cache->lock);
    poll(cache);
  }
}

/* Fresh memory is poisoned once, before any of it is handed out. Returns its reuse_from. */
static uint64_t poisonFresh(const orRequest *r, void *base, size_t size) {
  void *address;
  if (OR_LIKELY(!orConfigGet()->poison)) return 0;
  if (orProcessTask() == OR_TASK_NONE) return queuePoison(r->stream, base, size, r->device) + 1;
  if (!orMapForKernel(&address, base, size)) memset(address, POISON, size);
  return 0;
}

/* A segment of the usual size, or of just what is asked for where that does not fit. */
static orError_t allocateSegment(const orRequest *r, void **base, size_t *size) {
  size_t exact = roundUp(r->size, OR_PAGE);
  *size = r->pool == OR_POOL_SMALL ? smallSegment
          : r->size < largeLimit   ? largeSegment
                                   : roundUp(r->size, largeRounding);
  orError_t error = orRegionAllocate(r->device, *size, true, base);
  if (error != orErrorMemoryAllocation || exact == *size) return error;
  *size = exact;
  return orRegionAllocate(r->device, exact, true, base);
}

static orError_t refuseHostMemory(void) {
  return orFail(orErrorSystem, "no host memory for the caching allocator's tables");
}

/* A block from a new segment. No lock held. */
static orError_t grow(const orRequest *r, void **ptr) {
  void *base;
  size_t size;
  OR_TRY(allocateSegment(r, &base, &size));
  uint64_t reuse_from = poisonFresh(r, base, size);
  orCache *cache = r->cache;
  orBlock *block = NULL;
  pthread_mutex_lock(&cache->lock);
  cache->poison = orConfigGet()->poison;
  if (orBlocksReserve(&cache->blocks, 2))
    block =
        orBlocksAddSegment(&cache->blocks, r->stream, (uintptr_t)base, size, r->pool, reuse_from);
  if (block) {
    widenRange(cache, (uintptr_t)base, (uintptr_t)base + size);
    orBlocksTake(&cache->blocks, block, r->size, r->bytes);
  }
  pthread_mutex_unlock(&cache->lock);
  if (block) {
    *ptr = base;
    return orSuccess;
  }
  if (reuse_from) await(r->stream, reuse_from - 1);
  orRegionRelease(base);
  return refuseHostMemory();
}

/* ---- Allocation ---- */

/* From what is cached; lock held. */
static inline bool takeCached(const orRequest *r, void **ptr) {
  orBlocks *blocks = &r->cache->blocks;
  orBlockStream *owner = orBlocksStreamFind(blocks, r->stream);
  if (!owner || OR_UNLIKELY(!orBlocksReserve(blocks, 1))) return false;
  orBlock *block = orBinsBestFit(&owner->bins[r->pool], r->size, r->task);
  if (!block) return false;
  orBlocksTake(blocks, block, r->size, r->bytes);
  *ptr = (void *)block->start;
  return true;
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

static orError_t refuseMemory(const orRequest *r) {
  char asked[32], unused[32], total[32], allocated[32], reserved[32];
  orCacheStats stats;
  pthread_mutex_lock(&r->cache->lock);
  r->cache->blocks.stats.ooms++;
  orBlocksStats(&r->cache->blocks, &stats);
  pthread_mutex_unlock(&r->cache->lock);
  size_t capacity = orDeviceAt(r->device)->desc.memory_limit;
  return orFail(orErrorMemoryAllocation,
                "openreg:%d is out of memory: tried to allocate %s; %s is free of a capacity of "
                "%s, %s is allocated and "
                "%s reserved by the caching allocator",
                r->device, bytesText(asked, r->bytes),
                bytesText(unused, capacity - orRegionUsed(r->device)), bytesText(total, capacity),
                bytesText(allocated, (size_t)stats.allocated_bytes[0].current),
                bytesText(reserved, (size_t)stats.reserved_bytes[0].current));
}

/* Memory is short: what is cached goes back to the device, and after that what queued work still
 * holds. A task does not wait: it may be what the others wait for. */
static orError_t reclaim(const orRequest *r, void **ptr) {
  orCache *cache = r->cache;
  pthread_mutex_lock(&cache->lock);
  cache->blocks.stats.alloc_retries++;
  for (bool waited = false;; waited = true) {
    poll(cache);
    bool found = takeCached(r, ptr);
    if (!found) {
      releaseIdle(cache);
      while (cache->releasing) pthread_cond_wait(&cache->released, &cache->lock);
    }
    pthread_mutex_unlock(&cache->lock);
    if (found) return orSuccess;
    orError_t error = grow(r, ptr);
    if (error != orErrorMemoryAllocation) return error;
    if (waited || orProcessTask() != OR_TASK_NONE) return refuseMemory(r);
    pthread_mutex_lock(&cache->lock);
    awaitAll(cache);
  }
}

/* What failed on the way to a success is nobody's last error. */
static orError_t allocateSlow(const orRequest *r, void **ptr) {
  orError_t before = orPeekAtLastError();
  if (r->bytes > orDeviceAt(r->device)->desc.memory_limit) return refuseMemory(r);
  orError_t error = grow(r, ptr);
  if (error == orErrorMemoryAllocation) error = reclaim(r, ptr);
  if (!error && !before) orGetLastError();
  return error;
}

/* ---- Public ---- */

orError_t orCacheMalloc(void **ptr, size_t bytes, orStream_t stream) {
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orCacheMalloc: null result");
  *ptr = NULL;
  OR_TRY(resolveStream(&stream));
  if (!bytes) return orSuccess;
  int device = orHandleDevice(stream);
  orRequest r = {.cache = &caches[device],
                 .stream = stream,
                 .task = taskOf(stream),
                 .bytes = bytes,
                 .device = device};
  r.size = (bytes + OR_BLOCK_UNIT - 1) &
           ~(size_t)(OR_BLOCK_UNIT - 1); /* 0 past the largest: refused as too much */
  r.pool = r.size <= smallLimit ? OR_POOL_SMALL : OR_POOL_LARGE;
  if (OR_UNLIKELY(!r.size)) return refuseMemory(&r);
  pthread_mutex_lock(&r.cache->lock);
  poll(r.cache);
  bool found = takeCached(&r, ptr);
  pthread_mutex_unlock(&r.cache->lock);
  return OR_LIKELY(found) ? orSuccess : allocateSlow(&r, ptr);
}

orError_t orCacheFree(void *ptr) {
  orBlock *block;
  OR_TRY(orEnter());
  if (!ptr) return orSuccess;
  orCache *cache = lockBlock(ptr, &block);
  if (OR_UNLIKELY(!cache || block->state != OR_BLOCK_LIVE)) {
    if (cache) pthread_mutex_unlock(&cache->lock);
    return refusePointer("orCacheFree", ptr, cache != NULL);
  }
  orBlockUse *use = orBlocksRetire(&cache->blocks, block, reuseFrom(block->owner->stream));
  if (OR_LIKELY(!use)) leaveLimbo(cache, block);
  for (orBlockUse *next; use; use = next) {
    next = use->next;
    orBlocksQueueUse(&cache->blocks, use, queuedOn(use->stream->stream));
  }
  poll(cache);
  pthread_mutex_unlock(&cache->lock);
  return orSuccess;
}

orError_t orCacheRecordStream(const void *ptr, orStream_t stream) {
  orBlock *block;
  OR_TRY(orEnter());
  OR_TRY(resolveStream(&stream));
  if (!ptr) return orSuccess;
  orCache *cache = lockBlockAround(ptr, &block);
  if (!cache) return refusePointer("orCacheRecordStream", ptr, false);
  bool live = block->state == OR_BLOCK_LIVE;
  bool done =
      live && (block->owner->stream == stream || orBlocksAddUse(&cache->blocks, block, stream));
  pthread_mutex_unlock(&cache->lock);
  if (done) return orSuccess;
  return live ? refuseHostMemory() : refusePointer("orCacheRecordStream", ptr, true);
}

orError_t orCacheEmpty(int device) {
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  orCache *cache = &caches[device];
  pthread_mutex_lock(&cache->lock);
  awaitAll(cache);
  releaseIdle(cache);
  while (cache->releasing) pthread_cond_wait(&cache->released, &cache->lock);
  pthread_mutex_unlock(&cache->lock);
  return orSuccess;
}

orError_t orCacheGetStats(orCacheStats *stats, int device) {
  OR_TRY(orEnter());
  if (!stats) return orFail(orErrorInvalidValue, "orCacheGetStats: null result");
  OR_TRY(orDeviceCheck(device));
  pthread_mutex_lock(&caches[device].lock);
  orBlocksStats(&caches[device].blocks, stats);
  pthread_mutex_unlock(&caches[device].lock);
  return orSuccess;
}

static orError_t reset(int device, void (*fn)(orBlocks *blocks)) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  pthread_mutex_lock(&caches[device].lock);
  fn(&caches[device].blocks);
  pthread_mutex_unlock(&caches[device].lock);
  return orSuccess;
}

orError_t orCacheResetPeakStats(int device) { return reset(device, orBlocksResetPeak); }

orError_t orCacheResetAccumulatedStats(int device) {
  return reset(device, orBlocksResetAccumulated);
}
