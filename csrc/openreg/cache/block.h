/*
 * The blocks of one device, for the files of cache/: which there are, which are free, statistics.
 * No locks, no streams, no device: the caller holds the cache's lock around every function.
 */
#pragma once

#include "stream/stream.h"

#define OR_BLOCK_UNIT 512u
#define OR_TASK_ANY UINT64_MAX

enum { OR_POOL_SMALL = 0, OR_POOL_LARGE = 1, OR_POOL_COUNT = 2 };
enum {
  OR_BLOCK_FREE, /* in its owner's bins */
  OR_BLOCK_LIVE, /* handed out */
  /* freed by its user, but recorded streams have not finished, or it needs poison */
  OR_BLOCK_PENDING_FREE,
};

typedef struct orBlock orBlock;
typedef struct orBlockStream orBlockStream;

/* A stream that is recorded on a block. */
typedef struct orBlockUse orBlockUse;
struct orBlockUse {
  orBlockUse *next; /* live block: its next use; pending free: the next in the stream's queue */
  orBlockStream *stream;
  orBlock *block;
  union {               /* pending free: */
    uint64_t number;    /* done when the stream has completed this many tasks */
    orCapture *capture; /* deferred: in no queue until this capture is over; a reference */
  };
};

/* The first cache line is all that a live block touches; the rest belongs to free ones. */
struct orBlock {
  _Alignas(OR_CACHE_LINE) uintptr_t start;
  size_t size;
  size_t requested;
  orBlock *prev, *next; /* neighbours by address; a segment is the chain between two nulls */
  orBlockStream *owner;
  union {
    orBlockUse *uses;    /* live: recorded streams */
    uint64_t reuse_from; /* free, pending free: the owner's first task that may use the block */
  };
  uint32_t waits; /* pending free: uses that are not done */
  uint8_t state, pool;
  uint8_t shelf;     /* its owner's, for when it is free */
  bool oversize : 1; /* live, pending free: counted as oversize */
  bool shared : 1;   /* live, pending free: exported; one of `waits` once it is freed */
  union {
    orBlock **up; /* free: the pointer that leads here, null for a younger block of a ring */
    const orOrigin *origin; /* else: the caller's description, or null */
  };
  orBlock *child[2]; /* free: sizes whose next bit is 0, 1 */
  orBlock *newer;    /* free: ring of blocks of one size; the newest follows the one in the tree */
  orBlock *older;
  size_t fresh; /* free: bytes at its end that were never handed out */
  orBlock *idle_prev,
      *idle_next; /* whole free segments; pending free: idle_next links dirty or shared ones */
};

/* Free blocks of one stream and shelf: a pool's, or its retired ones. */
typedef struct orBlockBins {
  uint64_t occupied; /* bit c: root[c] is not null */
  orBlock *root[56];
} orBlockBins;

/* A private pool; private_pool.c has their table. */
typedef struct orMemPool {
  orSlot slot;
  orMemPool_t handle;
  bool held;      /* until its release */
  uint64_t users; /* calls in progress; the pool ends when it is released and there are none */
  /* A graph may use its memory, whatever the program has freed. Read with or without the lock. */
  _Atomic bool captured;
  orCacheStat reserved_bytes[1 + OR_POOL_COUNT];
  struct orMemPool *postponed; /* the next in the cache's list */
  /* a block without memory: after the release, pending free until launched work cannot use the
   * pool's */
  orBlock end;
} orMemPool;

/* 0: the device's own memory, or that of a released pool. */
static inline orMemPool_t orMemPoolHandle(const orMemPool *mempool) {
  return mempool && mempool->held ? mempool->handle : 0;
}

/* A stream as an owner of segments, a recorded one, or both: an entry for each private pool, and
 * one without. */
struct orBlockStream {
  orStream_t stream;
  orMemPool *mempool; /* null: the device's own memory */
  size_t refs; /* by segments and uses; the entry goes with the last, the stream maybe before */
  orBlockStream *chain;
  orBlockUse *first, *last;            /* by blocks pending free, in the order of their frees */
  orBlockStream *waiting;              /* next with a non-empty queue */
  orBlockBins bins[2 * OR_POOL_COUNT]; /* by shelf: the pools', then the retired of each */
};

typedef struct orBlockSlot {
  uintptr_t start;
  orBlock *block;
} orBlockSlot;

#define OR_BLOCK_BUCKETS 64

typedef struct orBlocks {
  orBlockSlot *slots;      /* every block by its start: open addressing, load <= 1/2 */
  size_t slot_mask;        /* slots - 1, or 0 before the first */
  orBlockSlot *former[64]; /* smaller ones, by the logarithm of their size: see orBlocksAt */
  unsigned slot_shift;
  size_t count;
  orBlock *spare; /* unused structures, linked by next */
  size_t spare_count;
  orBlockUse *spare_uses;
  orBlock *idle; /* free blocks that are a whole segment */
  orBlockStream *streams[OR_BLOCK_BUCKETS];
  orBlockStream *waiting;
  size_t max_split;   /* blocks of this size or more are not split; SIZE_MAX: all may be */
  orCacheStats stats; /* incomplete but for the plain counters; read with orBlocksStats */
} orBlocks;

/* Structures and table entries for `count` more blocks; false if the host has no memory. */
bool orBlocksReserve(orBlocks *blocks, size_t count);

orBlockStream *orBlocksStreamFind(const orBlocks *blocks, orStream_t stream,
                                  const orMemPool *mempool);

/* The block that starts there, in any state, or null. */
orBlock *orBlocksFind(const orBlocks *blocks, uintptr_t start);
/* The block around an address, for a signal handler, with no lock held. Structures and tables are
 * never freed, so they may be read while another thread changes them. */
bool orBlocksAt(const orBlocks *blocks, uintptr_t address, orTouched *place);

/* A new segment is one free block; null if the host has no memory. */
orBlock *orBlocksAddSegment(orBlocks *blocks, orStream_t owner, orMemPool *mempool, uintptr_t start,
                            size_t size, int pool);
/* Free -> live, split if the remainder is worth it. One structure has been reserved. Returns where
 * its fresh bytes begin, or its end. */
uintptr_t orBlocksTake(orBlocks *blocks, orBlock *block, size_t size, size_t requested,
                       const orOrigin *origin);
/* Live -> pending free: no longer allocated, still active. The caller queues the returned uses. */
orBlockUse *orBlocksBeginFree(orBlocks *blocks, orBlock *block, uint64_t reuse_from);
/* Pending free -> free, merged with free neighbours. */
void orBlocksFree(orBlocks *blocks, orBlock *block);
/* Removes an idle block, whose memory is now the caller's. */
void orBlocksRemoveSegment(orBlocks *blocks, orBlock *block);

/* Moves all of a private pool's blocks to the device's own, and calls `fn` with each. False if the
 * host has no memory, which leaves some of them unmoved. */
bool orBlocksDissolve(orBlocks *blocks, orMemPool *mempool, void (*fn)(const orBlock *block));
/* Retires all present blocks, which are not found when free; or ends that. */
void orBlocksSetRetired(orBlocks *blocks, bool retired);

void orBlocksSetMaxSplit(orBlocks *blocks, size_t max_split);

/* False if the host has no memory. No effect if the stream is recorded already. */
bool orBlocksAddUse(orBlocks *blocks, orBlock *block, orStream_t stream);
/* Queues a pending-free block's use: done when the stream has completed `number` tasks. */
void orBlocksQueueUse(orBlocks *blocks, orBlockUse *use, uint64_t number);
/* Ends the first use in the queue of *waiting and returns its block. If the queue is then empty,
 * *waiting becomes the next stream. */
orBlock *orBlocksEndUse(orBlocks *blocks, orBlockStream **waiting);

/* ---- bins.c ---- */

void orBinsInsert(orBlockBins *bins, orBlock *block);
void orBinsRemove(orBlockBins *bins, orBlock *block);
/* The smallest free block of `size` bytes or more that task number `task` may have, or OR_TASK_ANY
 * (for work yet to be queued). A task checks a bounded number of blocks. */
orBlock *orBinsBestFit(const orBlockBins *bins, size_t size, uint64_t task);

/* ---- Statistics ---- */

/* Completes one statistic in its three pools from what is maintained. */
void orStatComplete(orCacheStat *stat);
void orStatResetPeak(orCacheStat *stat);
void orStatResetAccumulated(orCacheStat *stat);

void orBlocksStats(const orBlocks *blocks, orCacheStats *stats);
void orBlocksResetPeak(orBlocks *blocks);
void orBlocksResetAccumulated(orBlocks *blocks);

/* Lists up to `count` blocks, segment after segment, each in order of address. */
void orBlocksList(const orBlocks *blocks, void *list, size_t width);
