/*
 * Gives autograd's threads the modes of the thread that calls backward().
 */
#pragma once

#include <cstdint>

#include "stacks.h"

namespace torch_openreg {

/* Called before a node of a backward pass runs: gives the calling thread the modes of the thread
 * that called backward(). It does so once a pass, so that a hook's changes stay. */
void takeOverFromBackwardCaller();

/* The thread for which the calling one acts, by the sanitizer's number; 0 for none. */
uint64_t actsForThread();

/* The stack of the call of backward() for which the calling thread acts. Null if there is none, or
 * the sanitizer was off. */
PythonStack backwardStack();

}  // namespace torch_openreg
