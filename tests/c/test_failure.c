/*
 * Kernels that fail, and what a reset does.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "stub_factory.h"

static orError_t failKernel(void *args) {
  const char *detail = *(const char **)args;
  if (detail) orSetTaskErrorMessage(detail);
  return orErrorInvalidValue;
}

static void launchFailing(orStream_t stream, const char *name, const char *detail) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = failKernel,
                                         .args = &detail,
                                         .args_size = sizeof detail,
                                         .name = name}));
}

TEST(failure_surfaces_once_with_its_name) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  launchFailing(s, "aten::bad", "index 7 is out of range");
  launchFailing(s, "aten::worse", NULL);
  launchFailing(s, "aten::worst", NULL);
  launch(s, countKernel, &ran);
  while (orStreamQuery(s) == orErrorNotReady) {
  }
  ASSERT_OK(orStreamQuery(s)); /* query does not report */
  ASSERT_EQ(orPeekAtLastError(), orSuccess);
  ASSERT_EQ(ran, 1); /* later tasks still run */
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorInvalidValue,
                 "aten::bad on openreg:0 failed: index 7 is out of range");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "2 more");
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orDeviceSynchronize());
  launchFailing(s, "aten::again", NULL); /* the device is as usable as before */
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorInvalidValue,
                 "aten::again on openreg:0 failed: invalid argument");
  ASSERT(!strstr(orGetLastErrorMessage(), "more"));
}

TEST(failure_surfaces_at_every_synchronising_call) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  void *memory;
  char host[8];
  ASSERT_OK(orMalloc(&memory, 64));
  launchFailing(OR_STREAM_DEFAULT, "k", NULL);
  ASSERT_ERROR(orMemcpy(host, memory, 8, orMemcpyDeviceToHost), orErrorInvalidValue);
  launchFailing(OR_STREAM_DEFAULT, "k", NULL);
  ASSERT_ERROR(orMemset(memory, 0, 8), orErrorInvalidValue);
  launchFailing(s, "k", NULL);
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(OR_STREAM_DEFAULT, e));
  ASSERT_ERROR(orEventSynchronize(e), orErrorInvalidValue);
  ASSERT_OK(orEventSynchronize(e));
}

TEST(failure_leaves_the_other_device_alone) {
  orStream_t here = newStreamOn(0), there = newStreamOn(1);
  launchFailing(there, "k", NULL);
  ASSERT_OK(orStreamSynchronize(here));
  ASSERT_OK(orDeviceSynchronize());
  while (orStreamQuery(there) == orErrorNotReady) {
  }
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_REFUSED(orStreamSynchronize(there), orErrorInvalidValue, "openreg:1");
}

TEST(failure_not_reported_by_record_and_deleters) {
  orStream_t s = newStream(), other = newStream();
  orEvent_t e = newEvent(0);
  launchFailing(s, "k", NULL);
  while (orStreamQuery(s) == orErrorNotReady) {
  }
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orEventQuery(newEvent(0)));
  ASSERT_OK(orStreamWaitEvent(other, e));
  ASSERT_OK(orEventDestroy(e));
  ASSERT_OK(orStreamDestroy(other));
  ASSERT_ERROR(orStreamSynchronize(s), orErrorInvalidValue);
}

static orError_t notReadyKernel(void *args) {
  (void)args;
  return orErrorNotReady;
}

/* "Not ready" means something else to whoever synchronises. */
TEST(failure_not_ready_from_a_kernel) {
  orStream_t s = newStream();
  launch(s, notReadyKernel, NULL);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure, "test on openreg:0 failed");
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(failure_detail_belongs_to_its_task) {
  orStream_t s = newStream();
  launchFailing(s, "first", "a detail");
  ASSERT_ERROR(orStreamSynchronize(s), orErrorInvalidValue);
  launchFailing(s, "second", NULL);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorInvalidValue);
  ASSERT(!strstr(orGetLastErrorMessage(), "a detail"));
}

TEST(failure_blocking_launches_report_themselves) {
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  orStream_t s = newStream();
  atomic_int ran = 0;
  launch(s, countKernel, &ran);
  ASSERT_EQ(ran, 1); /* without a synchronisation */
  const char *detail = "here";
  orLaunch l = {.size = sizeof l,
                .stream = s,
                .fn = failKernel,
                .args = &detail,
                .args_size = sizeof detail,
                .name = "bad"};
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorInvalidValue, "bad on openreg:0 failed: here");
  ASSERT_OK(orStreamSynchronize(s));
  void *device;
  uint32_t *pinned;
  ASSERT_OK(orMalloc(&device, 4096));
  ASSERT_OK(orMallocHost((void **)&pinned, 4096));
  ASSERT_OK(orMemsetAsync(device, 0x11, 4096, s));
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orMemcpyAsync(pinned, device, 4096, orMemcpyDefault, s));
  ASSERT_EQ(pinned[1023], 0x11111111);
}

static void freeArgument(void *args) { free(*(void **)args); }

/* The caller's way out of an error, whatever the reason: AddressSanitizer sees a leak and a second
 * free. */
static orError_t launchOwned(orStream_t stream, orKernelFn fn, int *queued) {
  void *owned = calloc(1, sizeof(void *));
  *queued = 77;
  orLaunch l = {.size = sizeof l,
                .stream = stream,
                .fn = fn,
                .args = &owned,
                .args_size = sizeof owned,
                .drop = freeArgument,
                .name = "owned",
                .queued = queued};
  orError_t error = orLaunchKernelEx(&l);
  if (!*queued) free(owned);
  return error;
}

static orError_t failOwned(void *args) {
  return **(void ***)args ? orSuccess : orErrorInvalidValue;
}

TEST(failure_of_a_blocking_launch_says_that_it_was_queued) {
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  int queued;
  ASSERT_REFUSED(launchOwned(newStream(), failOwned, &queued), orErrorInvalidValue, "owned on");
  ASSERT_EQ(queued, 1);
  ASSERT_ERROR(launchOwned(12345, failOwned, &queued), orErrorInvalidResourceHandle);
  ASSERT_EQ(queued, 0);
  ASSERT_ERROR(launchOwned(newStream(), NULL, &queued), orErrorInvalidValue);
  ASSERT_EQ(queued, 0);
}

TEST(failure_of_a_launch_that_nobody_waits_for_says_that_it_was_queued) {
  orStream_t s = newStream();
  int queued;
  ASSERT_OK(launchOwned(s, failOwned, &queued));
  ASSERT_EQ(queued, 1);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorInvalidValue, "owned on");
}

/* ---- causes ---- */

static atomic_int causes_dropped; /* the sum of their numbers */

static void dropCause(void *cause) {
  atomic_fetch_add(&causes_dropped, *(int *)cause);
  free(cause);
}

static void setCause(int number) {
  int *cause = malloc(sizeof *cause);
  *cause = number;
  orSetFailureCause(cause, dropCause);
}

/* The number of the cause of the last error, which is dropped; 0: none. */
static int takeCause(unsigned *others) {
  int *cause = orTakeFailureCause(others);
  int number = cause ? *cause : 0;
  free(cause);
  return number;
}

static orError_t failWithCause(void *args) {
  int number = *(int *)args;
  setCause(abs(number));
  return number < 0 ? orSuccess : orErrorLaunchFailure;
}

/* Negative: the kernel sets a cause, and does not fail. */
static void launchWithCause(orStream_t stream, int number) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = failWithCause,
                                         .args = &number,
                                         .args_size = sizeof number,
                                         .name = "caused"}));
}

static void awaitIdle(orStream_t stream) {
  while (orStreamQuery(stream) == orErrorNotReady) {
  }
}

TEST(failure_cause_of_the_first_is_taken_once) {
  orStream_t s = newStream();
  unsigned others = 77;
  ASSERT_EQ(takeCause(&others), 0);
  ASSERT_EQ(others, 77);
  launchWithCause(s, 1);
  launchWithCause(s, 10);
  launchFailing(s, "k", NULL);
  launchWithCause(s, 100);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_EQ(causes_dropped, 110);
  ASSERT_EQ(takeCause(&others), 1);
  ASSERT_EQ(others, 3);
  ASSERT_EQ(takeCause(NULL), 0);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(takeCause(NULL), 0);
  ASSERT_EQ(causes_dropped, 110);
}

TEST(failure_cause_belongs_to_its_failure) {
  orStream_t s = newStream();
  launchWithCause(s, 1);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_ERROR(orStreamSynchronize(12345), orErrorInvalidResourceHandle);
  ASSERT_EQ(takeCause(NULL), 0); /* the last error is another */
  launchFailing(s, "k", NULL);
  launchWithCause(s, 10);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorInvalidValue);
  ASSERT_EQ(takeCause(NULL), 0); /* the first failure had none */
  ASSERT_EQ(causes_dropped, 11);
  /* Of a kernel that did not fail after all: the next, on the same lane, has none. */
  launchWithCause(s, -100);
  launchFailing(s, "k", NULL);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorInvalidValue);
  ASSERT_EQ(takeCause(NULL), 0);
}

/* Each of two devices reports its own, whichever is asked first. */
TEST(failure_cause_is_of_its_device) {
  orStream_t here = newStreamOn(0), there = newStreamOn(1);
  launchWithCause(here, 1);
  launchWithCause(there, 2);
  awaitIdle(here);
  ASSERT_ERROR(orStreamSynchronize(there), orErrorLaunchFailure);
  ASSERT_EQ(takeCause(NULL), 2);
  ASSERT_ERROR(orStreamSynchronize(here), orErrorLaunchFailure);
  ASSERT_EQ(takeCause(NULL), 1);
}

TEST(failure_cause_is_dropped_by_a_reset) {
  orStream_t s = newStream();
  launchWithCause(s, 1);
  awaitIdle(s);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(causes_dropped, 1);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(takeCause(NULL), 0);
}

static orError_t loseWithCause(void *args) {
  setCause(*(int *)args);
  return orErrorDeviceLost;
}

/* The device says that it is lost as often as it is asked: there is one cause, which nobody
 * gets. */
TEST(failure_cause_of_a_lost_device) {
  orStream_t s = newStream();
  launchWithCause(s, 1);
  awaitIdle(s);
  int number = 10;
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = s,
                                         .fn = loseWithCause,
                                         .args = &number,
                                         .args_size = sizeof number,
                                         .name = "loses"}));
  for (int i = 0; i < 2; i++) {
    ASSERT_ERROR(orStreamSynchronize(s), orErrorDeviceLost);
    ASSERT_EQ(takeCause(NULL), 0);
  }
  /* The worker drops the first just after the loss is known. */
  while (causes_dropped == 0) sleepMs(1);
  ASSERT_EQ(causes_dropped, 1);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(causes_dropped, 11);
}

TEST(failure_cause_of_an_external_event) {
  orEvent_t e = newGate(), other = newGate();
  setCause(1);
  setCause(10);
  ASSERT_EQ(causes_dropped, 1);
  ASSERT_OK(orEventSignal(e, orErrorLaunchFailure));
  ASSERT_OK(orEventSignal(other, orErrorInvalidValue));
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorLaunchFailure, "external event");
  ASSERT_EQ(takeCause(NULL), 10);
  /* Of a signal that is refused, and of one that is no failure: the next has none. */
  setCause(100);
  ASSERT_ERROR(orEventSignal(e, orErrorLaunchFailure), orErrorInvalidValue);
  ASSERT_EQ(causes_dropped, 101);
  setCause(1000);
  ASSERT_OK(orEventSignal(newGate(), orSuccess));
  ASSERT_EQ(causes_dropped, 1101);
  ASSERT_OK(orEventSignal(newGate(), orErrorLaunchFailure));
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT_EQ(takeCause(NULL), 0);
}

/* On the thread that waits, which may leave a failure itself afterwards. */
TEST(failure_cause_of_a_task_that_its_waiter_runs) {
  int number = -1;
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = newStream(),
                                         .fn = failWithCause,
                                         .args = &number,
                                         .args_size = sizeof number,
                                         .flags = orLaunchAnyThread | orLaunchWaits,
                                         .name = "caused"}));
  ASSERT_EQ(causes_dropped, 1);
  ASSERT_OK(orEventSignal(newGate(), orErrorLaunchFailure));
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT_EQ(takeCause(NULL), 0);
}

static void *ignoreFailure(void *stream) {
  ASSERT_ERROR(orStreamSynchronize(*(orStream_t *)stream), orErrorLaunchFailure);
  setCause(10);
  return NULL;
}

TEST(failure_cause_of_a_thread_that_ends) {
  orStream_t s = newStream();
  launchWithCause(s, 1);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, ignoreFailure, &s), 0);
  pthread_join(thread, NULL);
  ASSERT_EQ(causes_dropped, 11);
}

TEST(failure_cause_without_a_drop) {
  int cause;
  orSetFailureCause(&cause, NULL);
  orSetFailureCause(&cause, NULL);
  ASSERT_OK(orEventSignal(newGate(), orErrorLaunchFailure));
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT_PTR(orTakeFailureCause(NULL), &cause);
}

/* ---- reset ---- */

static atomic_int dropped;
static void countDrop(void *args) {
  (void)args;
  atomic_fetch_add(&dropped, 1);
}

TEST(failure_reset_drops_and_completes) {
  orStream_t s = newStream(), other = newStreamOn(1), waits = newStream();
  orEvent_t gate = closeGate(s), e = newEvent(0);
  atomic_int ran = 0;
  void *pointer = &ran, *memory;
  ASSERT_OK(orMalloc(&memory, 64));
  orLaunch l = {.size = sizeof l,
                .stream = s,
                .fn = countKernel,
                .args = &pointer,
                .args_size = sizeof pointer,
                .drop = countDrop,
                .name = "gated"};
  for (int i = 0; i < 500; i++) ASSERT_OK(orLaunchKernelEx(&l));
  ASSERT_OK(orMemsetAsync(memory, 1, 64, s));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orStreamWaitEvent(other, e)); /* another device's wait is released, and its work runs */
  launch(other, countKernel, &ran);
  ASSERT_OK(orStreamWaitEvent(waits, e));
  launch(waits, countKernel, &ran);
  launchFailing(newStream(), "k", NULL);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(dropped, 500);
  ASSERT_OK(orEventQuery(e));
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orStreamQuery(waits));
  ASSERT_OK(orDeviceSynchronize()); /* the error is gone */
  ASSERT_OK(orStreamSynchronize(other));
  ASSERT_EQ(ran, 1);
  /* Everything is usable as before: streams, events, memory; the gate is still closed. */
  ASSERT_ERROR(orEventQuery(gate), orErrorNotReady);
  launch(s, countKernel, &ran);
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_EQ(ran, 2);
  ASSERT_OK(orMemset(memory, 3, 64));
  char host[64];
  ASSERT_OK(orMemcpy(host, memory, 64, orMemcpyDefault));
  ASSERT_EQ(host[63], 3);
  ASSERT_OK(orFree(memory));
  openGate(gate);
}

TEST(failure_reset_leaves_the_other_device_alone) {
  orStream_t there = newStreamOn(1);
  orEvent_t gate = closeGate(there);
  atomic_int ran = 0;
  launch(there, countKernel, &ran);
  launch(newStream(), countKernel, &ran);
  ASSERT_OK(orDeviceReset());
  ASSERT_ERROR(orStreamQuery(there), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(there));
  ASSERT_GE(ran, 1);
}

TEST(failure_reset_waits_for_the_running_task) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  Holder h = {0};
  hold(s, &h);
  launch(s, countKernel, &ran);
  letGo(&h);
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orStreamQuery(s));
}

/* Whenever the reset comes: before the wait has been looked at, while it is, after the stream has
 * parked. */
TEST_WITH_LIMIT(failure_reset_at_any_moment, 30) {
  orStream_t streams[4];
  orEvent_t gate = newGate();
  for (int i = 0; i < 4; i++) streams[i] = newStream();
  uint64_t end = nowNs() + 2000000000;
  for (int i = 0; nowNs() < end; i++) {
    for (int k = 0; k < 4; k++) ASSERT_OK(orStreamWaitEvent(streams[k], gate));
    for (volatile int pause = i % 64 * 16; pause > 0; pause--) {
    }
    ASSERT_OK(orDeviceReset());
    for (int k = 0; k < 4; k++) ASSERT_OK(orStreamQuery(streams[k]));
  }
}

static orError_t seen_in_drop;

static void waitInDrop(void *cause) {
  (void)cause;
  seen_in_drop = orDeviceSynchronize();
}

static orError_t failWithWaitingCause(void *args) {
  orSetFailureCause(args, waitInDrop);
  return orErrorLaunchFailure;
}

/* A lane drops the second, as the first failure is the one that is kept. */
TEST(failure_cause_may_not_wait_when_it_is_dropped) {
  orStream_t s = newStream();
  launch(s, failWithWaitingCause, NULL);
  launch(s, failWithWaitingCause, NULL);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_ERROR(seen_in_drop, orErrorNotPermitted);
}

/* ---- a task of a vendor's device for which there is no event ---- */

static struct {
  orEvent_t spare[2], made;
} events;

static void *useSpare(void *unused) {
  (void)unused;
  ASSERT_OK(orEventDestroy(events.spare[0]));
  events.made = newGate();
  return NULL;
}

/* On the lane, after the task has failed and before its end: another thread makes an event
 * meanwhile. */
static void useSpareElsewhere(void *cause) {
  pthread_t thread;
  (void)cause;
  ASSERT_EQ(pthread_create(&thread, NULL, useSpare, NULL), 0);
  pthread_join(thread, NULL);
}

static void setCauseOnLane(int lane, int wide) {
  (void)lane, (void)wide;
  orSetFailureCause(&events, useSpareElsewhere);
}

static void makeAllEvents(void) {
  orEvent_t next;
  for (size_t n = 0; !orEventCreate(&next); n++) events.spare[n % 2] = next;
}

/* A million events take seconds under a sanitizer or an emulator. */
TEST_WITH_LIMIT(failure_for_want_of_an_event_leaves_the_records_of_others, 60) {
  static const orDeviceFactory factory = STUB_FACTORY("stub", stubCreate);
  atomic_int ran = 0;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &factory));
  ASSERT_OK(orSetWorkerHook(setCauseOnLane));
  ASSERT_OK(orEventSignal(
      newGate(), orErrorInvalidValue)); /* so the later failure's cause is dropped at once */
  makeAllEvents();
  launch(OR_STREAM_DEFAULT, countKernel, &ran);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorInvalidValue);
  ASSERT_EQ(ran, 0);
  ASSERT_OK(orEventDestroy(events.spare[1]));
  orEvent_t other = newGate();
  openGate(events.made);
  ASSERT_ERROR(orEventQuery(other), orErrorNotReady);
}
