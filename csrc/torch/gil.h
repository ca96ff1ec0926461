/*
 * Python's lock, for code that does not know whether its thread holds it.
 */
#pragma once

namespace torch_openreg {

/* False while Python ends. */
bool interpreterRuns();

/* Whether the calling thread may have Python frames. One that was never Python's, such as a worker,
 * has none; nor has autograd's, unless a hook or a function of Python's runs. */
bool mayBeInPython();

/* Lets go of the GIL if the calling thread holds it; returns what takeGilBack needs. */
void *letGoOfGil();
void takeGilBack(void *token);

/* False while Python ends: there is nothing to give back then. */
bool takeGil(int &state);
void giveGilBack(int state);

class WithoutGil {
 public:
  WithoutGil() : token_(letGoOfGil()) {}
  ~WithoutGil() { takeGilBack(token_); }
  WithoutGil(const WithoutGil &) = delete;
  WithoutGil &operator=(const WithoutGil &) = delete;

 private:
  void *token_;
};

}  // namespace torch_openreg
