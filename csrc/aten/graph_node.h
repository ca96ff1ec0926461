/*
 * An operator as a node of a graph: what the first replay keeps for the next ones.
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
   * for memory that is gone. */
  bool fits(const OperatorTask &task) const;
  void run(const OperatorTask &task);

 private:
  KernelArguments arguments_;
  torch::jit::Stack stack_;
  c10::SmallVector<void *, 4> addresses_;
  torch::jit::Stack running_;  // keeps its room
  std::optional<c10::OperatorHandle> out_;
  CpuCall call_;  // of `out_`, with no copy of the arguments; or empty
  void *result_ = nullptr;
};

}  // namespace torch_openreg
