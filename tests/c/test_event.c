/*
 * Events: versions, waits, external completion, elapsed time.
 */
#include <pthread.h>
#include <stdio.h>

#include "gate.h"

/* ---- records and waits ---- */

TEST(event_never_recorded) {
  orEvent_t e = newEvent(0);
  orStream_t s = newStream();
  ASSERT_OK(orEventQuery(e));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_OK(orStreamWaitEvent(s, e)); /* no-op */
  ASSERT_OK(orStreamQuery(s));
}

TEST(event_is_done_after_its_stream_got_there) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0), gate = closeGate(s);
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_ERROR(orEventQuery(e), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_OK(orEventQuery(e));
  ASSERT_OK(orEventDestroy(e));
}

/* Whoever has seen a record's end finds the stream at least that far. */
TEST(event_done_means_stream_got_there) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  for (int i = 0; i < 20000; i++) {
    ASSERT_OK(orEventRecord(e, s));
    if (i % 2)
      ASSERT_OK(orEventSynchronize(e));
    else
      while (orEventQuery(e) == orErrorNotReady) {
      }
    ASSERT_OK(orStreamQuery(s));
  }
}

TEST(event_wait_orders_streams) {
  for (int across = 0; across < 2; across++) {
    orStream_t first = newStreamOn(0), second = newStreamOn(across);
    orEvent_t e = newEvent(0), gate = closeGate(first);
    atomic_int ran = 0;
    ASSERT_OK(orEventRecord(e, first));
    ASSERT_OK(orStreamWaitEvent(second, e));
    launch(second, countKernel, &ran);
    ASSERT_ERROR(orStreamQuery(second), orErrorNotReady);
    ASSERT_EQ(ran, 0);
    openGate(gate);
    ASSERT_OK(orStreamSynchronize(second));
    ASSERT_EQ(ran, 1);
  }
}

/* record(a); b waits; record(b): the wait is for the first record, whatever comes later. */
TEST(event_recorded_again_by_its_waiter) {
  orStream_t a = newStream(), b = newStream();
  orEvent_t e = newEvent(0);
  for (int i = 0; i < 2000; i++) {
    ASSERT_OK(orEventRecord(e, a));
    ASSERT_OK(orStreamWaitEvent(b, e));
    ASSERT_OK(orEventRecord(e, b));
    ASSERT_OK(orStreamWaitEvent(a, e));
  }
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_OK(orStreamSynchronize(b));
}

TEST(event_wait_keeps_the_record_it_bound_to) {
  orStream_t first = newStream(), other = newStream(), early = newStream(), late = newStream();
  orEvent_t e = newEvent(0), gate = closeGate(first), other_gate = closeGate(other);
  ASSERT_OK(orEventRecord(e, first));
  ASSERT_OK(orStreamWaitEvent(early, e));
  ASSERT_OK(orEventRecord(e, other));
  ASSERT_OK(orStreamWaitEvent(late, e));
  openGate(other_gate); /* the newer record: satisfies the later wait alone */
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_OK(orStreamSynchronize(late));
  ASSERT_ERROR(orStreamQuery(early), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(early));
}

TEST(event_newer_record_does_not_hold_an_earlier_wait) {
  orStream_t first = newStream(), other = newStream(), early = newStream();
  orEvent_t e = newEvent(0), gate = closeGate(first), other_gate = closeGate(other);
  ASSERT_OK(orEventRecord(e, first));
  ASSERT_OK(orStreamWaitEvent(early, e));
  ASSERT_OK(orEventRecord(e, other));
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(early)); /* though the event's newest record is not done */
  ASSERT_ERROR(orEventQuery(e), orErrorNotReady);
  openGate(other_gate);
  ASSERT_OK(orEventSynchronize(e));
}

TEST(event_own_stream_is_no_wait) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0), gate = closeGate(s);
  orWorkerInfo before = {.size = sizeof before}, after = {.size = sizeof after};
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orGetWorkerInfo(&before));
  ASSERT_OK(orStreamWaitEvent(s, e));
  ASSERT_OK(orGetWorkerInfo(&after));
  ASSERT_EQ(after.queued, before.queued);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(event_of_another_device_is_refused) {
  orEvent_t e = newEvent(0);
  orStream_t there = newStreamOn(1);
  ASSERT_REFUSED(orEventRecord(e, there), orErrorInvalidValue,
                 "an event of device 0 cannot be recorded on a stream of device 1");
  ASSERT_OK(orEventQuery(e)); /* still never recorded */
  ASSERT_OK(orStreamQuery(there));
  atomic_int ran = 0;
  launch(there, countKernel, &ran);
  ASSERT_OK(orStreamSynchronize(there));
  ASSERT_EQ(ran, 1);
}

TEST(event_destroyed_while_waited_for) {
  orStream_t first = newStream(), second = newStream();
  orEvent_t gate = closeGate(first), e = newEvent(0);
  atomic_int ran = 0;
  ASSERT_OK(orEventRecord(e, first));
  ASSERT_OK(orStreamWaitEvent(second, e));
  launch(second, countKernel, &ran);
  ASSERT_OK(orEventDestroy(e));
  orEvent_t again = newEvent(0); /* may use the slot */
  ASSERT_OK(orEventRecord(again, OR_STREAM_DEFAULT));
  ASSERT_OK(orEventSynchronize(again));
  ASSERT_ERROR(orStreamQuery(second), orErrorNotReady);
  ASSERT_EQ(ran, 0);
  openGate(gate);
  ASSERT_OK(orEventDestroy(gate));
  ASSERT_OK(orStreamSynchronize(second));
  ASSERT_EQ(ran, 1);
}

static void refuseEvent(orEvent_t e) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", (unsigned long long)e);
  orStream_t s = newStream();
  float ms;
  ASSERT_REFUSED(orEventRecord(e, s), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamWaitEvent(s, e), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventQuery(e), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventSynchronize(e), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventSignal(e, orSuccess), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventDestroy(e), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventElapsedTime(&ms, e, e), orErrorInvalidResourceHandle, text);
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orStreamDestroy(s));
}

TEST(event_bad_handles_are_refused) {
  orEvent_t e = newEvent(0);
  ASSERT_OK(orEventDestroy(e));
  refuseEvent(e);
  ASSERT_NE(newEvent(0), e);
  refuseEvent(e);
  refuseEvent(0);
  refuseEvent(newStream());
  refuseEvent(UINT64_MAX);
  orEvent_t none;
  ASSERT_REFUSED(orEventCreateWithFlags(&none, 4), orErrorInvalidValue, "0x4");
  ASSERT_ERROR(orEventCreate(NULL), orErrorInvalidValue);
}

/* ---- external events ---- */

TEST(event_external) {
  orEvent_t e = newGate();
  orStream_t s = newStream();
  ASSERT_ERROR(orEventQuery(e), orErrorNotReady); /* pending from its creation */
  ASSERT_REFUSED(orEventRecord(e, s), orErrorInvalidValue, "external");
  ASSERT_OK(orStreamWaitEvent(s, e));
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  ASSERT_OK(orEventSignal(e, orSuccess));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventQuery(e));
  ASSERT_OK(orEventSynchronize(e));
  ASSERT_REFUSED(orEventSignal(e, orSuccess), orErrorInvalidValue, "already");
  ASSERT_OK(orStreamWaitEvent(s, e)); /* done: a no-op */
  ASSERT_OK(orStreamQuery(s));
  ASSERT_REFUSED(orEventSignal(newEvent(0), orSuccess), orErrorInvalidValue, "external");
}

TEST(event_signal_says_how_the_work_has_ended) {
  orEvent_t e = newGate();
  ASSERT_REFUSED(orEventSignal(e, orErrorNotReady), orErrorInvalidValue, "orErrorNotReady");
  ASSERT_ERROR(orEventQuery(e), orErrorNotReady);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orEventSignal(e, orSuccess));
}

static void *signalLater(void *event) {
  sleepMs(5);
  ASSERT_OK(orEventSignal(*(orEvent_t *)event, orSuccess));
  return NULL;
}

TEST(event_external_wakes_hosts_and_streams) {
  for (int i = 0; i < 20; i++) {
    orEvent_t e = newGate();
    orStream_t here = newStreamOn(0), there = newStreamOn(1);
    pthread_t thread;
    ASSERT_OK(orStreamWaitEvent(here, e));
    ASSERT_OK(orStreamWaitEvent(there, e));
    ASSERT_EQ(pthread_create(&thread, NULL, signalLater, &e), 0);
    ASSERT_OK(orEventSynchronize(e));
    ASSERT_OK(orStreamSynchronize(here));
    ASSERT_OK(orStreamSynchronize(there));
    pthread_join(thread, NULL);
  }
}

TEST(event_external_failure_surfaces_once) {
  orEvent_t e = newGate();
  orStream_t s = newStream();
  atomic_int ran = 0;
  ASSERT_OK(orStreamWaitEvent(s, e));
  launch(s, countKernel, &ran);
  ASSERT_OK(orEventSignal(e, orErrorLaunchFailure));
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventSynchronize(e));
}

/* One signaller, many signals at once: exactly one counts. */
static void signalOnce(int thread, void *context) {
  (void)thread;
  orEvent_t *events = context;
  for (int i = 0; i < 500; i++)
    if (orEventSignal(events[i], orSuccess) == orSuccess)
      atomic_fetch_add((atomic_int *)(events + 500), 1);
}

TEST(event_signal_counts_once) {
  static struct {
    orEvent_t events[500];
    atomic_int signalled;
  } all;
  for (int i = 0; i < 500; i++) all.events[i] = newGate();
  runThreads(4, signalOnce, &all);
  ASSERT_EQ(all.signalled, 500);
}

/* ---- elapsed time ---- */

TEST(event_elapsed_time) {
  orStream_t s = newStream();
  orEvent_t start = newEvent(0), end = newEvent(0);
  float ms = -1;
  ASSERT_OK(orEventRecord(start, s));
  ASSERT_OK(orLaunchSleep(s, 20000000));
  ASSERT_OK(orEventRecord(end, s));
  ASSERT_OK(orEventSynchronize(end));
  ASSERT_OK(orEventElapsedTime(&ms, start, end));
  ASSERT_GE(ms * 1000, 20000);
  float back = 1;
  ASSERT_OK(orEventElapsedTime(&back, end, start));
  ASSERT_NEAR(back, -ms, 1e-6);
}

/* The time is taken when the mark runs, not when it is queued. */
TEST(event_elapsed_time_does_not_count_the_queue) {
  orStream_t s = newStream();
  orEvent_t start = newEvent(0), end = newEvent(0), gate = closeGate(s);
  ASSERT_OK(orEventRecord(start, s));
  sleepMs(30);
  uint64_t opened = nowNs();
  openGate(gate);
  ASSERT_OK(orEventRecord(end, s));
  ASSERT_OK(orEventSynchronize(end));
  float ms = -1;
  ASSERT_OK(orEventElapsedTime(&ms, start, end));
  ASSERT_GE(ms, 0);
  ASSERT_LE(ms, (double)(nowNs() - opened) / 1e6);
}

TEST(event_elapsed_time_errors) {
  orStream_t s = newStream(), there = newStreamOn(1);
  orEvent_t good = newEvent(0), unrecorded = newEvent(0), untimed = newEvent(orEventDisableTiming);
  float ms;
  ASSERT_OK(orEventRecord(good, s));
  ASSERT_OK(orEventRecord(untimed, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_REFUSED(orEventElapsedTime(&ms, unrecorded, good), orErrorEventNotRecorded,
                 "start event has not been recorded");
  ASSERT_REFUSED(orEventElapsedTime(&ms, good, unrecorded), orErrorEventNotRecorded,
                 "end event has not been recorded");
  ASSERT_REFUSED(orEventElapsedTime(&ms, untimed, good), orErrorEventNotTimed,
                 "start event was created without timing");
  ASSERT_REFUSED(orEventElapsedTime(&ms, good, untimed), orErrorEventNotTimed,
                 "end event was created without timing");
  ASSERT_ERROR(orEventElapsedTime(NULL, good, good), orErrorInvalidValue);
  orEvent_t gate = closeGate(s), pending = newEvent(0);
  ASSERT_OK(orEventRecord(pending, s));
  ASSERT_ERROR(orEventElapsedTime(&ms, good, pending), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orEventElapsedTime(&ms, good, pending));
  ASSERT_OK(orSetDevice(1));
  orEvent_t foreign = newEvent(0);
  ASSERT_OK(orEventRecord(foreign, there));
  ASSERT_OK(orEventSynchronize(foreign));
  ASSERT_REFUSED(orEventElapsedTime(&ms, good, foreign), orErrorInvalidValue,
                 "device 0 and device 1");
}

/* ---- wake-ups: sleepers of every kind, again and again ---- */

static void pingPong(int thread, void *context) {
  orStream_t *streams = context;
  orEvent_t e = newEvent(0);
  for (int i = 0; i < 1000; i++) {
    ASSERT_OK(orLaunchSleep(streams[thread], i % 7 * 10000));
    ASSERT_OK(orEventRecord(e, streams[thread]));
    ASSERT_OK(orStreamWaitEvent(streams[!thread], e));
    if (i % 3 == 0) ASSERT_OK(orEventSynchronize(e));
    if (i % 5 == 0) ASSERT_OK(orStreamSynchronize(streams[!thread]));
  }
}

TEST(event_threads_that_wait_for_each_other) {
  orStream_t streams[2] = {newStream(), newStream()};
  runThreads(2, pingPong, streams);
  ASSERT_OK(orDeviceSynchronize());
}

enum { EVENT_FAN = 100 };

TEST(event_releases_everybody) {
  orStream_t source = newStream(), sinks[EVENT_FAN];
  atomic_int ran = 0;
  for (int i = 0; i < EVENT_FAN; i++) sinks[i] = newStreamOn(i % 2);
  for (int round = 0; round < 20; round++) {
    orEvent_t gate = closeGate(source), e = newEvent(orEventDisableTiming);
    ASSERT_OK(orEventRecord(e, source));
    for (int i = 0; i < EVENT_FAN; i++) {
      ASSERT_OK(orStreamWaitEvent(sinks[i], e));
      launch(sinks[i], countKernel, &ran);
    }
    ASSERT_OK(orEventDestroy(e));
    openGate(gate);
    ASSERT_OK(orEventDestroy(gate));
    for (int i = 0; i < EVENT_FAN; i++) ASSERT_OK(orStreamSynchronize(sinks[i]));
    ASSERT_EQ(ran, EVENT_FAN * (round + 1));
  }
}

/* The first use of a device comes before the lock of an event. */
TEST(event_recorded_where_the_default_stream_is_yet_to_be_made) {
  orEvent_t e = newEvent(0);
  ASSERT_OK(orSetDevice(1));
  ASSERT(!orDeviceIsActive(1));
  ASSERT_REFUSED(orEventRecord(e, OR_STREAM_DEFAULT), orErrorInvalidValue, "stream of device 1");
}
