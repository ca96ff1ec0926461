/*
 * Tracing: a bounded buffer of launches, tasks and waits.
 *
 * `current` is the number of the session, or 0. It is written under `lock`, which also guards
 * `session` against a second start or stop; writers of records take no lock.
 *
 * Note [Writers of a session]: a writer increments `writers`, then reads `current`. orTraceStop
 * sets `current` to 0, then waits until `writers` is 0. All are sequentially consistent, so one of
 * the two sees the other. The buffer therefore stays while a thread writes to it, each place is
 * written by one thread, and the records are the caller's to read when orTraceStop returns. Writers
 * never wait. If the buffer is full, a record is counted and lost: the first ones are kept, which
 * have the causes of the others.
 *
 * The buffer is reserved as a whole; unwritten pages take no memory.
 *
 * The thread-locals are the thread's number, its tag with the tag's session, and the start of its
 * present launch.
 */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stream/stream.h"

static _Atomic uint32_t current; /* the session's number; 0: tracing is off */

static struct {
  orMutex lock;
  /* under `lock`, or by writers while `current` is not 0; as `capacity` and `since` */
  orTraceRecord *records;
  size_t capacity;
  uint64_t since;
  uint32_t latest;                               /* under `lock`; the latest session's number */
  _Alignas(OR_CACHE_LINE) _Atomic uint64_t next; /* places requested so far */
  _Atomic int writers;
} session = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_TOOLS)};

static _Thread_local struct {
  int number;
  uint32_t tag_session;
  uint64_t tag;
  uint64_t launch_began;
} thread;

static uint64_t tagIn(uint32_t number) { return thread.tag_session == number ? thread.tag : 0; }

/* Drops what began before the session. See Note [Writers of a session]. */
static void keep(orTraceRecord *record) {
  atomic_fetch_add_explicit(&session.writers, 1, memory_order_seq_cst);
  uint32_t number = atomic_load_explicit(&current, memory_order_seq_cst);
  if (number && record->start_ns >= session.since) {
    uint64_t place = atomic_fetch_add_explicit(&session.next, 1, memory_order_relaxed);
    if (record->lane < 0) record->tag = tagIn(number);
    if (place < session.capacity) session.records[place] = *record;
  }
  atomic_fetch_sub_explicit(&session.writers, 1, memory_order_seq_cst);
}

static void emit(orTraceRecord record) {
  if (OR_UNLIKELY(!thread.number)) thread.number = (int)gettid();
  record.thread = thread.number;
  if (record.stream) record.stream_number = (int)orHandleIndex(record.stream);
  keep(&record);
}

/* ---- the events that it records ---- */

static void onQueues(orProbe *p) {
  (void)p;
  thread.launch_began = orNow();
}

static void onQueued(orProbe *p) {
  emit((orTraceRecord){.kind = orTraceLaunch,
                       .name = p->call,
                       .device = orHandleDevice(p->stream),
                       .lane = -1,
                       .stream = p->stream,
                       .correlation = orCorrelation(p->stream, p->number),
                       .start_ns = thread.launch_began,
                       .end_ns = orNow()});
}

static void onRan(orProbe *p) {
  static const orTraceKind kinds[] = {[OR_KIND_KERNEL] = orTraceKernel,
                                      [OR_KIND_HOST_FUNC] = orTraceHostFunc,
                                      [OR_KIND_COPY] = orTraceMemcpy,
                                      [OR_KIND_SET] = orTraceMemset};
  OR_COVERS(kinds, OR_KIND_SET + 1);
  const orTask *t = p->task;
  const orStream *s = p->slot;
  emit((orTraceRecord){.kind = kinds[t->kind],
                       .name = t->name,
                       .device = s ? s->device : -1,
                       .lane = p->worker,
                       .stream = s ? s->last_handle : 0,
                       .correlation = s ? orCorrelation(s->last_handle, p->number) : 0,
                       .start_ns = p->began,
                       .end_ns = p->ended,
                       .bytes = t->kind == OR_KIND_COPY  ? t->u.copy.bytes
                                : t->kind == OR_KIND_SET ? t->u.set.bytes
                                                         : 0});
}

static void onHostWaits(orProbe *p) { p->began = orNow(); }

static void onHostWaited(orProbe *p) {
  if (p->call)
    emit((orTraceRecord){.kind = orTraceSynchronize,
                         .name = p->call,
                         .device = p->device,
                         .lane = -1,
                         .stream = p->stream,
                         .start_ns = p->began,
                         .end_ns = orNow()});
}

static orTool tool = {.on = {[OR_PROBE_QUEUES] = onQueues,
                             [OR_PROBE_QUEUED] = onQueued,
                             [OR_PROBE_RAN] = onRan,
                             [OR_PROBE_HOST_WAITS] = onHostWaits,
                             [OR_PROBE_HOST_WAITED] = onHostWaited}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

/* ---- public ---- */

uint64_t orTraceTag(uint64_t tag) {
  uint32_t number = atomic_load_explicit(&current, memory_order_relaxed);
  uint64_t before = tagIn(number);
  thread.tag = tag;
  thread.tag_session = number;
  return before;
}

static orError_t startSession(size_t capacity) {
  if (current) return orFail(orErrorAlreadyExists, "orTraceStart: tracing is on already");
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
  atomic_store_explicit(&current, session.latest, memory_order_seq_cst);
  orToolSwitch(&tool, true);
  return orSuccess;
}

orError_t orTraceStart(size_t capacity) {
  OR_TRY(orEnter());
  if (!capacity) capacity = orConfigGet()->trace_records;
  if (capacity > SIZE_MAX / 2 / sizeof(orTraceRecord))
    return orFail(orErrorInvalidValue, "orTraceStart: %zu records are out of range: at most %zu",
                  capacity, SIZE_MAX / 2 / sizeof(orTraceRecord));
  orMutexLock(&session.lock);
  orError_t error = startSession(capacity);
  orMutexUnlock(&session.lock);
  return error;
}

static void stopSession(orTrace *trace) {
  orToolSwitch(&tool, false);
  atomic_store_explicit(&current, 0, memory_order_seq_cst);
  while (atomic_load_explicit(&session.writers, memory_order_seq_cst)) sched_yield();
  uint64_t asked = atomic_load_explicit(&session.next, memory_order_relaxed);
  *trace = (orTrace){.record_size = sizeof(orTraceRecord),
                     .records = session.records,
                     .count = asked < session.capacity ? asked : session.capacity,
                     .capacity = session.capacity,
                     .start_ns = session.since};
  trace->dropped = asked - trace->count;
}

orError_t orTraceStop(orTrace *trace) {
  OR_TRY(orEnter());
  if (!trace) return orFail(orErrorInvalidValue, "orTraceStop: null result");
  OR_TRY(OR_CHECK_FILL(orTrace, trace, start_ns));
  orTrace from;
  orMutexLock(&session.lock);
  bool on = current;
  if (on) stopSession(&from);
  orMutexUnlock(&session.lock);
  if (!on) return orFail(orErrorNotFound, "orTraceStop: tracing is not on");
  return OR_FILL(orTrace, trace, &from, start_ns);
}

void orTraceFree(orTrace *trace) {
  if (!trace) return;
  if (trace->records) orUnmap(trace->records, trace->capacity * sizeof(orTraceRecord));
  trace->records = NULL;
  trace->count = 0;
}
