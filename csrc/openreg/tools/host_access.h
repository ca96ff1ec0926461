/*
 * What the files around the SIGSEGV handler share: the resolution of faults, the description of an
 * address, and the kind of an access.
 */
#pragma once

#include "stream/stream.h"

/* Called by page_guard.c's constructor. `guarded`: whether memory is guarded. The other handles an
 * access to it, and returns false if the instruction is not to be repeated. */
void orFaultSetGuard(bool (*guarded)(uintptr_t address),
                     bool (*resolve)(uintptr_t address, const void *context));
/* Installs the handler, in front of one that was installed meanwhile. */
void orFaultInstall(void);
/* Whether the access of a fault was a write; `otherwise` if the processor does not report it. */
bool orFaultWrote(const void *context, bool otherwise);
