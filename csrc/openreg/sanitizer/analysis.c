/*
 * The analysis of an access: compares it with those before it, and keeps it in the shadow.
 *
 * The analysis follows the order of the API's calls, on the threads that make them: an access is
 * reported before its task is queued, and no worker takes part. An earlier access in the shadow
 * (shadow.c) either happens before it by the clocks (timeline.c), or conflicts with it if they
 * share bytes and one of them writes (races.c). A write replaces all that it covers and that
 * happens before it, a read replaces earlier reads. So the shadow keeps little more than what a
 * later access can still conflict with. An access of the host's is compared and not kept, as all
 * work that is queued later comes after it. An access that its caller will not queue because of a
 * conflict (orSanitizerRefuse) is not kept either: all accesses of a call are compared before one
 * is kept.
 *
 * A late access (late.c) is kept as one to some of its bytes: it replaces no other, and is replaced
 * only by an access to all of them that happens after it, so that what the shadow holds does not
 * depend on when its task runs.
 *
 * All is under orSanitizerMutex, but for thread-local data and `pinned_reported`. Stacks are
 * captured before the mutex is taken.
 */
#include <stdlib.h>
#include <string.h>

#include "device/pinned_alias.h"
#include "sanitizer/private.h"
#include "tools/choices.h"

enum { OR_STRIDED = 1024, OR_FEW = 32 /* touches that fit on the stack */ };

static uint64_t enabled;             /* times that it was switched on */
static _Atomic bool pinned_reported; /* orSanitizerOptions.pinned, since then */
static uint64_t calls;

static _Thread_local const char *operation_name;

/* Of one pattern a wider piece covers a narrower one. */
static bool covers(const orRange *whole, const orRange *part) {
  if (!whole->dims) return whole->begin <= part->begin && part->end <= whole->end;
  if (whole->begin > part->begin || whole->begin + whole->width < part->begin + part->width ||
      whole->dims != part->dims)
    return false;
  return !memcmp(whole->repeats, part->repeats, whole->dims * sizeof whole->repeats[0]);
}

/* What a later access cannot meet without meeting `now` is not needed any more. True if the node
 * has become `now`. */
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

typedef struct orCheck {
  orShadow now;         /* the access */
  const orClock *clock; /* of whoever makes it; null: the host */
  orLate *late;         /* of its accesses that are OR_ACCESS_LATE */
  bool moves;           /* OR_ACCESS_MOVES */
  uint64_t sums;        /* bit i: of access i, which is of memory that cannot be guarded */
  bool is_summed;       /* this one */
  bool touches;         /* it is the host's, in no call */
  bool judged;          /* the host's has met another */
  orRange moved;        /* what an access before it moves */
  orRaceList races;
} orCheck;

static bool isOrdered(const orCheck *t, const orShadow *old) {
  return orHappensBeforeThread(old->timeline, old->counter) ||
         (t->clock && orClockIncludes(t->clock, old->timeline, old->counter));
}

static orPlace placeOf(const orShadow *s) { return (orPlace){&s->range, s->late, s->moved}; }

/* Whether they may touch a byte both, as far as is known. */
static bool mayMeet(const orShadow *a, const orShadow *b) {
  if (!orRangesMeet(&a->range, &b->range)) return false;
  if (OR_LIKELY(!a->late && !b->late) || orLateIsOpen(a->late) || orLateIsOpen(b->late))
    return true;
  orPlace first = placeOf(a), second = placeOf(b);
  orSpan common;
  return orPlacesMeet(&first, &second, &common) != OR_APART;
}

static bool isConflict(orCheck *t, const orShadow *old, bool keep) {
  return (old->write || t->now.write) && mayMeet(old, &t->now) &&
         orRaceFound(old, &t->now, keep, &t->races);
}

/* What the host has been compared with guards its memory no more: it would be told twice. */
static void judge(orCheck *t, orShadow *old) {
  bool decided = isConflict(t, old, false);
  if (t->clock || !(old->write || t->now.write) || !orRangesMeet(&old->range, &t->now.range))
    return;
  t->judged = old->judged = true;
  old->undecided = !decided;
  orGuardLacksVerdict |= !decided;
}

/* Finds what is decided, and keeps nothing. */
static void compare(orCheck *t) {
  orShadow **found;
  size_t count = orShadowFind(t->now.range.begin, t->now.range.end, &found);
  for (size_t i = 0; i < count; i++)
    if (orHappensBeforeAll(found[i]->timeline, found[i]->counter))
      orShadowErase(found[i]);
    else if (!isOrdered(t, found[i]) && !(t->touches && found[i]->judged))
      judge(t, found[i]);
  if (t->judged) orGuardRenew(t->now.range.begin, t->now.range.end);
}

/* Many pieces of one hull, none of which covers another, would be looked at again and again. The
 * oldest of the newest access's own timeline goes, so that one stream's pieces drop no other's. */
static void limitStrided(orShadow **kept, size_t count, uint32_t own) {
  while (count > OR_STRIDED) {
    size_t oldest = 0;
    for (size_t i = 1; i < count; i++) {
      bool is_own = kept[i]->timeline == own, was_own = kept[oldest]->timeline == own;
      if (is_own == was_own ? kept[i]->sequence < kept[oldest]->sequence : is_own) oldest = i;
    }
    orShadowErase(kept[oldest]);
    kept[oldest] = kept[--count];
  }
}

/* The strided ones that stay gather at the start of found[], where all have been looked at. */
static void keep(orCheck *t) {
  orShadow **found, *now = &t->now;
  bool renewed = false;
  size_t strided = 0;
  size_t count = orShadowFind(now->range.begin, now->range.end, &found);
  for (size_t i = 0; i < count; i++) {
    orShadow *old = found[i];
    if (orHappensBeforeAll(old->timeline, old->counter)) {
      orShadowErase(old);
      continue;
    }
    bool settled = isOrdered(t, old) || (isConflict(t, old, true) && !old->late);
    bool needless =
        settled && !now->late && (now->write || !old->write) && (old->partial || !now->partial);
    bool stays = old->range.dims || old->late;
    if (stays && !(needless && covers(&now->range, &old->range)))
      found[strided++] = old;
    else if (needless)
      renewed |= replace(old, now, renewed);
  }
  if (OR_UNLIKELY(strided > OR_STRIDED)) limitStrided(found, strided, now->timeline);
  orAllocationUse(now->range.begin, now->stack);
  if (!renewed) {
    orStackRetain(now->stack);
    orLateRetain(now->late);
    orShadowAdd(now);
  }
  if (!orSimulatedHolds((const void *)now->range.begin))
    orGuardRenew(now->range.begin, now->range.end);
  if (t->is_summed) orSumsAdd(now);
}

/* Adds it, if it touches anything. */
static void addTouch(const orMemoryAccess *access, orTouch *touches, size_t *count) {
  orTouch *touch = &touches[*count];
  touch->write = access->write;
  touch->pinned = !orSimulatedHolds(access->data) && orRegionIs(access->data, orMemoryTypeHost);
  *count += orRangeMake(access, &touch->range);
}

/* `made` of them touch something. */
static orError_t makeTouches(const char *operation, const orMemoryAccess *accesses, size_t count,
                             orTouch *touches, size_t *made) {
  for (size_t i = 0; i < count; i++) {
    if (accesses[i].dims > OR_ACCESS_DIMS)
      return orFail(orErrorInvalidValue, "%s: an access has %u dimensions: allowed are at most %d",
                    operation, accesses[i].dims, OR_ACCESS_DIMS);
    addTouch(&accesses[i], touches, made);
    if (*made && !touches[*made - 1].range.end)
      return orFail(orErrorInvalidValue, "%s: the access at %p ends past the address space",
                    operation, accesses[i].data);
  }
  return orSuccess;
}

static orCheck checkOf(orStream_t stream, const char *operation, orStack *stack) {
  orCheck t = {.races.call = ++calls};
  t.now.operation = orSanitizerName(operation);
  t.now.sequence = orSanitizerMoment();
  t.now.stack = stack;
  if (!stream) return t;
  t.now.stream = stream;
  t.now.timeline = orTimelineOf(stream);
  orHostRelease(&orTimelineAt(t.now.timeline)->clock);
  t.clock = &orTimelineAt(t.now.timeline)->clock;
  t.now.counter = t.clock->at[t.now.timeline];
  return t;
}

static void checkEach(orCheck *t, const orTouch *touches, size_t count, void (*check)(orCheck *)) {
  for (size_t i = 0; i < count; i++) {
    t->now.write = touches[i].write & OR_ACCESS_WRITES;
    t->now.partial = touches[i].write & (OR_ACCESS_PARTIAL | OR_ACCESS_LATE);
    t->now.late = touches[i].write & OR_ACCESS_LATE ? t->late : NULL;
    t->now.range = touches[i].range;
    t->moves = touches[i].write & OR_ACCESS_MOVES;
    t->is_summed = i < 64 && t->sums >> i & 1;
    check(t);
  }
}

static void readFresh(orCheck *t) {
  orShadow allocation;
  if (!t->now.write && !t->moves && orFreshRead(&t->now.range, t->now.partial, &allocation))
    orRaceFresh(&allocation, &t->now, &t->races);
}

static void readNotReplayed(orCheck *t) {
  orShadow written;
  if (!t->now.write && orGraphMemoryRead(&t->now.range, t->now.partial, &written))
    orRaceGraph(orReportNotReplayed, &written, &t->now, &t->races);
}

/* What was reported of a read is not reported of the next one. */
static void writeFresh(orCheck *t) {
  if (t->moves)
    t->moved = t->now.range;
  else if (t->now.write && t->moved.width)
    orFreshMove(&t->moved, &t->now.range);
  else if (t->now.write || t->races.first)
    orFreshWrite(&t->now.range, t->now.partial);
  if (t->now.write) orGraphMemoryWrite(&t->now.range);
}

static bool usesPinned(const orTouch *touches, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (touches[i].pinned) return true;
  return false;
}

/* Not over before one of the calls is, so that no thread goes on without. */
static void reportPinned(const orTouch *touches, size_t count) {
  if (OR_LIKELY(pinned_reported) || !usesPinned(touches, count)) return;
  orSanitizerLock();
  orSanitizerOptions by = orSanitizerChosen;
  uint64_t asked = enabled;
  orSanitizerUnlock();
  if (by.pinned) by.pinned(by.context);
  orSanitizerLock();
  if (asked == enabled) pinned_reported = true;
  orSanitizerUnlock();
}

void orAnalysisBegin(void) {
  enabled++;
  pinned_reported = false;
}

static void reportToSchedule(orStream_t stream, const orTouch *touches, size_t count) {
  for (size_t i = 0; i < count; i++)
    orScheduleTouched(stream, touches[i].range.begin, touches[i].range.end, touches[i].write);
}

/* `late`: the bytes of the late ones, may be null. `anyway`: it is queued whatever is found. */
static void checkAll(orStream_t stream, const char *operation, const orTouch *touches, size_t count,
                     orLate *late, bool anyway) {
  if (orSanitizerIgnores()) return;
  if (stream && orDeviceIsLost(orHandleDevice(stream))) return; /* it will be refused */
  reportToSchedule(stream, touches, count);
  if (stream) reportPinned(touches, count);
  uint64_t sums = stream ? orSumsWanted(touches, count) : 0;
  orCheck t = {.now.stream = 0};
  bool refuse = false;
  orSanitizerOptions by; /* others may be set meanwhile */
  void *captured = orStackCapture(&by);
  orSanitizerLock();
  orStack *stack = orStackNew(captured, &by);
  if (orSanitizerIsOn()) {
    t = checkOf(stream, operation, stack);
    t.sums = sums;
    t.late = late;
    refuse = stream && orSanitizerRefuses && !anyway;
    if (!stream || (refuse && !orShadowIsOnlyOf(t.now.timeline)))
      checkEach(&t, touches, count, compare);
    if (stream) checkEach(&t, touches, count, readFresh);
    checkEach(&t, touches, count, readNotReplayed);
    bool queued = !refuse || (!t.races.first && !orRacesAreUnasked());
    if (stream && queued) {
      orTimelineAt(t.now.timeline)->newest = t.now.counter;
      orSumsPrepare(touches, count);
      checkEach(&t, touches, count, writeFresh);
      checkEach(&t, touches, count, keep);
      if (!anyway) orRacesHold();
    }
    orShadowSweep();
  }
  orStackRelease(stack);
  bool any = orStacksAreDead();
  orSanitizerUnlock();
  bool refused = refuse && t.races.first;
  bool found = t.races.first && orRacesReport(&t.races);
  if (any || found) orStacksFree();
  if (sums) orSumsTake();
  if (refused && !found)
    checkAll(stream, operation, touches, count, late, true); /* in no memory of ours */
}

/* What a task in a graph touches, told at each launch. */
typedef struct orNodeTouches {
  const char *operation;
  orLateAccess *late; /* a reference, or null */
  size_t count;
  orTouch touches[];
} orNodeTouches;

static orLate *queued(orLateAccess *access, orStream_t stream) {
  if (!access) return NULL;
  uint64_t after = 0;
  if (stream) orStreamQueued(stream, &after);
  orSanitizerLock();
  orLate *late = orLateQueued(access, stream, after);
  orSanitizerUnlock();
  return late;
}

static void release(orLate *late) {
  if (!late) return;
  orSanitizerLock();
  orLateRelease(late);
  orSanitizerUnlock();
}

/* By a kernel that has not said what it touches. */
static void anythingIsWritten(void) {
  orSanitizerLock();
  orFreshForget(0, UINTPTR_MAX);
  orSanitizerUnlock();
}

static void reportAgain(const void *args, orStream_t on) {
  const orNodeTouches *node = args;
  orLate *late = queued(node->late, on);
  if (node->count)
    checkAll(on, node->operation, node->touches, node->count, late, true);
  else
    anythingIsWritten();
  release(late);
}

static void destroyNode(void *args) {
  orLateAccess *late = ((orNodeTouches *)args)->late;
  if (!late || orInForkedChild()) return;
  orSanitizerLock();
  orLateDrop(late, false);
  orSanitizerUnlock();
}

/* False: the stream is not capturing. */
static bool keepForLaunches(orStream_t stream, const char *operation, const orTouch *touches,
                            size_t count, orLateAccess *late) {
  if (!orStreamCaptures(stream)) return false;
  size_t size = sizeof(orNodeTouches) + count * sizeof *touches;
  orNodeTouches *node = orSanitizerAllocate(size);
  orSanitizerLock();
  *node = (orNodeTouches){.operation = orSanitizerName(operation), .late = late, .count = count};
  if (late) orLateCaptured(late, orHandleDevice(stream));
  orSanitizerUnlock();
  if (count) memcpy(node->touches, touches, count * sizeof *touches);
  static const orNodeTool tool = {.report = reportAgain, .destroy = destroyNode};
  orGraphMemoryKeep(stream, node->operation, touches, count);
  bool kept, captures = orCaptureReport(stream, &tool, node, size, &kept);
  if (!kept) destroyNode(node);
  free(node);
  return captures;
}

static orError_t report(orStream_t stream, const char *operation, const orMemoryAccess *accesses,
                        size_t count, orLateAccess *late) {
  orTouch few[OR_FEW], *touches = few;
  size_t made = 0;
  /* What a task does was told when it was queued. */
  if (!orSanitizerIsOn() || orInForkedChild() || orProcessTask() != OR_TASK_NONE) return orSuccess;
  if (!operation || (count && !accesses))
    return orFail(orErrorInvalidValue, "orSanitizerAccess: the %s is null",
                  operation ? "list of accesses" : "operation");
  if (count > OR_FEW) touches = orSanitizerAllocate(count * sizeof *touches);
  orError_t error = makeTouches(operation, accesses, count, touches, &made);
  if (!error && stream && !orHandleFind(&orStreamTable, stream))
    error = orErrorInvalidResourceHandle;
  if (!error && made && !keepForLaunches(stream, operation, touches, made, late)) {
    orLate *bytes = queued(late, stream);
    checkAll(stream, operation, touches, made, bytes, false);
    release(bytes);
  }
  if (touches != few) free(touches);
  return error;
}

orError_t orSanitizerAccess(orStream_t stream, const char *operation,
                            const orMemoryAccess *accesses, size_t count) {
  return report(stream, operation, accesses, count, NULL);
}

orError_t orSanitizerAccessLate(orStream_t stream, const char *operation,
                                const orMemoryAccess *accesses, size_t count, orLateAccess *late) {
  return report(stream, operation, accesses, count, late);
}

static void onKernel(orStream_t stream, const orProbe *p) {
  if (!p->count && !keepForLaunches(stream, p->call, NULL, 0, NULL)) anythingIsWritten();
  for (size_t done = 0; done < p->count;) {
    orTouch few[OR_FEW];
    size_t count = 0;
    for (; done < p->count && count < OR_FEW; done++) {
      const orAccess *a = &p->accesses[done];
      addTouch(&(orMemoryAccess){.data = a->address, .width = a->bytes, .write = a->write != 0},
               few, &count);
    }
    if (count && !keepForLaunches(stream, p->call, few, count, NULL))
      checkAll(stream, p->call, few, count, NULL, true);
  }
}

void orAnalysisOnAccess(orProbe *p) {
  orTouch both[2];
  size_t count = 0;
  orStream_t stream = p->stream;
  if (stream == OR_STREAM_DEFAULT && orDeviceDefaultStream(orCurrentDevice(), &stream)) return;
  if (!p->src && !p->dst) {
    onKernel(stream, p);
    return;
  }
  bool inside_devices =
      orRegionIs(p->src, orMemoryTypeDevice) && orRegionIs(p->dst, orMemoryTypeDevice);
  uint32_t moves = inside_devices ? OR_ACCESS_MOVES : 0;
  if (p->src)
    addTouch(&(orMemoryAccess){.data = p->src, .width = p->bytes, .write = moves}, both, &count);
  if (p->dst)
    addTouch(&(orMemoryAccess){.data = p->dst, .width = p->bytes, .write = 1}, both, &count);
  const char *operation = operation_name ? operation_name : p->call;
  if (orStreamCaptures(stream)) /* the graph's node reports the accesses of a copy or fill */
    orGraphMemoryKeep(stream, operation, both, count);
  else
    checkAll(stream, operation, both, count, NULL, true);
}

/* Whose stack is asked for when there is something to tell, as most of what is touched beside a
 * copy is right. */
static void touchedByHost(uintptr_t address, bool write) {
  orCheck t = {.now.stream = 0};
  if (orSanitizerIgnores()) return;
  orSanitizerLock();
  orSanitizerOptions by = orSanitizerChosen;
  if (orSanitizerIsOn()) {
    t = checkOf(0, "memory access", NULL);
    t.touches = true;
    t.now.write = write;
    t.now.range = (orRange){.begin = address, .end = address + 1, .width = 1};
    compare(&t);
  }
  orSanitizerUnlock();
  if (!t.races.first) return;
  void *captured = by.capture ? by.capture(by.context) : NULL;
  orSanitizerLock();
  orStack *stack = orStackNew(captured, &by);
  orRacesSetStack(&t.races, stack);
  orStackRelease(stack);
  orSanitizerUnlock();
  if (orRacesReport(&t.races) && by.touched) by.touched(by.context);
  orStacksFree();
}

__attribute__((constructor)) static void listen(void) { orGuardSetTouched(touchedByHost); }

const char *orSanitizerOperation(const char *operation) {
  const char *before = operation_name;
  operation_name = operation;
  return before;
}
