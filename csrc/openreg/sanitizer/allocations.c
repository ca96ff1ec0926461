/*
 * The stack of each block's first use, by which reports name memory.
 *
 * An operator that allocates its result uses it at once, with the same stack. So the stack of a
 * block is that of its first access, which is captured anyway; capturing one more for each block
 * would cost as much as the rest of the analysis.
 *
 * A node for each block that the caching allocator has handed out since the sanitizer was enabled;
 * it goes when its bytes are handed out again. All under orSanitizerMutex.
 */
#include <stdlib.h>

#include "sanitizer/private.h"

typedef struct orAllocation {
  orTreeNode node;
  orStack *stack; /* a reference; null: not used yet */
} orAllocation;

static orTree tree = OR_TREE_INITIALIZER;
static size_t unused;

static orAllocation *find(uintptr_t begin, uintptr_t end) {
  return (orAllocation *)orTreeFind(&tree, begin, end);
}

void orAllocationForget(uintptr_t begin, uintptr_t end) {
  for (orAllocation *a; (a = find(begin, end));) {
    orTreeRemove(&tree, &a->node);
    unused -= !a->stack;
    orStackRelease(a->stack);
    free(a);
  }
}

/* A program that repeats itself gets the same blocks again. */
static bool renew(uintptr_t begin, uintptr_t end) {
  orAllocation *a = find(begin, end);
  if (!a || a->node.begin != begin || a->node.end != end) return false;
  if (a->stack) unused++;
  orStackRelease(a->stack);
  a->stack = NULL;
  return true;
}

void orAllocationAdd(uintptr_t begin, size_t bytes) {
  if (renew(begin, begin + bytes)) return;
  orAllocationForget(begin, begin + bytes);
  orAllocation *a = orSanitizerAllocate(sizeof *a);
  a->stack = NULL;
  orTreeInsert(&tree, &a->node, begin, begin + bytes);
  unused++;
}

void orAllocationUse(uintptr_t begin, orStack *stack) {
  if (!unused || !stack) return;
  orAllocation *a = find(begin, begin + 1);
  if (!a || a->stack) return;
  a->stack = orStackRetain(stack);
  unused--;
}

orStack *orAllocationStack(uintptr_t begin) {
  orAllocation *a = find(begin, begin + 1);
  return a ? a->stack : NULL;
}
