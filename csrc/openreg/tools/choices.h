/*
 * A tape, which is the choices of a schedule in order, and the record of what a run did, from which
 * an exploration finds the choices that were not taken.
 *
 * Plain data: the caller locks. If memory is short, the record is marked incomplete and ends early.
 */
#pragma once

#include "stream/stream.h"
#include "openreg_schedule.h"

typedef struct orTape {
  /* each an option, in the order of orScheduleStep; 0: the first. */
  uint32_t *choices;
  size_t count, room;
} orTape;

/* Reads the text of orScheduleSetTape. If it is invalid, returns false and the tape is empty. */
bool orTapeParse(orTape *tape, const char *text);
/* malloc'd; null if memory is short. */
char *orTapeText(const orTape *tape);
bool orTapeAdd(orTape *tape, uint32_t choice);

typedef struct orSteps {
  orScheduleStep *at;
  size_t count, room;
  bool short_of_memory;
} orSteps;

void orStepsAdd(orSteps *steps, orScheduleStep step);

/* schedule.c, for the sanitizer: notes that queued work may touch these bytes. No lock held. */
void orScheduleTouched(orStream_t stream, uintptr_t begin, uintptr_t end, bool write);
