/*
 * What the report of a host access to device memory (openreg_host_access.h) says of PyTorch: the
 * dtype of a block, the program's line that asked for it, the operator that touched it.
 */
#pragma once

#include <c10/core/ScalarType.h>

namespace torch_openreg {

/* Of the next block that the calling thread allocates. The line is known while the sanitizer or the
 * memory history is on, which gather stacks anyway. */
void describeNextBlock(c10::ScalarType dtype);

}  // namespace torch_openreg
