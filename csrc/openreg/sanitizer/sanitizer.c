/*
 * The sanitizer's entry: switched on and off here, and driven by the runtime's events.
 *
 * Freed blocks. The caching allocator waits for recorded streams before it hands a block out again,
 * so their accesses are erased when the block is freed, and so are those of streams that keep their
 * memory (orSanitizerMarkExternal). The others stay, marked with the allocation stream: if the next
 * user of the memory is not ordered after them, that is a conflict like any other. unrecorded.c
 * finds the next user that could have been, where there is none.
 *
 * A cell's `kept` holds its orSync. All is under orSanitizerMutex (private.h), but for thread-local
 * data. Stacks are captured before the mutex is taken.
 */
#include "sanitizer/private.h"

#include "device/pinned_alias.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic bool checks_fresh; /* orSanitizerInitcheck */

static bool by_setting; /* enabled by OPENREG_SANITIZER alone */
static bool touched;    /* enabled or disabled by anybody */

static orTool tool;

static void setActive(bool active) {
  __atomic_store_n(&orSanitizerOn, active, __ATOMIC_RELAXED);
  orToolSwitch(&tool, active);
}

uint32_t orSanitizerRefuse(uint32_t refuse) {
  if (OR_UNLIKELY(orInForkedChild())) return 0; /* a thread of the parent may have had the lock */
  orSanitizerLock();
  uint32_t before = orSanitizerRefuses;
  orSanitizerRefuses = refuse;
  orSanitizerUnlock();
  return before;
}

uint32_t orSanitizerInitcheck(uint32_t check) {
  if (OR_UNLIKELY(orInForkedChild())) return 0;
  uint32_t before = atomic_exchange(&checks_fresh, check != 0);
  if (check) return before;
  orSanitizerLock();
  orFreshForget(0, UINTPTR_MAX);
  orSanitizerUnlock();
  return before;
}

uint32_t orSanitizerPossible(uint32_t report) {
  if (OR_UNLIKELY(orInForkedChild())) return 0;
  orSanitizerLock();
  uint32_t before = orSanitizerReportsPossible;
  orSanitizerReportsPossible = report;
  orSanitizerUnlock();
  return before;
}

/* ---- order ---- */

static void keepSync(orCell *cell, orSync *sync) {
  orSyncRelease(cell->kept);
  cell->kept = sync;
}

static void onRecord(orProbe *p) {
  orSanitizerLock();
  keepSync(p->cell, orSyncRecord(p->stream, p->replaced ? p->replaced->kept : NULL));
  orSanitizerUnlock();
}

/* The moment of a cell; null if it was recorded before the sanitizer was there. */
static orSync *syncOf(orCell *cell) {
  if (!cell->kept && !cell->stream && !orCellDone(cell)) cell->kept = orSyncGate();
  orSync *sync = cell->kept;
  if (sync && sync->gate && orCellDone(cell)) orSyncOpen(sync, 0); /* signalled while it was off */
  return sync;
}

static void onWait(orProbe *p) {
  orSanitizerLock();
  orSync *sync = syncOf(p->cell);
  if (sync) orTimelineWait(p->stream, sync);
  orSanitizerUnlock();
}

static void onSignal(orProbe *p) {
  orStream_t stream = 0;
  uint64_t number;
  orRaceList races = {.first = NULL};
  orTaskCurrent(&stream, &number);
  orSanitizerLock();
  orSync *sync = syncOf(p->cell);
  if (sync && sync->gate) {
    orSyncOpen(sync, stream);
    orRacesDecide(sync, &races);
    orGuardUndecided();
  }
  orSanitizerUnlock();
  if (races.first) orRacesReport(&races);
}

/* ---- late accesses ---- */

/* Reports what is decided now. */
static void reportDecided(void) {
  orRaceList races = {.late = true};
  orRacesDecide(NULL, &races);
  bool any = orStacksAreDead();
  orSanitizerUnlock();
  bool found = races.first && orRacesReport(&races);
  if (any || found) orStacksFree();
}

orLateAccess *orSanitizerLate(const void *data) {
  return orSanitizerIsOn() && !orInForkedChild() ? orLateNew(data) : NULL;
}

orError_t orSanitizerResolve(orLateAccess *late, const orMemoryAccess *slice, const size_t *offsets,
                             size_t count) {
  if (orInForkedChild()) return orSuccess;
  if (!late || !slice || (count && !offsets) || slice->dims > OR_ACCESS_DIMS)
    return orFail(orErrorInvalidValue,
                  "orSanitizerResolve: an argument is null, or a slice has "
                  "more than %d dimensions",
                  OR_ACCESS_DIMS);
  orLate bytes = orLateBytes(late, slice, offsets, count);
  orSanitizerLock();
  orLateResolve(late, &bytes);
  reportDecided();
  return orSuccess;
}

void orSanitizerLateOver(orLateAccess *late) {
  if (!late || orInForkedChild()) return;
  orSanitizerLock();
  orLateDrop(late, true);
  reportDecided();
}

static bool awaitsTasks(void) {
  orSanitizerLock();
  bool awaits = orRacesAwaitTasks();
  orSanitizerUnlock();
  return awaits;
}

/* Waits a millisecond. Under a schedule tasks run in calls of the host alone, so one runs here. */
static void letTasksRun(void) {
  const orDispatcher *d = orDispatching();
  if (!d || d->step(&(orWaitGoal){.stream = NULL})) orSleep(1000000);
}

orError_t orSanitizerAwaitLate(unsigned milliseconds) {
  OR_TRY(orEnter());
  for (; milliseconds && awaitsTasks(); milliseconds--) letTasksRun();
  orRaceList races = {.first = NULL};
  orSanitizerLock();
  orRacesGiveUp(&races);
  orSanitizerUnlock();
  if (races.first) orRacesReport(&races);
  orStacksFree();
  return orSuccess;
}

static void onCellFreed(orProbe *p) {
  orSanitizerLock();
  keepSync(p->cell, NULL);
  orSanitizerUnlock();
}

static orSync *snapshotOf(const orProbe *p) {
  return p->stream ? orTimelineSnapshot(p->stream) : orDeviceSnapshot(p->device);
}

static void hostJoin(const orSync *sync, bool everybody) {
  orHostJoin(sync, everybody);
  orGuardRenewAll();
}

/* Of a cell it is the moment of its record, of a stream or a device what is queued there now. */
static void onHostAcquires(orProbe *p) {
  orSanitizerLock();
  orSync *sync = p->cell ? orSyncRetain(p->cell->kept) : snapshotOf(p);
  if (sync && !orSanitizerIgnores()) hostJoin(sync, p->everybody);
  orSyncRelease(sync);
  orSanitizerUnlock();
  orSumsAcquired(p->kind != OR_KIND_HOST_FUNC);
}

/* Under a schedule the answer depends on that, and not on how fast the device is. */
static void onHostQueries(orProbe *p) {
  if (orSanitizerIgnores() || orProcessTask() != OR_TASK_NONE || orDispatching()) return;
  orSanitizerLock();
  bool early = p->cell ? p->cell->kept && orSyncQueryIsEarly(p->cell->kept, p->number)
                       : orTimelineQueryIsEarly(p->stream, p->number);
  orSanitizerUnlock();
  if (early) p->fails = "the sanitizer answers";
}

static void onHostWaits(orProbe *p) {
  if (!p->ordered) return;
  orSanitizerLock();
  p->kept = snapshotOf(p);
  orSanitizerUnlock();
}

static void onHostWaited(orProbe *p) {
  orSync *snapshot = p->kept;
  if (!snapshot) return;
  orSanitizerLock();
  if (!orSanitizerIgnores() && !p->fails) hostJoin(snapshot, false);
  orSyncRelease(snapshot);
  orSanitizerUnlock();
  if (!p->fails) orSumsAcquired(true);
}

/* It stands for what is queued on the stream so far. */
static void standFor(orCell *cell, orStream_t stream) {
  orSanitizerLock();
  orSync *snapshot = orTimelineSnapshot(stream), *sync = cell->kept;
  if (sync && sync->gate) { /* somebody waits for it already */
    orSyncJoin(sync, snapshot);
    orSyncRelease(snapshot);
  } else {
    keepSync(cell, snapshot);
  }
  orSanitizerUnlock();
}

orError_t orSanitizerEventAfter(orEvent_t event, orStream_t stream) {
  orCell *cell;
  unsigned flags;
  int device;
  if (!orSanitizerIsOn()) return orSuccess;
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
  if (!orSanitizerIsOn()) return orSuccess;
  OR_TRY(orEnter());
  OR_TRY(orEventCell(event, &cell, &flags));
  if (cell) onHostAcquires(&(orProbe){.cell = cell, .everybody = true});
  orCellRelease(cell);
  return orSuccess;
}

orError_t orSanitizerMarkExternal(orStream_t stream) {
  if (!orSanitizerIsOn()) return orSuccess;
  OR_TRY(orEnter());
  if (!orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  orSanitizerLock();
  orTimelineAt(orTimelineOf(stream))->external = true;
  orSanitizerUnlock();
  return orSuccess;
}

/* Queued work is cancelled and waits are given up. */
static void onReset(orProbe *p) {
  orSanitizerLock();
  orClocksForgetGates(p->device);
  orRacesForgetUndecided();
  orLateForget(p->device);
  orUnrecordedForget(p->device);
  orSanitizerUnlock();
}

/* ---- the caching allocator ---- */

static size_t findAll(const orProbe *p, orShadow ***found) {
  return orShadowFind((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes, found);
}

/* What a recorded stream has done, and what anybody knows to be over: a thread's last use of
 * memory comes before that memory is freed, whoever frees it. Returns what is left, valid as by
 * orShadowFind. Lock held. */
static size_t forgetUse(uintptr_t start, size_t size, orStream_t stream, orShadow ***left) {
  static const orClock none;
  orShadow **found;
  size_t kept = 0;
  const orClock *clock = stream ? &orTimelineAt(orTimelineOf(stream))->clock : &none;
  size_t count = orShadowFind(start, start + size, &found);
  for (size_t i = 0; i < count; i++)
    if (orClockIncludes(clock, found[i]->timeline, found[i]->counter) ||
        orHappensBeforeAny(found[i]->timeline, found[i]->counter))
      orShadowErase(found[i]);
    else
      found[kept++] = found[i];
  *left = found;
  orSumsForget(start, start + size);
  return kept;
}

static void onUse(uintptr_t start, size_t size, orStream_t stream) {
  orShadow **left;
  orSanitizerLock();
  forgetUse(start, size, stream, &left);
  if (!orSimulatedHolds((const void *)start)) orGuardRenew(start, start + size);
  orSanitizerUnlock();
}

static void onBlockUsed(orProbe *p) { onUse((uintptr_t)p->dst, p->bytes, p->stream); }

orError_t orSanitizerUsed(const void *data, size_t bytes, orStream_t stream) {
  if (!orSanitizerIsOn()) return orSuccess;
  OR_TRY(orEnter());
  if (stream && !orHandleFind(&orStreamTable, stream)) return orErrorInvalidResourceHandle;
  onUse((uintptr_t)data, bytes, stream);
  return orSuccess;
}

/* A block that only its owner's stream has used needs no judgement; most blocks are such. */
static void onBlockFreed(orProbe *p) {
  orShadow **left;
  bool others = false;
  orSanitizerLock();
  uint32_t timeline = orTimelineOf(p->stream);
  size_t count = forgetUse((uintptr_t)p->dst, p->bytes, 0, &left);
  orStack *allocation = count ? orAllocationStack((uintptr_t)p->dst) : NULL;
  for (size_t i = 0; i < count; i++) {
    left[i]->freed = true;
    left[i]->owner = timeline;
    if (!left[i]->allocation) left[i]->allocation = orStackRetain(allocation);
    others |= left[i]->timeline != timeline;
    if (orTimelineAt(left[i]->timeline)->external) orShadowErase(left[i]);
  }
  if (others) orUnrecordedAdd(p);
  orFreshForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  orSanitizerUnlock();
}

static void onFreed(orProbe *p) {
  (void)p;
  if (OR_LIKELY(!orUnrecordedWantsStack())) return;
  orSanitizerOptions by;
  void *captured = orStackCapture(&by);
  orSanitizerLock();
  orStack *stack = orStackNew(captured, &by);
  orUnrecordedSetStack(stack);
  orStackRelease(stack);
  bool any = orStacksAreDead();
  orSanitizerUnlock();
  if (any) orStacksFree();
}

/* What a task allocates is written before anybody else has it. */
static void onBlockTaken(orProbe *p) {
  if (orProcessTask() != OR_TASK_NONE) return;
  bool fresh = atomic_load_explicit(&checks_fresh, memory_order_relaxed);
  orSanitizerOptions by;
  void *captured = fresh ? orStackCapture(&by) : NULL;
  orSanitizerLock();
  orUnrecordedTaken(p);
  orStack *stack = orStackNew(captured, &by);
  if (orSanitizerIsOn()) {
    orAllocationAdd((uintptr_t)p->dst, p->bytes);
    orAllocationUse((uintptr_t)p->dst, stack);
    if (fresh) orFreshAdd((uintptr_t)p->dst, p->bytes, p->stream, stack);
  }
  orStackRelease(stack);
  orSanitizerUnlock();
}

orError_t orSanitizerJudgeFrees(void) {
  orRaceList races = {.first = NULL};
  if (!orSanitizerIsOn()) return orSuccess;
  OR_TRY(orEnter());
  orSanitizerLock();
  orUnrecordedJudge(&races);
  orSanitizerUnlock();
  if (races.first) orRacesReport(&races);
  orStacksFree();
  return orSuccess;
}

/* The region's owner has waited for all that it knows of. */
static bool isOver(const orShadow *s) {
  return !s->freed || orHappensBeforeAny(s->timeline, s->counter) ||
         orClockIncludes(&orTimelineAt(s->owner)->clock, s->timeline, s->counter);
}

static void onRangeOver(orProbe *p) {
  orShadow **found;
  orSanitizerLock();
  size_t count = findAll(p, &found);
  for (size_t i = 0; i < count; i++)
    if (isOver(found[i])) orShadowErase(found[i]);
  orFreshForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  orAllocationForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  orSumsForget((uintptr_t)p->dst, (uintptr_t)p->dst + p->bytes);
  orSanitizerUnlock();
}

/* ---- on and off ---- */

/* Lock held. The reports stay. */
static void forgetAll(void) {
  setActive(false);
  orPeekForget();
  orUnrecordedForget(-1);
  orShadowClear();
  orGuardRenewAll();
  orSumsForget(0, UINTPTR_MAX);
  orFreshForget(0, UINTPTR_MAX);
  orAllocationForget(0, UINTPTR_MAX);
  orGraphMemoryForget();
  orRacesForgetUndecided();
  orClocksForgetGates(-1);
  orThreadsForget(NULL);
}

static orError_t enable(const orSanitizerOptions *given, bool setting) {
  orSanitizerLock();
  bool taken = setting ? touched : orSanitizerIsOn() && !by_setting;
  touched = true;
  if (!taken) {
    forgetAll();
    orRacesClear();
  }
  orSanitizerUnlock();
  if (!taken) orPeekBegin();
  if (taken)
    return setting ? orSuccess : orFail(orErrorAlreadyExists, "the sanitizer is on already");
  orStacksFree();
  orSanitizerLock();
  orSanitizerChosen = given ? *given : (orSanitizerOptions){.size = sizeof orSanitizerChosen};
  orAnalysisBegin();
  by_setting = setting;
  orRacesSetLimit(orSanitizerChosen.reports ? orSanitizerChosen.reports : 1000, setting);
  orAliasesWanted(true);
  orThreadsForget(orSanitizerChosen.thread);
  setActive(true);
  orSanitizerUnlock();
  return orSuccess;
}

/* For the tool that watches the program which started this one
 * (torch_openreg/openreg/sanitizer/_processes.py). It collects the reports of Python alone; this
 * process prints its own on stderr, and the tool's summary names it. */
static void reportToTool(void) {
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
  if (!touched) reportToTool();
  enable(NULL, true);
}

static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse,
                             [OR_PROBE_HOST_WAITED] = onHostWaited,
                             [OR_PROBE_CELL_FREED] = onCellFreed,
                             [OR_PROBE_ACCESS] = orAnalysisOnAccess,
                             [OR_PROBE_RECORD] = onRecord,
                             [OR_PROBE_WAIT] = onWait,
                             [OR_PROBE_SIGNAL] = onSignal,
                             [OR_PROBE_HOST_WAITS] = onHostWaits,
                             [OR_PROBE_HOST_QUERIES] = onHostQueries,
                             [OR_PROBE_HOST_ACQUIRES] = onHostAcquires,
                             [OR_PROBE_BLOCK_USED] = onBlockUsed,
                             [OR_PROBE_BLOCK_TAKEN] = onBlockTaken,
                             [OR_PROBE_BLOCK_FREED] = onBlockFreed,
                             [OR_PROBE_FREED] = onFreed,
                             [OR_PROBE_RANGE_OVER] = onRangeOver,
                             [OR_PROBE_RESET] = onReset}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

orError_t orSanitizerEnable(const orSanitizerOptions *given) {
  static const orSanitizerOptions defaults = {.size = sizeof defaults};
  orSanitizerOptions room;
  OR_TRY(orEnter());
  if (!given) given = &defaults;
  given = OR_VERSIONED(orSanitizerOptions, given, &room, size);
  if (!given) return orErrorInvalidValue;
  if (given->capture && !given->release)
    return orFail(orErrorInvalidValue, "orSanitizerOptions: capture without release");
  return enable(given, false);
}

orError_t orSanitizerDisable(void) {
  OR_TRY(orEnter());
  orSanitizerLock();
  touched = true;
  orAliasesWanted(false);
  forgetAll();
  orSanitizerUnlock();
  orStacksFree();
  return orSuccess;
}

orError_t orSanitizerClearReports(void) {
  OR_TRY(orEnter());
  orSanitizerLock();
  orRacesClear();
  orSanitizerUnlock();
  orStacksFree();
  return orSuccess;
}
