/*
 * Tasks: arguments of kernels, what a launch refuses, who drops the arguments, what a task may
 * call.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gate.h"
#include "openreg_watchdog.h"

/* ---- arguments ---- */

typedef struct Pattern {
  size_t size;
  unsigned char first;
  unsigned char bytes[];
} Pattern;

static atomic_int good_patterns;

static orError_t checkPattern(void *args) {
  const Pattern *p = args;
  ASSERT_EQ((uintptr_t)args % 16, 0);
  for (size_t i = 0; i < p->size - sizeof *p; i++)
    ASSERT_EQ(p->bytes[i], (unsigned char)(p->first + i * 7));
  atomic_fetch_add(&good_patterns, 1);
  return orSuccess;
}

static orError_t launchPattern(orStream_t stream, Pattern *p, size_t size) {
  p->size = size;
  p->first = (unsigned char)size;
  for (size_t i = 0; i < size - sizeof *p; i++) p->bytes[i] = (unsigned char)(p->first + i * 7);
  orLaunch l = {.size = sizeof l,
                .stream = stream,
                .fn = checkPattern,
                .args = p,
                .args_size = size,
                .name = "pattern"};
  return orLaunchKernelEx(&l);
}

TEST(task_arguments_of_every_size) {
  orStream_t s = newStream();
  Pattern *p = calloc(1, OR_MAX_ARGS + 1);
  int count = 0;
  for (size_t size = sizeof *p; size <= OR_MAX_ARGS; size += size < 200 ? 1 : size / 9) {
    ASSERT_OK(launchPattern(s, p, size)); /* copied: the next overwrites it */
    count++;
  }
  ASSERT_OK(launchPattern(s, p, OR_MAX_ARGS));
  ASSERT_REFUSED(launchPattern(s, p, OR_MAX_ARGS + 1), orErrorInvalidValue,
                 "65537 bytes of arguments");
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(good_patterns, count + 1);
  free(p);
}

/* Records that are not made use of, each between two that fill a chunk of the queue. */
TEST(task_behind_a_reservation_that_was_abandoned) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  Pattern *p = calloc(1, OR_MAX_ARGS);
  for (int i = 0; i < 20; i++) {
    ASSERT_OK(launchPattern(s, p, OR_MAX_ARGS));
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT_OK(orEventRecord(e, s)); /* on an idle stream: nothing is queued */
  }
  ASSERT_EQ(good_patterns, 20);
  free(p);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
/* A lane lets go of a destroyed stream's queue after the last task is over: a device that has been
 * waited for may hold some a little longer. */
static size_t leastMemory(void) {
  size_t least = heapInUse();
  for (int ms = 0; ms < 100; ms++) {
    usleep(1000);
    if (heapInUse() < least) least = heapInUse();
  }
  return least;
}

/* Each lap of a long queue empties several chunks, of which one is kept. */
static void runLap(orStream_t s) {
  Pattern *p = calloc(1, 256);
  orEvent_t gate = closeGate(s);
  for (int i = 0; i < 900; i++) ASSERT_OK(launchPattern(s, p, 256));
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventDestroy(gate));
  free(p);
}

/* Each record, and each external event, has a cell. */
static void dropRound(orStream_t s) {
  orEvent_t gate = closeGate(s), e = newEvent(0);
  for (int i = 0; i < 500; i++) {
    ASSERT_OK(orEventRecord(e, s));
    ASSERT_OK(orStreamWaitEvent(s, e));
    ASSERT_OK(orEventDestroy(newGate()));
  }
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orEventDestroy(e));
  ASSERT_OK(orEventDestroy(gate));
}

static void expectNoGrowth(void (*round)(orStream_t)) {
  orStream_t s = newStream();
  size_t before = 0;
  for (int i = 0; i < 40; i++) {
    round(s);
    if (i == 9) before = heapInUse();
  }
  ASSERT_LT(heapInUse(), before + (1 << 20));
}

TEST(task_queue_that_empties_chunks_keeps_one) { expectNoGrowth(runLap); }

TEST(task_cells_of_what_is_dropped_are_used_again) { expectNoGrowth(dropRound); }

TEST(task_queue_of_a_destroyed_stream_keeps_no_memory) {
  enum { STREAMS = 200 };
  Pattern *p = calloc(1, OR_MAX_ARGS);
  size_t before = 0;
  for (int round = 0; round < 2; round++) {
    static orStream_t s[STREAMS];
    for (int i = 0; i < STREAMS; i++) s[i] = newStream();
    for (int i = 0; i < STREAMS; i++) {
      ASSERT_OK(launchPattern(s[i], p, OR_MAX_ARGS));
      if (i % 2) ASSERT_OK(orStreamSynchronize(s[i])); /* destroyed while it is idle, or has work */
      ASSERT_OK(orStreamDestroy(s[i]));
    }
    ASSERT_OK(orDeviceSynchronize());
    size_t now = leastMemory();
    ASSERT_LT(now, round ? before + 65536 : (size_t)STREAMS * 32768);
    before = now;
  }
  free(p);
}
#endif

TEST(task_queue_goes_on_past_abandoned_reservations) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  orEvent_t gate = closeGate(s);
  Pattern *p = calloc(1, OR_MAX_ARGS);
  ASSERT_OK(orEventRecord(e, s));
  for (int i = 0; i < 4; i++) {
    ASSERT_OK(launchPattern(s, p, OR_MAX_ARGS));
    ASSERT_OK(orStreamWaitEvent(s, e)); /* its own: nothing is queued */
  }
  awaitReport("waits for external event");
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(good_patterns, 4);
  free(p);
}

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

TEST(task_launch_refuses_what_is_wrong) {
  void *memory;
  ASSERT_OK(orMalloc(&memory, 1000));
  orAccess past = {(char *)memory + 900, 101, 0}, wild = {&past, 8, 1}, fine = {memory, 1000, 1};
  orLaunch l = {.size = sizeof l, .fn = nothing, .name = "add"};
  ASSERT_OK(orLaunchKernelEx(&l));
  l.size = offsetof(orLaunch, name);
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "size");
  ASSERT_REFUSED(orLaunchKernelEx(NULL), orErrorInvalidValue, "size");
  l.size = sizeof l;
  l.fn = NULL;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "function");
  l.fn = nothing;
  l.name = NULL;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "name");
  l.name = "add";
  l.args_size = 8;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "kernel add: 8 bytes of arguments");
  l.args_size = 0;
  l.access_count = 1;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "kernel add: 1 accesses at a null");
  l.accesses = &(orAccess){NULL, 0, 1}; /* nothing, wherever that is */
  ASSERT_OK(orLaunchKernelEx(&l));
  l.accesses = &fine;
  ASSERT_OK(orLaunchKernelEx(&l));
  l.accesses = &past;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "ends 1 bytes past its allocation");
  l.accesses = &wild;
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "is not allocated memory");
  ASSERT_OK(orDeviceSynchronize());
}

/* ---- drop ---- */

static atomic_int drops[300];

static void dropNumber(void *args) { atomic_fetch_add(&drops[*(int *)args], 1); }

static void launchNumber(orStream_t s, int number) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = s,
                                         .fn = nothing,
                                         .args = &number,
                                         .args_size = sizeof number,
                                         .drop = dropNumber,
                                         .name = "numbered"}));
}

TEST(task_drop_is_called_once) {
  orStream_t s = newStream(), dying = newStream();
  for (int i = 0; i < 100; i++) launchNumber(s, i);
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < 100; i++) ASSERT_EQ(drops[i], 1);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orStreamWaitEvent(dying, gate));
  for (int i = 100; i < 200; i++) launchNumber(s, i);
  for (int i = 200; i < 300; i++) launchNumber(dying, i);
  ASSERT_OK(orStreamDestroy(dying));
  ASSERT_EQ(drops[100], 0);
  ASSERT_OK(orDeviceReset());
  for (int i = 0; i < 300; i++) ASSERT_EQ(drops[i], 1);
}

TEST(task_refused_launch_does_not_drop) {
  int number = 0;
  orLaunch l = {.size = sizeof l,
                .stream = 12345,
                .fn = nothing,
                .args = &number,
                .args_size = sizeof number,
                .drop = dropNumber,
                .name = "numbered"};
  ASSERT_ERROR(orLaunchKernelEx(&l), orErrorInvalidResourceHandle);
  ASSERT_EQ(drops[0], 0);
}

/* ---- what a task may call ---- */

typedef struct Inside {
  orStream_t stream;
  orEvent_t event;
  void *device, *pinned;
  atomic_int done;
} Inside;

static void refuseAll(Inside *in) {
  orStream_t stream = in->stream;
  orLaunch l = {.size = sizeof l, .stream = stream, .fn = nothing, .name = "inner"};
  ASSERT_ERROR(orStreamSynchronize(stream), orErrorNotPermitted);
  ASSERT_ERROR(orEventSynchronize(in->event), orErrorNotPermitted);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorNotPermitted);
  ASSERT_ERROR(orDeviceReset(), orErrorNotPermitted);
  ASSERT_ERROR(orLaunchKernelEx(&l), orErrorNotPermitted);
  ASSERT_ERROR(orLaunchSleep(stream, 1), orErrorNotPermitted);
  ASSERT_ERROR(orLaunchHostFunc(stream, free, NULL), orErrorNotPermitted);
  ASSERT_ERROR(orMemcpy(in->pinned, in->device, 8, orMemcpyDefault), orErrorNotPermitted);
  ASSERT_ERROR(orMemcpyAsync(in->pinned, in->device, 8, orMemcpyDefault, stream),
               orErrorNotPermitted);
  ASSERT_ERROR(orMemset(in->device, 0, 8), orErrorNotPermitted);
  ASSERT_ERROR(orMemsetAsync(in->device, 0, 8, stream), orErrorNotPermitted);
  ASSERT_ERROR(orFree(in->device), orErrorNotPermitted);
  ASSERT_ERROR(orFreeHost(in->pinned), orErrorNotPermitted);
}

static orError_t callInKernel(void *args) {
  Inside *in = *(Inside **)args;
  int value;
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  refuseAll(in);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "kernel");
  ASSERT_OK(orGetDevice(&value));
  ASSERT_OK(orPointerGetAttributes(&attributes, in->device));
  ASSERT_ERROR(orStreamQuery(in->stream), orErrorNotReady);
  atomic_store(&in->done, 1);
  return orSuccess;
}

static void callInHostFunction(void *context) {
  Inside *in = context;
  int value;
  void *ptr;
  refuseAll(in);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "host function");
  ASSERT_ERROR(orGetDevice(&value), orErrorNotPermitted);
  ASSERT_ERROR(orStreamQuery(in->stream), orErrorNotPermitted);
  ASSERT_ERROR(orMalloc(&ptr, 8), orErrorNotPermitted);
  ASSERT_ERROR(orMapForKernel(&ptr, in->device, 8), orErrorNotPermitted);
  atomic_store(&in->done, 2);
}

TEST(task_tasks_may_not_block) {
  Inside in = {.stream = newStream(), .event = newEvent(0)};
  ASSERT_OK(orMalloc(&in.device, 64));
  ASSERT_OK(orMallocHost(&in.pinned, 64));
  launch(in.stream, callInKernel, &in);
  ASSERT_OK(orStreamSynchronize(in.stream));
  ASSERT_EQ(in.done, 1);
  ASSERT_OK(orLaunchHostFunc(in.stream, callInHostFunction, &in));
  ASSERT_OK(orStreamSynchronize(in.stream));
  ASSERT_EQ(in.done, 2);
  ASSERT_OK(orFree(in.device));
  ASSERT_OK(orFreeHost(in.pinned));
}

static orStream_t seen_stream;

static void dropAndCall(void *args) {
  (void)args;
  ASSERT_ERROR(orStreamQuery(seen_stream), orErrorNotPermitted);
  atomic_fetch_add(&drops[0], 1);
}

TEST(task_drop_may_not_call) {
  seen_stream = newStream();
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = seen_stream,
                                         .fn = nothing,
                                         .drop = dropAndCall,
                                         .name = "dropper"}));
  ASSERT_OK(orStreamSynchronize(seen_stream));
  ASSERT_EQ(drops[0], 1);
  ASSERT_REFUSED(orLaunchHostFunc(seen_stream, NULL, NULL), orErrorInvalidValue, "null function");
}

/* ---- at exit ---- */

static void launchAtExit(void) {
  static atomic_int ran, *counter = &ran;
  int queued = -1;
  orLaunch l = {.size = sizeof l,
                .fn = countKernel,
                .args = &counter,
                .args_size = sizeof counter,
                .name = "test",
                .queued = &queued};
  _exit(orLaunchKernelEx(&l) || queued != 1);
}

static void exitAndLaunch(void) {
  atexit(launchAtExit); /* it runs after the handler of the library */
  newStream();
  exit(2);
}

TEST(task_queued_at_exit_is_said_to_be) { ASSERT_FORK_OK(exitAndLaunch); }
