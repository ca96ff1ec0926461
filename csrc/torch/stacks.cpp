#include <Python.h>

#include "stacks.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace torch_openreg {

/* PyTorch asks torch._inductor for the lines of code that it has compiled. If that is not imported,
 * PyTorch would import it, which takes over a second, although it has compiled nothing. So None is
 * put in its place for a moment in which no Python runs. */
std::vector<py::object> linesOf(std::vector<torch::CapturedTraceback *> &stacks) {
  static constexpr const char *kInductor = "_inductor";
  const py::module_ torch = py::module_::import("torch");
  const py::dict names = torch.attr("__dict__");
  const bool missing = !names.contains(kInductor);
  if (missing) names[kInductor] = py::none();
  const auto takeAway = [&] {
    if (missing && names.contains(kInductor) && names[kInductor].is_none()) {
      PyDict_DelItemString(names.ptr(), kInductor);
    }
  };
  try {
    std::vector<py::object> lines = torch::py_symbolize(stacks);
    takeAway();
    return lines;
  } catch (...) {
    takeAway();
    throw;
  }
}

py::object linesOf(const PythonStack &stack) {
  if (!stack) return py::none();
  std::vector<torch::CapturedTraceback *> one{stack.get()};
  return linesOf(one)[0];
}

}  // namespace torch_openreg
