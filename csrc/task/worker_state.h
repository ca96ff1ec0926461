/*
 * The state of a thread that runs a kernel: how many threads it uses, denormal numbers, dispatch
 * modes, warnings.
 */
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "../torch/caller_state.h"

namespace torch_openreg {

/* Tensors as small as these are for one thread: two spend their time on each other. By the metadata
 * alone, so that the bits of results do not depend on what else goes on. */
constexpr int64_t kSerial = 1 << 14;  // elements

/* On a worker, or a host thread that waits (then with one thread): runs a kernel with the caller's
 * state, no autograd and no dispatch modes. What it warns of is appended to `warnings`; what it
 * throws is thrown. */
void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel);

/* In the midst of anything that the calling thread does: runs a function as a narrow worker would,
 * with one thread and no dispatch mode, autocast or profiler. The treatment of denormals stays. */
void asNarrowWorker(c10::function_ref<void()> function);

/* Marks the calling thread as one that computes for a device, until the end of the scope. */
class ForDevice {
 public:
  ForDevice();
  ~ForDevice();
  ForDevice(const ForDevice &) = delete;
  ForDevice &operator=(const ForDevice &) = delete;

 private:
  const bool before_;
};

/* Whether the calling thread computes for a device: it is a worker, or runs a kernel, or is in the
 * scope of a ForDevice. */
bool computesForDevice();

/* For a thread of our own that is no worker: what it computes opens no second team of OpenMP
 * threads. */
void useOneThread();

}  // namespace torch_openreg
