/*
 * Queues an operator as a task for which no thread waits.
 *
 * An OperatorTask carries everything by value: addresses, sizes, numbers. It holds no device tensor
 * and no storage (kernel_memory.h).
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <openreg.h>
#include <openreg_schedule.h>

#include <array>
#include <memory>

#include "../task/cpu_alias.h"
#include "../task/cpu_memory.h"
#include "../task/kernel_memory.h"
#include "../task/task.h"
#include "../torch/stacks.h"
#include "index_accesses.h"
#include "op_traits.h"
#include "output_cache.h"

namespace torch_openreg {

using Results = c10::SmallVector<c10::IValue, 4>;

/* Queues the CPU kernel of `op` on `stream`, and makes the results that `spec` promises. `key`
 * describes the arguments; it is made anew if an output is resized. `name` is the operator that the
 * program called. `warned`: the call's warnings were issued already. If the kernel fails, or makes
 * something other than promised, the next call that synchronises raises the error, with its
 * type. */
void queueOperator(const c10::OperatorHandle &op, const OpTraits &traits, const char *name,
                   CallKey &key, std::shared_ptr<const OutputSpec> spec, c10::Device device,
                   orStream_t stream, c10::ArrayRef<c10::IValue> arguments, Results &results,
                   bool warned = false);

/* The number of tasks that have memory, in use or kept. For tests. */
size_t taskBlocks();

class GraphNode;

struct OperatorTask final : Task {
  using Stack = torch::jit::Stack;
  using Storages = PairList<c10::StorageImpl, size_t>;  // position in `memories`

  /* Where a device tensor begins. */
  struct Place {
    size_t memory;  // position in `memories`
    int64_t offset;
  };
  /* The value of a 0-dim CPU tensor, of any dtype. */
  struct Number {
    alignas(16) std::array<char, 16> bytes;
  };

  OperatorTask(const c10::OperatorHandle &handle, const OpTraits &operatorTraits,
               const char *called, const CallKey &metadata, c10::Device on)
      : Task(called, on), op(handle), traits(operatorTraits), key(metadata) {}
  static void *operator new(size_t bytes);
  static void operator delete(OperatorTask *task, std::destroying_delete_t);

  void add(const c10::IValue &value, Storages &known);
  at::Tensor makeResult(const KeptMetadata &metadata, orStream_t stream);
  void run() override;

  c10::OperatorHandle op;
  const OpTraits &traits;
  CallKey key;  // describes its tensors
  // The promised results; null if none is fresh.
  std::shared_ptr<const OutputSpec> spec;
  c10::ScalarType defaultDtype = c10::get_default_dtype_as_scalartype();
  // In the order of the arguments.
  c10::SmallVector<Place, 4> places;        // device tensors
  c10::SmallVector<Number, 2> numbers;      // 0-dim CPU tensors; there are no others
  c10::SmallVector<c10::IValue, 4> others;  // all other arguments
  c10::SmallVector<KernelMemory, 4> memories;
  c10::SmallVector<KernelMemory, 2> results;
  int64_t largest = 0;  // elements of a tensor
  bool isNode = false;  // a graph's node, which runs at each replay
  InDefaultDtype inDefaultDtype;

 private:
  friend class GraphNode;
  void addTensor(const at::Tensor &tensor, Storages &known);
  size_t addMemory(c10::StorageImpl *storage, Storages &known);
  void place(Stack &stack, c10::ArrayRef<Reserved> reserved) const;
  bool canSplit() const {
    return (traits.pointwise || traits.elementwise) && !traits.draws && largest > 1;
  }
  bool runHalf(orPart part, Stack &stack, c10::ArrayRef<Reserved> reserved) const;
  void runWhole();
  void runAsNode();
  void useDefaultDtype(Stack &stack) const;
  c10::SmallVector<Reserved, 2> reserved() const;
  void runKernel(Stack &stack, c10::SmallVectorImpl<Reserved> &reserved) const;

  std::shared_ptr<GraphNode> node_;  // made by the first replay

 public:
  PythonStack stack;  // of the call, where the kernel may refuse values
  LateAccess late;    // of the first argument, while the sanitizer is on
};

/* Makes the kernel's arguments from the key and the task's lists, which are read side by side. Used
 * inside the task. */
class KernelArguments {
 public:
  explicit KernelArguments(OperatorTask &task);
  torch::jit::Stack stack();
  /* Throws if the kernel has changed the metadata of a tensor that it writes in place or as out=.
   */
  void checkWritten() const;

 private:
  struct Written {
    at::Tensor tensor;
    TensorMetadata promised;
  };
  c10::IValue next(bool written);
  at::Tensor tensor();
  at::Tensor item();

  OperatorTask &task_;
  KeyReader reader_;
  size_t places_ = 0, numbers_ = 0, others_ = 0;
  bool writing_ = false;
  c10::SmallVector<c10::Storage, 4> storages_;
  c10::SmallVector<Written, 2> written_;
};

}  // namespace torch_openreg
