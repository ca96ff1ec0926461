/*
 * Host access: the report before a process dies because the host touched device memory.
 *
 * The first use of a device installs a handler of SIGSEGV. When a thread reads or writes device
 * memory outside of a task, or inside one without orMapForKernel, the handler writes to stderr, in
 * one write, whose memory it is and what the thread was doing. Then it runs the previous handler,
 * with the signals blocked and on the stack that that handler asked for; without one the process
 * dies of the signal.
 */
#ifndef OPENREG_HOST_ACCESS_H
#define OPENREG_HOST_ACCESS_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The origin of the live block that starts at `ptr`, as orCacheSetOrigin has set it; null: none. */
OR_API const orOrigin *orCacheGetOrigin(const void *ptr);
/* Sets the operation that the calling thread is in, or null; returns the previous one. The text
 * must stay valid until it is replaced. Without it the report has the task that the thread has
 * queued last. */
OR_API const char *orHostAccessOperation(const char *name);
/* Sets a line for the end of the report if there was no previous handler, such as how to find out
 * more. The text is never freed. */
OR_API void orHostAccessHint(const char *text);
/* Sets the file descriptor that the report is written to in place of stderr. */
OR_API void orHostAccessOutput(int file);
/* For code that changes the handler of SIGSEGV after the first use of a device. 0: replaces the
 * library's handler by the previous one. Nonzero: installs it in front of the current one. Returns
 * whether it was installed. */
OR_API uint32_t orHostAccessHandler(uint32_t comes);

#ifdef __cplusplus
}
#endif

#endif
