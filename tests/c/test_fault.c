/*
 * Fault injection: which operation is struck, what it looks like, and that nothing is left behind.
 */
#include "openreg_fault.h"

#include <stdlib.h>
#include <string.h>

#include "gate.h"

static void inject(orFaultKind kind, int device, uint64_t after) {
  ASSERT_OK(orFaultInject(
      &(orFault){.size = sizeof(orFault), .kind = kind, .device = device, .after = after}));
}

static orFaultOutcome outcomeOf(orFaultKind kind, int device) {
  orFaultOutcome outcome = {.size = sizeof outcome};
  ASSERT_OK(orFaultGetOutcome(&outcome, kind, device));
  return outcome;
}

/* What it was when it goes. */
static orFaultOutcome disarm(orFaultKind kind, int device) {
  orFaultOutcome outcome = outcomeOf(kind, device);
  ASSERT_OK(orFaultRemove(kind, device));
  ASSERT_REFUSED(orFaultGetOutcome(&outcome, kind, device), orErrorNotFound, orFaultName(kind));
  return outcome;
}

static void launchNamed(orStream_t stream, const char *name, atomic_int *ran) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = countKernel,
                                         .args = &ran,
                                         .args_size = sizeof ran,
                                         .name = name}));
}

static void *allocate(size_t bytes) {
  void *p;
  ASSERT_OK(orMalloc(&p, bytes));
  return p;
}

static void expectUsable(int device) {
  atomic_int ran = 0;
  char host[8] = {0};
  void *block = NULL;
  int before;
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orSetDevice(device));
  orStream_t s = newStream();
  ASSERT_OK(orCacheMalloc(&block, 8, s));
  ASSERT_OK(orMemsetAsync(block, 7, 8, s));
  launch(s, countKernel, &ran);
  ASSERT_OK(orMemcpyAsync(host, block, 8, orMemcpyDefault, s));
  ASSERT_EQ(host[7], 7);
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orCacheFree(block));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orStreamDestroy(s));
  ASSERT_OK(orSetDevice(before));
}

/* ---- which operation ---- */

TEST(fault_strikes_the_kernel_that_was_counted_in_the_order_of_calls) {
  orStream_t a = newStream(), b = newStreamOfPriority(-3);
  atomic_int ran = 0;
  void *p = allocate(64);
  inject(orFaultKernelError, 0, 2);
  orEvent_t gate = closeGate(a); /* the lanes come to b's first */
  launchNamed(a, "first", &ran);
  ASSERT_OK(orMemsetAsync(p, 0, 64, a));
  launchNamed(a, "aten::copy_", &ran); /* a copy, as the set is */
  launchNamed(a, "second", &ran);
  ASSERT_EQ(outcomeOf(orFaultKernelError, 0).fired, 0);
  launchNamed(b, "third", &ran);
  ASSERT_EQ(outcomeOf(orFaultKernelError, 0).fired, 1);
  launchNamed(b, "fourth", &ran);
  openGate(gate);
  while (orStreamQuery(a) || orStreamQuery(b)) sched_yield();
  ASSERT_EQ(ran, 4);
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorLaunchFailure,
                 "third on openreg:0 failed: injected fault \"kernel_error\"");
  ASSERT(!strstr(orGetLastErrorMessage(), "more"));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_STR(disarm(orFaultKernelError, 0).operation, "third");
  expectUsable(0);
}

TEST(fault_strikes_the_copy_that_was_counted) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  char host[64], *p = allocate(64);
  void *q = allocate(64), *pinned;
  ASSERT_OK(orMallocHost(&pinned, 64));
  memset(host, 1, sizeof host);
  memset(pinned, 1, sizeof host);
  void *const ends[][2] = {{p, host}, {p, pinned}, {host, p}, {pinned, p}, {q, p}};
  for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
    inject(orFaultCopyError, 0, 0);
    launchNamed(s, "kernel", &ran);
    orError_t error = orMemcpyAsync(ends[i][0], ends[i][1], 64, orMemcpyDefault, s);
    if (!error) error = orStreamSynchronize(s);
    ASSERT_EQ(error, orErrorLaunchFailure);
    ASSERT_CONTAINS(orGetLastErrorMessage(), "on openreg:0 failed: injected fault \"copy_error\"");
    ASSERT_CONTAINS(orGetLastErrorMessage(), outcomeOf(orFaultCopyError, 0).operation);
    ASSERT_OK(orMemcpyAsync(ends[i][0], ends[i][1], 64, orMemcpyDefault, s));
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT_EQ(disarm(orFaultCopyError, 0).fired, 1);
  }
  inject(orFaultCopyError, 0, 0);
  launchNamed(s, "aten::copy_", &ran);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_STR(disarm(orFaultCopyError, 0).operation, "aten::copy_");
  ASSERT_EQ(ran, 5);
  expectUsable(0);
}

/* The copy is the source's stream's, and only that one's device fails. */
TEST(fault_of_a_copy_between_devices) {
  void *here = allocate(64);
  ASSERT_OK(orSetDevice(1));
  void *there = allocate(64);
  orStream_t s = newStream();
  for (int lost = 0; lost < 2; lost++) {
    orFaultKind kind = lost ? orFaultDeviceLost : orFaultCopyError;
    inject(kind, 1, 0);
    ASSERT_OK(orMemcpyPeerAsync(here, 0, there, 1, 64, s));
    ASSERT_ERROR(orStreamSynchronize(s), lost ? orErrorDeviceLost : orErrorLaunchFailure);
    ASSERT_STR(disarm(kind, 1).operation, "Memcpy DtoD");
    expectUsable(0);
    if (lost) ASSERT_OK(orDeviceReset());
    expectUsable(1);
  }
}

TEST(fault_that_loses_the_device) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  inject(orFaultDeviceLost, 0, 1);
  launchNamed(s, "first", &ran);
  launchNamed(s, "second", &ran);
  for (int i = 0; i < 2; i++) {
    ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost,
                   "openreg:0 is lost: second failed: injected fault \"device_lost\"; "
                   "orDeviceReset");
    if (!i) ASSERT_EQ(disarm(orFaultDeviceLost, 0).fired, 1);
  }
  ASSERT_EQ(ran, 1);
  expectUsable(1);
  ASSERT_OK(orDeviceReset());
  expectUsable(0);
}

static void countDrop(void *args) { atomic_fetch_add(*(atomic_int **)args, 1); }

TEST(fault_lets_go_of_the_arguments) {
  atomic_int count = 0, *pointer = &count;
  inject(orFaultKernelError, 0, 0);
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .fn = countKernel,
                                         .args = &pointer,
                                         .args_size = sizeof pointer,
                                         .drop = countDrop,
                                         .name = "test"}));
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT_EQ(count, 1); /* dropped, not run */
  ASSERT_OK(orFaultRemove(orFaultKernelError, 0));
}

TEST(fault_reaches_streams_that_are_made_later) {
  atomic_int ran = 0;
  inject(orFaultKernelError, 1, 0);
  launch(newStreamOn(0), countKernel, &ran);
  ASSERT_OK(orDeviceSynchronize());
  orStream_t s = newStreamOn(1);
  launch(s, countKernel, &ran);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_EQ(disarm(orFaultKernelError, 1).fired, 1);
}

TEST(fault_with_blocking_launches) {
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  atomic_int ran = 0, *pointer = &ran;
  inject(orFaultKernelError, 0, 0);
  orLaunch l = {.size = sizeof l,
                .fn = countKernel,
                .args = &pointer,
                .args_size = sizeof pointer,
                .name = "test"};
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorLaunchFailure, "kernel_error");
  ASSERT_OK(orLaunchKernelEx(&l));
  ASSERT_EQ(ran, 1);
}

/* ---- out of memory ---- */

static orCacheStats statsOf(int device) {
  orCacheStats stats = {.size = sizeof stats};
  ASSERT_OK(orCacheGetStats(&stats, device));
  return stats;
}

TEST(fault_out_of_memory_after_all_was_tried) {
  orStream_t s = newStream();
  void *kept, *cached, *p;
  ASSERT_OK(orCacheMalloc(&kept, 4096, s));
  ASSERT_OK(orCacheMalloc(&cached, 4 << 20, s));
  ASSERT_OK(orCacheFree(cached));
  orCacheStats before = statsOf(0);
  inject(orFaultOutOfMemory, 0, 1);
  ASSERT_OK(orCacheMalloc(&p, 512, s));
  ASSERT_OK(orCacheFree(p));
  ASSERT_OK(orCacheMalloc(&p, 0, s)); /* no allocation */
  p = &p;
  ASSERT_REFUSED(orCacheMalloc(&p, 512, s), orErrorMemoryAllocation,
                 "openreg:0 is out of memory: tried to allocate 512 bytes; ");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "caching allocator (injected fault \"out_of_memory\")");
  ASSERT_PTR(p, NULL);
  orCacheStats after = statsOf(0);
  ASSERT_EQ(after.alloc_retries, before.alloc_retries + 1);
  ASSERT_EQ(after.ooms, before.ooms + 1);
  ASSERT_EQ(after.sync_all_streams, before.sync_all_streams + 1);
  ASSERT_EQ(after.allocated_bytes[0].current, before.allocated_bytes[0].current);
  ASSERT_EQ(after.segment[2].current, 0); /* what was cached is gone, as where memory is short */
  ASSERT_EQ(after.segment[1].current, 1);
  ASSERT_OK(orCacheMalloc(&p, 512, s)); /* struck once */
  ASSERT_OK(orCacheFree(p));
  ASSERT_STR(disarm(orFaultOutOfMemory, 0).operation, "allocation of 512 bytes");
  ASSERT_EQ(statsOf(0).allocated_bytes[0].current, before.allocated_bytes[0].current);
  ASSERT_OK(orCacheFree(kept));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_EQ(statsOf(0).reserved_bytes[0].current, 0);
  expectUsable(0);
}

TEST(fault_out_of_memory_of_the_device) {
  void *p = &p;
  size_t unused, total, again;
  ASSERT_OK(orMemGetInfo(&unused, &total));
  inject(orFaultOutOfMemory, 0, 0);
  ASSERT_OK(orMalloc(&p, 0)); /* no allocation */
  ASSERT_REFUSED(orMalloc(&p, 4096), orErrorMemoryAllocation, "injected");
  ASSERT_PTR(p, NULL);
  ASSERT_OK(orMalloc(&p, 4096));
  ASSERT_OK(orFree(p));
  ASSERT_OK(orMemGetInfo(&again, &total));
  ASSERT_EQ(again, unused);
}

static orError_t allocateInside(void *args) {
  atomic_int *result = *(atomic_int **)args;
  void *p;
  atomic_store(result, 1 + orCacheMalloc(&p, 512, OR_STREAM_DEFAULT));
  return orCacheFree(p);
}

TEST(fault_does_not_count_what_a_task_allocates) {
  atomic_int result = 0;
  inject(orFaultOutOfMemory, 0, 0);
  launch(OR_STREAM_DEFAULT, allocateInside, &result);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(result, 1 + orSuccess);
  ASSERT_EQ(disarm(orFaultOutOfMemory, 0).fired, 0);
}

/* ---- slow streams ---- */

TEST(fault_slow_stream_delays_and_stays_right) {
  enum { MS = 1000000, DELAY = 20 * MS };
  orStream_t s = newStream();
  char host[4];
  void *p = allocate(4);
  atomic_int ran = 0;
  ASSERT_OK(orFaultInject(&(orFault){
      .size = sizeof(orFault), .kind = orFaultSlowStream, .after = 1, .delay_ns = DELAY}));
  launch(s, countKernel, &ran);
  ASSERT_OK(orStreamSynchronize(s));
  uint64_t began = nowNs();
  ASSERT_OK(orMemsetAsync(p, 3, 4, s));
  launchNamed(s, "second", &ran);
  ASSERT_OK(orMemcpyAsync(host, p, 4, orMemcpyDefault, s)); /* has waited when it returns */
  ASSERT_GE(nowNs() - began, 3 * DELAY);
  ASSERT_EQ(host[3], 3);
  ASSERT_EQ(ran, 2);
  orFaultOutcome outcome = disarm(orFaultSlowStream, 0);
  ASSERT_EQ(outcome.fired, 3);
  ASSERT_STR(outcome.operation, "Memset");
  expectUsable(0);
}

/* ---- several, refusals, removal ---- */

TEST(fault_kinds_are_counted_apart) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  inject(orFaultKernelError, 0, 0);
  inject(orFaultDeviceLost, 0, 0);
  inject(orFaultKernelError, 1, 0);
  launchNamed(s, "first", &ran); /* one fault a task */
  ASSERT_EQ(outcomeOf(orFaultDeviceLost, 0).fired, 1);
  ASSERT_EQ(outcomeOf(orFaultKernelError, 0).fired, 0);
  ASSERT_EQ(outcomeOf(orFaultKernelError, 1).fired, 0);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorDeviceLost);
  ASSERT_OK(orDeviceReset());
  launchNamed(s, "second", &ran);
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorLaunchFailure, "second");
  ASSERT_OK(orFaultRemove(orFaultKernelError, 0));
  ASSERT_OK(orFaultRemove(orFaultDeviceLost, 0));
  expectUsable(0);
  launchNamed(newStreamOn(1), "there", &ran);
  ASSERT_STR(disarm(orFaultKernelError, 1).operation, "there");
}

TEST(fault_of_a_kernel_is_not_the_beginning_of_a_graph) {
  orStream_t s = newStream();
  atomic_int began = 0, ran = 0;
  inject(orFaultKernelError, 0, 0);
  launchNamed(s, "openreg::graph_begin", &began);
  launch(s, countKernel, &ran);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorLaunchFailure);
  ASSERT_EQ(disarm(orFaultKernelError, 0).fired, 1);
  ASSERT_EQ(began, 1);
  ASSERT_EQ(ran, 0);
}

TEST(fault_that_is_removed_strikes_nobody) {
  for (int kind = 0; orFaultName(kind); kind++) {
    inject((orFaultKind)kind, 0, 1000);
    expectUsable(0);
    ASSERT_EQ(disarm((orFaultKind)kind, 0).fired, 0);
  }
  for (int i = 0; i < 1100; i++) expectUsable(0);
}

TEST(fault_refusals) {
  orFault f = {.size = sizeof f, .kind = orFaultCopyError};
  orFaultOutcome outcome = {.size = sizeof outcome};
  ASSERT_REFUSED(orFaultInject(NULL), orErrorInvalidValue, "size");
  f.size = offsetof(orFault, device);
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidValue, "size");
  f.size = sizeof f;
  f.kind = (orFaultKind)5;
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidValue, "fault kind 5 is out of range: 0 to 4");
  f.kind = (orFaultKind)-1;
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidValue, "-1");
  f.kind = orFaultCopyError;
  f.device = 2;
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidDevice, "0 to 1");
  f.device = 1;
  f.delay_ns = 1;
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidValue, "copy_error");
  f.kind = orFaultSlowStream;
  f.delay_ns = OR_FAULT_MAX_DELAY_NS + 1;
  ASSERT_REFUSED(orFaultInject(&f), orErrorInvalidValue,
                 "10000000001 ns is out of range: at most 10000000000");
  f.delay_ns--;
  ASSERT_OK(orFaultInject(&f));
  ASSERT_REFUSED(orFaultInject(&f), orErrorAlreadyExists, "\"slow_stream\" is armed on openreg:1");
  ASSERT_OK(orFaultRemove(orFaultSlowStream, 1));
  ASSERT_REFUSED(orFaultRemove(orFaultSlowStream, 1), orErrorNotFound, "slow_stream");
  ASSERT_REFUSED(orFaultGetOutcome(NULL, orFaultSlowStream, 1), orErrorInvalidValue, "null");
  ASSERT_ERROR(orFaultGetOutcome(&outcome, orFaultSlowStream, 1), orErrorNotFound);
  ASSERT_STR(orFaultName(0), "out_of_memory");
  ASSERT_PTR(orFaultName(-1), NULL);
  ASSERT_STR(orFaultName(orFaultSlowStream), "slow_stream");
  ASSERT_PTR(orFaultName(orFaultSlowStream + 1), NULL);
  ASSERT_EQ(orDeviceIsActive(0) + orDeviceIsActive(1), 0); /* arming is no use of a device */
}

/* Threads that arm, remove, make streams and launch: what is struck is reported, and nothing stays
 * armed. */
enum { ROUNDS = 300 };

static void armAndRemove(int thread, void *context) {
  atomic_int *struck = context, ran = 0;
  ASSERT_OK(orSetDevice(thread % 2));
  for (int i = 0; i < ROUNDS; i++) {
    orStream_t s = newStream();
    if (thread < 2) inject(thread ? orFaultCopyError : orFaultKernelError, thread, 0);
    for (int k = 0; k < 4; k++) launch(s, countKernel, &ran);
    if (thread < 2) {
      orFaultKind kind = thread ? orFaultCopyError : orFaultKernelError;
      atomic_fetch_add(struck, (int)disarm(kind, thread).fired);
    }
    while (orStreamQuery(s)) sched_yield();
    ASSERT_OK(orStreamDestroy(s));
  }
}

TEST_WITH_LIMIT(fault_with_many_threads, 60) {
  atomic_int struck = 0;
  runThreads(6, armAndRemove, &struck);
  ASSERT_EQ(struck, ROUNDS); /* each round of the thread on kernels; there was no copy */
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  expectUsable(0);
  expectUsable(1);
}
