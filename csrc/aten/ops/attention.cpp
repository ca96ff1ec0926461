/*
 * _scaled_dot_product_fused_attention_overrideable and its backward, which PyTorch leaves to
 * out-of-tree devices. Both compute in float32 at least; the backward computes the weights again.
 */
#include "../registration.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_permuted.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SymInt.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace torch_openreg {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor wide(const Tensor &tensor) {
  return c10::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(c10::kFloat) : tensor;
}

double scaleOf(const Tensor &query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

/* The scores, which the softmax turns into weights. */
Tensor scoresOf(const Tensor &query, const Tensor &key, const OptionalTensor &bias, bool causal,
                double scale) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  Tensor scores = at::matmul(wide(query) * scale, wide(key).transpose(-2, -1));
  if (causal) {
    const auto bools = query.options().dtype(c10::kBool);
    const Tensor later = at::ones({scores.size(-2), scores.size(-1)}, bools).triu(1);
    scores = scores.masked_fill(later, kNever);
  }
  if (!bias || !bias->defined()) return scores;
  if (bias->scalar_type() == c10::kBool) return scores.masked_fill(bias->logical_not(), kNever);
  return scores + bias->to(scores.scalar_type());
}

/* The factor of each weight: 0 where it is dropped, otherwise what makes the mean 1. It is a hash
 * of the index and the seed, so that the backward gets the same factors. */
Tensor keptOf(const Tensor &weights, double dropout, const Tensor &seed) {
  constexpr int64_t kFactor = 0x5851F42D4C957F2D, kBits = 24;
  Tensor hash = at::arange(weights.numel(), seed.options()).view(weights.sizes());
  for (int round = 0; round < 3; ++round) {
    hash = (hash + seed) * kFactor;
    hash = hash.bitwise_xor(hash.__rshift__(32));
  }
  const Tensor uniform = hash.bitwise_and((int64_t{1} << kBits) - 1).to(weights.scalar_type());
  const Tensor kept = uniform.ge(dropout * static_cast<double>(int64_t{1} << kBits));
  return kept.to(weights.scalar_type()) * (dropout < 1 ? 1 / (1 - dropout) : 0);
}

/* A tensor of these sizes, in the query's order of dimensions. */
Tensor emptyAs(const Tensor &query, c10::IntArrayRef sizes) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order,
                           [&](int64_t a, int64_t b) { return query.stride(a) > query.stride(b); });
  return at::empty_permuted(sizes, order, query.options());
}

Tensor as(const Tensor &given, const Tensor &gradient) {
  return at::empty_like(given).copy_(gradient);
}

using Result =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Result attention(const Tensor &query, const Tensor &key, const Tensor &value,
                 const OptionalTensor &bias, double dropout, bool causal, bool returnWeights,
                 std::optional<double> scale) {
  TORCH_CHECK(query.dim() == 3 || query.dim() == 4, "query must be 3D or 4D, but it is ",
              query.dim(), "D");
  TORCH_CHECK(dropout >= 0 && dropout <= 1, "dropout_p must be from 0 to 1, but got ", dropout);
  const c10::impl::ExcludeDispatchKeyGuard exact(c10::autocast_dispatch_keyset);
  const auto longs = query.options().dtype(c10::kLong);
  const Tensor seed = dropout > 0 ? at::randint(std::numeric_limits<int64_t>::max(), {}, longs)
                                  : at::zeros({}, longs);
  const Tensor scores = scoresOf(query, key, bias, causal, scaleOf(query, scale));
  Tensor weights = at::_safe_softmax(scores, -1);
  if (dropout > 0) weights = weights * keptOf(weights, dropout, seed);
  const Tensor made = at::matmul(weights, wide(value));
  Tensor sums = at::logsumexp(scores, {-1}).to(c10::kFloat);
  return {emptyAs(query, made.sizes()).copy_(made),
          query.dim() == 3 ? sums.unsqueeze(0) : sums,
          Tensor(),
          Tensor(),
          query.size(-2),
          key.size(-2),
          seed,
          at::zeros({}, longs),
          returnWeights ? weights.to(query.scalar_type()) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attentionBackward(
    const Tensor &gradient, const Tensor &query, const Tensor &key, const Tensor &value,
    const Tensor &bias, std::array<bool, 4> wanted, const Tensor &, const Tensor &, const Tensor &,
    const Tensor &, int64_t, int64_t, double dropout, bool causal, const Tensor &seed,
    const Tensor &, std::optional<double> given) {
  if (!gradient.defined()) return {};
  const c10::impl::ExcludeDispatchKeyGuard exact(c10::autocast_dispatch_keyset);
  const double scale = scaleOf(query, given);
  const Tensor weights = at::_safe_softmax(scoresOf(query, key, bias, causal, scale), -1);
  const Tensor ofOutput = wide(gradient);
  Tensor used = weights, ofWeights = at::matmul(ofOutput, wide(value).transpose(-2, -1));
  if (dropout > 0) {
    const Tensor kept = keptOf(weights, dropout, seed);
    used = used * kept;
    ofWeights = ofWeights * kept;
  }
  const Tensor ofScores = weights * (ofWeights - (ofWeights * weights).sum(-1, true));
  Tensor ofQuery, ofKey, ofValue, ofBias;
  if (wanted[0]) ofQuery = as(query, at::matmul(ofScores, wide(key)) * scale);
  if (wanted[1]) ofKey = as(key, at::matmul(ofScores.transpose(-2, -1), wide(query)) * scale);
  if (wanted[2]) ofValue = as(value, at::matmul(used.transpose(-2, -1), ofOutput));
  if (wanted[3] && bias.defined()) ofBias = as(bias, ofScores.sum_to_size(bias.sizes()));
  return {ofQuery, ofKey, ofValue, ofBias};
}

}  // namespace

}  // namespace torch_openreg

// PyTorch has no kernel for these on any device: it leaves them to out-of-tree backends.
OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &torch_openreg::attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
         &torch_openreg::attentionBackward);
}
