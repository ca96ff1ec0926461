/*
 * The sanitizer: the calls that tell it what happens, and what an access means for those before it.
 *
 * The analysis is made in the order of the API's calls, on the threads that make them: an access is told before its task is
 * queued, and no lane takes part. What an access finds in the shadow (shadow.c) is either ordered before it by the clocks
 * (clocks.c), or in conflict with it if they share bytes and one of them writes (races.c). A write takes the place of all
 * that is ordered before it and that it covers, a read that of earlier reads. So the shadow keeps what a later access can
 * still be in conflict with, and little else. What the host does itself is compared and not kept: all that is queued
 * later comes after it.
 *
 * Freed blocks. The caching allocator waits for recorded streams before it hands a block out, so their accesses are
 * forgotten when the block is freed, and so are those that keep their memory (orSanitizerAside). All others stay, marked
 * with the allocation stream: if whoever has the memory next is not ordered after them, that is a conflict like any other.
 *
 * orSanitizerActive is all that anybody reads while it is off. The rest is under orSanitizerMutex (sanitizer.h), but for
 * what belongs to a thread. Stacks are captured before the mutex is taken; those that nobody refers to any more gather in
 * `dead` and are released by the next call that may call the user's function: not from deleters or lanes.
 */
#include "sanitizer.h"

#include <stdlib.h>
#include <string.h>

enum { STRIDED = 64 };

uint32_t orSanitizerActive;
pthread_mutex_t orSanitizerMutex = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;

static orSanitizerOptions options;
static bool by_setting; /* enabled by OPENREG_SANITIZER alone */
static orStack *dead, *spare_stacks;
static bool touched; /* enabled or disabled by anybody */
static uint64_t calls;

static _Thread_local const char *operation_name;
static _Thread_local uint64_t found_here;
static _Thread_local uint32_t ignored;

static void lock(void) { pthread_mutex_lock(&orSanitizerMutex); }
static void unlock(void) { pthread_mutex_unlock(&orSanitizerMutex); }

static void setActive(uint32_t active) {
  __atomic_store_n(&orSanitizerActive, active, __ATOMIC_RELAXED);
}

static void *checked(void *memory, size_t bytes) {
  if (memory) return memory;
  orWarn("no host memory for the sanitizer (%zu bytes)", bytes);
  abort();
}

void *orSanitizerAllocate(size_t bytes) { return checked(malloc(bytes), bytes); }

void *orSanitizerResize(void *old, size_t bytes) { return checked(realloc(old, bytes), bytes); }

/* ---- stacks ---- */

void orStackDrop(orStack *stack) {
  if (!stack || --stack->refs) return;
  stack->next = dead;
  dead = stack;
}

static orStack *newStack(void *captured) {
  if (!captured) return NULL;
  orStack *stack = spare_stacks;
  if (stack)
    spare_stacks = stack->next;
  else
    stack = orSanitizerAllocate(sizeof *stack);
  *stack = (orStack){.stack = captured, .refs = 1};
  return stack;
}

/* Calls the user's function. No lock held. */
static void releaseDead(void) {
  lock();
  orStack *all = dead, *last = all;
  orSanitizerOptions now = options;
  dead = NULL;
  unlock();
  if (!all) return;
  for (orStack *s = all; s; last = s, s = s->next) now.release(s->stack, now.context);
  lock();
  last->next = spare_stacks;
  spare_stacks = all;
  unlock();
}

static void *capture(void) {
  lock();
  orSanitizerOptions now = options;
  unlock();
  return now.capture ? now.capture(now.context) : NULL;
}

/* ---- accesses ---- */

static bool covers(const orRange *whole, const orRange *part) {
  if (!whole->dims) return whole->begin <= part->begin && part->end <= whole->end;
  if (whole->begin != part->begin || whole->width != part->width || whole->dims != part->dims)
    return false;
  size_t size = whole->dims * sizeof whole->count[0];
  return !memcmp(whole->count, part->count, size) && !memcmp(whole->stride, part->stride, size);
}

/* What a later access cannot meet without meeting `now` is not needed any more. True if the node has become `now`. */
static bool replace(orShadow *old, const orShadow *now, bool renewed) {
  const orRange *a = &old->range, *b = &now->range;
  if (covers(b, a)) {
    if (!renewed && a->begin == b->begin && a->end == b->end && a->dims == b->dims) {
      orStackRetain(now->stack);
      orShadowRenew(old, now);
      return true;
    }
    orShadowErase(old);
  } else if (!a->dims && !b->dims) {
    orShadowTrim(old, b->begin, b->end);
  }
  return false;
}

typedef struct orTelling {
  orShadow now; /* the access */
  bool host;
  const orClock *clock; /* of whoever makes it; null: the host */
  orRaceList races;
} orTelling;

/* Many pieces of one hull, none of which covers another, would be looked at again and again. */
static void limitStrided(orShadow **kept, size_t count) {
  while (count > STRIDED) {
    size_t oldest = 0;
    for (size_t i = 1; i < count; i++)
      if (kept[i]->sequence < kept[oldest]->sequence) oldest = i;
    orShadowErase(kept[oldest]);
    kept[oldest] = kept[--count];
  }
}

static void tell(orTelling *t) {
  orShadow **found, *now = &t->now;
  bool renewed = false;
  size_t strided = 0;
  size_t count = orShadowFind(now->range.begin, now->range.end, &found);
  for (size_t i = 0; i < count; i++) {
    orShadow *old = found[i];
    if (orHostKnows(old->timeline, old->counter)) {
      orShadowErase(old);
      continue;
    }
    bool ordered = t->clock && orClockKnows(t->clock, old->timeline, old->counter);
    bool conflict = !ordered && (old->write || now->write) &&
                    orRangesMeet(&old->range, &now->range) &&
                    orRaceFound(old, now, t->host, &t->races);
    if (t->host) continue;
    if ((ordered || conflict) && (now->write || !old->write)) {
      if (old->range.dims && !covers(&now->range, &old->range))
        found[strided++] = old;
      else
        renewed |= replace(old, now, renewed);
    } else if (old->range.dims) {
      found[strided++] = old;
    }
  }
  if (OR_UNLIKELY(strided > STRIDED)) limitStrided(found, strided);
  if (t->host || renewed) return;
  orStackRetain(now->stack);
  orShadowAdd(now);
}

static orError_t checkAccesses(const char *operation, const orMemoryAccess *accesses, size_t count) {
  orRange range;
  if (!operation || (count && !accesses))
    return orFail(orErrorInvalidValue, "orSanitizerAccess: the %s is null",
                  operation ? "list of accesses" : "operation");
  for (size_t i = 0; i < count; i++) {
    if (accesses[i].dims > OR_ACCESS_DIMS)
      return orFail(orErrorInvalidValue, "%s: an access of %u dimensions; at most %d", operation,
                    accesses[i].dims, OR_ACCESS_DIMS);
    if (orRangeMake(&accesses[i], &range) && !range.end)
      return orFail(orErrorInvalidValue, "%s: the access at %p ends past the address space",
                    operation, accesses[i].data);
  }
  return orSuccess;
}

static uint64_t tellAll(orStream_t stream, const char *operation, const orMemoryAccess *accesses,
                        size_t count) {
  if (ignored) return 0;
  if (stream && orDeviceIsLost(orHandleDevice(stream))) return 0; /* it will be refused */
  orTelling t = {.host = !stream};
  void *captured = capture();
  lock();
  orStack *stack = newStack(captured);
  if (orSanitizerOn()) {
    t.races.call = ++calls;
    t.now.operation = orSanitizerName(operation);
    t.now.stack = stack;
    if (stream) {
      t.now.stream = stream;
      t.now.timeline = orTimelineOf(stream);
      t.clock = &orTimelineAt(t.now.timeline)->clock;
      t.now.counter = t.clock->at[t.now.timeline];
    }
    for (size_t i = 0; i < count; i++) {
      t.now.write = accesses[i].write;
      if (orRangeMake(&accesses[i], &t.now.range)) tell(&t);
    }
    orShadowSweep();
  }
  orStackDrop(stack);
  bool any = dead != NULL;
  unlock();
  uint64_t number = t.races.first ? orRacesReport(&t.races) : 0;
  if (any || number) releaseDead();
  if (number && !found_here) found_here = number;
  return number;
}

orError_t orSanitizerAccess(orStream_t stream, const char *operation,
                            const orMemoryAccess *accesses, size_t count, uint64_t *found) {
  if (found) *found = 0;
  /* What a task does was told when it was queued. */
  if (!orSanitizerOn() || orInForkedChild() || orProcessTask() != OR_TASK_NONE) return orSuccess;
  OR_TRY(checkAccesses(operation, accesses, count));
  if (stream && !orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  uint64_t number = tellAll(stream, operation, accesses, count);
  if (found) *found = number;
  return orSuccess;
}

const char *orSanitizerOperation(const char *operation) {
  const char *before = operation_name;
  operation_name = operation;
  return before;
}

uint32_t orSanitizerIgnore(uint32_t ignore) {
  uint32_t before = ignored;
  ignored = ignore;
  return before;
}

uint64_t orSanitizerFound(void) {
  uint64_t number = found_here;
  found_here = 0;
  return number;
}

void orSanitizerNoteMove(orStream_t stream, const char *call, const void *dst, const void *src,
                         size_t bytes) {
  orMemoryAccess both[2];
  size_t count = 0;
  if (stream == OR_STREAM_DEFAULT && orDeviceDefaultStream(orCurrentDevice(), &stream)) return;
  if (src) both[count++] = (orMemoryAccess){.data = src, .width = bytes};
  if (dst) both[count++] = (orMemoryAccess){.data = dst, .width = bytes, .write = 1};
  tellAll(stream, operation_name ? operation_name : call, both, count);
}

/* ---- order ---- */

void orSanitizerNoteRecord(orStream_t stream, orCell *cell, const orCell *replaced) {
  lock();
  orSyncRelease(cell->sync);
  cell->sync = orSyncRecord(stream, replaced ? replaced->sync : NULL);
  unlock();
}

/* The moment of a cell; null if it was recorded before the sanitizer was there. */
static orSync *syncOf(orCell *cell) {
  if (!cell->sync && !cell->stream && !orCellDone(cell)) cell->sync = orSyncGate();
  if (cell->sync && cell->sync->gate && orCellDone(cell))
    orSyncOpen(cell->sync, 0); /* signalled while it was off */
  return cell->sync;
}

void orSanitizerNoteWait(orStream_t stream, orCell *cell) {
  lock();
  if (syncOf(cell)) orTimelineWait(stream, cell->sync);
  unlock();
}

void orSanitizerNoteWaitValue(orStream_t stream) {
  lock();
  orTimelineWaitValue(stream);
  unlock();
}

void orSanitizerNoteSignal(orCell *cell) {
  orStream_t stream = 0;
  uint64_t number;
  orRaceList races = {NULL, 0};
  orTaskCurrent(&stream, &number);
  lock();
  if (syncOf(cell) && cell->sync->gate) {
    orSyncOpen(cell->sync, stream);
    orRacesDecide(cell->sync, &races);
  }
  unlock();
  uint64_t first = races.first ? orRacesReport(&races) : 0;
  if (first && !found_here) found_here = first;
}

void orSanitizerNoteOver(orCell *cell) {
  lock();
  if (cell->sync && !ignored) orHostJoin(cell->sync);
  unlock();
}

void orSanitizerForget(orCell *cell) {
  lock();
  orSyncRelease(cell->sync);
  cell->sync = NULL;
  unlock();
}

orSync *orSanitizerMark(orStream_t stream, int device) {
  lock();
  orSync *sync = stream ? orTimelineMark(stream) : orDeviceMark(device);
  unlock();
  return sync;
}

void orSanitizerReached(orSync *mark) {
  lock();
  if (!ignored) orHostJoin(mark);
  orSyncRelease(mark);
  unlock();
}

void orSanitizerNoteAfter(orCell *cell, orStream_t stream) {
  lock();
  orSync *mark = orTimelineMark(stream);
  if (cell->sync && cell->sync->gate) { /* somebody waits for it already */
    orSyncJoin(cell->sync, mark);
    orSyncRelease(mark);
  } else {
    orSyncRelease(cell->sync);
    cell->sync = mark;
  }
  unlock();
}

orError_t orSanitizerAside(orStream_t stream) {
  if (!orSanitizerOn()) return orSuccess;
  OR_TRY(orEnter());
  if (!orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  lock();
  orTimelineAt(orTimelineOf(stream))->aside = true;
  unlock();
  return orSuccess;
}

/* Queued work is dropped and waits are given up. */
void orSanitizerNoteReset(int device) {
  lock();
  orClocksForgetGates(device);
  orRacesForgetUndecided();
  unlock();
}

/* ---- the caching allocator ---- */

void orSanitizerNoteUse(uintptr_t start, size_t size, orStream_t stream) {
  orShadow **found;
  lock();
  uint32_t timeline = orTimelineOf(stream);
  const orClock *clock = &orTimelineAt(timeline)->clock;
  size_t count = orShadowFind(start, start + size, &found);
  for (size_t i = 0; i < count; i++)
    if (orClockKnows(clock, found[i]->timeline, found[i]->counter)) orShadowErase(found[i]);
  unlock();
}

orError_t orSanitizerUsed(const void *data, size_t bytes, orStream_t stream) {
  if (!orSanitizerOn()) return orSuccess;
  OR_TRY(orEnter());
  if (!orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  orSanitizerNoteUse((uintptr_t)data, bytes, stream);
  return orSuccess;
}

void orSanitizerNoteFree(uintptr_t start, size_t size, orStream_t owner) {
  orShadow **found;
  lock();
  uint32_t timeline = orTimelineOf(owner);
  size_t count = orShadowFind(start, start + size, &found);
  for (size_t i = 0; i < count; i++) {
    found[i]->freed = true;
    found[i]->owner = timeline;
    if (orTimelineAt(found[i]->timeline)->aside) orShadowErase(found[i]);
  }
  unlock();
}

/* The region's owner has waited for all that it knows of. */
static bool isOver(const orShadow *s) {
  return !s->freed || orHostKnows(s->timeline, s->counter) ||
         orClockKnows(&orTimelineAt(s->owner)->clock, s->timeline, s->counter);
}

void orSanitizerNoteRelease(uintptr_t start, size_t size) {
  orShadow **found;
  lock();
  size_t count = orShadowFind(start, start + size, &found);
  for (size_t i = 0; i < count; i++)
    if (isOver(found[i])) orShadowErase(found[i]);
  unlock();
}

/* ---- on and off ---- */

static orError_t checkOptions(const orSanitizerOptions *given) {
  if (!given) return orSuccess;
  if (given->size != sizeof *given)
    return orFail(orErrorInvalidValue, "orSanitizerOptions: size is %zu; it must be %zu",
                  given->size, sizeof *given);
  if (given->capture && !given->release)
    return orFail(orErrorInvalidValue, "orSanitizerOptions: capture without release");
  return orSuccess;
}

/* Lock held. The reports stay. */
static void forgetAll(void) {
  setActive(0);
  orShadowClear();
  orRacesForgetUndecided();
  orClocksForgetGates(-1);
}

static orError_t enable(const orSanitizerOptions *given, bool setting) {
  lock();
  bool taken = setting ? touched : orSanitizerOn() && !by_setting;
  touched = true;
  if (!taken) {
    forgetAll();
    orRacesClear();
  }
  unlock();
  if (taken)
    return setting ? orSuccess : orFail(orErrorAlreadyExists, "the sanitizer is on already");
  releaseDead(); /* by the function that belongs to them */
  lock();
  options = given ? *given : (orSanitizerOptions){.size = sizeof options};
  by_setting = setting;
  orRacesSetLimit(options.reports ? options.reports : 1000, setting);
  setActive(1);
  unlock();
  return orSuccess;
}

void orSanitizerStart(void) {
  if (OR_UNLIKELY(orConfigGet()->sanitizer)) enable(NULL, true);
}

orError_t orSanitizerEnable(const orSanitizerOptions *given) {
  OR_TRY(orEnter());
  OR_TRY(checkOptions(given));
  return enable(given, false);
}

orError_t orSanitizerDisable(void) {
  OR_TRY(orEnter());
  lock();
  touched = true;
  forgetAll();
  unlock();
  releaseDead();
  return orSuccess;
}

orError_t orSanitizerClearReports(void) {
  OR_TRY(orEnter());
  lock();
  orRacesClear();
  unlock();
  releaseDead();
  return orSuccess;
}
