/*
 * The origins of streams, for reports: the stack that requested one, and its name.
 */
#pragma once

#include <string>

#include "check.h"
#include "stacks.h"

namespace torch_openreg {

struct StreamOrigin {
  PythonStack stack;  // null if not known
  std::string name;
};

/* The calling thread has been given a stream of the pool; its earlier origin is removed. */
void noteStreamMade(orStream_t stream);

StreamOrigin streamOrigin(orStream_t stream);

}  // namespace torch_openreg
