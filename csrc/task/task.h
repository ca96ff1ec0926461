/*
 * A C++ function as a task of a stream: either queued, or run while its caller waits.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <openreg.h>

#include <memory>

#include "worker_state.h"

namespace torch_openreg {

/* Holds everything that it needs by value. What it throws is the device's error, raised with its
 * type at the next call that synchronises; its warnings are issued there too. The queue destroys it
 * once, after it has run or without running it. */
class Task : Uncopyable {
 public:
  Task(const char *kernelName, c10::Device on) : name(kernelName), device(on) {}
  virtual ~Task() = default;

  virtual void run() = 0;  // on the worker, as the caller

  const char *const name;  // outlives the process
  const c10::Device device;
  CallerState caller = CallerState::now();
  bool warned = false;  // its warnings were issued earlier, as in a replay of the same graph
};

/* Queues it on a stream of its device. With OPENREG_LAUNCH_BLOCKING what it throws is thrown here.
 * `flags` are orLaunchFlags. */
void launchTask(std::unique_ptr<Task> kernel, orStream_t stream,
                c10::ArrayRef<orAccess> accesses = {}, unsigned flags = 0);

/* Runs `kernel` on a worker, after everything queued on `stream`, and returns when it has run. The
 * GIL, if held, is released while the caller sleeps. On the worker the function has the caller's
 * thread count (on the wide worker) and flush-denormal mode, no autograd and no dispatch modes.
 * What it throws is thrown here, with its type; warnings it raises are issued here. `name` must
 * outlive the process. `serial`: one thread is enough, and may be the caller. */
void runOnWorker(orStream_t stream, const char *name, bool serial,
                 c10::function_ref<void()> kernel);

}  // namespace torch_openreg
