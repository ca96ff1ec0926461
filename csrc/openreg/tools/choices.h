/*
 * A tape: the choices of a schedule, in the order in which they were made; and the record of what a
 * run did, from which whoever searches learns what else could have been chosen.
 *
 * Plain data: the caller locks. Where memory is short the record ends early, and says so.
 */
#ifndef OPENREG_TAPE_H
#define OPENREG_TAPE_H

#include "stream/stream.h"
#include "openreg_schedule.h"

typedef struct orTape {
  /* Of the options that there were, by the order of orScheduleStep; 0: the first. */
  uint32_t *choices;
  size_t count, room;
} orTape;

/* The text of orScheduleSetTape; false, and the tape is empty, if it is none. */
bool orTapeParse(orTape *tape, const char *text);
/* malloc'd; null where memory is short. */
char *orTapeText(const orTape *tape);
bool orTapeAdd(orTape *tape, uint32_t choice);

typedef struct orSteps {
  orScheduleStep *at;
  size_t count, room;
  bool short_of_memory;
} orSteps;

void orStepsAdd(orSteps *steps, orScheduleStep step);

/* schedule.c, for the sanitizer: something is told to touch these bytes. No lock held. */
void orScheduleTouched(orStream_t stream, uintptr_t begin, uintptr_t end, bool write);

#endif
