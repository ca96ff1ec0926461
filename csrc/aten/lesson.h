/*
 * What a finished call teaches: how its results will look when it is called with like arguments again.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "memo.h"
#include "opinfo.h"

namespace torch_openreg {

/* Taken before the call. */
std::vector<Layout> layoutsOf(c10::ArrayRef<c10::IValue> arguments);

/* The memo of a call: unusable where results are not simply fresh memory. */
std::shared_ptr<Memo> lesson(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments,
                             const std::vector<Layout> &before, c10::ArrayRef<c10::IValue> results);

}  // namespace torch_openreg
