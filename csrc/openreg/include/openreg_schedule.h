/*
 * Schedules: the order in which queued tasks run, as the program chooses it.
 *
 * Without a schedule the workers run ready tasks side by side, and the order of streams that no
 * event orders differs from run to run. Under a schedule one task runs at a time, chosen by the
 * schedule, and only while a thread is inside a call that is a *point*. A point is a launch, a
 * copy, a fill, a host function or a wait, once it is queued; a query; a full queue; and every call
 * that synchronises. Nothing runs between calls.
 *
 * A program in which one thread at a time calls the library gets the same order for the same seed,
 * on any machine: the choice depends only on the seed and the calls. Streams are identified by the
 * order in which they are first used under the schedule. Their priorities have no effect, because
 * they guarantee no order.
 *
 * Not covered: calls from several threads at once, completions that come from outside (a call that
 * synchronises really waits for them), kernels whose own result depends on time, hosts that poll
 * memory without a call. A kernel or host function that waits for the thread which queued it waits
 * for ever.
 */
#ifndef OPENREG_SCHEDULE_H
#define OPENREG_SCHEDULE_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum orSchedulePolicy {
  orScheduleFair = 0, /* no schedule: workers run what is ready */
  orScheduleSeeded,   /* any order that the program allows, chosen by the seed */
  /* a task runs when a synchronising call, a query or a full queue needs it, and not before */
  orScheduleLate,
  /* at each point everything that can run does, streams in the order of their first use */
  orScheduleEarly,
  orScheduleTape /* by the choices of the last orScheduleSetTape */
} orSchedulePolicy;

/* Waits until nothing is queued on any device, then changes the schedule. Changing from a seed to
 * the same seed starts anew. Work that other threads queue meanwhile runs in the old way or in the
 * new one. Until the schedule ends, the caching allocator hands out none of the memory that it
 * holds at the begin, unless memory is short. OPENREG_SCHEDULE_SEED (a number, "late" or "early")
 * does the same at first use. */
OR_API orError_t orScheduleSet(orSchedulePolicy policy, uint64_t seed);
/* The same without waiting, for a program that leaves because of an error: queued work continues in
 * the new way. */
OR_API orError_t orScheduleSwitch(orSchedulePolicy policy, uint64_t seed);
OR_API orError_t orScheduleGet(orSchedulePolicy *policy, uint64_t *seed);

/*
 * Tapes: every choice of a schedule written down, for a search.
 *
 * There is a choice where more than one of the host and the streams could go on. At a point these
 * are the host, and each stream whose next task waits for nothing. In a call that synchronises they
 * are the streams alone, until what it waits for is done; then the host goes on at once. A query
 * that is not ready runs one task. Records, completed waits and the caching allocator's poison are
 * not tasks here: they are done as soon as possible. Each half of a split task (below) is a task.
 *
 * The options are in this order:
 *   - the one that ran last, if it can go on: the host at a point, the stream afterwards;
 *   - the one that was left for it (below), if it can go on;
 *   - the host, and then the streams in the order in which they first got a task.
 *
 * Leaving the host or a stream that could go on is a preemption; returning to the one that was left
 * is none. If the one that ran last cannot go on, the host comes first and no option is a
 * preemption. Past the end of the tape, and for a number that is larger than the number of options,
 * the first option is taken.
 *
 * The text: choices separated by commas, "1,0,2"; "12:1" is twelve times 0 and a 1. "0": the first
 * option everywhere. OPENREG_SCHEDULE_TAPE does the same at first use, and takes precedence over
 * OPENREG_SCHEDULE_SEED. Under a tape the caching allocator poisons fresh and freed memory; under
 * other schedules it does so with orCachePoison or OPENREG_POISON=1.
 */
OR_API orError_t orScheduleSetTape(const char *tape);
/* The choices since the tape's schedule began, to be freed with free(). */
OR_API orError_t orScheduleGetTape(char **tape);

typedef enum orStepKind {
  /* A task: stream; a: its device; flags: 1 if it is done as soon as possible, as a record is. */
  orStepQueued = 1,
  /* An access of the next task that is queued on the stream (0: of the host): from a to b; flags.
   * The accesses of a task without such a step are not known. */
  orStepTouches,
  orStepRecords, /* an event on a stream; a: identifies the record, until there is another such */
  orStepWaits,   /* a stream, for the record a */
  orStepPoint,   /* the host is at a point */
  orStepAsks,    /* ... queried the record a, or without one the stream, and it was not done */
  /* ... waits for the record a, or the stream, or without one the device b (-1: all) */
  orStepAwaits,
  orStepKnows,   /* ... has seen that the record a, or the stream, is done */
  orStepLooks,   /* ... or the allocator for it, looked how far the stream is */
  orStepChooses, /* flags: which option; a: of how many; b: how many of them were no preemption */
  orStepRuns,    /* the stream's next task; flags: 1 if it is only the first half of it */
  orStepOutside  /* something that the record does not follow: what comes from outside, a value */
} orStepKind;

enum { orTouchWrites = 1, orTouchPinned = 2 };

typedef struct orScheduleStep {
  uint32_t kind; /* an orStepKind */
  uint32_t flags;
  orStream_t stream;
  uint64_t a, b;
} orScheduleStep;

/* Nonzero: schedules that begin from now on are recorded. */
OR_API orError_t orScheduleRecord(uint32_t record);
/* Copies the record of the current schedule from step `first` on, up to `capacity` steps of
 * `step_size` (sizeof(orScheduleStep)) bytes. It contains the accesses of kernels while the
 * sanitizer is on. */
OR_API orError_t orScheduleSteps(size_t first, orScheduleStep *steps, size_t step_size,
                                 size_t capacity, size_t *count);

/*
 * Split tasks. A device runs kernels and copies beside each other, so what one writes may be half
 * done when another reads it. Under a tape, and under every fourth seed (2, 6, 10, ..), tasks that
 * can be split run in two halves, and other streams may run in between: copies and fills of 16
 * bytes or more, and kernels that call orTaskPart.
 */
typedef enum orPart {
  orPartWhole = 0,
  orPartFirst, /* the kernel returns after it, and is called again with the same arguments */
  orPartSecond
} orPart;
/* Inside a kernel that can run in two halves: the half that it has to run. At most once in each
 * call. */
OR_API orPart orTaskPart(void);

/* Nonzero: the caching allocator poisons fresh and freed memory from now on, as with
 * OPENREG_POISON=1. Zero: only under a tape. Returns the previous request. */
OR_API uint32_t orCachePoison(uint32_t poison);

#ifdef __cplusplus
}
#endif

#endif
