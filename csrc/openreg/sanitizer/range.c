/*
 * Strided ranges of bytes, and whether two of them meet.
 *
 * No state, no lock. A search for a common byte takes at most STEPS steps; then two ranges are
 * taken to be apart, which may lose a report and never makes one.
 */
#include <string.h>

#include "sanitizer/private.h"

enum { STEPS = 1000 };

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
