/*
 * The blocks of one device: a table from address to block, segments, streams, statistics. bins.c
 * has the free blocks by size.
 *
 * All of it belongs to one orBlocks and is guarded by the lock of the cache that owns it. Each
 * block is in the table; each free one is also in the bins of its owner and pool; a free one
 * without neighbours (a whole segment) is also in the idle list. Two free blocks are never
 * neighbours. Structures are recycled and never freed: their number is bounded by the most blocks
 * at any time.
 */
#include "cache/block.h"

#include <stdlib.h>

enum {
  CHUNK = 64, /* block structures allocated at a time */
  OR_FIRST_SLOTS = 256,
};

/* The smallest remainder of a split. A block of the large pool never serves a small request. */
static const size_t split_rest[OR_POOL_COUNT] = {OR_BLOCK_UNIT, (1u << 20) + 1};

/* ---- Statistics ---- */

/* Maintained: current, peak and freed of the two pools, and the peak of their sum. orBlocksStats
 * derives the rest: `allocated` is current + freed less their sum at the last reset, which the
 * field holds. */
static inline void statAdd(orCacheStat *stat, int pool, int64_t amount) {
  orCacheStat *own = &stat[1 + pool];
  own->current += amount;
  if (own->current > own->peak) own->peak = own->current;
  int64_t all = stat[1].current + stat[2].current;
  if (all > stat[0].peak) stat[0].peak = all;
}

static inline void statSubtract(orCacheStat *stat, int pool, int64_t amount) {
  stat[1 + pool].current -= amount;
  stat[1 + pool].freed += amount;
}

static inline void statChange(orCacheStat *stat, int pool, int64_t amount) {
  if (amount > 0)
    statAdd(stat, pool, amount);
  else if (amount < 0)
    statSubtract(stat, pool, -amount);
}

/* The figures, of three pools each, come first in orCacheStats, after its size. */
typedef orCacheStat orFigure[3];
enum {
  OR_FIGURES_AT = offsetof(orCacheStats, allocation),
  OR_FIGURES = (offsetof(orCacheStats, alloc_retries) - OR_FIGURES_AT) / sizeof(orFigure)
};
_Static_assert(OR_FIGURES == 9, "five counts and four sums of bytes, and nothing else, come first");

static void forEachFigure(orCacheStats *stats, void (*fn)(orCacheStat *stat)) {
  orFigure *figure = (orFigure *)((char *)stats + OR_FIGURES_AT);
  for (int i = 0; i < OR_FIGURES; i++) fn(figure[i]);
}

void orStatComplete(orCacheStat *stat) {
  for (int i = 1; i < 3; i++)
    stat[i].allocated = stat[i].current + stat[i].freed - stat[i].allocated;
  stat[0].current = stat[1].current + stat[2].current;
  stat[0].allocated = stat[1].allocated + stat[2].allocated;
  stat[0].freed = stat[1].freed + stat[2].freed;
}

void orBlocksStats(const orBlocks *blocks, orCacheStats *stats) {
  *stats = blocks->stats;
  forEachFigure(stats, orStatComplete);
}

void orStatResetPeak(orCacheStat *stat) {
  for (int i = 1; i < 3; i++) stat[i].peak = stat[i].current;
  stat[0].peak = stat[1].current + stat[2].current;
}

void orBlocksResetPeak(orBlocks *blocks) {
  orCacheStats *stats = &blocks->stats;
  forEachFigure(stats, orStatResetPeak);
  stats->oversize_allocations.peak = stats->oversize_allocations.current;
  stats->oversize_segments.peak = stats->oversize_segments.current;
}

void orStatResetAccumulated(orCacheStat *stat) {
  for (int i = 1; i < 3; i++) {
    stat[i].freed = 0;
    stat[i].allocated = stat[i].current;
  }
}

void orBlocksResetAccumulated(orBlocks *blocks) {
  orCacheStats *stats = &blocks->stats;
  forEachFigure(stats, orStatResetAccumulated);
  stats->alloc_retries = stats->ooms = 0;
  stats->device_alloc = stats->device_free = stats->sync_all_streams = 0;
  stats->oversize_allocations.allocated = stats->oversize_allocations.freed = 0;
  stats->oversize_segments.allocated = stats->oversize_segments.freed = 0;
}

/* The two figures without pools are maintained in full. */
static void plainAdd(orCacheStat *stat, int64_t amount) {
  stat->current += amount;
  stat->allocated += amount;
  if (stat->current > stat->peak) stat->peak = stat->current;
}

static void plainSubtract(orCacheStat *stat, int64_t amount) {
  stat->current -= amount;
  stat->freed += amount;
}

static inline bool isSplit(const orBlock *block) { return block->prev || block->next; }

/* ---- Table of blocks by address ---- */

static inline size_t slotOf(const orBlocks *blocks, uintptr_t start) {
  return (size_t)(((uint64_t)start >> 9) * UINT64_C(0x9E3779B97F4A7C15) >> blocks->slot_shift);
}

orBlock *orBlocksFind(const orBlocks *blocks, uintptr_t start) {
  if (!blocks->slots) return NULL;
  for (size_t i = slotOf(blocks, start);; i = (i + 1) & blocks->slot_mask) {
    const orBlockSlot *slot = &blocks->slots[i];
    if (slot->start == start) return slot->block;
    if (!slot->block) return NULL;
  }
}

/* Its data races are harmless: a block that changes meanwhile is missed, or described wrongly. */
__attribute__((no_sanitize("thread"))) bool orBlocksAt(const orBlocks *blocks, uintptr_t address,
                                                       orTouched *place) {
  size_t mask = __atomic_load_n(&blocks->slot_mask, __ATOMIC_ACQUIRE);
  const orBlockSlot *slots = __atomic_load_n(&blocks->slots, __ATOMIC_ACQUIRE);
  for (size_t i = 0; slots && i <= mask; i++) {
    const orBlock *block = *(orBlock *const volatile *)&slots[i].block;
    if (!block || address - block->start >= block->size) continue;
    bool live = block->state == OR_BLOCK_LIVE;
    place->begin = block->start;
    place->bytes = live ? block->requested : block->size;
    place->live = live;
    place->origin = live ? block->origin : NULL;
    return true;
  }
  return false;
}

static void tableInsert(orBlocks *blocks, orBlock *block) {
  size_t i = slotOf(blocks, block->start);
  while (blocks->slots[i].block) i = (i + 1) & blocks->slot_mask;
  blocks->slots[i] = (orBlockSlot){block->start, block};
  blocks->count++;
}

/* Later entries of the run move up, so that no tombstones are needed. */
static void tableRemove(orBlocks *blocks, uintptr_t start) {
  size_t mask = blocks->slot_mask, hole = slotOf(blocks, start);
  orBlockSlot *slots = blocks->slots;
  while (slots[hole].start != start) hole = (hole + 1) & mask;
  for (size_t i = (hole + 1) & mask; slots[i].block; i = (i + 1) & mask) {
    size_t home = slotOf(blocks, slots[i].start);
    if (((i - home) & mask) < ((i - hole) & mask)) continue;
    slots[hole] = slots[i];
    hole = i;
  }
  slots[hole] = (orBlockSlot){0, NULL};
  blocks->count--;
}

static bool tableGrow(orBlocks *blocks) {
  size_t old_count = blocks->slots ? blocks->slot_mask + 1 : 0;
  size_t count = old_count ? old_count * 2 : OR_FIRST_SLOTS;
  orBlockSlot *old = blocks->slots, *slots = calloc(count, sizeof *slots);
  if (!slots) return false;
  __atomic_store_n(&blocks->slots, slots, __ATOMIC_RELEASE); /* before the mask: see orBlocksAt */
  __atomic_store_n(&blocks->slot_mask, count - 1, __ATOMIC_RELEASE);
  blocks->slot_shift = 64 - (unsigned)__builtin_ctzll(count);
  blocks->count = 0;
  for (size_t i = 0; i < old_count; i++)
    if (old[i].block) tableInsert(blocks, old[i].block);
  if (old) blocks->former[__builtin_ctzll(old_count)] = old;
  return true;
}

bool orBlocksReserve(orBlocks *blocks, size_t count) {
  while (OR_UNLIKELY(!blocks->slots || (blocks->count + count) * 2 > blocks->slot_mask))
    if (!tableGrow(blocks)) return false;
  while (OR_UNLIKELY(blocks->spare_count < count)) {
    orBlock *chunk = aligned_alloc(OR_CACHE_LINE, CHUNK * sizeof *chunk);
    if (!chunk) return false;
    for (size_t i = 0; i < CHUNK; i++) {
      chunk[i].next = blocks->spare;
      blocks->spare = &chunk[i];
    }
    blocks->spare_count += CHUNK;
  }
  return true;
}

static orBlock *blockNew(orBlocks *blocks, uintptr_t start, size_t size) {
  orBlock *block = blocks->spare;
  blocks->spare = block->next;
  blocks->spare_count--;
  *block = (orBlock){.start = start, .size = size};
  tableInsert(blocks, block);
  return block;
}

static void blockDelete(orBlocks *blocks, orBlock *block) {
  tableRemove(blocks, block->start);
  block->next = blocks->spare;
  blocks->spare = block;
  blocks->spare_count++;
}

/* ---- Idle segments ---- */

static void idleInsert(orBlocks *blocks, orBlock *block) {
  block->idle_prev = NULL;
  block->idle_next = blocks->idle;
  if (blocks->idle) blocks->idle->idle_prev = block;
  blocks->idle = block;
}

static void idleRemove(orBlocks *blocks, orBlock *block) {
  *(block->idle_prev ? &block->idle_prev->idle_next : &blocks->idle) = block->idle_next;
  if (block->idle_next) block->idle_next->idle_prev = block->idle_prev;
}

static inline orBlockBins *binsOf(const orBlock *block) {
  return &block->owner->bins[block->shelf];
}

static void enterFree(orBlocks *blocks, orBlock *block) {
  block->state = OR_BLOCK_FREE;
  orBinsInsert(binsOf(block), block);
  if (!isSplit(block)) idleInsert(blocks, block);
}

static void leaveFree(orBlocks *blocks, orBlock *block) {
  orBinsRemove(binsOf(block), block);
  if (!isSplit(block)) idleRemove(blocks, block);
}

/* ---- Streams ---- */

static inline orBlockStream **bucketOf(const orBlocks *blocks, orStream_t stream,
                                       const orMemPool *mempool) {
  size_t i = ((stream ^ (uintptr_t)mempool) * UINT64_C(0x9E3779B97F4A7C15)) >> 58;
  return (orBlockStream **)&blocks->streams[i];
}

_Static_assert(OR_BLOCK_BUCKETS == 1 << (64 - 58), "bucketOf keeps 6 bits");

static inline bool isFor(const orBlockStream *s, orStream_t stream, const orMemPool *mempool) {
  return ((s->stream ^ stream) | ((uintptr_t)s->mempool ^ (uintptr_t)mempool)) == 0;
}

orBlockStream *orBlocksStreamFind(const orBlocks *blocks, orStream_t stream,
                                  const orMemPool *mempool) {
  orBlockStream *s = *bucketOf(blocks, stream, mempool);
  while (s && !isFor(s, stream, mempool)) s = s->chain;
  return s;
}

/* Returns the stream's entry with a reference for the caller. */
static orBlockStream *streamGet(orBlocks *blocks, orStream_t stream, orMemPool *mempool) {
  orBlockStream *s = orBlocksStreamFind(blocks, stream, mempool);
  if (!s) {
    s = calloc(1, sizeof *s);
    if (!s) return NULL;
    orBlockStream **bucket = bucketOf(blocks, stream, mempool);
    s->stream = stream;
    s->mempool = mempool;
    s->chain = *bucket;
    *bucket = s;
  }
  s->refs++;
  return s;
}

static void streamPut(orBlocks *blocks, orBlockStream *stream) {
  if (--stream->refs) return;
  orBlockStream **at = bucketOf(blocks, stream->stream, stream->mempool);
  while (*at != stream) at = &(*at)->chain;
  *at = stream->chain;
  free(stream);
}

/* ---- Recorded uses ---- */

static void useDelete(orBlocks *blocks, orBlockUse *use) {
  streamPut(blocks, use->stream);
  use->next = blocks->spare_uses;
  blocks->spare_uses = use;
}

bool orBlocksAddUse(orBlocks *blocks, orBlock *block, orStream_t stream) {
  for (orBlockUse *u = block->uses; u; u = u->next)
    if (u->stream->stream == stream) return true;
  orBlockUse *use = blocks->spare_uses;
  if (use)
    blocks->spare_uses = use->next;
  else if (!(use = malloc(sizeof *use)))
    return false;
  *use =
      (orBlockUse){.next = block->uses, .block = block, .stream = streamGet(blocks, stream, NULL)};
  if (!use->stream) {
    free(use);
    return false;
  }
  block->uses = use;
  return true;
}

void orBlocksQueueUse(orBlocks *blocks, orBlockUse *use, uint64_t number) {
  orBlockStream *s = use->stream;
  use->number = number;
  use->next = NULL;
  use->block->waits++;
  if (s->first) {
    s->last->next = use;
  } else {
    s->first = use;
    s->waiting = blocks->waiting;
    blocks->waiting = s;
  }
  s->last = use;
}

orBlock *orBlocksEndUse(orBlocks *blocks, orBlockStream **waiting) {
  orBlockStream *s = *waiting;
  orBlockUse *use = s->first;
  orBlock *block = use->block;
  block->waits--;
  s->first = use->next;
  if (!s->first) *waiting = s->waiting;
  useDelete(blocks, use);
  return block;
}

/* ---- The life of a block ---- */

orBlock *orBlocksAddSegment(orBlocks *blocks, orStream_t owner, orMemPool *mempool, uintptr_t start,
                            size_t size, int pool) {
  orBlockStream *stream = streamGet(blocks, owner, mempool);
  if (!stream) return NULL;
  orBlock *block = blockNew(blocks, start, size);
  block->owner = stream;
  block->pool = block->shelf = (uint8_t)pool;
  block->fresh = size;
  enterFree(blocks, block);
  orCacheStats *stats = &blocks->stats;
  stats->device_alloc++;
  statAdd(stats->segment, pool, 1);
  statAdd(stats->reserved_bytes, pool, (int64_t)size);
  if (mempool) statAdd(mempool->reserved_bytes, pool, (int64_t)size);
  if (OR_UNLIKELY(size >= blocks->max_split)) plainAdd(&stats->oversize_segments, 1);
  return block;
}

void orBlocksRemoveSegment(orBlocks *blocks, orBlock *block) {
  orCacheStats *stats = &blocks->stats;
  stats->device_free++;
  statSubtract(stats->segment, block->pool, 1);
  statSubtract(stats->reserved_bytes, block->pool, (int64_t)block->size);
  orMemPool *mempool = block->owner->mempool;
  if (mempool) statSubtract(mempool->reserved_bytes, block->pool, (int64_t)block->size);
  if (OR_UNLIKELY(block->size >= blocks->max_split)) plainSubtract(&stats->oversize_segments, 1);
  leaveFree(blocks, block);
  streamPut(blocks, block->owner);
  blockDelete(blocks, block);
}

/* The block keeps its first `size` bytes; the rest becomes a free neighbour. */
static void splitOff(orBlocks *blocks, orBlock *block, size_t size) {
  orBlock *rest = blockNew(blocks, block->start + size, block->size - size);
  rest->owner = block->owner;
  rest->pool = block->pool;
  rest->shelf = block->shelf;
  rest->reuse_from = block->reuse_from;
  rest->fresh = block->fresh < rest->size ? block->fresh : rest->size;
  block->fresh -= rest->fresh;
  rest->prev = block;
  rest->next = block->next;
  if (rest->next) rest->next->prev = rest;
  block->next = rest;
  block->size = size;
  enterFree(blocks, rest);
}

uintptr_t orBlocksTake(orBlocks *blocks, orBlock *block, size_t size, size_t requested,
                       const orOrigin *origin) {
  orCacheStats *stats = &blocks->stats;
  int pool = block->pool;
  bool was_split = isSplit(block);
  leaveFree(blocks, block);
  if (block->size - size >= split_rest[pool] &&
      (pool == OR_POOL_SMALL || OR_LIKELY(size < blocks->max_split))) {
    splitOff(blocks, block, size);
    if (!was_split) {
      statAdd(stats->inactive_split, pool, 1);
      statAdd(stats->inactive_split_bytes, pool, (int64_t)block->next->size);
    } else {
      statSubtract(stats->inactive_split_bytes, pool, (int64_t)size);
    }
  } else if (was_split) {
    statSubtract(stats->inactive_split, pool, 1);
    statSubtract(stats->inactive_split_bytes, pool, (int64_t)block->size);
  }
  block->state = OR_BLOCK_LIVE;
  block->origin = origin;
  block->uses = NULL;
  block->waits = 0;
  block->shared = false;
  block->requested = requested;
  block->oversize = block->size >= blocks->max_split;
  if (OR_UNLIKELY(block->oversize)) plainAdd(&stats->oversize_allocations, 1);
  statAdd(stats->allocation, pool, 1);
  statAdd(stats->active, pool, 1);
  statAdd(stats->allocated_bytes, pool, (int64_t)block->size);
  statAdd(stats->active_bytes, pool, (int64_t)block->size);
  statAdd(stats->requested_bytes, pool, (int64_t)requested);
  uintptr_t fresh = block->start + block->size - block->fresh;
  block->fresh = 0;
  return fresh;
}

orBlockUse *orBlocksBeginFree(orBlocks *blocks, orBlock *block, uint64_t reuse_from) {
  orBlockUse *uses = block->uses;
  statSubtract(blocks->stats.allocation, block->pool, 1);
  statSubtract(blocks->stats.allocated_bytes, block->pool, (int64_t)block->size);
  if (OR_UNLIKELY(block->oversize)) plainSubtract(&blocks->stats.oversize_allocations, 1);
  block->state = OR_BLOCK_PENDING_FREE;
  block->reuse_from = reuse_from;
  return uses;
}

/* Merges `block` with its upper neighbour, which is free or becomes so. */
static void absorbNext(orBlocks *blocks, orBlock *block) {
  orBlock *next = block->next;
  block->fresh = next->fresh + (next->fresh == next->size ? block->fresh : 0);
  block->size += next->size;
  if (next->reuse_from > block->reuse_from) block->reuse_from = next->reuse_from;
  block->next = next->next;
  if (block->next) block->next->prev = block;
  blockDelete(blocks, next);
}

static bool isFree(const orBlock *block) { return block && block->state == OR_BLOCK_FREE; }

void orBlocksFree(orBlocks *blocks, orBlock *block) {
  orCacheStats *stats = &blocks->stats;
  int pool = block->pool;
  int64_t splits = 0, split_bytes = 0; /* of inactive split blocks: applied once, as in PyTorch */
  statSubtract(stats->active, pool, 1);
  statSubtract(stats->active_bytes, pool, (int64_t)block->size);
  statSubtract(stats->requested_bytes, pool, (int64_t)block->requested);
  if (isFree(block->next)) {
    splits--;
    split_bytes -= (int64_t)block->next->size;
    leaveFree(blocks, block->next);
    absorbNext(blocks, block);
  }
  if (isFree(block->prev)) {
    splits--;
    split_bytes -= (int64_t)block->prev->size;
    leaveFree(blocks, block->prev);
    block = block->prev;
    absorbNext(blocks, block);
  }
  if (isSplit(block)) {
    splits++;
    split_bytes += (int64_t)block->size;
  }
  statChange(stats->inactive_split, pool, splits);
  statChange(stats->inactive_split_bytes, pool, split_bytes);
  enterFree(blocks, block);
}

/* ---- Private pools ---- */

static void moveBlock(orBlocks *blocks, orBlock *block, orBlockStream *to) {
  bool is_free = block->state == OR_BLOCK_FREE;
  if (is_free) leaveFree(blocks, block);
  if (!block->prev) to->refs++;
  block->owner = to;
  if (is_free) enterFree(blocks, block);
}

/* Moves all blocks of one owner to the other. A pool's owner has references from segments alone. */
static void moveBlocks(orBlocks *blocks, orBlockStream *from, orBlockStream *to,
                       void (*fn)(const orBlock *block)) {
  for (size_t i = 0; i <= blocks->slot_mask; i++) {
    orBlock *block = blocks->slots[i].block;
    if (!block || block->owner != from) continue;
    moveBlock(blocks, block, to);
    fn(block);
    if (!block->prev) streamPut(blocks, from);
  }
}

static orBlockStream *ownerIn(const orBlocks *blocks, const orMemPool *mempool) {
  for (int i = 0; i < OR_BLOCK_BUCKETS; i++)
    for (orBlockStream *s = blocks->streams[i]; s; s = s->chain)
      if (s->mempool == mempool) return s;
  return NULL;
}

bool orBlocksDissolve(orBlocks *blocks, orMemPool *mempool, void (*fn)(const orBlock *block)) {
  for (orBlockStream *from; (from = ownerIn(blocks, mempool));) {
    orBlockStream *to = streamGet(blocks, from->stream, NULL);
    if (!to) return false;
    from->refs++;
    moveBlocks(blocks, from, to, fn);
    streamPut(blocks, from);
    streamPut(blocks, to);
  }
  return true;
}

/* ---- Blocks that are retired ---- */

void orBlocksSetRetired(orBlocks *blocks, bool retired) {
  for (size_t i = 0; blocks->slots && i <= blocks->slot_mask; i++) {
    orBlock *block = blocks->slots[i].block;
    if (!block) continue;
    if (isFree(block)) orBinsRemove(binsOf(block), block);
    block->shelf = (uint8_t)(block->pool + (retired ? OR_POOL_COUNT : 0));
    if (isFree(block)) orBinsInsert(binsOf(block), block);
  }
}

/* ---- Blocks that are not split ---- */

static size_t chainSize(const orBlock *first) {
  size_t size = 0;
  for (; first; first = first->next) size += first->size;
  return size;
}

/* Blocks that the new limit makes oversize count as such from now on. */
void orBlocksSetMaxSplit(orBlocks *blocks, size_t max_split) {
  orCacheStats *stats = &blocks->stats;
  int64_t segments = 0, allocations = 0;
  blocks->max_split = max_split;
  for (size_t i = 0; blocks->slots && i <= blocks->slot_mask; i++) {
    orBlock *block = blocks->slots[i].block;
    if (!block) continue;
    block->oversize = !isFree(block) && block->size >= max_split;
    allocations += block->oversize && block->state == OR_BLOCK_LIVE;
    segments += !block->prev && chainSize(block) >= max_split;
  }
  stats->oversize_allocations.current = allocations;
  stats->oversize_segments.current = segments;
}

/* ---- Snapshot ---- */

void orBlocksList(const orBlocks *blocks, void *list, size_t width) {
  static const orCacheBlockState states[] = {[OR_BLOCK_FREE] = orCacheBlockInactive,
                                             [OR_BLOCK_LIVE] = orCacheBlockAllocated,
                                             [OR_BLOCK_PENDING_FREE] = orCacheBlockPending};
  OR_COVERS(states, orCacheBlockPending + 1);
  for (size_t i = 0; blocks->slots && i <= blocks->slot_mask; i++) {
    const orBlock *first = blocks->slots[i].block;
    if (!first || first->prev) continue;
    for (const orBlock *block = first; block; block = block->next) {
      orCacheBlock from = {.address = (void *)block->start,
                           .segment = (void *)first->start,
                           .bytes = block->size,
                           .requested = isFree(block) ? 0 : block->requested,
                           .stream = block->owner->stream,
                           .pool = orMemPoolHandle(block->owner->mempool),
                           .state = states[block->state],
                           .large = block->pool == OR_POOL_LARGE};
      orFillElement(list, width, &from, sizeof from);
      list = (char *)list + width;
    }
  }
}
