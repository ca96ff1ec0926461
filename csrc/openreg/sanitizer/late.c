/*
 * Late accesses: the bytes of operators with indices, once these are known.
 *
 * An orLateAccess belongs to the caller, from orSanitizerLate to orSanitizerLateOver, and in a
 * capture also to the graph's node. Each time that its task is queued it has an orLate, to which
 * the shadow and undecided races refer: once for a task, and once for each replay of a captured
 * one, in the order in which the replays run. A replay whose task was skipped, because it had to
 * fail, is passed over by the next one that runs: it has touched nothing. `known` is set once, from
 * then on the rest of an orLate is constant.
 *
 * A search for bytes that two accesses share takes at most PAIRS comparisons. Then they may share
 * some, and a conflict of theirs stays a possible one.
 *
 * All under orSanitizerMutex, but for `data` and the making of spans, which only the task that
 * resolves has.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

enum { PAIRS = 1 << 18 };

struct orLateAccess {
  uint32_t refs;
  uintptr_t data;
  int device;            /* of the capture; -1: none */
  orLate *first, **last; /* queued and not known, but for one without a capture, which stays */
  orLateAccess *next;    /* that was captured */
};

static orLateAccess *captured;

/* ---- references ---- */

void orLateRelease(orLate *late) {
  if (!late || --late->refs) return;
  free(late->spans);
  free(late);
}

static orLate *push(orLateAccess *access) {
  orLate *late = orSanitizerAllocate(sizeof *late);
  *late = (orLate){.refs = 1};
  *access->last = late;
  access->last = &late->next;
  return late;
}

static orLate *pop(orLateAccess *access) {
  orLate *late = access->first;
  if (!late) return NULL;
  access->first = late->next;
  if (!access->first) access->last = &access->first;
  late->next = NULL;
  return late;
}

/* Until `last`, or all: they touch nothing, if nobody has said what they touch. */
static void popUntil(orLateAccess *access, const orLate *last) {
  while (access->first && access->first != last) {
    orLate *late = pop(access);
    late->known = true;
    orLateRelease(late);
  }
}

static void popAll(orLateAccess *access) { popUntil(access, NULL); }

orLateAccess *orLateNew(const void *data) {
  orLateAccess *access = orSanitizerAllocate(sizeof *access);
  *access = (orLateAccess){.refs = 1, .data = (uintptr_t)data, .device = -1};
  access->last = &access->first;
  push(access);
  return access;
}

void orLateCaptured(orLateAccess *access, int device) {
  popAll(access);
  access->refs++;
  access->device = device;
  access->next = captured;
  captured = access;
}

static void leaveCaptured(orLateAccess *access) {
  orLateAccess **at = &captured;
  while (*at != access) at = &(*at)->next;
  *at = access->next;
}

void orLateDrop(orLateAccess *access, bool over) {
  if (over) popAll(access);
  if (--access->refs) return;
  popAll(access);
  if (access->device >= 0) leaveCaptured(access);
  free(access);
}

void orLateForget(int device) {
  for (orLateAccess *access = captured; access; access = access->next)
    if (device < 0 || access->device == device) popAll(access);
}

orLate *orLateQueued(orLateAccess *access, orStream_t stream, uint64_t after) {
  if (access->device < 0) return orLateRetain(access->first);
  orLate *late = push(access);
  late->stream = stream;
  late->after = after;
  return orLateRetain(late);
}

/* Passes over the replays before the one whose task runs. */
static void skipTo(orLateAccess *access, orStream_t stream, uint64_t number) {
  const orLate *ours = NULL;
  for (orLate *late = access->first; late; late = late->next)
    if (late->stream == stream && late->after < number) ours = late;
  if (ours) popUntil(access, ours);
}

/* ---- bytes ---- */

static int compareSpans(const void *a, const void *b) {
  uintptr_t first = ((const orSpan *)a)->begin, second = ((const orSpan *)b)->begin;
  return (first > second) - (first < second);
}

/* Joins spans without gaps that touch, and drops repeated ones. */
static size_t mergeSpans(orSpan *spans, size_t count, bool gaps) {
  size_t kept = 0;
  for (size_t i = 0; i < count; i++) {
    orSpan *last = kept ? &spans[kept - 1] : NULL;
    if (last && (gaps ? spans[i].begin == last->begin : spans[i].begin <= last->end))
      last->end = spans[i].end > last->end ? spans[i].end : last->end;
    else
      spans[kept++] = spans[i];
  }
  return kept;
}

orLate orLateBytes(const orLateAccess *access, const orMemoryAccess *slice, const size_t *offsets,
                   size_t count) {
  orLate made = {.known = true};
  orMemoryAccess first = *slice;
  first.data = (const void *)access->data; /* NOLINT */
  if (!count || !orRangeMake(&first, &made.slice) || !made.slice.end) return made;
  made.spans = orSanitizerAllocate(count * sizeof *made.spans);
  for (size_t i = 0; i < count; i++)
    made.spans[i] = (orSpan){made.slice.begin + offsets[i], made.slice.end + offsets[i]};
  qsort(made.spans, count, sizeof *made.spans, compareSpans);
  made.count = mergeSpans(made.spans, count, made.slice.dims);
  return made;
}

/* The caller's bytes become the access's. */
void orLateResolve(orLateAccess *access, orLate *bytes) {
  bool of_task = access->device < 0;
  orStream_t stream;
  uint64_t number;
  if (!of_task && orTaskCurrent(&stream, &number)) skipTo(access, stream, number);
  orLate *late = of_task ? access->first : pop(access);
  if (!late || late->known) {
    free(bytes->spans);
  } else {
    late->known = true;
    late->count = bytes->count;
    late->spans = bytes->spans;
    late->slice = bytes->slice;
  }
  if (!of_task) orLateRelease(late);
}

/* ---- whether two accesses share bytes ---- */

static size_t countOf(const orPlace *p) { return p->late ? p->late->count : 1; }

static bool hasGaps(const orPlace *p) { return p->late ? p->late->slice.dims : p->range->dims; }

static orRange pieceAt(const orPlace *p, size_t i) {
  if (!p->late) return *p->range;
  orRange piece = p->late->slice;
  piece.begin = p->late->spans[i].begin + p->moved;
  piece.end = p->late->spans[i].end + p->moved;
  if (!piece.dims) piece.width = piece.end - piece.begin;
  return piece;
}

static bool overlap(const orRange *a, const orRange *b, orSpan *common) {
  common->begin = a->begin > b->begin ? a->begin : b->begin;
  common->end = a->end < b->end ? a->end : b->end;
  return common->begin < common->end;
}

/* Whether all slices have the same gaps and begin within one stride, as columns of a table do. Then
 * they share bytes where their first repeats do. */
static bool areColumns(const orPlace *a, const orPlace *b) {
  size_t last_a = countOf(a), last_b = countOf(b);
  if (!last_a-- || !last_b--) return false;
  orRange x = pieceAt(a, 0), y = pieceAt(b, 0);
  if (x.dims != y.dims || x.width != y.width ||
      memcmp(x.repeats, y.repeats, x.dims * sizeof *x.repeats) != 0)
    return false;
  uintptr_t begin = x.begin < y.begin ? x.begin : y.begin;
  uintptr_t end_a = pieceAt(a, last_a).begin, end_b = pieceAt(b, last_b).begin;
  uintptr_t hull = (end_a > end_b ? end_a : end_b) + x.width - begin;
  return hull <= x.repeats[0].stride; /* the least */
}

/* Both in ascending order. `columns`: by the first repeat of each. */
static orMeeting meetInOrder(const orPlace *a, const orPlace *b, bool columns, orSpan *common) {
  for (size_t i = 0, j = 0; i < countOf(a) && j < countOf(b);) {
    orRange first = pieceAt(a, i), second = pieceAt(b, j);
    if (columns) {
      first.end = first.begin + first.width;
      second.end = second.begin + second.width;
    }
    if (overlap(&first, &second, common)) return OR_MEET;
    if (first.end <= second.end)
      i++;
    else
      j++;
  }
  return OR_APART;
}

static orMeeting meetEach(const orPlace *a, const orPlace *b, orSpan *common) {
  size_t pairs = 0;
  for (size_t i = 0; i < countOf(a); i++)
    for (size_t j = 0; j < countOf(b); j++) {
      orRange first = pieceAt(a, i), second = pieceAt(b, j);
      if (!overlap(&first, &second, common)) continue;
      if (++pairs > PAIRS) return OR_MAY_MEET;
      if (orRangesMeet(&first, &second)) return OR_MEET;
    }
  return OR_APART;
}

orMeeting orPlacesMeet(const orPlace *a, const orPlace *b, orSpan *common) {
  bool columns = hasGaps(a) && hasGaps(b) && areColumns(a, b);
  if (columns || (!hasGaps(a) && !hasGaps(b))) return meetInOrder(a, b, columns, common);
  return meetEach(a, b, common);
}
