#include <Python.h>

#include "gil.h"

namespace torch_openreg {

bool interpreterRuns() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

/* A thread needs no GIL to check for its own frames. */
bool mayBeInPython() {
  const PyThreadState *state = interpreterRuns() ? PyGILState_GetThisThreadState() : nullptr;
#if PY_VERSION_HEX >= 0x030d0000
  return state != nullptr && state->current_frame != nullptr;
#elif PY_VERSION_HEX >= 0x030b0000
  return state != nullptr && state->cframe->current_frame != nullptr;
#else
  return state != nullptr && state->frame != nullptr;
#endif
}

/* PyGILState_Check() returns true on every thread once there has been a second interpreter. */
static bool hasGil(const PyThreadState *own) {
#if PY_VERSION_HEX >= 0x030d0000
  return PyThreadState_GetUnchecked() == own;
#else
  return _PyThreadState_UncheckedGet() == own;
#endif
}

/* Stands for a Python thread that does not hold the GIL. */
static char withoutGil;

bool holdsGil() {
  const PyThreadState *own = interpreterRuns() ? PyGILState_GetThisThreadState() : nullptr;
  return own != nullptr && hasGil(own);
}

void *letGoOfGil() {
  const PyThreadState *own = interpreterRuns() ? PyGILState_GetThisThreadState() : nullptr;
  if (own == nullptr) return nullptr;
  return hasGil(own) ? static_cast<void *>(PyEval_SaveThread()) : &withoutGil;
}

void takeGilBack(void *token) {
  if (token == nullptr) return;
  while (!interpreterRuns()) pause();
  if (token == &withoutGil) return;
  withoutUnwinding([&] { PyEval_RestoreThread(static_cast<PyThreadState *>(token)); });
}

bool takeGil(int &state) {
  if (!interpreterRuns()) return false;
  withoutUnwinding([&] { state = PyGILState_Ensure(); });
  return true;
}

void giveGilBack(int state) { PyGILState_Release(static_cast<PyGILState_STATE>(state)); }

}  // namespace torch_openreg
