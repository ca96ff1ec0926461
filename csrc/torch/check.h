/*
 * Turns an error of the core into an exception of C++, which becomes one of Python.
 *
 *   orErrorMemoryAllocation   c10::OutOfMemoryError    torch.OutOfMemoryError
 *   orErrorNotSupported       c10::NotImplementedError NotImplementedError
 *   orErrorDeviceLost         c10::AcceleratorError    torch.AcceleratorError, with that code
 *   every other               c10::Error               RuntimeError
 *
 * The text is the error's name and the core's detail, which gives the value and what was allowed.
 */
#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <openreg.h>

#define OPENREG_EXPORT __attribute__((visibility("default")))

namespace torch_openreg {

/* Throws the exception for the calling thread's last error. If a kernel failed, it is the exception
 * that the kernel threw. */
[[noreturn]] OPENREG_EXPORT void throwError(orError_t error, c10::SourceLocation location);

/* The words that programs search for in the message, with the device's name in place of CUDA. */
std::string outOfMemory();

/* The base of a class whose objects are not copied. */
struct Uncopyable {
  Uncopyable() = default;
  Uncopyable(const Uncopyable &) = delete;
  Uncopyable &operator=(const Uncopyable &) = delete;
};

/* The one object of a type. It is never destroyed: it may be used while the process exits. */
template <typename T>
T &leaked() {
  static auto *const object = new T();
  return *object;
}

inline void check(orError_t error, c10::SourceLocation location) {
  if (C10_UNLIKELY(error != orSuccess)) throwError(error, location);
}

/* A structure of the core with its size filled in. */
template <typename T>
T sized() {
  T empty{};
  if constexpr (requires { empty.struct_size; })
    empty.struct_size = sizeof(T);
  else
    empty.size = sizeof(T);
  return empty;
}

}  // namespace torch_openreg

#define OPENREG_CHECK(call) \
  ::torch_openreg::check((call), {__func__, __FILE__, static_cast<uint32_t>(__LINE__)})
