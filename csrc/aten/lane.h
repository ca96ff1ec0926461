/*
 * Running a C++ function as a task of a stream, and waiting for it.
 */
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <openreg.h>

#include <vector>

namespace torch_openreg {

/* What a task takes over from the thread that queues it: how many threads a kernel may use (on the wide lane), and
 * what becomes of denormal numbers. Dispatch modes stay behind. */
struct CallerState {
  int threads;
  unsigned flush;
  static CallerState now();
};

/* Tensors as small as these are for one thread: two spend their time on each other. By the metadata alone, so that the
 * bits of results do not depend on what else goes on. */
constexpr int64_t kSerial = 1 << 14;  // elements

/* On a lane, or a host thread that waits (then with one thread): runs a kernel with the caller's state, no autograd and
 * no dispatch modes. What it warns of is appended to `warnings`; what it throws is thrown. */
void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel);

/* Runs `kernel` on a lane, after everything queued on `stream`, and returns when it has run. The GIL,
 * if held, is released while the caller sleeps. On the lane the function has the caller's thread
 * count (on the wide lane) and flush-denormal mode, no autograd and no dispatch modes. What it throws
 * is thrown here, type kept; warnings it raises are issued here. `name` must outlive the process. `serial`: one thread
 * is enough, and may be the caller. */
void runOnLane(orStream_t stream, const char *name, bool serial, c10::function_ref<void()> kernel);

/* Queues `run`, whose argument points to `task`. The queue calls `drop` once, whether or not it ran;
 * whose the task is after an error, `queued` says (orLaunch). `flags` are orLaunchFlags. */
orError_t launchOnLane(orStream_t stream, const char *name, orKernelFn run, void (*drop)(void *),
                       void *task, c10::ArrayRef<orAccess> accesses = {}, unsigned flags = 0,
                       int *queued = nullptr);

/* Before a sleep of a host's thread: lets go of the GIL, and of the thread's OpenMP team. Returns what takeGilBack
 * needs. */
void *fallAsleep();

/* For a thread of our own that is no lane: what it computes opens no second team of OpenMP threads. */
void useOneThread();

/* In the midst of anything that the calling thread does: runs a function as a narrow lane would, with one thread and no
 * dispatch mode, autocast or profiler. The treatment of denormals stays. */
void asNarrowLane(c10::function_ref<void()> function);

/* On any thread: runs a kernel that is no task, for a fork to wait for. It waits for no device and does not take the
 * GIL, which the thread that forks may hold. */
void asKernel(c10::function_ref<void()> function);

/* Whether the calling thread runs a kernel. */
bool inKernel();

/* Around every fork, and more than once: waits until no kernel runs, and lets none begin. A child must not inherit a
 * lock that a kernel held, such as the one of a function's first call. */
void pauseKernels();
void resumeKernels();

/* Whether kernels can reach the device's memory (orMapForKernel); else everything is copied. */
bool canMap(c10::DeviceIndex device);

}  // namespace torch_openreg
