/*
 * Tracing: a record of every call that launches or waits and of every task that runs, with what is
 * needed to tell which is whose.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gate.h"
#include "later_device.h"
#include "openreg_sanitizer.h"

static orTrace trace = {.size = sizeof trace};

static void stop(void) {
  orTraceFree(&trace);
  ASSERT_OK(orTraceStop(&trace));
}

static int countOf(orTraceKind kind) {
  int count = 0;
  for (size_t i = 0; i < trace.count; i++) count += trace.records[i].kind == kind;
  return count;
}

/* The one launch, or the one thing launched, of a correlation. */
static const orTraceRecord *find(uint64_t correlation, bool launched) {
  const orTraceRecord *found = NULL;
  for (size_t i = 0; i < trace.count; i++) {
    const orTraceRecord *r = &trace.records[i];
    if (r->correlation != correlation || (r->kind == orTraceLaunch) == launched) continue;
    ASSERT_PTR(found, NULL);
    found = r;
  }
  ASSERT(found != NULL);
  return found;
}

static void nothing(void *context) { (void)context; }

static orError_t failingKernel(void *args) {
  (void)args;
  return orErrorInvalidValue;
}

typedef struct Expected {
  orTraceKind kind;
  const char *call, *name;
  orStream_t stream;
  int device;
  size_t bytes;
} Expected;

static void assertLaunched(uint64_t correlation, Expected e) {
  const orTraceRecord *l = find(correlation, false), *r = find(correlation, true);
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_STR(l->name, e.call);
  ASSERT_EQ(l->lane, -1);
  ASSERT_EQ(l->thread, syscall(SYS_gettid));
  ASSERT_EQ(r->kind, e.kind);
  ASSERT_STR(r->name, e.name);
  ASSERT_EQ(r->bytes, e.bytes);
  ASSERT_GE(r->lane, 0);
  ASSERT_LT(r->lane, info.limit);
  ASSERT_NE(r->thread, l->thread);
  for (const orTraceRecord *x = l; x; x = x == l ? r : NULL) {
    ASSERT_EQ(x->stream, e.stream);
    ASSERT_EQ(x->device, e.device);
    ASSERT_EQ(x->stream_number, l->stream_number);
    ASSERT_LE(x->start_ns, x->end_ns);
  }
  ASSERT_LE(l->start_ns, r->start_ns);
}

TEST(trace_records) {
  void *memory, *host;
  orStream_t standard;
  ASSERT_OK(orMalloc(&memory, 5000));
  ASSERT_OK(orMallocHost(&host, 5000));
  ASSERT_OK(orStreamGetDefault(&standard, 1));
  orStream_t s = newStream();
  uint64_t before = nowNs(), c[8];
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orLaunchSleep(s, 2000000));
  c[0] = orGetLastCorrelation();
  ASSERT_OK(orMemcpyAsync(host, memory, 5000, orMemcpyDefault, s));
  c[1] = orGetLastCorrelation();
  ASSERT_OK(orMemcpyAsync(memory, host, 4000, orMemcpyDefault, s));
  c[2] = orGetLastCorrelation();
  ASSERT_OK(orMemsetAsync(memory, 0, 3000, s));
  c[3] = orGetLastCorrelation();
  ASSERT_OK(orLaunchHostFunc(s, nothing, NULL));
  c[4] = orGetLastCorrelation();
  ASSERT_OK(orSetDevice(1));
  launch(OR_STREAM_DEFAULT, failingKernel, NULL); /* a failure is a record like any */
  c[5] = orGetLastCorrelation();
  for (int i = 0; i < 6; i++)
    for (int k = 0; k < i; k++) ASSERT_NE(c[i], c[k]);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorInvalidValue);
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  ASSERT_EQ(trace.dropped, 0);
  ASSERT_GE(trace.start_ns, before);
  static const char *const copy = "orMemcpyAsync", *const kernel = "orLaunchKernelEx";
  const Expected expected[] = {
      {orTraceKernel, kernel, "_sleep", s, 0, 0},
      {orTraceMemcpy, copy, "Memcpy DtoH", s, 0, 5000},
      {orTraceMemcpy, copy, "Memcpy HtoD", s, 0, 4000},
      {orTraceMemset, "orMemsetAsync", "Memset", s, 0, 3000},
      {orTraceHostFunc, "orLaunchHostFunc", "orLaunchHostFunc", s, 0, 0},
      {orTraceKernel, kernel, "test", standard, 1, 0}, /* the handle is recorded, never 0 */
  };
  for (int i = 0; i < 6; i++) assertLaunched(c[i], expected[i]);
  const orTraceRecord *sleeping = find(c[0], true), *after = find(c[1], true);
  ASSERT_GE(sleeping->end_ns - sleeping->start_ns, 2000000);
  ASSERT_GE(after->start_ns, sleeping->end_ns); /* one stream: one after the other */
  ASSERT_LE(after->end_ns, nowNs());
  ASSERT_NE(sleeping->stream_number, find(c[5], true)->stream_number);
}

/* Events and waits that are queued are calls of which the device shows nothing. */
TEST(trace_events_and_waits) {
  orStream_t s = newStream(), other = newStream();
  orEvent_t e = newEvent(0), gate = closeGate(s);
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(other, e));
  openGate(gate);
  ASSERT_OK(orDeviceSynchronize());
  stop();
  ASSERT_EQ(trace.count, 3);
  ASSERT_STR(trace.records[0].name, "orEventRecord");
  ASSERT_EQ(trace.records[0].stream, s);
  ASSERT_STR(trace.records[1].name, "orStreamWaitEvent");
  ASSERT_EQ(trace.records[1].stream, other);
  ASSERT_EQ(countOf(orTraceLaunch), 2);
}

TEST(trace_synchronisations) {
  orStream_t s = newStream(), standard;
  orEvent_t e = newEvent(0);
  void *memory;
  atomic_int ran = 0;
  ASSERT_OK(orStreamGetDefault(&standard, 0));
  ASSERT_OK(orMalloc(&memory, 64));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orStreamSynchronize(OR_STREAM_DEFAULT));
  ASSERT_OK(orMemset(memory, 0, 64));
  ASSERT_OK(launchAs(s, countKernel, &ran, orLaunchWaits));
  stop();
  static const char *const names[] = {"orStreamSynchronize", "orEventSynchronize",
                                      "orDeviceSynchronize", "orStreamSynchronize",
                                      "orStreamSynchronize", "orStreamSynchronize"};
  const orStream_t streams[] = {s, s, 0, standard, standard, s};
  int k = 0;
  for (size_t i = 0; i < trace.count; i++) {
    const orTraceRecord *r = &trace.records[i];
    if (r->kind != orTraceSynchronize) continue;
    ASSERT_LT(k, 6);
    ASSERT_STR(r->name, names[k]);
    ASSERT_EQ(r->stream, streams[k++]);
    ASSERT_EQ(r->lane, -1);
    ASSERT_EQ(r->device, 0);
    ASSERT_LE(r->start_ns, r->end_ns);
  }
  ASSERT_EQ(k, 6);
}

TEST(trace_off_is_silent) {
  orStream_t s = newStream();
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_REFUSED(orTraceStop(&trace), orErrorNotFound, "not on");
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  ASSERT_EQ(trace.count, 3); /* the call, the kernel, the wait */
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_REFUSED(orTraceStop(&trace), orErrorNotFound, "not on");
  ASSERT_OK(orTraceStart(0));
  stop();
  ASSERT_EQ(trace.count, 0);
}

TEST(trace_refuses) {
  ASSERT_OK(orTraceStart(100));
  ASSERT_REFUSED(orTraceStart(100), orErrorAlreadyExists, "on already");
  ASSERT_REFUSED(orTraceStop(NULL), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orTraceStop(&(orTrace){.size = 4}), orErrorInvalidValue, "size is 4");
  stop(); /* it has gone on */
  ASSERT_EQ(trace.capacity, 100);
  ASSERT_REFUSED(orTraceStart(SIZE_MAX), orErrorInvalidValue, "at most");
  ASSERT_REFUSED(orTraceStart(SIZE_MAX / 4 / sizeof(orTraceRecord)), orErrorMemoryAllocation,
                 "no room");
  ASSERT_OK(orTraceStart(100)); /* usable after */
  stop();
  orTraceFree(&trace);
  orTraceFree(&trace);
  orTraceFree(NULL);
}

TEST(trace_overflow_keeps_the_first_and_counts_the_rest) {
  setenv("OPENREG_TRACE_RECORDS", "10", 1);
  orStream_t s = newStream();
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orLaunchSleep(s, 1));
  uint64_t first = orGetLastCorrelation();
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < 20; i++) ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  ASSERT_EQ(trace.count, 10);
  ASSERT_EQ(trace.dropped, 2 * 21 + 2 - 10);
  find(first, false);
  find(first, true);
}

/* A kernel held over the start, and one over the stop: neither is the trace's. */
TEST(trace_has_what_began_and_ended_within) {
  Holder early = {0}, late = {0};
  orStream_t a = newStream(), b = newStream();
  hold(a, &early);
  ASSERT_OK(orTraceStart(0));
  letGo(&early);
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_OK(orLaunchSleep(a, 1));
  uint64_t within = orGetLastCorrelation();
  ASSERT_OK(orStreamSynchronize(a));
  hold(b, &late);
  stop();
  find(within, true);
  ASSERT_EQ(countOf(orTraceKernel), 1);
  ASSERT_OK(orTraceStart(0)); /* the next one has none of it either */
  letGo(&late);
  ASSERT_OK(orDeviceSynchronize());
  stop();
  ASSERT_EQ(countOf(orTraceKernel), 0);
}

static void *synchronize(void *context) {
  ASSERT_OK(orStreamSynchronize(*(orStream_t *)context));
  return NULL;
}

/* Also where something else than the trace has seen it begin. */
TEST(trace_has_no_wait_that_began_before) {
  Holder holder = {0};
  orStream_t s = newStream();
  pthread_t thread;
  ASSERT_OK(orSanitizerEnable(NULL));
  hold(s, &holder);
  ASSERT_EQ(pthread_create(&thread, NULL, synchronize, &s), 0);
  awaitReport("host thread");
  ASSERT_OK(orTraceStart(0));
  letGo(&holder);
  ASSERT_EQ(pthread_join(thread, NULL), 0);
  stop();
  ASSERT_EQ(countOf(orTraceSynchronize), 0);
}

static void tagged(int number, void *context) {
  orStream_t s = *(orStream_t *)context;
  ASSERT_EQ(orTraceTag((uint64_t)number + 100), 0);
  for (int i = 0; i < 50; i++) ASSERT_OK(orLaunchSleep(s, 0));
  ASSERT_EQ(orTraceTag(0), number + 100);
}

/* What one trace was marked with says nothing in the next. */
TEST(trace_tags_end_with_the_trace) {
  orStream_t s = newStream();
  ASSERT_EQ(orTraceTag(6), 0); /* of no trace */
  ASSERT_OK(orTraceStart(0));
  ASSERT_EQ(orTraceTag(7), 0);
  ASSERT_OK(orLaunchSleep(s, 0));
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  for (size_t i = 0; i < trace.count; i++)
    ASSERT_EQ(trace.records[i].tag, trace.records[i].lane < 0 ? 7 : 0);
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  ASSERT_EQ(trace.count, 1);
  ASSERT_EQ(trace.records[0].tag, 0);
}

TEST(trace_tags_are_the_threads) {
  orStream_t s = newStream();
  ASSERT_OK(orTraceStart(0));
  runThreads(3, tagged, &s);
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  int threads[3] = {0}, seen[3] = {0};
  for (size_t i = 0; i < trace.count; i++) {
    const orTraceRecord *r = &trace.records[i];
    if (r->kind != orTraceLaunch) continue;
    ASSERT_LT(r->tag - 100, 3);
    int k = (int)(r->tag - 100);
    if (!seen[k]++) threads[k] = r->thread;
    ASSERT_EQ(r->thread, threads[k]);
  }
  for (int k = 0; k < 3; k++) ASSERT_EQ(seen[k], 50);
  ASSERT_NE(threads[0], threads[1]);
}

/* On and off while tasks run: nothing is lost or touched that is gone. */
static void toggle(int number, void *context) {
  (void)context;
  orStream_t s = newStream();
  orTrace mine = {.size = sizeof mine};
  for (int i = 0; i < 500; i++) {
    if (number) {
      ASSERT_OK(orLaunchSleep(s, 1));
      continue;
    }
    ASSERT_OK(orTraceStart(i % 3 ? 0 : 4));
    ASSERT_OK(orLaunchSleep(s, 1));
    ASSERT_OK(orTraceStop(&mine));
    for (size_t k = 0; k < mine.count; k++) {
      ASSERT(mine.records[k].name != NULL);
      ASSERT_GE(mine.records[k].start_ns, mine.start_ns);
      ASSERT_LE(mine.records[k].start_ns, mine.records[k].end_ns);
    }
    orTraceFree(&mine);
  }
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(trace_switched_while_tasks_run) { runThreads(3, toggle, NULL); }

/* ---- a vendor's device that completes later ---- */

TEST(trace_of_what_a_vendors_device_completes_later) {
  void *memory, *pinned;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 10, &later));
  ASSERT_OK(orMalloc(&memory, 4096));
  ASSERT_OK(orMallocHost(&pinned, 4096));
  orStream_t s = newStream();
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orMemcpyAsync(memory, pinned, 4096, orMemcpyDefault, s));
  uint64_t copied = orGetLastCorrelation();
  while (!atomic_load(&asked)) sched_yield();
  uint64_t running = nowNs();
  sleepMs(2);
  uint64_t signalled = nowNs();
  ASSERT_OK(orEventSignal(atomic_load(&asked), orSuccess));
  ASSERT_OK(orMemsetAsync(memory, 0, 4096, s));
  uint64_t set = orGetLastCorrelation();
  ASSERT_OK(orStreamSynchronize(s));
  stop();
  const orTraceRecord *copy = find(copied, true), *fill = find(set, true);
  ASSERT_LE(copy->start_ns, running);
  ASSERT_GE(copy->end_ns, signalled);
  ASSERT_GE(fill->start_ns, copy->end_ns);
  ASSERT_GE(fill->end_ns, fill->start_ns);
}
