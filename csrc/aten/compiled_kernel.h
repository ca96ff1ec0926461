/*
 * A compiled CPU kernel as a task of a stream, for whoever generates such kernels.
 *
 * A task holds addresses and numbers by value, and the entry of the kernel, which is never
 * unloaded. It holds no device tensor: the order of the stream alone keeps memory alive, as for
 * every operator.
 */
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "../task/host_copies.h"
#include "../task/kernel_memory.h"
#include "../task/task.h"
#include "../torch/device.h"
#include "../torch/stacks.h"

namespace torch_openreg {

/* The function that is generated beside a kernel to call it: the addresses of its pointers, and the
 * bits of its numbers, each in their order. Behind the pointers are as many addresses as the
 * program has them, and then a FollowPointer. */
using KernelEntry = void (*)(void *const *pointers, const int64_t *numbers);

/* The address for kernels of a pointer that a kernel has read from memory; null stays null. Only on
 * the thread that runs the task. Throws for an address that is no device's; `place` names the line
 * of the kernel. */
using FollowPointer = void *(*)(void *pointer, const char *place);

/* The memory of a tensor, or the value of a CPU tensor without dimensions. */
struct KernelArgument {
  bool isValue = false;
  KernelMemory memory;
  size_t offset = 0;
  alignas(16) std::array<char, 16> value{};
};

struct CompiledTask final : Task {
  CompiledTask(const char *kernelName, c10::Device on, KernelEntry function)
      : Task(kernelName, on), entry(function) {}
  void run() override;

  const KernelEntry entry;
  c10::SmallVector<KernelArgument, 8> arguments;
  c10::SmallVector<int64_t, 8> numbers;
  // Of the memory of a device without `map`. The task owns them, too: the wait for it may end
  // before it does, as the device may be lost.
  std::shared_ptr<HostCopies> copies;
  PythonStack stack;  // of the call, for the kernel's error
};

/* A call of a kernel. It borrows its tensors. */
class CompiledCall {
 public:
  CompiledCall(const char *name, c10::Device device, KernelEntry entry)
      : task_(std::make_unique<CompiledTask>(name, device, entry)) {}

  /* `role`: r, w or b for a tensor that the kernel reads, writes or both. */
  void add(const at::Tensor &tensor, char role);
  /* The same for a tensor in pinned memory of the host. */
  void addPinned(const at::Tensor &tensor, char role);
  void add(int64_t number) { task_->numbers.push_back(number); }
  /* Keeps the line of the call for the kernel's error. */
  void keepStack() { task_->stack = gatherStack(); }

  /* Waits for the stream and copies the tensors' memory to the host, if the device has no `map`.
   * To the sanitizer neither these copies nor those of the results are accesses of the program, or
   * waits: a report of the call says what the kernel touches. To be called once, after all
   * arguments. */
  void fetch(orStream_t stream);
  /* The host's copy of a storage; null: there is none. */
  const char *hostCopy(const void *storage) const;
  /* Reports the whole tensors to the sanitizer. Throws what raiseRaces throws. */
  void report(orStream_t stream) const;
  /* Queues the kernel, and waits for it if the device has no `map`. Runs it if it is the CPU's. The
   * kernel uses no more than `threads` threads. */
  void launch(orStream_t stream, int threads) &&;

  c10::Device device() const { return task_->device; }
  const CompiledTask &task() const { return *task_; }
  const at::Tensor &tensor(size_t i) const { return *tensors_[i].tensor; }
  char role(size_t i) const { return tensors_[i].role; }
  size_t count() const { return tensors_.size(); }

 private:
  struct Used {
    const at::Tensor *tensor;
    char role;
  };
  /* A task reaches pinned memory. */
  bool needsCopy(size_t i) const {
    return task_->arguments[i].memory.isOnDevice() && !tensor(i).is_cpu();
  }
  /* Queues the kernel on the copies, and waits until the results are copied back. */
  void launchOnCopies(orStream_t stream, unsigned flags);

  std::unique_ptr<CompiledTask> task_;
  c10::SmallVector<Used, 8> tensors_;  // of the task's arguments
  std::optional<StreamTurn> turn_;     // while there are copies
};

/* Keeps the name of a task as long as the process runs. Called under the GIL. */
const char *keptName(const std::string &name);
/* The bits of a number: n is an integer, f a float. Throws Python's error. */
int64_t numberOf(PyObject *object, char role);

}  // namespace torch_openreg
