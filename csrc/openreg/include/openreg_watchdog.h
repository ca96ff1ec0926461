/*
 * Hang reports: what every stream does and waits for, for a program that hangs.
 *
 * The library prints the same text on stderr, in one write, once for each stall of
 * OPENREG_WATCHDOG_S seconds (a stream with work finishes no task, or a host thread waits for that
 * long), and at each signal that OPENREG_WATCHDOG_SIGNAL names.
 */
#ifndef OPENREG_WATCHDOG_H
#define OPENREG_WATCHDOG_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a text: for each stream with work its next task and, if it waits, what for; host threads
 * that wait for the device (if one of the two settings is on); streams that wait for each other.
 * The caller frees it with free(). Waits for nothing, and changes nothing. */
OR_API orError_t orHangReport(char **text);

/* `tell` is called for each report and passes `say` a line for each thing outside of the library
 * that streams may wait for, such as a collective. It runs on any thread, with no lock held, and
 * may not call the library. Set once. */
typedef void (*orHangSay)(void *report, const char *line);
OR_API orError_t orSetHangHook(void (*tell)(orHangSay say, void *report));

/* `print` is called in place of the write on stderr, on the watchdog's thread with no lock held. It
 * returns 0 if it has not printed `text`, and the library then does. It may call the library, but
 * must not wait for a device. Set once. */
OR_API orError_t orSetHangPrint(int (*print)(const char *text));

#ifdef __cplusplus
}
#endif

#endif
