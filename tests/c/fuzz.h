/*
 * Random calls of the public API by several threads at once: a fuzzer.
 *
 * stress.c runs correct programs and compares contents. Here nothing is predicted: three threads
 * call everything with live, stale and invented handles and sizes at the limits, and share one set
 * of objects. A fourth thread completes external events and sends signals. Each call has to
 * return, with an error that it may have. At the end everything is accounted for: arguments are
 * whole and were dropped once, host functions ran once, graphs' objects were destroyed once,
 * causes of failures were dropped or handed out once, allocations and frees of the cache match,
 * and block hooks are balanced. soak.c compares memory, handles and queues afterwards.
 *
 * Half of the calls are made under a lock that the block hooks release and take again, as Python
 * does with its own. Kernels, host functions and `drop` take it too. So a call that sleeps without
 * the hooks, or that calls back while it holds a lock of the library, ends in a deadlock.
 *
 * A wrong program must not look like a fault of the library, so there are two worlds. Streams and
 * events of the first may be captured; their work touches only memory that stays until all graphs
 * are gone, and they are destroyed while other threads use them. Streams of the second are never
 * captured; their work touches memory that comes and goes. A call pins each object of the second
 * world that it uses, and only an object without pins is destroyed. Each piece of work has bytes
 * of its own, so ThreadSanitizer checks the order in which memory is reused.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <inttypes.h>
#include <pthread.h>

#include "openreg_graph.h"
#include "stress.h"

enum {
  CALLERS = 3,
  CALLS = 150, /* a thread */
  DEVICE_COUNT = 2,
  MOST = 1024, /* blocks of arguments, host functions, causes and objects of one program */
  KEPT_BYTES = 64 << 10
};

/* ---- objects ---- */

/* What `pins` is, or how many calls use the object. */
enum { FREE = -1, BUSY = -2 };

typedef struct Object {
  _Atomic int pins;
  _Atomic uint64_t handle;
  /* Of memory: */
  char *data;
  size_t size;
  _Atomic size_t taken; /* bytes that some work has for itself */
} Object;

typedef enum Type {
  STREAM, /* the first world */
  EVENT,
  GRAPH,
  POOL,
  PLAIN_STREAM, /* from here on: the second world */
  PLAIN_EVENT,
  DEVICE_MEMORY,
  CACHED,
  PINNED_MEMORY,
  REGISTERED,
  TYPES
} Type;

enum { OBJECTS = 10, OPEN_GATES = 8 };

typedef struct Account {
  _Atomic int queued, ran, dropped;
  bool captured; /* it may be a node, which runs as often as its graph */
} Account;

typedef struct Fuzz {
  Object object[TYPES][OBJECTS];
  Object kept[DEVICE_COUNT + 1]; /* memory of each device, pinned memory */
  _Atomic uint64_t gate[OPEN_GATES];
  Account arguments[MOST], functions[MOST], causes[MOST], objects[MOST];
  _Atomic int argument_count, function_count, cause_count, object_count;
  _Atomic int bad_bytes, launches, resets, losses, faults, callers_left;
  _Atomic int64_t cache_count[orCacheActionOutOfMemory + 1],
      cache_bytes[orCacheActionOutOfMemory + 1];
  bool ends_inside;
  orStream_t last_stream; /* what an exit finds queued */
  unsigned char *last;
  pthread_t caller[CALLERS];
} Fuzz;

extern Fuzz fuzz;

/* ---- fuzz_calls.c ---- */

uint64_t draw(void); /* of the calling thread's own sequence */
static inline uint32_t below(uint32_t n) { return (uint32_t)(draw() % n); }
static inline bool oneIn(uint32_t n) { return below(n) == 0; }

/* The error, if the call may have it; else the test fails. */
orError_t judge(orError_t error, const char *call);
#define CALL(call) judge((call), #call)

/* Takes the lock of the block hooks and releases it. */
void touchBig(void);

Object *anyObject(Type type);
Object *freePlace(Type type); /* a free one, which is the caller's, or null */
void fillPlace(Object *o, uint64_t handle, void *data, size_t size);
void leavePlace(Object *o);
Object *pin(Type type); /* a live one that stays until unpin, or null */
void unpin(Object *o);
Object *takeAway(Type type); /* a live one without pins, which is the caller's to end, or null */
/* A handle of the first world: live mostly, and by the time of the call perhaps no more. */
uint64_t loose(Type type);
/* For calls that change nothing: it may be a handle that another caller made. */
uint64_t guess(Type type);
int anyDevice(void);
/* The next account, or -1 if all are used. */
int nextIndex(_Atomic int *count);

/* ---- fuzz_memory.c ---- */

size_t anySize(void);
/* Bytes of the memory that no other work touches; null if there are none left. */
char *takeBytes(Object *o, size_t bytes);
Object *pinMemory(void);

/* ---- fuzz_streams.c ---- */

/* Of the second world: the one that is pinned, a default stream, or one that all share. */
orStream_t plainStream(const Object *pinned);

/* ---- fuzz_work.c ---- */

void setCause(void);
void launchOn(orStream_t stream, Object *memory, bool captured);
void copyOn(orStream_t stream, Object *to, Object *from);
Object *kept(void); /* memory that stays */

/* ---- the calls: X(function, weight) ---- */

/* clang-format off */
#define FUZZ_CALLS(X) \
  X(makeDeviceMemory, 5) X(freeDeviceMemory, 2) X(makePinned, 4) X(freePinned, 2) \
  X(makeRegistered, 2) X(freeRegistered, 1) X(makeCached, 10) X(freeCached, 8) X(askMemory, 3) \
  X(askCache, 1) X(changeCache, 1) X(makePool, 2) X(releasePool, 1) \
  X(makeStream, 10) X(endStream, 4) X(misuseStream, 1) X(makeEvent, 8) X(endEvent, 3) \
  X(recordEvent, 14) X(waitForEvent, 14) X(waitForGate, 4) X(ask, 8) X(synchronize, 5) \
  X(useDevice, 4) X(reset, 1) X(takeCause, 2) X(launchLoose, 16) X(launchPlain, 20) \
  X(launchHostFunction, 6) X(copyLoose, 8) X(copyPlain, 14) X(copyBlocking, 2) X(nap, 2) \
  X(beginSomeCapture, 2) X(endSomeCapture, 5) X(captureBoth, 6) X(launchGraph, 10) \
  X(endGraph, 2) X(useGraph, 2) X(injectFault, 2) X(schedule, 1) X(sanitize, 2) X(trace, 1) \
  X(report, 4) X(forkChild, 1)
/* clang-format on */

#define FUZZ_DECLARE(name, weight) void name(void);
FUZZ_CALLS(FUZZ_DECLARE)

void forbidForks(void); /* for good, before an exit */

#endif
