/*
 * The caching allocator's history: its actions, one by one, and a list of all its blocks.
 *
 * An action is recorded under the cache's lock, which orders it, and reported when the lock is
 * released (orCacheUnlock), because no callback runs under a lock. The records change hands with
 * the log's array. Switched off, the usual case, an action costs one relaxed load.
 *
 * `orCacheHook` is atomic and set by any thread; a thread that has loaded it may call it a moment
 * later.
 */
#include <stdlib.h>

#include "cache/cache.h"

_Atomic(void (*)(const orCacheRecord *)) orCacheHook;

static bool growLog(orCacheLog *log) {
  size_t capacity = log->capacity ? log->capacity * 2 : 8;
  orCacheRecord *records = realloc(log->records, capacity * sizeof *records);
  if (!records) return false;
  log->records = records;
  log->capacity = capacity;
  return true;
}

/* Without host memory for a record, the history has a gap, visible in its sequence. */
void orCacheNoteSlow(orCache *cache, orCacheAction action, uintptr_t address, size_t bytes,
                     orStream_t stream, const orMemPool *mempool) {
  orCacheLog *log = &cache->log;
  int device = orCacheDevice(cache);
  uint64_t sequence = ++cache->sequence;
  if (log->count == log->capacity && !growLog(log)) return;
  orCacheRecord *record = &log->records[log->count++];
  *record = (orCacheRecord){.action = action,
                            .device = device,
                            .address = (void *)address,
                            .bytes = bytes,
                            .stream = stream,
                            .pool = orMemPoolHandle(mempool),
                            .sequence = sequence,
                            .time_ns = orNow()};
  if (action == orCacheActionOutOfMemory)
    record->device_free = orDeviceAt(device)->desc.memory_limit - orRegionUsed(device);
}

void orCacheCallHook(orCache *cache) {
  orCacheLog log = cache->log;
  cache->log = (orCacheLog){0};
  orMutexUnlock(&cache->lock);
  void (*hook)(const orCacheRecord *) = atomic_load_explicit(&orCacheHook, memory_order_acquire);
  for (size_t i = 0; hook && i < log.count; i++) hook(&log.records[i]);
  free(log.records);
}

orError_t orSetCacheHook(void (*hook)(const orCacheRecord *)) {
  OR_TRY(orEnter());
  atomic_store_explicit(&orCacheHook, hook, memory_order_release);
  return orSuccess;
}

orError_t orCacheSnapshot(orCacheBlock *blocks, size_t block_size, size_t *count, int device) {
  OR_TRY(orEnter());
  if (!count || (*count && !blocks))
    return orFail(orErrorInvalidValue, "orCacheSnapshot: null result");
  OR_TRY(orCheckSize("orCacheBlock", block_size, OR_END(orCacheBlock, pool)));
  OR_TRY(orDeviceCheck(device));
  orCache *cache = &orCaches[device];
  orCacheLock(cache);
  bool fits = cache->blocks.count <= *count;
  *count = cache->blocks.count;
  if (fits) {
    orBlocksList(&cache->blocks, blocks, block_size);
    orCacheNote(cache, orCacheActionSnapshot, 0, 0, 0, NULL);
  }
  orCacheUnlock(cache);
  return orSuccess;
}
