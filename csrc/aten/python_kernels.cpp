/*
 * While a thread computes for a device, calls the kernel that one from Python has replaced.
 *
 * torch_openreg/_patches/python_kernels.py reports each kernel from Python. If that replaces a
 * kernel, a Cover is registered above both. It calls the replaced kernel if the thread computes for
 * a device, and Python's otherwise. Operators whose kernels are not replaced have no Cover.
 *
 * `mutex` guards `reported()`. Covers are made and destroyed with the GIL.
 */
#include "python_kernels.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "../torch/fork.h"
#include "../torch/gil.h"
#include "../torch/module.h"
#include "../torch/warnings.h"
#include "../task/worker_state.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using Kernel = std::shared_ptr<const c10::SafeKernelFunction>;

/* An operator and a key for which kernels of Python are registered. */
using Place = std::pair<std::string, DispatchKey>;
struct Reported {
  Kernel replaced;  // by the first kernel from Python; null if there was none
  int count = 0;
};

std::mutex mutex;
std::map<Place, Reported> &reported() {
  static auto *instance = new std::map<Place, Reported>();
  return *instance;
}
std::atomic<bool> anyReported{false};

Kernel kernelOf(const OperatorHandle &op, DispatchKey key) {
  if (!op.hasSchema() || !op.hasComputedKernelForDispatchKey(key)) return nullptr;
  return std::make_shared<const c10::SafeKernelFunction>(op.getComputedKernelForDispatchKey(key));
}

class Cover final : public c10::OperatorKernel {
 public:
  Cover(Kernel python, Kernel replaced)
      : python_(std::move(python)), replaced_(std::move(replaced)) {}

  void operator()(const OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    const Kernel &kernel = computesForDevice() ? replaced_ : python_;
    TORCH_CHECK_NOT_IMPLEMENTED(kernel != nullptr, "Could not run ", op.operator_name(),
                                " for a device: its kernel for the CPU was replaced by one in "
                                "Python before torch_openreg was imported");
    kernel->callBoxed(op, keys, stack);
  }

 private:
  const Kernel python_, replaced_;
};

/* A kernel that a program registers from Python. */
class PythonKernel {
 public:
  PythonKernel(const std::string &name, const std::string &key)
      : name_(torch::jit::parseName(name)), place_(name, c10::parseDispatchKey(key)) {}

  /* Called before the kernel is registered, and before it is removed. No kernel of a device runs
   * from then on until `resume`. */
  void pause() {
    findReplaced();
    WithoutGil unlocked;
    pauseKernels();
  }
  void resume() { resumeKernels(); }

  /* `early`: it was registered before this module was loaded, so the kernel that it replaced cannot
   * be found. */
  void registered(bool early) {
    const auto op = c10::Dispatcher::singleton().findOp(name_).value();
    if (replaced_ != nullptr || early) registerCover(kernelOf(op, place_.second));
    const std::lock_guard<std::mutex> lock(mutex);
    Reported &entry = reported()[place_];
    entry.replaced = replaced_;
    ++entry.count;
    anyReported.store(true, std::memory_order_release);
  }

  void gone() {
    cover_.reset();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto entry = reported().find(place_);
    if (--entry->second.count == 0) reported().erase(entry);
    anyReported.store(!reported().empty(), std::memory_order_release);
  }

 private:
  void findReplaced() {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = reported().find(place_);
    if (known != reported().end()) {
      replaced_ = known->second.replaced;
    } else if (const auto op = c10::Dispatcher::singleton().findOp(name_)) {
      replaced_ = kernelOf(*op, place_.second);
    }
  }
  void registerCover(Kernel python) {
    const Silence itIsNoKernelOfTheProgram;  // PyTorch warns of one that replaces another
    auto kernel = std::make_unique<Cover>(std::move(python), replaced_);
    cover_.emplace(c10::Dispatcher::singleton().registerImpl(
        name_, place_.second, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
        std::nullopt, nullptr, "registered in csrc/aten/python_kernels.cpp"));
  }

  const c10::OperatorName name_;
  const Place place_;
  Kernel replaced_;
  std::optional<c10::RegistrationHandleRAII> cover_;
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<PythonKernel>(m, "_PythonKernel")
      .def(py::init<const std::string &, const std::string &>(), py::arg("name"), py::arg("key"))
      .def("pause", &PythonKernel::pause)
      .def("resume", &PythonKernel::resume)
      .def("registered", &PythonKernel::registered, py::arg("early") = false)
      .def("gone", &PythonKernel::gone);
});

}  // namespace

bool hasPythonKernelAlone(const OperatorHandle &op, DispatchKey key) {
  if (C10_LIKELY(!anyReported.load(std::memory_order_acquire))) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = reported().find({c10::toString(op.operator_name()), key});
  return found != reported().end() && found->second.replaced == nullptr;
}

}  // namespace torch_openreg
