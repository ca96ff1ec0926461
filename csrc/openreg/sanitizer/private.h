/*
 * What the files of the sanitizer share. A file uses those before it here: state; vector_clock,
 * range, intern, late; host_clock, timeline, shadow; allocations, initcheck, page_guard, host_read,
 * races, graph_memory, host_checksum; unrecorded; analysis; sanitizer.
 *
 * One lock, orSanitizerMutex, guards everything below. Under it only leaves are taken, nothing is
 * waited for, and no function of a caller's is called. Functions are called with it held unless
 * they say otherwise.
 */
#ifndef OPENREG_SANITIZER_PRIVATE_H
#define OPENREG_SANITIZER_PRIVATE_H

#include "base/interval_tree.h"
#include "tools/hang.h"
#include "openreg_late.h"

typedef struct orSync orSync;

/* ---- state.c ---- */

extern orMutex orSanitizerMutex OR_HIDDEN;
extern uint32_t orSanitizerOn OR_HIDDEN; /* what the shim reads; atomic */
static inline bool orSanitizerIsOn(void) {
  return __atomic_load_n(&orSanitizerOn, __ATOMIC_RELAXED) != 0;
}
extern orSanitizerOptions orSanitizerChosen OR_HIDDEN;
extern uint32_t orSanitizerRefuses OR_HIDDEN;         /* orSanitizerRefuse */
extern uint32_t orSanitizerReportsPossible OR_HIDDEN; /* orSanitizerPossible */
uint64_t orSanitizerMoment(void);                     /* a new one */
uint64_t orSanitizerLatest(void);                     /* the newest */
bool orSanitizerIgnores(void);                        /* orSanitizerIgnore, of the calling thread */
/* Host memory; they end the process where there is none. The old may be null. No lock needed. */
void *orSanitizerAllocate(size_t bytes);
void *orSanitizerResize(void *old, size_t bytes);

/* ---- vector_clock.c ---- */

/* For each timeline up to where it is known to be over. */
typedef struct orClock {
  uint64_t *at;
  uint32_t size; /* the rest is 0 */
} orClock;

void orClockReserve(orClock *clock, uint32_t size);
void orClockJoin(orClock *clock, const orClock *other);
void orClockClear(orClock *clock); /* gives its memory back */
static inline bool orClockIncludes(const orClock *clock, uint32_t timeline, uint64_t counter) {
  return timeline < clock->size && clock->at[timeline] >= counter;
}

/* ---- range.c ---- */

enum { OR_RANGE_DIMS = 4 };

typedef struct orRepeat {
  size_t count, stride;
} orRepeat;

/* Bytes: `width` of them at `begin`, repeated by each of `dims` repeats, which leave gaps; strides
 * ascending. */
typedef struct orRange {
  uintptr_t begin, end; /* the hull */
  size_t width;
  uint32_t dims;
  bool hull; /* of the access, which leaves gaps here */
  orRepeat repeats[OR_RANGE_DIMS];
} orRange;

/* An access, by the bytes that it touches. */
typedef struct orTouch {
  orRange range;
  uint32_t write; /* as in orMemoryAccess */
  bool pinned;    /* its first byte was in pinned host memory when this was made */
} orTouch;

/* The fewest repeats that come to the access's bytes, or to more where it takes more than
 * OR_RANGE_DIMS. False if the access touches nothing; its end is 0 if it is past that of the
 * address space. No lock. */
bool orRangeMake(const orMemoryAccess *access, orRange *range);
/* Of two whose hulls overlap: true if they share a byte; false too if that takes too long to find
 * out. */
bool orRangesMeet(const orRange *a, const orRange *b);

/* ---- intern.c ---- */

/* The one copy of the text. */
const char *orSanitizerName(const char *text);

typedef struct orStack {
  void *stack;
  void (*release)(void *stack, void *context); /* of whoever captured it */
  void *context;
  uint32_t refs;
  struct orStack *next; /* that nobody refers to any more */
} orStack;

/* What the user's function has captured here, and with which options. No lock held. */
void *orStackCapture(orSanitizerOptions *by);
/* With one reference; null if nothing was captured. */
orStack *orStackNew(void *captured, const orSanitizerOptions *by);
static inline orStack *orStackRetain(orStack *stack) {
  if (stack) stack->refs++;
  return stack;
}
void orStackRelease(orStack *stack);
bool orStacksAreDead(void); /* some of them */
/* Calls the user's function for stacks without references. No lock held. */
void orStacksFree(void);

/* ---- late.c ---- */

typedef struct orSpan {
  uintptr_t begin, end;
} orSpan;

/* The bytes of an access whose indices were not known when it was queued. */
typedef struct orLate orLate;
struct orLate {
  uint32_t refs;
  bool known; /* what follows; until then the access may touch any of its bytes */
  size_t count;
  orSpan *spans; /* ascending: bytes, or hulls of slices with gaps */
  orRange slice; /* the repeats of each */
  orLate *next;  /* that the access has when it is queued again */
  /* Of a replay: its stream, and how many tasks were queued there before it. */
  orStream_t stream;
  uint64_t after;
};

static inline orLate *orLateRetain(orLate *late) {
  if (late) late->refs++;
  return late;
}
void orLateRelease(orLate *late);
static inline bool orLateIsOpen(const orLate *late) { return late && !late->known; }

orLateAccess *orLateNew(const void *data);
/* A graph's node has a reference from now on. */
void orLateCaptured(orLateAccess *access, int device);
/* Gives a reference back; the task's own if it is `over`. */
void orLateDrop(orLateAccess *access, bool over);
/* Replays on a device that is being reset will not run; -1: on all devices. */
void orLateForget(int device);
/* The access is queued on a stream after so many tasks: returns its bytes, with a reference for the
 * caller. */
orLate *orLateQueued(orLateAccess *access, orStream_t stream, uint64_t after);
/* The bytes that are touched, for orLateResolve. No lock needed. */
orLate orLateBytes(const orLateAccess *access, const orMemoryAccess *slice, const size_t *offsets,
                   size_t count);
/* The task that runs, or, outside of one, the oldest that is queued, touches these bytes. */
void orLateResolve(orLateAccess *access, orLate *bytes);

/* What an access touches: a range, or `late`, which is known, at a distance. */
typedef struct orPlace {
  const orRange *range;
  const orLate *late; /* may be null */
  uintptr_t moved;
} orPlace;
typedef enum orMeeting { OR_APART, OR_MEET, OR_MAY_MEET } orMeeting;
/* Whether two places share bytes, and the hull of the first that they do. OR_MAY_MEET: that takes
 * too long to find out. */
orMeeting orPlacesMeet(const orPlace *a, const orPlace *b, orSpan *common);

/* ---- host_clock.c ---- */

/* Notes who the calling thread is, for the functions below. Called before the lock is taken, as it
 * may call orSanitizerOptions.thread. */
void orThreadsIdentify(void);
/* Takes the lock, and notes who the calling thread is. */
void orSanitizerLock(void);
void orSanitizerUnlock(void);
bool orSanitizerIsInside(void); /* between the two, on the calling thread */
/* All that the clock covers now happens before what the calling thread does next; or before what
 * every thread does next. */
void orHostAcquire(const orClock *clock);
void orHostAcquireAll(const orClock *clock);
/* Adds to a clock what happens before the calling thread alone; or also what happens before all
 * threads. */
void orHostRelease(orClock *clock);
void orHostReleaseAll(orClock *clock);
/* Whether what a timeline did at `counter` happens before all that the calling thread is yet to
 * queue; that some thread is; that every thread is, now and later. */
bool orHappensBeforeThread(uint32_t timeline, uint64_t counter);
bool orHappensBeforeAny(uint32_t timeline, uint64_t counter);
bool orHappensBeforeAll(uint32_t timeline, uint64_t counter);
/* The calling thread's; 0: it has no clock of its own. */
uint64_t orHostThreadNumber(void);
/* All threads are one again. `thread`: orSanitizerOptions.thread. */
void orThreadsForget(uint64_t (*thread)(void));

/* ---- timeline.c ---- */

enum { OR_GATES = 4 };

/* Of a record, or of a stream. */
typedef struct orQueries {
  uint64_t thread; /* that queried last */
  uint64_t asked;  /* what: 0 nothing yet, else a number that new work on a stream changes */
  uint32_t early;  /* answers in a row that were "not ready" whatever the truth */
} orQueries;

/* A point that work can be ordered after: an event's record, an external event, or the state of a
 * stream. */
struct orSync {
  uint32_t refs;
  bool gate;   /* an external event that is not signalled; `clock` has what precedes it so far */
  bool unsure; /* behind more gates than `gates` holds */
  uint8_t gate_count; /* not signalled when it was made */
  uint32_t timeline;  /* of an event's record; likewise `counter` */
  uint64_t counter;
  orStream_t stream; /* that it is of, 0: of a device; at `moment` */
  uint64_t moment;
  uint32_t lost; /* a record that this one replaced and does not follow: its timeline + 1 */
  uint64_t lost_counter;
  orQueries queries;
  orSync *gates[OR_GATES];
  orClock clock;
};

/* A stream's slot. Streams that use it one after the other are one timeline. */
typedef struct orTimeline {
  orStream_t stream; /* the present or latest one */
  orClock clock;     /* at its own index: the counter of what it does now, from 1 */
  uint64_t newest;   /* the counter of its newest work; 0: none */
  orQueries queries;
  /* work from this counter on is behind more gates than `gates` holds; UINT64_MAX: none is */
  uint64_t unsure_from;
  bool external; /* its work runs elsewhere, and events alone say when it is done */
  uint32_t gate_count;
  uint32_t lost; /* of what it waited for (orSync) */
  uint64_t lost_counter;
  struct {
    orSync *gate;
    uint64_t from; /* work from this counter on is behind it */
  } gates[OR_GATES];
} orTimeline;

/* The timeline of a stream, which may be destroyed. */
uint32_t orTimelineOf(orStream_t stream);
/* Valid until orTimelineOf is called for another stream. */
orTimeline *orTimelineAt(uint32_t timeline);
void orTimelineWait(orStream_t stream, orSync *sync);
/* What the stream has been given so far; later work has a greater counter. */
orSync *orTimelineSnapshot(orStream_t stream);
/* The same of all streams of a device, -1: of all devices; without external timelines. */
orSync *orDeviceSnapshot(int device);
/* An event's record, in place of `replaced`, which may be null. */
orSync *orSyncRecord(orStream_t stream, const orSync *replaced);
orSync *orSyncGate(void);
/* Opens a gate, to which the caller has a reference: what is behind it comes after all that now
 * happens before the host, and before `stream` if that is not 0. */
void orSyncOpen(orSync *gate, orStream_t stream);
void orSyncJoin(orSync *into, const orSync *other);
static inline orSync *orSyncRetain(orSync *sync) {
  if (sync) sync->refs++;
  return sync;
}
void orSyncRelease(orSync *sync);
/* Forgets which streams of a device wait behind gates; -1: of all devices. */
void orClocksForgetGates(int device);
/* The calling thread has waited for it; or all threads have. */
void orHostJoin(const orSync *sync, bool everybody);
/* A query of the record, or of all that is on the stream, is to be answered "not ready", whether or
 * not it is `done`. */
bool orSyncQueryIsEarly(orSync *sync, bool done);
bool orTimelineQueryIsEarly(orStream_t stream, bool done);
/* Adds the waits to an order whose moments are set. */
void orClocksEdges(orStream_t earlier, orStream_t later, orRaceOrder *order);

/* ---- shadow.c ---- */

typedef struct orShadow {
  orTreeNode node; /* the range's hull; first, so that a node's address is its shadow's */
  orRange range;
  const char *operation; /* interned */
  orStack *stack;        /* a reference, or null */
  orStream_t stream;
  uint64_t counter, sequence; /* `sequence`: the moment of the call */
  uint32_t timeline;
  bool write, partial;
  orLate *late;        /* a reference, or null. The range is then all that may be touched */
  uintptr_t moved;     /* added to the addresses of `late` */
  bool judged;         /* compared with an access of the host's, so it guards no memory any more */
  bool undecided;      /* ... until a gate opens */
  bool freed;          /* the block was freed since ... */
  uint32_t owner;      /* ... whose allocation stream's timeline this is, */
  orStack *allocation; /* ... and whose first use this is: a reference, or null */
} orShadow;

/* The accesses whose hull overlaps [begin, end). The array is valid until the next call. */
size_t orShadowFind(uintptr_t begin, uintptr_t end, orShadow ***found);
/* Whether all accesses are the timeline's own, with which its next one is in no conflict. */
bool orShadowIsOnlyOf(uint32_t timeline);
/* Adds a copy of `shadow`, which takes over its references. */
void orShadowAdd(const orShadow *shadow);
/* Replaces an access by a later one with the same range. */
void orShadowRenew(orShadow *shadow, const orShadow *by);
void orShadowErase(orShadow *shadow);
/* Erases the bytes [begin, end) of a range without gaps. */
void orShadowTrim(orShadow *shadow, uintptr_t begin, uintptr_t end);
/* Erases accesses that happen before all threads, once many have gathered since the last time. */
void orShadowSweep(void);
void orShadowClear(void);

/* Whether some of these bytes are written by a task that does not happen before the calling
 * thread. */
bool orShadowIsWritten(uintptr_t begin, uintptr_t end);

/* ---- allocations.c ---- */

/* The caching allocator has handed out these bytes. */
void orAllocationAdd(uintptr_t begin, size_t bytes);
void orAllocationForget(uintptr_t begin, uintptr_t end);
/* An access of the block at `begin`. The stack may be null. */
void orAllocationUse(uintptr_t begin, orStack *stack);
/* Of the first access of the block at `begin`, without a reference; null: not known. */
orStack *orAllocationStack(uintptr_t begin);

/* ---- host_read.c ---- */

void orPeekBegin(void); /* notes what is queued already. No lock held */
void orPeekForget(void);

/* ---- initcheck.c ---- */

/* The caching allocator has handed out these bytes. */
void orFreshAdd(uintptr_t begin, size_t bytes, orStream_t stream, orStack *stack);
void orFreshForget(uintptr_t begin,
                   uintptr_t end); /* nothing is reported of these bytes any more */
/* `partial`: the access touches some of these bytes only. */
void orFreshWrite(const orRange *range, bool partial);
/* Copies bytes as they are: those that are not written stay so if neither range has gaps; else all
 * count as written. */
void orFreshMove(const orRange *from, const orRange *to);
/* True if some of the bytes have not been written; `allocation` is that of their block then, its
 * stack without a reference. */
bool orFreshRead(const orRange *range, bool partial, orShadow *allocation);

/* ---- page_guard.c ---- */

/* Guards pinned memory in [begin, end) as its present accesses require. */
void orGuardRenew(uintptr_t begin, uintptr_t end);
/* The same for all memory that is guarded, after accesses were erased or the host has waited. */
void orGuardRenewAll(void);

extern bool orGuardLacksVerdict OR_HIDDEN; /* some access is `undecided` */
/* After a gate was opened: guards again what the host touched before a verdict was possible. */
void orGuardUndecided(void);
/* By a constructor. The function is called when the host touches a guarded byte outside of a call;
 * no lock held. */
void orGuardSetTouched(void (*by_host)(uintptr_t address, bool write));

/* ---- host_checksum.c ---- */

/* Bit i: access i, of the first 64, is of host memory that cannot be guarded. No lock held. */
uint64_t orSumsWanted(const orTouch *touches, size_t count);
/* The calling thread is about to queue a task with these accesses ... */
void orSumsPrepare(const orTouch *touches, size_t count);
/* ... of which this one is of such memory ... */
void orSumsAdd(const orShadow *access);
/* ... and now takes their checksums. No lock held. */
void orSumsTake(void);
/* The host has synchronised with more work: compares the checksums of that. Without `compares` they
 * are forgotten instead, unless a change was found already. No lock held, or the stream's without
 * `compares`. */
void orSumsAcquired(bool compares);
void orSumsForget(uintptr_t begin, uintptr_t end);

/* ---- races.c ---- */

typedef struct orRaceSide {
  const char *operation;
  orStack *stack;    /* a reference, or null */
  orStream_t stream; /* 0: the host */
  uint32_t timeline;
  uint64_t counter;
  uintptr_t begin, end;
  bool write, partial, external;
} orRaceSide;

typedef struct orRaceBytes {
  orRange range;
  orLate *late; /* a reference, or null */
  uintptr_t moved;
} orRaceBytes;

typedef struct orRace orRace;
struct orRace {
  orRaceSide earlier, later;
  orRaceBytes bytes[2]; /* of both */
  uintptr_t begin, end; /* that both touch */
  bool reused;          /* the memory was freed and handed out in between ... */
  bool unrecorded;      /* ... before its allocation stream was ordered after the earlier access */
  orStream_t owner;     /* the allocation stream */
  orStack *allocation;  /* the first use of the block; a reference, or null */
  uint64_t sequence, later_sequence;
  uint64_t call;   /* that made the later one */
  uint64_t thread; /* orHostThreadNumber, of that call */
  bool lost;       /* the event was recorded again */
  bool elsewhere;  /* another thread of the host has waited for the earlier one */
  bool fresh;      /* no race: `earlier` is the allocation of what `later` reads */
  bool freed;      /* `later` is the free of what `earlier` may still use */
  orReportKind kind;
  const char *name; /* the program's, of the memory; interned, or null */
  /* Not signalled: behind which the earlier access is, then those of the later one. */
  uint32_t gate_count, earlier_gates;
  orSync *gates[2 * OR_GATES];
  orRace *next;
};

typedef struct orRaceList {
  orRace *first;
  uint64_t call; /* of the accesses that are compared */
  bool touched;  /* the later access is the host's, outside of a call */
  bool late;     /* found after the call, by another thread */
} orRaceList;

/* Adds a conflict to the list, or to the undecided ones if `keep` says so. Of one call and one
 * other stream only the latest access is added. True if the conflict is decided. */
bool orRaceFound(const orShadow *earlier, const orShadow *later, bool keep, orRaceList *list);
/* `later` reads what nothing has written since `allocation`. */
void orRaceFresh(const orShadow *allocation, const orShadow *later, orRaceList *list);
/* `freed` is the free of the block that `earlier` may still use. */
void orRaceFree(const orShadow *earlier, const orShadow *freed, orRaceList *list);
/* A report about a graph's memory, which `earlier` uses in the capture. */
orRace *orRaceGraph(orReportKind kind, const orShadow *earlier, const orShadow *later,
                    orRaceList *list);
/* After a gate was opened, or (null) bytes are known: moves the conflicts that this decides to the
 * list. */
void orRacesDecide(orSync *gate, orRaceList *list);
/* A task that could still decide a conflict is queued. */
bool orRacesAwaitTasks(void);
/* Moves the conflicts that tasks could still decide to the list, as possible ones. */
void orRacesGiveUp(orRaceList *list);
/* Makes reports, also for orSanitizerFound. False if none is of this library's memory. No lock
 * held. */
bool orRacesReport(orRaceList *list);
/* Until the calling thread's next orSanitizerFound, which returns no late conflict then: it has
 * reported an access that it is about to queue. */
void orRacesHold(void);
/* The calling thread has a report to fetch. */
bool orRacesAreUnasked(void);
/* Forgets all reports and undecided conflicts. */
void orRacesClear(void);
void orRacesForgetUndecided(void);
void orRacesSetLimit(size_t reports, bool print);

/* The host's stack, of races with memory that it has touched in no call. */
void orRacesSetStack(orRaceList *list, orStack *stack);

/* ---- unrecorded.c ---- */

/* A block was freed (OR_PROBE_BLOCK_FREED), and its accesses are marked. */
void orUnrecordedAdd(const orProbe *p);
/* The calling thread has added one that has no stack yet. No lock needed. */
bool orUnrecordedWantsStack(void);
void orUnrecordedSetStack(orStack *stack);
/* A block was handed out (OR_PROBE_BLOCK_TAKEN). */
void orUnrecordedTaken(const orProbe *p);
/* Judges all that are left, as no later allocation will. */
void orUnrecordedJudge(orRaceList *list);
void orUnrecordedForget(int device); /* -1: of all devices */

/* ---- graph_memory.c ---- */

/* What captured work on the stream uses. The operation is interned. No lock held. */
void orGraphMemoryKeep(orStream_t stream, const char *operation, const orTouch *touches,
                       size_t count);
/* True if only a replay that has not happened writes some of the bytes; `written` is that access,
 * its stack without a reference. */
bool orGraphMemoryRead(const orRange *range, bool partial, orShadow *written);
void orGraphMemoryWrite(const orRange *range);
/* Replays that the sanitizer does not see may have written everything. */
void orGraphMemoryForget(void);

/* ---- analysis.c ---- */

void orAnalysisBegin(void);          /* the sanitizer is being switched on */
void orAnalysisOnAccess(orProbe *p); /* OR_PROBE_ACCESS */

#endif
