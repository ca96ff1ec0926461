/*
 * What the tests of the caching allocator share.
 */
#ifndef CACHE_HELPERS_H
#define CACHE_HELPERS_H

#include <stdlib.h>

#include "harness.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static inline orStream_t defaultStream(int device) {
  orStream_t stream;
  ASSERT_OK(orStreamGetDefault(&stream, device));
  return stream;
}

static inline orStream_t newStream(void) {
  orStream_t stream;
  ASSERT_OK(orStreamCreate(&stream));
  return stream;
}

static inline void *take(size_t bytes, orStream_t stream) {
  void *ptr = NULL;
  ASSERT_OK(orCacheMalloc(&ptr, bytes, stream));
  ASSERT(ptr != NULL);
  ASSERT_EQ((uintptr_t)ptr % 512, 0);
  return ptr;
}

static inline orCacheStats statsOf(int device) {
  orCacheStats stats = {.size = sizeof stats};
  ASSERT_OK(orCacheGetStats(&stats, device));
  return stats;
}

/* Holds a stream until openGate. */
static inline orEvent_t closeGate(orStream_t stream) {
  orEvent_t gate;
  ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
  ASSERT_OK(orStreamWaitEvent(stream, gate));
  return gate;
}

static inline void openGate(orEvent_t gate, orStream_t stream) {
  ASSERT_OK(orEventSignal(gate, orSuccess));
  ASSERT_OK(orStreamSynchronize(stream));
  ASSERT_OK(orEventDestroy(gate));
}

static inline void launch(orStream_t stream, orKernelFn fn, void *context) {
  orLaunch l = {
      .size = sizeof l, .stream = stream, .fn = fn, .args = &context, .args_size = sizeof context};
  l.name = "test";
  ASSERT_OK(orLaunchKernelEx(&l));
}

static inline void setCapacity(const char *text) {
  clearSettings();
  setenv("OPENREG_DEVICE_MEMORY", text, 1);
}

#endif
