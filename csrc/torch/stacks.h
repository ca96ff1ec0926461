/*
 * Python stacks that were gathered, as lines.
 */
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <memory>
#include <vector>

namespace pybind11 {
class object;
}

namespace torch {

/* As torch/csrc/profiler/python/combined_traceback.h declares it, which includes a header that
 * PyTorch does not ship. Requires the GIL. */
TORCH_API std::vector<pybind11::object> py_symbolize(std::vector<CapturedTraceback *> &tracebacks);

}  // namespace torch

namespace torch_openreg {

/* Holds code objects and positions alone. The last owner may be on any thread: PyTorch releases
 * code objects the next time it has the GIL. */
using PythonStack = std::shared_ptr<torch::CapturedTraceback>;

inline PythonStack gatherStack() { return torch::CapturedTraceback::gather(true, false, false); }

/* Returns for each stack a list of dicts with filename, line and name, the innermost frame first.
 * Requires the GIL. */
std::vector<pybind11::object> linesOf(std::vector<torch::CapturedTraceback *> &stacks);
/* The same, with the code object and the index of its instruction. None for a null stack. */
pybind11::object linesOf(const PythonStack &stack);

}  // namespace torch_openreg
