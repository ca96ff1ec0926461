/*
 * The sanitizer: finds accesses to the same bytes that nothing orders.
 *
 * It follows the order that the program asked for (streams, events, waits, synchronisation), in the
 * order of the calls, not the order in which tasks happen to run. The same program gives the same
 * report each time.
 *
 * Pinned memory under a queued copy is protected until the host has waited for the copy. An access
 * by the host outside of any call, such as through a pointer, faults, is reported once for each
 * copy, and then continues. Memory that orMallocHost returned while the sanitizer was off is not
 * protected.
 *
 * All host threads share one clock, until orSanitizerThreadStarts names threads that have clocks of
 * their own. Work behind an external event that is not signalled is checked when the event is
 * signalled, by the signalling thread, because until then the host may still order it. A host
 * function is assumed to tell the host about everything that was queued before it. One pair of
 * operations on the same streams and address is one report, until the reports are cleared.
 *
 * If the sanitizer gets no host memory for its own tables, it prints one line and ends the process,
 * because it would miss races from there on.
 */
#ifndef OPENREG_SANITIZER_H
#define OPENREG_SANITIZER_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OR_ACCESS_DIMS = 8 };

/* Bits of `write` below. */
enum {
  OR_ACCESS_WRITES = 1,    /* writes, or reads and writes; else it reads */
  OR_ACCESS_ALLOCATES = 2, /* of a report alone: handed out the memory that `later` reads */
  OR_ACCESS_PARTIAL = 4,   /* touches some of these bytes; which is not known */
  OR_ACCESS_MOVES = 8,     /* reads them to put them as they are where the next one writes, in
                              device memory: that nothing has written them is no error then */
  OR_ACCESS_FREES = 16     /* of a report alone: freed the memory that `earlier` may still use */
};

/* Bytes that an operator reads or writes: `width` bytes at `data`, repeated count[i] times at a
 * distance of stride[i] bytes for each of `dims` dimensions, in any order. If there are more
 * dimensions than OR_ACCESS_DIMS, some are given as their hull. */
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

/* What would have ordered the two accesses of a report; and, as bits beside it, what else is known
 * of their order. */
enum {
  OR_MISSING_WAIT = 1,      /* the later access's stream waits for a stream */
  OR_MISSING_HOST_WAIT = 2, /* the host waits for a stream */
  OR_MISSING_RECORD = 3,    /* a stream is recorded on the memory before that is freed */
  OR_MISSING_WORK = 4,      /* somebody waits for the external work that is the earlier access */
  OR_MISSING_WRITE = 5,     /* a write of the memory */
  OR_MISSING_KIND = 7,      /* a mask */
  OR_ORDER_LOST = 8,        /* there is a wait, for an event that had been recorded again */
  OR_ORDER_ELSEWHERE = 16   /* another thread of the host has waited for the earlier access */
};

/* What a report is about. Of a graph, `earlier` is an access in its capture. */
typedef enum orReportKind {
  orReportConflict = 0,      /* two accesses that nothing orders; or a read of unwritten memory */
  orReportFreedInput = 1,    /* a replay uses what `later` freed after the capture */
  orReportNotReplayed = 2,   /* `later` reads what only a replay writes, and there was none */
  orReportReplacedInput = 3, /* possible: the program's variables hold another tensor at `later` */
  orReportOverwritten = 4,   /* `later` reads the output of a call that a later one overwrote */
  orReportFirstCall = 5,     /* possible: a replay repeats what a first call made */
  orReportPrograms = 6       /* of no graph: two programs of one kernel's grid touch the memory */
} orReportKind;

typedef struct orRaceReport {
  uint64_t number; /* from 1 */
  orRaceAccess earlier, later;
  const void *begin, *end; /* that both touch, hull */
  /* The owner of the memory: "openreg:0", "pinned host memory", "openreg:0, reused without
   * record_stream". */
  char memory[64];
  char advice[256];  /* the call that would have ordered them */
  uint32_t missing;  /* OR_MISSING_WAIT and the like */
  orStream_t stream; /* to wait for, or to record; 0: none */
  /* The stack of the memory's first use, as orRaceAccess.stack. Of memory that was freed since the
   * earlier access, the use before that. */
  void *allocation;
  orReportKind kind;
  char name[64]; /* of the memory, in the program, if the capture's owner has given it one */
} orRaceReport;

/* A wait. Moments are numbers that grow with time; the moment of an access is that of its call. */
typedef struct orRaceEdge {
  orStream_t from, to;       /* 0: of `from` all of a device, of `to` the host */
  uint64_t recorded, waited; /* moments: `to` comes after what was queued on `from` until then */
} orRaceEdge;

enum { OR_RACE_EDGES = 32 };

/* The order between the two accesses of a report. */
typedef struct orRaceOrder {
  size_t size;             /* of this structure */
  uint64_t earlier, later; /* moments of the accesses */
  size_t count;            /* of the newest waits that came after the earlier access, or that are
                               from its stream to the later one's */
  orRaceEdge edges[OR_RACE_EDGES];
} orRaceOrder;

typedef struct orSanitizerOptions {
  size_t size; /* of this structure */
  /* Returns the caller's stack, which is kept with the accesses; may be null. Called on the thread
   * of the access with no lock held. */
  void *(*capture)(void *context);
  void (*release)(void *stack, void *context); /* no lock held; on any thread */
  void *context;
  size_t reports; /* kept, at most; the rest is counted, and passed on by orSanitizerFound. 0:
                   * 1000 */
  /* May be null. Called when the calling thread has touched pinned memory under a queued copy
   * outside of any call of this library; orSanitizerFound then has the report. It runs in a signal
   * handler, in the middle of that instruction, which continues afterwards; no lock is held.
   * `capture` runs there too. */
  void (*touched)(void *context);
  /* May be null. Returns the thread (orSanitizerThread) for which the calling thread acts, if the
   * calling thread has no clock of its own; 0: for none. It may not call this library. */
  uint64_t (*thread)(void);
  /* May be null. Called in the call that queues, when a stream is about to use pinned memory for
   * the first time since the sanitizer was enabled: from now on the host's accesses to such memory
   * may conflict. No lock is held. Threads that arrive at the same time each call it. */
  void (*pinned)(void *context);
} orSanitizerOptions;

OR_API orError_t orSanitizerEnable(const orSanitizerOptions *options);
OR_API orError_t orSanitizerDisable(void);
/* The address of a flag that is nonzero while the sanitizer is enabled, for callers' fast path: get
 * the address once, and read the flag with relaxed order. */
OR_API const uint32_t *orSanitizerActive(void);

/* Reports the accesses of the task that the calling thread is about to queue on `stream` (0: of the
 * host's own access that is about to happen). Copies and fills of the core report their own
 * accesses; kernels do not. orSanitizerFound has the conflicts. Memory that is neither a device's
 * nor pinned never conflicts. */
OR_API orError_t orSanitizerAccess(orStream_t stream, const char *operation,
                                   const orMemoryAccess *accesses, size_t count);
/* Copies reports from number `first` on, up to `capacity` of `report_size` (sizeof(orRaceReport))
 * bytes. `total` is the number of reports so far, including those not kept. */
OR_API orError_t orSanitizerReports(uint64_t first, orRaceReport *reports, size_t report_size,
                                    size_t capacity, size_t *count, uint64_t *total);
/* The order of the report with this number. orErrorInvalidValue if it is not kept. */
OR_API orError_t orSanitizerOrder(uint64_t number, orRaceOrder *order);
OR_API orError_t orSanitizerClearReports(void);
/* Nonzero: an access that conflicts, or that is reported while a conflict waits for
 * orSanitizerFound, will not be queued by the caller. The sanitizer does not store it, and
 * orSanitizerFound returns each conflict. 0, as at first: the access will be queued, and
 * orSanitizerFound returns a report once. Applies to the whole process, also while the sanitizer is
 * off. Returns the previous value. */
OR_API uint32_t orSanitizerRefuse(uint32_t refuse);
/* Nonzero: also reports reads of device memory that nothing has written since the caching allocator
 * handed it out; `earlier` is then the allocation. Covers memory that is handed out from now on. A
 * kernel that reports no accesses may have written all of it. 0, as at first: such reads are not
 * reported. Applies to the whole process, also while the sanitizer is off. Returns the previous
 * value. */
OR_API uint32_t orSanitizerInitcheck(uint32_t check);
/* 0: does not report a conflict if one of the accesses is partial (OR_ACCESS_PARTIAL). Nonzero, as
 * at first: reports it. Applies to the whole process. Returns the previous value. */
OR_API uint32_t orSanitizerPossible(uint32_t report);
/* Copies device memory to host memory if, by the order that the program has asked for, everything
 * that writes it is over; otherwise orErrorNotReady. Waits for nothing and queues nothing.
 * orErrorNotSupported on a device whose factory has no `map`. */
OR_API orError_t orSanitizerPeek(void *to, const void *from, size_t bytes);
/* For the owner of a capture, before its end: passes the memory outside of the graph's own pool
 * that its work uses, each block once, to `visit`, which may write the program's name for it to
 * `name`. No lock is held. */
OR_API orError_t orSanitizerInputs(orStream_t stream,
                                   void (*visit)(const void *begin, size_t bytes, char name[64],
                                                 void *context),
                                   void *context);
/* The same, for an owner that compares the addresses of all inputs with those of the capture before
 * each replay: that an input was freed is no error then. */
OR_API orError_t orSanitizerInputsChecked(orStream_t stream);
/* For the owner of the graph of this capture (orStreamGetCaptureInfo): the program's variables for
 * an input hold other memory now. If nothing has written the input since the last replay, the next
 * one is reported. */
OR_API orError_t orSanitizerInputReplaced(uint64_t capture, const void *begin);
/* What a layer above has found about a graph's memory. The stack of `later` is captured here. */
typedef struct orGraphFinding {
  size_t size; /* of this structure */
  orReportKind kind;
  const void *begin;
  size_t bytes;
  orStream_t stream;
  const char *earlier, *later; /* operations */
  void
      *stack; /* of the earlier one, from orSanitizerOptions.capture: the sanitizer's from now on */
} orGraphFinding;
OR_API orError_t orSanitizerFinding(const orGraphFinding *finding);
/* Sets the name under which the calling thread's copies and fills are reported from now on; null:
 * the core's own ("orMemcpyAsync"). The name must stay valid until it is replaced. Returns the
 * previous one. */
OR_API const char *orSanitizerOperation(const char *operation);
/* The number of the first conflict that calls of this thread have found since the last call of this
 * function, or 0. Calls `look`, which may be null, with the report and no lock held; its stacks are
 * valid until `look` returns. */
OR_API uint64_t orSanitizerFound(void (*look)(const orRaceReport *report, void *context),
                                 void *context);

/* The same for the oldest conflict that a thread has found outside of any call
 * (orSanitizerOptions.touched) and has not asked for. */
OR_API uint64_t orSanitizerLeft(void (*look)(const orRaceReport *report, void *context),
                                void *context);

/* How host threads order each other. A thread that called orSanitizerThreadBegins has a clock of
 * its own, which contains what the thread has waited for since then; so has the main thread while
 * there is another such thread. All other threads count as ordered: their clock contains what any
 * thread has waited for, and what they wait for counts for all. While no thread has begun, these
 * calls cost a load. An object is an address; what is there does not matter. */

/* Adds the calling thread's clock to the object's. A thread that acquires the object later is
 * ordered after everything before this call. */
OR_API void orSanitizerRelease(const void *object);
/* Adds the object's clock to the calling thread's. Null: adds the clocks of all threads. */
OR_API void orSanitizerAcquire(const void *object);
/* The object no longer exists; a later one at this address is a different one. */
OR_API void orSanitizerObjectGone(const void *object);
/* The calling thread is about to start one that will call orSanitizerThreadBegins with the same
 * object. If the thread cannot be started, the object is gone. */
OR_API void orSanitizerThreadStarts(const void *object);
OR_API void orSanitizerThreadBegins(const void *object);
OR_API void orSanitizerThreadEnds(void);
/* The number of the calling thread, or of the thread that it acts for; 0: it has no clock of its
 * own. */
OR_API uint64_t orSanitizerThread(void);

/* Order that is made by other means than this library's calls. */

/* An external event that no stream waits for yet stands for the work queued on `stream` so far, as
 * if it had been recorded there. A waiter is ordered after that work and nothing else, whenever the
 * event is signalled. */
OR_API orError_t orSanitizerEventAfter(orEvent_t event, orStream_t stream);
/* Reports that the calling thread has found by other means that the event is done. */
OR_API orError_t orSanitizerEventOver(orEvent_t event);
/* From now on, accesses that are reported for `stream` happen outside of it, and only events mark
 * their end: synchronising the device does not. Their memory is not freed earlier. */
OR_API orError_t orSanitizerMarkExternal(orStream_t stream);
/* Reports that an allocator of pinned memory hands out these bytes again only when the work queued
 * on `stream` so far is over. 0: the bytes are free again. */
OR_API orError_t orSanitizerUsed(const void *data, size_t bytes, orStream_t stream);
/* A block of orMallocHost at `ptr`, which nothing uses, is about to be handed out again, and can be
 * protected from now on. Its contents are lost. */
OR_API orError_t orSanitizerHostBlock(void *ptr);
/* The program, or a test, is over: blocks that were freed without orCacheRecordStream, and that no
 * allocation could have got since, are reported as possible races if a use of them is not over by
 * the order that the program has asked for. Call it before the caller's own synchronisation.
 * orSanitizerFound has the reports. */
OR_API orError_t orSanitizerJudgeFrees(void);
/* Nonzero: other calls report the accesses of the calling thread, its waits order nothing for the
 * program, because the program has not asked for them, and its frees are not judged. Returns the
 * previous value. */
OR_API uint32_t orSanitizerIgnore(uint32_t ignore);

#ifdef __cplusplus
}
#endif
#endif
