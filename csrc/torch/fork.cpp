/*
 * `running` counts kernels, `pauses` the forks that wait for it to be 0. A kernel increments
 * `running` and then reads `pauses`; a fork does the reverse (sequentially consistent), so at least
 * one sees the other. A part of a kernel's work is counted with its kernel, which waits for it.
 */
#include "fork.h"

#include <pthread.h>

#include <atomic>

namespace torch_openreg {

namespace {

std::atomic<int> running{0}, pauses{0};
thread_local bool counted = false;  // this thread is in a kernel, and may fork itself

void leave() {
  if (running.fetch_sub(1) == 1 && pauses.load() != 0) running.notify_all();
}

/* In a forked child, where the counted threads do not exist. */
void startCountAnew() {
  running.store(counted ? 1 : 0);
  pauses.store(0);
}

[[maybe_unused]] const bool hooked =
    (pthread_atfork(&pauseKernels, &resumeKernels, &startCountAnew), true);

}  // namespace

KernelScope::KernelScope() : nested_(counted) {
  if (nested_) return;
  while (running.fetch_add(1), pauses.load() != 0) {
    leave();
    for (int n = pauses.load(); n != 0; n = pauses.load()) pauses.wait(n);
  }
  counted = true;
}

KernelScope::~KernelScope() {
  if (nested_) return;
  counted = false;
  leave();
}

bool inKernel() { return counted; }

void throwForked() {
  int device = 0;
  throwError(orGetDevice(&device), {__func__, __FILE__, static_cast<uint32_t>(__LINE__)});
}

void pauseKernels() {
  if (counted) return;
  pauses.fetch_add(1);
  for (int n = running.load(); n != 0; n = running.load()) running.wait(n);
}

void resumeKernels() {
  if (!counted && pauses.fetch_sub(1) == 1) pauses.notify_all();
}

}  // namespace torch_openreg
