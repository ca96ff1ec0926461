/*
 * An orOrigin is made once for each dtype and for each line of a program, and never destroyed: the
 * core's signal handler reads it. `originOf` has a mutex, under which no other function is called.
 *
 * The line of an instruction costs a search in its code's table, for each frame of PyTorch's too,
 * so `Known` keeps the origins of instructions. It owns their code objects, and needs the GIL.
 */
#include <Python.h>

#include "host_access.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <openreg_host_access.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "gil.h"
#include "memory_history.h"
#include "module.h"
#include "sanitizer.h"

namespace torch_openreg {

namespace {

using c10::ScalarType;
using Origins = std::array<orOrigin, static_cast<size_t>(ScalarType::NumOptions)>;

/* The name in Python; null for a dtype that Python does not have. */
const char *nameOf(ScalarType dtype) {
  try {
    return (new std::string("torch." + std::string(c10::getDtypeNames(dtype).first)))->c_str();
  } catch (const c10::Error &) {
    return nullptr;
  }
}

const orOrigin *originOf(ScalarType dtype) {
  static const auto *origins = [] {
    auto *made = new Origins();
    for (size_t i = 0; i < made->size(); ++i) {
      (*made)[i] = {sizeof(orOrigin), nameOf(static_cast<ScalarType>(i)), nullptr, 0};
    }
    return made;
  }();
  return &(*origins)[static_cast<size_t>(dtype)];
}

struct Line {
  std::string file;
  uint32_t number = 0;
};

const orOrigin *originOf(ScalarType dtype, Line line) {
  struct Entry {
    Line line;
    orOrigin origin;
  };
  static auto *entries =
      new std::map<std::tuple<ScalarType, std::string, uint32_t>, std::unique_ptr<Entry>>();
  static auto *mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  auto &entry = (*entries)[{dtype, line.file, line.number}];
  if (entry == nullptr) {
    entry = std::make_unique<Entry>();
    entry->line = std::move(line);
    entry->origin = {sizeof(orOrigin), originOf(dtype)->type, entry->line.file.c_str(),
                     entry->line.number};
  }
  return &entry->origin;
}

/* Requires the GIL. */
Line lineOf(PyFrameObject *frame) {
  namespace py = pybind11;
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
  const int number = PyFrame_GetLineNumber(frame);
  return {py::str(code.attr("co_filename")), static_cast<uint32_t>(std::max(number, 0))};
}

bool isTorchs(const Line &line) {
  namespace py = pybind11;
  static const auto *package = new std::string(py::str(py::module_::import("os").attr("path").attr(
      "dirname")(py::module_::import("torch").attr("__file__"))));
  return line.file.starts_with(*package);
}

/* By code object, instruction and dtype; null: in PyTorch's files. */
using Instruction = std::tuple<PyObject *, int, ScalarType>;
using Known = std::unordered_map<Instruction, const orOrigin *, c10::hash<Instruction>>;
constexpr size_t kKnown = 1 << 14;

void forget(Known &known) {
  for (const auto &[instruction, origin] : std::exchange(known, {})) {
    Py_DECREF(std::get<PyObject *>(instruction));
  }
}

/* Null for a frame of PyTorch's. Requires the GIL. */
const orOrigin *originOf(ScalarType dtype, PyFrameObject *frame) {
  static auto &known = *new Known();
  const auto code = pybind11::reinterpret_steal<pybind11::object>(
      reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
  const Instruction instruction{code.ptr(), PyFrame_GetLasti(frame), dtype};
  const auto found = known.find(instruction);
  if (C10_LIKELY(found != known.end())) return found->second;
  Line line = lineOf(frame);
  const orOrigin *origin = isTorchs(line) ? nullptr : originOf(dtype, std::move(line));
  if (known.size() == kKnown) forget(known);
  if (known.emplace(instruction, origin).second) code.inc_ref();
  return origin;
}

/* The program's innermost line outside PyTorch, else the innermost one. Requires the GIL. */
const orOrigin *currentOrigin(ScalarType dtype) {
  namespace py = pybind11;
  auto *const innermost = PyEval_GetFrame();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject *>(innermost));
  while (frame) {
    auto *raw = reinterpret_cast<PyFrameObject *>(frame.ptr());
    if (const orOrigin *origin = originOf(dtype, raw)) return origin;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(PyFrame_GetBack(raw)));
  }
  return innermost == nullptr ? originOf(dtype) : originOf(dtype, lineOf(innermost));
}

const orOrigin *originHere(ScalarType dtype) {
  int state = 0;
  if (!mayBeInPython() || !takeGil(state)) return originOf(dtype);
  const orOrigin *origin = originOf(dtype);
  {
    pybind11::error_scope kept;  // the program's own error, if one is set
    try {
      origin = currentOrigin(dtype);
    } catch (const pybind11::error_already_set &) {  // the report omits the line
    }
  }
  giveGilBack(state);
  return origin;
}

// ---- Operators ----------------------------------------------------------------------------------

struct Outer final : at::ObserverContext {
  explicit Outer(const char *operation) : name(operation) {}
  const char *name;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction &function) {
  return std::make_unique<Outer>(orHostAccessOperation(function.name()));
}

void end(const at::RecordFunction &, at::ObserverContext *outer) {
  orHostAccessOperation(static_cast<const Outer *>(outer)->name);
}

/* From now on the report names the operator that runs, not the one queued last. This costs each
 * operator of PyTorch a tenth of a microsecond, on any device. */
void recordOperators() {
  [[maybe_unused]] static const at::CallbackHandle callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
}

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  orHostAccessHint(
      "openreg:   for the line of Python: python -X faulthandler, or PYTHONFAULTHANDLER=1\n");
  m.def("_host_access_operators", &recordOperators);
  m.def("_host_access_output", &orHostAccessOutput);
});

}  // namespace

void describeNextBlock(ScalarType dtype) {
  const bool gathers = sanitizerActive() || HistoryScope::enabled.load(std::memory_order_relaxed);
  orCacheSetOrigin(C10_UNLIKELY(gathers) ? originHere(dtype) : originOf(dtype));
}

}  // namespace torch_openreg
