/*
 * What the trace of a kernel tells: its caller's Record.
 *
 * The caller owns the Record and all that it points to, and sets all of it before the trace.
 */
#pragma once
#include <stdint.h>

enum Kind { READS, WRITES, UPDATES, STORES }; /* the last two are atomic; STORES reads nothing */

/* An access that is out of bounds, or that races with another program's. */
struct Hit {
  int64_t offset; /* in bytes, from the tensor's begin */
  int32_t argument, site, kind, unused;
  int64_t program, other;
};

/* The storage of a pointer argument. Tensors with one storage share `writer` and `reader`, which
 * have a word for each 1 << shift bytes: 1 + the last program that wrote or read there, or 0. */
struct Shadow {
  const char *begin;
  int64_t bytes;
  int32_t shift, unused;
  uint32_t *writer, *reader;
  const char *host; /* a copy of the storage that may be read, or null */
};

/* Of which accesses the first that races is kept: those of the program `only`, or of each but
 * `except`, if their kinds are in `kinds`, a bit for each. -1: any program. */
struct Wanted {
  int64_t only, except;
  uint32_t kinds, unused;
  const uint32_t *word; /* the only one in a Shadow's `writer`; null: any */
};

struct Record {
  Shadow *tensors; /* by pointer argument, and behind them what `find` has added */
  int64_t count;
  /* For an address in no tensor: adds the memory that it lies in, and returns its place in
   * `tensors`; -1: it lies in none. */
  int64_t (*find)(struct Record *record, const char *address);
  void *owner; /* for `find` */
  struct Wanted wanted;
  int64_t stop; /* ends the trace before its next program; set by a loop that does not end */
  int64_t bad, races;
  Hit first_bad, first_race;
  int64_t program;
  uint8_t *blind; /* by site: 1 if a load whose result an address needs could not be read */
};
