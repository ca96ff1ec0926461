/*
 * Operators with a kernel for the CPU alone, made of PyTorch's operators or with loops of their
 * own.
 */
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

at::Tensor square(const at::Tensor &x) { return x * x; }

std::tuple<at::Tensor, at::Tensor> sumAndProduct(const at::Tensor &x, const at::Tensor &y) {
  return {x + y, x * y};
}

std::vector<at::Tensor> powers(at::TensorList xs) {
  std::vector<at::Tensor> made;
  for (const at::Tensor &x : xs) made.push_back(x * x * x);
  return made;
}

void twice(at::Tensor x) { x.mul_(2); }

at::Tensor &exponential(at::Tensor &x) { return x.exp_(); }

void addTo(at::Tensor sum, const at::Tensor &x) { sum.add_(x); }

/* Writes the whole memory of which `x` is a part. */
void twiceAround(at::Tensor x) {
  x.as_strided({static_cast<int64_t>(x.storage().nbytes() / x.itemsize())}, {1}, 0).mul_(2);
}

/* Writes that PyTorch does not see. */
void twiceByLoop(at::Tensor x) {
  auto *data = static_cast<float *>(x.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) data[i] *= 2;
}

at::Tensor head(const at::Tensor &x) { return x.narrow(0, 0, 1); }

/* An operator with a kernel for autograd, which has no gradient. */
at::Tensor flat(const at::Tensor &x) { return x * x; }

at::Tensor flatBelowAutograd(const at::Tensor &x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("openreg_cpp::flat", "")
                             .typed<at::Tensor(const at::Tensor &)>();
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x);
}

/* Uses autograd for itself. */
at::Tensor slope(const at::Tensor &x) {
  const c10::AutoGradMode recorded(true);
  const at::Tensor leaf = x.detach().requires_grad_();
  (leaf * leaf).sum().backward();
  return leaf.grad();
}

std::optional<torch::Library> defined;

}  // namespace

/* aten::openreg_anew, of one tensor or of two. */
extern "C" void defineAnew(int pair) {
  defined.emplace(torch::Library::FRAGMENT, "aten", std::nullopt, __FILE__, __LINE__);
  defined->def(pair != 0 ? "openreg_anew(Tensor x, Tensor y) -> (Tensor, Tensor)"
                         : "openreg_anew(Tensor x) -> Tensor[]");
  if (pair != 0) {
    defined->impl("openreg_anew", torch::dispatch(c10::kCPU, &sumAndProduct));
  } else {
    defined->impl("openreg_anew", torch::dispatch(c10::kCPU, [](const at::Tensor &x) {
                    return std::vector<at::Tensor>{x * x};
                  }));
  }
}

extern "C" void undefine() { defined.reset(); }

TORCH_LIBRARY(openreg_cpp, library) {
  library.def("square(Tensor x) -> Tensor");
  library.def("sum_and_product(Tensor x, Tensor y) -> (Tensor, Tensor)");
  library.def("powers(Tensor[] xs) -> Tensor[]");
  library.def("twice_(Tensor(a!) x) -> ()");
  library.def("exp_(Tensor(a!) x) -> Tensor(a!)");
  library.def("add_to_(Tensor(a!) sum, Tensor x) -> ()");
  library.def("twice_by_loop_(Tensor(a!) x) -> ()");
  library.def("twice_unsaid(Tensor x) -> ()");
  library.def("twice_around_(Tensor(a!) x) -> ()");
  library.def("head(Tensor(a) x) -> Tensor(a)");
  library.def("flat(Tensor x) -> Tensor");
  library.def("slope(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(openreg_cpp, CPU, library) {
  library.impl("square", &square);
  library.impl("sum_and_product", &sumAndProduct);
  library.impl("powers", &powers);
  library.impl("twice_", &twice);
  library.impl("exp_", &exponential);
  library.impl("add_to_", &addTo);
  library.impl("twice_by_loop_", &twiceByLoop);
  library.impl("twice_unsaid", &twice);
  library.impl("twice_around_", &twiceAround);
  library.impl("head", &head);
  library.impl("flat", &flat);
  library.impl("slope", &slope);
}

TORCH_LIBRARY_IMPL(openreg_cpp, Autograd, library) { library.impl("flat", &flatBelowAutograd); }
