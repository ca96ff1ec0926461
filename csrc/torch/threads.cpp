/*
 * How Python's threads order each other, for the sanitizer (openreg_sanitizer.h): the methods of Python's few lock types and
 * queues that are written in C, of which `threading`, `queue`, `concurrent.futures` and `asyncio` are made.
 *
 * A method is followed by another function in its PyMethodDef, of which there is one in the process: so objects and bound
 * methods that are older are followed, too. What is followed, and how, torch_openreg/openreg/_threads.py says. All of this has
 * the GIL; functions that have been replaced may be running in any number of threads.
 *
 * At its exit Python ends threads inside of these functions by unwinding, without the GIL: nothing here has a
 * destructor that needs it.
 */
#include <Python.h>

#include <openreg_sanitizer.h>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "module.h"
#include "threads.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

// ---- Who acts for whom --------------------------------------------------------------------------

/* PyTorch hands it on to the threads of autograd, with the rest of the state of who calls backward(). */
struct ActsFor final : c10::DebugInfoBase {
  explicit ActsFor(uint64_t thread) : thread(thread) {}
  const uint64_t thread;
};

constexpr std::string_view kActsForName = "OPENREG_HOST_THREAD";
const c10::DebugInfoKind kActsFor{&kActsForName};

// ---- Methods ------------------------------------------------------------------------------------

/* As in _threads.py. */
enum class Order : int {
  AcquiresIfTrue,  // its object, if it returns something true
  AcquiresIfFalse,
  Acquires,
  Releases,
  AcquiresAll,  // what anybody knows: what it waits for cannot be followed
  Backward,     // others act for the caller meanwhile
};

struct Method {
  PyMethodDef *def = nullptr;
  PyCFunction original = nullptr;
  Order order{};
};

constexpr size_t kMethods = 96;
std::array<Method, kMethods> methods;
size_t methodCount = 0;

bool learns(Order order, PyObject *result) {
  if (result == nullptr) return false;
  if (order == Order::AcquiresIfTrue) return result == Py_True;
  if (order == Order::AcquiresIfFalse) return result == Py_False;
  return order == Order::Acquires || order == Order::AcquiresAll;
}

/* A lock of `threading` of its own: it orders those alone who acquire it in one of these codes. */
struct Ignored {
  PyObject *lock = nullptr;
  std::vector<PyObject *> unless;
};

std::vector<Ignored> ignored;

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

void acquire(PyObject *object) {
  for (const Ignored &lock : ignored)
    if (lock.lock == object && !isCalledBy(lock.unless)) return;
  orSanitizerAcquire(object);
}

template <typename Call>
PyObject *callBackward(const Call &call) {
  const uint64_t thread = orSanitizerThread();
  if (thread == 0) return call();
  const c10::DebugInfoGuard guard(kActsFor, std::make_shared<ActsFor>(thread));
  return call();
}

template <typename Call>
PyObject *follow(const Method &method, PyObject *self, const Call &call) {
  if (method.order == Order::Backward) return callBackward(call);
  if (method.order == Order::Releases) orSanitizerRelease(self);
  PyObject *result = call();
  if (learns(method.order, result)) acquire(method.order == Order::AcquiresAll ? nullptr : self);
  return result;
}

template <typename Function>
Function original(const Method &method) {
  return reinterpret_cast<Function>(reinterpret_cast<void (*)()>(method.original));
}

/* In place of method I, for each way in which Python calls one. */
template <size_t I, typename... Rest>
PyObject *inPlace(PyObject *self, Rest... rest) {
  const Method &method = methods[I];
  return follow(method, self,
                [&] { return original<PyObject *(*)(PyObject *, Rest...)>(method)(self, rest...); });
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

/* False if it is nothing that can be followed. */
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

/* Functions that are running need what is in the tables, so the same places are taken again by the same ones. */
void unfollow() {
  while (methodCount > 0) {
    const Method &method = methods[--methodCount];
    method.def->ml_meth = method.original;
  }
  ignored.clear();
  while (typeCount > 0) {
    const Type &type = types[--typeCount];
    type.type->tp_dealloc = type.original;
  }
}

/* `threading` keeps the lock, and code of its functions. */
void ignoreLock(const py::object &lock, const std::vector<py::object> &unless) {
  Ignored added{lock.ptr(), {}};
  for (const py::object &code : unless) added.unless.push_back(code.ptr());
  ignored.push_back(std::move(added));
}

// ---- For Python ---------------------------------------------------------------------------------

/* What a thread knows at a time: others acquire it. */
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
  m.def("_threads_unfollow", &unfollow);
});

}  // namespace

uint64_t actsForThread() {
  const auto *info = static_cast<const ActsFor *>(c10::ThreadLocalDebugInfo::get(kActsFor));
  return info == nullptr ? 0 : info->thread;
}

}  // namespace torch_openreg
