/*
 * How Python's threads order each other, for the sanitizer (openreg_sanitizer.h): follows the
 * methods of Python's few lock types and queues that are written in C. `threading`, `queue`,
 * `concurrent.futures` and `asyncio` are made of them.
 *
 * A followed method gets another function in its PyMethodDef, of which the process has one, so
 * older objects and bound methods are followed too. torch_openreg/openreg/sanitizer/_threads.py
 * lists what is followed, and how. All of this needs the GIL; any number of threads may be inside
 * the replaced functions.
 *
 * At exit Python ends threads inside these functions by unwinding, without the GIL: nothing here
 * may have a destructor that needs it.
 */
#include <Python.h>

#include <openreg_sanitizer.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <dlfcn.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "module.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

// ---- Methods ------------------------------------------------------------------------------------

/* As in _threads.py. */
enum class Order : int {
  AcquiresIfTrue,  // its object, if it returns something true
  AcquiresIfFalse,
  Acquires,
  Releases,
  AcquiresAll,        // every thread's clock: its source cannot be followed
  AcquiresAllIfAny,   // if it returns something that is not empty
  AcquiresAllIfPipe,  // unless it reads a disk's file, as modules and lines of code are read
  AcquiresAllFirst,   // before it runs: it calls what other threads have left there
};

struct Method {
  PyMethodDef *def = nullptr;
  PyCFunction original = nullptr;
  Order order{};
};

constexpr size_t kMethods = 96;
std::array<Method, kMethods> methods;
size_t methodCount = 0;

bool isPipe(PyObject *file) {
  struct stat status{};
  const int descriptor = PyObject_AsFileDescriptor(file);
  if (descriptor < 0) PyErr_Clear();
  return descriptor >= 0 && fstat(descriptor, &status) == 0 && !S_ISREG(status.st_mode);
}

bool learns(Order order, PyObject *self, PyObject *result) {
  if (result == nullptr) return false;
  if (order == Order::AcquiresIfTrue) return result == Py_True;
  if (order == Order::AcquiresIfFalse) return result == Py_False;
  if (order == Order::AcquiresAllIfPipe) return isPipe(self);
  if (order == Order::AcquiresAllIfAny) return PyObject_IsTrue(result) == 1;
  return order == Order::Acquires || order == Order::AcquiresAll;
}

bool acquiresAll(Order order) {
  return order == Order::AcquiresAll || order == Order::AcquiresAllIfAny ||
         order == Order::AcquiresAllIfPipe;
}

/* A lock that `threading` uses internally: it orders only threads that acquire it in one of these
 * code objects. */
struct Ignored {
  PyObject *lock = nullptr;
  std::vector<PyObject *> unless;
};

std::vector<Ignored> ignored;

/* What calls locks for its own purposes: the globals of modules, and code objects of `threading`.
 * What these do with locks orders nothing. */
std::vector<PyObject *> internalModules, internalCodes;

bool isCalledBy(const std::vector<PyObject *> &codes) {
  PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (frame == nullptr) return false;
  PyCodeObject *code = PyFrame_GetCode(frame);
  bool found = false;
  for (PyObject *each : codes) found |= each == reinterpret_cast<PyObject *>(code);
  Py_DECREF(code);
  Py_DECREF(frame);
  return found;
}

bool isInternal() {
  PyObject *globals = PyEval_GetGlobals();  // of the caller; borrowed
  if (globals == nullptr) return false;
  for (PyObject *each : internalModules)
    if (each == globals) return each != internalModules.front() || isCalledBy(internalCodes);
  return false;
}

void acquire(PyObject *object) {
  for (const Ignored &lock : ignored)
    if (lock.lock == object && !isCalledBy(lock.unless)) return;
  if (object == nullptr || !isInternal()) orSanitizerAcquire(object);
}

template <typename Call>
PyObject *follow(const Method &method, PyObject *self, const Call &call) {
  if (method.order == Order::Releases && !isInternal()) orSanitizerRelease(self);
  if (method.order == Order::AcquiresAllFirst) orSanitizerAcquire(nullptr);
  PyObject *result = call();
  if (learns(method.order, self, result)) acquire(acquiresAll(method.order) ? nullptr : self);
  return result;
}

template <typename Function>
Function original(const Method &method) {
  return reinterpret_cast<Function>(reinterpret_cast<void (*)()>(method.original));
}

/* Replaces method I, for each of Python's calling conventions. */
template <size_t I, typename... Rest>
PyObject *inPlace(PyObject *self, Rest... rest) {
  const Method &method = methods[I];
  return follow(method, self, [&] {
    return original<PyObject *(*)(PyObject *, Rest...)>(method)(self, rest...);
  });
}

template <size_t I>
PyCFunction replacement(int flags) {
  const auto as = [](auto function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
  };
  using Arguments = PyObject *const *;
  switch (flags & ~(METH_CLASS | METH_STATIC | METH_COEXIST)) {
    case METH_NOARGS:
    case METH_O:
    case METH_VARARGS:
      return as(&inPlace<I, PyObject *>);
    case METH_VARARGS | METH_KEYWORDS:
      return as(&inPlace<I, PyObject *, PyObject *>);
    case METH_FASTCALL:
      return as(&inPlace<I, Arguments, Py_ssize_t>);
    case METH_FASTCALL | METH_KEYWORDS:
      return as(&inPlace<I, Arguments, Py_ssize_t, PyObject *>);
    case METH_METHOD | METH_FASTCALL | METH_KEYWORDS:
      return as(&inPlace<I, PyTypeObject *, Arguments, Py_ssize_t, PyObject *>);
    default:
      return nullptr;
  }
}

template <size_t... I>
constexpr auto replacements(std::index_sequence<I...>) {
  return std::array{&replacement<I>...};
}
constexpr auto kReplacements = replacements(std::make_index_sequence<kMethods>());

PyMethodDef *definitionOf(PyObject *function) {
  if (PyInstanceMethod_Check(function)) function = PyInstanceMethod_GET_FUNCTION(function);
  if (PyCFunction_Check(function)) return reinterpret_cast<PyCFunctionObject *>(function)->m_ml;
  if (Py_IS_TYPE(function, &PyMethodDescr_Type))
    return reinterpret_cast<PyMethodDescrObject *>(function)->d_method;
  return nullptr;
}

bool isFollowed(const PyMethodDef *def) {
  for (size_t i = 0; i < methodCount; ++i)
    if (methods[i].def == def) return true;
  return false;
}

/* False if the function cannot be followed. */
bool followMethod(const py::object &function, int order) {
  PyMethodDef *def = definitionOf(function.ptr());
  if (def == nullptr || methodCount == kMethods) return false;
  if (isFollowed(def)) return true;
  const PyCFunction other = kReplacements[methodCount](def->ml_flags);
  if (other == nullptr) return false;
  methods[methodCount++] = {def, def->ml_meth, static_cast<Order>(order)};
  def->ml_meth = other;
  return true;
}

// ---- Functions of others ------------------------------------------------------------------------

/* The sources that an extension waits for cannot be followed, or those of a library that ctypes
 * calls. When such a function returns, its caller acquires every thread's clock. In extensions
 * these are the functions that take a tuple, as all of pybind11's do. */
ternaryfunc callFunction = nullptr, callForeign = nullptr;

Dl_info libraryOf(const void *address) {
  Dl_info library{};
  dladdr(address, &library);
  return library;
}

/* Python, PyTorch, NumPy and this library pass nothing between threads except through what is
 * followed. */
bool isForeignLibrary(const Dl_info &library) {
  for (const void *known :
       {reinterpret_cast<const void *>(&PyObject_Call),
        static_cast<const void *>(&THPVariableClass), reinterpret_cast<const void *>(&libraryOf)})
    if (library.dli_fbase == libraryOf(known).dli_fbase) return false;
  for (const char *known : {"/lib-dynload/", "/numpy/"})
    if (library.dli_fname == nullptr || std::strstr(library.dli_fname, known) != nullptr)
      return false;
  return true;
}

bool isForeign(PyObject *function) {
  static auto &known = *new std::unordered_map<PyCFunction, bool>();  // with the GIL
  const PyCFunction address = PyCFunction_GET_FUNCTION(function);
  const auto [at, isNew] = known.try_emplace(address, false);
  if (isNew) at->second = isForeignLibrary(libraryOf(reinterpret_cast<const void *>(address)));
  return at->second;
}

PyObject *callFollowed(PyObject *function, PyObject *args, PyObject *kwargs) {
  PyObject *result = callFunction(function, args, kwargs);
  if (isForeign(function)) orSanitizerAcquire(nullptr);
  return result;
}

PyObject *callForeignFollowed(PyObject *function, PyObject *args, PyObject *kwargs) {
  PyObject *result = callForeign(function, args, kwargs);
  orSanitizerAcquire(nullptr);
  return result;
}

/* `foreign`: ctypes' type whose objects call a function, and its subclasses; `call` is its
 * `__call__`, which later subclasses inherit. */
void replaceCall(const std::vector<py::type> &foreign, const py::object &call, ternaryfunc by) {
  auto *type = reinterpret_cast<PyTypeObject *>(foreign.front().ptr());
  const ternaryfunc before = type->tp_call;
  reinterpret_cast<PyWrapperDescrObject *>(call.ptr())->d_wrapped = reinterpret_cast<void *>(by);
  for (const py::type &each : foreign) {
    type = reinterpret_cast<PyTypeObject *>(each.ptr());
    if (type->tp_call == before) type->tp_call = by;
  }
}

void followCalls(const std::vector<py::type> &foreign, const py::object &call) {
  callFunction = PyCFunction_Type.tp_call;
  callForeign = reinterpret_cast<PyTypeObject *>(foreign.front().ptr())->tp_call;
  PyCFunction_Type.tp_call = &callFollowed;
  replaceCall(foreign, call, &callForeignFollowed);
}

void unfollowCalls(const std::vector<py::type> &foreign, const py::object &call) {
  PyCFunction_Type.tp_call = callFunction;
  replaceCall(foreign, call, callForeign);
}

// ---- Objects that go ----------------------------------------------------------------------------

struct Type {
  PyTypeObject *type = nullptr;
  destructor original = nullptr;
};

std::array<Type, 4> types;
size_t typeCount = 0;

template <size_t I>
void goes(PyObject *object) {
  orSanitizerObjectGone(object);
  types[I].original(object);
}
constexpr std::array kGoes{&goes<0>, &goes<1>, &goes<2>, &goes<3>};

void followType(py::type type) {
  if (typeCount == types.size()) throw std::out_of_range("too many types are followed");
  auto *followed = reinterpret_cast<PyTypeObject *>(type.ptr());
  types[typeCount] = {followed, followed->tp_dealloc};
  followed->tp_dealloc = kGoes[typeCount++];
}

/* Running functions need the tables' contents, so the same functions get the same places again. */
void unfollow() {
  while (methodCount > 0) {
    const Method &method = methods[--methodCount];
    method.def->ml_meth = method.original;
  }
  ignored.clear();
  internalModules.clear();
  internalCodes.clear();
  while (typeCount > 0) {
    const Type &type = types[--typeCount];
    type.type->tp_dealloc = type.original;
  }
}

/* Registers a lock that `threading` uses internally, and the code of its functions. */
void ignoreLock(const py::object &lock, const std::vector<py::object> &unless) {
  Ignored added{lock.ptr(), {}};
  for (const py::object &code : unless) added.unless.push_back(code.ptr());
  ignored.push_back(std::move(added));
}

/* The first module is `threading`, of which `codes` are. */
void ignoreCallers(const std::vector<py::object> &modules, const std::vector<py::object> &codes) {
  for (const py::object &each : modules) internalModules.push_back(PyModule_GetDict(each.ptr()));
  for (const py::object &each : codes) internalCodes.push_back(each.ptr());
}

// ---- For Python ---------------------------------------------------------------------------------

/* A thread's clock at one time, which others acquire. */
struct Moment {
  ~Moment() { orSanitizerObjectGone(this); }
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<Moment>(m, "_Moment")
      .def(py::init<>())
      .def("release", [](const Moment &moment) { orSanitizerRelease(&moment); })
      .def("acquire", [](const Moment &moment) { orSanitizerAcquire(&moment); })
      .def("starts", [](const Moment &moment) { orSanitizerThreadStarts(&moment); })
      .def("begins", [](const Moment &moment) { orSanitizerThreadBegins(&moment); });
  m.def("_thread_ends", &orSanitizerThreadEnds);
  m.def("_thread_acquires", [](const py::object &object) { orSanitizerAcquire(object.ptr()); });
  m.def("_thread_releases", [](const py::object &object) { orSanitizerRelease(object.ptr()); });
  m.def("_threads_follow_method", &followMethod);
  m.def("_threads_follow_type", &followType);
  m.def("_threads_ignore_lock", &ignoreLock);
  m.def("_threads_ignore_callers", &ignoreCallers);
  m.def("_threads_follow_calls", &followCalls);
  m.def("_threads_unfollow_calls", &unfollowCalls);
  m.def("_threads_unfollow", &unfollow);
});

}  // namespace

}  // namespace torch_openreg
