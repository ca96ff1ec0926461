#include <Python.h>

#include "unwinding.h"

#include <cstring>
#include <exception>

#include "gil.h"

namespace torch_openreg {

namespace {

/* What frees the variables of a frame that an exception has left. Before Python 3.11 a call frees
 * its frame when it returns, too; a traceback frees those of an exception alone. */
PyTypeObject *const type = PY_VERSION_HEX >= 0x030b0000 ? &PyFrame_Type : &PyTraceBack_Type;

destructor deallocate = nullptr;
inquiry clear = nullptr;
PyCFunction clearMethod = nullptr;
bool isFollowed = false;
thread_local int depth = 0;

void countedDeallocate(PyObject *object) {
  ++depth;
  deallocate(object);
  --depth;
}

int countedClear(PyObject *object) {
  ++depth;
  const int result = clear(object);
  --depth;
  return result;
}

PyObject *countedClearMethod(PyObject *object, PyObject *none) {
  ++depth;
  PyObject *result = clearMethod(object, none);
  --depth;
  return result;
}

/* frame.clear(), as traceback.clear_frames() calls it. */
PyMethodDef *clearDefinition() {
  PyMethodDef *def = PyFrame_Type.tp_methods;
  while (std::strcmp(def->ml_name, "clear") != 0) ++def;
  return def;
}

}  // namespace

void followUnwinding(bool follow) {
  if (follow == isFollowed) return;
  isFollowed = follow;
  if (deallocate == nullptr) {
    deallocate = type->tp_dealloc;
    clear = type->tp_clear;
    clearMethod = clearDefinition()->ml_meth;
  }
  type->tp_dealloc = follow ? &countedDeallocate : deallocate;
  type->tp_clear = follow ? &countedClear : clear;
  clearDefinition()->ml_meth = follow ? &countedClearMethod : clearMethod;
}

bool unwinds() {
  if (depth > 0 || std::uncaught_exceptions() > 0 || !interpreterRuns()) return true;
  return holdsGil() && PyErr_Occurred() != nullptr;
}

}  // namespace torch_openreg
