#include "graph_node.h"

#include <algorithm>
#include <string>

#include "../task/tensor_metadata.h"
#include "op_generator.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

/* The out= form of a structured operator, which its other form calls too. Only for pointwise
 * operators: others may take longer in this form, or resize their output first (mse_loss). */
std::optional<OperatorHandle> outForm(const OperatorHandle &op, const OperatorTask &task) {
  if (!task.traits.pointwise || task.results.size() != 1 || !hasInferringKernel(op)) return {};
  const auto &schema = op.schema();
  const std::string overload = schema.overload_name();
  for (const std::string &name : {overload + "_out", std::string("out")}) {
    const auto found = c10::Dispatcher::singleton().findOp({schema.name(), name});
    if (!found || found->schema().arguments().size() != schema.arguments().size() + 1) continue;
    if (std::equal(schema.arguments().begin(), schema.arguments().end(),
                   found->schema().arguments().begin(), isSameArgument))
      return found;
  }
  return {};
}

}  // namespace

GraphNode::GraphNode(OperatorTask &task) : arguments_(task), stack_(arguments_.stack()) {
  for (const KernelMemory &memory : task.memories) addresses_.push_back(memory.address());
  if (task.traits.draws) return;
  out_ = outForm(task.op, task);
  if (!out_) return;
  call_ = unboxedCall(*out_);
  const KernelMemory &result = task.results[0];
  result_ = result.address();
  for (const ResultSpec &made : task.spec->results) {
    if (made.argument >= 0) continue;
    stack_.push_back(tensorOf(cpuStorage(result_, result.bytes), DispatchKey::CPU, made.fresh[0]));
  }
}

bool GraphNode::fits(const OperatorTask &task) const {
  for (size_t i = 0; i < addresses_.size(); ++i) {
    if (task.memories[i].address() != addresses_[i]) return false;
  }
  return !out_ || task.results[0].address() == result_;
}

void GraphNode::run(const OperatorTask &task) {
  if (C10_UNLIKELY(task.late)) task.late.resolve(task.op.schema().name(), stack_);
  if (C10_LIKELY(call_ && task.inDefaultDtype.empty())) return call_(stack_);
  if (out_) {
    running_ = stack_;
    task.useDefaultDtype(running_);
    return out_->redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &running_);
  }
  Stack stack = stack_;
  if (task.traits.draws) {
    for (const IValue &value : stack) {
      if (value.isGenerator()) ReplayedGenerator::seedIfReplayed(value.toGenerator());
    }
  }
  task.useDefaultDtype(stack);
  c10::SmallVector<Reserved, 2> reserved = task.reserved();
  task.runKernel(stack, reserved);
  arguments_.checkWritten();
  if (task.spec != nullptr) task.place(stack, reserved);
}

}  // namespace torch_openreg
