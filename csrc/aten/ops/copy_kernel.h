/*
 * A copy as one task. PyTorch's CPU copy, which runs on a worker, handles strides, dtype, conj and
 * neg.
 */
#pragma once

#include <ATen/core/Tensor.h>

#include <openreg.h>

#include "../../torch/graph.h"
#include "../../torch/stream.h"

namespace torch_openreg {

enum class CopyStrategy { kNothing, kMemcpy, kKernel, kTemporaries, kHostCopies };

/* The facts about its tensors that a copy by memcpy or by a kernel needs, computed once. */
struct CopyFacts {
  CopyFacts(const at::Tensor &to, const at::Tensor &from, bool isNonBlocking,
            CopyStrategy strategy);

  const at::Tensor &dst, &src;
  const bool nonBlocking;
  const at::Tensor *const host;  // the one in host memory; null: both are on devices
  const OpenRegStream stream;    // the device's current one; the source's between two devices
  const orStream_t handle;
  const bool isCaptured;  // the stream is
  const bool isPinned;    // of the host's memory; not computed for a memcpy without reports
};

/* Queues the copy on the stream. Both tensors have the same sizes, and are in memory that the
 * stream's kernels reach or in the host's. The task holds neither tensor: the caller waits if the
 * host may change or free memory before the task has run (pageable memory). Refuses or warns at
 * once where PyTorch's copy does for dtypes and bits. `awaited`: the caller waits next, and may run
 * the copy itself. `owned`: the task takes over this host tensor and copies from it in place of the
 * source. */
void enqueueCopy(const CopyFacts &facts, bool awaited = false, const at::Tensor &owned = {});

}  // namespace torch_openreg
