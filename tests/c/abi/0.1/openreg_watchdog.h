/*
 * libopenreg: what every stream is doing, for a program that does not go on.
 *
 * The same text is printed on stderr, in one write, once for each stall that lasts for
 * OPENREG_WATCHDOG_S seconds (a stream that has work and finishes no task, or a host thread that
 * waits for so long), and at each signal that OPENREG_WATCHDOG_SIGNAL names.
 */
#ifndef OPENREG_WATCHDOG_H
#define OPENREG_WATCHDOG_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each stream that has work: what its next task is and, if it waits, for what; host threads that
 * wait for the device (where one of the two settings is on); streams that wait for each other. The
 * text is the caller's to free(). Waits for nothing, and changes nothing. */
OR_API orError_t orHangReport(char **text);

/* Called for each report: gives `say` a line for each thing outside of the library that streams may
 * wait for, such as a collective. On any thread, with nothing locked; it may not call the library.
 * Set once. */
typedef void (*orHangSay)(void *report, const char *line);
OR_API orError_t orSetHangHook(void (*tell)(orHangSay say, void *report));

#ifdef __cplusplus
}
#endif

#endif
