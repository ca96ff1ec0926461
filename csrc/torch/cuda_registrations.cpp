/*
 * Replaces the dispatcher's registerImpl in the library that defines it: a kernel for one of CUDA's
 * keys is registered for the device's key as well. A kernel that the extension registers for the
 * device itself takes precedence. Registrations from Python pass through; _as_cuda/_library.py
 * handles them.
 *
 * `mutex` guards `places`. The dispatcher's own lock is not taken under it.
 */
#include "cuda_registrations.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "check.h"
#include "module.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using Handle = c10::RegistrationHandleRAII;
using Place = std::pair<std::string, DispatchKey>;  // an operator, and a key of the device

std::mutex mutex;
using Places = std::map<Place, std::shared_ptr<Handle>>;
/* The CUDA kernels that are registered for the device too. */
Places &places() { return leaked<Places>(); }
thread_local bool fromPython = false;

/* The device's key that corresponds to a key of CUDA's; Undefined for other keys. */
DispatchKey keyOfDevice(DispatchKey key) {
  constexpr std::string_view kCuda = "CUDA";
  std::string name = c10::toString(key);
  if (!name.ends_with(kCuda)) return DispatchKey::Undefined;
  return c10::parseDispatchKey(
      name.replace(name.size() - kCuda.size(), kCuda.size(), "PrivateUse1"));
}

/* Such a kernel uses at::autocast::cached_cast, which casts CUDA's tensors alone. */
void refuseAutocast(const c10::OperatorHandle &op, torch::jit::Stack *) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name(),
      ": its kernel for AutocastCUDA is in C++, where at::autocast::cached_cast does not cast this "
      "device's tensors. Register one for AutocastPrivateUse1, or one for AutocastCUDA from "
      "Python");
}

/* Returns the previous handle, which the caller destroys without the lock. */
std::shared_ptr<Handle> put(const Place &place, std::shared_ptr<Handle> kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (kernel == nullptr && places().count(place) == 0) return nullptr;
  return std::exchange(places()[place], std::move(kernel));
}

bool hasKernelOfItsOwn(const c10::OperatorName &name, DispatchKey key) {
  if (name.name.starts_with("aten::"))
    return false;  // the device's own kernel, which the program replaces
  const auto op = c10::Dispatcher::singleton().findOp(name);
  return op && op->hasKernelForDispatchKey(key);
}

Handle registerImpl(c10::Dispatcher *dispatcher, c10::OperatorName name,
                    std::optional<DispatchKey> key, c10::KernelFunction kernel,
                    std::optional<c10::impl::CppSignature> signature,
                    std::unique_ptr<c10::FunctionSchema> schema, std::string debug) {
  const DispatchKey ours = key && !fromPython ? keyOfDevice(*key) : DispatchKey::Undefined;
  const Place place{c10::toString(name), key.value_or(DispatchKey::Undefined)};
  put(place, nullptr);
  if (ours == DispatchKey::Undefined || hasKernelOfItsOwn(name, ours)) {
    return dispatcher->registerImpl(std::move(name), key, std::move(kernel), std::move(signature),
                                    std::move(schema), std::move(debug));
  }
  const bool casts = ours == DispatchKey::AutocastPrivateUse1;
  auto shared = std::make_shared<Handle>(dispatcher->registerImpl(
      name, ours, casts ? c10::KernelFunction::makeFromBoxedFunction<&refuseAutocast>() : kernel,
      casts ? std::nullopt : signature, nullptr, debug));
  const Place served{place.first, ours};
  put(served, shared);
  auto own = std::make_shared<Handle>(
      dispatcher->registerImpl(std::move(name), key, std::move(kernel), std::move(signature),
                               std::move(schema), std::move(debug)));
  return Handle([served, shared = std::weak_ptr<Handle>(shared), own]() mutable {
    if (shared.lock() != nullptr) put(served, nullptr);
    own.reset();
  });
}

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  m.def("_set_registering_from_python",
        [](bool registering) { return std::exchange(fromPython, registering); });
});

}  // namespace

void *replacementOfRegisterImpl() { return reinterpret_cast<void *>(&registerImpl); }

}  // namespace torch_openreg
