/*
 * Tracing: one record a task, with what is needed to tell which.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

enum { TRACE_MOST = 1000 };

typedef struct Log {
  pthread_mutex_t lock;
  int count;
  orTraceRecord records[TRACE_MOST];
} Log;

static Log log_ = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void append(void *context, const orTraceRecord *record) {
  Log *l = context;
  pthread_mutex_lock(&l->lock);
  if (l->count < TRACE_MOST) l->records[l->count++] = *record;
  pthread_mutex_unlock(&l->lock);
}

static const orTraceRecord *find(uint64_t correlation) {
  for (int i = 0; i < log_.count; i++)
    if (log_.records[i].correlation == correlation && log_.records[i].lane >= 0)
      return &log_.records[i];
  FAIL("no record of correlation %#llx", (unsigned long long)correlation);
}

static void nothing(void *context) { (void)context; }

static orError_t failingKernel(void *args) {
  (void)args;
  return orErrorInvalidValue;
}

static void assertRecord(uint64_t correlation, orTraceKind kind, const char *name,
                         orStream_t stream, int device, size_t bytes) {
  const orTraceRecord *r = find(correlation);
  ASSERT_EQ(r->kind, kind);
  ASSERT_STR(r->name, name);
  ASSERT_EQ(r->stream, stream);
  ASSERT_EQ(r->device, device);
  ASSERT_EQ(r->bytes, bytes);
  ASSERT_LE(r->start_ns, r->end_ns);
  orLaneInfo info;
  ASSERT_OK(orGetLaneInfo(&info));
  ASSERT_LT(r->lane, info.limit);
}

TEST(trace_records) {
  void *memory, *host;
  orStream_t standard;
  ASSERT_OK(orMalloc(&memory, 5000));
  ASSERT_OK(orMallocHost(&host, 5000));
  ASSERT_OK(orStreamGetDefault(&standard, 1));
  orStream_t s = newStream();
  ASSERT_OK(orSetTraceHook(append, &log_));
  uint64_t before = nowNs(), c[8];
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
  launch(OR_STREAM_DEFAULT, failingKernel,
         NULL); /* the handle is recorded, never 0; a failure is a record like any */
  c[5] = orGetLastCorrelation();
  for (int i = 0; i < 6; i++)
    for (int k = 0; k < i; k++) ASSERT_NE(c[i], c[k]);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorInvalidValue);
  ASSERT_OK(orStreamSynchronize(s));
  assertRecord(c[0], orTraceKernel, "_sleep", s, 0, 0);
  assertRecord(c[1], orTraceMemcpy, "Memcpy DtoH", s, 0, 5000);
  assertRecord(c[2], orTraceMemcpy, "Memcpy HtoD", s, 0, 4000);
  assertRecord(c[3], orTraceMemset, "Memset", s, 0, 3000);
  assertRecord(c[4], orTraceHostFunc, "orLaunchHostFunc", s, 0, 0);
  assertRecord(c[5], orTraceKernel, "test", standard, 1, 0);
  const orTraceRecord *sleeping = find(c[0]), *after = find(c[1]);
  ASSERT_GE(sleeping->start_ns, before);
  ASSERT_GE(sleeping->end_ns - sleeping->start_ns, 2000000);
  ASSERT_GE(after->start_ns, sleeping->end_ns); /* one stream: one after the other */
  ASSERT_LE(after->end_ns, nowNs());
}

TEST(trace_synchronisations) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orSetTraceHook(append, &log_));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_OK(orDeviceSynchronize());
  static const char *const names[] = {"orStreamSynchronize", "orEventSynchronize",
                                      "orDeviceSynchronize"};
  ASSERT_EQ(log_.count, 3);
  for (int i = 0; i < 3; i++) {
    ASSERT_EQ(log_.records[i].kind, orTraceSynchronize);
    ASSERT_STR(log_.records[i].name, names[i]);
    ASSERT_EQ(log_.records[i].lane, -1);
    ASSERT_EQ(log_.records[i].stream, i < 2 ? s : 0);
    ASSERT_LE(log_.records[i].start_ns, log_.records[i].end_ns);
  }
}

TEST(trace_off_is_silent) {
  orStream_t s = newStream();
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(log_.count, 0);
  ASSERT_OK(orSetTraceHook(append, &log_));
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  int seen = log_.count;
  ASSERT_EQ(seen, 2);
  ASSERT_OK(orSetTraceHook(NULL, NULL));
  ASSERT_OK(orLaunchSleep(s, 1));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(log_.count, seen);
}

/* On and off while tasks run: nothing is lost or touched that is gone. */
static void toggle(int thread, void *context) {
  Log *l = context;
  orStream_t s = newStream();
  for (int i = 0; i < 500; i++) {
    if (thread == 0)
      ASSERT_OK(i % 2 ? orSetTraceHook(append, l) : orSetTraceHook(NULL, NULL));
    else
      ASSERT_OK(orLaunchSleep(s, 1));
  }
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(trace_switched_while_tasks_run) { runThreads(3, toggle, &log_); }
