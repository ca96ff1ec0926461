/*
 * Conflicts: which of them count, and how they are reported.
 *
 * A conflict is found under orSanitizerMutex and becomes a report without it, because the names of
 * memory come from the tree of regions. In between it is an orRace, owned by the thread that took
 * it off its list.
 *
 * If one side is behind a gate that is not open (timeline.c), the host may still order the two: it
 * may wait for the one before it opens the gate for the other. Such a conflict is undecided and
 * stays in `undecided` until its gates are open. A conflict behind more gates than a stream
 * remembers, or between the host and work behind a gate, does not count.
 *
 * A conflict of a late access (late.c) is undecided until the tasks that decide its bytes run. It
 * is reported on one of their threads, and handed to the thread of the later call. There is a
 * report for each two calls then, whichever order their tasks run in.
 *
 * The same two operations on the same streams and bytes are one report. `reports` holds the first
 * `limit` of them, `total` counts all. A thread's report is in `unasked` until the thread fetches
 * it (orSanitizerFound). The entry is identified by the address of the thread's `found_here`,
 * because a thread may end without fetching it, and another may get the same address.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openreg_package.h"
#include "sanitizer/private.h"

enum { OR_UNDECIDED = 1000, OR_UNDECIDED_LATE = 1 << 14 };

typedef struct orKeptReport {
  orRaceReport report;
  orRaceSide earlier, later; /* with a reference to their stacks */
  orStack *allocation;       /* likewise */
  orRaceOrder order;
} orKeptReport;

typedef struct orUnasked {
  orKeptReport kept;
  const bool *thread;
  bool touched; /* the thread was in no call, and may never ask */
  bool late;    /* instead of `thread`, that of this number; 0: any */
  uint64_t number;
  struct orUnasked *next;
} orUnasked;

static orKeptReport *reports;
static size_t kept, room, limit = 1000;
static uint64_t total;
static bool prints;
static orRace *undecided;
static size_t undecided_count[2]; /* [1]: of late accesses */
static orUnasked *unasked;
static _Atomic size_t late_unasked;
static _Thread_local bool found_here; /* since it last asked */
static _Thread_local bool is_held;    /* orRacesHold */

/* ---- finding ---- */

static void freeRace(orRace *race) {
  orStackRelease(race->earlier.stack);
  orStackRelease(race->later.stack);
  orStackRelease(race->allocation);
  orLateRelease(race->bytes[0].late);
  orLateRelease(race->bytes[1].late);
  for (uint32_t i = 0; i < race->gate_count; i++) orSyncRelease(race->gates[i]);
  free(race);
}

static bool isUnsure(const orRaceSide *side) {
  if (!side->stream) return false;
  uint64_t from = orTimelineAt(side->timeline)->unsure_from;
  return side->counter >= from && !orHappensBeforeThread(side->timeline, from);
}

static void addGates(orRace *race, const orRaceSide *side) {
  const orTimeline *t = side->stream ? orTimelineAt(side->timeline) : NULL;
  for (uint32_t i = 0; t && i < t->gate_count; i++)
    if (t->gates[i].from <= side->counter)
      race->gates[race->gate_count++] = orSyncRetain(t->gates[i].gate);
}

static orRaceSide sideOf(const orShadow *shadow) {
  return (orRaceSide){.operation = shadow->operation,
                      .stack = orStackRetain(shadow->stack),
                      .stream = shadow->stream,
                      .timeline = shadow->timeline,
                      .counter = shadow->counter,
                      .begin = shadow->range.begin,
                      .end = shadow->range.end,
                      .write = shadow->write,
                      .partial = shadow->partial && !shadow->late,
                      .external = shadow->stream && orTimelineAt(shadow->timeline)->external};
}

static orRaceBytes bytesOf(const orShadow *shadow) {
  return (orRaceBytes){shadow->range, orLateRetain(shadow->late), shadow->moved};
}

static orRace *makeRace(const orShadow *earlier, const orShadow *later) {
  orRace *race = orSanitizerAllocate(sizeof *race);
  *race = (orRace){.earlier = sideOf(earlier),
                   .later = sideOf(later),
                   .bytes = {bytesOf(earlier), bytesOf(later)},
                   .thread = orHostThreadNumber()};
  const orRange *a = &earlier->range, *b = &later->range;
  race->begin = a->begin > b->begin ? a->begin : b->begin;
  race->end = a->end < b->end ? a->end : b->end;
  race->sequence = earlier->sequence;
  race->later_sequence = later->sequence;
  race->reused = earlier->freed;
  race->allocation =
      orStackRetain(earlier->freed ? earlier->allocation : orAllocationStack(race->begin));
  race->elsewhere = orHappensBeforeAny(earlier->timeline, earlier->counter);
  if (earlier->freed) {
    const orTimeline *owner = orTimelineAt(earlier->owner);
    race->owner = owner->stream;
    race->unrecorded = !orClockIncludes(&owner->clock, earlier->timeline, earlier->counter);
  }
  const orTimeline *t = later->stream ? orTimelineAt(later->timeline) : NULL;
  race->lost = t && t->lost == earlier->timeline + 1 && earlier->counter <= t->lost_counter;
  addGates(race, &race->earlier);
  race->earlier_gates = race->gate_count;
  addGates(race, &race->later);
  return race;
}

void orRacesSetStack(orRaceList *list, orStack *stack) {
  for (orRace *race = list->first; race; race = race->next) {
    orStackRelease(race->later.stack);
    race->later.stack = orStackRetain(stack);
  }
  list->touched = true;
}

void orRaceFresh(const orShadow *allocation, const orShadow *later, orRaceList *list) {
  for (const orRace *r = list->first; r; r = r->next)
    if (r->fresh && r->earlier.begin == allocation->range.begin) return;
  orRace *race = orSanitizerAllocate(sizeof *race);
  *race = (orRace){.earlier = sideOf(allocation),
                   .later = sideOf(later),
                   .begin = later->range.begin,
                   .end = later->range.end,
                   .allocation = orStackRetain(allocation->stack),
                   .sequence = allocation->sequence,
                   .later_sequence = later->sequence,
                   .fresh = true,
                   .call = list->call,
                   .next = list->first};
  list->first = race;
}

orRace *orRaceGraph(orReportKind kind, const orShadow *earlier, const orShadow *later,
                    orRaceList *list) {
  for (orRace *r = list->first; r; r = r->next)
    if (r->kind == kind && r->earlier.begin == earlier->range.begin) return r;
  orRace *race = orSanitizerAllocate(sizeof *race);
  *race = (orRace){.earlier = sideOf(earlier),
                   .later = sideOf(later),
                   .begin = later->range.begin,
                   .end = later->range.end,
                   .sequence = earlier->sequence,
                   .later_sequence = later->sequence,
                   .kind = kind,
                   .call = list->call,
                   .next = list->first};
  return list->first = race;
}

static bool isLate(const orRace *race) { return race->bytes[0].late || race->bytes[1].late; }

/* Not by a late access, as not all that a call is in conflict with is known at one time. */
static bool isOfSameWait(const orRace *a, const orRace *b) {
  return a->call == b->call && !a->fresh && !a->kind && a->earlier.stream == b->earlier.stream &&
         isLate(a) == isLate(b) && (!isLate(a) || a->sequence == b->sequence);
}

static bool isBetter(const orRace *a, const orRace *b) {
  if (isLate(a)) return a->begin < b->begin;
  return a->sequence > b->sequence || (a->sequence == b->sequence && a->later.write);
}

/* At the end, or in place of one that says the same of an earlier access: one missing wait is one
 * report. True if the list is longer. */
static bool append(orRace **list, orRace *race) {
  for (; *list; list = &(*list)->next) {
    orRace *other = *list;
    if (!isOfSameWait(other, race)) continue;
    bool better = isBetter(race, other);
    if (better) {
      race->next = other->next;
      *list = race;
    }
    freeRace(better ? other : race);
    return false;
  }
  race->next = NULL;
  *list = race;
  return true;
}

static bool isOpen(const orRace *race) {
  return race->gate_count || orLateIsOpen(race->bytes[0].late) || orLateIsOpen(race->bytes[1].late);
}

static orPlace placeOf(const orRaceBytes *b) { return (orPlace){&b->range, b->late, b->moved}; }

/* Adds a conflict to the list if both accesses touch a byte. All is known of it. */
static void decide(orRace *race, orRaceList *list) {
  orPlace a = placeOf(&race->bytes[0]), b = placeOf(&race->bytes[1]);
  orSpan common;
  orMeeting meeting = isLate(race) ? orPlacesMeet(&a, &b, &common) : OR_MEET;
  race->earlier.partial |= meeting == OR_MAY_MEET && a.late;
  race->later.partial |= meeting == OR_MAY_MEET && b.late;
  bool possible = race->earlier.partial || race->later.partial;
  if (isLate(race) && meeting == OR_MEET) {
    race->begin = common.begin;
    race->end = common.end;
  }
  if (meeting == OR_APART || (possible && !orSanitizerReportsPossible))
    freeRace(race);
  else
    append(&list->first, race);
}

static void giveUp(orRace *race, orRaceList *list) {
  race->earlier.partial |= race->bytes[0].late != NULL;
  race->later.partial |= race->bytes[1].late != NULL;
  if (orSanitizerReportsPossible)
    append(&list->first, race);
  else
    freeRace(race);
}

/* Too many wait for tasks: it is a possible one then. Too many behind gates: it is lost. */
static void postpone(orRace *race, orRaceList *list) {
  bool late = isLate(race);
  if (undecided_count[late] >= (size_t)(late ? OR_UNDECIDED_LATE : OR_UNDECIDED)) {
    if (late && !race->gate_count)
      giveUp(race, list);
    else
      freeRace(race);
  } else if (!late) {
    undecided_count[0] += append(&undecided, race);
  } else {
    race->next = undecided;
    undecided = race;
    undecided_count[1]++;
  }
}

/* Takes an undecided race out of its list. */
static orRace *take(orRace **at) {
  orRace *race = *at;
  *at = race->next;
  undecided_count[isLate(race)]--;
  return race;
}

bool orRaceFound(const orShadow *earlier, const orShadow *later, bool keep, orRaceList *list) {
  bool partial = (earlier->partial && !earlier->late) || (later->partial && !later->late);
  if (!orSanitizerReportsPossible && partial) return false;
  orRace *race = makeRace(earlier, later);
  race->call = list->call;
  bool sure = !isUnsure(&race->earlier) && !isUnsure(&race->later);
  bool decided = sure && !isOpen(race);
  if (decided)
    decide(race, list);
  else if (sure && keep)
    postpone(race, list);
  else
    freeRace(race);
  return decided;
}

void orRaceFree(const orShadow *earlier, const orShadow *freed, orRaceList *list) {
  if (!orSanitizerReportsPossible) return;
  orRace *race = makeRace(earlier, freed);
  race->call = list->call;
  race->freed = true;
  race->reused = false;
  orLateRelease(race->bytes[0].late);
  race->bytes[0].late = NULL;
  if (isUnsure(&race->earlier) || race->earlier_gates)
    freeRace(race);
  else
    append(&list->first, race);
}

/* True if the gate orders the two. It leaves the race's gates. */
static bool passGate(orRace *race, orSync *gate) {
  bool ordered = false;
  for (uint32_t i = 0; i < race->gate_count;) {
    if (race->gates[i] != gate) {
      i++;
      continue;
    }
    bool of_earlier = i < race->earlier_gates;
    const orRaceSide *other = of_earlier ? &race->later : &race->earlier;
    ordered |= orClockIncludes(&gate->clock, other->timeline, other->counter);
    race->earlier_gates -= of_earlier;
    race->gate_count--;
    memmove(&race->gates[i], &race->gates[i + 1], (race->gate_count - i) * sizeof race->gates[0]);
    orSyncRelease(gate);
  }
  return ordered;
}

void orRacesDecide(orSync *gate, orRaceList *list) {
  for (orRace **at = &undecided, *race; (race = *at);) {
    bool ordered = gate && passGate(race, gate);
    if (!ordered && isOpen(race)) {
      at = &race->next;
      continue;
    }
    take(at);
    if (ordered)
      freeRace(race);
    else
      decide(race, list);
  }
}

static bool awaitsTask(const orRace *race) { return isOpen(race) && !race->gate_count; }

bool orRacesAwaitTasks(void) {
  const orRace *race = undecided;
  while (race && !awaitsTask(race)) race = race->next;
  return race;
}

void orRacesGiveUp(orRaceList *list) {
  for (orRace **at = &undecided, *race; (race = *at);)
    if (awaitsTask(race))
      giveUp(take(at), list);
    else
      at = &race->next;
}

/* ---- words ---- */

/* False if it is no memory of ours: what was there is gone, or nobody told what it is. */
static bool nameMemory(const orRace *race, char text[64]) {
  orRegion region;
  if (race->kind == orReportFreedInput) { /* its segment may be gone */
    snprintf(text, 64, "%s:%d", orDevicesName(), orHandleDevice(race->earlier.stream));
    return true;
  }
  if (!orRegionFind((const void *)race->begin, &region)) return false;
  char where[32] = "pinned host memory";
  if (region.type == orMemoryTypeDevice)
    snprintf(where, sizeof where, "%s:%d", orDevicesName(), region.device);
  snprintf(text, 64, "%s%s", where,
           race->freed        ? ", freed without record_stream"
           : !race->reused    ? ""
           : race->unrecorded ? ", reused without record_stream"
                              : ", freed and reused");
  return true;
}

static void adviseGraph(const orRace *race, char *text, size_t size) {
  const char *first = race->earlier.operation, *second = race->later.operation;
  switch (race->kind) {
    case orReportNotReplayed:
      snprintf(text, size, "a replay of the graph before %s", second);
      break;
    case orReportOverwritten:
      snprintf(text, size, "t.clone() of the output t before the next call");
      break;
    case orReportFirstCall:
      snprintf(text, size, "a call of %s before the capture", first);
      break;
    case orReportPrograms:
      snprintf(text, size, "atomic operations, or memory of each program's own, in %s", first);
      break;
    default:
      snprintf(text, size,
               "t.copy_(new) into the tensor t that %s uses, in place of another tensor", first);
  }
}

static void adviseWait(const orRace *race, char *text, size_t size) {
  orStreamName first, second;
  const orRaceSide *a = &race->earlier, *b = &race->later;
  if (race->kind) {
    adviseGraph(race, text, size);
    return;
  }
  orStreamNameOf(first, a->stream);
  if (race->fresh) {
    snprintf(text, size, "a write of these bytes before %s", b->operation);
    return;
  }
  if (race->unrecorded) {
    snprintf(text, size, "t.record_stream(s) before the tensor t of %s is freed, s being %s",
             a->operation, first);
    return;
  }
  if (a->external) {
    snprintf(text, size, "work.wait() before %s, work being what %s returned", b->operation,
             a->operation);
    return;
  }
  if (!b->stream) {
    int length = snprintf(text, size,
                          "s.synchronize() before %s, or e = s.record_event() after %s and "
                          "e.synchronize() before %s, s being %s",
                          b->operation, a->operation, b->operation, first);
    if ((size_t)length >= size)
      snprintf(text, size, "s.synchronize() before %s, s being %s", b->operation, first);
    return;
  }
  bool by_owner = race->reused && race->owner != b->stream;
  if (by_owner) orStreamNameOf(first, race->owner);
  snprintf(text, size, "s1.wait_stream(s0) before %s, s0 being %s and s1 %s%s", b->operation, first,
           b->external ? "the current stream" : orStreamNameOf(second, b->stream),
           race->lost ? " (the event that it waited for had been recorded again)" : "");
}

static void advise(const orRace *race, char *text, size_t size) {
  static const char other[] =
      "; or a join, lock or queue, because another thread has waited for it";
  adviseWait(race, text, size);
  size_t length = strlen(text);
  if (race->elsewhere && length + sizeof other <= size) memcpy(text + length, other, sizeof other);
}

static void fillSide(orRaceAccess *to, const orRaceSide *side) {
  snprintf(to->operation, sizeof to->operation, "%s", side->operation);
  to->stream = side->stream;
  to->device = side->stream ? orHandleDevice(side->stream) : -1;
  if (side->stream)
    orStreamNameOf(to->where, side->stream);
  else
    snprintf(to->where, sizeof to->where, "the host");
  to->write = (side->write ? OR_ACCESS_WRITES : 0) | (side->partial ? OR_ACCESS_PARTIAL : 0);
  to->begin = (const void *)side->begin;
  to->end = (const void *)side->end;
  to->stack = side->stack ? side->stack->stack : NULL;
}

static uint32_t missing(const orRace *race) {
  uint32_t more = (race->lost ? OR_ORDER_LOST : 0) | (race->elsewhere ? OR_ORDER_ELSEWHERE : 0);
  if (race->fresh) return OR_MISSING_WRITE;
  if (race->unrecorded) return more | OR_MISSING_RECORD;
  if (race->earlier.external) return more | OR_MISSING_WORK;
  return more | (race->later.stream ? OR_MISSING_WAIT : OR_MISSING_HOST_WAIT);
}

static void fillReport(orRaceReport *report, const orRace *race) {
  fillSide(&report->earlier, &race->earlier);
  fillSide(&report->later, &race->later);
  if (race->fresh) report->earlier.write = OR_ACCESS_ALLOCATES;
  if (race->freed) report->later.write = OR_ACCESS_FREES;
  report->kind = race->kind;
  if (race->name) snprintf(report->name, sizeof report->name, "%s", race->name);
  report->begin = (const void *)race->begin;
  report->end = (const void *)race->end;
  advise(race, report->advice, sizeof report->advice);
  report->missing = missing(race);
  bool by_owner = race->reused && (report->missing & OR_MISSING_KIND) == OR_MISSING_WAIT &&
                  race->owner != race->later.stream;
  report->stream = by_owner ? race->owner : race->earlier.stream;
  report->allocation = race->allocation ? race->allocation->stack : NULL;
}

static const char *does(const orRaceAccess *access) {
  if (access->write == OR_ACCESS_FREES) return "frees";
  return access->write & OR_ACCESS_WRITES ? "writes" : "reads";
}

static const char *const graph_kinds[] = {
    [orReportFreedInput] = "it was freed after the capture",
    [orReportNotReplayed] = "it is read before the first replay",
    [orReportReplacedInput] = "it may have been replaced by another tensor",
    [orReportOverwritten] = "it is read after a later call has overwritten it",
    [orReportFirstCall] = "each replay repeats what may belong to the first call alone",
    [orReportPrograms] = "programs of one grid access it in no order"};

static void printReport(const orRaceReport *r) {
  const orRaceAccess *earlier = &r->earlier, *later = &r->later;
  if (r->kind) {
    orWarn("graph: [%p, %p) of %s, which %s uses: %s; missing: %s", r->begin, r->end, r->memory,
           earlier->operation, graph_kinds[r->kind], r->advice);
    return;
  }
  if (earlier->write == OR_ACCESS_ALLOCATES) {
    orWarn(
        "%s on %s reads [%p, %p) of %s, a part of which has not been written since it was handed "
        "out; missing: %s",
        later->operation, later->where, r->begin, r->end, r->memory, r->advice);
    return;
  }
  bool may = (earlier->write | later->write) & (OR_ACCESS_PARTIAL | OR_ACCESS_FREES);
  orWarn("%sdata race on [%p, %p) of %s: %s %s it on %s, and %s %s it on %s; missing: %s",
         may ? "possible " : "", r->begin, r->end, r->memory, later->operation, does(later),
         later->where, earlier->operation, does(earlier), earlier->where, r->advice);
}

/* ---- reports ---- */

static bool sameSide(const orRaceSide *a, const orRaceSide *b) {
  return a->operation == b->operation && a->stream == b->stream && a->write == b->write;
}

static const orKeptReport *knownAs(const orRaceReport *report, const orRace *race) {
  for (size_t i = 0; i < kept; i++)
    if (reports[i].report.begin == report->begin && reports[i].report.kind == report->kind &&
        sameSide(&reports[i].earlier, &race->earlier) && sameSide(&reports[i].later, &race->later))
      return &reports[i];
  return NULL;
}

static orKeptReport keep(const orRaceReport *report, const orRace *race) {
  orStackRetain(race->earlier.stack);
  orStackRetain(race->later.stack);
  orKeptReport all = {.report = *report,
                      .earlier = race->earlier,
                      .later = race->later,
                      .allocation = orStackRetain(race->allocation)};
  all.order.earlier = race->sequence;
  all.order.later = race->later_sequence;
  orClocksEdges(race->earlier.stream, race->later.stream, &all.order);
  return all;
}

static void releaseStacks(orKeptReport *report) {
  orStackRelease(report->earlier.stack);
  orStackRelease(report->later.stack);
  orStackRelease(report->allocation);
}

/* True if it is new. It gets its number. */
static bool addReport(orRaceReport *report, const orRace *race) {
  const orKeptReport *known = knownAs(report, race);
  report->number = known ? known->report.number : ++total;
  if (known || kept >= limit) return !known;
  if (kept == room) {
    room = room ? room * 2 : 16;
    reports = orSanitizerResize(reports, room * sizeof *reports);
  }
  reports[kept++] = keep(report, race);
  return true;
}

/* ---- what threads are told ---- */

/* The calling one's; the place at the end if there is none. */
static orUnasked **findUnasked(void) {
  orUnasked **at = &unasked;
  while (*at && (*at)->thread != &found_here) at = &(*at)->next;
  return at;
}

/* The entry for a conflict of an earlier call of that thread, which was decided after the call. */
static orUnasked **findLate(uint64_t number) {
  orUnasked **at = &unasked;
  while (*at && !((*at)->late && (!(*at)->number || (*at)->number == number))) at = &(*at)->next;
  return at;
}

bool orRacesAreUnasked(void) { return found_here && *findUnasked(); }

void orRacesHold(void) { is_held = true; }

/* Takes the entry, which may be null, out of the list. */
static orUnasked *takeUnasked(orUnasked **at) {
  orUnasked *entry = *at;
  if (!entry) return NULL;
  *at = entry->next;
  late_unasked -= entry->late;
  return entry;
}

static void freeUnasked(orUnasked *gone) {
  releaseStacks(&gone->kept);
  free(gone);
}

/* At the end of the list. */
static void addUnasked(orUnasked entry) {
  orUnasked *added = orSanitizerAllocate(sizeof *added), **at = &unasked;
  while (*at) at = &(*at)->next;
  *added = entry;
  added->next = NULL;
  *at = added;
  late_unasked += entry.late;
}

/* Each conflict once: the thread's next calls return one each. */
static void keepLate(const orRaceReport *report, const orRace *race) {
  for (const orUnasked *u = unasked; u; u = u->next)
    if (u->late && u->kept.report.number == report->number) return;
  addUnasked((orUnasked){.kept = keep(report, race), .late = true, .number = race->thread});
}

/* The first of a thread counts. */
static void keepForThread(const orRaceReport *report, const orRace *race, const orRaceList *list) {
  if (list->late) {
    keepLate(report, race);
    return;
  }
  orUnasked **at = findUnasked();
  if (*at && found_here) return;
  if (*at) freeUnasked(takeUnasked(at));
  addUnasked(
      (orUnasked){.kept = keep(report, race), .thread = &found_here, .touched = list->touched});
  found_here = true;
}

/* Which is in no list any more. No lock held. */
static uint64_t handOut(orUnasked *entry, void (*look)(const orRaceReport *report, void *context),
                        void *context) {
  uint64_t number = entry->kept.report.number;
  if (look) look(&entry->kept.report, context);
  orMutexLock(&orSanitizerMutex);
  freeUnasked(entry);
  orMutexUnlock(&orSanitizerMutex);
  orStacksFree();
  return number;
}

uint64_t orSanitizerFound(void (*look)(const orRaceReport *report, void *context), void *context) {
  bool late = !is_held && atomic_load_explicit(&late_unasked, memory_order_relaxed);
  is_held = false;
  if ((!found_here && !late) || OR_UNLIKELY(orInForkedChild())) return 0;
  orSanitizerLock();
  orUnasked *entry = found_here ? takeUnasked(findUnasked()) : NULL;
  if (!entry && late) entry = takeUnasked(findLate(orHostThreadNumber()));
  found_here = false;
  orSanitizerUnlock();
  return entry ? handOut(entry, look, context) : 0; /* they may have been cleared */
}

uint64_t orSanitizerLeft(void (*look)(const orRaceReport *report, void *context), void *context) {
  if (OR_UNLIKELY(orInForkedChild())) return 0;
  orMutexLock(&orSanitizerMutex);
  orUnasked **at = &unasked;
  while (*at && !(*at)->touched && !(*at)->late) at = &(*at)->next;
  orUnasked *entry = takeUnasked(at);
  orMutexUnlock(&orSanitizerMutex);
  return entry ? handOut(entry, look, context) : 0;
}

/* ---- together ---- */

bool orRacesReport(orRaceList *list) {
  bool any = false;
  for (orRace *race; (race = list->first);) {
    orRaceReport report = {.number = 0};
    list->first = race->next;
    bool counts = nameMemory(race, report.memory);
    if (counts) fillReport(&report, race);
    orMutexLock(&orSanitizerMutex);
    bool new = counts && addReport(&report, race);
    if (new || (counts && orSanitizerRefuses)) keepForThread(&report, race, list);
    freeRace(race);
    bool print = new && prints;
    orMutexUnlock(&orSanitizerMutex);
    if (print) printReport(&report);
    any |= counts;
  }
  return any;
}

void orRacesForgetUndecided(void) {
  while (undecided) freeRace(take(&undecided));
}

void orRacesClear(void) {
  while (kept) releaseStacks(&reports[--kept]);
  while (unasked) freeUnasked(takeUnasked(&unasked));
  total = 0;
  orRacesForgetUndecided();
}

void orRacesSetLimit(size_t most, bool print) {
  limit = most;
  prints = print;
}

orError_t orSanitizerReports(uint64_t first, orRaceReport *to, size_t report_size, size_t capacity,
                             size_t *count, uint64_t *all) {
  if (!count || (capacity && !to))
    return orFail(orErrorInvalidValue, "orSanitizerReports: a result is null");
  OR_TRY(orEnter());
  OR_TRY(orCheckSize("orRaceReport", report_size, OR_END(orRaceReport, advice)));
  *count = 0;
  orMutexLock(&orSanitizerMutex);
  for (size_t i = 0; i < kept && *count < capacity; i++)
    if (reports[i].report.number >= first)
      orFillElement((char *)to + (*count)++ * report_size, report_size, &reports[i].report,
                    sizeof(orRaceReport));
  if (all) *all = total;
  orMutexUnlock(&orSanitizerMutex);
  return orSuccess;
}

orError_t orSanitizerOrder(uint64_t number, orRaceOrder *order) {
  orRaceOrder room = {.size = sizeof room};
  bool found = false;
  OR_TRY(orEnter());
  if (!order || order->size < sizeof order->size)
    return orFail(orErrorInvalidValue, "orSanitizerOrder: the result is null or has no size");
  size_t size = order->size < sizeof room ? order->size : sizeof room;
  orMutexLock(&orSanitizerMutex);
  for (size_t i = 0; i < kept && !found; i++) {
    found = reports[i].report.number == number;
    if (found) room = reports[i].order;
  }
  orMutexUnlock(&orSanitizerMutex);
  if (!found)
    return orFail(orErrorInvalidValue, "orSanitizerOrder: no report %" PRIu64 " is kept", number);
  room.size = order->size;
  memcpy(order, &room, size);
  return orSuccess;
}
