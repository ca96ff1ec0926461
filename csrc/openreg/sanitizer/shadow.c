/*
 * The sanitizer's shadow of memory: the accesses that later ones may still be in conflict with.
 *
 * A tree of the accesses' hulls (interval_tree.h). Accesses overlap freely: a write and the reads
 * since, of several streams, are a node each. analysis.c erases what a new access makes
 * superfluous, so that there are about as many nodes as there are pieces of memory in use times the
 * streams that touched them; LIMIT holds in any case: the oldest half is forgotten then, which may
 * lose a report and never makes one.
 *
 * All under orSanitizerMutex. Nodes are recycled.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

enum { CHUNK = 64, SWEEP = 4096, LIMIT = 1 << 18 };

/* ---- nodes ---- */

static orTree tree = OR_TREE_INITIALIZER;
static orTreeNode *spare; /* linked by `left` */
static size_t count, sweep_at = SWEEP;
static size_t *counts; /* of each timeline's accesses */
static uint32_t timelines;
static orShadow **list; /* of orShadowFind and the sweeps */
static size_t listed, list_room;

static orShadow *newNode(void) {
  if (!spare) {
    orShadow *chunk = orSanitizerAllocate(CHUNK * sizeof *chunk);
    for (int i = 0; i < CHUNK; i++) {
      chunk[i].node.left = spare;
      spare = &chunk[i].node;
    }
  }
  orTreeNode *node = spare;
  spare = node->left;
  return (orShadow *)node;
}

static void countMore(uint32_t timeline) {
  if (timeline >= timelines) {
    counts = orSanitizerResize(counts, (timeline + 1) * sizeof *counts);
    while (timelines <= timeline) counts[timelines++] = 0;
  }
  counts[timeline]++;
  count++;
}

static void countLess(uint32_t timeline) {
  counts[timeline]--;
  count--;
}

bool orShadowIsOnlyOf(uint32_t timeline) {
  return count == 0 || (timeline < timelines && counts[timeline] == count);
}

static void insert(orShadow *shadow) {
  orTreeInsert(&tree, &shadow->node, shadow->range.begin, shadow->range.end);
}

/* ---- finding ---- */

static void append(orTreeNode *node) {
  if (listed == list_room) {
    list_room = list_room ? list_room * 2 : 64;
    list = orSanitizerResize(list, list_room * sizeof *list);
  }
  list[listed++] = (orShadow *)node;
}

size_t orShadowFind(uintptr_t begin, uintptr_t end, orShadow ***found) {
  listed = 0;
  orTreeEach(&tree, begin, end, append);
  *found = list;
  return listed;
}

bool orShadowIsWritten(uintptr_t begin, uintptr_t end) {
  orShadow **found;
  size_t n = orShadowFind(begin, end, &found);
  while (n && (!found[n - 1]->write ||
               orHappensBeforeThread(found[n - 1]->timeline, found[n - 1]->counter)))
    n--;
  return n;
}

/* ---- changes ---- */

void orShadowAdd(const orShadow *shadow) {
  orShadow *node = newNode();
  *node = *shadow;
  insert(node);
  countMore(node->timeline);
}

static void releaseAll(orShadow *shadow) {
  orStackRelease(shadow->stack);
  orStackRelease(shadow->allocation);
  orLateRelease(shadow->late);
}

void orShadowRenew(orShadow *shadow, const orShadow *by) {
  releaseAll(shadow);
  orShadow renewed = *by;
  countLess(shadow->timeline);
  countMore(by->timeline);
  renewed.node = shadow->node;
  *shadow = renewed;
}

void orShadowErase(orShadow *shadow) {
  orTreeRemove(&tree, &shadow->node);
  releaseAll(shadow);
  shadow->node.left = spare;
  spare = &shadow->node;
  countLess(shadow->timeline);
}

void orShadowTrim(orShadow *shadow, uintptr_t begin, uintptr_t end) {
  orRange whole = shadow->range;
  if (begin > whole.begin && end < whole.end) {
    orShadow rest = *shadow;
    orStackRetain(rest.stack);
    orStackRetain(rest.allocation);
    orLateRetain(rest.late);
    rest.range.begin = end;
    rest.range.width = whole.end - end;
    orShadowAdd(&rest);
  }
  orTreeRemove(&tree, &shadow->node);
  if (begin > whole.begin)
    shadow->range.end = begin;
  else
    shadow->range.begin = end;
  shadow->range.width = shadow->range.end - shadow->range.begin;
  insert(shadow);
}

static void eraseOlder(uint64_t limit) {
  orShadow **all;
  size_t n = orShadowFind(0, UINTPTR_MAX, &all);
  for (size_t i = 0; i < n; i++)
    if (all[i]->sequence < limit || orHappensBeforeAll(all[i]->timeline, all[i]->counter))
      orShadowErase(all[i]);
}

static uint64_t oldest(void) {
  orShadow **all;
  uint64_t least = orSanitizerLatest();
  for (size_t n = orShadowFind(0, UINTPTR_MAX, &all); n-- > 0;)
    if (all[n]->sequence < least) least = all[n]->sequence;
  return least;
}

void orShadowSweep(void) {
  if (OR_LIKELY(count < sweep_at)) return;
  eraseOlder(0);
  while (count > LIMIT / 2) {
    uint64_t first = oldest();
    eraseOlder(first + (orSanitizerLatest() - first) / 2 + 1);
  }
  sweep_at = count * 2 > SWEEP ? count * 2 : SWEEP;
}

void orShadowClear(void) {
  while (tree.root) orShadowErase((orShadow *)tree.root);
  sweep_at = SWEEP;
}
