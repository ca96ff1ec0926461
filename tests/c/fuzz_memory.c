/*
 * Random calls about memory: see fuzz.h. No state of its own.
 */
#include <stdlib.h>

#include "fuzz.h"

size_t anySize(void) {
  static const size_t edges[] = {0,
                                 1,
                                 511,
                                 512,
                                 4095,
                                 4096,
                                 4097,
                                 1u << 20,
                                 (1u << 20) + 1,
                                 (size_t)1 << 45,
                                 SIZE_MAX / 2,
                                 SIZE_MAX - 4095,
                                 SIZE_MAX};
  if (oneIn(30)) return edges[below(sizeof edges / sizeof *edges)];
  return 1 + below(oneIn(8) ? 3 << 20 : 16 << 10);
}

char *takeBytes(Object *o, size_t bytes) {
  if (!o || !o->data) return NULL;
  size_t at = atomic_fetch_add(&o->taken, bytes);
  return at + bytes <= o->size ? o->data + at : NULL;
}

/* A process that is exiting refuses to wait, and the memory stays. */
static bool isDone(orError_t error) {
  if (error && (error != orErrorNotPermitted || !fuzz.ends_inside))
    STRESS_FAIL("memory cannot be freed: %s", orGetLastErrorMessage());
  return !error;
}

void makeDeviceMemory(void) {
  Object *o = freePlace(DEVICE_MEMORY);
  size_t size = anySize();
  void *p = NULL;
  if (!o) return;
  if (CALL(orMalloc(&p, size)) || !p)
    leavePlace(o);
  else
    fillPlace(o, 0, p, size);
}

void freeDeviceMemory(void) {
  Object *o = takeAway(DEVICE_MEMORY);
  if (!o) return;
  if (isDone(orFree(o->data))) leavePlace(o);
}

void makePinned(void) {
  Object *o = freePlace(PINNED_MEMORY);
  size_t size = anySize();
  void *p = NULL;
  if (!o) return;
  if (CALL(orMallocHost(&p, size)) || !p)
    leavePlace(o);
  else
    fillPlace(o, 0, p, size);
}

void freePinned(void) {
  Object *o = takeAway(PINNED_MEMORY);
  if (!o) return;
  if (isDone(orFreeHost(o->data))) leavePlace(o);
}

void makeRegistered(void) {
  Object *o = freePlace(REGISTERED);
  if (!o) return;
  size_t size = 1 + below(20000);
  char *p = malloc(size);
  ASSERT_OK(orHostRegister(p, size));
  CALL(orHostRegister(p, 1 + below((uint32_t)size)));
  fillPlace(o, 0, p, size);
}

void freeRegistered(void) {
  Object *o = takeAway(REGISTERED);
  if (!o) return;
  if (!isDone(orHostUnregister(o->data))) return;
  free(o->data);
  leavePlace(o);
}

void makeCached(void) {
  Object *stream = pin(PLAIN_STREAM), *o = freePlace(CACHED);
  size_t size = anySize();
  void *p = NULL;
  if (o && stream) {
    orStream_t on = stream->handle;
    if (oneIn(3))
      CALL(orCacheMallocFromPool(&p, size, on, oneIn(3) ? 0 : loose(POOL)));
    else
      CALL(orCacheMalloc(&p, size, on));
    if (p) fillPlace(o, on, p, size);
  }
  if (o && !p) leavePlace(o);
  unpin(stream);
}

void freeCached(void) {
  Object *o = takeAway(CACHED);
  if (!o) return;
  ASSERT_OK(orCacheFree(o->data));
  leavePlace(o);
}

void askMemory(void) {
  Object *o = pin((Type)(DEVICE_MEMORY + below(4)));
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  size_t a, b;
  char *at = o ? o->data : (char *)(uintptr_t)draw();
  if (o && oneIn(2)) at += below(1 << 20);
  CALL(orPointerGetAttributes(&attributes, at));
  CALL(orCacheCheck(at, anySize()));
  CALL(orCacheBlockSize(&a, at));
  CALL(orMemGetInfo(&a, &b));
  void *unknown = o ? o->data + 1 : (void *)16;
  if (!orFree(unknown) || !orFreeHost(unknown) || !orHostUnregister(unknown) ||
      !orCacheFree(unknown))
    STRESS_FAIL("%p was freed, which is inside of a block or of none", unknown);
  unpin(o);
}

void askCache(void) {
  orCacheBlock blocks[64];
  orCacheStats stats = {.size = sizeof stats};
  orMemPoolStats pool = {.size = sizeof pool};
  size_t count = below(64);
  double fraction;
  int device = anyDevice();
  CALL(orCacheSnapshot(blocks, sizeof *blocks, &count, device));
  CALL(orCacheGetStats(&stats, device));
  CALL(orMemPoolGetStats(&pool, guess(POOL)));
  CALL(orCacheGetFraction(&fraction, device));
  if (oneIn(4)) CALL(orCacheResetPeakStats(device));
  if (oneIn(4)) CALL(orCacheResetAccumulatedStats(device));
}

void changeCache(void) {
  orCacheOptions options = {.size = sizeof options,
                            .max_split_size = oneIn(2) ? 0 : anySize(),
                            .max_non_split_rounding = oneIn(2) ? 0 : anySize(),
                            .large_segment_size = oneIn(2) ? 0 : (size_t)below(64) << 20,
                            .garbage_collection_threshold = (double)below(120) / 100};
  for (int i = 0; i < 16; i++)
    options.roundup_power2_divisions[i] = oneIn(4) ? below(20) : 1u << below(5);
  switch (below(4)) {
    case 0:
      CALL(orCacheSetOptions(&options));
      break;
    case 1:
      CALL(orCacheSetFraction(anyDevice(), (double)below(110) / 100));
      break;
    case 2:
      CALL(orCacheEmpty(anyDevice()));
      break;
    default:
      CALL(orCacheEmptyPool(loose(POOL)));
  }
}

void makePool(void) {
  Object *o = freePlace(POOL);
  orMemPool_t pool = 0;
  if (!o) return;
  if (CALL(orMemPoolCreate(&pool, anyDevice())))
    leavePlace(o);
  else
    fillPlace(o, pool, NULL, 0);
}

void releasePool(void) {
  Object *o = takeAway(POOL);
  if (!o) return;
  ASSERT_OK(orMemPoolRelease(o->handle));
  ASSERT_ERROR(orMemPoolRelease(o->handle), orErrorInvalidResourceHandle);
  leavePlace(o);
}

Object *pinMemory(void) {
  return pin((Type)(DEVICE_MEMORY + below(REGISTERED - DEVICE_MEMORY + 1)));
}
