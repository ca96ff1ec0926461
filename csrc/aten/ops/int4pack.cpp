/*
 * Products with four-bit weights, through the operators that libraries call on a device. The CPU's
 * kernels have other names and another form of the weights.
 *
 * Packed weights have CUDA's sizes, with the bytes in their original order: two numbers of a row in
 * each, the first in its upper half.
 */
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;

Tensor pack(const Tensor &self, int64_t tiles) {
  const char *name = "_convert_weight_to_int4pack";
  TORCH_CHECK(self.dim() == 2 && self.scalar_type() == at::kByte, name,
              ": expected a weight of dtype uint8 with 2 dimensions, got ", self.scalar_type(),
              " with sizes ", self.sizes());
  TORCH_CHECK(tiles == 2 || tiles == 4 || tiles == 8, name,
              ": expected innerKTiles to be 2, 4 or 8, got ", tiles);
  const int64_t rows = self.size(0), columns = self.size(1) * 2;
  TORCH_CHECK(rows % 8 == 0 && columns % (tiles * 16) == 0, name,
              ": expected a multiple of 8 rows and of ", tiles * 16, " numbers in each, got ", rows,
              " and ", columns);
  return self.clone(at::MemoryFormat::Contiguous)
      .view(at::kInt)
      .view({rows / 8, columns / (tiles * 16), 32, tiles / 2});
}

/* Returns the numbers, by row. */
Tensor unpack(const Tensor &packed, int64_t rows, int64_t columns) {
  const Tensor bytes = packed.contiguous().view(at::kByte).view({rows, columns / 2});
  return at::stack({bytes.__rshift__(4), bytes.bitwise_and(15)}, -1).view({rows, columns});
}

/* Each group of a row has its own scale and zero point. Computes in float32, as on the CPU. */
Tensor multiply(const Tensor &self, const Tensor &mat2, int64_t group,
                const Tensor &scaleAndZeros) {
  const char *name = "_weight_int4pack_mm";
  TORCH_CHECK(self.dim() == 2 && at::isFloatingType(self.scalar_type()), name,
              ": expected a matrix of floating point, got ", self.scalar_type(), " with sizes ",
              self.sizes());
  TORCH_CHECK(mat2.dim() == 4 && mat2.scalar_type() == at::kInt, name,
              ": expected a weight of dtype int32 with 4 dimensions, got ", mat2.scalar_type(),
              " with sizes ", mat2.sizes());
  const int64_t rows = mat2.size(0) * 8, columns = self.size(1);
  TORCH_CHECK(rows * columns == mat2.numel() * 8, name, ": expected rows of ", columns,
              " numbers in the weight");
  TORCH_CHECK(group == 32 || group == 64 || group == 128 || group == 256, name,
              ": expected qGroupSize to be 32, 64, 128 or 256, got ", group);
  TORCH_CHECK(
      columns % group == 0 && scaleAndZeros.sizes() == c10::IntArrayRef({columns / group, rows, 2}),
      name, ": expected scales and zeros of the sizes [", columns, " / ", group, ", ", rows,
      ", 2], got ", scaleAndZeros.sizes());
  const Tensor groups = scaleAndZeros.transpose(0, 1).to(at::kFloat).unsqueeze(-1);
  const Tensor numbers = unpack(mat2, rows, columns).to(at::kFloat).sub_(8);
  const Tensor weight = numbers.view({rows, columns / group, group})
                            .mul(groups.select(2, 0))
                            .add_(groups.select(2, 1))
                            .view({rows, columns});
  return at::mm(self.to(at::kFloat), weight.t()).to(self.scalar_type());
}

}  // namespace

}  // namespace torch_openreg

// PyTorch has these for CUDA and the like; the CPU's kernels have other names and a different form.
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_convert_weight_to_int4pack", &torch_openreg::pack);
  m.impl("_weight_int4pack_mm", &torch_openreg::multiply);
}
