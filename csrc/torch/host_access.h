/*
 * PyTorch's facts for the report of a host access to device memory (openreg_host_access.h): a
 * block's dtype, the line of the program that allocated it, the operator that touched it.
 */
#pragma once

#include <c10/core/ScalarType.h>

namespace torch_openreg {

/* Describes the next block that the calling thread allocates. The line is present while the
 * sanitizer or the memory history is on, which gather stacks anyway. */
void describeNextBlock(c10::ScalarType dtype);

}  // namespace torch_openreg
