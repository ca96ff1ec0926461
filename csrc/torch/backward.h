/*
 * Finds the node that an operator of a backward pass belongs to, and the forward operator that made
 * the node.
 */
#pragma once

#include <memory>
#include <string>

#include "stacks.h"

namespace torch_openreg {

struct BackwardPart {
  std::string node;            // "MulBackward0"
  PythonStack forward;         // of the operator that made the node, if noteForward has kept it
  PythonStack caller;          // of backward()
  const void *hook = nullptr;  // the code of a pack hook, whose frame `forward` may have
};

/* Null if the thread is in no backward pass. The operators of one node share the same object while
 * it is kept alive. */
std::shared_ptr<const BackwardPart> currentBackward();

/* Called inside an operator: if the thread has made a node since the last call, `stack` is that
 * node's. The newest ten thousand or so, over all threads, are kept. */
void noteForward(const PythonStack &stack);

/* Removes all kept stacks. */
void forgetForwards();

}  // namespace torch_openreg
