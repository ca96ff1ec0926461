/*
 * For which operators and which kinds of tensors the fallback stands: those that have no
 * registration of their own.
 */
#include "registration.h"

#include <string>
#include <vector>

#include "fallback.h"
#include "op_traits.h"
#include "python_kernels.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using torch::jit::Stack;

void fallback(const OperatorHandle &op, Stack *stack) {
  registerOperators();  // it may make the first tensor of a program in C++
  runCpuKernel(op, stack);
}

/* A collective's kernel on the CPU returns before it has run: what it gets has to be the caller's
 * own tensors. */
bool isCollective(const OperatorHandle &op) {
  return op.operator_name().name.starts_with("c10d::");
}

/* The kernels of sparse, quantized and nested tensors, by the CPU's key for them. */
template <DispatchKey kernel>
void fallbackWithComponents(const OperatorHandle &op, Stack *stack) {
  registerOperators();
  // The group's backend takes or refuses them.
  if (isCollective(op)) {
    return op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::PrivateUse1), stack);
  }
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

/* What makes such a tensor of nothing, and may be the first call of a program in C++: it registers
 * the rest. */
const c10::OperatorName kMakers[] = {{"aten::empty", "memory_format"},
                                     {"aten::_sparse_coo_tensor_with_dims", ""},
                                     {"aten::_empty_affine_quantized", ""}};

/* A composite kernel would be reached before the fallback, and is left in its place. */
bool leadsToFallback(const OperatorHandle &op) {
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
         !op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

template <typename Visit>
void forEachAtenOperator(const Visit &visit) {
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    if (const auto op = dispatcher.findOp(name)) visit(name, *op);
  }
}

/* Structured operators have a kernel that infers their results: the fallback asks that only where
 * nothing is remembered. */
void registerPlain(torch::Library &library, const c10::OperatorName &name,
                   const OperatorHandle &op) {
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1)) return;
  if (hasPythonKernelAlone(op, DispatchKey::CPU)) return;  // a program's, which may define it anew
  if (leadsToFallback(op) && registerUnboxed(op)) return;
  if (isForeach(name.name) || hasInferringKernel(op)) {
    library.impl(unqualified(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

/* Where the CPU has a kernel of its own, a composite one would stand before the fallback. */
void registerForKind(torch::Library &library, const Kind &kind, const c10::OperatorName &name,
                     const OperatorHandle &op) {
  if (op.hasKernelForDispatchKey(kind.cpu) && !op.hasKernelForDispatchKey(kind.device) &&
      op.hasComputedKernelForDispatchKey(kind.device)) {
    library.impl(unqualified(name).c_str(), kind.kernel());
  }
}

}  // namespace

void registerMakers() {
  for (const Kind &kind : kKinds) {
    for (const c10::OperatorName &name : kMakers) {
      const OperatorHandle op = c10::Dispatcher::singleton().findOp(name).value();
      if (op.hasKernelForDispatchKey(kind.cpu)) {
        libraryOf("aten", kind.device).impl(unqualified(name).c_str(), kind.kernel());
      }
    }
  }
}

void registerOperators() {
  [[maybe_unused]] static const bool done = [] {
    torch::Library &plain = libraryOf("aten", DispatchKey::PrivateUse1);
    std::vector<torch::Library *> libraries;
    for (const Kind &kind : kKinds) libraries.push_back(&libraryOf("aten", kind.device));
    forEachAtenOperator([&](const c10::OperatorName &name, const OperatorHandle &op) {
      registerPlain(plain, name, op);
      for (size_t i = 0; i < libraries.size(); ++i) {
        registerForKind(*libraries[i], kKinds[i], name, op);
      }
    });
    for (const Kind &kind : kKinds) libraryOf("_", kind.device).fallback(kind.kernel());
    registerAutocast();
    return true;
  }();
}

}  // namespace torch_openreg

OPENREG_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&torch_openreg::fallback>());
}
