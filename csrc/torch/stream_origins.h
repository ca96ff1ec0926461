/*
 * Where streams come from, for reports: the stack of who asked for one, and the name that it was
 * given.
 */
#pragma once

#include <string>

#include "check.h"
#include "stacks.h"

namespace torch_openreg {

struct StreamOrigin {
  PythonStack stack;  // null: not known
  std::string name;
};

/* A stream of the pool has been handed out, by the calling thread; what was known of it is over. */
void noteStreamMade(orStream_t stream);

StreamOrigin streamOrigin(orStream_t stream);

}  // namespace torch_openreg
