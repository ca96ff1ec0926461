/*
 * Programs of the soak, and what they have done so far: soak.c runs one, soak_rounds.c many, in
 * processes with settings of their own.
 */
#ifndef SOAK_H
#define SOAK_H

#include "stress.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SLOW_BUILD = 1 }; /* and an allocator that keeps what is freed */
#else
enum { SLOW_BUILD = 0 };
#endif

/* In memory that the processes of all rounds share with the one that waits for them. */
typedef struct Soak {
  uint64_t seed;
  char text[256]; /* what is switched on */
  bool launch_blocking;
  _Atomic uint64_t forks, resets, schedules;
  uint64_t programs, clean, struck[5], traced, blocks;
  _Atomic uint64_t calls, signals, outcomes[orErrorCapturedEvent + 1]; /* of random calls */
  double heap, heap_grown, resident, resident_grown; /* MiB, at the end of the last round */
} Soak;

extern Soak *soak;

/* soak.c: once in a process, one program, and that nothing is left of it. */
void startSoak(void);
void soakProgram(uint64_t seed);
void soakCalls(uint64_t seed, bool ends_inside);
void checkSoak(void);
void measureSoak(void);

/* fuzz_calls.c: once in a process, before the library is used; then random calls, with
 * `ends_inside` until the process exits in their midst. */
enum { EXIT_STATUS = 7 };
void startCalls(void);
void runCalls(bool ends_inside);
unsigned sharedStreams(void); /* fuzz_streams.c: of orStreamGetFromPool, made so far */

#endif
