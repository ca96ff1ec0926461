/*
 * Half of a task's work, for a schedule that runs other streams between the two halves
 * (openreg_schedule.h).
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <openreg_schedule.h>

namespace torch_openreg {

/* One half of each tensor, along the outermost dimension that can be divided. For a task that
 * computes each element from the elements at the same index in its other tensors. */
class TaskHalf {
 public:
  TaskHalf(orPart part, c10::IntArrayRef sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] < 2) continue;
      fromEnd_ = static_cast<int64_t>(sizes.size() - i);
      size_ = sizes[i];
      break;
    }
    const int64_t middle = size_ / 2;
    begin_ = part == orPartFirst ? 0 : middle;
    length_ = part == orPartFirst ? middle : size_ - middle;
  }

  bool isPossible() const { return fromEnd_ != 0; }
  at::Tensor of(const at::Tensor &whole) const {
    const int64_t dim = whole.dim() - fromEnd_;
    return dim < 0 || whole.size(dim) != size_ ? whole : whole.narrow(dim, begin_, length_);
  }

 private:
  int64_t fromEnd_ = 0, size_ = 0, begin_ = 0, length_ = 0;
};

}  // namespace torch_openreg
