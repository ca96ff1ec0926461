/*
 * Python's lock, for code that may run with or without it.
 */
#pragma once

#include <unistd.h>

#include <cxxabi.h>

#include "check.h"

namespace torch_openreg {

/* False while Python is ending. */
bool interpreterRuns();

/* Whether the calling thread may have Python frames. A thread that Python never ran on, such as a
 * worker, has none. A thread of autograd has some only while a Python hook or function runs. */
bool mayBeInPython();

/* Whether the calling thread is one of Python's, and has the GIL. */
bool holdsGil();

/* Releases the GIL if the calling thread holds it; returns the argument for takeGilBack. */
void *letGoOfGil();
void takeGilBack(void *token);

/* Calls `f`, which may take the GIL. Once Python is ending, that ends the thread by unwinding its
 * stack, through frames of ours or of PyTorch that must not be unwound. So the thread sleeps until
 * the process is gone. */
template <typename F>
void withoutUnwinding(F f) {
  try {
    f();
  } catch (abi::__forced_unwind &) {
    for (;;) pause();
  }
}

/* False while Python is ending: the GIL is not taken, and must not be given back. */
bool takeGil(int &state);
void giveGilBack(int state);

class WithoutGil : Uncopyable {
 public:
  WithoutGil() : token_(letGoOfGil()) {}
  ~WithoutGil() { takeGilBack(token_); }

 private:
  void *token_;
};

}  // namespace torch_openreg
