/*
 * The threads that the core starts, and what the system may refuse about them: a thread, a key, a
 * set of processors.
 *
 * The functions below stand in front of the C library's for the library and for this program.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"
#include "openreg_schedule.h"

/* ---- functions that fail ---- */

static bool isCore(const void *code) {
  Dl_info info;
  return dladdr(code, &info) && info.dli_fname && strstr(info.dli_fname, "libopenreg");
}

#define REAL(function)        \
  __typeof__(&function) real; \
  *(void **)&real = dlsym(RTLD_NEXT, #function) /* as POSIX says */

#ifndef __SANITIZE_THREAD__ /* whose runtime calls it before it can run anything of this program */
/* By the constructors of the library, before any of this program. */
OR_API int pthread_key_create(pthread_key_t *key, void (*end)(void *));
int pthread_key_create(pthread_key_t *key, void (*end)(void *)) {
  REAL(pthread_key_create);
  if (getenv("OPENREG_TEST_NO_KEY") && isCore(__builtin_return_address(0))) return EAGAIN;
  return real(key, end);
}
#endif

static size_t least_set; /* bytes, as of a kernel for so many processors */

OR_API int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set);
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
  REAL(sched_getaffinity);
  if (size >= least_set) return real(pid, size, set);
  errno = EINVAL;
  return -1;
}

static atomic_int refusals; /* of the threads that the core asks for next */

OR_API int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *context);
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *context) {
  REAL(pthread_create);
  if (atomic_load(&refusals) && isCore(__builtin_return_address(0))) {
    atomic_fetch_sub(&refusals, 1);
    return EAGAIN;
  }
  return real(thread, attributes, body, context);
}

/* ---- keys ---- */

HELPER(threads_no_key_is_had) {
  pthread_key_t keys[4];
  int value, cause;
  for (int i = 0; i < 4; i++) {
    ASSERT_EQ(pthread_key_create(&keys[i], NULL), 0);
    ASSERT_EQ(pthread_setspecific(keys[i], &value), 0);
  }
  orSetFailureCause(&cause, NULL);
  for (int i = 0; i < 4; i++) ASSERT_PTR(pthread_getspecific(keys[i]), &value);
}

TEST(threads_a_key_that_is_not_had_is_not_used) {
  char text[TEST_MAX_TEXT];
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer makes keys by the function that would fail");
#endif
  setenv("OPENREG_TEST_NO_KEY", "1", 1);
  ASSERT_EQ(runHelper("threads_no_key_is_had", text, sizeof text), 0);
  ASSERT_CONTAINS(text, "no key for threads");
}

/* ---- processors ---- */

static int hostCores(void) {
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 0));
  return properties.host_cores;
}

TEST(threads_more_processors_than_a_set_has_are_counted) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  least_set = 2 * sizeof(cpu_set_t);
  ASSERT_EQ(hostCores(), 1);
}

/* ---- signals ---- */

static atomic_int caught;

static void leaveWith(int number) { _exit(caught ? number : 1); }

static orError_t raiseHere(void *args) {
  atomic_store(&caught, 1);
  raise((int)(intptr_t)*(void **)args);
  return orSuccess;
}

static int statusOfFault(int number) {
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    signal(number, leaveWith);
    ASSERT_OK(launchAs(newStream(), raiseHere, (void *)(intptr_t)number, 0)); /* NOLINT */
    orDeviceSynchronize();
    _exit(0);
  }
  int status;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

TEST(threads_hear_of_their_own_faults) {
  static const int own[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
  for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
    int status = statusOfFault(own[i]);
    ASSERT(WIFEXITED(status));
    ASSERT_EQ(WEXITSTATUS(status), own[i]);
  }
}

/* ---- threads ---- */

enum { ALL = 1 << 30 };

static void refuseThreads(int count) { atomic_store(&refusals, count); }

static int lanesStarted(void) {
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  return info.started;
}

#define ASSERT_NO_LANE(call) ASSERT_REFUSED(call, orErrorSystem, "refused a thread")

TEST(threads_refused_once_is_tried_again_by_the_next_wait) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  refuseThreads(1);
  launch(s, countKernel, &ran);
  ASSERT_EQ(lanesStarted(), 0);
  ASSERT_OK(orSetWorkerHook(NULL)); /* none has been started */
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
  ASSERT_EQ(lanesStarted(), 1);
}

TEST(threads_refused_once_is_tried_again_by_the_next_launch) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  refuseThreads(1);
  for (int i = 0; i < 2; i++) launch(s, countKernel, &ran);
  awaitInt(&ran, 2);
}

/* A lane is busy, and the thread for another is refused. */
TEST(threads_refused_beside_a_lane_is_tried_again) {
  Holder holder = {0};
  atomic_int ran = 0;
  orStream_t s = newStream();
  hold(newStream(), &holder);
  refuseThreads(ALL);
  launch(s, countKernel, &ran);
  ASSERT_EQ(lanesStarted(), 1);
  refuseThreads(0);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
  letGo(&holder);
}

static int dropped;
static void countDrop(void *args) { (void)args, dropped++; }

static orError_t launchAndWait(orStream_t stream, atomic_int *ran, int *queued) {
  return orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                      .stream = stream,
                                      .fn = countKernel,
                                      .args = &ran,
                                      .args_size = sizeof ran,
                                      .drop = countDrop,
                                      .name = "test",
                                      .flags = orLaunchWaits,
                                      .queued = queued});
}

/* What cannot run fails where it is waited for, and runs when there are threads again; what its
 * call has given up does not. */
TEST(threads_refused_for_ever_fail_the_waits) {
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  atomic_int ran = 0, given_up = 0;
  int queued = 0;
  char *device, byte = 7;
  ASSERT_OK(orMalloc((void **)&device, 4096));
  ASSERT_OK(orMemset(device, 1, 4096)); /* any thread may */
  refuseThreads(ALL);
  launch(s, countKernel, &ran);
  ASSERT_OK(orEventRecord(e, s));
  launch(OR_STREAM_DEFAULT, countKernel, &ran);
  ASSERT_NO_LANE(orStreamSynchronize(s));
  ASSERT_NO_LANE(orEventSynchronize(e));
  ASSERT_NO_LANE(orDeviceSynchronize());
  ASSERT_NO_LANE(orStreamQuery(s));
  ASSERT_NO_LANE(orEventQuery(e));
  ASSERT_NO_LANE(orFree(device));
  ASSERT_NO_LANE(orMemcpy(&byte, device, 1, orMemcpyDeviceToHost));
  ASSERT_NO_LANE(launchAndWait(s, &given_up, &queued));
  ASSERT_EQ(queued, 1);
  ASSERT_EQ(lanesStarted(), 0);
  refuseThreads(0);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 2);
  ASSERT_EQ(given_up, 0);
  ASSERT_EQ(dropped, 1);
  ASSERT_EQ(byte, 7);
  ASSERT_OK(orFree(device));
}

TEST(threads_refused_leave_a_full_queue_no_hang) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  int count = 0;
  orError_t error = orSuccess;
  refuseThreads(ALL);
  while (!error) {
    error = launchAs(s, countKernel, &ran, 0);
    count += !error;
  }
  ASSERT_NO_LANE(error);
  refuseThreads(0);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, count);
}

/* Copies, fills, events and kernels for any thread, over several streams and devices. */
TEST(threads_refused_leave_a_host_what_any_thread_may_run) {
  enum { BYTES = 4 << 20 };
  orStream_t streams[] = {newStream(), newStream(), newStreamOn(1)};
  atomic_int ran = 0;
  orEvent_t e = newEvent(0);
  char *pinned, *device;
  ASSERT_OK(orMallocHost((void **)&pinned, BYTES));
  ASSERT_OK(orMalloc((void **)&device, BYTES));
  refuseThreads(ALL);
  ASSERT_OK(orMemsetAsync(device, 5, BYTES, streams[0]));
  ASSERT_OK(launchAs(streams[0], countKernel, &ran, orLaunchAnyThread));
  ASSERT_OK(orEventRecord(e, streams[0]));
  for (int i = 1; i < 3; i++) {
    ASSERT_OK(orStreamWaitEvent(streams[i], e));
    ASSERT_OK(launchAs(streams[i], countKernel, &ran, orLaunchAnyThread));
  }
  ASSERT_OK(orMemcpyAsync(pinned, device, BYTES, orMemcpyDefault, streams[1]));
  for (int i = 2; i > 0; i--) ASSERT_OK(orStreamSynchronize(streams[i]));
  ASSERT_EQ(ran, 3);
  for (int i = 0; i < BYTES; i += 4096) ASSERT_EQ(pinned[i], 5);
  ASSERT_EQ(lanesStarted(), 0);
  ASSERT_OK(orFree(device));
}

static orStream_t waited_for[2];
static atomic_int asleep;

static void *noteSleep(void) {
  atomic_fetch_add(&asleep, 1);
  return NULL;
}
static void noteNothing(void *token) { (void)token; }

static void *synchronize(void *stream) {
  return (void *)(intptr_t)orStreamSynchronize(*(orStream_t *)stream); /* NOLINT */
}

/* Hosts sleep behind a gate: one for what any thread may run, one for what needs a lane. */
TEST(threads_refused_wake_hosts_when_a_stream_becomes_ready) {
  pthread_t threads[2];
  void *results[2];
  atomic_int ran = 0;
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){noteSleep, noteNothing}));
  refuseThreads(ALL);
  orEvent_t gate = newGate();
  for (int i = 0; i < 2; i++) {
    waited_for[i] = newStream();
    ASSERT_OK(orStreamWaitEvent(waited_for[i], gate));
    ASSERT_OK(launchAs(waited_for[i], countKernel, &ran, i ? 0 : orLaunchAnyThread));
    ASSERT_EQ(pthread_create(&threads[i], NULL, synchronize, &waited_for[i]), 0);
  }
  awaitInt(&asleep, 2);
  openGate(gate);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], &results[i]);
  ASSERT_EQ((intptr_t)results[0], orSuccess);
  ASSERT_EQ((intptr_t)results[1], orErrorSystem);
  ASSERT_EQ(ran, 1);
}

TEST(threads_refused_leave_a_reset) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  refuseThreads(ALL);
  launch(s, countKernel, &ran);
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 0);
}

TEST(threads_refused_under_a_schedule) {
  setenv("OPENREG_SCHEDULE_SEED", "late", 1);
  orStream_t s = newStream();
  orEvent_t gate = newGate();
  atomic_int ran = 0;
  refuseThreads(ALL);
  launch(s, countKernel, &ran);
  ASSERT_NO_LANE(orStreamSynchronize(s));
  ASSERT_NO_LANE(orStreamQuery(s));
  ASSERT_NO_LANE(orDeviceSynchronize());
  ASSERT_EQ(orEventQuery(gate), orErrorNotReady);
  refuseThreads(1);
  ASSERT_NO_LANE(orStreamSynchronize(s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
}

/* The schedule begins when streams wait for a lane already. */
TEST(threads_refused_before_a_schedule) {
  orStream_t s = newStream();
  atomic_int ran = 0;
  refuseThreads(ALL);
  launch(s, countKernel, &ran);
  ASSERT_NO_LANE(orScheduleSet(orScheduleLate, 0));
  ASSERT_OK(orScheduleSwitch(orScheduleLate, 0));
  ASSERT_NO_LANE(orStreamSynchronize(s));
  refuseThreads(0);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
}

TEST(threads_refused_watchdog_is_tried_again) {
  orStream_t s;
  setenv("OPENREG_WATCHDOG_S", "1000", 1);
  refuseThreads(1);
  ASSERT_REFUSED(orStreamCreate(&s), orErrorSystem, "watchdog");
  ASSERT_OK(orStreamCreate(&s));
  while (!countThreads("openreg-watch")) sched_yield(); /* a new one has no name yet */
}
