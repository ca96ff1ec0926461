/*
 * A vector clock: for each timeline, the counter up to which it is over.
 *
 * Clocks have no lock of their own.
 */
#include <stdlib.h>
#include <string.h>

#include "sanitizer/private.h"

void orClockReserve(orClock *clock, uint32_t size) {
  if (size <= clock->size) return;
  clock->at = orSanitizerResize(clock->at, size * sizeof *clock->at);
  memset(clock->at + clock->size, 0, (size - clock->size) * sizeof *clock->at);
  clock->size = size;
}

void orClockJoin(orClock *clock, const orClock *other) {
  orClockReserve(clock, other->size);
  for (uint32_t i = 0; i < other->size; i++)
    if (other->at[i] > clock->at[i]) clock->at[i] = other->at[i];
}

void orClockClear(orClock *clock) {
  free(clock->at);
  *clock = (orClock){NULL, 0};
}
