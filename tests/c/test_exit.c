/*
 * Leaving while lanes run, in every way, and what a forked child is refused: the memory, value and event calls.
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
#include "openreg_schedule.h"

/* ThreadSanitizer would sleep for a second in every process that leaves, and refuse the handler of guarded memory, which
 * is called by the thread's own instruction (guard.c), what any function may do there. */
OR_API const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0:report_signal_unsafe=0"; }

/* The status of a child that calls `body` and leaves by exit(); what it says goes to `text`. This process has not used
 * a device, so the child may. */
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

/* Handlers that run at exit may call the library: nothing hangs. */
static orStream_t exit_stream;
static orEvent_t exit_event;
static void *exit_memory;

static void callAtExit(void) {
  orStreamQuery(exit_stream);
  orStreamSynchronize(exit_stream);
  orEventSynchronize(exit_event);
  orDeviceSynchronize();
  orFree(exit_memory);
  orStreamDestroy(exit_stream);
  orEventDestroy(exit_event);
}

static void leaveWithHandler(void) {
  atexit(callAtExit); /* before the library's own: runs after it */
  exit_stream = newStream();
  exit_event = newEvent(0);
  ASSERT_OK(orMalloc(&exit_memory, 4096));
  queueWork();
  closeGate(exit_stream);
  ASSERT_OK(orSetDevice(1));
  exit_stream = newStream();
  closeGate(exit_stream);
  ASSERT_OK(orEventRecord(exit_event = newEvent(0), exit_stream));
}

TEST_WITH_LIMIT(exit_handlers_may_call, 60) { assertLeaves(leaveWithHandler, 20); }

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
  orLaneInfo info = {.size = sizeof info};
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
  ASSERT_FORKED(orEventGetDevice(parent.event, &value));
  ASSERT_FORKED(orEventQuery(parent.event));
  ASSERT_FORKED(orEventSignal(parent.event, orSuccess));
  ASSERT_FORKED(orEventElapsedTime(&ms, parent.event, parent.event));
  ASSERT_FORKED(orGetLaneInfo(&info));
  ASSERT_FORKED(orSetLaneHook(NULL));
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

/* ---- a caller's lock at the end of the process ---- */

static struct {
  pthread_mutex_t lock; /* a caller's, as Python's: a thread that waits in the library puts it down */
  _Atomic int entered, left;
} callers = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *putDown(void) {
  pthread_mutex_unlock(&callers.lock);
  atomic_fetch_add(&callers.entered, 1);
  return NULL;
}

static void takeUp(void *token) {
  (void)token;
  pthread_mutex_lock(&callers.lock);
  atomic_fetch_add(&callers.left, 1);
}

static void *waitBehindGate(void *device) {
  char byte;
  pthread_mutex_lock(&callers.lock);
  orMemcpy(&byte, device, 1, orMemcpyDeviceToHost);
  return NULL;
}

/* Wakes the waiter, which finds that the process is leaving. Its task writes to its stack, so it
 * does not return; but it must not keep the caller's lock. */
static void wantTheLock(void) {
  struct timespec limit;
  int left = atomic_load(&callers.left);
  orScheduleSwitch(orScheduleLate, 0);
  while (atomic_load(&callers.left) == left) sched_yield();
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 10;
  if (pthread_mutex_timedlock(&callers.lock, &limit)) _exit(3);
}

static void exitWhileAThreadWaits(void) {
  void *device;
  pthread_t thread;
  ASSERT_EQ(atexit(wantTheLock), 0); /* before the library's, and so called after it */
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){putDown, takeUp}));
  ASSERT_OK(orMalloc(&device, 1));
  closeGate(OR_STREAM_DEFAULT);
  ASSERT_EQ(pthread_create(&thread, NULL, waitBehindGate, device), 0);
  awaitReport("host thread");
}

TEST(exit_while_a_thread_waits_leaves_it_no_lock) { assertLeaves(exitWhileAThreadWaits, 1); }
