/*
 * A copy as one task: strides, dtype, conj and neg are the business of PyTorch's CPU copy, which
 * runs on a worker.
 */
#pragma once

#include <ATen/core/Tensor.h>

#include <openreg.h>

#include "../../torch/graph.h"
#include "../../torch/stream.h"

namespace torch_openreg {

enum class CopyStrategy { kNothing, kMemcpy, kKernel, kTemporaries, kHostImages };

/* What a copy by memcpy or by a kernel asks about its tensors, found out once. */
struct CopyFacts {
  CopyFacts(const at::Tensor &to, const at::Tensor &from, bool isNonBlocking,
            CopyStrategy strategy);

  const at::Tensor &dst, &src;
  const bool nonBlocking;
  const at::Tensor *const host;  // the one in host memory; null: both are on devices
  const OpenRegStream stream;    // the device's current one; the source's between two devices
  const orStream_t handle;
  const bool isCaptured;  // the stream is
  const bool isPinned;    // the host's memory is; not asked for a memcpy that nobody is told of
};

/* Queues the copy on the stream. Both tensors have the same sizes, and lie in memory that the
 * stream's kernels reach or in the host's. The task holds neither tensor: the caller waits for what
 * the host may change or free before the task has run (pageable memory). Refuses at once what
 * PyTorch's copy refuses of dtypes and bits, and warns of what it warns of. `awaited`: the caller
 * waits next, and may run the copy itself. `owned`: the task takes over this host tensor, and
 * copies from it in place of the source. */
void enqueueCopy(const CopyFacts &facts, bool awaited = false, const at::Tensor &owned = {});

}  // namespace torch_openreg
