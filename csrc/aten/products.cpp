/*
 * Products of 16-bit matrices with a float32 result (`out_dtype`), which only CUDA and XPU have:
 * the CPU's product of the matrices in float32.
 */
#include "registration.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_openreg {

namespace {

using at::Scalar;
using at::Tensor;
using c10::ScalarType;

/* The operands in the result's type, while the calls below are not cast by autocast. */
struct Widened {
  Widened(const Tensor &left, const Tensor &right, ScalarType type) {
    const ScalarType given = left.scalar_type();
    TORCH_CHECK(right.scalar_type() == given, "expected two matrices of the same dtype, but got ",
                given, " and ", right.scalar_type());
    TORCH_CHECK(type == given || (type == c10::kFloat && c10::isReducedFloatingType(given)),
                "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, but got ",
                type, " for ", given);
    this->left = left.to(type);
    this->right = right.to(type);
  }

  c10::impl::ExcludeDispatchKeyGuard exact{c10::autocast_dispatch_keyset};
  Tensor left, right;
};

/* What is added may have the result's type already. */
Tensor widen(const Tensor &added, const Tensor &factor, ScalarType type) {
  TORCH_CHECK(added.scalar_type() == type || added.scalar_type() == factor.scalar_type(),
              "self must have the dtype of the matrices or out_dtype, but got ",
              added.scalar_type());
  return added.to(type);
}

void checkResult(const Tensor &out, ScalarType type) {
  TORCH_CHECK(out.scalar_type() == type, "out_dtype must be the same as the dtype of the provided ",
              "out tensor, but got ", type, " and ", out.scalar_type());
}

Tensor mm(const Tensor &self, const Tensor &mat2, ScalarType type) {
  const Widened given(self, mat2, type);
  return at::mm(given.left, given.right);
}

Tensor &mmOut(const Tensor &self, const Tensor &mat2, ScalarType type, Tensor &out) {
  checkResult(out, type);
  const Widened given(self, mat2, type);
  return at::mm_out(out, given.left, given.right);
}

Tensor bmm(const Tensor &self, const Tensor &mat2, ScalarType type) {
  const Widened given(self, mat2, type);
  return at::bmm(given.left, given.right);
}

Tensor &bmmOut(const Tensor &self, const Tensor &mat2, ScalarType type, Tensor &out) {
  checkResult(out, type);
  const Widened given(self, mat2, type);
  return at::bmm_out(out, given.left, given.right);
}

Tensor addmm(const Tensor &self, const Tensor &mat1, const Tensor &mat2, ScalarType type,
             const Scalar &beta, const Scalar &alpha) {
  const Widened given(mat1, mat2, type);
  return at::addmm(widen(self, mat1, type), given.left, given.right, beta, alpha);
}

Tensor &addmmOut(const Tensor &self, const Tensor &mat1, const Tensor &mat2, ScalarType type,
                 const Scalar &beta, const Scalar &alpha, Tensor &out) {
  checkResult(out, type);
  const Widened given(mat1, mat2, type);
  return at::addmm_out(out, widen(self, mat1, type), given.left, given.right, beta, alpha);
}

Tensor baddbmm(const Tensor &self, const Tensor &batch1, const Tensor &batch2, ScalarType type,
               const Scalar &beta, const Scalar &alpha) {
  const Widened given(batch1, batch2, type);
  return at::baddbmm(widen(self, batch1, type), given.left, given.right, beta, alpha);
}

Tensor &baddbmmOut(const Tensor &self, const Tensor &batch1, const Tensor &batch2, ScalarType type,
                   const Scalar &beta, const Scalar &alpha, Tensor &out) {
  checkResult(out, type);
  const Widened given(batch1, batch2, type);
  return at::baddbmm_out(out, widen(self, batch1, type), given.left, given.right, beta, alpha);
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  m.impl("mm.dtype", &mm);
  m.impl("mm.dtype_out", &mmOut);
  m.impl("bmm.dtype", &bmm);
  m.impl("bmm.dtype_out", &bmmOut);
  m.impl("addmm.dtype", &addmm);
  m.impl("addmm.dtype_out", &addmmOut);
  m.impl("baddbmm.dtype", &baddbmm);
  m.impl("baddbmm.dtype_out", &baddbmmOut);
}
