/*
 * A node has a number among those that its thread has made, and it is made right before its
 * operator runs. So the first operator that finds the thread's count raised belongs to the newest
 * node. `forwards` is a ring indexed by that number, under `mutex`.
 */
#include <Python.h>

#include "backward.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <vector>

#include "backward_caller.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

constexpr size_t kForwards = 1 << 14;

struct Forward {
  uint64_t thread = 0, number = 0;
  PythonStack stack;
  const void *hook = nullptr;
};

std::mutex mutex;
std::vector<Forward> forwards;
thread_local uint64_t seen = 0;  // the thread's count

Forward forwardOf(uint64_t thread, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  if (forwards.empty()) return {};
  const Forward &kept = forwards[number % kForwards];
  return kept.thread == thread && kept.number == number ? kept : Forward();
}

/* Under torch.autograd.graph.saved_tensors_hooks a node packs what it saves before its operator
 * runs, so the first operator may be the hook's. */
const void *codeOfPackHook() {
  const auto &hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (C10_LIKELY(hooks.empty())) return nullptr;
  const c10::SafePyObject &pack = hooks.top().first;
  py::gil_scoped_acquire gil;
  auto hook = py::reinterpret_borrow<py::object>(pack.ptr(&pack.pyinterpreter()));
  while (py::hasattr(hook, "func")) hook = hook.attr("func");  // of functools.partial
  if (!py::hasattr(hook, "__code__")) hook = py::type::of(hook).attr("__call__");
  return py::getattr(hook, "__code__", py::none()).ptr();
}

/* A later node at the same address has another number. The exception are nodes without a number,
 * which all have one name, AccumulateGrad. */
struct Place {
  const void *node = nullptr;
  uint64_t thread = 0, number = 0;
  int task = -1;
  bool operator==(const Place &) const = default;
};

BackwardPart partAt(const Place &place, std::string name) {
  const size_t scope = name.rfind("::");
  if (scope != std::string::npos) name.erase(0, scope + 2);
  Forward forward = forwardOf(place.thread, place.number);
  return {std::move(name), std::move(forward.stack), backwardStack(), forward.hook};
}

}  // namespace

std::shared_ptr<const BackwardPart> currentBackward() {
  thread_local Place latest;
  thread_local std::weak_ptr<const BackwardPart> known;
  const auto node = torch::autograd::get_current_node();
  if (!node) return nullptr;
  const Place place{&*node, node->thread_id(), node->sequence_nr(),
                    torch::autograd::get_current_graph_task_id()};
  auto part = place == latest ? known.lock() : nullptr;
  if (part == nullptr) {
    part = std::make_shared<const BackwardPart>(partAt(place, node->name()));
    latest = place;
    known = part;
  }
  return part;
}

void noteForward(const PythonStack &stack) {
  const uint64_t count = at::sequence_number::peek();
  if (count == seen || count == 0) return;
  seen = count;
  Forward kept{at::RecordFunction::currentThreadId(), count - 1, stack, nullptr};
  if (stack) kept.hook = codeOfPackHook();
  std::lock_guard<std::mutex> lock(mutex);
  if (forwards.empty()) forwards.resize(kForwards);
  std::swap(forwards[(count - 1) % kForwards], kept);
}

void forgetForwards() {
  std::lock_guard<std::mutex> lock(mutex);
  forwards.clear();
}

}  // namespace torch_openreg
