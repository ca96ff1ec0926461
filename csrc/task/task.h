/*
 * A function of C++ as a task of a stream: one that nobody waits for, or one that its caller waits
 * for.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <openreg.h>

#include <memory>

#include "worker_state.h"

namespace torch_openreg {

/* With all that it needs, by value. What it throws is the device's error, raised with its type at
 * the next call that synchronises; what it warns of is issued there too. The queue destroys it
 * once, when it has run or in its place. */
class Task {
 public:
  Task(const char *kernelName, c10::Device on) : name(kernelName), device(on) {}
  virtual ~Task() = default;
  Task(const Task &) = delete;
  Task &operator=(const Task &) = delete;

  virtual void run() = 0;  // on the worker, as the caller

  const char *const name;  // outlives the process
  const c10::Device device;
  CallerState caller = CallerState::now();
  bool warned =
      false;  // what it warns of is known already, as from a replay of the same graph before
};

/* Queues it on a stream of its device. With OPENREG_LAUNCH_BLOCKING what it throws is thrown here.
 * `flags` are orLaunchFlags. */
void launchTask(std::unique_ptr<Task> kernel, orStream_t stream,
                c10::ArrayRef<orAccess> accesses = {}, unsigned flags = 0);

/* Runs `kernel` on a worker, after everything queued on `stream`, and returns when it has run. The
 * GIL, if held, is released while the caller sleeps. On the worker the function has the caller's
 * thread count (on the wide worker) and flush-denormal mode, no autograd and no dispatch modes.
 * What it throws is thrown here, type kept; warnings it raises are issued here. `name` must outlive
 * the process. `serial`: one thread is enough, and may be the caller. */
void runOnWorker(orStream_t stream, const char *name, bool serial,
                 c10::function_ref<void()> kernel);

}  // namespace torch_openreg
