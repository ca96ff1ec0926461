/*
 * Lost devices: what loses one, what fails from then on and what does not, and what a reset brings
 * back.
 */
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "openreg_graph.h"

static const char *const bringsBack = "orDeviceReset (torch.openreg.reset(0)) brings it back";

static orError_t loseKernel(void *args) {
  const char *detail = *(const char **)args;
  if (detail) orSetTaskErrorMessage(detail);
  return orErrorDeviceLost;
}

static orLaunch losingLaunch(orStream_t stream, const char **detail) {
  return (orLaunch){.size = sizeof(orLaunch),
                    .stream = stream,
                    .fn = loseKernel,
                    .args = detail,
                    .args_size = sizeof *detail,
                    .name = "aten::bad"};
}

static void queueLoss(orStream_t stream, const char *detail) {
  orLaunch l = losingLaunch(stream, &detail);
  ASSERT_OK(orLaunchKernelEx(&l));
}

static void lose(orStream_t stream) {
  queueLoss(stream, NULL);
  ASSERT_REFUSED(orStreamSynchronize(stream), orErrorDeviceLost, "openreg:0 is lost");
}

static void *allocate(size_t bytes) {
  void *memory = NULL;
  ASSERT_OK(orMalloc(&memory, bytes));
  return memory;
}

static void *allocatePinned(size_t bytes) {
  void *memory = NULL;
  ASSERT_OK(orMallocHost(&memory, bytes));
  return memory;
}

static void expectUsable(orStream_t stream, char *memory) {
  atomic_int ran = 0;
  char host[64] = {0};
  launch(stream, countKernel, &ran);
  ASSERT_OK(orMemsetAsync(memory, 5, sizeof host, stream));
  ASSERT_OK(orStreamSynchronize(stream));
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orMemcpy(host, memory, sizeof host, orMemcpyDefault));
  ASSERT_EQ(host[63], 5);
  ASSERT_OK(orDeviceSynchronize());
}

/* ---- what fails, and what does not ---- */

TEST(lost_names_the_device_the_kernel_and_the_way_back) {
  orStream_t s = newStream();
  queueLoss(s, "it fell off the bus");
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorDeviceLost,
                 "openreg:0 is lost: aten::bad failed: it fell off the bus; ");
  ASSERT_CONTAINS(orGetLastErrorMessage(), bringsBack);
  ASSERT_OK(orDeviceReset());
  queueLoss(s, NULL);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorDeviceLost, "aten::bad failed; orDeviceReset");
}

TEST(lost_stays_for_every_call_that_queues_synchronises_or_allocates) {
  orStream_t s = newStream(), other = newStream(), fresh;
  orEvent_t e = newEvent(0);
  char host[64], *memory = allocate(64);
  uint32_t *pinned = allocatePinned(64);
  void *more = NULL;
  atomic_int ran = 0;
  void *args = &ran;
  orLaunch l = {.size = sizeof l,
                .stream = other,
                .fn = countKernel,
                .args = &args,
                .args_size = sizeof args,
                .name = "later"};
  ASSERT_OK(orCacheMalloc(&more, 64, other)); /* so that there is one to be had */
  ASSERT_OK(orCacheFree(more));
  more = NULL;
  ASSERT_OK(orEventRecord(e, s));
  orGraph_t graph;
  ASSERT_OK(orStreamBeginCapture(other));
  launch(other, countKernel, &ran);
  ASSERT_OK(orStreamEndCapture(other, &graph));
  lose(s);
  ASSERT_OK(orStreamCreate(&fresh));
  for (int i = 0; i < 2; i++) {
    ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorDeviceLost, "aten::bad");
    l.stream = fresh;
    ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorDeviceLost, bringsBack);
    ASSERT_ERROR(orGraphReplay(graph, other), orErrorDeviceLost);
    ASSERT_ERROR(orLaunchSleep(s, 0), orErrorDeviceLost);
    ASSERT_ERROR(orLaunchHostFunc(s, free, NULL), orErrorDeviceLost);
    ASSERT_ERROR(orMemcpy(host, memory, 8, orMemcpyDefault), orErrorDeviceLost);
    ASSERT_ERROR(orMemcpy(host, memory, 0, orMemcpyDefault), orErrorDeviceLost);
    ASSERT_ERROR(orMemcpyAsync(memory, pinned, 8, orMemcpyDefault, other), orErrorDeviceLost);
    ASSERT_ERROR(orMemsetAsync(memory, 1, 8, other), orErrorDeviceLost);
    ASSERT_ERROR(orStreamSynchronize(other), orErrorDeviceLost);
    ASSERT_ERROR(orStreamSynchronize(OR_STREAM_DEFAULT), orErrorDeviceLost);
    ASSERT_ERROR(orEventSynchronize(e), orErrorDeviceLost);
    ASSERT_ERROR(orDeviceSynchronize(), orErrorDeviceLost);
    ASSERT_ERROR(orMalloc(&more, 64), orErrorDeviceLost);
    ASSERT_ERROR(orCacheMalloc(&more, 64, other), orErrorDeviceLost);
    ASSERT_PTR(more, NULL);
  }
  ASSERT_EQ(ran, 0);
  ASSERT_OK(orDeviceReset());
  expectUsable(s, memory);
  expectUsable(fresh, memory);
}

TEST(lost_queries_records_waits_and_frees_never_report) {
  orStream_t s = newStream(), other = newStream(), there = newStreamOn(1);
  orEvent_t e = newEvent(0);
  char *memory = allocate(64);
  void *block = NULL, *pinned = allocatePinned(64);
  size_t unused, total;
  orCacheStats stats = {.size = sizeof stats};
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  ASSERT_OK(orCacheMalloc(&block, 64, s));
  lose(s);
  orGetLastError();
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orEventRecord(e, s));
  ASSERT_OK(orEventQuery(e));
  ASSERT_OK(orStreamWaitEvent(other, e));
  ASSERT_OK(orStreamWaitEvent(there, e));
  ASSERT_OK(orCacheRecordStream(block, other));
  ASSERT_OK(orCacheFree(block));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(orCacheGetStats(&stats, 0));
  ASSERT_EQ(stats.allocated_bytes[0].current, 0);
  ASSERT_OK(orMemGetInfo(&unused, &total));
  ASSERT_OK(orPointerGetAttributes(&attributes, memory));
  ASSERT_OK(orFree(memory));
  ASSERT_OK(orFreeHost(pinned));
  ASSERT_OK(orEventDestroy(e));
  ASSERT_OK(orStreamDestroy(other));
  ASSERT_EQ(orPeekAtLastError(), orSuccess);
}

TEST(lost_comes_before_the_failures_of_kernels) {
  orStream_t s = newStream();
  ASSERT_OK(orEventSignal(closeGate(s), orErrorSystem));
  queueLoss(s, NULL);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorDeviceLost, "aten::bad failed; ");
  /* What lost it is the first that said so. */
  ASSERT_OK(orEventSignal(newGate(), orErrorDeviceLost));
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost, "aten::bad failed; ");
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orDeviceSynchronize());
}

TEST(lost_the_other_device_never_notices) {
  orStream_t there = newStreamOn(1);
  orEvent_t gate = closeGate(there);
  atomic_int ran = 0;
  launch(there, countKernel, &ran);
  lose(newStream());
  ASSERT_ERROR(orStreamQuery(there), orErrorNotReady); /* what is queued stays so */
  ASSERT_OK(orSetDevice(1));
  launch(there, countKernel, &ran);
  char *memory = allocate(64);
  openGate(gate);
  expectUsable(there, memory);
  ASSERT_EQ(ran, 2);
  ASSERT_OK(orDeviceReset()); /* of this one: the other stays lost */
  ASSERT_OK(orSetDevice(0));
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost, "openreg:0");
}

/* From either side: the bytes would be anything. */
TEST(lost_copies_of_another_device_are_refused) {
  orStream_t there = newStreamOn(1);
  char *here = allocate(64);
  ASSERT_OK(orSetDevice(1));
  char *memory = allocate(64);
  lose(newStreamOn(0));
  ASSERT_REFUSED(orMemcpyPeerAsync(memory, 1, here, 0, 64, there), orErrorDeviceLost, "openreg:0");
  ASSERT_ERROR(orMemcpyPeerAsync(here, 0, memory, 1, 64, there), orErrorDeviceLost);
  ASSERT_REFUSED(orMemsetAsync(here, 0, 64, there), orErrorDeviceLost, "openreg:0");
  expectUsable(there, memory);
}

/* ---- nobody waits for ever ---- */

static atomic_int dropped;
static void countDrop(void *args) {
  (void)args;
  atomic_fetch_add(&dropped, 1);
}

static void launchCounted(orStream_t stream, atomic_int *ran) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = countKernel,
                                         .args = &ran,
                                         .args_size = sizeof ran,
                                         .drop = countDrop,
                                         .name = "counted"}));
}

TEST(lost_drops_and_completes_what_is_queued) {
  orStream_t s = newStream(), gated = newStream(), waits = newStream(), there = newStreamOn(1);
  orEvent_t gate = closeGate(gated), e = newEvent(0);
  atomic_int ran = 0;
  for (int i = 0; i < 500; i++) launchCounted(gated, &ran);
  ASSERT_OK(orEventRecord(e, gated));
  ASSERT_OK(orStreamWaitEvent(waits, e));
  closeGate(waits);
  launchCounted(waits, &ran);
  ASSERT_OK(orStreamWaitEvent(there, e));
  lose(s);
  ASSERT_OK(orStreamSynchronize(there));
  while (orStreamQuery(gated) == orErrorNotReady || orStreamQuery(waits) == orErrorNotReady)
    sched_yield();
  ASSERT_OK(orEventQuery(e));
  ASSERT_EQ(dropped, 501);
  ASSERT_EQ(ran, 0);
  ASSERT_ERROR(orEventQuery(gate), orErrorNotReady); /* not the device's to complete */
  ASSERT_OK(orDeviceReset());
  launchCounted(gated, &ran);
  ASSERT_OK(orStreamSynchronize(gated));
  ASSERT_EQ(ran, 1);
}

typedef struct Waits {
  orStream_t gated;
  orEvent_t event;
  atomic_int count;
} Waits;

static void waitInSomeWay(int thread, void *context) {
  Waits *w = context;
  atomic_int ran = 0;
  void *pointer = &ran;
  orLaunch l = {.size = sizeof l,
                .stream = w->gated,
                .fn = countKernel,
                .args = &pointer,
                .args_size = sizeof pointer,
                .name = "fills the queue"};
  orError_t error = orSuccess;
  if (thread == 4) {
    while (atomic_load(&w->count) < 4) sched_yield();
    queueLoss(OR_STREAM_DEFAULT, NULL);
    return;
  }
  atomic_fetch_add(&w->count, 1);
  if (thread == 0) error = orStreamSynchronize(w->gated);
  if (thread == 1) error = orEventSynchronize(w->event);
  if (thread == 2) error = orDeviceSynchronize();
  if (thread == 3)
    while (!error) error = orLaunchKernelEx(&l);
  ASSERT_ERROR(error, orErrorDeviceLost);
  if (thread == 3) ASSERT_EQ(ran, 0);
}

TEST(lost_wakes_hosts_that_wait) {
  Waits w = {.gated = newStream(), .event = newEvent(0)};
  closeGate(w.gated);
  ASSERT_OK(orEventRecord(w.event, w.gated));
  runThreads(5, waitInSomeWay, &w);
}

TEST(lost_lets_the_running_task_finish) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  Holder h = {0};
  atomic_int ran = 0;
  hold(s, &h);
  launchCounted(s, &ran);
  ASSERT_OK(orEventRecord(e, s));
  lose(newStream());
  ASSERT_ERROR(orStreamSynchronize(s), orErrorDeviceLost); /* at once */
  ASSERT_ERROR(orEventSynchronize(e), orErrorDeviceLost);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorDeviceLost);
  ASSERT_EQ(dropped, 0);
  letGo(&h);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(dropped, 1);
  ASSERT_EQ(ran, 0);
}

/* ---- reset ---- */

TEST(lost_reset_keeps_memory_streams_and_events) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  char *memory = allocate(64);
  void *block = NULL, *next = NULL;
  ASSERT_OK(orCacheMalloc(&block, 64, s));
  for (int i = 0; i < 20; i++) {
    lose(s);
    ASSERT_OK(orDeviceReset());
    expectUsable(s, memory);
    expectUsable(s, block);
    ASSERT_OK(orEventRecord(e, s));
    ASSERT_OK(orEventSynchronize(e));
    ASSERT_OK(orCacheMalloc(&next, 64, s));
    ASSERT_OK(orCacheFree(next));
  }
  ASSERT_OK(orCacheFree(block));
  ASSERT_OK(orFree(memory));
}

/* A cached block that another device's stream uses does not hold up the reset. */
TEST(lost_reset_waits_for_no_other_device) {
  orStream_t s = newStream(), there = newStreamOn(1);
  orEvent_t gate = closeGate(there);
  atomic_int ran = 0;
  orCacheStats stats = {.size = sizeof stats};
  void *shared = NULL, *own = NULL;
  launch(there, countKernel, &ran);
  ASSERT_OK(orCacheMalloc(&shared, 64, s));
  ASSERT_OK(orCacheMalloc(&own, 50 << 20, s));
  ASSERT_OK(orCacheRecordStream(shared, there));
  ASSERT_OK(orCacheFree(shared));
  ASSERT_OK(orCacheFree(own));
  lose(s);
  ASSERT_OK(orDeviceReset());
  ASSERT_EQ(ran, 0);
  ASSERT_OK(orCacheGetStats(&stats, 0));
  ASSERT_EQ(stats.segment[0].current, 1);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(there));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(orCacheGetStats(&stats, 0));
  ASSERT_EQ(stats.segment[0].current, 0);
}

/* A stream's slot is used again by another device. */
TEST(lost_stays_behind_when_a_stream_is_destroyed) {
  orStream_t s = newStream();
  newStreamOn(1); /* and with it the device's default stream */
  lose(s);
  ASSERT_OK(orStreamDestroy(s));
  atomic_int ran = 0;
  for (int i = 0; i < 100; i++) {
    orStream_t there = newStreamOn(1);
    launch(there, countKernel, &ran);
    ASSERT_OK(orStreamSynchronize(there));
    ASSERT_OK(orStreamDestroy(there));
  }
  ASSERT_EQ(ran, 100);
}

static void churn(int thread, void *context) {
  atomic_int *ran = context;
  for (int i = 0; i < 300; i++) {
    const char *detail = NULL;
    orStream_t s = newStream();
    orLaunch l = losingLaunch(s, &detail);
    if (thread == 0) ASSERT_OK(orDeviceReset());
    if (thread == 1) orLaunchKernelEx(&l);
    orError_t error = orSuccess;
    void *pointer = ran, *block = NULL;
    l.fn = countKernel;
    l.args = &pointer;
    for (int k = 0; k < 20 && !error; k++) error = orLaunchKernelEx(&l);
    if (!error) error = orCacheMalloc(&block, 512, s);
    if (!error) error = orStreamSynchronize(s);
    if (error) ASSERT_ERROR(error, orErrorDeviceLost);
    ASSERT_OK(orCacheFree(block));
    ASSERT_OK(orStreamDestroy(s));
  }
}

TEST_WITH_LIMIT(lost_and_reset_at_any_moment, 60) {
  atomic_int ran = 0;
  char *memory = allocate(64);
  runThreads(4, churn, &ran);
  ASSERT_OK(orDeviceReset());
  expectUsable(newStream(), memory);
}

TEST(lost_blocking_launches_report_it_themselves) {
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  const char *detail = "here";
  orLaunch l = losingLaunch(newStream(), &detail);
  ASSERT_REFUSED(orLaunchKernelEx(&l), orErrorDeviceLost, "aten::bad failed: here");
}

/* ---- what loses one ---- */

TEST(lost_by_a_signal) {
  orEvent_t gate = newGate();
  ASSERT_OK(orEventSignal(gate, orErrorDeviceLost));
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost, "external event failed");
}

/* A device's factory whose next operation answers what the test says. */
static struct {
  orError_t alloc, copy, set, compute;
  _Atomic orEvent_t done; /* of the latest copy */
} answer;

static orError_t createFragile(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; i++) devices[i].memory_limit = 1 << 20;
  return orSuccess;
}
static orError_t allocFragile(void *device, size_t bytes, void **ptr) {
  (void)device;
  if (!answer.alloc) *ptr = malloc(bytes);
  return answer.alloc;
}
static orError_t freeFragile(void *device, void *ptr, size_t bytes) {
  (void)device, (void)bytes;
  free(ptr);
  return orSuccess;
}
static orError_t copyFragile(void *device, void *dst, const void *src, size_t bytes,
                             orMemcpyKind kind, orEvent_t done) {
  (void)device, (void)dst, (void)src, (void)bytes, (void)kind;
  atomic_store(&answer.done, done);
  return answer.copy;
}
static orError_t setFragile(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)device, (void)dst, (void)value, (void)bytes, (void)done;
  return answer.set;
}
static orError_t computeFragile(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)kernel, (void)done;
  return answer.compute;
}
static const orDeviceFactory fragile = {.size = sizeof(orDeviceFactory),
                                        .abi_version = OPENREG_ABI_VERSION,
                                        .name = "fragile",
                                        .create_devices = createFragile,
                                        .alloc = allocFragile,
                                        .free = freeFragile,
                                        .copy = copyFragile,
                                        .set = setFragile,
                                        .compute = computeFragile};

static void useFragile(void) { ASSERT_OK(orRegisterDeviceFactory("openreg", 50, &fragile)); }

static void expectLost(const char *what) {
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost, what);
  answer.alloc = answer.copy = answer.set = answer.compute = orSuccess;
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orDeviceSynchronize());
}

TEST(lost_by_an_operation_of_a_factory) {
  useFragile();
  orStream_t s = newStream();
  void *memory = allocate(64), *pinned = allocatePinned(64), *more = NULL;
  atomic_int ran = 0;
  answer.alloc = orErrorDeviceLost;
  ASSERT_REFUSED(orMalloc(&more, 64), orErrorDeviceLost, "openreg:0 is lost: alloc failed; ");
  expectLost("alloc failed");
  answer.alloc = orErrorDeviceLost;
  ASSERT_ERROR(orCacheMalloc(&more, 64, s), orErrorDeviceLost);
  expectLost("alloc failed");
  answer.copy = orErrorDeviceLost;
  ASSERT_OK(orMemcpyAsync(memory, pinned, 64, orMemcpyDefault, s));
  ASSERT_ERROR(orStreamSynchronize(s), orErrorDeviceLost);
  expectLost("Memcpy HtoD failed");
  answer.set = orErrorDeviceLost;
  ASSERT_ERROR(orMemset(memory, 0, 64), orErrorDeviceLost);
  expectLost("Memset failed");
  answer.compute = orErrorDeviceLost;
  launch(s, countKernel, &ran);
  ASSERT_ERROR(orStreamSynchronize(s), orErrorDeviceLost);
  expectLost("test failed");
  size_t unused, total;
  ASSERT_OK(orFree(memory));
  ASSERT_OK(orMemGetInfo(&unused, &total));
  ASSERT_EQ(unused, total); /* what an allocation that failed was charged has been given back */
}

static orEvent_t startCopy(orStream_t stream, void *memory, void *pinned) {
  atomic_store(&answer.done, 0);
  answer.copy = orErrorNotReady;
  ASSERT_OK(orMemcpyAsync(memory, pinned, 64, orMemcpyDefault, stream));
  while (!atomic_load(&answer.done)) sched_yield();
  return atomic_load(&answer.done);
}

TEST(lost_by_an_operation_that_completes_later) {
  useFragile();
  orStream_t s = newStream();
  void *memory = allocate(64), *pinned = allocatePinned(64);
  atomic_int ran = 0;
  orEvent_t done = startCopy(s, memory, pinned);
  launchCounted(s, &ran);
  ASSERT_OK(orEventSignal(done, orErrorDeviceLost));
  while (orStreamQuery(s) == orErrorNotReady) sched_yield();
  ASSERT_EQ(dropped, 1);
  expectLost("Memcpy HtoD failed");
  done =
      startCopy(s, memory, pinned); /* what has started is waited for, whatever loses the device */
  launchCounted(s, &ran);
  ASSERT_OK(orEventSignal(newGate(), orErrorDeviceLost));
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  ASSERT_EQ(dropped, 1);
  ASSERT_OK(orEventSignal(done, orSuccess));
  expectLost("external event failed");
  ASSERT_EQ(dropped, 2);
}

/* It is the runtime's: destroyed, nothing could complete the task, and a reset would hang. */
TEST(lost_the_event_of_an_operation_cannot_be_destroyed) {
  useFragile();
  orStream_t s = newStream();
  orEvent_t done = startCopy(s, allocate(64), allocatePinned(64));
  ASSERT_REFUSED(orEventDestroy(done), orErrorNotPermitted, "only signalled");
  ASSERT_OK(orEventSignal(done, orSuccess));
  ASSERT_OK(orDeviceReset());
  ASSERT_ERROR(orEventDestroy(done), orErrorInvalidResourceHandle);
}

/* Any other error is the task's alone, on whichever device it arose. */
TEST(lost_by_no_other_error) {
  useFragile();
  ASSERT_OK(orSetDevice(1));
  void *there = allocate(64);
  ASSERT_OK(orSetDevice(0));
  void *memory = allocate(64), *more = NULL;
  orStream_t s = newStream();
  for (int error = orErrorInvalidValue; error < orErrorDeviceLost; error++) {
    if (error == orErrorNotReady) continue;
    answer.set = answer.alloc = answer.copy = (orError_t)error;
    ASSERT_ERROR(orMemset(memory, 0, 64), (orError_t)error);
    ASSERT_ERROR(orMalloc(&more, 64), (orError_t)error);
    ASSERT_OK(orMemcpyPeerAsync(there, 1, memory, 0, 64, s));
    ASSERT_ERROR(orStreamSynchronize(s), (orError_t)error);
    ASSERT_OK(orDeviceSynchronize());
  }
}

/* A copy is done by the device it writes to, and may be on a stream of another. */
TEST(lost_is_the_device_that_was_asked) {
  useFragile();
  orStream_t s = newStream();
  void *here = allocate(64);
  ASSERT_OK(orSetDevice(1));
  void *there = allocate(64);
  ASSERT_OK(orSetDevice(0));
  answer.copy = orErrorDeviceLost;
  ASSERT_OK(orMemcpyPeerAsync(there, 1, here, 0, 64, s));
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure,
                 "Memcpy DtoD on openreg:0 failed: openreg:1 is lost");
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orSetDevice(1));
  ASSERT_REFUSED(orDeviceSynchronize(), orErrorDeviceLost, "openreg:1 is lost: Memcpy DtoD failed");
}
