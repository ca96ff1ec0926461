/*
 * Kernels and forks: a fork waits until no kernel runs, and lets none begin. A child must not
 * inherit a lock that a kernel held, such as the one of a function's first call. A parent's thread
 * may hold other locks at any time, so a child is refused before it takes one.
 */
#pragma once

#include <c10/util/FunctionRef.h>

#include "check.h"

namespace torch_openreg {

/* Around a kernel on any thread. */
class KernelScope : Uncopyable {
 public:
  KernelScope();
  ~KernelScope();

 private:
  const bool nested_;
};

/* Runs a kernel that is not a task. It waits for no device and does not take the GIL, which the
 * forking thread may hold. */
inline void asKernel(c10::function_ref<void()> function) {
  KernelScope here;
  function();
}

/* Whether the calling thread runs a kernel. */
bool inKernel();

/* Throws in the child of a process that has used a device. Comes first in a call that takes a lock
 * before it calls the core. */
[[noreturn]] void throwForked();
inline void refuseInForkedChild() {
  if (C10_UNLIKELY(orInForkedChild() != 0)) throwForked();
}

/* Called before every fork (`pause`) and after it in the parent, possibly repeatedly. The child
 * starts its counts anew. */
void pauseKernels();
void resumeKernels();

}  // namespace torch_openreg
