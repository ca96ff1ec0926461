/*
 * Clock, futex, locks, and the hooks around a sleep.
 */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

static _Atomic(const orBlockHooks *) hooks;
static _Thread_local int entered; /* between orBlockEnter and orBlockLeave */

uint64_t orNow(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void orSleep(uint64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
  while (ns && nanosleep(&t, &t) && errno == EINTR) {
  }
}

/* Threads that are not the library's may hold locks that others need to proceed, and release them
 * in orBlockEnter. */
static void assertMaySleep(void) {
  orMutexAssertNone();
  OR_ASSERT(entered || orThreadIsOurs(), !=, 0);
}

void orFutexWait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns) {
  assertMaySleep();
  struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                       .tv_nsec = (long)(timeout_ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout_ns ? &t : NULL, NULL, 0);
}

void orFutexWake(_Atomic uint32_t *word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

orError_t orSetBlockHooks(const orBlockHooks *given) {
  static orBlockHooks copy;
  static atomic_flag taken = ATOMIC_FLAG_INIT;
  if (!given || !given->enter || !given->leave)
    return orFail(orErrorInvalidValue, "orSetBlockHooks: both functions are required");
  if (atomic_flag_test_and_set(&taken))
    return orFail(orErrorAlreadyExists, "orSetBlockHooks: hooks are set already");
  copy = *given;
  atomic_store_explicit(&hooks, &copy, memory_order_release);
  return orSuccess;
}

/* A worker never holds a lock of the caller's. */
void *orBlockEnter(void) {
  orMutexAssertNone();
  entered++;
  const orBlockHooks *h = atomic_load_explicit(&hooks, memory_order_acquire);
  return h && orProcessTask() == OR_TASK_NONE ? h->enter() : NULL;
}

void orBlockLeave(void *token) {
  orMutexAssertNone();
  entered--;
  const orBlockHooks *h = atomic_load_explicit(&hooks, memory_order_acquire);
  if (h && orProcessTask() == OR_TASK_NONE) h->leave(token);
}
