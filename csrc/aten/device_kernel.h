/*
 * Calls of operators for which the device has kernels of its own (openreg_operator.h).
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <openreg.h>

#include <cstdint>
#include <memory>

#include "operator_task.h"

namespace torch_openreg {

/* Whether operators on this device run by its own kernels: it has some, and the CPU's kernels do
 * not reach its memory. */
bool runsOwnKernels(c10::DeviceIndex index);

/* Whether the device's factory has a kernel for this operator. */
bool hasDeviceKernel(const c10::OperatorHandle &op);

/* A result of the device, with memory from `stream`; `memory` describes that. Undefined if the
 * metadata is. (Of operator_task.cpp.) */
at::Tensor allocateResult(const KeptMetadata &metadata, c10::Device device, orStream_t stream,
                          KernelMemory &memory);

/* A call for the device's own kernel, with its results, which are allocated. */
class DeviceCall : Uncopyable {
 public:
  /* Null if there is no kernel, it does not accept the call, or a C structure cannot describe an
   * argument. Nothing is queued, written or drawn then. */
  static std::unique_ptr<DeviceCall> make(const c10::OperatorHandle &op, const OpTraits &traits,
                                          const OutputSpec &spec, c10::Device device,
                                          orStream_t stream, c10::ArrayRef<c10::IValue> arguments);
  virtual ~DeviceCall() = default;

  /* Queues it and returns its results. `name` is the operator that the program called. `draw` makes
   * the number in place of the generator at an argument's position. */
  static Results queue(std::unique_ptr<DeviceCall> call, const char *name,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::function_ref<uint64_t(size_t)> draw);

 protected:
  DeviceCall() = default;
};

}  // namespace torch_openreg
