/*
 * The caching allocator: memory for work on a stream, kept when it is freed and handed out again.
 *
 * A block's life:
 *
 *              orCacheMalloc                orCacheFree
 *      FREE  ----------------->  LIVE  ------------------->  PENDING FREE
 *       ^                                                      |
 *       +------ recorded streams are done, poison is queued ---+   (at once, mostly)
 *
 * Blocks are cut from segments (regions of region.c), each for one stream and for small or large
 * requests; free neighbours merge. block.c has the blocks, segment.c gets and returns their memory;
 * this file decides when a block may be reused. The rules are those of PyTorch's CUDA allocator.
 *
 * Note [Order of reuse]: time on a stream is the number of its tasks. If the host frees a block
 * when n tasks are queued, all of them may use it: reuse_from = n + 1 is the first task that may
 * have it. A block freed inside task k of its own stream may be reused from task k on. Merged
 * blocks take the later of the two. A host's orCacheMalloc is for work yet to be queued, so any
 * free block will do. A malloc inside task k of that stream gets blocks with reuse_from <= k, or
 * fresh memory. A task of another stream counts as a host: it allocates for work yet to be queued,
 * and all queued work may use what it frees. A stream recorded on a block is stored with the number
 * of its tasks at the free, and the block stays pending free until that many have finished. No
 * event is made, nothing is queued, nothing blocks. Every malloc and free checks the first
 * pending-free block of each such stream. Memory returns to the device when all tasks before
 * reuse_from have finished, which can be asked of destroyed streams too.
 *
 * Ownership: orCaches[d] is device d's, all of it under its lock. The lock is held for a few table
 * and list operations (and, when a table grows, a host allocation). It is released for regions
 * (system calls, a vendor's functions), for waiting, and to queue tasks. Under it are taken the
 * locks of streams, to read counters, and the sanitizer's, to which frees are reported. A
 * pending-free block that is in no list belongs to the thread that took it off. ranges[d] only
 * widens: it is written under the lock, and read by any thread to find an address's device.
 *
 * `releasing` counts memory that was taken off the cache and is being returned to the device. A
 * thread that is short of memory waits for it (a few system calls) before it gives up.
 *
 * Note [Captures and the cache]: work of a capture does not run, so it is no task and is not in the
 * counts above. A block that is freed by its own stream may be reused by that stream, whose nodes
 * run in the order of the calls. A block that was recorded on another, capturing stream stays
 * pending free until that capture has ended, and then until the stream has finished what it had
 * been given by then. Replays go on to use memory that was freed in a graph's private pool, so it
 * is not poisoned and its free is not reported to tools.
 */
#include "openreg_host_access.h"
#include "openreg_schedule.h"

#include <string.h>

#include "cache/cache.h"

static const size_t small_limit = (size_t)1 << 20; /* requests up to here go to the small pool */

/* The addresses that a device's segments have had. Two devices' may overlap, but hardly ever do. */
typedef struct orCacheRange {
  _Atomic uintptr_t low, high; /* high is 0 before the first segment */
} orCacheRange;

orCache orCaches[OPENREG_MAX_DEVICES] = {
    [0 ... OPENREG_MAX_DEVICES - 1] = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_CACHE),
                                       .blocks = {.max_split = SIZE_MAX},
                                       .allowed = SIZE_MAX,
                                       .fraction = 1}};
static orCacheRange ranges[OPENREG_MAX_DEVICES];
static _Atomic int range_count; /* 1 + the highest device that has had one */

/* ---- Order ---- */

static inline uint64_t taskOf(orStream_t stream) {
  orStream_t current;
  uint64_t number;
  return orTaskCurrent(&current, &number) && current == stream ? number : OR_TASK_ANY;
}

/* A live stream's count is read without its lock. If the stream is destroyed meanwhile and its slot
 * reused, the count is a later one. Counts only grow, and waiting for more tasks is safe. */
static inline uint64_t queuedOn(orStream_t stream) {
  orStream *s = orHandleSlotAt(&orStreamTable, orHandleIndex(stream));
  if (OR_LIKELY(atomic_load_explicit(&s->slot.handle, memory_order_acquire) == stream))
    return atomic_load_explicit(&s->queued, memory_order_acquire);
  uint64_t count = 0;
  return orStreamQueued(stream, &count) ? 0 : count;
}

bool orCacheCompleted(orStream_t stream, uint64_t number) {
  uint64_t count = 0;
  return !number || (!orStreamCompleted(stream, &count) && count >= number);
}

/* See Note [Order of reuse]. */
static inline uint64_t reuseFrom(orStream_t stream) {
  uint64_t task = taskOf(stream);
  return task == OR_TASK_ANY ? queuedOn(stream) + 1 : task;
}

orError_t orCacheAwait(orStream_t stream, uint64_t number) {
  return orHostAwaitTasks(orHandleSlotAt(&orStreamTable, orHandleIndex(stream)), number);
}

/* ---- Pending free ---- */

static inline void becomeFree(orCache *cache, orBlock *block) {
  orCacheNote(cache, orCacheActionFreeCompleted, block->start, block->requested,
              block->owner->stream, block->owner->mempool);
  orBlocksFree(&cache->blocks, block);
}

/* -1: as the setting. */
static _Atomic int poison_wanted = -1;
static _Atomic bool in_stream_order, is_poisoned; /* set by orCacheSetReuse */

static bool wantsPoison(void) {
  int wanted = atomic_load_explicit(&poison_wanted, memory_order_relaxed);
  return OR_UNLIKELY(wanted >= 0) ? wanted : orConfigGet()->poison;
}

static bool poisons(void) {
  return wantsPoison() || atomic_load_explicit(&is_poisoned, memory_order_relaxed);
}

uint32_t orCachePoison(uint32_t poison) {
  uint32_t before = wantsPoison();
  atomic_store_explicit(&poison_wanted, poison != 0, memory_order_relaxed);
  return before;
}

void orCacheSetReuse(orCacheReuse reuse) {
  atomic_store_explicit(&in_stream_order, reuse.in_stream_order, memory_order_relaxed);
  atomic_store_explicit(&is_poisoned, reuse.poison, memory_order_relaxed);
  for (int device = 0; device < OPENREG_MAX_DEVICES; device++) {
    orCacheLock(&orCaches[device]);
    orBlocksSetRetired(&orCaches[device].blocks, reuse.fresh_only);
    orCacheUnlock(&orCaches[device]);
  }
}

static void pushDirty(orCache *cache, orBlock *block) {
  block->idle_next = cache->dirty;
  cache->dirty = block;
}

/* Queued like an event's record: a full queue does not block it. Returns the task's number. */
static uint64_t queuePoison(orStream_t stream, void *ptr, size_t bytes, int device) {
  uint64_t before = orNotedErrors();
  orStream *s;
  orTask *task;
  if (orStreamBeginInternal(stream, &s, &task)) {
    if (before != orNotedErrors()) orGetLastError();
    return queuedOn(stream); /* destroyed: no caller can get the block */
  }
  task->kind = OR_KIND_SET;
  task->name = "poison";
  task->u.set = (orSetArgs){.dst = ptr, .bytes = bytes, .value = OR_POISON, .device = device};
  uint64_t number = orStreamCommit(s, task);
  const orDispatcher *d = orDispatching();
  if (OR_UNLIKELY(d != NULL)) d->forced();
  return number;
}

/* Lock held, released meanwhile. */
static void poisonDirty(orCache *cache) {
  for (orBlock *block; (block = cache->dirty);) {
    cache->dirty = block->idle_next;
    orStream_t stream = block->owner->stream;
    orCacheUnlock(cache);
    uint64_t number = queuePoison(stream, (void *)block->start, block->size, orCacheDevice(cache));
    orCacheLock(cache);
    block->reuse_from = number + 1;
    becomeFree(cache, block);
  }
}

/* A graph's memory is not poisoned: that could come between its write and its read. */
static inline void finishFree(orCache *cache, orBlock *block) {
  if (OR_UNLIKELY(poisons()) && !orMemPoolIsGraphs(block->owner->mempool))
    pushDirty(cache, block);
  else
    becomeFree(cache, block);
}

void orCacheKeepShared(orCache *cache, orBlock *block) {
  block->idle_next = NULL;
  *(cache->shared ? &cache->shared_last->idle_next : &cache->shared) = block;
  cache->shared_last = block;
}

void orCacheEndShare(orCache *cache, orBlock *block) {
  block->shared = false;
  if (!--block->waits) finishFree(cache, block);
}

/* Frees blocks that recorded streams have finished with. Lock held. */
static void pollPendingFree(orCache *cache) {
  for (orBlockStream **at = &cache->blocks.waiting, *s; (s = *at);) {
    uint64_t count;
    if (!orStreamCompleted(s->stream, &count))
      while (*at == s && s->first->number <= count) {
        orBlock *block = orBlocksEndUse(&cache->blocks, at);
        if (block->waits) continue;
        if (OR_LIKELY(block->size != 0))
          finishFree(cache, block);
        else
          orMemPoolEnd(cache, block);
      }
    if (*at == s) at = &s->waiting;
  }
}

static void queueUse(orCache *cache, orBlockUse *use) {
  orBlocksQueueUse(&cache->blocks, use, queuedOn(use->stream->stream));
}

/* Completed counts do not cover work of a capture: Note [Captures and the cache]. */
static void deferUse(orCache *cache, orBlockUse *use, orCapture *capture) {
  use->capture = capture;
  use->block->waits++;
  use->next = cache->deferred;
  cache->deferred = use;
}

void orCacheQueueUses(orCache *cache, orBlockUse *use) {
  for (orBlockUse *next; use; use = next) {
    next = use->next;
    orCapture *capture = orStreamCapture(use->stream->stream);
    if (OR_UNLIKELY(capture != NULL))
      deferUse(cache, use, capture);
    else
      queueUse(cache, use);
  }
}

static void endDeferral(orCache *cache) {
  uint64_t ended = orCapturesEnded();
  if (OR_LIKELY(cache->ended == ended)) return;
  cache->ended = ended;
  for (orBlockUse **at = &cache->deferred, *use; (use = *at);) {
    if (!orCaptureIsOver(use->capture)) {
      at = &use->next;
      continue;
    }
    *at = use->next;
    orCaptureRelease(use->capture);
    use->block->waits--;
    queueUse(cache, use);
  }
}

static void pollAll(orCache *cache) {
  if (cache->postponed) orMemPoolsEndPostponed(cache);
  if (cache->deferred) endDeferral(cache);
  if (cache->blocks.waiting) pollPendingFree(cache);
  if (cache->dirty) poisonDirty(cache);
}

inline void orCachePoll(orCache *cache) {
  uintptr_t any = (uintptr_t)cache->postponed | (uintptr_t)cache->deferred |
                  (uintptr_t)cache->blocks.waiting | (uintptr_t)cache->dirty;
  if (OR_UNLIKELY(any)) pollAll(cache);
}

/* ---- Addresses ---- */

/* A caller that gets the address sees the range: both come from this thread. */
void orCacheWidenRange(orCache *cache, uintptr_t low, uintptr_t high) {
  int device = orCacheDevice(cache);
  orCacheRange *range = &ranges[device];
  uintptr_t old = atomic_load_explicit(&range->high, memory_order_relaxed);
  if (!old || low < atomic_load_explicit(&range->low, memory_order_relaxed))
    atomic_store_explicit(&range->low, low, memory_order_relaxed);
  if (high > old) atomic_store_explicit(&range->high, high, memory_order_release);
  int count = atomic_load_explicit(&range_count, memory_order_relaxed);
  while (count <= device &&
         !atomic_compare_exchange_weak_explicit(&range_count, &count, device + 1,
                                                memory_order_release, memory_order_relaxed)) {
  }
}

/* For a signal handler, with no lock: a block of any device. */
bool orCacheAt(uintptr_t address, orTouched *place) {
  int count = atomic_load_explicit(&range_count, memory_order_acquire);
  for (int device = 0; device < count; device++) {
    if (!orBlocksAt(&orCaches[device].blocks, address, place)) continue;
    place->device = device;
    return true;
  }
  return false;
}

static inline bool mayHold(int device, uintptr_t address) {
  const orCacheRange *range = &ranges[device];
  return address < atomic_load_explicit(&range->high, memory_order_acquire) &&
         address >= atomic_load_explicit(&range->low, memory_order_relaxed);
}

/* Returns the cache, locked, and the block that starts at `ptr`; or null. */
static orCache *lockBlock(const void *ptr, orBlock **block) {
  int count = atomic_load_explicit(&range_count, memory_order_acquire);
  for (int device = 0; device < count; device++) {
    if (!mayHold(device, (uintptr_t)ptr)) continue;
    orCache *cache = &orCaches[device];
    orCacheLock(cache);
    *block = orBlocksFind(&cache->blocks, (uintptr_t)ptr);
    if (OR_LIKELY(*block != NULL)) return cache;
    orCacheUnlock(cache);
  }
  return NULL;
}

/* The same for an address anywhere in a block. A segment starts with its region. */
orCache *orCacheLockAround(const void *ptr, orBlock **block) {
  orRegion region;
  orCache *cache = lockBlock(ptr, block);
  if (cache || !orRegionFind(ptr, &region) || region.type != orMemoryTypeDevice) return cache;
  cache = lockBlock(region.base, block);
  while (cache && *block && (uintptr_t)ptr - (*block)->start >= (*block)->size)
    *block = (*block)->next;
  if (!cache || *block) return cache;
  orCacheUnlock(cache);
  return NULL;
}

static orError_t refusePointer(const char *call, const void *ptr, bool known) {
  return orFail(
      orErrorInvalidValue,
      known ? "%s: %p has been freed already" : "%s: %p is not a block of the caching allocator",
      call, ptr);
}

/* Replaces 0 by the default stream's handle, for a live stream. */
static inline orError_t resolveStream(orStream_t *stream) {
  if (*stream == OR_STREAM_DEFAULT) return orStreamGetDefault(stream, orCurrentDevice());
  return orHandleFind(&orStreamTable, *stream) ? orSuccess : orErrorInvalidResourceHandle;
}

/* ---- Allocation ---- */

/* An oversize block serves only requests of nearly its size. */
static size_t largestFor(const orCache *cache, size_t size) {
  size_t limit = cache->blocks.max_split;
  return size < limit ? limit - 1 : size + cache->options.max_non_split_rounding - 1;
}

inline bool orCacheTake(orRequest *r, void **ptr) {
  orBlocks *blocks = &r->cache->blocks;
  orBlockStream *owner = orBlocksStreamFind(blocks, r->stream, r->mempool);
  if (!owner || OR_UNLIKELY(!orBlocksReserve(blocks, 1))) return false;
  orBlock *block = orBinsBestFit(&owner->bins[r->pool], r->size, r->task);
  if (!block) return false;
  if (OR_UNLIKELY(block->size > r->most)) return false;
  r->fresh = orBlocksTake(blocks, block, r->size, r->bytes, r->origin);
  orCacheNote(r->cache, orCacheActionAlloc, block->start, r->bytes, r->stream, r->mempool);
  *ptr = (void *)block->start;
  return true;
}

/* Poisons fresh memory when it is first handed out, as most of a segment never is. It is written at
 * once in a task, which has its memory at once, and for a graph, as replays may be on any stream,
 * unordered with the capture's. */
static void poisonFresh(const orRequest *r, uintptr_t end) {
  void *fresh = (void *)r->fresh, *address;
  size_t bytes = end - r->fresh;
  const orDevice *d = orDeviceAt(r->device);
  if (orProcessTask() == OR_TASK_NONE && !orMemPoolIsGraphs(r->mempool))
    queuePoison(r->stream, fresh, bytes, r->device);
  else if (d->can_map && !orDeviceMap(d, fresh, bytes, &address))
    memset(address, OR_POISON, bytes);
}

/* Rounds a request up to one of the equal steps between two powers of two. */
static size_t roundToStep(const orCache *cache, size_t bytes) {
  unsigned exponent = 63 - (unsigned)__builtin_clzll(bytes);
  unsigned interval = exponent > 20 ? exponent - 20 : 0;
  size_t divisions = cache->options.roundup_power2_divisions[interval < 15 ? interval : 15];
  if (divisions < 2 || bytes <= OR_BLOCK_UNIT * divisions || exponent > 61) return bytes;
  if (!(bytes & (bytes - 1))) return bytes;
  size_t step = ((size_t)1 << exponent) / divisions;
  return step ? orRoundUp(bytes, step) : bytes;
}

/* 0 if the rounded size overflows. Lock held. */
static inline size_t sizeFor(const orCache *cache, size_t bytes) {
  if (OR_UNLIKELY(cache->round)) bytes = roundToStep(cache, bytes);
  return (bytes + OR_BLOCK_UNIT - 1) & ~(size_t)(OR_BLOCK_UNIT - 1);
}

static _Thread_local const orOrigin *next_origin;

void orCacheSetOrigin(const orOrigin *origin) { next_origin = origin; }

static bool isRefused(orRequest *r) {
  orProbe asked = {.device = r->device, .bytes = r->bytes};
  orProbeCall(OR_PROBE_ALLOCATION, &asked);
  r->refused = asked.fails;
  return asked.fails != NULL;
}

/* For tools. */
static uint64_t poolNumber(const orMemPool *mempool) { return mempool ? mempool->handle : 0; }

/* ---- Public ---- */

static orError_t allocate(void **ptr, size_t bytes, orStream_t stream, orMemPool *mempool) {
  int device = orHandleDevice(stream);
  orRequest r = {.cache = &orCaches[device],
                 .stream = stream,
                 .mempool = mempool,
                 .task = taskOf(stream),
                 .bytes = bytes,
                 .origin = next_origin,
                 .device = device};
  next_origin = NULL;
  OR_TRY(orDeviceCheckLost(device));
  if (orProbeOn(OR_PROBE_ALLOCATION) && isRefused(&r)) return orCacheAllocateSlow(&r, ptr);
  orCacheLock(r.cache);
  orCachePoll(r.cache);
  r.size = sizeFor(r.cache, bytes);
  r.most = largestFor(r.cache, r.size);
  r.pool = r.size <= small_limit ? OR_POOL_SMALL : OR_POOL_LARGE;
  bool found = OR_LIKELY(r.size != 0) && orCacheTake(&r, ptr);
  orCacheUnlock(r.cache);
  if (OR_UNLIKELY(!found)) OR_TRY(orCacheAllocateSlow(&r, ptr));
  uintptr_t end = (uintptr_t)*ptr + r.size;
  if (OR_UNLIKELY(r.fresh < end) && poisons()) poisonFresh(&r, end);
  /* Blocks of graphs are not reported: tools do not see what replays write. */
  if (!OR_UNLIKELY(orMemPoolIsGraphs(mempool)))
    OR_PROBE(OR_PROBE_BLOCK_TAKEN, .dst = *ptr, .bytes = bytes, .stream = stream,
             .number = poolNumber(mempool), .kind = r.pool, .count = r.most);
  return orSuccess;
}

orError_t orCacheMalloc(void **ptr, size_t bytes, orStream_t stream) {
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orCacheMalloc: null result");
  *ptr = NULL;
  OR_TRY(resolveStream(&stream));
  return bytes ? allocate(ptr, bytes, stream, NULL) : orSuccess;
}

orError_t orCacheMallocFromPool(void **ptr, size_t bytes, orStream_t stream, orMemPool_t pool) {
  orMemPool *mempool;
  if (!pool) return orCacheMalloc(ptr, bytes, stream);
  OR_TRY(orEnter());
  if (!ptr) return orFail(orErrorInvalidValue, "orCacheMallocFromPool: null result");
  *ptr = NULL;
  OR_TRY(resolveStream(&stream));
  OR_TRY(orMemPoolHold(pool, stream, &mempool));
  orError_t error = bytes ? allocate(ptr, bytes, stream, mempool) : orSuccess;
  orMemPoolLetGo(mempool);
  return error;
}

static void reportFree(const orBlock *block, const orBlockUse *use) {
  orProbe probe = {.dst = (const void *)block->start,
                   .bytes = block->size,
                   .number = poolNumber(block->owner->mempool),
                   .kind = block->pool};
  for (; use; use = use->next) {
    probe.stream = use->stream->stream;
    orProbeCall(OR_PROBE_BLOCK_USED, &probe);
  }
  probe.stream = block->owner->stream;
  orProbeCall(OR_PROBE_BLOCK_FREED, &probe);
}

orError_t orCacheFree(void *ptr) {
  orBlock *block;
  OR_TRY(orEnter());
  if (!ptr) return orSuccess;
  OR_PROBE(OR_PROBE_BLOCK_FREES, .dst = ptr);
  orCache *cache = lockBlock(ptr, &block);
  if (OR_UNLIKELY(!cache || block->state != OR_BLOCK_LIVE)) {
    if (cache) orCacheUnlock(cache);
    return refusePointer("orCacheFree", ptr, cache != NULL);
  }
  orCacheNote(cache, orCacheActionFreeRequested, block->start, block->requested,
              block->owner->stream, block->owner->mempool);
  if (OR_UNLIKELY(atomic_load_explicit(&in_stream_order, memory_order_relaxed)))
    orBlocksAddUse(&cache->blocks, block, block->owner->stream); /* not if memory is short */
  orBlockUse *use = orBlocksBeginFree(&cache->blocks, block, reuseFrom(block->owner->stream));
  if (orProbeOn(OR_PROBE_BLOCK_FREED) && !orMemPoolIsGraphs(block->owner->mempool))
    reportFree(block, use);
  if (OR_UNLIKELY(block->shared)) {
    block->waits++;
    orCacheKeepShared(cache, block);
  } else if (OR_LIKELY(!use)) {
    finishFree(cache, block);
  }
  orCacheQueueUses(cache, use);
  orCachePoll(cache);
  orCacheUnlock(cache);
  OR_PROBE(OR_PROBE_FREED, .dst = ptr);
  return orSuccess;
}

orError_t orCacheRecordStream(const void *ptr, orStream_t stream) {
  orBlock *block;
  OR_TRY(orEnter());
  OR_TRY(resolveStream(&stream));
  if (!ptr) return orSuccess;
  orCache *cache = orCacheLockAround(ptr, &block);
  orRegion region;
  /* An import lasts until all streams have finished anyway. */
  if (!cache && orRegionFind(ptr, &region) && region.imported) return orSuccess;
  if (!cache) return refusePointer("orCacheRecordStream", ptr, false);
  bool live = block->state == OR_BLOCK_LIVE;
  bool done =
      live && (block->owner->stream == stream || orBlocksAddUse(&cache->blocks, block, stream));
  orCacheUnlock(cache);
  if (done) return orSuccess;
  return live ? orFail(orErrorSystem, "no host memory for the caching allocator's tables")
              : refusePointer("orCacheRecordStream", ptr, true);
}

bool orCacheFind(const void *ptr, orCacheFound *found) {
  orBlock *block;
  orCache *cache = orCacheLockAround(ptr, &block);
  if (!cache) return false;
  bool live = block->state == OR_BLOCK_LIVE;
  if (live)
    *found = (orCacheFound){block->start, block->size, orMemPoolIsGraphs(block->owner->mempool)};
  orCacheUnlock(cache);
  return live;
}

orError_t orCacheCheck(const void *ptr, size_t bytes) {
  orBlock *block;
  OR_TRY(orEnter());
  orCache *cache = ptr ? lockBlock(ptr, &block) : NULL;
  if (!cache) return orSuccess;
  size_t size = block->size;
  orCacheUnlock(cache);
  if (OR_LIKELY(bytes <= size)) return orSuccess;
  return orFail(orErrorInvalidValue, "[%p, +%zu) ends %zu bytes past its allocation of %zu bytes",
                ptr, bytes, bytes - size, size);
}

orError_t orCacheBlockSize(size_t *bytes, const void *ptr) {
  orBlock *block;
  OR_TRY(orEnter());
  if (!bytes) return orFail(orErrorInvalidValue, "orCacheBlockSize: null result");
  orCache *cache = ptr ? lockBlock(ptr, &block) : NULL;
  *bytes = cache && block->state == OR_BLOCK_LIVE ? block->size : 0;
  if (cache) orCacheUnlock(cache);
  return orSuccess;
}

const orOrigin *orCacheGetOrigin(const void *ptr) {
  orBlock *block;
  if (orEnter()) return NULL;
  orCache *cache = ptr ? lockBlock(ptr, &block) : NULL;
  const orOrigin *origin = cache && block->state == OR_BLOCK_LIVE ? block->origin : NULL;
  if (cache) orCacheUnlock(cache);
  return origin;
}

/* ---- Statistics ---- */

orError_t orCacheGetStats(orCacheStats *stats, int device) {
  OR_TRY(orEnter());
  if (!stats) return orFail(orErrorInvalidValue, "orCacheGetStats: null result");
  OR_TRY(orDeviceCheck(device));
  orCacheStats from;
  orCacheLock(&orCaches[device]);
  orBlocksStats(&orCaches[device].blocks, &from);
  orCacheUnlock(&orCaches[device]);
  return OR_FILL(orCacheStats, stats, &from, oversize_segments);
}

static orError_t reset(int device, void (*fn)(orBlocks *blocks), void (*of_pool)(orCacheStat *)) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  orCacheLock(&orCaches[device]);
  fn(&orCaches[device].blocks);
  orMemPoolsForEach(&orCaches[device], of_pool);
  orCacheUnlock(&orCaches[device]);
  return orSuccess;
}

orError_t orCacheResetPeakStats(int device) {
  return reset(device, orBlocksResetPeak, orStatResetPeak);
}

orError_t orCacheResetAccumulatedStats(int device) {
  return reset(device, orBlocksResetAccumulated, orStatResetAccumulated);
}
