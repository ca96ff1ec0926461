/*
 * PyTorch passes ThreadLocalDebugInfo on to autograd's threads, but has no hook where a backward
 * pass is called. So the engine's one Python method that does so gets another function in its
 * PyMethodDef. A pass that C++ calls uses the modes that the autograd thread had last.
 *
 * At exit Python ends threads inside that function by unwinding, without the GIL: nothing here may
 * have a destructor that needs it.
 */
#include "backward_caller.h"

#include <Python.h>

#include <openreg_sanitizer.h>

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <string_view>
#include <thread>

#include "caller_state.h"
#include "module.h"
#include "sanitizer.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

std::atomic<uint64_t> passes{0};

struct BackwardCaller final : c10::DebugInfoBase {
  const uint64_t pass = passes.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::thread::id thread = std::this_thread::get_id();
  const CallerState state = CallerState::now();
  const uint64_t sanitized = orSanitizerThread();
  const PythonStack stack =
      sanitizerActive() && keepsStacks.load(std::memory_order_relaxed) ? gatherStack() : nullptr;
};

constexpr std::string_view kCallerName = "OPENREG_BACKWARD_CALLER";
const c10::DebugInfoKind kCaller{&kCallerName};

const BackwardCaller *backwardCaller() {
  return static_cast<const BackwardCaller *>(c10::ThreadLocalDebugInfo::get(kCaller));
}

PyCFunctionWithKeywords runBackward = nullptr;

PyObject *runBackwardAsCaller(PyObject *engine, PyObject *args, PyObject *kwargs) {
  const c10::DebugInfoGuard guard(kCaller, std::make_shared<BackwardCaller>());
  return runBackward(engine, args, kwargs);
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &) {
  const py::object method =
      py::module_::import("torch._C").attr("_ImperativeEngine").attr("run_backward");
  TORCH_CHECK(Py_IS_TYPE(method.ptr(), &PyMethodDescr_Type),
              "torch._C._ImperativeEngine.run_backward is not a method in C");
  PyMethodDef &def = *reinterpret_cast<PyMethodDescrObject *>(method.ptr())->d_method;
  TORCH_CHECK(
      def.ml_flags == (METH_VARARGS | METH_KEYWORDS),
      "torch._C._ImperativeEngine.run_backward has other flags than expected: ", def.ml_flags);
  runBackward =
      reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(def.ml_meth));
  def.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&runBackwardAsCaller));
});

}  // namespace

void takeOverFromBackwardCaller() {
  const BackwardCaller *caller = backwardCaller();
  if (C10_LIKELY(caller == nullptr)) return;
  thread_local uint64_t latest = 0;
  if (caller->pass == latest || caller->thread == std::this_thread::get_id()) return;
  latest = caller->pass;
  caller->state.takeOver();
}

uint64_t actsForThread() {
  const BackwardCaller *caller = backwardCaller();
  return caller == nullptr ? 0 : caller->sanitized;
}

PythonStack backwardStack() {
  const BackwardCaller *caller = backwardCaller();
  return caller == nullptr ? nullptr : caller->stack;
}

}  // namespace torch_openreg
