/*
 * How host threads order each other, for the sanitizer.
 */
#pragma once

#include <cstdint>

namespace torch_openreg {

/* For which thread the calling one acts, as autograd's do for the one that calls backward(). 0: for none. */
uint64_t actsForThread();

}  // namespace torch_openreg
