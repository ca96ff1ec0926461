/*
 * `python` holds what torch.openreg.sanitizer gives (its error, its text of a report) and is leaked; it is written and read
 * with the GIL. `mode` is read by any thread.
 *
 * A stack that the core keeps is a Stack on the heap. It holds code objects and positions alone, and is turned into lines
 * when somebody asks: the core may let go of it on any thread, as PyTorch drops code objects the next time it has the GIL.
 */
#include <Python.h>

#include "sanitizer.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <string>
#include <vector>

#include "aten/accesses.h"
#include "gil.h"
#include "stacks.h"
#include "stream.h"
#include "warnings.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using Stack = std::shared_ptr<torch::CapturedTraceback>;

struct Python {
  py::object error;      // DataRaceError
  py::function text;     // of a report
  py::function errorOf;  // a class of DataRaceError whose text is this
};
Python *python = nullptr;

enum class Mode : int { Error, Warn };
std::atomic<Mode> mode{Mode::Error};

struct DataRace final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject *python_type() override { return python->error.ptr(); }
};

void *captureStack(void *) {
  if (!mayBeInPython()) return nullptr;
  try {
    return new Stack(torch::CapturedTraceback::gather(true, false, false));
  } catch (...) {  // an access without a stack
    return nullptr;
  }
}

void releaseStack(void *stack, void *) { delete static_cast<Stack *>(stack); }

// ---- For Python ---------------------------------------------------------------------------------

void enable(bool warns, bool stacks) {
  mode.store(warns ? Mode::Warn : Mode::Error, std::memory_order_relaxed);
  orSanitizerRefuse(!warns);
  orSanitizerOptions options{};
  options.size = sizeof(options);
  if (stacks) options.capture = &captureStack;
  options.release = &releaseStack;
  OPENREG_CHECK(orSanitizerEnable(&options));  // frees the stacks of reports: see copyReports
  WithoutGil unlocked;
  watchHost(true);
}

void disable() {
  WithoutGil unlocked;
  watchHost(false);
  OPENREG_CHECK(orSanitizerDisable());
}

py::object framesOf(const Stack &stack) {
  if (!stack) return py::none();
  std::vector<torch::CapturedTraceback *> one{stack.get()};
  return torch::py_symbolize(one)[0];
}

py::dict describe(const orRaceAccess &access, const Stack &stack) {
  py::dict entry;
  entry["operation"] = std::string(access.operation);
  entry["device"] = access.device;
  entry["stream"] = static_cast<int64_t>(access.stream);
  entry["is_default"] = false;
  orStream_t standard = 0;
  if (access.device >= 0 && orStreamGetDefault(&standard, access.device) == orSuccess) {
    entry["is_default"] = access.stream == standard;
  }
  entry["write"] = access.write != 0;
  entry["begin"] = reinterpret_cast<uintptr_t>(access.begin);
  entry["end"] = reinterpret_cast<uintptr_t>(access.end);
  entry["stack"] = framesOf(stack);
  return entry;
}

Stack copyOf(const void *stack) {
  return stack == nullptr ? nullptr : *static_cast<const Stack *>(stack);
}

py::dict describe(const orRaceReport &report, const std::array<Stack, 2> &stacks) {
  py::dict entry;
  entry["number"] = report.number;
  entry["earlier"] = describe(report.earlier, stacks[0]);
  entry["later"] = describe(report.later, stacks[1]);
  entry["begin"] = reinterpret_cast<uintptr_t>(report.begin);
  entry["end"] = reinterpret_cast<uintptr_t>(report.end);
  entry["memory"] = std::string(report.memory);
  entry["advice"] = std::string(report.advice);
  return entry;
}

/* Under the GIL, as clear and disable are called, so that no stack goes while it is copied. */
std::vector<std::pair<orRaceReport, std::array<Stack, 2>>> copyReports() {
  std::vector<orRaceReport> reports(64);
  std::vector<std::pair<orRaceReport, std::array<Stack, 2>>> all;
  uint64_t first = 1;
  for (size_t count = reports.size(); count == reports.size();) {
    uint64_t total = 0;
    OPENREG_CHECK(orSanitizerReports(first, reports.data(), reports.size(), &count, &total));
    for (size_t i = 0; i < count; ++i) {
      all.push_back({reports[i], {copyOf(reports[i].earlier.stack), copyOf(reports[i].later.stack)}});
    }
    if (count != 0) first = reports[count - 1].number + 1;
  }
  return all;
}

py::list reports() {
  py::list list;
  for (const auto &[report, stacks] : copyReports()) list.append(describe(report, stacks));
  return list;
}

// ---- What a thread is told ----------------------------------------------------------------------

void say(const orRaceReport *report, void *text) {
  py::gil_scoped_acquire gil;
  auto &said = *static_cast<std::string *>(text);
  try {
    const std::array<Stack, 2> stacks{copyOf(report->earlier.stack), copyOf(report->later.stack)};
    said = python->text(describe(*report, stacks)).cast<std::string>();
  } catch (const std::exception &error) {
    said = error.what();
  }
}

/* What to say about the first conflict that this thread has found since it was last asked. */
bool foundRace(std::string &text) {
  const bool speaks = python != nullptr && interpreterRuns();
  return orSanitizerFound(speaks ? &say : nullptr, &text) != 0 && speaks;
}

}  // namespace

void raiseRaces() {
  std::string text;
  if (!foundRace(text)) return;
  if (mode.load(std::memory_order_relaxed) == Mode::Error) throw DataRace(text);
  issueWarning(text);
}

void raiseRacesLater() {
  std::string text;
  if (!foundRace(text)) return;
  py::gil_scoped_acquire gil;
  try {
    if (mode.load(std::memory_order_relaxed) == Mode::Warn) {
      if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) == 0) return;
      PyErr_Clear();  // made an error by a filter
    }
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), python->errorOf(text).ptr());
  } catch (const py::error_already_set &) {  // it is among the reports
  }
}

void bindSanitizer(py::module_ &m) {
  m.def("_sanitizer_bind", [](py::object error, py::function text, py::function errorOf) {
    if (python == nullptr) python = new Python();
    *python = {std::move(error), std::move(text), std::move(errorOf)};
  });
  m.def("_sanitizer_enable", &enable);
  m.def("_sanitizer_disable", &disable);
  m.def("_sanitizer_active", &sanitizerActive);
  m.def("_sanitizer_reports", &reports);
  m.def("_sanitizer_total", [] {
    size_t count = 0;
    uint64_t total = 0;
    OPENREG_CHECK(orSanitizerReports(1, nullptr, 0, &count, &total));
    return total;
  });
  m.def("_sanitizer_clear", [] { OPENREG_CHECK(orSanitizerClearReports()); });
}

}  // namespace torch_openreg
