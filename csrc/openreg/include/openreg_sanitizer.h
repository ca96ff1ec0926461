/*
 * The sanitizer: finds accesses to the same bytes that nothing orders.
 *
 * It follows the order that the program asked for (streams, events, waits, synchronisation), in the
 * order of the calls, and not the order in which tasks happen to run: the same program gives the
 * same report each time.
 *
 * Pinned memory under a queued copy is guarded until the host has waited for the copy: what the
 * host does there without a call, as by a pointer, faults and is reported, once for each copy, and
 * goes on. Memory that orMallocHost gave before, while the sanitizer was off, is not guarded.
 *
 * Host threads count as one, and what one has waited for all know, until somebody tells which of
 * them are to be told apart (orSanitizerThreadStarts). Work behind an external event that
 * is not signalled is judged when it is, by the thread that signals, as the host may still do
 * things in order until then. A host function is taken to tell the host all that was queued before
 * it. One pair of operations on the same streams
 * and address is one report, until the reports are cleared.
 *
 * Without host memory for its own tables the sanitizer prints one line and ends the process: it
 * would miss races from there on.
 */
#ifndef OPENREG_SANITIZER_H
#define OPENREG_SANITIZER_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OR_ACCESS_DIMS = 8 };

/* Of `write` below. */
enum {
  OR_ACCESS_WRITES = 1,    /* writes, or reads and writes; else it reads */
  OR_ACCESS_ALLOCATES = 2, /* of a report alone: handed out the memory that `later` reads */
  OR_ACCESS_PARTIAL = 4,   /* of these bytes it touches some, and which is not known */
  OR_ACCESS_MOVES = 8      /* reads them to put them as they are where the next one writes, in
                              device memory: that nothing has written them is no error then */
};

/* Bytes that an operator reads or writes: `width` bytes at `data`, repeated count[i] times at
 * stride[i] bytes for each of `dims` dimensions, in any order. Of more dimensions some are given
 * as their hull. */
typedef struct orMemoryAccess {
  const void *data;
  size_t width;
  uint32_t dims;
  uint32_t write; /* 0: reads; OR_ACCESS_WRITES and the like */
  size_t count[OR_ACCESS_DIMS];
  size_t stride[OR_ACCESS_DIMS];
} orMemoryAccess;

/* One side of a conflict. */
typedef struct orRaceAccess {
  char operation[96];      /* "aten::mul.out" */
  orStream_t stream;       /* 0: the host */
  char where[64];          /* "the default stream of openreg:0", "the host" */
  int device;              /* of the stream; -1: the host */
  uint32_t write;          /* as in orMemoryAccess */
  const void *begin, *end; /* its hull */
  void *stack; /* from orSanitizerOptions.capture, or null; valid until the report is released */
} orRaceAccess;

typedef struct orRaceReport {
  uint64_t number; /* from 1 */
  orRaceAccess earlier, later;
  const void *begin, *end; /* that both touch, hull */
  /* Whose memory: "openreg:0", "pinned host memory", "openreg:0, reused without record_stream". */
  char memory[64];
  char advice[256]; /* the call that would have ordered them */
} orRaceReport;

/* Of moments the later is the greater number: those of accesses are their calls'. */
typedef struct orRaceEdge {
  orStream_t from, to;       /* 0: of `from` all of a device, of `to` the host */
  uint64_t recorded, waited; /* moments: `to` comes after what was queued on `from` until then */
} orRaceEdge;

enum { OR_RACE_EDGES = 32 };

/* The order that there was. */
typedef struct orRaceOrder {
  size_t size;             /* of this structure */
  uint64_t earlier, later; /* moments of the accesses */
  size_t count;            /* of the newest waits that came after the earlier access, or that are
                               from its stream to the later one's */
  orRaceEdge edges[OR_RACE_EDGES];
} orRaceOrder;

typedef struct orSanitizerOptions {
  size_t size; /* of this structure */
  /* The caller's stack, kept with the accesses; may be null. Called on the thread of the access
   * with no lock held. */
  void *(*capture)(void *context);
  void (*release)(void *stack, void *context); /* no lock held; on any thread */
  void *context;
  size_t reports; /* kept, at most; the rest is counted and told by orSanitizerFound. 0: 1000 */
  /* The calling thread has touched pinned memory under a queued copy, in no call of this library,
   * and orSanitizerFound has the report. Called by that instruction, in a signal handler, which
   * goes on afterwards; no lock held. So is `capture` then. May be null. */
  void (*touched)(void *context);
  /* For which thread (orSanitizerThread) the calling one acts, which has not been begun; 0: for
   * none. May be null. It calls nothing of this library. */
  uint64_t (*thread)(void);
  /* A stream is about to use pinned memory, for the first time since this was enabled: what the
   * host does to such memory may be in conflict from now on. In the call that queues; no lock held.
   * Threads that come to it at once each call it. May be null. */
  void (*pinned)(void *context);
} orSanitizerOptions;

OR_API orError_t orSanitizerEnable(const orSanitizerOptions *options);
OR_API orError_t orSanitizerDisable(void);
/* Where it says whether it is enabled (not 0), for callers' fast path: to be asked for once and
 * read with relaxed order. */
OR_API const uint32_t *orSanitizerActive(void);

/* What the task that the calling thread is about to queue on `stream` (0: what the host is about to
 * do itself) reads and writes. Copies and fills of the core tell it themselves, kernels do not.
 * What is found: orSanitizerFound. Memory that is neither a device's nor pinned is never in
 * conflict. */
OR_API orError_t orSanitizerAccess(orStream_t stream, const char *operation,
                                   const orMemoryAccess *accesses, size_t count);
/* Reports from number `first` on, up to `capacity` of `report_size` (sizeof(orRaceReport)) bytes;
 * `total`: made so far, also those not kept. */
OR_API orError_t orSanitizerReports(uint64_t first, orRaceReport *reports, size_t report_size,
                                    size_t capacity, size_t *count, uint64_t *total);
/* Of the report with this number. orErrorInvalidValue if it is not kept. */
OR_API orError_t orSanitizerOrder(uint64_t number, orRaceOrder *order);
OR_API orError_t orSanitizerClearReports(void);
/* Nonzero: what orSanitizerAccess finds in conflict, or is told while something waits for
 * orSanitizerFound, will not be queued; it is not remembered, and orSanitizerFound tells of each
 * conflict. 0, as at first: it is queued, and of one report is told once. For the whole process,
 * whether it is enabled or not. Returns what it was. */
OR_API uint32_t orSanitizerRefuse(uint32_t refuse);
/* Nonzero: reads of device memory that nothing has written since the caching allocator handed it
 * out are reported, too: `earlier` is the allocation then. It knows of what is handed out from now
 * on; a kernel that says nothing of what it touches may have written all of it. 0, as at first:
 * they are not. For the whole process, whether it is enabled or not. Returns what it was. */
OR_API uint32_t orSanitizerInitcheck(uint32_t check);
/* 0: a conflict of an access of which it is not known which bytes it touches (OR_ACCESS_PARTIAL) is
 * not reported. Nonzero, as at first: it is. For the whole process. Returns what it was. */
OR_API uint32_t orSanitizerPossible(uint32_t report);
/* Copies device memory to the host's while the host knows, by the order that the program has asked
 * for, that all that was to write it is over; orErrorNotReady otherwise. Waits for nothing and
 * queues nothing. orErrorNotSupported on a device whose factory has no `map`. */
OR_API orError_t orSanitizerPeek(void *to, const void *from, size_t bytes);
/* The name under which the calling thread's copies and fills are reported from now on, null for
 * the core's own ("orMemcpyAsync"); it must stay until it is replaced. Returns the one before. */
OR_API const char *orSanitizerOperation(const char *operation);
/* The number of the first conflict that calls of this thread have found since it was last asked, or
 * 0. `look`, which may be null, is called with it, and no lock held; its stacks are valid until it
 * returns. */
OR_API uint64_t orSanitizerFound(void (*look)(const orRaceReport *report, void *context),
                                 void *context);

/* The same of the oldest conflict that a thread has found in no call (orSanitizerOptions.touched),
 * and has not asked for. */
OR_API uint64_t orSanitizerLeft(void (*look)(const orRaceReport *report, void *context),
                                void *context);

/* How host threads order each other. One that was begun knows what it has waited for itself since
 * then; so does the main thread while another one does. All others count as ordered: they know what
 * anybody knows, and what they learn all know. While no thread has been begun these calls cost a
 * load. An object is an address, of whatever is there. */

/* Who acquires the object from now on knows what the calling thread knows now. */
OR_API void orSanitizerRelease(const void *object);
/* Null: the calling thread knows what anybody knows. */
OR_API void orSanitizerAcquire(const void *object);
/* What is at this address later is another one. */
OR_API void orSanitizerObjectGone(const void *object);
/* The calling thread is about to start one that will say that it begins, with the same object. If
 * it cannot, the object goes. */
OR_API void orSanitizerThreadStarts(const void *object);
OR_API void orSanitizerThreadBegins(const void *object);
OR_API void orSanitizerThreadEnds(void);
/* The calling one's number, or that of whom it acts for; 0: it is not told apart. */
OR_API uint64_t orSanitizerThread(void);

/* Order that is not made by this library's calls. */

/* An external event that nobody waits for yet stands for what is queued on `stream` so far, as
 * if it had been recorded there: who waits for it knows of that and of nothing else, whenever it
 * is signalled. */
OR_API orError_t orSanitizerEventAfter(orEvent_t event, orStream_t stream);
/* The host, in any of its threads, has learned by other means that the event is done. */
OR_API orError_t orSanitizerEventOver(orEvent_t event);
/* What is told of `stream` from now on happens elsewhere, and events alone say when it is over:
 * synchronising the device does not. Its memory is not freed before. */
OR_API orError_t orSanitizerMarkExternal(orStream_t stream);
/* An allocator of pinned memory gives these bytes to others only when what is queued on `stream` so
 * far is over; 0: they are given back. */
OR_API orError_t orSanitizerUsed(const void *data, size_t bytes, orStream_t stream);
/* A block that orMallocHost gave at `ptr`, and that nobody uses, is about to be handed out again:
 * it can be guarded from now on. Its bytes are lost. */
OR_API orError_t orSanitizerHostBlock(void *ptr);
/* Nonzero: what the calling thread touches is told by somebody else, and what it waits for orders
 * nothing for the program, which has not asked for it. Returns what it was. */
OR_API uint32_t orSanitizerIgnore(uint32_t ignore);

#ifdef __cplusplus
}
#endif
#endif
