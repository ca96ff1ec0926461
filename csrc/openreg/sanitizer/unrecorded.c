/*
 * Blocks that were freed without record_stream while another stream may still use them.
 *
 * Whether the caching allocator then hands such a block out too early depends on what else is
 * free at that time, and on how fast workers are. So a block is judged by the first allocation
 * that could have got it, by stream, pool and size, as if it had: the uses that are not over are
 * copied to the new block's addresses, where they conflict with its first accesses like those of
 * memory that was really reused. What no allocation could get is judged at the end of the program
 * or of a test: a use that neither the owner's stream nor any host thread has waited for is a
 * possible race with the free.
 *
 * A block is not judged if its free says nothing about the program: one that an exception makes on
 * its way out (orSanitizerIgnore), or one inside a task, which happens at a time of its own. For
 * the same reason allocations of tasks judge nothing.
 *
 * The list has the oldest block first, at most LIMIT of them; then the oldest is forgotten, which
 * may lose a report and never makes one. All is under orSanitizerMutex, except that `freed_here`
 * belongs to its thread.
 */
#include <stdlib.h>

#include "sanitizer/private.h"

enum { SWEEP = 64, LIMIT = 4096 };

typedef struct orUnrecorded {
  uintptr_t begin, end; /* the part that no allocation has got */
  orStream_t owner;     /* the allocation stream */
  uint64_t mempool;     /* as OR_PROBE_BLOCK_FREED has them; likewise `pool` */
  int pool;
  uint64_t moment; /* of the free */
  orStack *stack;  /* of the free; a reference, or null */
  struct orUnrecorded *next;
} orUnrecorded;

static orUnrecorded *first, **last = &first;
static size_t count;
static size_t sweep_at = SWEEP;
static _Thread_local uint64_t freed_here; /* the moment of a free whose stack is to be captured */

static void erase(orUnrecorded **at) {
  orUnrecorded *gone = *at;
  *at = gone->next;
  if (last == &gone->next) last = at;
  orStackRelease(gone->stack);
  free(gone);
  count--;
}

/* Whether the next user of the memory has to be compared with this access. */
static bool isInUse(const orUnrecorded *u, const orShadow *s) {
  const orClock *owner = &orTimelineAt(orTimelineOf(u->owner))->clock;
  return s->freed && !orHappensBeforeAll(s->timeline, s->counter) &&
         !orClockIncludes(owner, s->timeline, s->counter);
}

static bool anyInUse(const orUnrecorded *u, uintptr_t end) {
  orShadow **found;
  size_t n = orShadowFind(u->begin, end < u->end ? end : u->end, &found);
  while (n && !isInUse(u, found[n - 1])) n--;
  return n;
}

static void sweep(void) {
  for (orUnrecorded **at = &first, *u; (u = *at);)
    if (anyInUse(u, u->end))
      at = &u->next;
    else
      erase(at);
  if (count >= LIMIT) erase(&first);
  sweep_at = count * 2 > SWEEP ? count * 2 : SWEEP;
  if (sweep_at > LIMIT) sweep_at = LIMIT;
}

void orUnrecordedAdd(const orProbe *p) {
  uintptr_t begin = (uintptr_t)p->dst;
  orUnrecorded made = {.begin = begin,
                       .end = begin + p->bytes,
                       .owner = p->stream,
                       .mempool = p->number,
                       .pool = p->kind};
  if (orProcessTask() != OR_TASK_NONE || orSanitizerIgnores() || !anyInUse(&made, made.end)) return;
  if (count >= sweep_at) sweep();
  made.moment = freed_here = orSanitizerMoment();
  orUnrecorded *u = orSanitizerAllocate(sizeof *u);
  *u = made;
  *last = u;
  last = &u->next;
  count++;
}

bool orUnrecordedWantsStack(void) { return freed_here; }

void orUnrecordedSetStack(orStack *stack) {
  for (orUnrecorded *u = first; u; u = u->next)
    if (u->moment == freed_here) u->stack = orStackRetain(stack);
  freed_here = 0;
}

/* ---- judged by an allocation ---- */

/* Of a range with gaps that ends behind the new block, only the first piece is copied. */
static bool moveRange(orRange *range, uintptr_t from, uintptr_t to, size_t bytes) {
  uintptr_t end = from + bytes;
  if (range->dims && (range->begin < from || range->end > end)) {
    range->dims = 0;
    range->end = range->begin + range->width;
  }
  if (range->begin < from) range->begin = from;
  if (range->end > end) range->end = end;
  if (range->begin >= range->end) return false;
  if (!range->dims) range->width = range->end - range->begin;
  range->begin += to - from;
  range->end += to - from;
  return true;
}

static void copyUses(const orUnrecorded *u, uintptr_t to, size_t bytes) {
  orShadow **found;
  size_t n = orShadowFind(u->begin, u->begin + bytes, &found);
  for (size_t i = 0; i < n; i++) {
    orShadow copy = *found[i];
    if (!isInUse(u, &copy) || !moveRange(&copy.range, u->begin, to, bytes)) continue;
    orStackRetain(copy.stack);
    orStackRetain(copy.allocation);
    orLateRetain(copy.late);
    copy.moved += to - u->begin;
    orShadowAdd(&copy);
  }
}

static bool couldServe(const orUnrecorded *u, const orProbe *p) {
  return u->owner == p->stream && u->mempool == p->number && u->pool == p->kind &&
         u->end - u->begin >= p->bytes && u->end - u->begin <= p->count;
}

/* The bytes up to `end` are another block's now. True if that judges the block. */
static bool isJudged(orUnrecorded *u, uintptr_t end) {
  bool judged = anyInUse(u, end);
  if (end > u->begin) u->begin = end;
  return judged || u->begin >= u->end;
}

static bool judgeBy(orUnrecorded *u, const orProbe *p) {
  uintptr_t begin = (uintptr_t)p->dst, end = begin + p->bytes;
  if (begin < u->end && u->begin < end) return isJudged(u, end); /* it has really been reused */
  if (!couldServe(u, p)) return false;
  copyUses(u, begin, p->bytes);
  return isJudged(u, u->begin + p->bytes);
}

void orUnrecordedTaken(const orProbe *p) {
  for (orUnrecorded **at = &first, *u; (u = *at);)
    if (judgeBy(u, p))
      erase(at);
    else
      at = &u->next;
}

/* ---- judged at the end ---- */

static void judgeFree(const orUnrecorded *u, orRaceList *list) {
  uint32_t timeline = orTimelineOf(u->owner);
  orShadow freed = {.range = {.begin = u->begin, .end = u->end, .width = u->end - u->begin},
                    .operation = orSanitizerName("free"),
                    .stack = u->stack,
                    .stream = u->owner,
                    .timeline = timeline,
                    .counter = orTimelineAt(timeline)->clock.at[timeline],
                    .sequence = u->moment};
  orShadow **found;
  size_t n = orShadowFind(u->begin, u->end, &found);
  list->call = orSanitizerMoment(); /* a report for each block */
  for (size_t i = 0; i < n; i++)
    if (isInUse(u, found[i]) && !orHappensBeforeAny(found[i]->timeline, found[i]->counter))
      orRaceFree(found[i], &freed, list);
}

void orUnrecordedJudge(orRaceList *list) {
  for (const orUnrecorded *u = first; u; u = u->next) judgeFree(u, list);
  orUnrecordedForget(-1);
}

void orUnrecordedForget(int device) {
  for (orUnrecorded **at = &first, *u; (u = *at);)
    if (device < 0 || orHandleDevice(u->owner) == device)
      erase(at);
    else
      at = &u->next;
}
