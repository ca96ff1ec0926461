/*
 * What the files share that the handler of SIGSEGV concerns: who resolves faults, who finds an
 * address, and what is noted of it.
 */
#ifndef OPENREG_FAULT_HANDLER_H
#define OPENREG_FAULT_HANDLER_H

#include "stream/stream.h"

/* Of page_guard.c, by a constructor: whether memory is guarded, and what is done when it is
 * touched, which returns false if the fault is not to be tried again. */
void orFaultSetGuard(bool (*guarded)(uintptr_t address),
                     bool (*resolve)(uintptr_t address, const void *context));
/* In front of a handler that has been put there meanwhile. */
void orFaultInstall(void);
/* Whether the access of a fault was a write; `otherwise` where the processor does not say it. */
bool orFaultWrote(const void *context, bool otherwise);

#endif
