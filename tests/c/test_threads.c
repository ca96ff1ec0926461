/*
 * The threads that the core starts, and what the system may refuse about them: a thread, a key, a set of
 * processors.
 *
 * The functions below stand in front of the C library's for the library and for this program.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"

/* ---- functions that fail ---- */

static __attribute__((unused)) bool isCore(const void *code) {
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
  orDeviceProperties properties;
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
