/*
 * The types of the tensors whose accesses this thread has reported last. The core knows bytes
 * alone; a report of a race also has the type of what the later access touched.
 */
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <optional>

namespace torch_openreg {

class TouchedTypes {
 public:
  void add(const void *data, c10::ScalarType type) { latest_[next_++ % kCount] = {data, type}; }

  /* Of the newest tensor that began there. */
  std::optional<c10::ScalarType> at(const void *data) const {
    for (size_t i = 1; i <= kCount; ++i) {
      const Touched &touched = latest_[(next_ - i) % kCount];
      if (touched.data != nullptr && touched.data == data) return touched.type;
    }
    return std::nullopt;
  }

 private:
  static constexpr size_t kCount = 32;
  struct Touched {
    const void *data = nullptr;
    c10::ScalarType type{};
  };
  std::array<Touched, kCount> latest_{};
  size_t next_ = 0;
};

inline thread_local TouchedTypes touchedTypes;

}  // namespace torch_openreg
