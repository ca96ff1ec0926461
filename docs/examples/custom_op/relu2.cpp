/*
 * An operator of one's own, written for the device: relu(x)^2 and its derivative, 2 relu(x) * grad.
 *
 * On the caller's thread the arguments are checked and the result is made; `relu2Kernel` runs on a
 * lane when its stream gets there. What it needs is copied into the queue by value. Tensors may be
 * freed before it runs: their memory is used again in the order of the stream only.
 */
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch_openreg/stream.h>

#include <algorithm>
#include <array>

namespace {

template <typename T>
struct Arguments {
  const T *x;
  const T *grad;  // null: forward
  T *result;
  int64_t count;
};

constexpr int64_t kPiece = 1 << 15;  // some ten microseconds

template <typename T>
void relu2Piece(void *context, size_t index) {
  const auto &a = *static_cast<const Arguments<T> *>(context);
  const int64_t begin = static_cast<int64_t>(index) * kPiece;
  const int64_t end = std::min(a.count, begin + kPiece);
  for (int64_t i = begin; i < end; ++i) {
    const T positive = std::max(a.x[i], T(0));
    a.result[i] = a.grad != nullptr ? 2 * positive * a.grad[i] : positive * positive;
  }
}

/* The host's addresses of device memory are the kernel's only after this, and only while it
 * runs. */
template <typename T>
orError_t map(T *&memory, int64_t count) {
  void *address = nullptr;
  const orError_t error = orMapForKernel(&address, memory, static_cast<size_t>(count) * sizeof(T));
  memory = static_cast<T *>(address);
  return error;
}

template <typename T>
orError_t relu2Kernel(void *arguments) {
  auto a = *static_cast<const Arguments<T> *>(arguments);
  orError_t error = map(a.x, a.count);
  if (error == orSuccess && a.grad != nullptr) error = map(a.grad, a.count);
  if (error == orSuccess) error = map(a.result, a.count);
  if (error != orSuccess) return error;  // raised at the next call that synchronises
  return orRunPieces(&relu2Piece<T>, &a, static_cast<size_t>((a.count + kPiece - 1) / kPiece));
}

template <typename T>
void launch(const at::Tensor &x, const at::Tensor *grad, const at::Tensor &result) {
  const Arguments<T> arguments{x.const_data_ptr<T>(),
                               grad != nullptr ? grad->const_data_ptr<T>() : nullptr,
                               result.mutable_data_ptr<T>(), x.numel()};
  orLaunch launch{};
  launch.size = sizeof launch;
  launch.stream = torch_openreg::getCurrentOpenRegStream(x.device().index()).stream();
  launch.fn = &relu2Kernel<T>;
  launch.args = &arguments;
  launch.args_size = sizeof arguments;
  // For the sanitizer; what is not there has no bytes.
  const size_t bytes = static_cast<size_t>(x.numel()) * sizeof(T);
  const std::array<orAccess, 3> accesses{{{arguments.x, bytes, 0},
                                          {arguments.grad, grad != nullptr ? bytes : 0, 0},
                                          {arguments.result, bytes, 1}}};
  launch.accesses = accesses.data();
  launch.access_count = accesses.size();
  launch.name = "relu2";
  OPENREG_CHECK(orLaunchKernelEx(&launch));
}

at::Tensor queue(const at::Tensor &x, const at::Tensor *grad) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
                   "relu2: expected float32 or float64, not ", x.scalar_type());
  const c10::DeviceGuard device(x.device());
  const at::Tensor dense = x.contiguous();
  const at::Tensor result = at::empty_like(dense);
  if (x.numel() == 0) return result;
  const auto run = x.scalar_type() == at::kDouble ? &launch<double> : &launch<float>;
  run(dense, grad, result);
  return result;
}

at::Tensor relu2(const at::Tensor &x) { return queue(x, nullptr); }

at::Tensor relu2Backward(const at::Tensor &grad, const at::Tensor &x) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() &&
                  grad.device() == x.device(),
              "relu2_backward: expected a gradient like x, of ", x.sizes(), ", ", x.scalar_type(),
              " on ", x.device(), ", not ", grad.sizes(), ", ", grad.scalar_type(), " on ",
              grad.device());
  const at::Tensor dense = grad.contiguous();
  return queue(x, &dense);
}

}  // namespace

TORCH_LIBRARY(custom_op, library) {
  library.def("relu2(Tensor x) -> Tensor");
  library.def("relu2_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(custom_op, PrivateUse1, library) {
  library.impl("relu2", &relu2);
  library.impl("relu2_backward", &relu2Backward);
}
