/*
 * libopenreg: what is written before a process dies of touching device memory on the host.
 *
 * The first use of a device installs a handler of SIGSEGV. Where a thread reads or writes device
 * memory outside of a task, or inside of one without orMapForKernel, the handler writes to stderr,
 * in one write, whose memory it is and what the thread was doing. Then the handler from before
 * runs, with the signals blocked and on the stack that it asked for; without one the process dies
 * of the signal.
 */
#ifndef OPENREG_HOST_ACCESS_H
#define OPENREG_HOST_ACCESS_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The operation that the calling thread is in, or null; returns the one before. The text has to
 * stay until it is replaced. Without it the report has the task that the thread has queued last. */
OR_API const char *orHostAccessOperation(const char *name);
/* A line for the end of the report where there was no handler before, such as how to learn more.
 * The text is never freed. */
OR_API void orHostAccessHint(const char *text);
/* The file that the report is written to in place of stderr. */
OR_API void orHostAccessOutput(int file);
/* For code that changes the handler of SIGSEGV after the first use. 0: the library's gives way to
 * the one from before it; nonzero: it comes before the one that there is then. Returns whether it
 * was there. */
OR_API uint32_t orHostAccessHandler(uint32_t comes);

#ifdef __cplusplus
}
#endif

#endif
