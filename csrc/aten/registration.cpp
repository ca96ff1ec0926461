/*
 * Registers the fallback for the operators and kinds of tensors that have no registration of their
 * own.
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
  registerOperators();  // this call may make the first tensor of a C++ program
  runCpuKernel(op, stack);
}

/* The CPU kernel of a collective returns before the collective has run, so it needs the caller's
 * own tensors. */
bool isCollective(const OperatorHandle &op) {
  return op.operator_name().name.starts_with("c10d::");
}

/* The fallback for sparse, quantized and nested tensors. `kernel` is the CPU's key for them. */
template <DispatchKey kernel>
void fallbackWithComponents(const OperatorHandle &op, Stack *stack) {
  registerOperators();
  // The group's backend takes or refuses them.
  if (isCollective(op)) {
    return op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::PrivateUse1), stack);
  }
  runCpuKernelWithComponents(op, stack, kernel);
}

/* The name without its namespace. */
std::string unqualified(const c10::OperatorName &name) {
  const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
  return name.name.substr(name.name.find("::") + 2) + overload;
}

/* The dispatch keys of a kind of tensor on the device and on the CPU, and the fallback for it. */
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

/* Operators that make such a tensor from no other. One of them may be the first call of a C++
 * program, and then registers the rest. */
const c10::OperatorName kMakers[] = {{"aten::empty", "memory_format"},
                                     {"aten::_sparse_coo_tensor_with_dims", ""},
                                     {"aten::_empty_affine_quantized", ""}};

/* Whether the dispatcher finds the fallback. It would find a composite kernel first, which
 * stays. */
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

/* Foreach and structured operators get the fallback itself. It calls the kernel that infers a
 * structured operator's results only if they are not in the output cache. */
void registerPlain(torch::Library &library, const c10::OperatorName &name,
                   const OperatorHandle &op) {
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1)) return;
  if (hasPythonKernelAlone(op, DispatchKey::CPU)) return;  // the program may define another one
  if (leadsToFallback(op) && registerUnboxed(op)) return;
  if (isForeach(name.name) || hasInferringKernel(op)) {
    library.impl(unqualified(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

/* Registers the fallback where the CPU has a kernel of its own, because the dispatcher would find a
 * composite one first. */
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
