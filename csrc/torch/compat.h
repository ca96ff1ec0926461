/*
 * The differences between the versions of PyTorch that the shim is built against.
 */
#pragma once

#include <torch/headeronly/version.h>

/* Whether PyTorch is 2.MINOR or later. */
#define OPENREG_TORCH_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

/* The operators that autocast runs in float32: PyTorch's list, and the additions of CUDA and the
 * CPU. */
#if OPENREG_TORCH_SINCE(14)
#define OPENREG_FORALL_FP32(_) \
  AT_FORALL_FP32(_)            \
  _(linalg_matrix_sqrth)
#else
#define OPENREG_FORALL_FP32(_) AT_FORALL_FP32(_)
#endif
