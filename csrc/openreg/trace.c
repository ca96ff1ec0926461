/*
 * Tracing: a bounded buffer of what was launched, what ran, and what was waited for.
 *
 * `orTraceSession` is all that anybody reads while tracing is off: one relaxed load. It is 0 then,
 * else the number of the session. It is written under `lock`, which also guards `session` against a
 * second start or stop; writers of records take no lock.
 *
 * A writer counts itself in `writers` and looks at orTraceSession then; orTraceStop makes that 0
 * first and waits for the count to be 0 then (all sequentially consistent, so that one of them sees
 * the other). So the session's buffer stays while anybody writes to it, each place is written by
 * one thread, and what was written is the caller's to read when orTraceStop returns. Writers wait
 * for nobody. Where there is no place left, a record is counted and lost: the first ones are kept,
 * so that what caused what can still be told.
 *
 * The buffer is reserved as a whole; pages that nothing was written to take no memory.
 *
 * The thread-locals are the thread's own: its number, its tag and of which session that is, and
 * when its present launch began.
 */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core.h"

_Atomic uint32_t orTraceSession;

static struct {
  orMutex lock;
  orTraceRecord *records; /* lock, and writers while the switch is on; likewise `capacity` and `since` */
  size_t capacity;
  uint64_t since;
  uint32_t latest;                               /* lock; the number of the latest session */
  _Alignas(OR_CACHE_LINE) _Atomic uint64_t next; /* places asked for */
  _Atomic int writers;
} session = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF)};

static _Thread_local struct {
  int number;
  uint32_t tag_session;
  uint64_t tag;
  uint64_t launch_began;
} thread;

static int threadNumber(void) {
  if (OR_UNLIKELY(!thread.number)) thread.number = (int)syscall(SYS_gettid);
  return thread.number;
}

static uint64_t tagIn(uint32_t number) { return thread.tag_session == number ? thread.tag : 0; }

/* What began before the session is not the session's. */
static void keep(orTraceRecord *record) {
  atomic_fetch_add_explicit(&session.writers, 1, memory_order_seq_cst);
  uint32_t number = atomic_load_explicit(&orTraceSession, memory_order_seq_cst);
  if (number && record->start_ns >= session.since) {
    uint64_t place = atomic_fetch_add_explicit(&session.next, 1, memory_order_relaxed);
    if (record->lane < 0) record->tag = tagIn(number);
    if (place < session.capacity) session.records[place] = *record;
  }
  atomic_fetch_sub_explicit(&session.writers, 1, memory_order_seq_cst);
}

void orTraceEmit(orTraceRecord record) {
  record.thread = threadNumber();
  if (record.stream) record.stream_number = (int)orHandleIndex(record.stream);
  keep(&record);
}

void orTraceLaunchBegins(void) { thread.launch_began = orNow(); }

void orTraceLaunchEnds(const char *call, orStream_t stream, uint64_t correlation) {
  orTraceEmit((orTraceRecord){.kind = orTraceLaunch,
                              .name = call,
                              .device = orHandleDevice(stream),
                              .lane = -1,
                              .stream = stream,
                              .correlation = correlation,
                              .start_ns = thread.launch_began,
                              .end_ns = orNow()});
}

void orTraceWaited(const char *call, int device, orStream_t stream, uint64_t began) {
  orTraceEmit((orTraceRecord){.kind = orTraceSynchronize,
                              .name = call,
                              .device = device,
                              .lane = -1,
                              .stream = stream,
                              .start_ns = began,
                              .end_ns = orNow()});
}

/* ---- public ---- */

uint64_t orTraceTag(uint64_t tag) {
  uint32_t number = atomic_load_explicit(&orTraceSession, memory_order_relaxed);
  uint64_t before = tagIn(number);
  thread.tag = tag;
  thread.tag_session = number;
  return before;
}

static orError_t startSession(size_t capacity) {
  if (orTraceOn()) return orFail(orErrorAlreadyExists, "orTraceStart: tracing is on already");
  void *p = mmap(NULL, capacity * sizeof(orTraceRecord), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return orFail(orErrorMemoryAllocation, "orTraceStart: no room for %zu records: %s", capacity,
                  strerror(errno));
  session.records = p;
  session.capacity = capacity;
  session.since = orNow();
  atomic_store_explicit(&session.next, 0, memory_order_relaxed);
  if (!++session.latest) session.latest = 1;
  atomic_store_explicit(&orTraceSession, session.latest, memory_order_seq_cst);
  return orSuccess;
}

orError_t orTraceStart(size_t capacity) {
  OR_TRY(orEnter());
  if (!capacity) capacity = orConfigGet()->trace_records;
  if (capacity > SIZE_MAX / 2 / sizeof(orTraceRecord))
    return orFail(orErrorInvalidValue, "orTraceStart: %zu records; at most %zu", capacity,
                  SIZE_MAX / 2 / sizeof(orTraceRecord));
  orMutexLock(&session.lock);
  orError_t error = startSession(capacity);
  orMutexUnlock(&session.lock);
  return error;
}

static void stopSession(orTrace *trace) {
  atomic_store_explicit(&orTraceSession, 0, memory_order_seq_cst);
  while (atomic_load_explicit(&session.writers, memory_order_seq_cst)) sched_yield();
  uint64_t asked = atomic_load_explicit(&session.next, memory_order_relaxed);
  *trace = (orTrace){.records = session.records,
                     .count = asked < session.capacity ? asked : session.capacity,
                     .capacity = session.capacity,
                     .start_ns = session.since};
  trace->dropped = asked - trace->count;
}

orError_t orTraceStop(orTrace *trace) {
  OR_TRY(orEnter());
  if (!trace) return orFail(orErrorInvalidValue, "orTraceStop: null result");
  orMutexLock(&session.lock);
  bool on = orTraceOn();
  if (on) stopSession(trace);
  orMutexUnlock(&session.lock);
  return on ? orSuccess : orFail(orErrorNotFound, "orTraceStop: tracing is not on");
}

void orTraceFree(orTrace *trace) {
  if (trace->records) munmap(trace->records, trace->capacity * sizeof(orTraceRecord));
  *trace = (orTrace){.records = NULL};
}
