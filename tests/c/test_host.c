/*
 * What a host thread that waits runs itself: a kernel that it says it waits for, with what is
 * before it, where no lane has begun and any thread may run it all.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gate.h"
#include "openreg_fault.h"
#include "openreg_schedule.h"
#include "openreg_watchdog.h"

typedef struct Ran {
  atomic_int times;
  int order;
  pthread_t on;
} Ran;

static atomic_int order;

static orError_t noteKernel(void *args) {
  Ran *r = *(Ran **)args;
  r->on = pthread_self();
  r->order = atomic_fetch_add(&order, 1);
  atomic_fetch_add(&r->times, 1);
  return orSuccess;
}

enum { ANY = orLaunchAnyThread, AWAITED = orLaunchAnyThread | orLaunchAwaited };

static bool ranHere(const Ran *r) { return r->times == 1 && pthread_equal(r->on, pthread_self()); }

static int lanesStarted(void) {
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  return info.started;
}

TEST(host_runs_what_it_waits_for) {
  Ran r = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, noteKernel, &r, AWAITED));
  ASSERT(ranHere(&r));
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(lanesStarted(), 0);
}

TEST(host_copies_and_fills_what_it_waits_for) {
  char host[1000], *device;
  ASSERT_OK(orMalloc((void **)&device, sizeof host));
  ASSERT_OK(orMemset(device, 7, sizeof host));
  ASSERT_OK(orMemcpy(host, device, sizeof host, orMemcpyDeviceToHost));
  for (size_t i = 0; i < sizeof host; i++) ASSERT_EQ(host[i], 7);
  ASSERT_EQ(lanesStarted(), 0);
}

TEST(host_leaves_to_lanes_what_is_theirs) {
  Ran r[3] = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, noteKernel, &r[0], orLaunchAwaited));
  ASSERT_OK(launchAs(s, noteKernel, &r[1], ANY));
  ASSERT_OK(launchAs(s, noteKernel, &r[2], 0));
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < 3; i++) ASSERT(r[i].times == 1 && !ranHere(&r[i]));
}

TEST(host_runs_what_is_before_if_no_lane_has_come) {
  Holder h[LANE_MOST] = {0};
  Ran r[2] = {0};
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  holdAllLanes(h);
  ASSERT_OK(launchAs(s, noteKernel, &r[0], ANY));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(s, e));
  ASSERT_OK(launchAs(s, noteKernel, &r[1], AWAITED));
  ASSERT(ranHere(&r[0]) && ranHere(&r[1]));
  ASSERT_LT(r[0].order, r[1].order);
  ASSERT_OK(orEventQuery(e));
  letGoAllLanes(h);
}

TEST(host_copies_behind_what_no_lane_has_come_for) {
  Holder h[LANE_MOST] = {0};
  Ran r = {0};
  char host[100], *device;
  ASSERT_OK(orMalloc((void **)&device, sizeof host));
  orStream_t s = newStream();
  holdAllLanes(h);
  ASSERT_OK(orMemsetAsync(device, 3, sizeof host, s));
  ASSERT_OK(launchAs(s, noteKernel, &r, ANY));
  ASSERT_OK(orMemcpyAsync(host, device, sizeof host, orMemcpyDeviceToHost, s));
  ASSERT(ranHere(&r));
  for (size_t i = 0; i < sizeof host; i++) ASSERT_EQ(host[i], 3);
  letGoAllLanes(h);
}

/* Streams that are ready are in a list: taken out as its only one, its first, its last, from the
 * middle. */
TEST(host_takes_its_stream_from_among_others) {
  Holder h[LANE_MOST] = {0};
  Ran mine = {0};
  atomic_int theirs = 0;
  orStream_t s = newStream();
  int others = 0;
  holdAllLanes(h);
  for (int before = 0; before < 2; before++)
    for (int behind = 0; behind < 2; behind++) {
      if (before) ASSERT_OK(launchAs(newStream(), countKernel, &theirs, ANY));
      ASSERT_OK(launchAs(s, noteKernel, &mine, ANY));
      if (behind) ASSERT_OK(launchAs(newStream(), countKernel, &theirs, ANY));
      ASSERT_OK(launchAs(s, noteKernel, &mine, AWAITED));
      ASSERT_OK(orStreamQuery(s));
      ASSERT_EQ(theirs, 0);
      others += before + behind;
    }
  letGoAllLanes(h);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(mine.times, 8);
  ASSERT_EQ(theirs, others);
}

TEST(host_runs_nothing_past_a_task_for_lanes) {
  Holder h[LANE_MOST] = {0};
  Ran r[3] = {0};
  orStream_t s = newStream();
  holdAllLanes(h);
  ASSERT_OK(launchAs(s, noteKernel, &r[0], ANY));
  ASSERT_OK(launchAs(s, noteKernel, &r[1], 0));
  ASSERT_OK(launchAs(s, noteKernel, &r[2], AWAITED));
  for (int i = 0; i < 3; i++) ASSERT_EQ(r[i].times, 0);
  letGoAllLanes(h);
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < 3; i++) ASSERT(r[i].times == 1 && r[i].order == i);
}

TEST(host_stays_behind_an_event) {
  Ran r[2] = {0};
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  ASSERT_OK(launchAs(s, noteKernel, &r[0], AWAITED));
  ASSERT_EQ(r[0].times, 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(r[0].times, 1);
}

/* With all lanes taken, the host comes to the wait itself. */
TEST(host_parks_a_stream_whose_event_is_open) {
  Holder h[LANE_MOST] = {0};
  Ran r[2] = {0};
  orStream_t s = newStream();
  holdAllLanes(h);
  ASSERT_OK(launchAs(s, noteKernel, &r[0], ANY));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(launchAs(s, noteKernel, &r[1], AWAITED));
  ASSERT(ranHere(&r[0]));
  ASSERT_EQ(r[1].times, 0);
  openGate(gate);
  ASSERT_EQ(r[1].times, 0);
  letGo(&h[0]);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(r[1].times, 1);
  letGoAllLanes(h);
}

/* ---- beside other threads ---- */

typedef struct Other {
  orStream_t stream;
  Holder holder;
  orError_t error;
} Other;

static void *launchHolder(void *arg) {
  Other *o = arg;
  o->error = launchAs(o->stream, holdKernel, &o->holder, AWAITED);
  return NULL;
}

TEST(host_gives_back_what_comes_behind_its_task) {
  Other o = {.stream = newStream()};
  Ran r[2] = {0};
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, launchHolder, &o), 0);
  awaitInt(&o.holder.started, 1);
  ASSERT_OK(launchAs(o.stream, noteKernel, &r[0], ANY));
  ASSERT_OK(launchAs(o.stream, noteKernel, &r[1], AWAITED)); /* another has the stream */
  ASSERT_ERROR(orStreamQuery(o.stream), orErrorNotReady);
  ASSERT_EQ(r[0].times, 0);
  letGo(&o.holder);
  ASSERT_OK(orStreamSynchronize(o.stream));
  ASSERT(r[0].times == 1 && r[1].times == 1 && r[0].order < r[1].order);
  pthread_join(thread, NULL);
  ASSERT_OK(o.error);
}

TEST(host_is_named_by_the_hang_report) {
  Other o = {.stream = newStream()};
  char *text;
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, launchHolder, &o), 0);
  awaitInt(&o.holder.started, 1);
  ASSERT_OK(orHangReport(&text));
  ASSERT_CONTAINS(text, "task 1, kernel test: on a host thread that waits for it");
  free(text);
  letGo(&o.holder);
  pthread_join(thread, NULL);
}

TEST(host_is_minus_one_in_the_trace) {
  Ran r = {0};
  orTrace trace = {.size = sizeof trace};
  orStream_t s = newStream();
  ASSERT_OK(orTraceStart(16));
  ASSERT_OK(launchAs(s, noteKernel, &r, AWAITED));
  ASSERT_OK(orTraceStop(&trace));
  ASSERT_EQ(trace.count, 2u); /* the launch, over before the kernel began */
  const orTraceRecord *kernel = &trace.records[1], *call = &trace.records[0];
  ASSERT_EQ(call->kind, orTraceLaunch);
  ASSERT_EQ(kernel->kind, orTraceKernel);
  ASSERT_EQ(kernel->lane, -1);
  ASSERT_EQ(kernel->correlation, call->correlation);
  ASSERT_LE(call->end_ns, kernel->start_ns);
  orTraceFree(&trace);
}

/* ---- a host that goes on ---- */

/* Right after it has waited, too. */
TEST(host_that_does_nothing_more_leaves_it_to_a_lane) {
  orStream_t s = newStream();
  for (int i = 0; i < 40; i++) {
    Ran waited = {0}, left = {0};
    ASSERT_OK(launchAs(s, noteKernel, &waited, ANY));
    ASSERT_OK(launchAs(s, noteKernel, &waited, AWAITED));
    ASSERT_OK(launchAs(s, noteKernel, &left, ANY));
    awaitInt(&left.times, 1);
    ASSERT(!ranHere(&left));
  }
}

/* The kernel stays: what is queued behind it in the stream is no reason for it to begin. */
TEST(host_that_goes_on_finds_the_kernel_begun) {
  Holder h = {0};
  Ran r = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, noteKernel, &r, AWAITED));
  ASSERT_OK(launchAs(s, holdKernel, &h, ANY));
  awaitInt(&h.started, 1);
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  letGo(&h);
  ASSERT_OK(orStreamSynchronize(s));
}

/* ---- a launch that waits ---- */

TEST(host_is_back_from_a_launch_that_waits_when_it_has_run) {
  Ran r[2] = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, noteKernel, &r[0], orLaunchWaits));
  ASSERT(r[0].times == 1 && !ranHere(&r[0]));
  ASSERT_OK(launchAs(s, noteKernel, &r[1], ANY | orLaunchWaits));
  ASSERT_EQ(r[1].times, 1);
}

TEST(host_is_told_of_a_kernel_that_was_not_run) {
  Ran r = {0};
  orStream_t s = newStream();
  ASSERT_OK(orFaultInject(&(orFault){.size = sizeof(orFault), .kind = orFaultKernelError}));
  ASSERT_REFUSED(launchAs(s, noteKernel, &r, orLaunchWaits), orErrorLaunchFailure, "kernel_error");
  ASSERT_EQ(r.times, 0);
  ASSERT_OK(orStreamSynchronize(s));
}

static orError_t keepNice(void *args) {
  **(atomic_int **)args = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
  return orSuccess;
}

TEST(lane_keeps_the_nice_value_of_the_process) {
  atomic_int nice_value = 0;
  orStream_t s = newStream();
  ASSERT_EQ(setpriority(PRIO_PROCESS, 0, 7), 0);
  ASSERT_OK(launchAs(s, keepNice, &nice_value, orLaunchWaits));
  ASSERT_EQ(nice_value, 7);
}

static atomic_int woke, may_go_on;
static _Thread_local bool wakes_late;

static void *fallAsleep(void) { return NULL; }

static void wakeLate(void *token) {
  (void)token;
  if (!wakes_late) return;
  atomic_store(&woke, 1);
  awaitInt(&may_go_on, 1);
}

static void *launchAndWait(void *arg) {
  Other *o = arg;
  wakes_late = true;
  o->error = launchAs(o->stream, holdKernel, &o->holder, orLaunchWaits);
  return NULL;
}

/* The reset comes between the kernel's end and its waiter's first look. */
TEST(host_is_not_told_of_a_reset_after_its_kernel) {
  Other o = {.stream = newStream()};
  pthread_t thread;
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){fallAsleep, wakeLate}));
  ASSERT_EQ(pthread_create(&thread, NULL, launchAndWait, &o), 0);
  awaitInt(&o.holder.started, 1);
  awaitReport("host thread");
  letGo(&o.holder);
  awaitInt(&woke, 1);
  closeGate(o.stream);
  ASSERT_OK(orDeviceReset());
  atomic_store(&may_go_on, 1);
  pthread_join(thread, NULL);
  ASSERT_OK(o.error);
}

/* ---- errors and modes ---- */

static orError_t failKernel(void *args) {
  (void)args;
  orSetTaskErrorMessage("no luck");
  return orErrorLaunchFailure;
}

TEST(host_reports_a_failure_where_it_synchronises) {
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, failKernel, NULL, AWAITED));
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "no luck");
  ASSERT_OK(orStreamSynchronize(s));
}

static orError_t blockKernel(void *args) {
  orStream_t stream = *(orStream_t *)*(void **)args;
  return orStreamSynchronize(stream) == orErrorNotPermitted ? orSuccess : orErrorLaunchFailure;
}

TEST(host_is_in_a_kernel_while_it_runs_one) {
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, blockKernel, &s, AWAITED));
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(host_runs_nothing_under_a_schedule) {
  Ran r = {0};
  orStream_t s = newStream();
  ASSERT_OK(orScheduleSet(orScheduleSeeded, 1));
  ASSERT_OK(launchAs(s, noteKernel, &r, AWAITED));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT(r.times == 1 && !ranHere(&r));
}

TEST(host_flags_that_nobody_knows_are_refused) {
  Ran r = {0};
  ASSERT_REFUSED(launchAs(newStream(), noteKernel, &r, 18), orErrorInvalidValue,
                 "kernel test: flags 0x12: allowed are 0xf");
}
