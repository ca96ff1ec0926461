/*
 * Launches a compiled kernel. Triton calls it once for each launch.
 *
 * A launcher belongs to Python. Its arguments are those that Triton's own launchers get: the grid,
 * the stream, the entry, metadata and hooks, and then the arguments of the kernel. It is a function
 * of C, because a class of pybind11 takes longer to call than the launch does.
 */
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <openreg_schedule.h>

#include <array>
#include <climits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../torch/check.h"
#include "../torch/device.h"
#include "../torch/host_allocator.h"
#include "../torch/module.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../task/tensor_accesses.h"
#include "compiled_kernel.h"
#include "triton_trace.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using Grid = std::array<int64_t, 3>;
constexpr Grid kLargest{INT_MAX, 65535, 65535};  // that a card takes

/* The positions of a launch's arguments. */
enum { kStream = 3, kFunction = 4, kMetadata = 6, kEnter = 7, kExit = 8, kGiven = 9 };

class TritonLauncher {
 public:
  /* `takes` has a letter for each argument that Triton passes: that of CompiledKernel's roles, i
   * for an integer of any width, or a point for a constant, which the kernel does not get.
   * `asserts` is true if the kernel may fail. `checks` is a Checks
   * (torch_openreg/_triton/checks.py), used while the sanitizer is on. */
  TritonLauncher(const std::string &name, std::string takes, bool asserts, py::object checks)
      : name_(keptName(name)),
        takes_(std::move(takes)),
        asserts_(asserts),
        checks_(std::move(checks)) {}

  void operator()(PyObject *const *given, Py_ssize_t count) const;

 private:
  Grid gridOf(PyObject *const *given) const;
  void addTensor(CompiledCall &call, PyObject *object, size_t position) const;
  void launch(PyObject *const *given, const Grid &grid) const;
  void check(const CompiledCall &call, orStream_t stream) const;
  void reportPrograms(const CompiledCall &call, TritonTrace &trace, TraceEntry entry,
                      orStream_t stream) const;

  const char *const name_;
  const std::string takes_;
  const bool asserts_;
  const py::object checks_;
};

int64_t integerOf(PyObject *object) {
  const int64_t number = static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(object));
  if (number == -1 && PyErr_Occurred() != nullptr) throw python_error();
  return number;
}

Grid TritonLauncher::gridOf(PyObject *const *given) const {
  Grid grid{};
  for (size_t i = 0; i < grid.size(); ++i) {
    grid[i] = numberOf(given[i], 'n');
    TORCH_CHECK_VALUE(grid[i] >= 0 && grid[i] <= kLargest[i], name_, ": size ", i,
                      " of the grid is ", grid[i], ", allowed are 0 to ", kLargest[i]);
  }
  return grid;
}

void TritonLauncher::addTensor(CompiledCall &call, PyObject *object, size_t position) const {
  py::object base;  // of triton.reinterpret's wrapper, which keeps it
  if (C10_UNLIKELY(!THPVariable_Check(object))) {
    base = py::getattr(object, "base", py::none());
    TORCH_CHECK_TYPE(THPVariable_Check(base.ptr()), name_, ": argument ", position,
                     " has to be a tensor, got ", Py_TYPE(object)->tp_name);
    object = base.ptr();
  }
  const at::Tensor &tensor = THPVariable_Unpack(object);
  const c10::Device device = call.device();
  if (C10_LIKELY(tensor.device() == device)) return call.add(tensor, takes_[position]);
  if (tensor.is_cpu()) {
    TORCH_CHECK_VALUE(isPinned(tensor.storage().data()), "Pointer argument (at ", position,
                      ") cannot be accessed from Triton (cpu tensor?)");
    return call.addPinned(tensor, takes_[position]);
  }
  TORCH_CHECK_VALUE(tensor.is_privateuseone(), name_, ": argument ", position, " is a tensor of ",
                    tensor.device(), ", which no kernel of ", device, " reaches");
  TORCH_CHECK_VALUE(false, name_, ": argument ", position, " is a tensor of ", tensor.device(),
                    ", and the kernel is launched on ", device,
                    ", the current device; nothing was launched");
}

py::tuple describe(const Hit &hit) {
  return py::make_tuple(hit.argument, hit.site, hit.kind, hit.offset, hit.program, hit.other);
}

void TritonLauncher::reportPrograms(const CompiledCall &call, TritonTrace &trace, TraceEntry entry,
                                    orStream_t stream) const {
  const Hit later = *trace.race(), earlier = trace.partner(entry);
  const auto argument = static_cast<size_t>(later.argument);
  const auto *begin = static_cast<const char *>(trace.beginOf(argument)) + later.offset;
  checks_.attr("note_race")(reinterpret_cast<uintptr_t>(begin), describe(earlier), describe(later));
  const bool given = argument < call.count();
  reportFinding({.size = sizeof(orGraphFinding),
                 .kind = orReportPrograms,
                 .begin = begin,
                 .bytes = given ? call.tensor(argument).itemsize() : 1,
                 .stream = stream,
                 .earlier = name_,
                 .later = name_,
                 .stack = nullptr},
                captureStack());
}

/* What sites whose addresses are not known may touch: (argument, reads, writes) each. */
using Reached = std::vector<std::tuple<size_t, bool, bool>>;

std::vector<orMemoryAccess> possibleAccesses(const CompiledCall &call, const Reached &reached) {
  std::vector<orMemoryAccess> accesses;
  const auto add = [&](const at::Tensor &tensor, bool write) {
    accesses.push_back(accessOf(tensor, write));
    accesses.back().write |= OR_ACCESS_PARTIAL;
  };
  for (const auto &[argument, reads, writes] : reached) {
    const at::Tensor &tensor = call.tensor(argument);
    if (reads && hasMemory(tensor)) add(tensor, false);
    if (writes && hasMemory(tensor)) add(tensor, true);
  }
  return accesses;
}

/* By the roles of the arguments, where a trace has ended early. */
Reached everything(const CompiledCall &call) {
  Reached reached;
  for (size_t i = 0; i < call.count(); ++i) {
    reached.emplace_back(i, call.role(i) != 'w', call.role(i) != 'r');
  }
  return reached;
}

/* Reports what the launch will access. Throws for an access out of bounds, and what raiseRaces
 * throws: then nothing is queued. */
void TritonLauncher::check(const CompiledCall &call, orStream_t stream) const {
  const auto entry = reinterpret_cast<TraceEntry>(checks_.attr("entry")().cast<size_t>());
  TritonTrace trace(call, checks_.attr("sites").cast<size_t>(),
                    checks_.attr("peeked").cast<std::vector<size_t>>());
  trace.run(entry);
  Reached unknown;
  if (trace.endedEarly()) {
    unknown = everything(call);
  } else if (const auto blind = trace.blind(); !blind.empty()) {
    unknown = checks_.attr("unknown")(blind).cast<Reached>();
  }
  raiseRaces();
  if (trace.outOfBounds() != nullptr) {
    const int32_t argument = trace.outOfBounds()->argument;
    checks_.attr("refuse")(describe(*trace.outOfBounds()),
                           argument < 0 ? 0 : trace.bytesOf(argument));
  }
  auto accesses = trace.accesses();
  if (trace.race() != nullptr) reportPrograms(call, trace, entry, stream);
  const auto possible = possibleAccesses(call, unknown);
  accesses.insert(accesses.end(), possible.begin(), possible.end());
  OPENREG_CHECK(orSanitizerAccess(stream, name_, accesses.data(), accesses.size()));
  raiseRaces();
}

/* The key that draws the order of the programs: the same key for the same seed, kernel and grid.
 * Without a seed it is 0, and the programs run in the order of their numbers. */
int64_t orderOf(const char *name, const Grid &grid) {
  orSchedulePolicy policy{};
  uint64_t key = 0;
  OPENREG_CHECK(orScheduleGet(&policy, &key));
  if (policy != orScheduleSeeded) return 0;
  const auto mix = [&](uint64_t value) { key = (key ^ value) * 0x100000001b3; };
  for (const char *letter = name; *letter != 0; ++letter) mix(static_cast<uint8_t>(*letter));
  for (const int64_t size : grid) mix(static_cast<uint64_t>(size));
  return static_cast<int64_t>(key | 1);
}

void TritonLauncher::launch(PyObject *const *given, const Grid &grid) const {
  const c10::Device device = deviceAt(currentDevice());
  CompiledCall call(name_, device, reinterpret_cast<KernelEntry>(integerOf(given[kFunction])));
  for (size_t i = 0; i < takes_.size(); ++i) {
    PyObject *object = given[kGiven + i];
    switch (takes_[i]) {
      case '.':
        break;
      case 'i':
        call.add(integerOf(object));
        break;
      case 'f':
        call.add(numberOf(object, 'f'));
        break;
      default:
        addTensor(call, object, i);
    }
  }
  if (C10_UNLIKELY(asserts_)) call.keepStack();
  for (const int64_t size : grid) call.add(size);
  call.add(orderOf(name_, grid));
  const auto stream = static_cast<orStream_t>(integerOf(given[kStream]));
  call.fetch(stream);
  if (sanitizerActive()) check(call, stream);
  const bool one = grid == Grid{1, 1, 1};
  std::move(call).launch(stream, one ? 1 : INT_MAX);
}

/* Triton's hooks are objects or None. */
void callHook(PyObject *const *given, int position) {
  const py::handle hook = given[position];
  if (!hook.is_none()) hook(py::handle(given[kMetadata]));
}

void TritonLauncher::operator()(PyObject *const *given, Py_ssize_t count) const {
  TORCH_CHECK_TYPE(count == static_cast<Py_ssize_t>(kGiven + takes_.size()), name_, " takes ",
                   takes_.size(), " arguments, got ", count - kGiven);
  const Grid grid = gridOf(given);
  callHook(given, kEnter);
  if (grid[0] != 0 && grid[1] != 0 && grid[2] != 0) launch(given, grid);
  callHook(given, kExit);
}

// ---- functions of Python

PyObject *callLauncher(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto *launcher = static_cast<TritonLauncher *>(PyCapsule_GetPointer(self, nullptr));
  (*launcher)(given, count);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

/* A function that launches one kernel. */
py::object makeLauncher(const std::string &name, std::string takes, bool asserts,
                        py::object checks) {
  const auto function = reinterpret_cast<void (*)()>(&callLauncher);
  static PyMethodDef definition{"launch", reinterpret_cast<PyCFunction>(function), METH_FASTCALL,
                                nullptr};
  const py::capsule self(new TritonLauncher(name, std::move(takes), asserts, std::move(checks)),
                         [](void *launcher) { delete static_cast<TritonLauncher *>(launcher); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

PyObject *deviceIndex(PyObject *, PyObject *) {
  HANDLE_TH_ERRORS
  return PyLong_FromLong(currentDevice());
  END_HANDLE_TH_ERRORS
}

PyObject *streamHandle(PyObject *, PyObject *index) {
  HANDLE_TH_ERRORS
  return PyLong_FromUnsignedLongLong(currentStreamHandle(checkIndex(numberOf(index, 'n'))));
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[]{{"_current_device_index", &deviceIndex, METH_NOARGS, nullptr},
                        {"_current_stream_handle", &streamHandle, METH_O, nullptr},
                        {nullptr, nullptr, 0, nullptr}};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_triton_launcher", &makeLauncher, py::arg("name"), py::arg("takes"), py::arg("asserts"),
        py::arg("checks"));
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw python_error();
});

}  // namespace

}  // namespace torch_openreg
