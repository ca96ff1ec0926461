/*
 * Determines from a call's arguments whether its kernel accepts them, and the metadata of its
 * results.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <memory>
#include <vector>

#include "op_traits.h"
#include "output_cache.h"

namespace torch_openreg {

struct DryRun {
  std::shared_ptr<const OutputSpec> spec;  // null: data decides
  std::vector<c10::Warning> warnings;
};

/* Runs the CPU's kernel on the calling thread, on stand-ins for the device's tensors: the same
 * metadata, other memory. Throws the kernel's error, unless the error may depend on data, because
 * stand-ins do not have the call's data. */
DryRun dryRun(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
              c10::ArrayRef<c10::IValue> arguments);

/* For a call whose sizes are known to be right: throws if its kernel refuses the dtypes. The kernel
 * runs once for each combination of dtypes, on stand-ins of at most two elements in each dimension
 * if it accepts those. */
void checkTypes(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
                c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
