/*
 * Pinned memory that is mapped twice: for the caller, where pages may be guarded, and at an alias
 * for tasks.
 */
#pragma once

#include "device/device.h"

/* The accesses that a page of the caller's mapping refuses, from fewer to more. */
typedef enum orGuard { OR_GUARD_NOTHING, OR_GUARD_WRITES, OR_GUARD_ALL } orGuard;

/* Sets whether orMallocHost's memory is mapped twice; returns the previous setting. */
bool orAliasesWanted(bool wanted);
/* Called for new pinned memory: maps it a second time if orAliasesWanted has set that. */
void orAliasNew(void *ptr, size_t bytes);
/* Maps unused memory at `ptr` a second time; its bytes are lost. No effect if the system
 * refuses. */
void orAliasMake(void *ptr, size_t bytes);
/* Called before memory is unmapped, whether it has an alias or not. */
void orAliasForget(void *ptr);

extern OR_HIDDEN _Atomic size_t orAliasCount;
void *orAliasAddress(const void *ptr);
/* The address at which tasks reach a byte: in the alias, if there is one. */
static inline void *orAliasOf(const void *ptr) {
  if (OR_LIKELY(!atomic_load_explicit(&orAliasCount, memory_order_relaxed)))
    return (void *)(uintptr_t)ptr;
  return orAliasAddress(ptr);
}

typedef struct orPages {
  size_t from, to; /* none: `from` is not below `to` */
} orPages;

/* Raises `guards`, which are OR_GUARD_NOTHING, for a block's pages from `first` on. Returns a range
 * that contains all raised ones. */
typedef orPages (*orChooseGuards)(uintptr_t first, size_t pages, uint8_t *guards);
/* Sets the guards of every block that overlaps [begin, end) to those that `choose` returns; with
 * `again`, only of blocks that are guarded now. `choose` is called under this file's lock and takes
 * none. */
void orAliasGuard(uintptr_t begin, uintptr_t end, bool again, orChooseGuards choose);
/* False if the page is in no block with an alias. */
bool orAliasGuardAt(uintptr_t address, orGuard *guard);
/* Removes the page's guard until orAliasGuard is called; false if the system refuses. */
bool orAliasLift(uintptr_t address);
