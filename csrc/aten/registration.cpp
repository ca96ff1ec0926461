/*
 * For which operators and which kinds of tensors the fallback stands: those that have no registration of their own.
 */
#include "registration.h"

#include <string>
#include <vector>

#include "fallback.h"
#include "op_traits.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using torch::jit::Stack;

void fallback(const OperatorHandle &op, Stack *stack) { runCpuKernel(op, stack); }

/* The kernels of sparse, quantized and nested tensors, by the CPU's key for them. */
template <DispatchKey kernel>
void fallbackWithComponents(const OperatorHandle &op, Stack *stack) {
  runCpuKernelWithComponents(op, stack, kernel);
}

/* Without its namespace. */
std::string unqualified(const c10::OperatorName &name) {
  const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
  return name.name.substr(name.name.find("::") + 2) + overload;
}

/* Where a kind of tensor is dispatched to, and to which kernels of the CPU that leads. */
struct Kind {
  DispatchKey device, cpu;
  torch::CppFunction (*kernel)();
};

template <DispatchKey device, DispatchKey cpu>
constexpr Kind kindOf() {
  return {device, cpu,
          [] { return torch::CppFunction::makeFromBoxedFunction<&fallbackWithComponents<cpu>>(); }};
}

constexpr Kind kKinds[] = {
    kindOf<DispatchKey::SparsePrivateUse1, DispatchKey::SparseCPU>(),
    kindOf<DispatchKey::SparseCsrPrivateUse1, DispatchKey::SparseCsrCPU>(),
    kindOf<DispatchKey::QuantizedPrivateUse1, DispatchKey::QuantizedCPU>(),
    kindOf<DispatchKey::NestedTensorPrivateUse1, DispatchKey::NestedTensorCPU>(),
};

/* A composite kernel would be reached before the fallback, and is left in its place. */
bool leadsToFallback(const OperatorHandle &op) {
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

void registerOperators() {
  torch::Library &plain = libraryOf("aten", DispatchKey::PrivateUse1);
  std::vector<torch::Library *> libraries;
  for (const Kind &kind : kKinds) libraries.push_back(&libraryOf("aten", kind.device));
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!name.name.starts_with("aten::") || !op.has_value()) continue;
    const bool ours = op->hasKernelForDispatchKey(DispatchKey::PrivateUse1);
    const bool unboxed = !ours && leadsToFallback(*op) && registerUnboxed(*op);
    if (!ours && !unboxed && (isForeach(name.name) || hasInferringKernel(*op))) {
      plain.impl(unqualified(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
    // Where the CPU has a kernel of its own, a composite one would stand before the fallback.
    for (size_t i = 0; i < libraries.size(); ++i) {
      const Kind &kind = kKinds[i];
      if (op->hasKernelForDispatchKey(kind.cpu) && !op->hasKernelForDispatchKey(kind.device) &&
          op->hasComputedKernelForDispatchKey(kind.device)) {
        libraries[i]->impl(unqualified(name).c_str(), kind.kernel());
      }
    }
  }
  for (const Kind &kind : kKinds) libraryOf("_", kind.device).fallback(kind.kernel());
}

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&torch_openreg::fallback>());
}
