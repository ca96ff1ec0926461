/*
 * Products of 16-bit matrices with a float32 result (`out_dtype`), which only CUDA and XPU have:
 * the CPU's product of the matrices in float32.
 */
#include "../registration.h"

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

/* The operands in the result's type; autocast does not cast the calls in its scope. */
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

/* The matrix that is added has the factors' type, or already the result's. */
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

using Product = Tensor (*)(const Tensor &, const Tensor &);
using ProductOut = Tensor &(*)(Tensor &, const Tensor &, const Tensor &);
using Sum = Tensor (*)(const Tensor &, const Tensor &, const Tensor &, const Scalar &,
                       const Scalar &);
using SumOut = Tensor &(*)(Tensor &, const Tensor &, const Tensor &, const Tensor &, const Scalar &,
                           const Scalar &);

template <Product product>
Tensor multiply(const Tensor &left, const Tensor &right, ScalarType type) {
  const Widened given(left, right, type);
  return product(given.left, given.right);
}

template <ProductOut product>
Tensor &multiplyOut(const Tensor &left, const Tensor &right, ScalarType type, Tensor &out) {
  checkResult(out, type);
  const Widened given(left, right, type);
  return product(out, given.left, given.right);
}

template <Sum sum>
Tensor add(const Tensor &self, const Tensor &left, const Tensor &right, ScalarType type,
           const Scalar &beta, const Scalar &alpha) {
  const Widened given(left, right, type);
  return sum(widen(self, left, type), given.left, given.right, beta, alpha);
}

template <SumOut sum>
Tensor &addOut(const Tensor &self, const Tensor &left, const Tensor &right, ScalarType type,
               const Scalar &beta, const Scalar &alpha, Tensor &out) {
  checkResult(out, type);
  const Widened given(left, right, type);
  return sum(out, widen(self, left, type), given.left, given.right, beta, alpha);
}

}  // namespace

}  // namespace torch_openreg

// PyTorch has these only for CUDA and XPU.
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  m.impl("mm.dtype", &multiply<&at::mm>);
  m.impl("mm.dtype_out", &multiplyOut<&at::mm_out>);
  m.impl("bmm.dtype", &multiply<&at::bmm>);
  m.impl("bmm.dtype_out", &multiplyOut<&at::bmm_out>);
  m.impl("addmm.dtype", &add<&at::addmm>);
  m.impl("addmm.dtype_out", &addOut<&at::addmm_out>);
  m.impl("baddbmm.dtype", &add<&at::baddbmm>);
  m.impl("baddbmm.dtype_out", &addOut<&at::baddbmm_out>);
}
