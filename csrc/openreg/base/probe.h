/*
 * Events of the runtime, to which tools subscribe: the sanitizer, the trace, faults, the watchdog,
 * the schedule, and at a reset the caching allocator.
 *
 * A tool is an orTool, a function for each event that it handles, added by a constructor. The
 * runtime names no tool. Where an event happens, it tests the event's bit in a mask, which costs
 * one relaxed load and a branch while no tool handles it, and then calls the tools, in any order.
 *
 * A tool runs on the thread on which the event happens. Each event lists its fields and the locks
 * that are held. Under them a tool takes only its own lock, of rank OR_RANK_TOOLS, and does not
 * sleep.
 */
#pragma once

/* Types of higher layers, used as pointers only. */
typedef struct orStream orStream;
typedef struct orTask orTask;
typedef struct orCell orCell;

typedef enum orProbeEvent {
  /* The next five reach tools that are switched off, too: they set something up, or end it. */
  /* A device is used for the first time and has no stream yet. A tool sets `error` to make that
   * fail; a failed first use is repeated. Lock of first uses held. */
  OR_PROBE_FIRST_USE,
  /* The orProbe of OR_PROBE_HOST_WAITS, after the wait; `fails` is set if the wait failed; none
   * held. */
  OR_PROBE_HOST_WAITED,
  /* A task with a planted fault is about to run: slot, task; sets `fails` if it must not; none
   * held. */
  OR_PROBE_INJECT,
  OR_PROBE_CELL_FREED, /* cell, whose `kept` is not null; none held */
  OR_PROBE_IS_RESET,   /* device, which is usable again; none held */
  /* The rest reaches tools that are on. */
  OR_PROBE_QUEUES, /* a task is about to be queued; none held */
  /* call, stream, number, kind, internal; of a copy or fill dst, src, bytes; none held */
  OR_PROBE_QUEUED,
  OR_PROBE_COMMIT, /* a kernel, copy or fill: slot, task, which may get a fault; slot->lock held */
  /* A copy or fill is about to be queued: call, stream, dst, src, bytes; or a kernel: call, stream,
   * accesses, count (0: not declared); none held. */
  OR_PROBE_ACCESS,
  OR_PROBE_STARTS, /* a task is about to run, or to be cancelled: slot; none held */
  OR_PROBE_RAN, /* work: slot (null: by the host), task, number, worker, began, ended; none held */
  OR_PROBE_RECORD,     /* stream, cell, replaced; the event's and the stream's held */
  OR_PROBE_WAIT,       /* stream, cell; the stream's held */
  OR_PROBE_SIGNAL,     /* of an external event, before it is done: cell; none held */
  OR_PROBE_RESET,      /* device, whose streams have cancelled their work; none held */
  OR_PROBE_HOST_WAITS, /* for queued work: call, device, stream, cell, ordered; none held */
  /* A query is about to answer: stream, cell as below, number (nonzero: it is done). A tool sets
   * `fails` if the answer must be "not ready"; none held. */
  OR_PROBE_HOST_QUERIES,
  /* The host has seen that a cell, or all that is queued on a stream, is done: stream, cell,
   * everybody; none held, or the stream's with the kind of a host function. */
  OR_PROBE_HOST_ACQUIRES,
  OR_PROBE_LOOKED, /* an allocator read a stream's progress: stream; the cache's held, or none */
  OR_PROBE_ALLOCATION, /* device, bytes; sets `fails`; none held */
  /* A block was handed out: dst, bytes, stream, number (its private pool; 0: none), kind (an
   * OR_POOL_SMALL or the like), count (the size of the largest block that could have served); none
   * held */
  OR_PROBE_BLOCK_TAKEN,
  OR_PROBE_BLOCK_FREES, /* a block is about to be freed: dst; none held */
  /* A block is being freed, and this stream is recorded on it: dst, bytes, stream; ... */
  OR_PROBE_BLOCK_USED,
  /* ... its allocation stream; number and kind as above; the cache's held */
  OR_PROBE_BLOCK_FREED,
  OR_PROBE_FREED,      /* the caller's free is over: dst; none held */
  OR_PROBE_RANGE_OVER, /* the memory's owner is gone: dst, bytes; none held, or the cache's */
  OR_PROBE_EVENTS
} orProbeEvent;
_Static_assert(OR_PROBE_EVENTS <= 32, "orProbesOn has a bit for every event");

typedef struct orProbe {
  const char *call; /* of the public interface; null: the wait is part of another call */
  orStream *slot;
  orStream_t stream; /* may be 0: all of the device's; of an access, the default one */
  int device;        /* -1: all */
  int worker;
  uint64_t number, began, ended;
  orTask *task;
  orCell *cell;
  const orCell *replaced;
  const orAccess *accesses;
  size_t count;
  const void *dst, *src;
  size_t bytes;
  int kind;          /* an orTaskKind */
  bool internal;     /* of a task that is queued, as there */
  bool ordered;      /* the call promises its caller that what it waited for is done */
  const char *fails; /* set by a tool that makes the operation fail: the reason, for the message */
  orError_t error;   /* set by a tool: why a device cannot be used, in the last error's message */
  bool everybody;    /* for all threads of the host, not the calling one alone */
  bool begun;        /* OR_PROBE_HOST_WAITS has been reported */
  void *kept;        /* a tool's, from OR_PROBE_HOST_WAITS to OR_PROBE_HOST_WAITED */
} orProbe;

typedef struct orTool {
  void (*on[OR_PROBE_EVENTS])(orProbe *probe);
  _Atomic bool active; /* written under a lock of probe.c */
  struct orTool *next;
} orTool;

/* Called by a constructor. */
void orToolAdd(orTool *tool);
/* Any thread. An event that is being reported meanwhile may or may not reach the tool. */
void orToolSwitch(orTool *tool, bool on);

extern OR_HIDDEN _Atomic uint32_t orProbesOn;
static inline bool orProbeOn(orProbeEvent event) {
  return OR_UNLIKELY(atomic_load_explicit(&orProbesOn, memory_order_relaxed) >> event & 1);
}
__attribute__((cold)) void orProbeCall(orProbeEvent event, orProbe *probe);
#define OR_PROBE(event, ...)                                           \
  do {                                                                 \
    if (orProbeOn(event)) orProbeCall(event, &(orProbe){__VA_ARGS__}); \
  } while (0)

/* Around a wait of a host thread: the first fills `wait`, the second reads it. */
#define OR_PROBE_WAITS(wait, ...)                      \
  do {                                                 \
    (wait)->begun = orProbeOn(OR_PROBE_HOST_WAITS);    \
    if ((wait)->begun) {                               \
      *(wait) = (orProbe){.begun = true, __VA_ARGS__}; \
      orProbeCall(OR_PROBE_HOST_WAITS, wait);          \
    }                                                  \
  } while (0)
static inline orError_t orProbeWaited(orProbe *wait, orError_t error) {
  if (OR_LIKELY(!wait->begun)) return error;
  if (error) wait->fails = "what it waits for will not run";
  orProbeCall(OR_PROBE_HOST_WAITED, wait);
  return error;
}
