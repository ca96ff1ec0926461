/*
 * Sharing the caching allocator's blocks between processes.
 *
 * A block that another process may read is held by:
 *
 *     its owner         the block is live, or pending free in orCache.shared
 *     a description     `use` of its orShare counts those in transit; an import takes one off
 *     another process   a read lock on the byte of the block's first unit, until the import is
 *                       released and queued work is over; the kernel drops it when the process ends
 *     a relay           a process that has sent on what it imported: a read lock on a second byte
 *                       while such descriptions are in transit
 *     an import here    an orHold (a description that came back to the owner has no lock)
 *
 * An import takes its lock first and then compares the generation; a sweep changes the generation
 * and then looks for locks. So either the import is refused, or the block stays pending.
 *
 * orSharedLock guards the holds and the shared part of the files. The cache's lock is taken under
 * it. A sweep ends the blocks that it found without the first, as tools hear of them.
 */
#include "openreg_ipc.h"

#include <stdlib.h>

#include "base/interval_tree.h"
#include "cache/cache.h"
#include "device/shared_file.h"
#include "stream/ipc_event.h"

/* orShare.use: the generation, and above and below OR_RELAYED_ONE the counts of descriptions in
 * transit from importing processes and from the owner. */
enum { OR_COUNT_BITS = 18, OR_MOST_IN_TRANSIT = (1 << OR_COUNT_BITS) - 1 };
#define OR_RELAYED_ONE (UINT64_C(1) << OR_COUNT_BITS)
#define OR_GENERATION_ONE (UINT64_C(1) << 2 * OR_COUNT_BITS)

typedef struct orQueuedWork {
  orStream_t stream;
  uint64_t number;
} orQueuedWork;

/* The imports of one block. */
typedef struct orHold {
  orTreeNode node; /* first; the block's addresses here */
  int file;
  uint64_t block;
  bool locked;  /* the byte of imported memory */
  bool relayed; /* the relay's byte */
  size_t count;
  struct orHold *next; /* released: among those that wait for queued work */
  size_t awaited_count;
  orQueuedWork *awaited;
} orHold;

static orTree holds = OR_TREE_INITIALIZER;
static size_t hold_count;
static orHold *released;

/* ---- holds ---- */

static orHold *holdAt(const void *ptr) {
  return (orHold *)orTreeFind(&holds, (uintptr_t)ptr, (uintptr_t)ptr + 1);
}

static uint64_t byteOf(uint64_t block) { return block / OR_SHARED_UNIT + 1; }
static uint64_t relayByteOf(uint64_t block) { return byteOf(block) | UINT64_C(1) << 60; }

static uint32_t generationOf(uint64_t use) { return (uint32_t)(use >> 2 * OR_COUNT_BITS); }

static uint32_t inTransit(uint64_t use, bool relayed) {
  return (uint32_t)(use >> (relayed ? OR_COUNT_BITS : 0)) & OR_MOST_IN_TRANSIT;
}

static bool lockHold(orHold *h) {
  const orSharedFile *f = orSharedFileAt(h->file);
  if (!h->locked) h->locked = f->imported && orSharedByteHold(f, byteOf(h->block));
  return h->locked || !f->imported;
}

static void unlockHold(orHold *h) {
  if (h->locked) orSharedByteDrop(orSharedFileAt(h->file), byteOf(h->block));
  h->locked = false;
}

static void endRelay(orHold *h) {
  if (h->relayed) orSharedByteDrop(orSharedFileAt(h->file), relayByteOf(h->block));
  h->relayed = false;
}

/* Whether descriptions that this process has sent on may be in transit. */
static bool relays(const orHold *h) {
  const orSharedFile *f = orSharedFileAt(h->file);
  return h->relayed && inTransit(atomic_load(&orShareAt(f, h->block)->use), true);
}

static void endHold(orHold *h) {
  orSharedFile *f = orSharedFileAt(h->file);
  unlockHold(h);
  endRelay(h);
  f->holds--;
  hold_count--;
  orTreeRemove(&holds, &h->node);
  free(h->awaited);
  free(h);
}

static bool isOver(orHold *h) {
  for (; h->awaited_count; h->awaited_count--) {
    orQueuedWork *a = &h->awaited[h->awaited_count - 1];
    if (!orCacheCompleted(a->stream, a->number)) return false;
  }
  return true;
}

static void pollReleased(void) {
  for (orHold **at = &released, *h; (h = *at);) {
    bool over = isOver(h);
    if (over) unlockHold(h);
    if (!over || relays(h)) {
      at = &h->next;
      continue;
    }
    *at = h->next;
    endHold(h);
  }
}

static void noteAwaited(orStream *s, uint64_t queued, void *context) {
  orHold *h = context;
  orQueuedWork *grown = realloc(h->awaited, (h->awaited_count + 1) * sizeof *grown);
  if (!grown) return;
  h->awaited = grown;
  grown[h->awaited_count++] = (orQueuedWork){orStreamHandleOf(s), queued};
}

static void forgetRelease(const orHold *hold) {
  for (orHold **at = &released; *at; at = &(*at)->next)
    if (*at == hold) {
      *at = hold->next;
      return;
    }
}

static orError_t refuseLock(void) {
  return orFail(orErrorSystem, "the system refuses a lock of shared memory");
}

static orError_t makeHold(orSharedFile *f, uint64_t block, orHold **made) {
  orHold *h = calloc(1, sizeof *h);
  if (!h) return orFail(orErrorMemoryAllocation, "no host memory for an import's entry");
  h->file = orSharedFileNumber(f);
  h->block = block;
  uintptr_t begin = (uintptr_t)f->base + block;
  uint64_t bytes = atomic_load(&orShareAt(f, block)->bytes);
  orTreeInsert(&holds, &h->node, begin, begin + (bytes ? bytes : 1));
  f->holds++;
  hold_count++;
  *made = h;
  return orSuccess;
}

/* ---- export ---- */

static orError_t refuseExport(const void *ptr, const char *why) {
  return orFail(orErrorNotSupported, "%p cannot be shared: %s", ptr, why);
}

static orError_t refuseRegion(const void *ptr, const orRegion *r) {
  if (r->type != orMemoryTypeDevice) return refuseExport(ptr, "it is not device memory");
  if (orDeviceAt(r->device)->factory != &orSimulatedFactory)
    return refuseExport(ptr, "only simulated devices share memory");
  if (!r->cached) return refuseExport(ptr, "it does not come from the caching allocator");
  return orFail(orErrorSystem,
                "%p cannot be shared: its memory has no file of its own, as the process may have "
                "%d of them open, half of its limit (ulimit -n)",
                ptr, orSharedFileLimit());
}

/* Finds the block and marks it as shared. */
static orError_t exportOwn(orSharedFile *f, const void *ptr, orIpcMemory *m) {
  orBlock *block;
  OR_TRY(orSharedFilePublish(f));
  orCache *cache = orCacheLockAround(ptr, &block);
  bool live = cache && block->state == OR_BLOCK_LIVE;
  if (live) {
    block->shared = true;
    m->block = block->start - (uintptr_t)f->base;
    atomic_store(&orShareAt(f, m->block)->bytes, block->size);
  }
  if (cache) orCacheUnlock(cache);
  if (!live) {
    const orHold *h = holdAt(ptr); /* it came back, and its owner has freed it meanwhile */
    if (!h) return orFail(orErrorInvalidValue, "%p has been freed already", ptr);
    m->block = h->block;
  }
  return orSuccess;
}

/* A lock that this process drops when the descriptions have been read, or when it ends. */
static orError_t exportImported(const orSharedFile *f, const void *ptr, orIpcMemory *m) {
  orHold *h = holdAt(ptr);
  if (!h) return orFail(orErrorInvalidValue, "%p has been released already", ptr);
  if (!h->relayed) h->relayed = orSharedByteHold(f, relayByteOf(h->block));
  if (!h->relayed) return refuseLock();
  m->block = h->block;
  m->relayed = 1;
  return orSuccess;
}

/* Counts a description in transit. */
static orError_t depart(orShare *share, orIpcMemory *m) {
  uint64_t one = m->relayed ? OR_RELAYED_ONE : 1;
  uint64_t use = atomic_load(&share->use);
  do {
    if (inTransit(use, m->relayed) == OR_MOST_IN_TRANSIT)
      return orFail(orErrorSystem,
                    "%d descriptions of one block are in transit, the most there are",
                    OR_MOST_IN_TRANSIT);
  } while (!atomic_compare_exchange_weak(&share->use, &use, use + one));
  m->generation = generationOf(use);
  return orSuccess;
}

static orError_t describe(const void *ptr, size_t bytes, orIpcMemory *m) {
  orRegion r;
  if (!orRegionFind(ptr, &r))
    return orFail(orErrorInvalidValue, "%p is not memory of a device", ptr);
  if (!r.file) return refuseRegion(ptr, &r);
  orSharedFile *f = orSharedFileAt(r.file);
  OR_TRY(r.imported ? exportImported(f, ptr, m) : exportOwn(f, ptr, m));
  orShare *share = orShareAt(f, m->block);
  m->device = f->device;
  m->file = f->id;
  m->file_bytes = f->bytes;
  m->offset = (uint64_t)((uintptr_t)ptr - (uintptr_t)f->base);
  m->bytes = bytes;
  if (m->offset - m->block + bytes > atomic_load(&share->bytes))
    return orFail(orErrorInvalidValue, "[%p, +%zu) ends past its block of %zu bytes", ptr, bytes,
                  (size_t)atomic_load(&share->bytes));
  return depart(share, m);
}

/* Leaves at most `most` descriptions in transit, of those of the owner or of importing processes.
 * Returns how many are left: none if the block is another one meanwhile. */
static uint32_t limitTransit(orShare *share, const orIpcMemory *m, size_t most) {
  uint64_t use = atomic_load(&share->use);
  for (;;) {
    uint32_t count = inTransit(use, m->relayed);
    if (generationOf(use) != m->generation) return 0;
    if (count <= most) return count;
    uint64_t lost = (count - most) * (m->relayed ? OR_RELAYED_ONE : 1);
    if (atomic_compare_exchange_weak(&share->use, &use, use - lost)) return (uint32_t)most;
  }
}

/* Takes one description off, unless there is none or the block is another one meanwhile. */
static void arrive(orShare *share, const orIpcMemory *m) {
  uint64_t use = atomic_load(&share->use);
  while (
      inTransit(use, m->relayed) && generationOf(use) == m->generation &&
      !atomic_compare_exchange_weak(&share->use, &use, use - (m->relayed ? OR_RELAYED_ONE : 1))) {
  }
}

static void takeBack(const orIpcMemory *m) {
  orSharedLock();
  orSharedFile *f = orSharedFileFind(&m->file);
  if (f) arrive(orShareAt(f, m->block), m);
  orSharedUnlock();
}

enum { OR_SWEEP_SHORT = 8 };

orError_t orIpcExport(orIpcMemory *memory, const void *ptr, size_t bytes, orStream_t stream) {
  OR_TRY(orEnterBlocking());
  if (!memory || !ptr || !bytes)
    return orFail(orErrorInvalidValue, "orIpcExport: no memory, or no room for its description");
  orIpcMemory m = {.size = sizeof m, .version = OPENREG_VERSION};
  OR_TRY(OR_CHECK_FILL(orIpcMemory, memory, ready));
  orIpcSweep(OR_SWEEP_SHORT);
  orSharedLock();
  pollReleased();
  orError_t error = describe(ptr, bytes, &m);
  orSharedUnlock();
  if (error) return error;
  error = orIpcStreamMoment(&m.ready, stream);
  if (error) {
    takeBack(&m);
    return error;
  }
  return OR_FILL(orIpcMemory, memory, &m, ready);
}

/* ---- import ---- */

static orError_t refuseDescription(const char *why) {
  return orFail(orErrorInvalidValue, "the description of shared memory %s", why);
}

static orError_t checkVersion(const orIpcMemory *m) {
  if (!m || m->size != sizeof *m) return refuseDescription("has the wrong size");
  if (m->version != OPENREG_VERSION)
    return orFail(orErrorInvalidValue,
                  "the memory comes from version %u.%u.%u of openreg, and this process has %s",
                  m->version / 10000, m->version / 100 % 100, m->version % 100,
                  OPENREG_VERSION_STRING);
  int count = 0;
  OR_TRY(orGetDeviceCount(&count));
  if (m->device < 0 || m->device >= count)
    return orFail(orErrorInvalidDevice,
                  "the memory is of device %d, and this process has %d (OPENREG_DEVICE_COUNT)",
                  m->device, count);
  return orSuccess;
}

static orError_t checkRange(const orSharedFile *f, const orIpcMemory *m) {
  if (f->device != m->device || f->bytes != m->file_bytes || f->head->magic != orSharedSegment)
    return refuseDescription("does not match its file");
  if (m->block % OR_SHARED_UNIT || m->block >= f->bytes || m->offset < m->block ||
      m->offset >= f->bytes || m->bytes > f->bytes - m->offset)
    return refuseDescription("has a range outside of its file");
  if (m->offset - m->block + m->bytes > atomic_load(&orShareAt(f, m->block)->bytes))
    return refuseDescription("has a range past the end of its block");
  return orSuccess;
}

static orError_t mapOnce(orSharedFile *f) {
  void *base;
  if (f->base) return orSuccess;
  if (orDeviceAt(f->device)->factory != &orSimulatedFactory)
    return refuseDescription("is for a simulated device, which this process does not have");
  OR_TRY(orRegionImport(f->device, f->bytes, orSharedFileNumber(f), &base));
  orError_t error = orSharedFileMap(f, base);
  if (!error) return orSuccess;
  f->ending = true; /* its entry ends with the region */
  return error;
}

static orError_t missing(void) {
  return orFail(orErrorNotFound, "a file of shared memory is not open here");
}

static orError_t hold(const orIpcMemory *m, void **ptr) {
  orSharedFile *f = orSharedFileFind(&m->file);
  if (!f) return missing();
  OR_TRY(checkRange(f, m));
  OR_TRY(mapOnce(f));
  orHold *h = holdAt((char *)f->base + m->block);
  if (!h) OR_TRY(makeHold(f, m->block, &h));
  if (!h->count++) {
    forgetRelease(h);
    h->awaited_count = 0;
  }
  orShare *share = orShareAt(f, m->block);
  bool locked = lockHold(h);
  if (!locked || generationOf(atomic_load(&share->use)) != m->generation) {
    if (!--h->count) endHold(h);
    if (!locked) return refuseLock();
    return orFail(orErrorInvalidResourceHandle,
                  "the memory of this description has been freed by its owner%s",
                  m->relayed ? ", as the process that sent it on has ended" : "");
  }
  arrive(share, m);
  *ptr = (char *)f->base + m->offset;
  return orSuccess;
}

orError_t orIpcImport(void **ptr, const orIpcMemory *memory, orStream_t stream) {
  OR_TRY(orEnterBlocking());
  if (!ptr) return orFail(orErrorInvalidValue, "orIpcImport: null result");
  *ptr = NULL;
  OR_TRY(checkVersion(memory));
  OR_TRY(orDeviceUse(memory->device));
  OR_TRY(orDeviceCheckLost(memory->device));
  orSharedLock();
  pollReleased();
  orError_t error = hold(memory, ptr);
  orSharedUnlock();
  if (!error) error = orIpcEventWait(&memory->ready, stream);
  if (error && *ptr) orIpcRelease(*ptr);
  if (error) *ptr = NULL;
  return error;
}

orError_t orIpcReceive(const orIpcMemory *memory, orStream_t stream) {
  OR_TRY(orEnterBlocking());
  OR_TRY(checkVersion(memory));
  orSharedLock();
  orSharedFile *f = orSharedFileFind(&memory->file);
  orError_t error = f ? checkRange(f, memory) : missing();
  if (!error) arrive(orShareAt(f, memory->block), memory);
  orSharedUnlock();
  return error ? error : orIpcEventWait(&memory->ready, stream);
}

/* All relays of a block have one count, and each a lock, which ends with its own descriptions. */
static uint32_t limitRelay(const orSharedFile *f, const orIpcMemory *m, size_t most) {
  uint32_t count = limitTransit(orShareAt(f, m->block), m, SIZE_MAX);
  orHold *h = count ? holdAt((char *)f->base + m->block) : NULL;
  if (h && !most) endRelay(h);
  return h && h->relayed ? count : 0;
}

orError_t orIpcTransit(size_t *count, const orIpcMemory *memory, size_t most) {
  OR_TRY(orEnter());
  if (!count) return orFail(orErrorInvalidValue, "orIpcTransit: null result");
  *count = 0;
  OR_TRY(checkVersion(memory));
  orSharedLock();
  orSharedFile *f = orSharedFileFind(&memory->file);
  orError_t error = f ? checkRange(f, memory) : orSuccess;
  if (f && !error && f->imported == (memory->relayed != 0))
    *count = f->imported ? limitRelay(f, memory, most)
                         : limitTransit(orShareAt(f, memory->block), memory, most);
  pollReleased();
  orSharedUnlock();
  return error;
}

orError_t orIpcRelease(void *ptr) {
  OR_TRY(orEnter());
  if (!ptr) return orSuccess;
  orSharedLock();
  orHold *h = holdAt(ptr);
  orError_t error =
      h && h->count ? orSuccess : orFail(orErrorInvalidValue, "%p is not imported memory", ptr);
  if (!error && !--h->count) {
    h->awaited_count = 0;
    orStreamForEach(-1, noteAwaited, h);
    h->next = released;
    released = h;
    pollReleased();
  }
  orSharedUnlock();
  return error;
}

/* ---- sweeps ---- */

/* Whether a process or a description holds a block that its owner has freed. If none does, no
 * description of it can be imported any more. orSharedLock and the cache's held. */
static bool isHeld(const orBlock *block) {
  orRegion r;
  if (!orRegionFind((const void *)block->start, &r)) return false;
  const orSharedFile *f = orSharedFileAt(r.file);
  uint64_t at = block->start - (uintptr_t)f->base;
  orShare *share = orShareAt(f, at);
  uint64_t use = atomic_load(&share->use);
  if (inTransit(use, false) || holdAt((void *)block->start) || orSharedByteHeld(f, byteOf(at)))
    return true;
  if (inTransit(use, true) && orSharedByteHeld(f, relayByteOf(at))) return true;
  uint64_t next = (use & -OR_GENERATION_ONE) + OR_GENERATION_ONE;
  return !atomic_compare_exchange_strong(&share->use, &use, next) ||
         orSharedByteHeld(f, byteOf(at));
}

/* Takes blocks that are not held off the list; those that are go to its end. */
static orBlock *takeUnheld(orCache *cache, size_t most) {
  orBlock *taken = NULL, *last = cache->shared_last;
  for (orBlock *block; most-- && (block = cache->shared);) {
    cache->shared = block->idle_next;
    if (isHeld(block)) {
      orCacheKeepShared(cache, block);
    } else {
      block->idle_next = taken;
      taken = block;
    }
    if (block == last) break;
  }
  return taken;
}

static void sweep(orCache *cache, size_t most) {
  orSharedLock();
  orCacheLock(cache);
  orBlock *block = takeUnheld(cache, most);
  orCacheUnlock(cache);
  orSharedUnlock();
  if (!block) return;
  orCacheLock(cache);
  for (orBlock *next; block; block = next) {
    next = block->idle_next;
    orCacheEndShare(cache, block);
  }
  orCachePoll(cache);
  orCacheUnlock(cache);
}

void orIpcSweep(size_t most) {
  for (int device = 0; device < OPENREG_MAX_DEVICES; device++)
    if (__atomic_load_n(&orCaches[device].shared, __ATOMIC_RELAXED)) sweep(&orCaches[device], most);
}

/* Unmaps imported segments of which nothing is held. `all`: also those whose owner has them. */
static void unmapIdle(bool all) {
  for (int n = 1;; n++) {
    orSharedLock();
    orSharedFile *f = orSharedFileNext(n);
    bool idle = f && f->imported && f->base && !f->holds && !f->ending &&
                (all || atomic_load(&f->head->gone));
    if (idle) f->ending = true;
    orSharedUnlock();
    if (!f) return;
    n = orSharedFileNumber(f);
    if (idle) orRegionRelease(f->base);
  }
}

orError_t orIpcCollect(void) {
  OR_TRY(orEnterBlocking());
  orSharedLock();
  pollReleased();
  orIpcEventsForget();
  orSharedUnlock();
  unmapIdle(true);
  orIpcSweep(SIZE_MAX);
  return orSuccess;
}

/* ---- files ---- */

int orIpcHas(const orIpcId *id) {
  if (!id || orEnter()) return 0;
  orSharedLock();
  bool has = orSharedFileFind(id) != NULL;
  orSharedUnlock();
  return has;
}

orError_t orIpcFile(int *descriptor, const orIpcId *id) {
  OR_TRY(orEnter());
  if (!descriptor || !id) return orFail(orErrorInvalidValue, "orIpcFile: an argument is null");
  orSharedLock();
  const orSharedFile *f = orSharedFileFind(id);
  *descriptor = f ? f->descriptor : -1;
  orSharedUnlock();
  return f ? orSuccess : missing();
}

static orError_t openOnce(const orIpcId *id, int descriptor) {
  orSharedFile *f = orSharedFileFind(id);
  return f ? orSuccess : orSharedFileOpen(id, descriptor, &f);
}

orError_t orIpcAddFile(const orIpcId *id, int descriptor) {
  OR_TRY(orEnterBlocking());
  if (!id) return orFail(orErrorInvalidValue, "orIpcAddFile: the id is null");
  OR_TRY(orDevicesInit());
  unmapIdle(false);
  orSharedLock();
  orError_t error = openOnce(id, descriptor);
  orSharedUnlock();
  if (error != orErrorSystem) return error;
  OR_TRY(orIpcCollect()); /* idle files may be in the way */
  orSharedLock();
  error = openOnce(id, descriptor);
  orSharedUnlock();
  return error;
}

static size_t pendingBlocks(void) {
  size_t count = 0;
  for (int device = 0; device < OPENREG_MAX_DEVICES; device++) {
    orCacheLock(&orCaches[device]);
    for (const orBlock *b = orCaches[device].shared; b; b = b->idle_next) count++;
    orCacheUnlock(&orCaches[device]);
  }
  return count;
}

orError_t orIpcGetStats(orIpcStats *stats) {
  OR_TRY(orEnter());
  if (!stats) return orFail(orErrorInvalidValue, "orIpcGetStats: null result");
  orIpcStats from = {.pending = pendingBlocks()};
  orSharedLock();
  pollReleased();
  from.holds = hold_count;
  for (const orSharedFile *f = orSharedFileAt(0);
       (f = orSharedFileNext(orSharedFileNumber(f) + 1));) {
    from.files++;
    from.imported += f->imported && f->base;
  }
  orSharedUnlock();
  return OR_FILL(orIpcStats, stats, &from, pending);
}
