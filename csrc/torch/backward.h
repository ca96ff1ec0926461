/*
 * What an operator of a backward pass belongs to: its node, and the operator of the forward pass
 * that made the node.
 */
#pragma once

#include <memory>
#include <string>

#include "stacks.h"

namespace torch_openreg {

struct BackwardPart {
  std::string node;     // "MulBackward0"
  PythonStack forward;  // of the operator that made it, if noteForward has kept that
  int task = -1;        // the engine's number of the pass
};

/* Null: the thread is in no backward pass. One and the same for the operators of a node, while
 * anybody keeps it. */
std::shared_ptr<const BackwardPart> currentBackward();

/* The calling thread is in an operator: if it has made a node since it was last asked, this is the
 * node's. Of all threads some ten thousand are kept, the newest. */
void noteForward(const PythonStack &stack);

/* The kept ones go. */
void forgetForwards();

}  // namespace torch_openreg
