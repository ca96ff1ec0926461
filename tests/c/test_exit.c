/*
 * Leaving while lanes run, in every way, and what a forked child is refused: the memory and event
 * calls.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"
#include "later_device.h"
#include "openreg_schedule.h"

/* ThreadSanitizer would sleep for a second in every process that leaves, and refuse the handler of
 * guarded memory, which is called by the thread's own instruction (page_guard.c), what any function
 * may do there. */
OR_API const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0:report_signal_unsafe=0"; }

/* The status of a child that calls `body` and leaves by exit(); what it says goes to `text`. This
 * process has not used a device, so the child may. */
static int leave(void (*body)(void), char *text, size_t size) {
  FILE *said = tmpfile();
  int status;
  fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) FAIL("fork: %s", strerror(errno));
  if (pid == 0) {
    dup2(fileno(said), STDERR_FILENO);
    body();
    exit(0);
  }
  waitpid(pid, &status, 0);
  rewind(said);
  text[fread(text, 1, size - 1, said)] = 0;
  fclose(said);
  return status;
}

static void assertLeaves(void (*body)(void), int times) {
  char text[2000];
  for (int i = 0; i < times; i++) {
    int status = leave(body, text, sizeof text);
    ASSERT_STR(text, "");
    ASSERT_EQ(status, 0);
  }
}

static void queueWork(void) {
  for (int d = 0; d < 2; d++) {
    ASSERT_OK(orSetDevice(d));
    orStream_t streams[3] = {OR_STREAM_DEFAULT, newStream(), newStreamOfPriority(-1)};
    for (int i = 0; i < 3; i++) {
      void *p;
      ASSERT_OK(orMalloc(&p, 1 << 16));
      for (int k = 0; k < 30; k++) {
        ASSERT_OK(orMemsetAsync(p, k, 1 << 16, streams[i]));
        ASSERT_OK(orLaunchSleep(streams[i], 100000));
      }
    }
  }
}

TEST_WITH_LIMIT(exit_with_queued_work, 60) { assertLeaves(queueWork, 100); }

static void queueGated(void) {
  queueWork();
  closeGate(OR_STREAM_DEFAULT);
  closeGate(newStream());
  ASSERT_OK(orLaunchSleep(OR_STREAM_DEFAULT, 1));
}

TEST_WITH_LIMIT(exit_behind_gates, 60) { assertLeaves(queueGated, 30); }

static void startCopies(void) {
  enum { SIZE = 64 << 20 };
  void *host, *p;
  ASSERT_OK(orMallocHost(&host, SIZE));
  ASSERT_OK(orMalloc(&p, SIZE));
  for (int i = 0; i < 20; i++)
    ASSERT_OK(orMemcpyAsync(p, host, SIZE, orMemcpyDefault, OR_STREAM_DEFAULT));
  sleepMs(2); /* the first is in its pieces, or done */
}

TEST_WITH_LIMIT(exit_while_a_large_copy_runs, 60) { assertLeaves(startCopies, 10); }

static void *leaveFromHere(void *context) {
  (void)context;
  queueWork();
  exit(0);
}

static void leaveFromThread(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, leaveFromHere, NULL);
  pthread_join(thread, NULL);
}

TEST_WITH_LIMIT(exit_from_another_thread, 60) { assertLeaves(leaveFromThread, 30); }

/* The main thread waits, for what will never come, while another leaves. */
static void leaveWhileMainWaits(void) {
  pthread_t thread;
  orStream_t s = newStream();
  closeGate(s);
  pthread_create(&thread, NULL, leaveFromHere, NULL);
  orStreamSynchronize(s);
  for (;;) pause();
}

TEST_WITH_LIMIT(exit_while_another_thread_waits, 60) { assertLeaves(leaveWhileMainWaits, 30); }

/* ---- fork ---- */

#define ASSERT_FORKED(call)                            \
  do {                                                 \
    ASSERT_REFUSED(call, orErrorForked, "forked");     \
    ASSERT_CONTAINS(orGetLastErrorMessage(), "spawn"); \
  } while (0)

static struct {
  void *device;
  uint32_t *pinned;
  orStream_t stream;
  orEvent_t event;
} parent;

static void refusedInChild(void) {
  int value;
  float ms;
  void *p;
  orWorkerInfo info = {.size = sizeof info};
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  static char range[64];
  ASSERT_EQ(orInForkedChild(), 1);
  ASSERT_FORKED(orGetDevice(&value));
  ASSERT_FORKED(orFree(parent.device));
  ASSERT_FORKED(orFreeHost(parent.pinned));
  ASSERT_FORKED(orMallocHost(&p, 64));
  ASSERT_FORKED(orHostRegister(range, 64));
  ASSERT_FORKED(orHostUnregister(range));
  ASSERT_FORKED(orPointerGetAttributes(&attributes, range));
  ASSERT_FORKED(orMemcpyPeerAsync(parent.device, 0, parent.device, 0, 8, 0));
  ASSERT_FORKED(orMemsetAsync(parent.device, 0, 8, parent.stream));
  ASSERT_FORKED(orDeviceCanAccessPeer(&value, 0, 1));
  ASSERT_FORKED(orDeviceEnablePeerAccess(0, 1));
  ASSERT_FORKED(orStreamCreateWithPriority(&parent.stream, 0));
  ASSERT_FORKED(orStreamGetDevice(parent.stream, &value));
  ASSERT_FORKED(orStreamGetPriority(parent.stream, &value));
  ASSERT_FORKED(orStreamDestroy(parent.stream));
  ASSERT_FORKED(orLaunchSleep(parent.stream, 1));
  ASSERT_FORKED(orEventCreateWithFlags(&parent.event, orEventExternal));
  ASSERT_FORKED(orEventDestroy(parent.event));
  ASSERT_FORKED(orEventQuery(parent.event));
  ASSERT_FORKED(orEventSignal(parent.event, orSuccess));
  ASSERT_FORKED(orEventElapsedTime(&ms, parent.event, parent.event));
  ASSERT_FORKED(orGetWorkerInfo(&info));
  ASSERT_FORKED(orSetWorkerHook(NULL));
  orTrace trace = {.size = sizeof trace};
  ASSERT_FORKED(orTraceStart(0));
  ASSERT_FORKED(orTraceStop(&trace));
  parent.pinned[0] = 99; /* a copy of the parent's: may be read and written */
}

/* In the middle of work, again and again: the child answers, whatever locks were held. */
TEST_WITH_LIMIT(fork_while_lanes_run, 60) {
  ASSERT_OK(orMalloc(&parent.device, 4096));
  ASSERT_OK(orMallocHost((void **)&parent.pinned, 4096));
  parent.stream = newStream();
  parent.event = newEvent(0);
  for (int i = 0; i < 20; i++) {
    ASSERT_OK(orMemsetAsync(parent.device, i, 4096, parent.stream));
    ASSERT_OK(orLaunchSleep(parent.stream, 1000000));
    ASSERT_OK(orEventRecord(parent.event, parent.stream));
    ASSERT_OK(orStreamWaitEvent(OR_STREAM_DEFAULT, parent.event));
    ASSERT_FORK_OK(refusedInChild);
  }
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(parent.pinned[0], 0);
  ASSERT_OK(orFree(parent.device));
}

static void exitAfterFork(void) {
  ASSERT_OK(orMalloc(&parent.device, 4096));
  ASSERT_OK(orLaunchSleep(OR_STREAM_DEFAULT, 1000000));
  pid_t pid = fork();
  if (pid == 0) exit(0); /* through the library's exit handler */
  int status = -1;
  waitpid(pid, &status, 0);
  ASSERT_EQ(status, 0);
}

TEST_WITH_LIMIT(fork_child_exits_cleanly, 60) { assertLeaves(exitAfterFork, 20); }

/* ---- handlers that run after the library's ---- */

#define ASSERT_EXITING(call) ASSERT_REFUSED(call, orErrorNotPermitted, "exiting")

/* What a program has at its end. */
static struct {
  orStream_t stream;
  orEvent_t event;
  orMemPool_t pool;
  char *device, *pinned, *registered;
  Holder holder;
} at_end;

static void makeAll(void) {
  at_end.stream = newStream();
  at_end.event = newEvent(0);
  at_end.registered = malloc(4096);
  ASSERT_OK(orMalloc((void **)&at_end.device, 4096));
  ASSERT_OK(orMallocHost((void **)&at_end.pinned, 4096));
  ASSERT_OK(orHostRegister(at_end.registered, 4096));
}

static bool isKnown(const void *memory) {
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  ASSERT_OK(orPointerGetAttributes(&attributes, memory));
  return attributes.type != orMemoryTypeUnregistered;
}

/* A lane is at a task, and more is queued. */
static void assertWaitsAreRefused(void) {
  char byte = 0;
  ASSERT_EXITING(orStreamQuery(at_end.stream));
  ASSERT_EXITING(orEventQuery(at_end.event));
  ASSERT_EXITING(orStreamSynchronize(at_end.stream));
  ASSERT_EXITING(orEventSynchronize(at_end.event));
  ASSERT_EXITING(orDeviceSynchronize());
  ASSERT_EXITING(orDeviceReset());
  ASSERT_EXITING(orMemcpy(&byte, at_end.device, 1, orMemcpyDeviceToHost));
  ASSERT_EXITING(orMemset(at_end.device, 0, 1));
  ASSERT_EXITING(orScheduleSet(orScheduleLate, 0));
  ASSERT_EXITING(orScheduleSetTape("1"));
  ASSERT_EXITING(orFree(at_end.device));
  ASSERT_EXITING(orFreeHost(at_end.pinned));
  ASSERT_EXITING(orHostUnregister(at_end.registered));
  ASSERT(isKnown(at_end.device) && isKnown(at_end.pinned) && isKnown(at_end.registered));
  at_end.pinned[0] = 1;
  ASSERT_EXITING(orCacheEmpty(0));
  ASSERT_EXITING(orCacheEmptyPool(at_end.pool));
  ASSERT_OK(orStreamDestroy(at_end.stream));
  ASSERT_OK(orEventDestroy(at_end.event));
}

static void leaveWithWork(void) {
  void *cached[2];
  ASSERT_EQ(atexit(assertWaitsAreRefused), 0);
  makeAll();
  ASSERT_OK(orMemPoolCreate(&at_end.pool, 0));
  ASSERT_OK(orCacheMalloc(&cached[0], 4096, at_end.stream));
  ASSERT_OK(orCacheMallocFromPool(&cached[1], 4096, at_end.stream, at_end.pool));
  hold(at_end.stream, &at_end.holder);
  ASSERT_OK(orMemcpyAsync(at_end.device, at_end.pinned, 4096, orMemcpyDefault, at_end.stream));
  for (int i = 0; i < 2; i++) ASSERT_OK(orCacheFree(cached[i]));
  ASSERT_OK(orEventRecord(at_end.event, at_end.stream));
}

TEST(exit_handlers_are_refused_waits_for_unfinished_work) { assertLeaves(leaveWithWork, 1); }

static void assertWaitsAreOver(void) {
  ASSERT_OK(orStreamQuery(at_end.stream));
  ASSERT_OK(orStreamSynchronize(at_end.stream));
  ASSERT_OK(orEventSynchronize(at_end.event));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orFree(at_end.device));
  ASSERT_OK(orFreeHost(at_end.pinned));
  ASSERT_OK(orHostUnregister(at_end.registered));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT(!isKnown(at_end.pinned));
}

static void leaveWithoutWork(void) {
  ASSERT_EQ(atexit(assertWaitsAreOver), 0);
  makeAll();
  ASSERT_OK(orMemcpyAsync(at_end.device, at_end.pinned, 4096, orMemcpyDefault, at_end.stream));
  ASSERT_OK(orEventRecord(at_end.event, at_end.stream));
  ASSERT_OK(orStreamSynchronize(at_end.stream));
}

TEST(exit_handlers_may_free_what_no_work_uses) { assertLeaves(leaveWithoutWork, 1); }

/* ---- threads that are inside a call when the process exits ---- */

/* A caller's lock, as Python's: a thread that waits in the library puts it down. */
static pthread_mutex_t callers_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int asleep;

static void *putDown(void) {
  pthread_mutex_unlock(&callers_lock);
  atomic_fetch_add(&asleep, 1);
  return NULL;
}

static void takeUp(void *token) {
  (void)token;
  pthread_mutex_lock(&callers_lock);
}

static orError_t copyBack(void) {
  char byte;
  return orMemcpy(&byte, at_end.device, 1, orMemcpyDeviceToHost);
}

static orError_t launchUntilFull(void) {
  for (;;) {
    orError_t error = orLaunchSleep(at_end.stream, 1);
    if (error) return error;
  }
}

static orError_t synchronizeStream(void) { return orStreamSynchronize(at_end.stream); }
static orError_t synchronizeEvent(void) { return orEventSynchronize(at_end.event); }
static orError_t emptyCache(void) { return orCacheEmpty(0); }
static orError_t freeDevice(void) { return orFree(at_end.device); }
static orError_t freePinned(void) { return orFreeHost(at_end.pinned); }
static orError_t unregister(void) { return orHostUnregister(at_end.registered); }

static orError_t (*const calls[])(void) = {
    copyBack,   launchUntilFull, synchronizeStream, synchronizeEvent,    orDeviceSynchronize,
    emptyCache, freeDevice,      freePinned,        orDeviceSynchronize, unregister};
enum { CALLS = sizeof calls / sizeof *calls };
static pthread_t callers[CALLS];

/* Returns as the call does, with its error. */
static void *callAndReturn(void *call) {
  pthread_mutex_lock(&callers_lock);
  ASSERT_EXITING(((orError_t(*const *)(void))call)[0]());
  pthread_mutex_unlock(&callers_lock);
  return NULL;
}

static void joinAll(void) {
  for (int i = 0; i < CALLS; i++) pthread_join(callers[i], NULL);
  at_end.pinned[0] = 1;
}

/* All of them behind gates that nobody opens. */
static void exitWhileThreadsWait(void) {
  ASSERT_EQ(atexit(joinAll), 0); /* as a static object does that has threads */
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){putDown, takeUp}));
  pthread_mutex_lock(&callers_lock);
  makeAll();
  at_end.event = newGate();
  void *cached;
  ASSERT_OK(orCacheMalloc(&cached, 4096, at_end.stream));
  closeGate(at_end.stream);
  closeGate(OR_STREAM_DEFAULT);
  ASSERT_OK(orCacheFree(cached));
  atomic_store(&asleep, 0);
  pthread_mutex_unlock(&callers_lock);
  for (int i = 0; i < CALLS; i++)
    ASSERT_EQ(pthread_create(&callers[i], NULL, callAndReturn, (void *)&calls[i]), 0);
  awaitInt(&asleep, CALLS);
}

TEST(exit_wakes_threads_that_wait) { assertLeaves(exitWhileThreadsWait, 3); }

static void exitWhileThreadsWaitUnderASchedule(void) {
  setenv("OPENREG_SCHEDULE_SEED", "early", 1);
  exitWhileThreadsWait();
}

TEST(exit_wakes_threads_that_wait_under_a_schedule) {
  assertLeaves(exitWhileThreadsWaitUnderASchedule, 3);
}

/* ---- a call whose own task is running ---- */

static atomic_int returned;

static void *waitForOwnTask(void *flags) {
  Holder *holder = &at_end.holder;
  ASSERT_OK(launchAs(at_end.stream, holdKernel, holder, *(unsigned *)flags));
  atomic_store(&returned, 1);
  return NULL;
}

/* The task has the stack of its call: the call returns when it is over, and then with success. */
static void letOwnTaskEnd(void) {
  sleepMs(5);
  ASSERT_EQ(atomic_load(&returned), 0);
  letGo(&at_end.holder);
  pthread_join(callers[0], NULL);
}

static void exitWhileOwnTaskRuns(void) {
  static unsigned flags = orLaunchWaits;
  ASSERT_EQ(atexit(letOwnTaskEnd), 0);
  at_end.stream = newStream();
  ASSERT_EQ(pthread_create(&callers[0], NULL, waitForOwnTask, &flags), 0);
  awaitInt(&at_end.holder.started, 1);
}

TEST(exit_waits_for_the_task_of_a_call_that_is_running) { assertLeaves(exitWhileOwnTaskRuns, 1); }

static char own_byte[1];

static void *copyOnVendor(void *unused) {
  (void)unused;
  ASSERT_EXITING(orMemcpy(own_byte, at_end.device, 1, orMemcpyDeviceToHost));
  atomic_store(&returned, 1);
  return NULL;
}

/* The vendor's device is at the caller's memory until it signals, although a reset makes its stream
 * ready. */
static void letVendorEnd(void) {
  sleepMs(5);
  ASSERT_EQ(atomic_load(&returned), 0);
  ASSERT_EXITING(orFree(at_end.device));
  ASSERT_EXITING(orDeviceReset());
  sleepMs(5);
  ASSERT_EQ(atomic_load(&returned), 0);
  ASSERT_OK(orEventSignal(asked, orSuccess));
  pthread_join(callers[0], NULL);
}

static void exitWhileAVendorCopies(void) {
  ASSERT_EQ(atexit(letVendorEnd), 0);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 10, &later));
  ASSERT_OK(orMalloc((void **)&at_end.device, 4096));
  ASSERT_EQ(pthread_create(&callers[0], NULL, copyOnVendor, NULL), 0);
  while (!atomic_load(&asked)) sched_yield();
}

TEST(exit_waits_for_a_vendors_device_that_has_a_calls_memory) {
  assertLeaves(exitWhileAVendorCopies, 1);
}

/* ---- a task that exits ---- */

static orError_t exitKernel(void *args) {
  (void)args;
  exit(0);
}

static void *waitForExit(void *unused) {
  orLaunch launch = {
      .size = sizeof launch, .stream = at_end.stream, .fn = exitKernel, .name = "exits"};
  (void)unused;
  launch.flags = orLaunchWaits;
  ASSERT_EXITING(orLaunchKernelEx(&launch));
  return NULL;
}

static void joinFirst(void) { pthread_join(callers[0], NULL); }

static void exitInATask(void) {
  ASSERT_EQ(atexit(joinFirst), 0);
  at_end.stream = newStream();
  ASSERT_EQ(pthread_create(&callers[0], NULL, waitForExit, NULL), 0);
  for (;;) pause();
}

TEST(exit_by_a_task_wakes_the_call_that_waits_for_it) { assertLeaves(exitInATask, 3); }
