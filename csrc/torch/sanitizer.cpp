/*
 * `python` holds what torch.openreg.sanitizer gives (its error, its text of a report) and is leaked; it is written and read
 * with the GIL. `mode` and `keepsStacks` are read by any thread.
 *
 * Nothing can be thrown out of a callback of at::RecordFunction, which is where the host's accesses are seen. So their error
 * is put down in Python (_Unraised), with a warning whose filter raises it: PyTorch asks the filters where the operator
 * returns to Python. Where it does not, `hasUnraised` lets this thread's next call of the shim throw it.
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
#include <cstdlib>
#include <string>
#include <vector>

#include "gil.h"
#include "module.h"
#include "stacks.h"
#include "stream.h"
#include "warnings.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using Stack = std::shared_ptr<torch::CapturedTraceback>;

struct Python {
  py::object error;           // DataRaceError
  py::function text;          // of a report
  py::function putDown;       // an error of this text; gives the text of the warning that raises it
  py::function takeUnraised;  // the text of this thread's, or None
};
Python *python = nullptr;

enum class Mode : int { Error, Warn };
std::atomic<Mode> mode{Mode::Error};
std::atomic<bool> keepsStacks{true};
thread_local bool hasUnraised = false;

struct DataRace final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject *python_type() override { return python->error.ptr(); }
};

void *captureStack(void *) {
  if (!keepsStacks.load(std::memory_order_relaxed) || !mayBeInPython()) return nullptr;
  try {
    return new Stack(torch::CapturedTraceback::gather(true, false, false));
  } catch (...) {  // an access without a stack
    return nullptr;
  }
}

void releaseStack(void *stack, void *) { delete static_cast<Stack *>(stack); }

std::string takeUnraised() {
  if (C10_LIKELY(!hasUnraised) || !interpreterRuns()) return {};
  py::gil_scoped_acquire gil;
  hasUnraised = false;
  const py::object text = python->takeUnraised();
  return text.is_none() ? std::string() : text.cast<std::string>();
}

// ---- For Python ---------------------------------------------------------------------------------

/* While it is on, this changes how it tells, and nothing else. */
void enable(bool warns, bool stacks) {
  mode.store(warns ? Mode::Warn : Mode::Error, std::memory_order_relaxed);
  orSanitizerRefuse(!warns);
  keepsStacks.store(stacks, std::memory_order_relaxed);
  if (sanitizerActive()) return;
  orSanitizerOptions options{};
  options.size = sizeof(options);
  options.capture = &captureStack;
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

/* exit() may be called again by what it calls: the last status counts (glibc). */
void failExit() {
  on_exit(
      [](int status, void *) {
        if (status == 0) exit(EXIT_FAILURE);
      },
      nullptr);
}

py::object framesOf(const Stack &stack) {
  if (!stack) return py::none();
  std::vector<torch::CapturedTraceback *> one{stack.get()};
  return torch::py_symbolize(one)[0];
}

py::dict describe(const orRaceAccess &access, const Stack &stack) {
  py::dict entry;
  entry["operation"] = std::string(access.operation);
  entry["where"] = std::string(access.where);
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
  const std::string unraised = takeUnraised();
  std::string text;
  const bool found = foundRace(text);
  if (!unraised.empty()) throw DataRace(found ? unraised + "\n\n" + text : unraised);
  if (!found) return;
  if (mode.load(std::memory_order_relaxed) == Mode::Error) throw DataRace(text);
  issueWarning(text);
}

void raiseRacesOfHost() {
  std::string text;
  if (!foundRace(text)) return;
  py::gil_scoped_acquire gil;
  if (mode.load(std::memory_order_relaxed) == Mode::Warn) {
    if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) == 0) return;
    PyErr_Clear();  // a filter makes it an error
  }
  try {
    const auto warning = python->putDown(text).cast<std::string>();
    hasUnraised = true;
    c10::warn(c10::Warning(c10::UserWarning(), {__func__, __FILE__, __LINE__}, warning, false));
  } catch (const py::error_already_set &) {  // it is among the reports
  }
}

namespace {

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_sanitizer_bind",
        [](py::object error, py::function text, py::function putDown, py::function takeUnraised) {
          if (python == nullptr) python = new Python();
          *python = {std::move(error), std::move(text), std::move(putDown), std::move(takeUnraised)};
        });
  m.def("_sanitizer_enable", &enable);
  m.def("_sanitizer_disable", &disable);
  m.def("_sanitizer_active", &sanitizerActive);
  m.def("_sanitizer_mode",
        [] { return std::make_pair(mode.load() == Mode::Warn, keepsStacks.load()); });
  m.def("_sanitizer_fail_exit", &failExit);
  m.def("_sanitizer_reports", &reports);
  m.def("_sanitizer_clear", [] { OPENREG_CHECK(orSanitizerClearReports()); });
});

}  // namespace

}  // namespace torch_openreg
