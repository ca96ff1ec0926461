/*
 * What all of the sanitizer shares: whether it is on, its lock, its options, host memory, and the
 * counter of moments.
 *
 * `orSanitizerChosen` and the moments are under orSanitizerMutex; `orSanitizerOn` is written under
 * it and read without.
 */
#include <stdlib.h>

#include "sanitizer/private.h"

orMutex orSanitizerMutex = OR_MUTEX_INITIALIZER(OR_RANK_TOOLS);
uint32_t orSanitizerOn;
uint32_t orSanitizerRefuses, orSanitizerReportsPossible = 1;
orSanitizerOptions orSanitizerChosen;

static uint64_t moments;
static _Thread_local uint32_t ignored;

const uint32_t *orSanitizerActive(void) { return &orSanitizerOn; }

uint64_t orSanitizerMoment(void) { return ++moments; }

uint64_t orSanitizerLatest(void) { return moments; }

uint32_t orSanitizerIgnore(uint32_t ignore) {
  uint32_t before = ignored;
  ignored = ignore;
  return before;
}

bool orSanitizerIgnores(void) { return ignored; }

static void *checked(void *memory, size_t bytes) {
  if (memory) return memory;
  orWarn("no host memory for the sanitizer (%zu bytes)", bytes);
  abort();
}

void *orSanitizerAllocate(size_t bytes) { return checked(malloc(bytes), bytes); }

void *orSanitizerResize(void *old, size_t bytes) { return checked(realloc(old, bytes), bytes); }
