/*
 * Runs the CPU kernels of torch.compile's generated code as tasks of a stream, and allocates the
 * memory that they write.
 *
 * A CompiledKernel belongs to Python. On a device whose memory kernels cannot reach, the kernel
 * runs at once on copies in host memory, as operators do there.
 */
#include "compiled_kernel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../torch/check.h"
#include "../torch/device.h"
#include "../torch/kernel_failures.h"
#include "../torch/module.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../torch/warnings.h"
#include "../task/tensor_accesses.h"
#include "../task/tensor_metadata.h"

namespace py = pybind11;

namespace torch_openreg {

const char *keptName(const std::string &name) {
  static auto *names = new std::unordered_set<std::string>;
  return names->insert(name).first->c_str();
}

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

namespace {

void *followPointer(void *pointer, const char *place) {
  if (pointer == nullptr) return nullptr;
  void *address = nullptr;
  const orError_t error = orMapForKernel(&address, pointer, 1);
  if (error == orSuccess) return address;
  throw StrayPointer({__func__, __FILE__, __LINE__},
                     c10::str(place, ": a pointer that was read from memory is ", pointer,
                              ", which no kernel of this device reaches"));
}

}  // namespace

void CompiledTask::run() {
  c10::SmallVector<void *, 17> pointers;  // of eight arguments
  for (KernelArgument &argument : arguments) {
    void *address = argument.isValue ? argument.value.data() : argument.memory.address();
    pointers.push_back(static_cast<char *>(address) + argument.offset);
  }
  for (const KernelArgument &argument : arguments) {
    pointers.push_back(static_cast<char *>(argument.memory.data) + argument.offset);
  }
  pointers.push_back(reinterpret_cast<void *>(&followPointer));
  try {
    entry(pointers.data(), numbers.data());
  } catch (...) {
    setFailureStack(stack);
    throw;
  }
}

namespace {

/* Of memory of the device, or pinned memory. */
KernelArgument mappedArgument(const at::Tensor &tensor, const char *name) {
  checkFitsStorage(tensor, name);
  KernelArgument argument;
  argument.memory = KernelMemory(*tensor.storage().unsafeGetStorageImpl());
  argument.offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return argument;
}

KernelArgument argumentOf(const at::Tensor &tensor, c10::Device device, const char *name) {
  KernelArgument argument;
  if (device.is_cpu()) {
    TORCH_CHECK_VALUE(tensor.is_cpu(), name, " runs on the CPU, where it cannot read a tensor of ",
                      tensor.device());
    argument.memory = KernelMemory::ofHost(tensor.data_ptr());
    return argument;
  }
  if (tensor.device() == device) return mappedArgument(tensor, name);
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

/* Copies on this thread alone, and records no gradient. One of the tensors may be in pinned memory,
 * which the sanitizer guards from other threads. */
void copyWithoutHelp(const at::Tensor &to, const at::Tensor &from) {
  asNarrowWorker([&] {
    const at::AutoDispatchBelowADInplaceOrView kernels;
    to.copy_(from);
  });
}

/* All bytes of the tensor's storage. */
at::Tensor bytesOf(const at::Tensor &tensor) {
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage(), 0, {size}, {1});
}

}  // namespace

void CompiledCall::add(const at::Tensor &tensor, char role) {
  task_->arguments.push_back(argumentOf(tensor, task_->device, task_->name));
  tensors_.push_back({&tensor, role});
}

void CompiledCall::addPinned(const at::Tensor &tensor, char role) {
  task_->arguments.push_back(mappedArgument(tensor, task_->name));
  tensors_.push_back({&tensor, role});
}

void CompiledCall::report(orStream_t stream) const {
  std::vector<at::Tensor> read, written;
  for (const Used &used : tensors_) {
    if (used.tensor->is_cpu()) continue;
    if (used.role != 'w') read.push_back(*used.tensor);
    if (used.role != 'r') written.push_back(*used.tensor);
  }
  reportTensors(task_->name, stream, written, read);
}

std::unordered_map<void *, CompiledCall::Copied> CompiledCall::storages() const {
  std::unordered_map<void *, Copied> storages;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const KernelArgument &argument = task_->arguments[i];
    if (!argument.memory.isOnDevice()) continue;
    Copied &copied = storages[argument.memory.data];
    if (!copied.bytes.defined()) copied.bytes = bytesOf(tensor(i));
    if (role(i) != 'r') copied.written.push_back(tensor(i));
  }
  return storages;
}

void CompiledCall::fetch(orStream_t stream) {
  if (maps()) return;
  copied_ = storages();
  if (copied_.empty()) return;
  const OwnWait own;
  const py::gil_scoped_release released;
  OPENREG_CHECK(orStreamSynchronize(stream));  // pinned memory is read at once
  for (auto &[memory, copy] : copied_) {
    copy.host = at::empty_like(copy.bytes, at::kCPU);
    copyWithoutHelp(copy.host, copy.bytes);
  }
}

const char *CompiledCall::hostCopy(const void *storage) const {
  const auto found = copied_.find(const_cast<void *>(storage));
  return found == copied_.end() ? nullptr
                                : static_cast<const char *>(found->second.host.const_data_ptr());
}

void CompiledCall::launchOnCopies(orStream_t stream, unsigned flags) {
  const OwnWait own;
  for (KernelArgument &argument : task_->arguments) {
    if (!argument.memory.isOnDevice()) continue;
    void *host = copied_.at(argument.memory.data).host.mutable_data_ptr();
    argument.memory = KernelMemory::ofHost(host);
  }
  // The wait may end before the kernel does: the device may be lost.
  for (const auto &[memory, copy] : copied_) task_->copies.push_back(copy.host);
  launchTask(std::move(task_), stream, {}, flags);
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream));
  for (auto &[memory, copy] : copied_) {
    for (const at::Tensor &tensor : copy.written) {
      copyWithoutHelp(tensor, likeIn(tensor, copy.host));
    }
  }
}

void CompiledCall::launch(orStream_t stream, int threads) && {
  const int before = task_->caller.threads;
  if (device().is_cpu()) {
    const py::gil_scoped_release released;
    const auto run = [this] { task_->run(); };
    return threads == 1 || before <= threads ? run() : asNarrowWorker(run);
  }
  task_->caller.threads = std::min(before, threads);
  const unsigned flags = threads > 1 ? 0 : orLaunchAnyThread;
  if (maps()) return launchTask(std::move(task_), stream, {}, flags);
  const py::gil_scoped_release released;
  launchOnCopies(stream, flags);
}

namespace {

class CompiledKernel {
 public:
  /* `roles` has a letter for each argument. r, w and b are tensors that the kernel reads, writes or
   * both; n is an integer, f a float. The kernel has room for the results of `threads` threads;
   * with 1 it does not divide its work. */
  CompiledKernel(size_t entry, const std::string &name, std::string roles, int threads)
      : entry_(reinterpret_cast<KernelEntry>(entry)),
        name_(keptName(name)),
        roles_(std::move(roles)),
        threads_(threads) {
    TORCH_CHECK_VALUE(roles_.find_first_not_of("rwbnf") == std::string::npos, name,
                      ": the roles of arguments are r, w, b, n and f, got '", roles_, "'");
  }

  /* Queues the kernel on the current stream of its tensors' device, and returns. If all tensors are
   * the CPU's, runs the kernel; if the device has no `map`, waits for it. */
  void operator()(const py::args &given) const;

 private:
  c10::Device deviceOf(const py::args &given) const;
  bool isNumber(size_t i) const { return roles_[i] == 'n' || roles_[i] == 'f'; }
  const at::Tensor &tensorAt(const py::args &given, size_t i) const {
    PyObject *object = PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    TORCH_CHECK_TYPE(THPVariable_Check(object), name_, ": argument ", i, " has to be a tensor");
    return THPVariable_Unpack(object);
  }

  const KernelEntry entry_;
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

void CompiledKernel::operator()(const py::args &given) const {
  const c10::Device device = deviceOf(given);
  CompiledCall call(name_, device, entry_);
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (isNumber(i)) {
      call.add(numberOf(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)), roles_[i]));
    } else {
      call.add(tensorAt(given, i), roles_[i]);
    }
  }
  const orStream_t stream = device.is_cpu() ? 0 : currentStreamHandle(device.index());
  call.fetch(stream);
  if (sanitizerActive() && !device.is_cpu()) call.report(stream);
  std::move(call).launch(stream, threads_);
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
