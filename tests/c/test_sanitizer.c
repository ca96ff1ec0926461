/*
 * The sanitizer: what is ordered and what is not, of streams, events and the host.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sanitizer_helpers.h"

/* ---- Two streams ---- */

TEST(sanitizer_reports_a_write_that_nothing_orders) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  ASSERT_EQ(writes(s0, "aten::fill_", a, 4 * KIB), 0);
  ASSERT_EQ(writes(s1, "aten::mul.out", a + KIB, 4), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.earlier.operation, "aten::fill_");
  ASSERT_STR(r.later.operation, "aten::mul.out");
  ASSERT_EQ(r.earlier.stream, s0);
  ASSERT_EQ(r.later.stream, s1);
  ASSERT_EQ(r.later.device, 0);
  ASSERT_STR(r.earlier.where, "the default stream of openreg:0");
  ASSERT_EQ(r.earlier.write, 1);
  ASSERT_PTR(r.earlier.begin, a);
  ASSERT_PTR(r.earlier.end, a + 4 * KIB);
  ASSERT_PTR(r.begin, a + KIB);
  ASSERT_PTR(r.end, a + KIB + 4);
  ASSERT_STR(r.memory, "openreg:0");
  char stream[64];
  snprintf(stream, sizeof stream, "s1 stream 0x%llx of openreg:0", (unsigned long long)s1);
  ASSERT_CONTAINS(r.advice, "s1.wait_stream(s0) before aten::mul.out");
  ASSERT_CONTAINS(r.advice, "s0 being the default stream of openreg:0");
  ASSERT_CONTAINS(r.advice, stream);
}

TEST(sanitizer_knows_reads_from_writes) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *b = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  ASSERT_EQ(reads(s1, "read", a, KIB), 1);
  reads(s0, "read", b, KIB);
  ASSERT_EQ(reads(s1, "read", b, KIB), 0);
  ASSERT_EQ(writes(s2, "write", b, KIB), 2); /* two streams read it: a report each */
  ASSERT_EQ(reportCount(), 3);
}

TEST(sanitizer_follows_an_event) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  waitStream(s1, s0);
  writes(s1, "write", a, KIB);
  ASSERT_CLEAN();
  ASSERT_EQ(writes(s0, "late", a, KIB), 1); /* the other way round there is no order */
  ASSERT_STR(reportAt(1).earlier.operation, "write");
}

TEST(sanitizer_follows_what_came_before_the_record_only) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t event = record(s0);
  writes(s0, "write", a, KIB);
  ASSERT_OK(orStreamWaitEvent(s1, event));
  ASSERT_EQ(reads(s1, "read", a, KIB), 1);
}

TEST(sanitizer_follows_events_through_a_third_stream) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStreamOn(1);
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  waitStream(s1, s0);
  waitStream(s2, s1);
  writes(s2, "write", a, KIB);
  ASSERT_CLEAN();
}

/* The wait is for the second record alone. */
TEST(sanitizer_sees_that_a_record_was_replaced) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  orEvent_t event = record(s0);
  ASSERT_OK(orEventRecord(event, s1));
  ASSERT_OK(orStreamWaitEvent(s2, event));
  ASSERT_EQ(reads(s2, "read", a, KIB), 1);
  ASSERT_CONTAINS(reportAt(1).advice, "the event that it waited for had been recorded again");
}

TEST(sanitizer_accepts_a_replaced_record_that_loses_nothing) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  orEvent_t event = record(s0);
  ASSERT_OK(orStreamWaitEvent(s1, event));
  ASSERT_OK(orEventRecord(event, s1));
  ASSERT_OK(orStreamWaitEvent(s2, event));
  reads(s2, "read", a, KIB);
  ASSERT_CLEAN();
}

/* ---- The host ---- */

TEST(sanitizer_follows_synchronisation) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), other = newStreamOn(1);
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  ASSERT_OK(orStreamSynchronize(s0));
  writes(s1, "write", a, KIB);
  orEvent_t event = record(s1);
  ASSERT_OK(orEventSynchronize(event));
  writes(other, "write", a, KIB);
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  writes(s0, "write", a, KIB);
  ASSERT_CLEAN();
  ASSERT_OK(orDeviceSynchronize()); /* of device 1 */
  ASSERT_EQ(writes(s1, "write", a, KIB), 1);
  writes(other, "write", a + KIB, KIB);
  ASSERT_OK(orSetDevice(0));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(writes(s0, "write", a + KIB, KIB), 2);
}

TEST(sanitizer_follows_queries_that_say_done) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  writes(s0, "write", a, KIB);
  orEvent_t event = record(s0);
  ASSERT_ERROR(orEventQuery(event), orErrorNotReady);
  openGate(gate);
  while (orEventQuery(event)) sched_yield();
  writes(s1, "write", a, KIB);
  while (orStreamQuery(s1)) sched_yield();
  writes(s2, "write", a, KIB);
  ASSERT_CLEAN();
}

TEST(sanitizer_learns_nothing_from_queries_that_say_not_ready) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  Holder holder = {0};
  hold(s0, &holder);
  writes(s0, "write", a, KIB);
  ASSERT_ERROR(orStreamQuery(s0), orErrorNotReady);
  ASSERT_ERROR(orEventQuery(record(s0)), orErrorNotReady);
  ASSERT_EQ(writes(s1, "write", a, KIB), 1);
  letGo(&holder);
}

/* A setting for debugging must not hide what goes wrong without it. */
TEST(sanitizer_is_not_misled_by_blocking_launches) {
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  atomic_int count = 0;
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  launch(s0, countKernel, &count);
  ASSERT_EQ(writes(s1, "write", a, KIB), 1);
}

/* The wait for large pageable memory is no promise: small memory is staged. */
TEST(sanitizer_is_not_misled_by_pageable_sources) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  size_t size = 1 << 20;
  char *a = deviceMemory(size), *b = malloc(size);
  memset(b, 1, size);
  ASSERT_OK(orMemcpyAsync(a, b, size, orMemcpyHostToDevice, s0));
  ASSERT_EQ(reads(s1, "read", a, KIB), 1);
  ASSERT_OK(orMemcpyAsync(b, a, size, orMemcpyDeviceToHost, s0)); /* returns when it is done */
  ASSERT_EQ(writes(s1, "write", a, KIB), 0);
  free(b);
}

TEST(sanitizer_forgets_what_an_allocator_waits_for) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  writes(s0, "write", a + KIB, KIB);
  writes(s1, "write", a + 2 * KIB, KIB);
  ASSERT_OK(orSanitizerUsed(a, KIB, s0));
  ASSERT_EQ(writes(s1, "write", a, KIB), 0);
  ASSERT_EQ(writes(s1, "write", a + KIB, KIB), 1); /* bytes and streams that it was not told of */
  ASSERT_OK(orSanitizerUsed(a, 4 * KIB, s0));
  ASSERT_EQ(writes(s0, "write", a + 2 * KIB, KIB), 2);
  ASSERT_ERROR(orSanitizerUsed(a, KIB, 12345), orErrorInvalidResourceHandle);
}

TEST(sanitizer_is_told_of_other_order) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  ASSERT_OK(orSanitizerEventOver(record(s0)));
  writes(s1, "write", a, KIB);
  orEvent_t done = newGate();
  ASSERT_OK(orSanitizerEventAfter(done, s1));
  ASSERT_OK(orStreamWaitEvent(s2, done));
  writes(s2, "write", a, KIB);
  openGate(done);
  ASSERT_CLEAN();
  ASSERT_REFUSED(orSanitizerEventAfter(record(s1), s1), orErrorInvalidValue, "external");
  ASSERT_ERROR(orSanitizerEventAfter(done, done), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orSanitizerEventAfter(s1, s1), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orSanitizerEventOver(s1), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orSanitizerMarkExternal(done), orErrorInvalidResourceHandle);
}

/* What is told of a stream on which nothing runs; `done` stands for it. */
static orEvent_t tellAside(orStream_t aside, orStream_t after, char *data) {
  orEvent_t done = newGate();
  ASSERT_OK(orStreamWaitEvent(aside, record(after)));
  ASSERT_OK(orSanitizerMarkExternal(aside));
  writes(aside, "beside", data, KIB);
  ASSERT_OK(orSanitizerEventAfter(done, aside));
  return done;
}

TEST(sanitizer_takes_events_alone_to_order_what_is_aside) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), aside = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  for (int signalled = 0; signalled < 2; signalled++) {
    writes(s0, "write", a, KIB);
    orEvent_t done = tellAside(aside, s0, a);
    if (signalled) openGate(done);
    ASSERT_OK(orDeviceSynchronize());
    ASSERT_EQ(writes(s0, "write", a, KIB), 1);
    ASSERT_STR(reportAt(1).advice, "work.wait() before write, work being what beside returned");
    ASSERT_OK(orSanitizerClearReports());
    ASSERT_OK(orStreamWaitEvent(s0, done));
    writes(s0, "write", a, KIB);
    if (!signalled) openGate(done);
    done = tellAside(aside, s0, a);
    if (signalled) openGate(done);
    ASSERT_OK(orSanitizerEventOver(done));
    writes(s1, "write", a, KIB);
    ASSERT_OK(orStreamWaitEvent(s0, record(s1)));
    if (!signalled) openGate(done);
    ASSERT_CLEAN();
  }
}

TEST(sanitizer_ignores_a_thread_that_works_for_others) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  ASSERT_EQ(orSanitizerIgnore(1), 0);
  ASSERT_EQ(writes(s1, "ignored", a, KIB), 0);
  ASSERT_OK(orMemsetAsync(a, 0, KIB, s1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(orSanitizerIgnore(0), 1);
  ASSERT_CLEAN();
  ASSERT_EQ(writes(s1, "late", a, KIB), 1); /* nor has the host waited */
}

static void doNothing(void *data) { (void)data; }

TEST(sanitizer_takes_host_functions_to_tell_the_host) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s0, "write", a, KIB);
  ASSERT_OK(orLaunchHostFunc(s0, doNothing, NULL));
  writes(s1, "write", a, KIB);
  ASSERT_CLEAN();
}

/* ---- Gates ---- */

/* What is behind the gate may come after what the host sees to before it opens it. */
TEST(sanitizer_decides_behind_a_gate_when_it_opens) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *b = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  writes(s0, "behind", a, KIB);
  writes(s1, "other", a, KIB);
  ASSERT_OK(orStreamSynchronize(s1));
  writes(s1, "not waited for", b, KIB);
  writes(s0, "behind", b, KIB);
  ASSERT_CLEAN();
  openGate(gate);
  ASSERT_EQ(reportCount(), 1);
  ASSERT_STR(reportAt(1).earlier.operation, "not waited for");
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  ASSERT_EQ(writes(s1, "after", b, KIB), 2);
}

/* What the gate has put in order is two accesses still. */
TEST(sanitizer_remembers_both_sides_of_a_gate) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  writes(s0, "behind", a, KIB);
  writes(s1, "first", a, KIB);
  ASSERT_OK(orStreamSynchronize(s1));
  openGate(gate);
  ASSERT_CLEAN();
  waitStream(s2, s1);
  ASSERT_EQ(reads(s2, "read", a, KIB), 1);
  ASSERT_STR(reportAt(1).earlier.operation, "behind");
}

TEST(sanitizer_follows_gates_through_events) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  writes(s2, "first", a, KIB);
  orEvent_t gate = closeGate(s0);
  waitStream(s1, s0);
  writes(s1, "behind", a, KIB);
  ASSERT_OK(orStreamSynchronize(s2));
  openGate(gate);
  ASSERT_CLEAN();
  waitStream(s2, s1);
  writes(s2, "third", a, KIB);
  ASSERT_CLEAN();
}

TEST(sanitizer_decides_behind_a_gate_of_another_stream) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  for (int i = 0; i < 5; i++) ASSERT_OK(orStreamWaitEvent(s0, gate)); /* one gate */
  waitStream(s1, s0);
  writes(s1, "behind", a, KIB);
  writes(s2, "other", a, KIB);
  ASSERT_CLEAN();
  openGate(gate);
  ASSERT_EQ(reportCount(), 1);
}

enum { GATES = 6 }; /* two more than a stream remembers */

/* The last one may order what the others do not. */
TEST(sanitizer_reports_nothing_behind_more_gates_than_it_remembers) {
  orStream_t s0 = defaultOf(0), s1 = newStream(), s2 = newStream();
  orEvent_t gates[GATES];
  sanitize();
  char *a = deviceMemory(4 * KIB), *b = deviceMemory(4 * KIB);
  for (int i = 0; i < GATES - 1; i++) gates[i] = closeGate(s0);
  writes(s0, "behind", a, KIB);
  gates[GATES - 1] = closeGate(s0);
  writes(s1, "other", a, KIB);
  waitStream(s2, s0);
  writes(s2, "behind as well", b, KIB);
  writes(s1, "other", b, KIB);
  for (int i = 0; i < GATES - 1; i++) openGate(gates[i]);
  ASSERT_OK(orStreamSynchronize(s1));
  openGate(gates[GATES - 1]);
  ASSERT_CLEAN();
  ASSERT_OK(orStreamSynchronize(s2));
  waitStream(s2, s0);
  writes(s2, "known again", b, KIB);
  ASSERT_EQ(writes(s1, "other", b, KIB), 1);
}

TEST(sanitizer_takes_an_event_that_is_destroyed_for_signalled) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  writes(s0, "behind", a, KIB);
  writes(s1, "other", a, KIB);
  ASSERT_CLEAN();
  ASSERT_OK(orEventDestroy(gate));
  ASSERT_EQ(reportCount(), 1);
}

TEST(sanitizer_knows_a_gate_that_was_opened_while_it_was_off) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB);
  orEvent_t gate = closeGate(s0);
  ASSERT_OK(orSanitizerDisable());
  openGate(gate);
  sanitize();
  ASSERT_OK(orStreamWaitEvent(s0, gate));
  writes(s0, "write", a, KIB);
  ASSERT_EQ(writes(s1, "write", a, KIB), 1);
}

/* ---- Copies, and pinned memory ---- */

TEST(sanitizer_reports_the_host_that_reads_an_unfinished_copy) {
  orStream_t s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *host = pinnedMemory(4 * KIB);
  ASSERT_OK(orMemcpyAsync(host, a, 4 * KIB, orMemcpyDeviceToHost, s1));
  ASSERT_EQ(reads(0, "aten::sum", host + 8, 4), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.memory, "pinned host memory");
  ASSERT_STR(r.earlier.operation, "orMemcpyAsync");
  ASSERT_EQ(r.later.stream, 0);
  ASSERT_EQ(r.later.device, -1);
  ASSERT_STR(r.later.where, "the host");
  ASSERT_CONTAINS(r.advice, "s.synchronize() before aten::sum, or e = s.record_event() after ");
  ASSERT_CONTAINS(r.advice, " and e.synchronize() before aten::sum, s being stream 0x");
  ASSERT_OK(orStreamSynchronize(s1));
  ASSERT_EQ(reads(0, "aten::sum", host + 8, 4), 0);
}

TEST(sanitizer_reports_the_host_that_overwrites_a_source) {
  orStream_t s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *host = pinnedMemory(4 * KIB);
  ASSERT_EQ(writes(0, "aten::fill_", host, 4 * KIB), 0);
  ASSERT_EQ(orSanitizerOperation("aten::copy_") == NULL, 1);
  ASSERT_OK(orMemcpyAsync(a, host, 4 * KIB, orMemcpyHostToDevice, s1));
  ASSERT_STR(orSanitizerOperation(NULL), "aten::copy_");
  ASSERT_EQ(reads(0, "aten::sum", host, 4), 0);
  orEvent_t event = record(s1);
  ASSERT_EQ(writes(0, "aten::fill_", host, 4), 1);
  ASSERT_STR(reportAt(1).earlier.operation, "aten::copy_");
  ASSERT_OK(orEventSynchronize(event));
  ASSERT_EQ(writes(0, "aten::fill_", host, 4), 0);
}

TEST(sanitizer_accepts_a_host_that_writes_before_it_opens_the_gate) {
  orStream_t s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *host = pinnedMemory(4 * KIB);
  orEvent_t gate = closeGate(s1);
  ASSERT_OK(orMemcpyAsync(a, host, 4 * KIB, orMemcpyHostToDevice, s1));
  writes(0, "aten::fill_", host, 4);
  openGate(gate);
  ASSERT_CLEAN();
  ASSERT_EQ(writes(0, "aten::fill_", host, 4), 1);
}

TEST(sanitizer_knows_that_blocking_copies_synchronize_their_stream) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *hosts[] = {malloc(4 * KIB), pinnedMemory(4 * KIB)};
  for (int i = 0; i < 2; i++) {
    ASSERT_OK(orMemsetAsync(a, 2, 4 * KIB, s1));
    ASSERT_OK(orMemcpyWithStream(a, hosts[i], 4 * KIB, orMemcpyHostToDevice, s1));
    ASSERT_EQ(writes(s0, "aten::fill_", a, 4 * KIB), 0);
    ASSERT_OK(orStreamSynchronize(s0));
  }
  ASSERT_OK(orMemcpyAsync(a, hosts[0], 4 * KIB, orMemcpyHostToDevice, s1));
  ASSERT_EQ(writes(s0, "aten::fill_", a, 4 * KIB), 1);
}

TEST(sanitizer_knows_that_pageable_copies_are_waited_for) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *a = deviceMemory(4 * KIB), *host = malloc(4 * KIB);
  ASSERT_OK(orMemsetAsync(a, 1, 4 * KIB, s0));
  ASSERT_OK(orMemcpyAsync(host, a, 4 * KIB, orMemcpyDeviceToHost, s0));
  ASSERT_EQ(reads(0, "aten::sum", host, 4 * KIB), 0);
  ASSERT_OK(orMemsetAsync(a, 2, 4 * KIB, s1));
  ASSERT_OK(orMemcpyAsync(a, host, 4 * KIB, orMemcpyHostToDevice, s1));
  ASSERT_EQ(writes(0, "aten::fill_", host, 4 * KIB), 0);
  ASSERT_CLEAN();
  ASSERT_EQ(writes(s0, "aten::fill_", a, 4 * KIB), 1);
  free(host);
}

TEST(sanitizer_never_reports_memory_that_it_does_not_know) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  sanitize();
  char *host = malloc(KIB);
  writes(s0, "write", host, KIB);
  writes(s1, "write", host, KIB);
  writes(0, "write", host, KIB);
  ASSERT_CLEAN();
  free(host);
}

/* Streams of two devices that read what a third writes. */
TEST(sanitizer_knows_peers) {
  orStream_t s0 = defaultOf(0), s1 = defaultOf(1), s2 = newStreamOn(1);
  sanitize();
  char *a = deviceMemory(4 * KIB);
  ASSERT_OK(orSetDevice(1));
  char *b = deviceMemory(4 * KIB), *c = deviceMemory(4 * KIB);
  writes(s0, "write", a, 4 * KIB);
  waitStream(s1, s0);
  ASSERT_OK(orMemcpyPeerAsync(b, 1, a, 0, 4 * KIB, s1));
  ASSERT_CLEAN();
  ASSERT_OK(orMemcpyPeerAsync(c, 1, a, 0, 4 * KIB, s2));
  ASSERT_EQ(orSanitizerFound(NULL, NULL), 1);
  ASSERT_EQ(reportAt(1).later.device, 1);
  ASSERT_STR(reportAt(1).memory, "openreg:0");
  waitStream(s2, s0);
  ASSERT_EQ(writes(s0, "overwrite", a, 4 * KIB), 2); /* what both still read */
  ASSERT_EQ(reportCount(), 3);
}

/* ---- What correct programs do ---- */

TEST(sanitizer_accepts_a_producer_and_a_consumer) {
  orStream_t producer = newStream(), consumer = newStreamOn(1), s0 = defaultOf(0);
  sanitize();
  char *host = pinnedMemory(KIB);
  for (int round = 0; round < 20; round++) {
    char *a = block(8 * KIB, s0);
    waitStream(producer, s0);
    writes(producer, "produce", a, 8 * KIB);
    ASSERT_OK(orCacheRecordStream(a, producer));
    waitStream(consumer, producer);
    reads(consumer, "consume", a, 8 * KIB);
    ASSERT_OK(orMemcpyAsync(host, a, KIB, orMemcpyDeviceToHost, consumer));
    ASSERT_OK(orCacheRecordStream(a, consumer));
    ASSERT_OK(orCacheFree(a));
    orEvent_t event = record(consumer);
    while (orEventQuery(event)) sched_yield();
    reads(0, "aten::sum", host, KIB);
  }
  ASSERT_CLEAN();
}

TEST(sanitizer_starts_with_the_setting) {
  setenv("OPENREG_SANITIZER", "1", 1);
  orStream_t s0 = defaultOf(0), s1 = newStream();
  ASSERT_EQ(*orSanitizerActive(), 1);
  char *a = deviceMemory(4 * KIB);
  beginCapture();
  ASSERT_OK(orMemsetAsync(a, 1, 4 * KIB, s0));
  synchronizeUnseen(s0);
  ASSERT_OK(orMemsetAsync(a, 2, 4 * KIB, s1));
  const char *text = endCapture();
  ASSERT_EQ(countLines(text), 1);
  ASSERT_CONTAINS(text, "data race on");
  ASSERT_CONTAINS(unwrapped(text), "missing: s1.wait_stream(s0) before orMemsetAsync");
  sanitize(); /* whoever asks for it takes over */
  ASSERT_EQ(reportCount(), 0);
  ASSERT_REFUSED(orSanitizerEnable(NULL), orErrorAlreadyExists, "on already");
  ASSERT_OK(orSanitizerDisable());
  defaultOf(1);
  ASSERT_EQ(*orSanitizerActive(), 0);
}

/* ---- switched on in the midst of a wait ---- */

static struct {
  orEvent_t event;
  orStream_t stream;
  char *memory;
} awaited;

static orError_t signalEvent(void *args) {
  (void)args;
  return orEventSignal(awaited.event, orSuccess);
}

static void *waitAndRead(void *context) {
  (void)context;
  ASSERT_OK(orEventSynchronize(awaited.event));
  reads(awaited.stream, "reader", awaited.memory, 64);
  return NULL;
}

/* Whoever began to wait before the sanitizer was there knows what was done when the wait is
 * over. */
TEST(sanitizer_switched_on_while_a_host_waits) {
  orStream_t writer = newStream();
  pthread_t thread;
  awaited.event = newGate();
  awaited.stream = newStream();
  awaited.memory = deviceMemory(4 * KIB);
  ASSERT_EQ(pthread_create(&thread, NULL, waitAndRead, NULL), 0);
  awaitReport("host thread");
  sanitize();
  writes(writer, "writer", awaited.memory, 64);
  ASSERT_OK(launchAs(writer, signalEvent, NULL, 0));
  ASSERT_EQ(pthread_join(thread, NULL), 0);
  ASSERT_CLEAN();
}
