/*
 * `outputs`, under `mutex`, has each storage that is alive; its Owner keeps the graph's own. A
 * storage may be released on any thread. Nothing is called with the mutex held.
 */
#include "graph_outputs.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "device.h"
#include "module.h"
#include "sanitizer.h"
#include "stream.h"

namespace py = pybind11;

namespace torch_openreg {

std::atomic<int> graphOutputs{0};

namespace {

/* The calls of one graphed callable. */
struct Calls {
  uint64_t count = 0;
  SanitizerStack latest;
};

struct Output {
  std::shared_ptr<Calls> calls;
  uint64_t call = 0;
};

std::mutex mutex;
std::unordered_map<const c10::StorageImpl *, Output> &outputs() {
  return leaked<std::unordered_map<const c10::StorageImpl *, Output>>();
}

struct Owner {
  c10::Storage whole;
  const c10::StorageImpl *part = nullptr;
};

void release(void *context) {
  const std::unique_ptr<Owner> owner(static_cast<Owner *>(context));
  std::lock_guard<std::mutex> lock(mutex);
  graphOutputs.fetch_sub(static_cast<int>(outputs().erase(owner->part)), std::memory_order_relaxed);
}

at::Tensor outputOf(const at::Tensor &tensor, const Output &output) {
  const c10::Storage whole = tensor.storage();
  auto owner = std::make_unique<Owner>(Owner{whole, nullptr});
  c10::DataPtr data(whole.mutable_data(), owner.get(), &release, whole.device());
  c10::Storage part(c10::Storage::use_byte_size_t(), whole.nbytes(), std::move(data));
  owner->part = part.unsafeGetStorageImpl();
  owner.release();
  {
    std::lock_guard<std::mutex> lock(mutex);
    outputs()[part.unsafeGetStorageImpl()] = output;
    graphOutputs.fetch_add(1, std::memory_order_relaxed);
  }
  return at::empty({0}, tensor.options())
      .set_(std::move(part), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

/* A graphed callable's. */
class GraphOutputs {
 public:
  /* The tensors of a new call, which has just written them. */
  std::vector<at::Tensor> add(const std::vector<at::Tensor> &tensors) {
    Output output{calls_, 0};
    SanitizerStack stack = captureStack();
    {
      std::lock_guard<std::mutex> lock(mutex);
      output.call = ++calls_->count;
      std::swap(calls_->latest, stack);
    }
    std::vector<at::Tensor> made;
    for (const at::Tensor &tensor : tensors)
      made.push_back(tensor.is_privateuseone() && tensor.numel() != 0 ? outputOf(tensor, output)
                                                                      : tensor);
    return made;
  }

 private:
  std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<GraphOutputs>(m, "_GraphOutputs").def(py::init<>()).def("add", &GraphOutputs::add);
});

}  // namespace

void noteOutputRead(const c10::StorageImpl *storage) {
  SanitizerStack stack;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = outputs().find(storage);
    if (found == outputs().end() || found->second.call == found->second.calls->count) return;
    stack = found->second.calls->latest;
  }
  reportFinding({.kind = orReportOverwritten,
                 .begin = storage->data(),
                 .bytes = storage->nbytes(),
                 .stream = currentStreamHandle(storage->device().index()),
                 .earlier = "replay",
                 .later = "read",
                 .stack = nullptr},
                stack);
}

}  // namespace torch_openreg
