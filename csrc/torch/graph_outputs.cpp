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
  c10::Storage output; /* the first one of any call, which all calls write */
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

void report(orReportKind kind, const c10::StorageImpl *storage, const char *later,
            const SanitizerStack &stack) {
  reportFinding({.size = sizeof(orGraphFinding),
                 .kind = kind,
                 .begin = storage->data(),
                 .bytes = storage->nbytes(),
                 .stream = currentStreamHandle(storage->device().index()),
                 .earlier = "replay",
                 .later = later,
                 .stack = nullptr},
                stack);
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
    for (const at::Tensor &tensor : tensors)
      if (!calls_->output && tensor.is_privateuseone()) calls_->output = tensor.storage();
    std::vector<at::Tensor> made;
    for (const at::Tensor &tensor : tensors)
      made.push_back(tensor.is_privateuseone() && tensor.numel() != 0 ? outputOf(tensor, output)
                                                                      : tensor);
    return made;
  }

  /* The number of the latest call. */
  uint64_t count() const {
    std::lock_guard<std::mutex> lock(mutex);
    return calls_->count;
  }

  /* Reports the backward pass of a call that is not the latest. */
  void backward(uint64_t call) const {
    SanitizerStack stack;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (call == calls_->count || !calls_->output) return;
      stack = calls_->latest;
    }
    report(orReportOverwritten, calls_->output.unsafeGetStorageImpl(), "backward", stack);
  }

 private:
  std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<GraphOutputs>(m, "_GraphOutputs")
      .def(py::init<>())
      .def("add", &GraphOutputs::add)
      .def("backward", &GraphOutputs::backward)
      .def_property_readonly("count", &GraphOutputs::count);
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
  report(orReportOverwritten, storage, "read", stack);
}

}  // namespace torch_openreg
