#include <Python.h>

#include "stacks.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace torch_openreg {

namespace {

using Frames = std::vector<torch::CapturedTraceback::PyFrame>;

/* PyTorch keeps the frames private, and gives the line of an instruction without its columns. An
 * explicit instantiation may name private members. */
template <Frames torch::CapturedTraceback::*member>
struct FramesOf {
  friend Frames &framesOf(torch::CapturedTraceback &stack) { return stack.*member; }
};
Frames &framesOf(torch::CapturedTraceback &stack);
template struct FramesOf<&torch::CapturedTraceback::frames_>;

}  // namespace

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
  py::list lines = linesOf(one)[0];
  // Compiled code has more lines than frames: those of the program that it was made from.
  auto frame = framesOf(*stack).begin();
  const auto end = framesOf(*stack).end();
  for (const py::handle line : lines) {
    if (frame == end) break;
    auto *code = static_cast<PyCodeObject *>(frame->code);
    if (PyCode_Addr2Line(code, frame->lasti) != line["line"].cast<int>()) continue;
    line["code"] = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject *>(code));
    line["instruction"] = frame++->lasti;
  }
  return lines;
}

}  // namespace torch_openreg
