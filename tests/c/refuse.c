/*
 * The calls of refuse.h: passed on to whoever is next, unless they are to be refused.
 *
 * `refused` belongs to the thread that asks for it, before others can make such a call; `left` is
 * atomic.
 */
#include "refuse.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))

static struct {
  Refusable call;
  int argument;
  size_t below;
} refused;
static atomic_int left;

void refuseCalls(Refusable call, int argument, size_t below, int count) {
  refused.call = call;
  refused.argument = argument;
  refused.below = below;
  atomic_store(&left, count);
}

static int refuses(Refusable call, size_t bytes, int argument) {
  if (!atomic_load(&left) || call != refused.call || argument != refused.argument) return 0;
  if (bytes >= refused.below) return 0;
  atomic_fetch_sub(&left, 1);
  errno = ENOMEM;
  return 1;
}

EXPORT int madvise(void *at, size_t bytes, int advice) {
  int (*next)(void *, size_t, int);
  *(void **)&next = dlsym(RTLD_NEXT, "madvise");
  return refuses(REFUSE_MADVISE, bytes, advice) ? -1 : next(at, bytes, advice);
}

EXPORT int mprotect(void *at, size_t bytes, int protection) {
  int (*next)(void *, size_t, int);
  *(void **)&next = dlsym(RTLD_NEXT, "mprotect");
  return refuses(REFUSE_MPROTECT, bytes, protection) ? -1 : next(at, bytes, protection);
}

EXPORT int munmap(void *at, size_t bytes) {
  int (*next)(void *, size_t);
  *(void **)&next = dlsym(RTLD_NEXT, "munmap");
  return refuses(REFUSE_MUNMAP, bytes, 0) ? -1 : next(at, bytes);
}
