/*
 * Moments of streams that other processes wait for.
 */
#pragma once

#include "openreg_ipc.h"

/* The end of the work that is queued on a stream. Its record is 0 if that work is over already. No
 * lock held. */
orError_t orIpcStreamMoment(orIpcMoment *moment, orStream_t stream);
/* Closes the event files of processes that have ended, unless they are in use. orSharedLock
 * held. */
void orIpcEventsForget(void);
