/*
 * OPENREG_LIBRARY_IMPL: a TORCH_LIBRARY_IMPL whose registrations are never removed. PyTorch removes
 * those of a TORCH_LIBRARY_IMPL at exit, operator by operator, which takes as long as the
 * registration.
 */
#pragma once

#include <torch/library.h>

#include <initializer_list>

namespace torch_openreg {

/* A library that is never destroyed. torch._C._dispatch_dump shows `file` and `line`, the
 * caller's. */
inline torch::Library &libraryOf(const char *name, c10::DispatchKey key,
                                 const char *file = __builtin_FILE(),
                                 uint32_t line = __builtin_LINE()) {
  return *new torch::Library(torch::Library::IMPL, name, key, file, line);
}

template <void (*kernel)(const c10::OperatorHandle &, torch::jit::Stack *)>
void implBoxed(torch::Library &library, std::initializer_list<const char *> names) {
  for (const char *name : names)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<kernel>());
}

}  // namespace torch_openreg

#define OPENREG_LIBRARY_IMPL(name, key, m) OPENREG_LIBRARY_IMPL_(name, key, m, C10_UID)
#define OPENREG_LIBRARY_IMPL_(name, key, m, number)                                     \
  static void C10_CONCATENATE(openregImpl, number)(torch::Library &);                   \
  [[maybe_unused]] static const bool C10_CONCATENATE(openregDone, number) =             \
      (C10_CONCATENATE(openregImpl,                                                     \
                       number)(torch_openreg::libraryOf(#name, c10::DispatchKey::key)), \
       true);                                                                           \
  static void C10_CONCATENATE(openregImpl, number)(torch::Library & m)

#define OPENREG_FALL_THROUGH(key, name) \
  OPENREG_LIBRARY_IMPL(aten, key, m) { m.impl(name, torch::CppFunction::makeFallthrough()); }
