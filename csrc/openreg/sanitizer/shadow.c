/*
 * The sanitizer's shadow of memory: the accesses that later ones may still be in conflict with.
 *
 * A tree of the accesses' hulls (interval_tree.h). Accesses overlap freely: a write and the reads
 * since, of several streams, are a node each. sanitizer.c erases what a new access makes
 * superfluous, so that there are about as many nodes as there are pieces of memory in use times the
 * streams that touched them; LIMIT holds in any case: the oldest half is forgotten then, which may
 * lose a report and never makes one. So does STEPS, after which two ranges are taken to be apart.
 *
 * All under orSanitizerMutex, but for the functions of ranges, which have no state. Nodes are
 * recycled.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/sanitizer.h"

enum { CHUNK = 64, SWEEP = 4096, LIMIT = 1 << 18, STEPS = 1000 };

/* ---- ranges ---- */

/* 0 if it does not end within the address space. */
static uintptr_t endOf(const orMemoryAccess *access) {
  uintptr_t end, part;
  if (__builtin_add_overflow((uintptr_t)access->data, access->width, &end)) return 0;
  for (uint32_t i = 0; i < access->dims; i++)
    if (__builtin_mul_overflow(access->count[i] - 1, access->stride[i], &part) ||
        __builtin_add_overflow(end, part, &end))
      return 0;
  return end > INTPTR_MAX ? 0 : end;
}

/* By stride, ascending; without those that come to the same bytes. */
static uint32_t sortRepeats(const orMemoryAccess *access, orRepeat repeats[OR_ACCESS_DIMS]) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < access->dims; i++) {
    orRepeat moving = {access->count[i], access->stride[i]};
    if (moving.count == 1 || !moving.stride) continue;
    uint32_t at = count++;
    for (; at && repeats[at - 1].stride > moving.stride; at--) repeats[at] = repeats[at - 1];
    repeats[at] = moving;
  }
  return count;
}

/* A repeat that leaves no gap makes the piece wider, one that goes on where another ends makes that
 * one longer. */
static uint32_t mergeRepeats(orRepeat *repeats, uint32_t count, size_t *width) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < count; i++) {
    orRepeat next = repeats[i];
    if (!kept && next.stride <= *width)
      *width += (next.count - 1) * next.stride;
    else if (kept && next.stride == repeats[kept - 1].stride * repeats[kept - 1].count)
      repeats[kept - 1].count *= next.count;
    else
      repeats[kept++] = next;
  }
  return kept;
}

/* Where too many are left, the innermost become their hull. */
bool orRangeMake(const orMemoryAccess *access, orRange *range) {
  orRepeat all[OR_ACCESS_DIMS], *repeats = all;
  *range = (orRange){.begin = (uintptr_t)access->data, .width = access->width};
  if (!access->width) return false;
  for (uint32_t i = 0; i < access->dims; i++)
    if (!access->count[i]) return false;
  range->end = endOf(access);
  if (!range->end) return true;
  uint32_t count = mergeRepeats(repeats, sortRepeats(access, repeats), &range->width);
  range->hull = count > OR_RANGE_DIMS;
  while (count > OR_RANGE_DIMS) {
    range->width += (repeats->count - 1) * repeats->stride;
    count = mergeRepeats(++repeats, count - 1, &range->width);
  }
  range->dims = count;
  memcpy(range->repeats, repeats, count * sizeof *repeats);
  return true;
}

/* Distances between a repetition of one range and one of another: `stride` times any number from
 * `least` to `most`. */
typedef struct orTerm {
  int64_t stride, least, most;
} orTerm;

typedef struct orSearch {
  orTerm terms[2 * OR_RANGE_DIMS]; /* strides descending */
  int64_t low[2 * OR_RANGE_DIMS + 1],
      high[2 * OR_RANGE_DIMS + 1]; /* what terms from [i] on can add */
  int64_t least, most;             /* distances at which they meet */
  int count, steps;
} orSearch;

static int64_t divideDown(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static int64_t divideUp(int64_t a, int64_t b) { return a / b + (a % b > 0); }

/* There is a term: the bounds of the last one are those of the distances at which they meet. */
static bool search(orSearch *s, int i, int64_t distance) {
  if (i == s->count) return true;
  const orTerm *t = &s->terms[i];
  int64_t from = divideUp(s->least - distance - s->high[i + 1], t->stride);
  int64_t to = divideDown(s->most - distance - s->low[i + 1], t->stride);
  if (from < t->least) from = t->least;
  if (to > t->most) to = t->most;
  for (int64_t k = from; k <= to && s->steps-- > 0; k++)
    if (search(s, i + 1, distance + k * t->stride)) return true;
  return false;
}

static void addTerm(orSearch *s, int64_t stride, int64_t least, int64_t most) {
  int at = 0;
  while (at < s->count && s->terms[at].stride > stride) at++;
  if (at < s->count && s->terms[at].stride == stride) {
    s->terms[at].least += least;
    s->terms[at].most += most;
    return;
  }
  memmove(&s->terms[at + 1], &s->terms[at], (size_t)(s->count - at) * sizeof s->terms[0]);
  s->terms[at] = (orTerm){stride, least, most};
  s->count++;
}

bool orRangesMeet(const orRange *a, const orRange *b) {
  if (!a->dims && !b->dims) return true;
  orSearch s = {.least = 1 - (int64_t)b->width, .most = (int64_t)a->width - 1, .steps = STEPS};
  for (uint32_t i = 0; i < a->dims; i++)
    addTerm(&s, (int64_t)a->repeats[i].stride, 1 - (int64_t)a->repeats[i].count, 0);
  for (uint32_t i = 0; i < b->dims; i++)
    addTerm(&s, (int64_t)b->repeats[i].stride, 0, (int64_t)b->repeats[i].count - 1);
  for (int i = s.count; i-- > 0;) {
    s.low[i] = s.low[i + 1] + s.terms[i].stride * s.terms[i].least;
    s.high[i] = s.high[i + 1] + s.terms[i].stride * s.terms[i].most;
  }
  return search(&s, 0, (int64_t)(b->begin - a->begin));
}

/* ---- nodes ---- */

static orTree tree = OR_TREE_INITIALIZER;
static orTreeNode *spare; /* linked by `left` */
static size_t count, sweep_at = SWEEP;
static uint64_t sequence; /* the latest */
static orShadow **list;   /* of orShadowFind and the sweeps */
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
  while (n && (!found[n - 1]->write || orHostKnows(found[n - 1]->timeline, found[n - 1]->counter)))
    n--;
  return n;
}

/* ---- changes ---- */

uint64_t orShadowMoment(void) { return ++sequence; }

void orShadowAdd(const orShadow *shadow) {
  orShadow *node = newNode();
  *node = *shadow;
  insert(node);
  count++;
}

void orShadowRenew(orShadow *shadow, const orShadow *by) {
  orStackDrop(shadow->stack);
  orShadow renewed = *by;
  renewed.node = shadow->node;
  *shadow = renewed;
}

void orShadowErase(orShadow *shadow) {
  orTreeRemove(&tree, &shadow->node);
  orStackDrop(shadow->stack);
  shadow->node.left = spare;
  spare = &shadow->node;
  count--;
}

void orShadowTrim(orShadow *shadow, uintptr_t begin, uintptr_t end) {
  orRange whole = shadow->range;
  if (begin > whole.begin && end < whole.end) {
    orShadow rest = *shadow;
    orStackRetain(rest.stack);
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
    if (all[i]->sequence < limit || orEverybodyKnows(all[i]->timeline, all[i]->counter))
      orShadowErase(all[i]);
}

static uint64_t oldest(void) {
  orShadow **all;
  uint64_t least = sequence;
  for (size_t n = orShadowFind(0, UINTPTR_MAX, &all); n-- > 0;)
    if (all[n]->sequence < least) least = all[n]->sequence;
  return least;
}

void orShadowSweep(void) {
  if (OR_LIKELY(count < sweep_at)) return;
  eraseOlder(0);
  while (count > LIMIT / 2) {
    uint64_t first = oldest();
    eraseOlder(first + (sequence - first) / 2 + 1);
  }
  sweep_at = count * 2 > SWEEP ? count * 2 : SWEEP;
}

void orShadowClear(void) {
  while (tree.root) orShadowErase((orShadow *)tree.root);
  sweep_at = SWEEP;
}
