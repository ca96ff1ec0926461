/*
 * Runs the CPU kernels of torch.compile's generated code as tasks of a stream, and allocates the
 * memory that they write.
 *
 * A CompiledKernel belongs to Python. On a device whose memory kernels cannot reach, the kernel
 * runs at once on copies in host memory, as operators do there.
 */
#include "compiled_kernel.h"

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
  argument.offset = bytesBefore(tensor);
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

namespace {

bool isWholeStorage(const at::Tensor &tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

}  // namespace

void CompiledCall::fetch(orStream_t stream) {
  if (device().is_cpu() || canMap(device().index())) return;
  const py::gil_scoped_release released;
  turn_.emplace(stream);
  task_->copies = std::make_shared<HostCopies>(stream);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!needsCopy(i)) continue;
    const c10::StorageImpl &storage = *tensor(i).storage().unsafeGetStorageImpl();
    task_->copies->fetch(storage, 0, storage.nbytes());
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (needsCopy(i) && role(i) != 'r' && !isWholeStorage(tensor(i)))
      task_->copies->keep(*tensor(i).storage().unsafeGetStorageImpl());
  }
}

const char *CompiledCall::hostCopy(const void *storage) const {
  return task_->copies == nullptr ? nullptr : task_->copies->find(storage);
}

void CompiledCall::launchOnCopies(orStream_t stream, unsigned flags) {
  const std::shared_ptr<HostCopies> copies = task_->copies;
  c10::SmallVector<bool, 8> written;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    KernelMemory &memory = task_->arguments[i].memory;
    written.push_back(needsCopy(i) && role(i) != 'r');
    if (needsCopy(i)) memory = KernelMemory::ofHost(copies->find(memory.data));
  }
  launchTask(std::move(task_), stream, {}, flags);
  const OwnWait own;
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!written[i]) continue;
    if (isWholeStorage(tensor(i)))
      copies->writeBack(tensor(i));
    else  // a program of Triton's may write before and behind its pointer
      copies->writeChanges(tensor(i));
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
  if (task_->copies == nullptr) return launchTask(std::move(task_), stream, {}, flags);
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
