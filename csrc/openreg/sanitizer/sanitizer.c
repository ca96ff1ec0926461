/*
 * The sanitizer: the calls that tell it what happens, and what an access means for those before it.
 *
 * The analysis is made in the order of the API's calls, on the threads that make them: an access is
 * told before its task is queued, and no lane takes part. What an access finds in the shadow
 * (shadow.c) is either ordered before it by the clocks (timeline.c), or in conflict with it if they
 * share bytes and one of them writes (races.c). A write takes the place of all that is ordered
 * before it and that it covers, a read that of earlier reads. So the shadow keeps what a later
 * access can still be in conflict with, and little else. What the host does itself is compared and
 * not kept: all that is queued later comes after it. Nor is what its caller is not going to queue,
 * for the conflict that it is in (orSanitizerRefuse): then all accesses of a call are compared
 * before one is kept.
 *
 * Freed blocks. The caching allocator waits for recorded streams before it hands a block out, so
 * their accesses are forgotten when the block is freed, and so are those that keep their memory
 * (orSanitizerAside). All others stay, marked with the allocation stream: if whoever has the memory
 * next is not ordered after them, that is a conflict like any other.
 *
 * What it has to know of a cell is kept there. All is under orSanitizerMutex (sanitizer.h), but for
 * what belongs to a thread. Stacks are captured before the mutex is taken.
 */
#include "sanitizer/sanitizer.h"

#include "device/pinned_alias.h"
#include "tools/choices.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OR_STRIDED = 1024 };

static uint32_t is_on; /* what the shim reads */
uint32_t orSanitizerRefuses, orSanitizerTellsSome = 1;
static _Atomic bool checks_fresh; /* orSanitizerInitcheck */
orMutex orSanitizerMutex = OR_MUTEX_INITIALIZER(OR_RANK_TOOLS);

static orSanitizerOptions options;
static uint64_t enabled;         /* times */
static _Atomic bool told_pinned; /* options.pinned, since then; read without the lock */
static bool by_setting;          /* enabled by OPENREG_SANITIZER alone */
static bool touched;             /* enabled or disabled by anybody */
static uint64_t calls;

static _Thread_local const char *operation_name;
static _Thread_local uint32_t ignored;

static _Thread_local bool inside;

static void lock(void) {
  orThreadsIdentify();
  orMutexLock(&orSanitizerMutex);
  inside = true;
}

static void unlock(void) {
  inside = false;
  orMutexUnlock(&orSanitizerMutex);
}

bool orSanitizerIsInside(void) { return inside; }

static bool isOn(void) { return __atomic_load_n(&is_on, __ATOMIC_RELAXED) != 0; }

static orTool tool;

static void setActive(bool active) {
  __atomic_store_n(&is_on, active, __ATOMIC_RELAXED);
  orToolSwitch(&tool, active);
}

const uint32_t *orSanitizerActive(void) { return &is_on; }

static void *checked(void *memory, size_t bytes) {
  if (memory) return memory;
  orWarn("no host memory for the sanitizer (%zu bytes)", bytes);
  abort();
}

void *orSanitizerAllocate(size_t bytes) { return checked(malloc(bytes), bytes); }

void *orSanitizerResize(void *old, size_t bytes) { return checked(realloc(old, bytes), bytes); }

/* ---- accesses ---- */

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
  bool moves;           /* OR_ACCESS_MOVES */
  uint64_t sums;        /* bit i: of access i, which is of memory that cannot be guarded */
  bool is_summed;       /* this one */
  bool touches;         /* it is the host's, in no call */
  bool judged;          /* the host's has met another */
  orRange moved;        /* what an access before it moves */
  orRaceList races;
} orCheck;

static bool isOrdered(const orCheck *t, const orShadow *old) {
  return orHostKnows(old->timeline, old->counter) ||
         (t->clock && orClockKnows(t->clock, old->timeline, old->counter));
}

static bool isConflict(orCheck *t, const orShadow *old, bool keep) {
  return (old->write || t->now.write) && orRangesMeet(&old->range, &t->now.range) &&
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
    if (orEverybodyKnows(found[i]->timeline, found[i]->counter))
      orShadowErase(found[i]);
    else if (!isOrdered(t, found[i]) && !(t->touches && found[i]->judged))
      judge(t, found[i]);
  if (t->judged) orGuardRenew(t->now.range.begin, t->now.range.end);
}

/* Many pieces of one hull, none of which covers another, would be looked at again and again. */
static void limitStrided(orShadow **kept, size_t count) {
  while (count > OR_STRIDED) {
    size_t oldest = 0;
    for (size_t i = 1; i < count; i++)
      if (kept[i]->sequence < kept[oldest]->sequence) oldest = i;
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
    if (orEverybodyKnows(old->timeline, old->counter)) {
      orShadowErase(old);
      continue;
    }
    bool settled = isOrdered(t, old) || isConflict(t, old, true);
    bool needless = settled && (now->write || !old->write) && (old->some || !now->some);
    if (old->range.dims && !(needless && covers(&now->range, &old->range)))
      found[strided++] = old;
    else if (needless)
      renewed |= replace(old, now, renewed);
  }
  if (OR_UNLIKELY(strided > OR_STRIDED)) limitStrided(found, strided);
  if (!renewed) {
    orStackRetain(now->stack);
    orShadowAdd(now);
  }
  if (!orSimulatedHolds((const void *)now->range.begin))
    orGuardRenew(now->range.begin, now->range.end);
  if (t->is_summed) orSumsAdd(now);
}

enum { OR_FEW = 32 }; /* touches that fit on the stack */

/* Adds it, if it touches anything. */
static void addTouch(const orMemoryAccess *access, orTouch *touches, size_t *count) {
  touches[*count].write = access->write;
  *count += orRangeMake(access, &touches[*count].range);
}

/* `made` of them touch something. */
static orError_t makeTouches(const char *operation, const orMemoryAccess *accesses, size_t count,
                             orTouch *touches, size_t *made) {
  for (size_t i = 0; i < count; i++) {
    if (accesses[i].dims > OR_ACCESS_DIMS)
      return orFail(orErrorInvalidValue, "%s: an access of %u dimensions; at most %d", operation,
                    accesses[i].dims, OR_ACCESS_DIMS);
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
  t.now.sequence = orShadowMoment();
  t.now.stack = stack;
  if (!stream) return t;
  t.now.stream = stream;
  t.now.timeline = orTimelineOf(stream);
  orHostTell(&orTimelineAt(t.now.timeline)->clock);
  t.clock = &orTimelineAt(t.now.timeline)->clock;
  t.now.counter = t.clock->at[t.now.timeline];
  return t;
}

static void checkEach(orCheck *t, const orTouch *touches, size_t count, void (*check)(orCheck *)) {
  for (size_t i = 0; i < count; i++) {
    t->now.write = touches[i].write & OR_ACCESS_WRITES;
    t->now.some = touches[i].write & OR_ACCESS_SOME;
    t->now.range = touches[i].range;
    t->moves = touches[i].write & OR_ACCESS_MOVES;
    t->is_summed = i < 64 && t->sums >> i & 1;
    check(t);
  }
}

static void readFresh(orCheck *t) {
  orShadow allocation;
  if (!t->now.write && !t->moves && orFreshRead(&t->now.range, t->now.some, &allocation))
    orRaceFresh(&allocation, &t->now, &t->races);
}

/* What was reported of a read is not reported of the next one. */
static void writeFresh(orCheck *t) {
  if (t->moves)
    t->moved = t->now.range;
  else if (t->now.write && t->moved.width)
    orFreshMove(&t->moved, &t->now.range);
  else if (t->now.write || t->races.first)
    orFreshWrite(&t->now.range, t->now.some);
}

static bool usesPinned(const orTouch *touches, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (orTouchIsPinned(&touches[i])) return true;
  return false;
}

/* Not over before one of the calls is, so that no thread goes on without. */
static void tellPinned(const orTouch *touches, size_t count) {
  if (OR_LIKELY(told_pinned) || !usesPinned(touches, count)) return;
  lock();
  orSanitizerOptions by = options;
  uint64_t asked = enabled;
  unlock();
  if (by.pinned) by.pinned(by.context);
  lock();
  if (asked == enabled) told_pinned = true;
  unlock();
}

static void *capture(orSanitizerOptions *by) {
  lock();
  *by = options;
  unlock();
  return by->capture ? by->capture(by->context) : NULL;
}

static void tellSchedule(orStream_t stream, const orTouch *touches, size_t count) {
  for (size_t i = 0; i < count; i++)
    orScheduleTouched(stream, touches[i].range.begin, touches[i].range.end, touches[i].write);
}

/* `anyway`: it is queued whatever is found. */
static void checkAll(orStream_t stream, const char *operation, const orTouch *touches, size_t count,
                     bool anyway) {
  if (ignored) return;
  if (stream && orDeviceIsLost(orHandleDevice(stream))) return; /* it will be refused */
  tellSchedule(stream, touches, count);
  if (stream) tellPinned(touches, count);
  uint64_t sums = stream ? orSumsWanted(touches, count) : 0;
  orCheck t = {.now.stream = 0};
  bool refuse = false;
  orSanitizerOptions by; /* others may be set meanwhile */
  void *captured = capture(&by);
  lock();
  orStack *stack = orStackNew(captured, &by);
  if (isOn()) {
    t = checkOf(stream, operation, stack);
    t.sums = sums;
    refuse = stream && orSanitizerRefuses && !anyway;
    if (!stream || refuse) checkEach(&t, touches, count, compare);
    if (stream) checkEach(&t, touches, count, readFresh);
    bool queued = !refuse || (!t.races.first && !orRacesAreUnasked());
    if (stream && queued) {
      orSumsPrepare(touches, count);
      checkEach(&t, touches, count, writeFresh);
      checkEach(&t, touches, count, keep);
    }
    orShadowSweep();
  }
  orStackDrop(stack);
  bool any = orStacksAreDead();
  unlock();
  bool refused = refuse && t.races.first;
  bool found = t.races.first && orRacesReport(&t.races);
  if (any || found) orStacksRelease();
  if (sums) orSumsTake();
  if (refused && !found)
    checkAll(stream, operation, touches, count, true); /* in no memory of ours */
}

/* What a task in a graph touches, told at each launch. */
typedef struct orTold {
  const char *operation;
  size_t count;
  orTouch touches[];
} orTold;

/* By a kernel that has not said what it touches. */
static void anythingIsWritten(void) {
  lock();
  orFreshForget(0, UINTPTR_MAX);
  unlock();
}

static void tellAgain(const void *args, orStream_t on) {
  const orTold *told = args;
  if (told->count)
    checkAll(on, told->operation, told->touches, told->count, true);
  else
    anythingIsWritten();
}

/* False: the stream is not capturing. */
static bool keepForLaunches(orStream_t stream, const char *operation, const orTouch *touches,
                            size_t count) {
  if (!orStreamCaptures(stream)) return false;
  size_t size = sizeof(orTold) + count * sizeof *touches;
  orTold *told = orSanitizerAllocate(size);
  lock();
  *told = (orTold){.operation = orSanitizerName(operation), .count = count};
  unlock();
  if (count) memcpy(told->touches, touches, count * sizeof *touches);
  bool kept = orCaptureTell(stream, tellAgain, told, size);
  free(told);
  return kept;
}

orError_t orSanitizerAccess(orStream_t stream, const char *operation,
                            const orMemoryAccess *accesses, size_t count) {
  orTouch few[OR_FEW], *touches = few;
  size_t made = 0;
  /* What a task does was told when it was queued. */
  if (!isOn() || orInForkedChild() || orProcessTask() != OR_TASK_NONE) return orSuccess;
  if (!operation || (count && !accesses))
    return orFail(orErrorInvalidValue, "orSanitizerAccess: the %s is null",
                  operation ? "list of accesses" : "operation");
  if (count > OR_FEW) touches = orSanitizerAllocate(count * sizeof *touches);
  orError_t error = makeTouches(operation, accesses, count, touches, &made);
  if (!error && stream && !orHandleFind(&orStreamTable, stream))
    error = orErrorInvalidResourceHandle;
  if (!error && made && !keepForLaunches(stream, operation, touches, made))
    checkAll(stream, operation, touches, made, false);
  if (touches != few) free(touches);
  return error;
}

/* Whose stack is asked for when there is something to tell, as most of what is touched beside a
 * copy is right. */
void orSanitizerTouched(uintptr_t address, bool write) {
  orCheck t = {.now.stream = 0};
  if (ignored) return;
  lock();
  orSanitizerOptions by = options;
  if (isOn()) {
    t = checkOf(0, "memory access", NULL);
    t.touches = true;
    t.now.write = write;
    t.now.range = (orRange){.begin = address, .end = address + 1, .width = 1};
    compare(&t);
  }
  unlock();
  if (!t.races.first) return;
  void *captured = by.capture ? by.capture(by.context) : NULL;
  lock();
  orStack *stack = orStackNew(captured, &by);
  orRacesSetStack(&t.races, stack);
  orStackDrop(stack);
  unlock();
  if (orRacesReport(&t.races) && by.touched) by.touched(by.context);
  orStacksRelease();
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

uint32_t orSanitizerRefuse(uint32_t refuse) {
  if (OR_UNLIKELY(orInForkedChild())) return 0; /* a thread of the parent may have had the lock */
  lock();
  uint32_t before = orSanitizerRefuses;
  orSanitizerRefuses = refuse;
  unlock();
  return before;
}

uint32_t orSanitizerInitcheck(uint32_t check) {
  if (OR_UNLIKELY(orInForkedChild())) return 0;
  uint32_t before = atomic_exchange(&checks_fresh, check != 0);
  if (check) return before;
  lock();
  orFreshForget(0, UINTPTR_MAX);
  unlock();
  return before;
}

uint32_t orSanitizerSome(uint32_t report) {
  if (OR_UNLIKELY(orInForkedChild())) return 0;
  lock();
  uint32_t before = orSanitizerTellsSome;
  orSanitizerTellsSome = report;
  unlock();
  return before;
}

static void onKernel(orStream_t stream, const orProbe *p) {
  if (!p->count && !keepForLaunches(stream, p->call, NULL, 0)) anythingIsWritten();
  for (size_t done = 0; done < p->count;) {
    orTouch few[OR_FEW];
    size_t count = 0;
    for (; done < p->count && count < OR_FEW; done++) {
      const orAccess *a = &p->accesses[done];
      addTouch(&(orMemoryAccess){.data = a->address, .width = a->bytes, .write = a->write != 0},
               few, &count);
    }
    if (count && !keepForLaunches(stream, p->call, few, count))
      checkAll(stream, p->call, few, count, true);
  }
}

static void onAccess(orProbe *p) {
  orTouch both[2];
  size_t count = 0;
  orStream_t stream = p->stream;
  if (stream == OR_STREAM_DEFAULT && orDeviceDefaultStream(orCurrentDevice(), &stream)) return;
  if (!p->src && !p->dst) {
    onKernel(stream, p);
    return;
  }
  if (orStreamCaptures(stream)) return; /* of a copy or fill the graph's node tells */
  bool inside_devices =
      orRegionIs(p->src, orMemoryTypeDevice) && orRegionIs(p->dst, orMemoryTypeDevice);
  uint32_t moves = inside_devices ? OR_ACCESS_MOVES : 0;
  if (p->src)
    addTouch(&(orMemoryAccess){.data = p->src, .width = p->bytes, .write = moves}, both, &count);
  if (p->dst)
    addTouch(&(orMemoryAccess){.data = p->dst, .width = p->bytes, .write = 1}, both, &count);
  checkAll(stream, operation_name ? operation_name : p->call, both, count, true);
}

/* ---- order ---- */

static void keepSync(orCell *cell, orSync *sync) {
  orSyncRelease(cell->kept);
  cell->kept = sync;
}

static void onRecord(orProbe *p) {
  lock();
  keepSync(p->cell, orSyncRecord(p->stream, p->replaced ? p->replaced->kept : NULL));
  unlock();
}

/* The moment of a cell; null if it was recorded before the sanitizer was there. */
static orSync *syncOf(orCell *cell) {
  if (!cell->kept && !cell->stream && !orCellDone(cell)) cell->kept = orSyncGate();
  orSync *sync = cell->kept;
  if (sync && sync->gate && orCellDone(cell)) orSyncOpen(sync, 0); /* signalled while it was off */
  return sync;
}

static void onWait(orProbe *p) {
  lock();
  orSync *sync = syncOf(p->cell);
  if (sync) orTimelineWait(p->stream, sync);
  unlock();
}

static void onSignal(orProbe *p) {
  orStream_t stream = 0;
  uint64_t number;
  orRaceList races = {.first = NULL};
  orTaskCurrent(&stream, &number);
  lock();
  orSync *sync = syncOf(p->cell);
  if (sync && sync->gate) {
    orSyncOpen(sync, stream);
    orRacesDecide(sync, &races);
    orGuardUndecided();
  }
  unlock();
  if (races.first) orRacesReport(&races);
}

static void onCellFreed(orProbe *p) {
  lock();
  keepSync(p->cell, NULL);
  unlock();
}

static orSync *markOf(const orProbe *p) {
  return p->stream ? orTimelineMark(p->stream) : orDeviceMark(p->device);
}

static void hostJoin(const orSync *sync, bool everybody) {
  (everybody ? orHostJoinAll : orHostJoin)(sync);
  orGuardRenewAll();
}

/* Of a cell it is the moment of its record, of a stream or a device what is queued there now. */
static void onHostKnows(orProbe *p) {
  lock();
  orSync *sync = p->cell ? orSyncRetain(p->cell->kept) : markOf(p);
  if (sync && !ignored) hostJoin(sync, p->everybody);
  orSyncRelease(sync);
  unlock();
  orSumsKnown(p->kind != OR_KIND_HOST_FUNC);
}

static void onHostWaits(orProbe *p) {
  if (!p->ordered) return;
  lock();
  p->kept = markOf(p);
  unlock();
}

static void onHostWaited(orProbe *p) {
  orSync *mark = p->kept;
  if (!mark) return;
  lock();
  if (!ignored && !p->fails) hostJoin(mark, false);
  orSyncRelease(mark);
  unlock();
  if (!p->fails) orSumsKnown(true);
}

/* It stands for what is queued on the stream so far. */
static void standFor(orCell *cell, orStream_t stream) {
  lock();
  orSync *mark = orTimelineMark(stream), *sync = cell->kept;
  if (sync && sync->gate) { /* somebody waits for it already */
    orSyncJoin(sync, mark);
    orSyncRelease(mark);
  } else {
    keepSync(cell, mark);
  }
  unlock();
}

orError_t orSanitizerEventAfter(orEvent_t event, orStream_t stream) {
  orCell *cell;
  unsigned flags;
  int device;
  if (!isOn()) return orSuccess;
  OR_TRY(orStreamGetDevice(stream, &device));
  if (stream == OR_STREAM_DEFAULT) OR_TRY(orDeviceDefaultStream(device, &stream));
  OR_TRY(orEventCell(event, &cell, &flags));
  bool external = flags & orEventExternal;
  if (external) standFor(cell, stream);
  orCellRelease(cell);
  return external ? orSuccess
                  : orFail(orErrorInvalidValue,
                           "orSanitizerEventAfter: 0x%" PRIx64 " is not an external event", event);
}

orError_t orSanitizerEventOver(orEvent_t event) {
  orCell *cell;
  unsigned flags;
  if (!isOn()) return orSuccess;
  OR_TRY(orEnter());
  OR_TRY(orEventCell(event, &cell, &flags));
  if (cell) onHostKnows(&(orProbe){.cell = cell, .everybody = true});
  orCellRelease(cell);
  return orSuccess;
}

orError_t orSanitizerAside(orStream_t stream) {
  if (!isOn()) return orSuccess;
  OR_TRY(orEnter());
  if (!orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  lock();
  orTimelineAt(orTimelineOf(stream))->aside = true;
  unlock();
  return orSuccess;
}

/* Queued work is dropped and waits are given up. */
static void onReset(orProbe *p) {
  lock();
  orClocksForgetGates(p->device);
  orRacesForgetUndecided();
  unlock();
}

/* ---- the caching allocator ---- */

static size_t findAll(const orProbe *p, orShadow ***found) {
  return orShadowFind((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes, found);
}

/* What a recorded stream has done, and what anybody knows to be over: a thread's last use of
 * memory comes before that memory is freed, whoever frees it. */
static void forgetUse(uintptr_t start, size_t size, orStream_t stream) {
  static const orClock none;
  orShadow **found;
  lock();
  const orClock *clock = stream ? &orTimelineAt(orTimelineOf(stream))->clock : &none;
  size_t count = orShadowFind(start, start + size, &found);
  for (size_t i = 0; i < count; i++)
    if (orClockKnows(clock, found[i]->timeline, found[i]->counter) ||
        orAnybodyKnows(found[i]->timeline, found[i]->counter))
      orShadowErase(found[i]);
  if (!orSimulatedHolds((const void *)start)) orGuardRenew(start, start + size);
  orSumsForget(start, start + size);
  unlock();
}

static void onBlockUsed(orProbe *p) { forgetUse((uintptr_t)p->dst, p->bytes, p->stream); }

orError_t orSanitizerUsed(const void *data, size_t bytes, orStream_t stream) {
  if (!isOn()) return orSuccess;
  OR_TRY(orEnter());
  if (stream && !orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  forgetUse((uintptr_t)data, bytes, stream);
  return orSuccess;
}

static void onBlockFreed(orProbe *p) {
  orShadow **found;
  forgetUse((uintptr_t)p->dst, p->bytes, 0);
  lock();
  uint32_t timeline = orTimelineOf(p->stream);
  size_t count = findAll(p, &found);
  for (size_t i = 0; i < count; i++) {
    found[i]->freed = true;
    found[i]->owner = timeline;
    if (orTimelineAt(found[i]->timeline)->aside) orShadowErase(found[i]);
  }
  orFreshForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  unlock();
}

/* What a task allocates is written before anybody else has it. */
static void onBlockTaken(orProbe *p) {
  if (!atomic_load_explicit(&checks_fresh, memory_order_relaxed) || orProcessTask() != OR_TASK_NONE)
    return;
  orSanitizerOptions by;
  void *captured = capture(&by);
  lock();
  orStack *stack = orStackNew(captured, &by);
  if (isOn()) orFreshAdd((uintptr_t)p->dst, p->bytes, p->stream, stack);
  orStackDrop(stack);
  unlock();
}

/* The region's owner has waited for all that it knows of. */
static bool isOver(const orShadow *s) {
  return !s->freed || orAnybodyKnows(s->timeline, s->counter) ||
         orClockKnows(&orTimelineAt(s->owner)->clock, s->timeline, s->counter);
}

static void onRangeOver(orProbe *p) {
  orShadow **found;
  lock();
  size_t count = findAll(p, &found);
  for (size_t i = 0; i < count; i++)
    if (isOver(found[i])) orShadowErase(found[i]);
  orFreshForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  orSumsForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  unlock();
}

/* ---- on and off ---- */

/* Lock held. The reports stay. */
static void forgetAll(void) {
  setActive(false);
  orPeekForget();
  orShadowClear();
  orGuardRenewAll();
  orSumsForget(0, UINTPTR_MAX);
  orFreshForget(0, UINTPTR_MAX);
  orRacesForgetUndecided();
  orClocksForgetGates(-1);
  orThreadsForget(NULL);
}

static orError_t enable(const orSanitizerOptions *given, bool setting) {
  lock();
  bool taken = setting ? touched : isOn() && !by_setting;
  touched = true;
  if (!taken) {
    forgetAll();
    orRacesClear();
  }
  unlock();
  if (!taken) orPeekBegin();
  if (taken)
    return setting ? orSuccess : orFail(orErrorAlreadyExists, "the sanitizer is on already");
  orStacksRelease();
  lock();
  options = given ? *given : (orSanitizerOptions){.size = sizeof options};
  enabled++;
  told_pinned = false;
  by_setting = setting;
  orRacesSetLimit(options.reports ? options.reports : 1000, setting);
  orMirrorsWanted(true);
  orThreadsForget(options.thread);
  setActive(true);
  unlock();
  return orSuccess;
}

/* For the tool that watches the program which started this one
 * (torch_openreg/openreg/_processes.py). It collects the reports of Python alone; this process
 * prints its own on stderr, and the tool's summary names it. */
static void tellTool(void) {
  const char *path = getenv("OPENREG_SANITIZER_REPORTS");
  int file = path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file < 0) return;
  char line[64];
  int length = snprintf(line, sizeof line, "\nC:process %d (%.32s)\n", (int)getpid(),
                        program_invocation_short_name);
  ssize_t written = write(file, line, (size_t)length);
  (void)written; /* a full disk is no reason to fail */
  close(file);
}

static void onFirstUse(orProbe *p) {
  (void)p;
  if (OR_LIKELY(!orConfigGet()->sanitizer)) return;
  if (orConfigGet()->initcheck && !touched) orSanitizerInitcheck(1);
  if (!touched) tellTool();
  enable(NULL, true);
}

static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse,
                             [OR_PROBE_HOST_WAITED] = onHostWaited,
                             [OR_PROBE_CELL_FREED] = onCellFreed,
                             [OR_PROBE_ACCESS] = onAccess,
                             [OR_PROBE_RECORD] = onRecord,
                             [OR_PROBE_WAIT] = onWait,
                             [OR_PROBE_SIGNAL] = onSignal,
                             [OR_PROBE_HOST_WAITS] = onHostWaits,
                             [OR_PROBE_HOST_KNOWS] = onHostKnows,
                             [OR_PROBE_BLOCK_USED] = onBlockUsed,
                             [OR_PROBE_BLOCK_TAKEN] = onBlockTaken,
                             [OR_PROBE_BLOCK_FREED] = onBlockFreed,
                             [OR_PROBE_RANGE_OVER] = onRangeOver,
                             [OR_PROBE_RESET] = onReset}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

orError_t orSanitizerEnable(const orSanitizerOptions *given) {
  static const orSanitizerOptions defaults = {.size = sizeof defaults};
  orSanitizerOptions room;
  OR_TRY(orEnter());
  if (!given) given = &defaults;
  given = OR_GIVEN(orSanitizerOptions, given, &room, size);
  if (!given) return orErrorInvalidValue;
  if (given->capture && !given->release)
    return orFail(orErrorInvalidValue, "orSanitizerOptions: capture without release");
  return enable(given, false);
}

orError_t orSanitizerDisable(void) {
  OR_TRY(orEnter());
  lock();
  touched = true;
  orMirrorsWanted(false);
  forgetAll();
  unlock();
  orStacksRelease();
  return orSuccess;
}

orError_t orSanitizerClearReports(void) {
  OR_TRY(orEnter());
  lock();
  orRacesClear();
  unlock();
  orStacksRelease();
  return orSuccess;
}
