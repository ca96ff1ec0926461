/*
 * Python stacks that were gathered, as lines.
 */
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <vector>

namespace pybind11 {
class object;
}

namespace torch {

/* As torch/csrc/profiler/python/combined_traceback.h declares it, which includes a header that does
 * not come with PyTorch. With the GIL. */
TORCH_API std::vector<pybind11::object> py_symbolize(std::vector<CapturedTraceback *> &tracebacks);

}  // namespace torch
