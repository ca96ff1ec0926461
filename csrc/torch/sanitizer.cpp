/*
 * `python` holds what torch.openreg.sanitizer provides (its error, the text of a report). It is
 * leaked, and read and written with the GIL. Any thread reads `mode`.
 *
 * A callback of at::RecordFunction, which sees the host's accesses, cannot throw. So their error is
 * stored in Python (_Unraised), with a warning whose filter raises it: PyTorch applies the filters
 * where the operator returns to Python. Where it does not, `hasUnraised` makes this thread's next
 * call of the shim throw the error.
 *
 * An access to memory by plain host code is reported from a signal handler (touched), in the middle
 * of arbitrary code. Python's main thread is asked to raise at its interpreter's next check, after
 * that code returns to it. On another thread the next call of the shim raises, or disable().
 *
 * A stack that the core keeps is a Kept on the heap, which becomes lines on request. The core may
 * release it on any thread (stacks.h).
 */
#include <Python.h>

#include "sanitizer.h"

#include <openreg_host_access.h>
#include <openreg_late.h>
#include <openreg_package.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backward.h"
#include "backward_caller.h"
#include "gil.h"
#include "module.h"
#include "stacks.h"
#include "stream.h"
#include "stream_origins.h"
#include "touched_types.h"
#include "unwinding.h"
#include "warnings.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

/* The facts of one access. */
struct Call {
  PythonStack stack;
  std::shared_ptr<const BackwardPart> backward;
};
using Kept = std::shared_ptr<const Call>;
using Calls = std::array<Kept, 3>;  // of a report: earlier, later, the memory's first use

struct Python {
  py::object error;           // DataRaceError
  py::function text;          // of a report, or an empty one
  py::function putDown;       // an error of this text; gives the text of the warning that raises it
  py::function takeUnraised;  // the text of this thread's, or None
  py::function warn;          // warns of the newest text, in the line of its access
};
Python *python = nullptr;

enum class Mode : int { Error, Warn, Quiet };  // Quiet: reports alone
std::atomic<Mode> mode{Mode::Error};
thread_local bool hasUnraised = false;

struct DataRace final : torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject *python_type() override { return python->error.ptr(); }
};

void *captureCall(void *) {
  if (!keepsStacks.load(std::memory_order_relaxed) || !interpreterRuns()) return nullptr;
  try {
    Call call{mayBeInPython() ? gatherStack() : nullptr, currentBackward()};
    if (call.backward == nullptr && call.stack == nullptr) return nullptr;
    if (call.backward == nullptr) noteForward(call.stack);
    return new Kept(std::make_shared<const Call>(std::move(call)));
  } catch (...) {  // an access without a stack
    return nullptr;
  }
}

void releaseCall(void *call, void *) { delete static_cast<Kept *>(call); }

bool foundRace(std::string &text);

/* Runs on Python's main thread, with the GIL. */
int raiseTouched(void *) {
  std::string text;
  if (!foundRace(text)) return 0;
  if (mode.load(std::memory_order_relaxed) == Mode::Error) {
    PyErr_SetObject(python->error.ptr(), py::str(text).ptr());
    return -1;
  }
  try {
    python->warn(text);
  } catch (py::error_already_set &error) {  // a filter makes it an error
    error.restore();
    return -1;
  }
  return 0;
}

/* Runs in a signal handler. If Python's queue of pending calls is full, the shim's next call
 * raises. */
void touched(void *) {
  if (python == nullptr || !interpreterRuns() || getpid() != gettid()) return;
  if (mode.load(std::memory_order_relaxed) != Mode::Quiet)
    Py_AddPendingCall(&raiseTouched, nullptr);
}

/* From here on PyTorch passes the inputs of all operators, which takes time: so not before pinned
 * memory exists. */
void pinned(void *) { watchHost(true); }

std::string takeUnraised() {
  if (C10_LIKELY(!hasUnraised) || !interpreterRuns()) return {};
  py::gil_scoped_acquire gil;
  hasUnraised = false;
  const py::object text = python->takeUnraised();
  return text.is_none() ? std::string() : text.cast<std::string>();
}

// ---- For Python ---------------------------------------------------------------------------------

/* While the sanitizer is on, this changes only how it reports. */
void enable(int how, bool stacks, bool initcheck, bool possible) {
  mode.store(static_cast<Mode>(how), std::memory_order_relaxed);
  orSanitizerRefuse(static_cast<Mode>(how) == Mode::Error);
  orSanitizerInitcheck(initcheck);
  orSanitizerPossible(possible);
  checksFresh.store(initcheck, std::memory_order_relaxed);
  tellsPossible.store(possible, std::memory_order_relaxed);
  keepsStacks.store(stacks, std::memory_order_relaxed);
  if (sanitizerActive()) return;
  orSanitizerOptions options{};
  options.size = sizeof(options);
  options.capture = &captureCall;
  options.release = &releaseCall;
  options.touched = &touched;
  options.thread = &actsForThread;
  options.pinned = &pinned;
  followUnwinding(true);
  OPENREG_CHECK(orSanitizerEnable(&options));  // frees the stacks of reports: see copyReports
}

/* For tasks that still decide a conflict, once the program or a test is over. */
constexpr unsigned kWaitMs = 10'000;

void disable() {
  followUnwinding(false);
  WithoutGil unlocked;
  OPENREG_CHECK(orSanitizerAwaitLate(kWaitMs));
  OPENREG_CHECK(orSanitizerDisable());
  watchHost(false);
  forgetForwards();
}

/* The program, or a test, is over. The caller tells the reports from the returned number on, which
 * no later call of this thread raises. */
uint64_t judgeFrees() {
  WithoutGil unlocked;
  uint64_t before = 0;
  size_t count = 0;
  OPENREG_CHECK(orSanitizerReports(1, nullptr, sizeof(orRaceReport), 0, &count, &before));
  OPENREG_CHECK(orSanitizerAwaitLate(kWaitMs));
  OPENREG_CHECK(orSanitizerJudgeFrees());
  orSanitizerFound(nullptr, nullptr);
  while (orSanitizerFound(nullptr, nullptr) != 0) {
  }
  return before + 1;
}

/* exit() may be called again by what it calls; the last status counts (glibc). */
void failExit() {
  on_exit(
      [](int status, void *) {
        if (status == 0) exit(EXIT_FAILURE);
      },
      nullptr);
}

bool isDefault(orStream_t stream, int device) {
  orStream_t standard = 0;
  return device >= 0 && orStreamGetDefault(&standard, device) == orSuccess && stream == standard;
}

/* The name that the core uses. */
std::string nameOf(orStream_t stream) {
  int device = -1;
  if (orStreamGetDevice(stream, &device) != orSuccess) orGetLastError();
  char name[64];
  if (isDefault(stream, device)) {
    std::snprintf(name, sizeof(name), "the default stream of %s:%d", orDevicesName(), device);
  } else {
    std::snprintf(name, sizeof(name), "stream 0x%" PRIx64 " of %s:%d", stream, orDevicesName(),
                  device);
  }
  return name;
}

void describeStream(py::dict &entry, orStream_t stream) {
  const StreamOrigin origin = streamOrigin(stream);
  entry["name"] = origin.name;
  entry["made"] = linesOf(origin.stack);
}

void describeCall(py::dict &entry, const Call &call) {
  entry["stack"] = linesOf(call.stack);
  const BackwardPart part = call.backward == nullptr ? BackwardPart() : *call.backward;
  entry["node"] = part.node;
  entry["forward"] = linesOf(part.forward);
  entry["hook"] = reinterpret_cast<uintptr_t>(part.hook);
  entry["caller"] = linesOf(part.caller);
}

py::dict describe(const orRaceAccess &access, const Kept &call) {
  py::dict entry;
  entry["operation"] = std::string(access.operation);
  entry["where"] = std::string(access.where);
  entry["device"] = access.device;
  entry["stream"] = static_cast<int64_t>(access.stream);
  entry["is_default"] = isDefault(access.stream, access.device);
  entry["write"] = (access.write & OR_ACCESS_WRITES) != 0;
  entry["some"] = (access.write & OR_ACCESS_PARTIAL) != 0;
  entry["allocates"] = (access.write & OR_ACCESS_ALLOCATES) != 0;
  entry["begin"] = reinterpret_cast<uintptr_t>(access.begin);
  entry["end"] = reinterpret_cast<uintptr_t>(access.end);
  describeStream(entry, access.stream);
  describeCall(entry, call ? *call : Call());
  return entry;
}

Kept copyOf(const void *call) {
  return call == nullptr ? nullptr : *static_cast<const Kept *>(call);
}

Calls callsOf(const orRaceReport &report) {
  return {copyOf(report.earlier.stack), copyOf(report.later.stack), copyOf(report.allocation)};
}

/* (moments of the earlier and of the later access, [(from, to, recorded, waited)]) */
py::tuple orderOf(uint64_t number) {
  auto order = sized<orRaceOrder>();
  if (orSanitizerOrder(number, &order) != orSuccess) {
    orGetLastError();
    return py::make_tuple(0, 0, py::list());
  }
  py::list edges;
  for (size_t i = 0; i < order.count; ++i) {
    const orRaceEdge &edge = order.edges[i];
    edges.append(py::make_tuple(edge.from, edge.to, edge.recorded, edge.waited));
  }
  return py::make_tuple(order.earlier, order.later, edges);
}

/* By orReportKind; "": it is about no graph. */
constexpr std::array<const char *, 7> kGraphKinds{"",
                                                  "freed input",
                                                  "not replayed",
                                                  "possible replaced input",
                                                  "overwritten output",
                                                  "possible first call",
                                                  "race of a grid"};

py::dict describe(const orRaceReport &report, const Calls &stacks) {
  py::dict entry;
  entry["number"] = report.number;
  entry["earlier"] = describe(report.earlier, stacks[0]);
  entry["later"] = describe(report.later, stacks[1]);
  entry["begin"] = reinterpret_cast<uintptr_t>(report.begin);
  entry["end"] = reinterpret_cast<uintptr_t>(report.end);
  entry["memory"] = std::string(report.memory);
  entry["advice"] = std::string(report.advice);
  const auto type = touchedTypes.at(report.later.begin);
  entry["dtype"] = std::string(type ? c10::getDtypeNames(*type).first : "");
  entry["missing"] = report.missing;
  entry["wanted"] = report.stream;
  entry["allocation"] = linesOf(stacks[2] ? stacks[2]->stack : nullptr);
  entry["graph"] = kGraphKinds.at(report.kind);
  entry["name"] = std::string(report.name);
  entry["order"] = orderOf(report.number);
  return entry;
}

/* Under the GIL, as clear and disable are, so that no stack is destroyed while it is copied. */
std::vector<std::pair<orRaceReport, Calls>> copyReports(uint64_t first) {
  std::vector<orRaceReport> reports(64);
  std::vector<std::pair<orRaceReport, Calls>> all;
  for (size_t count = reports.size(); count == reports.size();) {
    uint64_t total = 0;
    OPENREG_CHECK(orSanitizerReports(first, reports.data(), sizeof(orRaceReport), reports.size(),
                                     &count, &total));
    for (size_t i = 0; i < count; ++i) {
      all.push_back({reports[i], callsOf(reports[i])});
    }
    if (count != 0) first = reports[count - 1].number + 1;
  }
  return all;
}

/* The reports from number `first` on. */
py::list reports(uint64_t first) {
  py::list list;
  for (const auto &[report, stacks] : copyReports(first)) list.append(describe(report, stacks));
  return list;
}

// ---- A thread's conflicts ----------------------------------------------------------------------

void say(const orRaceReport *report, void *text) {
  py::gil_scoped_acquire gil;
  auto &said = *static_cast<std::string *>(text);
  try {
    said = python->text(describe(*report, callsOf(*report))).cast<std::string>();
  } catch (const std::exception &error) {
    said = error.what();
  }
}

/* Returns the text for the first conflict that this thread has found since the last call; false if
 * there is none, or Python has no text for it because there has been a warning of the same mistake.
 */
bool foundRace(std::string &text) {
  const bool speaks =
      python != nullptr && interpreterRuns() && mode.load(std::memory_order_relaxed) != Mode::Quiet;
  return orSanitizerFound(speaks ? &say : nullptr, &text) != 0 && speaks && !text.empty();
}

/* The findings of threads that may never make another call. In the warning mode it warns here. */
std::vector<std::string> left() {
  std::vector<std::string> texts;
  std::string text;
  const Mode how = mode.load(std::memory_order_relaxed);
  while (orSanitizerLeft(how == Mode::Quiet ? nullptr : &say, &text) != 0) {
    if (how == Mode::Warn && !text.empty()) python->warn(text);
    if (how == Mode::Error) texts.push_back(text);
  }
  return texts;
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

SanitizerStack captureStack() {
  const std::unique_ptr<Kept> kept(static_cast<Kept *>(captureCall(nullptr)));
  return kept == nullptr ? nullptr : *kept;
}

void reportFinding(orGraphFinding finding, const SanitizerStack &earlier) {
  auto kept = std::make_unique<Kept>(std::static_pointer_cast<const Call>(earlier));
  finding.stack = *kept == nullptr ? nullptr : kept.get();
  OPENREG_CHECK(orSanitizerFinding(&finding));
  if (finding.stack != nullptr) (void)kept.release();
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
  } catch (const py::error_already_set &) {  // the report stays in the list
  }
}

namespace {

struct KeptStack {
  SanitizerStack stack = captureStack();
};

/* At a replay: what the capture has made for `operation`, where `stack` was. */
void reportFirstCall(uintptr_t begin, size_t bytes, const std::string &operation,
                     const KeptStack &stack) {
  reportFinding({.size = sizeof(orGraphFinding),
                 .kind = orReportFirstCall,
                 .begin = reinterpret_cast<const void *>(begin),
                 .bytes = bytes,
                 .stream = currentStreamHandle(currentDevice()),
                 .earlier = operation.c_str(),
                 .later = "replay",
                 .stack = nullptr},
                stack.stack);
  raiseRaces();
}

/* All that there are. In Python, isinstance() would ask proxies for their class, and another thread
 * could run while the list of all objects is there: one that is making a tuple must have its only
 * reference. */
py::list generators() {
  py::list found;
  const py::list all = py::module_::import("gc").attr("get_objects")();
  for (const py::handle object : all)
    if (PyGen_CheckExact(object.ptr())) found.append(object);
  return found;
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_generators", &generators);
  m.def("_sanitizer_bind", [](py::object error, py::function text, py::function putDown,
                              py::function takeUnraised, py::function warn) {
    if (python == nullptr) python = new Python();
    *python = {std::move(error), std::move(text), std::move(putDown), std::move(takeUnraised),
               std::move(warn)};
  });
  m.def("_sanitizer_enable", &enable, py::arg("how"), py::arg("stacks"), py::arg("initcheck"),
        py::arg("possible"));
  py::class_<KeptStack>(m, "_SanitizerStack").def(py::init<>());
  m.def("_sanitizer_first_call", &reportFirstCall);
  m.def("_sanitizer_disable", &disable);
  m.def("_sanitizer_ignore", [](bool ignore) { return orSanitizerIgnore(ignore) != 0; });
  m.def("_sanitizer_judge_frees", &judgeFrees);
  m.def("_sanitizer_left", &left);
  m.def("_sanitizer_active", &sanitizerActive);
  m.def("_sanitizer_mode", [] {
    return std::make_tuple(static_cast<int>(mode.load()), keepsStacks.load(), checksFresh.load(),
                           tellsPossible.load());
  });
  m.def("_stream_origin", [](orStream_t stream) {
    py::dict entry;
    entry["where"] = nameOf(stream);
    describeStream(entry, stream);
    return entry;
  });
  m.def("_sanitizer_fail_exit", &failExit);
  m.def("_sanitizer_handler", [](bool comes) { return orHostAccessHandler(comes) != 0; });
  m.def("_sanitizer_reports", &reports, py::arg("first") = 1);
  m.def("_sanitizer_clear", [] { OPENREG_CHECK(orSanitizerClearReports()); });
});

}  // namespace

}  // namespace torch_openreg
