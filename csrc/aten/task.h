/*
 * A kernel that nobody waits for.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <openreg.h>

#include <exception>
#include <memory>

#include "lane.h"

namespace torch_openreg {

/* With all that it needs, by value. What it throws is the device's error, raised with its type at the next call that
 * synchronises; what it warns of is issued there too. */
class Task {
 public:
  Task(const char *kernelName, c10::Device on) : name(kernelName), device(on) {}
  virtual ~Task() = default;
  Task(const Task &) = delete;
  Task &operator=(const Task &) = delete;

  virtual void run() = 0;  // on the lane, as the caller

  const char *const name;  // outlives the process
  const c10::Device device;
  CallerState caller = CallerState::now();
  bool warned = false;  // what it warns of is known already
};

/* Queues it on a stream of its device. With OPENREG_LAUNCH_BLOCKING what it throws is thrown here. `flags` are
 * orLaunchFlags. */
void launchTask(std::unique_ptr<Task> kernel, orStream_t stream,
                c10::ArrayRef<orAccess> accesses = {}, unsigned flags = 0);

/* Keeps the exception for the call that reports the core's failure of `name` on the device. */
void keepFailure(const char *name, c10::DeviceIndex device, std::exception_ptr exception);

/* Forgets the exceptions of a device that was reset. */
void forgetFailures(c10::DeviceIndex device);

}  // namespace torch_openreg
