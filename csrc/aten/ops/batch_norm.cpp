/*
 * Batch norm where the CPU's kernels do not accept what CUDA's do: parameters and statistics of
 * different dtypes beside a 16-bit input. Also the steps of nn.SyncBatchNorm, which are composed of
 * operators here.
 */
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/var_mean.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "../../torch/device.h"
#include "../fallback.h"
#include "../registration.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Optional = std::optional<Tensor>;

// ---- Dtypes that are mixed ----------------------------------------------------------------------

bool hasHalfTheBits(const Tensor &tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool isTensor(const IValue &value) { return value.isTensor() && value.toTensor().defined(); }

/* The positions of an operator's arguments, from its schema. */
struct Places {
  size_t count = 0, input = 0, weight = 0;
  std::vector<size_t> widened;  // weight, bias and saved statistics
  std::vector<size_t> running;
  bool isBackward = false;
  bool updates = false;  // the running statistics
};

Places placesOf(const c10::FunctionSchema &schema) {
  Places places;
  places.count = schema.arguments().size();
  for (size_t i = 0; i < places.count; ++i) {
    const std::string_view name = schema.arguments()[i].name();
    if (name == "input") places.input = i;
    if (name == "weight") places.weight = i;
    if (name == "grad_out") places.isBackward = true;
    if (schema.arguments()[i].is_out()) continue;
    if (name == "weight" || name == "bias" || name.starts_with("save_"))
      places.widened.push_back(i);
    if (name.starts_with("running_")) places.running.push_back(i);
  }
  places.updates = !places.isBackward && schema.name() != "aten::_batch_norm_no_update";
  return places;
}

/* The kernel accepts parameters and statistics that all have the input's dtype or are float. */
bool isMixed(const Places &places, c10::ArrayRef<IValue> arguments) {
  const Tensor &input = arguments[places.input].toTensor();
  if (!hasHalfTheBits(input)) return false;
  bool narrow = false, wide = false;
  const auto look = [&](size_t place) {
    if (!isTensor(arguments[place])) return;
    const c10::ScalarType dtype = arguments[place].toTensor().scalar_type();
    narrow |= dtype == input.scalar_type();
    wide |= dtype == at::kFloat;
  };
  for (const size_t place : places.running) look(place);
  for (const size_t place : places.widened) look(place);
  return narrow && wide;
}

/* Runs with everything but the input as float, and copies what is written back to its origin. */
void batchNorm(const c10::OperatorHandle &op, Stack *stack) {
  const Places places = placesOf(op.schema());
  const size_t begin = stack->size() - places.count;
  if (!isMixed(places, torch::jit::last(*stack, places.count))) {
    return runCpuKernel(op, stack);
  }
  const IValue weight = (*stack)[begin + places.weight];
  std::vector<std::pair<Tensor, Tensor>> written;
  const auto widen = [&](size_t place, bool isWritten) {
    IValue &value = (*stack)[begin + place];
    if (!isTensor(value) || value.toTensor().scalar_type() == at::kFloat) return;
    const Tensor narrow = value.toTensor();
    value = narrow.to(at::kFloat);
    if (isWritten) written.emplace_back(narrow, value.toTensor());
  };
  for (const size_t place : places.widened) widen(place, false);
  for (const size_t place : places.running) widen(place, places.updates);
  runCpuKernel(op, stack);
  for (const auto &[narrow, wide] : written) narrow.copy_(wide);
  if (!places.isBackward || !isTensor(weight)) return;
  const c10::ScalarType dtype = weight.toTensor().scalar_type();
  for (size_t i = stack->size() - 2; i < stack->size(); ++i) {  // of weight and bias
    if (isTensor((*stack)[i])) (*stack)[i] = (*stack)[i].toTensor().to(dtype);
  }
}

// ---- Statistics of several ranks ----------------------------------------------------------------

/* All dimensions except the channels'. */
std::vector<int64_t> otherDims(const Tensor &input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

/* The dtype in which a CUDA kernel computes. */
Tensor wide(const Tensor &tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

/* One number for each channel, beside the input. */
Tensor across(const Tensor &channels, const Tensor &input) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = channels.numel();
  return channels.reshape(sizes);
}

void checkInput(const char *name, const Tensor &input) {
  TORCH_CHECK(input.dim() >= 2, name, ": expected an input with 2 or more dimensions, got sizes ",
              input.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(input.scalar_type()), "\"", name,
                              "\" not implemented for '", input.scalar_type(), "'");
}

/* Checks tensors with a number for each channel. */
void checkChannels(const char *name, const char *what, const Tensor &channels,
                   const Tensor &input) {
  TORCH_CHECK(channels.numel() == input.size(1), name, ": expected ", what, " of ", input.size(1),
              " elements, as many as the input has channels, got ", channels.numel());
}

std::tuple<Tensor, Tensor> batchNormStats(const Tensor &input, double eps) {
  checkInput("batch_norm_stats", input);
  const auto [variance, mean] = at::var_mean(wide(input), otherDims(input), /*correction=*/0);
  return {mean, (variance + eps).rsqrt()};
}

Tensor batchNormElemt(const Tensor &input, const Optional &weight, const Optional &bias,
                      const Tensor &mean, const Tensor &invstd, double /*eps*/) {
  const char *name = "batch_norm_elemt";
  checkInput(name, input);
  checkChannels(name, "a mean", mean, input);
  checkChannels(name, "an invstd", invstd, input);
  Tensor scale = wide(invstd);
  if (weight && weight->defined()) scale = scale * wide(*weight);
  Tensor result = (wide(input) - across(wide(mean), input)) * across(scale, input);
  if (bias && bias->defined()) result.add_(across(wide(*bias), input));
  return result.to(input.scalar_type());
}

Tensor &batchNormElemtOut(const Tensor &input, const Optional &weight, const Optional &bias,
                          const Tensor &mean, const Tensor &invstd, double eps, Tensor &out) {
  out.resize_(input.sizes());
  return out.copy_(batchNormElemt(input, weight, bias, mean, invstd, eps));
}

void moveTowards(const Optional &running, const Tensor &value, double momentum) {
  if (!running || !running->defined()) return;
  running->copy_(wide(*running) * (1 - momentum) + value * momentum);
}

/* `mean` and `invstd` have a row for each rank, whose variance is relative to its own mean. */
std::tuple<Tensor, Tensor> gatherStats(const Tensor &input, const Tensor &mean,
                                       const Tensor &invstd, const Optional &runningMean,
                                       const Optional &runningVar, double momentum, double eps,
                                       const Tensor &counts) {
  const char *name = "batch_norm_gather_stats_with_counts";
  TORCH_CHECK(mean.dim() == 2 && mean.sizes() == invstd.sizes() && counts.numel() == mean.size(0),
              name, ": expected a mean and an invstd of one row for each count, got sizes ",
              mean.sizes(), " and ", invstd.sizes(), " and ", counts.numel(), " counts");
  TORCH_CHECK(mean.size(1) == input.size(1), name, ": expected a mean of ", input.size(1),
              " columns, as many as the input has channels, got ", mean.size(1));
  const Tensor means = wide(mean), weights = counts.to(means.scalar_type()).unsqueeze(1);
  const Tensor total = weights.sum();
  const Tensor all = (means * weights).sum(0) / total;
  const Tensor own = wide(invstd).pow(-2) - eps;
  const Tensor squares = ((own + (means - all).square()) * weights).sum(0);
  moveTowards(runningMean, all, momentum);
  moveTowards(runningVar, squares / (total - 1), momentum);
  return {all, (squares / total + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gatherStatsOfEqual(const Tensor &input, const Tensor &mean,
                                              const Tensor &invstd, const Optional &runningMean,
                                              const Optional &runningVar, double momentum,
                                              double eps, int64_t count) {
  const Tensor counts = at::full({mean.size(0)}, count, mean.options());
  return gatherStats(input, mean, invstd, runningMean, runningVar, momentum, eps, counts);
}

void checkBackward(const char *name, const Tensor &gradOut, const Tensor &input, const Tensor &mean,
                   const Tensor &invstd) {
  checkInput(name, input);
  TORCH_CHECK(gradOut.sizes() == input.sizes(), name,
              ": expected a grad_out of the input's sizes, ", input.sizes(), ", got ",
              gradOut.sizes());
  checkChannels(name, "a mean", mean, input);
  checkChannels(name, "an invstd", invstd, input);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batchNormBackwardReduce(
    const Tensor &gradOut, const Tensor &input, const Tensor &mean, const Tensor &invstd,
    const Optional &weight, bool inputNeeds, bool weightNeeds, bool biasNeeds) {
  const char *name = "batch_norm_backward_reduce";
  checkBackward(name, gradOut, input, mean, invstd);
  const auto dims = otherDims(input);
  const Tensor gradient = wide(gradOut);
  const Tensor sum = gradient.sum(dims);
  const Tensor product = (gradient * (wide(input) - across(wide(mean), input))).sum(dims);
  const auto dtype =
      weight && weight->defined() ? weight->scalar_type() : at::toOpMathType(input.scalar_type());
  return {inputNeeds ? sum : Tensor(), inputNeeds ? product : Tensor(),
          weightNeeds ? (product * wide(invstd)).to(dtype) : Tensor(),
          biasNeeds ? sum.to(dtype, /*non_blocking=*/false, /*copy=*/true) : Tensor()};
}

Tensor batchNormBackwardElemt(const Tensor &gradOut, const Tensor &input, const Tensor &mean,
                              const Tensor &invstd, const Optional &weight, const Tensor &sumDy,
                              const Tensor &sumDyXmu, const Tensor &count) {
  const char *name = "batch_norm_backward_elemt";
  checkBackward(name, gradOut, input, mean, invstd);
  checkChannels(name, "a sum_dy", sumDy, input);
  checkChannels(name, "a sum_dy_xmu", sumDyXmu, input);
  const Tensor deviation = wide(invstd), total = count.sum();
  const Tensor slope = deviation.square() * wide(sumDyXmu) / total;
  Tensor scale = deviation;
  if (weight && weight->defined()) scale = scale * wide(*weight);
  Tensor result = wide(gradOut) - across(wide(sumDy) / total, input);
  result.sub_((wide(input) - across(wide(mean), input)) * across(slope, input));
  return result.mul_(across(scale, input)).to(input.scalar_type());
}

}  // namespace

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace torch_openreg;
  // The CPU's kernels refuse parameters and statistics of different dtypes, which CUDA's accept.
  // The composite kernel of _batch_norm_no_update calls the CPU's kernel with the device's tensors.
  implBoxed<&batchNorm>(
      m, {"native_batch_norm", "native_batch_norm.out", "_native_batch_norm_legit",
          "_native_batch_norm_legit.out", "_batch_norm_with_update", "_batch_norm_with_update.out",
          "_batch_norm_no_update", "native_batch_norm_backward", "batch_norm_backward"});
  // nn.SyncBatchNorm calls these, which PyTorch has only for CUDA.
  m.impl("batch_norm_stats", &batchNormStats);
  m.impl("batch_norm_elemt", &batchNormElemt);
  m.impl("batch_norm_elemt.out", &batchNormElemtOut);
  m.impl("batch_norm_gather_stats", &gatherStatsOfEqual);
  m.impl("batch_norm_gather_stats_with_counts", &gatherStats);
  m.impl("batch_norm_backward_reduce", &batchNormBackwardReduce);
  m.impl("batch_norm_backward_elemt", &batchNormBackwardElemt);
}
