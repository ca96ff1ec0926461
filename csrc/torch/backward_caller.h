/*
 * Gives autograd's threads the modes of the thread that calls backward().
 */
#pragma once

#include <cstdint>

namespace torch_openreg {

/* Called before a node of a backward pass runs: gives the calling thread the modes of the thread
 * that called backward(). It does so once a pass, so that a hook's changes stay. */
void takeOverFromBackwardCaller();

/* The thread for which the calling one acts, by the sanitizer's number; 0 for none. */
uint64_t actsForThread();

}  // namespace torch_openreg
