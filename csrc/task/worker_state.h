/*
 * The state of a thread that runs a kernel: number of threads, denormal numbers, dispatch modes,
 * warnings.
 */
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "../torch/caller_state.h"

namespace torch_openreg {

/* Tensors up to this size use one thread: two spend their time on each other. The decision uses the
 * metadata alone, so that the bits of results do not depend on other work. */
constexpr int64_t kSerial = 1 << 14;  // elements

/* Runs a kernel with the caller's state, no autograd and no dispatch modes, on a worker or on a
 * waiting host thread (then with one thread). Appends its warnings to `warnings`; throws what it
 * throws. */
void runAsCaller(const CallerState &caller, std::vector<c10::Warning> &warnings,
                 c10::function_ref<void()> kernel);

/* Runs a function as a narrow worker would, with one thread and no dispatch mode, autocast or
 * profiler, whatever the calling thread is doing. The treatment of denormals stays. */
void asNarrowWorker(c10::function_ref<void()> function);

/* Marks the calling thread as computing for a device until the end of the scope. */
class ForDevice : Uncopyable {
 public:
  ForDevice();
  ~ForDevice();

 private:
  const bool before_;
};

/* Whether the calling thread computes for a device: a worker, a thread in a kernel, or one in the
 * scope of a ForDevice. */
bool computesForDevice();

/* For our own threads that are not workers: their computations open no second team of OpenMP
 * threads. */
void useOneThread();

}  // namespace torch_openreg
