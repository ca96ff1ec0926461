/*
 * A copy as one task: strides, dtype, conj and neg are the business of PyTorch's CPU copy, which
 * runs on a worker.
 */
#pragma once

#include <ATen/core/Tensor.h>

#include <openreg.h>

namespace torch_openreg {

/* Queues the copy on `stream`. Both have the same sizes. Each is memory of a device whose kernels
 * the stream's can reach, or the host's. The task holds neither tensor. What the host may change or
 * free before the task has run (pageable memory) is the caller's to wait for. Dtypes and bits that
 * PyTorch's copy refuses are refused here, and what it warns of comes here. `awaited`: the caller
 * waits next, and may run the copy itself. */
void enqueueCopy(const at::Tensor &dst, const at::Tensor &src, orStream_t stream,
                 bool awaited = false);

/* The same from a host tensor that the task takes over. */
void enqueueCopyOwning(const at::Tensor &dst, const at::Tensor &src, orStream_t stream);

}  // namespace torch_openreg
