/*
 * Pinned memory that is mapped twice: once for the caller, whose pages may be guarded, and once,
 * its mirror, for tasks.
 */
#ifndef OPENREG_MIRROR_H
#define OPENREG_MIRROR_H

#include "device/device.h"

/* What a page of the caller's refuses: a greater one refuses more. */
typedef enum orGuard { OR_GUARD_NOTHING, OR_GUARD_WRITES, OR_GUARD_ALL } orGuard;

/* From now on orMallocHost's memory is mapped twice; returns what it was. */
bool orAliasesWanted(bool wanted);
/* After it has been mapped: by orAliasesWanted a second time, too. */
void orAliasNew(void *ptr, size_t bytes);
/* Of memory that starts there and that nobody uses: its bytes are lost. It stays as it is where the
 * system refuses. */
void orAliasMake(void *ptr, size_t bytes);
/* Before it is unmapped; of one that is mapped once, too. */
void orAliasForget(void *ptr);

extern OR_HIDDEN _Atomic size_t orAliasCount;
void *orAliasAddress(const void *ptr);
/* Where tasks reach a byte: in the mirror, if there is one. */
static inline void *orAliasOf(const void *ptr) {
  if (OR_LIKELY(!atomic_load_explicit(&orAliasCount, memory_order_relaxed)))
    return (void *)(uintptr_t)ptr;
  return orAliasAddress(ptr);
}

typedef struct orPages {
  size_t from, to; /* none: from is not below to */
} orPages;

/* For the pages of a block, of which the first is at `first`, it raises `guards`, which are
 * OR_GUARD_NOTHING, and returns a stretch outside of which they still are. */
typedef orPages (*orChooseGuards)(uintptr_t first, size_t pages, uint8_t *guards);
/* Guards every block that meets [begin, end) as `choose` says. With `again`, only blocks that are
 * guarded now. Under the lock of this file: it takes none. */
void orAliasGuard(uintptr_t begin, uintptr_t end, bool again, orChooseGuards choose);
/* False if the page is in no such block. */
bool orAliasGuardAt(uintptr_t address, orGuard *guard);
/* The page is guarded no more, until orAliasGuard; false if the system refuses. */
bool orAliasLift(uintptr_t address);

#endif
