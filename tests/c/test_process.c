/* What every entry point checks first: fork, exit, calls from inside a task. */
#include "harness.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void runBare(void) {
  execl(pluginPath("bare"), "bare", NULL);
  FAIL("cannot run %s", pluginPath("bare"));
}

/* The library's objects but for those of the tools, in a program of their own. */
TEST(process_runs_without_the_tools) {
  int status = forkAndRun(runBare);
  ASSERT(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
}

static void bodyUse(void) {
  void *p = NULL;
  ASSERT_OK(orMalloc(&p, 4096));
  ASSERT_OK(orMemset(p, 7, 4096));
  ASSERT_OK(orFree(p));
  ASSERT_EQ(orInForkedChild(), 0);
}

TEST(process_fork_before_first_use) {
  int count = 0;
  ASSERT_OK(orGetDeviceCount(&count));
  ASSERT_EQ(count, 2);
  ASSERT_EQ(orDeviceIsActive(0), 0);
  ASSERT_FORK_OK(bodyUse);
  ASSERT_FORK_OK(bodyUse);
  bodyUse();
  ASSERT_EQ(orDeviceIsActive(0), 1);
}

#define ASSERT_FORKED(call)                             \
  do {                                                  \
    ASSERT_ERROR(call, orErrorForked);                  \
    ASSERT_CONTAINS(orGetLastErrorMessage(), "forked"); \
    ASSERT_CONTAINS(orGetLastErrorMessage(), "spawn");  \
  } while (0)

static void *inherited;
static orStream_t inheritedStream;
static orEvent_t inheritedEvent;

static void doNothing(void *user_data) { (void)user_data; }
static orError_t succeed(void *args) {
  (void)args;
  return orSuccess;
}

static void refusedMemory(void) {
  void *p = NULL;
  char bytes[16];
  size_t a, b;
  ASSERT_FORKED(orMalloc(&p, 16));
  ASSERT_FORKED(orMallocHost(&p, 16));
  ASSERT_FORKED(orCacheMalloc(&p, 16, 0));
  ASSERT_FORKED(orMemcpy(bytes, inherited, 16, orMemcpyDeviceToHost));
  ASSERT_FORKED(orMemcpyAsync(bytes, inherited, 16, orMemcpyDefault, 0));
  ASSERT_FORKED(orMemset(inherited, 0, 16));
  ASSERT_FORKED(orMemGetInfo(&a, &b));
}

static void refusedStreams(void) {
  orStream_t stream;
  orEvent_t event;
  orLaunch launch = {.size = sizeof(launch), .fn = succeed, .name = "nothing"};
  ASSERT_FORKED(orStreamCreate(&stream));
  ASSERT_FORKED(orStreamGetDefault(&stream, 0));
  ASSERT_FORKED(orStreamQuery(inheritedStream));
  ASSERT_FORKED(orStreamSynchronize(inheritedStream));
  ASSERT_FORKED(orLaunchKernelEx(&launch));
  ASSERT_FORKED(orLaunchHostFunc(inheritedStream, doNothing, NULL));
  ASSERT_FORKED(orEventCreate(&event));
  ASSERT_FORKED(orEventRecord(inheritedEvent, inheritedStream));
  ASSERT_FORKED(orEventSynchronize(inheritedEvent));
  ASSERT_FORKED(orStreamWaitEvent(inheritedStream, inheritedEvent));
}

static void refusedDevices(void) {
  orDevice *device;
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_EQ(orInForkedChild(), 1);
  ASSERT_FORKED(orSetDevice(0));
  ASSERT_FORKED(orGetDeviceProperties(&properties, 0));
  ASSERT_FORKED(orDeviceSynchronize());
  ASSERT_FORKED(orDeviceReset());
  ASSERT_FORKED(orGetDeviceByIndex(&device, "openreg", 0));
  ASSERT_FORKED(orAddDevices(NULL, NULL));
}

static void bodyRefused(void) {
  refusedDevices();
  refusedMemory();
  refusedStreams();
}

static void bodyGrandchild(void) { ASSERT_FORK_OK(bodyRefused); }

TEST(process_fork_after_use_is_refused) {
  ASSERT_OK(orMalloc(&inherited, 4096));
  ASSERT_OK(orStreamCreate(&inheritedStream));
  ASSERT_OK(orEventCreate(&inheritedEvent));
  ASSERT_OK(orLaunchSleep(inheritedStream, 1000));
  ASSERT_FORK_OK(bodyRefused);
  ASSERT_FORK_OK(bodyGrandchild);
  bodyUse(); /* the parent goes on */
  ASSERT_OK(orFree(inherited));
}

static orError_t seenInTask[3];

static void callFromHostFunction(void *user_data) {
  (void)user_data;
  seenInTask[0] = orSetDevice(0);
  seenInTask[1] = orStreamQuery(inheritedStream);
  seenInTask[2] = orDeviceSynchronize();
}

TEST(process_host_function_may_not_call) {
  ASSERT_OK(orStreamCreate(&inheritedStream));
  ASSERT_OK(orLaunchHostFunc(inheritedStream, callFromHostFunction, NULL));
  ASSERT_OK(orStreamSynchronize(inheritedStream));
  for (int i = 0; i < 3; ++i) ASSERT_ERROR(seenInTask[i], orErrorNotPermitted);
}

static orError_t callFromKernel(void *args) {
  (void)args;
  int device;
  seenInTask[0] = orGetDevice(&device);
  seenInTask[1] = orStreamSynchronize(inheritedStream);
  seenInTask[2] = orLaunchSleep(inheritedStream, 1);
  return orSuccess;
}

TEST(process_kernel_may_not_block_or_queue) {
  ASSERT_OK(orStreamCreate(&inheritedStream));
  orLaunch launch = {
      .size = sizeof(launch), .stream = inheritedStream, .fn = callFromKernel, .name = "calls"};
  ASSERT_OK(orLaunchKernelEx(&launch));
  ASSERT_OK(orStreamSynchronize(inheritedStream));
  ASSERT_OK(seenInTask[0]);
  ASSERT_ERROR(seenInTask[1], orErrorNotPermitted);
  ASSERT_ERROR(seenInTask[2], orErrorNotPermitted);
}

/* Default and side streams of both devices hold work that will not end, or not soon. */
HELPER(process_leave_with_queued_work) {
  for (int device = 0; device < 2; ++device) {
    orStream_t stream;
    orEvent_t gate;
    ASSERT_OK(orSetDevice(device));
    ASSERT_OK(orStreamCreate(&stream));
    ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
    for (int i = 0; i < 20; ++i) {
      ASSERT_OK(orLaunchSleep(stream, 1000000));
      ASSERT_OK(orLaunchSleep(OR_STREAM_DEFAULT, 1000000));
    }
    ASSERT_OK(orStreamWaitEvent(stream, gate));
    ASSERT_OK(orLaunchSleep(stream, 1000000));
  }
}

TEST_WITH_LIMIT(process_exit_with_queued_work, 60) {
  char text[TEST_MAX_TEXT];
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(runHelper("process_leave_with_queued_work", text, sizeof(text)), 0);
    ASSERT_STR(text, "");
  }
}

/* ---- A library that is loaded and unloaded ---- */

/* As a second library: this program is linked to the first. */
static void *loadCopy(const char *copy) {
  char command[2048];
  Dl_info core;
  ASSERT(dladdr((const void *)orGetVersion, &core)); /* NOLINT */
  snprintf(command, sizeof command, "cp '%s' '%s'", core.dli_fname, copy);
  ASSERT_EQ(system(command), 0); /* NOLINT */
  void *library = dlopen(copy, RTLD_NOW | RTLD_LOCAL);
  if (!library) FAIL("%s", dlerror());
  return library;
}

/* Its workers and its watchdog go on. */
TEST(process_unloads_no_library_with_workers) {
  char folder[] = "/tmp/openreg-XXXXXX", copy[sizeof folder + 16];
  ASSERT(mkdtemp(folder));
  snprintf(copy, sizeof copy, "%s/copy.so", folder);
  setenv("OPENREG_WATCHDOG_S", "0.01", 1);
  void *library = loadCopy(copy);
  orError_t (*sleep)(orStream_t, uint64_t), (*synchronize)(void);
  *(void **)&sleep = dlsym(library, "orLaunchSleep");
  *(void **)&synchronize = dlsym(library, "orDeviceSynchronize");
  ASSERT_OK(sleep(0, 1000));
  ASSERT_OK(synchronize());
  ASSERT_EQ(dlclose(library), 0);
  void *again = dlopen(copy, RTLD_NOW | RTLD_NOLOAD);
  unlink(copy);
  rmdir(folder);
  ASSERT(again);
  ASSERT_OK(sleep(0, 1000));
  ASSERT_OK(synchronize());
}
