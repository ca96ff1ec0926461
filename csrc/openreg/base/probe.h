/*
 * What happens in the runtime, for whoever wants to know: the sanitizer, the trace, faults, the
 * watchdog, the schedule, and at a reset the caching allocator.
 *
 * A tool is an orTool, added by a constructor: a function for each event that it wants. No file of
 * the runtime names one. Where an event happens the runtime asks for its bit in a mask, one relaxed
 * load and a branch while no tool wants it, and calls the tools, in no order that it promises.
 *
 * A tool is called on the thread on which the event happens, with the locks held that are listed
 * here; under them it takes none but its own, of rank OR_RANK_TOOLS, and does not sleep.
 */
#ifndef OPENREG_PROBE_H
#define OPENREG_PROBE_H

/* Of the layers above: only pointed to here. */
typedef struct orStream orStream;
typedef struct orTask orTask;
typedef struct orCell orCell;

typedef enum orProbeEvent {
  /* These come to tools that are off, too: they set something up, or end what was begun. */
  /* Of a device, before it has a stream; sets `error` if it must not have one; a failed first use
   * is repeated. That of first uses held. */
  OR_PROBE_FIRST_USE,
  /* The same orProbe after the wait, if a tool wanted to know that it began; `fails` if it was for
   * nothing; none held. */
  OR_PROBE_HOST_WAITED,
  /* A task with a planted fault is about to run: slot, task; sets `fails` if it must not; none
   * held. */
  OR_PROBE_INJECT,
  OR_PROBE_CELL_FREED, /* cell, in which something is kept; none held */
  OR_PROBE_IS_RESET,   /* device, which is back; none held */
  /* And these while the tool is on. */
  OR_PROBE_QUEUES, /* a task is about to be queued; none held */
  /* call, stream, number, kind, internal; of a copy or fill dst, src, bytes; none held */
  OR_PROBE_QUEUED,
  OR_PROBE_COMMIT, /* a kernel, copy or fill: slot, task, which may get a fault; slot->lock held */
  /* Of a copy or fill to be queued: call, stream, dst, src, bytes; of a kernel: call, stream,
   * accesses, count (0: it has not said); none held. */
  OR_PROBE_ACCESS,
  OR_PROBE_STARTS, /* a task is about to run, or to be cancelled: slot; none held */
  OR_PROBE_RAN, /* work: slot (null: by the host), task, number, worker, began, ended; none held */
  OR_PROBE_RECORD,     /* stream, cell, replaced; the event's and the stream's held */
  OR_PROBE_WAIT,       /* stream, cell; the stream's held */
  OR_PROBE_SIGNAL,     /* of an external event, before it is done: cell; none held */
  OR_PROBE_RESET,      /* device, whose streams have cancelled their work; none held */
  OR_PROBE_HOST_WAITS, /* for what is queued: call, device, stream, cell, ordered; none held */
  /* That what is queued on a stream, or a cell, is done; everybody; none held, or the stream's with
   * the kind of a host function. */
  OR_PROBE_HOST_ACQUIRES,
  OR_PROBE_LOOKED,     /* an allocator, at how far a stream is: stream; the cache's held, or none */
  OR_PROBE_ALLOCATION, /* device, bytes; sets `fails`; none held */
  OR_PROBE_BLOCK_TAKEN, /* a block was handed out: dst, bytes, stream; none held */
  /* A block is being freed, and this stream is recorded on it: dst, bytes, stream; ... */
  OR_PROBE_BLOCK_USED,
  OR_PROBE_BLOCK_FREED, /* ... its allocation stream; the cache's held */
  OR_PROBE_RANGE_OVER,  /* what had the memory is over: dst, bytes; none held, or the cache's */
  OR_PROBE_EVENTS
} orProbeEvent;
_Static_assert(OR_PROBE_EVENTS <= 32, "orProbesOn has a bit for every event");

typedef struct orProbe {
  const char *call; /* of the public interface; null: nobody's wait for its own sake */
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
  const char *fails; /* set: why it is to fail, for the message */
  orError_t error;   /* set: why a device cannot be used, in the last error's message */
  bool everybody;    /* all threads of the host know, not the calling one alone */
  bool begun;        /* a wait, of which tools have been told */
  void *kept;        /* a tool's, from OR_PROBE_HOST_WAITS to OR_PROBE_HOST_WAITED */
} orProbe;

typedef struct orTool {
  void (*on[OR_PROBE_EVENTS])(orProbe *probe);
  _Atomic bool active; /* written under a lock of probe.c */
  struct orTool *next;
} orTool;

/* By a constructor. */
void orToolAdd(orTool *tool);
/* Any thread. An event that is being told meanwhile may reach it still, or not yet. */
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

/* Around a wait of a host thread; `wait` is for the first to fill and the second to use. */
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

#endif
