/*
 * Runs the CPU kernels of torch.compile's generated code as tasks of a stream, and allocates the
 * memory that they write.
 *
 * A CompiledKernel belongs to Python. A task holds addresses and numbers by value, and the entry of
 * the kernel, which is never unloaded. It holds no tensor: the order of the stream alone keeps
 * memory alive, as for every operator. On a device whose memory kernels cannot reach, the kernel
 * runs at once on copies in host memory, as operators do there.
 */
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../torch/check.h"
#include "../torch/device.h"
#include "../torch/module.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../task/kernel_memory.h"
#include "../task/task.h"
#include "../task/tensor_accesses.h"
#include "../task/tensor_metadata.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

/* The function that torch_openreg/_compile/kernels.py generates beside a kernel to call it. */
using Entry = void (*)(void *const *pointers, const int64_t *numbers);

/* Keeps the name of a task as long as the process runs. Called under the GIL. */
const char *kept(const std::string &name) {
  static auto *names = new std::unordered_set<std::string>;
  return names->insert(name).first->c_str();
}

/* The memory of a tensor, or the value of a CPU tensor without dimensions. */
struct Argument {
  bool isValue = false;
  KernelMemory memory;
  size_t offset = 0;
  alignas(16) std::array<char, 16> value{};
};

struct CompiledTask final : Task {
  CompiledTask(const char *kernelName, c10::Device on, Entry function)
      : Task(kernelName, on), entry(function) {}

  void run() override {
    c10::SmallVector<void *, 8> pointers;
    for (Argument &argument : arguments) {
      void *address = argument.isValue ? argument.value.data() : argument.memory.address();
      pointers.push_back(static_cast<char *>(address) + argument.offset);
    }
    entry(pointers.data(), numbers.data());
  }

  const Entry entry;
  c10::SmallVector<Argument, 8> arguments;
  c10::SmallVector<int64_t, 4> numbers;
};

/* A storage of a device without `map`, its copy on the host, and the tensors in it that the kernel
 * writes. Nothing else is copied back, because another stream may use it. */
struct Copied {
  at::Tensor bytes, host;
  std::vector<at::Tensor> written;
};

class CompiledKernel {
 public:
  /* `roles` has a letter for each argument. r, w and b are tensors that the kernel reads, writes or
   * both; n is an integer, f a float. The kernel has room for the results of `threads` threads;
   * with 1 it does not divide its work. */
  CompiledKernel(size_t entry, const std::string &name, std::string roles, int threads)
      : entry_(reinterpret_cast<Entry>(entry)),
        name_(kept(name)),
        roles_(std::move(roles)),
        threads_(threads) {
    TORCH_CHECK_VALUE(roles_.find_first_not_of("rwbnf") == std::string::npos, name,
                      ": the roles of arguments are r, w, b, n and f, got '", roles_, "'");
  }

  /* Queues the kernel on the current stream of its tensors' device, and returns. If all tensors are
   * the CPU's, or the device has no `map`, runs the kernel. */
  void operator()(const py::args &given) const;

 private:
  c10::Device deviceOf(const py::args &given) const;
  void report(orStream_t stream, const py::args &given) const;
  std::unordered_map<void *, Copied> storagesOf(const CompiledTask &task,
                                                const py::args &given) const;
  bool isNumber(size_t i) const { return roles_[i] == 'n' || roles_[i] == 'f'; }
  const at::Tensor &tensorAt(const py::args &given, size_t i) const {
    PyObject *object = PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    TORCH_CHECK_TYPE(THPVariable_Check(object), name_, ": argument ", i, " has to be a tensor");
    return THPVariable_Unpack(object);
  }

  const Entry entry_;
  const char *const name_;
  const std::string roles_;
  const int threads_;
};

c10::Device CompiledKernel::deviceOf(const py::args &given) const {
  TORCH_CHECK_TYPE(given.size() == roles_.size(), name_, " takes ", roles_.size(),
                   " arguments, got ", given.size());
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (!isNumber(i) && tensorAt(given, i).is_privateuseone()) return tensorAt(given, i).device();
  }
  return c10::Device(c10::DeviceType::CPU);
}

/* The bits of a number. */
int64_t numberOf(PyObject *object, char role) {
  int64_t number = 0;
  if (role == 'n') {
    number = PyLong_AsLongLong(object);
  } else {
    const double real = PyFloat_AsDouble(object);
    std::memcpy(&number, &real, sizeof number);
  }
  if (PyErr_Occurred() != nullptr) throw python_error();
  return number;
}

Argument argumentOf(const at::Tensor &tensor, c10::Device device, const char *name) {
  Argument argument;
  if (device.is_cpu()) {
    TORCH_CHECK_VALUE(tensor.is_cpu(), name, " runs on the CPU, where it cannot read a tensor of ",
                      tensor.device());
    argument.memory = KernelMemory::ofHost(tensor.data_ptr());
    return argument;
  }
  if (tensor.device() == device) {
    checkFitsStorage(tensor, name);
    argument.memory = KernelMemory(*tensor.storage().unsafeGetStorageImpl());
    argument.offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    return argument;
  }
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.dim() == 0, name, " runs on ", device,
                    ", where it cannot read a tensor of ", tensor.device());
  argument.isValue = true;
  std::memcpy(argument.value.data(), tensor.const_data_ptr(), tensor.itemsize());
  return argument;
}

/* The tensor in the host's copy of a storage that corresponds to `tensor`. */
at::Tensor likeIn(const at::Tensor &tensor, const at::Tensor &host) {
  return at::empty({0}, host.options().dtype(tensor.dtype()))
      .set_(host.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

/* Runs the task on copies in host memory. Waits for queued work, and until the results are copied
 * back. */
void runOnCopies(CompiledTask &task, std::unordered_map<void *, Copied> copied) {
  const at::AutoDispatchBelowADInplaceOrView kernels;  // record no gradient
  for (auto &[memory, copy] : copied) copy.host = copy.bytes.cpu();
  for (Argument &argument : task.arguments) {
    if (!argument.memory.isOnDevice()) continue;
    argument.memory = KernelMemory::ofHost(copied.at(argument.memory.data).host.mutable_data_ptr());
  }
  task.run();
  for (auto &[memory, copy] : copied) {
    for (const at::Tensor &tensor : copy.written) tensor.copy_(likeIn(tensor, copy.host));
  }
}

/* All bytes of the tensor's storage. */
at::Tensor bytesOf(const at::Tensor &tensor) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage(), 0, {size}, {1});
}

std::unordered_map<void *, Copied> CompiledKernel::storagesOf(const CompiledTask &task,
                                                              const py::args &given) const {
  std::unordered_map<void *, Copied> storages;
  size_t next = 0;
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (isNumber(i)) continue;
    const Argument &argument = task.arguments[next++];
    if (!argument.memory.isOnDevice()) continue;
    Copied &copied = storages[argument.memory.data];
    if (!copied.bytes.defined()) copied.bytes = bytesOf(tensorAt(given, i));
    if (roles_[i] != 'r') copied.written.push_back(tensorAt(given, i));
  }
  return storages;
}

void CompiledKernel::report(orStream_t stream, const py::args &given) const {
  std::vector<at::Tensor> read, written;
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (isNumber(i) || tensorAt(given, i).is_cpu()) continue;
    if (roles_[i] != 'w') read.push_back(tensorAt(given, i));
    if (roles_[i] != 'r') written.push_back(tensorAt(given, i));
  }
  reportTensors(name_, stream, written, read);
}

void CompiledKernel::operator()(const py::args &given) const {
  const c10::Device device = deviceOf(given);
  auto task = std::make_unique<CompiledTask>(name_, device, entry_);
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (isNumber(i)) {
      task->numbers.push_back(
          numberOf(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)), roles_[i]));
      continue;
    }
    task->arguments.push_back(argumentOf(tensorAt(given, i), device, name_));
  }
  if (device.is_cpu() || !canMap(device.index())) {
    auto storages = storagesOf(*task, given);
    py::gil_scoped_release released;
    if (threads_ == 1 || task->caller.threads <= threads_)
      return runOnCopies(*task, std::move(storages));
    return asNarrowWorker([&] { runOnCopies(*task, std::move(storages)); });
  }
  const orStream_t stream = currentStreamHandle(device.index());
  if (sanitizerActive()) report(stream, given);
  task->caller.threads = std::min(task->caller.threads, threads_);
  launchTask(std::move(task), stream, {}, threads_ > 1 ? 0 : orLaunchAnyThread);
}

/* torch.empty_strided without its argument parser, which takes longer than the rest of the call. */
at::Tensor emptyStrided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype,
                        c10::DeviceIndex device) {
  return at::empty_strided(size, stride,
                           c10::device({c10::DeviceType::PrivateUse1, device}).dtype(dtype));
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_empty_strided", &emptyStrided);
  py::class_<CompiledKernel>(m, "_CompiledKernel")
      .def(py::init<size_t, const std::string &, std::string, int>(), py::arg("entry"),
           py::arg("name"), py::arg("roles"), py::arg("threads"))
      .def("__call__", &CompiledKernel::operator());
});

}  // namespace

}  // namespace torch_openreg
