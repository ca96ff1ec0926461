/*
 * Runs an operator as a node of a graph. The first replay keeps the kernel's arguments for later
 * ones.
 */
#pragma once

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "fallback.h"
#include "operator_task.h"

namespace torch_openreg {

/* The arguments of a task's kernel, over the same memory at each replay. Belongs to the task, whose
 * replays run one after the other. */
class GraphNode {
 public:
  explicit GraphNode(OperatorTask &task);

  /* Whether the task's memory is at the addresses of the first replay. Throws what a worker throws
   * for memory that no longer exists. */
  bool fits(const OperatorTask &task) const;
  void run(const OperatorTask &task);

 private:
  KernelArguments arguments_;
  torch::jit::Stack stack_;
  c10::SmallVector<void *, 4> addresses_;
  torch::jit::Stack running_;  // kept to reuse its memory
  std::optional<c10::OperatorHandle> out_;
  CpuCall call_;  // calls `out_` without a copy of the arguments; may be empty
  void *result_ = nullptr;
};

}  // namespace torch_openreg
