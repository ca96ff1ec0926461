/*
 * Random programs against a sequential model.
 *
 * A program is a list of steps made from a seed: kernels, copies, fills, host writes, frees,
 * records, waits, destroyed streams, by one to three host threads over two devices. Records of the
 * queue are of every size up to the largest, and there are calls that reserve one and make no use
 * of it. While it is made it is also run on a model of the buffers, step after step. The real run
 * is not sequential; it has to give the same contents because the program orders every two steps
 * that touch the same buffer, if one of them writes: by stream order, by events (a small number of
 * them, recorded again and again, or signalled by a host), or by a host that synchronises.
 *
 * What is ordered before what is known by vector clocks. A *line* is something that does one thing
 * after another: a stream, or a host thread. clock[a][b] = n says: what comes next on line a is
 * after the first n steps of line b. A step that touches a buffer looks at who touched it before;
 * where the clock does not cover that, the maker puts in steps that order the two, and then it
 * does.
 *
 * Threads take the steps that are theirs in the order of the program. `need` of a step says how
 * many steps of the program each other thread must have taken (issued) before; it is there only
 * where an event, a buffer's address or a host's memory passes from one to the other. A gate (an
 * external event) is opened by the thread that closed it; only programs of one thread have them,
 * and open them before anything that blocks. In the others a host signals an external event right
 * after the step that waits for it, before it can block.
 *
 * A failure prints the seed; OPENREG_STRESS_SEED=seed runs that program alone, any number of times
 * (OPENREG_STRESS_PROGRAMS).
 *
 * soak.c runs the same programs while things go wrong on purpose, which `trouble` lists, and
 * soak_rounds.c in processes with other settings.
 */
#ifndef STRESS_H
#define STRESS_H

#include <stdbool.h>

#include "gate.h"

enum {
  HOSTS = 3,
  LINES = 28, /* the hosts, then streams, those that were destroyed included */
  BUFFERS = 8,
  EVENTS = 5, /* a device */
  STEPS = 640,
  WORDS_MOST = 400000,
  STAGED_WORDS = 16384, /* an upload of 64 KiB, the most that is copied into the queue */
  CHECK_WORDS = 64,
  PINNED = 2
};

typedef enum Kind {
  KERNEL,
  COPY,
  FILL,
  UPLOAD,
  CHECK,
  HOST_WRITE,
  REPLACE,
  HOST_FUNC,
  RECORD,
  RECORD_REFUSED, /* of an event of the other device */
  WAIT,
  SYNC_EVENT,
  SYNC_STREAM,
  SYNC_DEVICE,
  WAIT_SIGNAL, /* for an external event ... */
  SIGNAL,      /* ... which the host `src` signals */
  NEW_STREAM,
  NAP,
  CLOSE_GATE,
  OPEN_GATE,
  QUERY
} Kind;

typedef struct Step {
  Kind kind;
  int host;
  int line, event;
  int dst, src; /* buffers */
  uint32_t dst_at, src_at, words;
  uint32_t a, b;  /* constants of kernels and fills, nanoseconds */
  uint32_t extra; /* of a kernel: bytes of arguments that it only verifies */
  uint32_t check[CHECK_WORDS];
  int need[HOSTS];
} Step;

typedef struct Buffer {
  int place; /* 0, 1: device memory; PINNED */
  uint32_t words;
  uint32_t *model;
  uint32_t *real;
  int write_line, write_step; /* the last write, as a step of a line */
  int placed_by,
      placed_at; /* who gave it its address; by how many steps of the program that was done */
  int read_step[LINES];
} Buffer;

typedef struct Event {
  int device;
  int recorded;       /* line; -1: never */
  int clock[LINES];   /* what the newest record is after */
  int used_by[HOSTS]; /* last steps of the program that used it, + 1 */
  orEvent_t handle;
} Event;

/* How a gate opens. */
typedef enum Gate { GATE_SIGNALLED, GATE_DESTROYED, GATES } Gate;

typedef struct Program {
  /* What it is not to have; set before it is made. */
  bool no_gates, no_large_buffers;
  uint64_t seed, random;
  int hosts, lines, steps;
  Step step[STEPS];
  Buffer buffer[BUFFERS];
  Event event[2 * EVENTS];
  /* Lines. */
  int device[LINES], owner[LINES], successor[LINES], taken[LINES];
  bool standard[LINES]; /* it is its device's default stream */
  int clock[LINES][LINES];
  orStream_t stream[LINES];
  orEvent_t signal[HOSTS]; /* the external event that a host is to signal next */
  int gate_line;           /* -1: no gate is closed */
  Gate gate_kind;
  uint32_t gate_bytes; /* of large records since it was closed */
  orEvent_t gate;
  _Atomic int issued[HOSTS]; /* steps of the program that the thread has got past */
} Program;

extern Program program;

/* What goes wrong on purpose while a program runs; zeros: nothing. */
typedef struct Trouble {
  const char *text;        /* for messages: null or what is switched on */
  bool fails;              /* work may fail: the contents are undefined, calls may report it */
  bool drops;              /* work may be dropped too, and nothing that it ordered is ordered */
  bool blocks;             /* a launch waits for what it has launched */
  bool graphs;             /* steps of a program of one thread are launched as graphs */
  bool short_of_memory;    /* an allocation may be refused; the next one is not */
  void (*after)(int step); /* on the thread that has taken the step, before it goes on */
  void (*over)(void); /* all steps are taken: work that fails no more is queued; sets `harmless` */
  bool harmless;      /* nothing has gone wrong after all */
  _Atomic int resets;
} Trouble;

extern Trouble trouble;

void stressFailed(void); /* says how to see it again */

#define STRESS_FAIL(...) \
  do {                   \
    stressFailed();      \
    FAIL(__VA_ARGS__);   \
  } while (0)

/* What a word becomes. */
static inline uint32_t mix(uint32_t d, uint32_t s, uint32_t a, uint32_t b) {
  return d * a + (s ^ b) + (d >> 7);
}

static inline uint32_t uploaded(const Step *s, uint32_t i) { return (s->a + i) * 2654435761u; }

/* An argument of a kernel, and the byte of it that says if it is in order. */
static inline unsigned char argumentByte(uint32_t b, uint32_t i) {
  return (unsigned char)(b + i + (i >> 8) * 7);
}

/* stress_make.c: fills `program`, and the buffers' models with what they have to hold at the
 * end. */
void makeProgram(uint64_t seed);

/* stress.c: once, before the first program; runs the one that was made. */
void startStress(void);
void runProgram(void);
uint64_t stressSetting(const char *name, uint64_t otherwise);
/* Blocks of arguments that were queued so far; each is dropped once. */
uint64_t stressBlocks(void);

#endif
