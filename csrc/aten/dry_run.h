/*
 * Finds out from a call's arguments whether its kernel takes them, and what its results will look
 * like.
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
 * metadata, other memory. Throws what the kernel throws, unless that depends on the data, which are
 * not the call's. */
DryRun dryRun(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
              c10::ArrayRef<c10::IValue> arguments);

/* For a call whose sizes are known to be right: throws if its kernel does not take such dtypes. It
 * is run once for like types, on stand-ins of at most two elements in each dimension where these
 * will do. */
void checkTypes(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
                c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
