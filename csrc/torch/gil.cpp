#include <Python.h>

#include "gil.h"

#include <cxxabi.h>
#include <unistd.h>

namespace torch_openreg {

bool interpreterRuns() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

/* Of its own frames the thread needs no GIL to know whether there are any. */
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

/* PyGILState_Check() says yes to every thread once there has been a second interpreter. */
static bool hasGil(const PyThreadState *own) {
#if PY_VERSION_HEX >= 0x030d0000
  return PyThreadState_GetUnchecked() == own;
#else
  return _PyThreadState_UncheckedGet() == own;
#endif
}

/* Of a thread of Python's that has not got the GIL. */
static char withoutGil;

void *letGoOfGil() {
  const PyThreadState *own = interpreterRuns() ? PyGILState_GetThisThreadState() : nullptr;
  if (own == nullptr) return nullptr;
  return hasGil(own) ? static_cast<void *>(PyEval_SaveThread()) : &withoutGil;
}

void takeGilBack(void *token) {
  if (token == nullptr) return;
  // Once Python ends, asking for the GIL ends the thread by unwinding its stack, through frames
  // that may not be unwound: ours, or those of PyTorch that called us. Such a thread sleeps until
  // the process is gone instead.
  while (!interpreterRuns()) pause();
  if (token == &withoutGil) return;
  try {
    PyEval_RestoreThread(static_cast<PyThreadState *>(token));
  } catch (abi::__forced_unwind &) {
    for (;;) pause();
  }
}

bool takeGil(int &state) {
  if (!interpreterRuns()) return false;
  // As above.
  try {
    state = PyGILState_Ensure();
  } catch (abi::__forced_unwind &) {
    for (;;) pause();
  }
  return true;
}

void giveGilBack(int state) { PyGILState_Release(static_cast<PyGILState_STATE>(state)); }

}  // namespace torch_openreg
