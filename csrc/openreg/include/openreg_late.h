/*
 * Late accesses: of operators that take indices, whose bytes are known once the indices are.
 *
 * The indices of such an operator are often in device memory, where an earlier task may still write
 * them. Its access is reported at the call, as one to any bytes of the tensor, and decided when
 * the task runs: a conflict that involves it is kept until then, and reported or forgotten by the
 * bytes that the indices select. orSanitizerFound returns it to the thread of the later call, at a
 * call after the one that has reported that access, because a task that is about to be queued must
 * not be stopped by what another thread finds meanwhile.
 */
#ifndef OPENREG_LATE_H
#define OPENREG_LATE_H

#include "openreg_sanitizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A bit of orMemoryAccess.write: indices decide which of these bytes are touched. */
enum { OR_ACCESS_LATE = 32 };

typedef struct orLateAccess orLateAccess;

/* For the task that is about to be reported. `data` is where offsets count from. Null if the
 * sanitizer is off. */
OR_API orLateAccess *orSanitizerLate(const void *data);
/* orSanitizerAccess for a task with a late access. In a capture each replay is decided anew. */
OR_API orError_t orSanitizerAccessLate(orStream_t stream, const char *operation,
                                       const orMemoryAccess *accesses, size_t count,
                                       orLateAccess *late);
/* The access touches `slice`, whose data is ignored, at each of these offsets in bytes. Called
 * before the access is reported, if the indices are known by then, or by the task, each time that
 * it runs and before it writes anything. */
OR_API orError_t orSanitizerResolve(orLateAccess *late, const orMemoryAccess *slice,
                                    const size_t *offsets, size_t count);
/* The task is over, or will not run: what is undecided is forgotten. May be null. */
OR_API void orSanitizerLateOver(orLateAccess *late);
/* The program, or a test, is over: waits until the tasks with late accesses in undecided conflicts
 * have run, for at most this long. Those that are left are possible races. */
OR_API orError_t orSanitizerAwaitLate(unsigned milliseconds);

#ifdef __cplusplus
}
#endif
#endif
