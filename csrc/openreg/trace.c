/*
 * The tracing hook: one pointer to a pair that is never freed, so that a lane that has loaded it may call it
 * whenever it gets there. Off, a task costs one relaxed load.
 */
#include <stdlib.h>

#include "core.h"

typedef struct orTraceHook {
  void (*fn)(void *context, const orTraceRecord *record);
  void *context;
} orTraceHook;

static _Atomic(orTraceHook *) hook;

bool orTraceOn(void) { return atomic_load_explicit(&hook, memory_order_relaxed) != NULL; }

void orTraceEmit(const orTraceRecord *record) {
  orTraceHook *h = atomic_load_explicit(&hook, memory_order_acquire);
  if (h) h->fn(h->context, record);
}

orError_t orSetTraceHook(void (*fn)(void *, const orTraceRecord *), void *context) {
  OR_TRY(orEnter());
  orTraceHook *h = NULL;
  if (fn) {
    h = malloc(sizeof *h);
    if (!h) return orFail(orErrorMemoryAllocation, "no memory for a trace hook");
    *h = (orTraceHook){fn, context};
  }
  atomic_store_explicit(&hook, h, memory_order_release);
  return orSuccess;
}
