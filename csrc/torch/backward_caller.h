/*
 * The modes of the thread that calls backward(): the threads of autograd use them, too.
 */
#pragma once

#include <cstdint>

namespace torch_openreg {

/* Before a node of a backward pass runs: the calling thread gets the modes of the one that called
 * backward(). Once for each pass, so that what a hook changes stays as the hook left it. */
void takeOverFromBackwardCaller();

/* For which thread the calling one acts, by the sanitizer's number. 0: for none. */
uint64_t actsForThread();

}  // namespace torch_openreg
