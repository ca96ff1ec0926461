/*
 * Names of streams, and the hang report.
 */
#pragma once

#include "stream/stream.h"

/* As "the default stream of openreg:0"; works for destroyed streams. */
typedef char orStreamName[64];
const char *orStreamNameOf(orStreamName text, orStream_t stream);
/* The hang report on stderr; `why` ends its first line. No lock held. */
void orHangPrint(const char *why);
