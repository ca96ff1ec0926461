/*
 * openreg_schedule.h: who decides in which order queued tasks run.
 *
 * Normally lanes take what is ready, side by side, and the order of streams that no event orders
 * differs from run to run. Under a schedule one task runs at a time, only while a thread is inside
 * a call that is a *point*, and which one is the schedule's choice. A point is a launch, a copy, a
 * fill, a host function, a wait (for an event or a value) and a value's write once they are queued;
 * a query; a full queue; and every call that synchronises. Nothing runs between calls.
 *
 * A program in which one thread at a time calls the library gets the same order for the same seed,
 * on any machine: the choice depends on the seed and the calls alone. Streams are known by the
 * order in which they are first used under the schedule; their priorities order nothing, as they
 * promise nothing.
 *
 * Not covered: calls from several threads at once, completions and values that come from outside (a
 * call that synchronises really waits for them), kernels whose own result depends on time, hosts
 * that poll memory without a call. A kernel or host function that waits for the thread which queued
 * it waits for ever.
 */
#ifndef OPENREG_SCHEDULE_H
#define OPENREG_SCHEDULE_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum orSchedulePolicy {
  orScheduleFair = 0, /* no schedule: lanes run what is ready */
  orScheduleSeeded,   /* any order that the program allows, chosen by the seed */
  /* a task runs when a synchronising call, a query or a full queue needs it, and not before */
  orScheduleLate,
  /* at each point everything that can run does, streams in the order of their first use */
  orScheduleEarly
} orSchedulePolicy;

/* Waits until nothing is queued on any device, then changes over; also from one seed to the same
 * again, which starts anew. What other threads queue meanwhile runs in the old way or in the new
 * one. OPENREG_SCHEDULE_SEED (a number, "late" or "early") does the same at first use. */
OR_API orError_t orScheduleSet(orSchedulePolicy policy, uint64_t seed);
/* The same at once, for a program on its way out of an error: what is queued goes on in the new
 * way. */
OR_API orError_t orScheduleSwitch(orSchedulePolicy policy, uint64_t seed);
OR_API orError_t orScheduleGet(orSchedulePolicy *policy, uint64_t *seed);

#ifdef __cplusplus
}
#endif

#endif
