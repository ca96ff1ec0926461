/*
 * A Task carries everything by value: addresses, sizes, numbers. It holds no device tensor and no storage: memory is
 * kept alive by the order of the stream alone, as on any device, and a lane never drops the last reference of a
 * Python object. It belongs to the thread that queues it until orLaunchKernelEx returns, then to the queue, whose
 * `drop` deletes it, whether or not it ran.
 *
 * `failures` keeps the exceptions of kernels that failed, by device, so that the synchronising call that reports the
 * core's first failure throws the same type. Its mutex is a leaf; nothing is thrown under it.
 */
#include "async.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string>

#include "../torch/allocator.h"
#include "../torch/check.h"
#include "../torch/warnings.h"
#include "alias.h"
#include "cpu_memory.h"
#include "lane.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

/* ---- failures ---- */

struct Failure {
  std::string name;
  std::exception_ptr exception;
};

struct Failures {
  std::mutex mutex;
  std::array<std::vector<Failure>, OPENREG_MAX_DEVICES> byDevice;
};

Failures &failures() {
  static auto *instance = new Failures();
  return *instance;
}

constexpr size_t kMostFailures = 8;

void keepFailure(const char *name, c10::Device device, std::exception_ptr exception) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  auto &kept = f.byDevice[static_cast<size_t>(device.index())];
  if (kept.size() < kMostFailures) kept.push_back({name, std::move(exception)});
}

/* The core says "aten::embedding on openreg:0 failed: ...". */
bool isOf(const std::string &report, const std::string &name, size_t device) {
  return report.rfind(name + " on openreg:" + std::to_string(device) + " failed", 0) == 0;
}

std::exception_ptr takeFailure(const std::string &report) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  for (size_t device = 0; device < f.byDevice.size(); ++device) {
    auto &kept = f.byDevice[device];
    for (const Failure &failure : kept) {
      if (!isOf(report, failure.name, device)) continue;
      std::exception_ptr exception = failure.exception;
      kept.clear();
      return exception;
    }
  }
  return nullptr;
}

void throwFailure(const std::string &report) {
  const std::exception_ptr exception = takeFailure(report);
  if (!exception) return;
  orGetLastError();
  try {
    std::rethrow_exception(exception);
  } catch (c10::Error &error) {
    const bool more = report.ends_with(" more failed after it)");
    error.add_context("raised by " + report.substr(0, report.find(" failed: ")) +
                      ", queued earlier" + (more ? report.substr(report.rfind(" (and ")) : ""));
    throw;
  }
}

[[maybe_unused]] const bool handled = (setKernelFailureHandler(&throwFailure), true);

/* ---- a task ---- */

/* A storage, as addresses. */
struct Memory {
  void *data;
  size_t bytes;
};

struct Operand {
  Layout layout;
  int64_t offset;
  int memory;
  bool wrapped;
};

/* Where the tensors of an argument come from. Entries are positions in `operands`, or below. */
struct Place {
  enum Kind : uint8_t { kAsIs, kTensor, kList, kOptionalList } kind;
  uint32_t first, count;
};
constexpr int kNone = -1;
constexpr int kConstant = -2;  // and below: position in `constants`

struct Task {
  Task(const OperatorHandle &handle, const OpInfo &operatorInfo,
       std::shared_ptr<const Memo> promised, c10::Device on)
      : op(handle), info(operatorInfo), memo(std::move(promised)), device(on) {}

  void add(const IValue &value);
  at::Tensor makeResult(const Layout &layout, orStream_t stream);
  void run();

  OperatorHandle op;
  const OpInfo &info;
  std::shared_ptr<const Memo> memo;
  c10::Device device;
  CallerState caller = CallerState::now();
  c10::ScalarType defaultDtype = c10::get_default_dtype_as_scalartype();
  Stack arguments;
  c10::SmallVector<Place, 8> places;
  c10::SmallVector<int, 8> entries;
  c10::SmallVector<Memory, 4> memories;
  c10::SmallVector<Operand, 4> operands;
  std::vector<at::Tensor> constants;  // numbers in CPU tensors, copied
  c10::SmallVector<Memory, 2> results;
  PairList<StorageImpl, int> known;  // while the task is made

 private:
  void addTensor(const at::Tensor &tensor);
  Stack kernelArguments(c10::ArrayRef<at::Tensor> tensors) const;
  at::Tensor entry(int which, c10::ArrayRef<at::Tensor> tensors) const;
  void checkWritten(c10::ArrayRef<at::Tensor> tensors) const;
  void settle(Stack &stack, c10::ArrayRef<Reserved> reserved) const;
};

void Task::addTensor(const at::Tensor &tensor) {
  if (!tensor.defined()) return entries.push_back(kNone);
  if (tensor.is_cpu()) {
    entries.push_back(kConstant - static_cast<int>(constants.size()));
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    constants.push_back(std::move(copy));
    return;
  }
  StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
  int *memory = known.find(storage);
  if (memory == nullptr) {
    memory = &known.add(storage, static_cast<int>(memories.size()));
    memories.push_back({storage->_mutable_data_ptr_no_checks().get(), storage->nbytes()});
  }
  entries.push_back(static_cast<int>(operands.size()));
  operands.push_back({Layout(tensor), tensor.storage_offset(), *memory,
                      tensor.unsafeGetTensorImpl()->is_wrapped_number()});
}

void Task::add(const IValue &value) {
  Place place{Place::kAsIs, static_cast<uint32_t>(entries.size()), 0};
  if (value.isTensor()) {
    place.kind = Place::kTensor;
    addTensor(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    place.kind = value.isTensorList() ? Place::kList : Place::kOptionalList;
    for (const IValue &item : value.toListRef()) {
      addTensor(item.isNone() ? at::Tensor() : item.toTensor());
    }
  } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
    arguments.emplace_back(c10::Device(c10::DeviceType::CPU));
  } else {
    arguments.push_back(value);
  }
  place.count = static_cast<uint32_t>(entries.size()) - place.first;
  places.push_back(place);
}

at::Tensor Task::makeResult(const Layout &layout, orStream_t stream) {
  if (layout.dtype == c10::ScalarType::Undefined) return {};
  void *block = layout.bytes != 0 ? allocateBlock(layout.bytes, stream, device.index()) : nullptr;
  results.push_back({block, layout.bytes});
  c10::Storage storage(c10::Storage::use_byte_size_t(), layout.bytes,
                       ownBlock(block, device.index()), &deviceAllocator(), /*resizable=*/true);
  at::Tensor tensor = at::detail::make_tensor<TensorImpl>(std::move(storage),
                                                          DispatchKeySet(DispatchKey::PrivateUse1),
                                                          c10::scalarTypeToTypeMeta(layout.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes(), layout.strides());
  if (layout.conj) tensor._set_conj(true);
  if (layout.neg) tensor._set_neg(true);
  return tensor;
}

/* ---- on the lane ---- */

void *kernelAddress(const Memory &memory) {
  void *address = nullptr;
  if (memory.data != nullptr && memory.bytes != 0) {
    OPENREG_CHECK(orMapForKernel(&address, memory.data, memory.bytes));
  }
  return address;
}

c10::Storage cpuStorage(void *address, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(address, c10::Device(c10::DeviceType::CPU)),
                      c10::GetCPUAllocator(), /*resizable=*/false);
}

at::Tensor cpuTensor(c10::Storage storage, const Layout &layout, int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CPU), c10::scalarTypeToTypeMeta(layout.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes(), layout.strides(), offset);
  if (layout.conj) tensor._set_conj(true);
  if (layout.neg) tensor._set_neg(true);
  return tensor;
}

at::Tensor Task::entry(int which, c10::ArrayRef<at::Tensor> tensors) const {
  if (which >= 0) return tensors[static_cast<size_t>(which)];
  if (which == kNone) return {};
  return constants[static_cast<size_t>(kConstant - which)];
}

Stack Task::kernelArguments(c10::ArrayRef<at::Tensor> tensors) const {
  Stack stack;
  stack.reserve(places.size());
  auto asIs = arguments.begin();
  for (const Place &place : places) {
    const auto which = c10::ArrayRef<int>(entries).slice(place.first, place.count);
    if (place.kind == Place::kAsIs) {
      stack.push_back(*asIs++);
    } else if (place.kind == Place::kTensor) {
      stack.emplace_back(entry(which[0], tensors));
    } else if (place.kind == Place::kList) {
      c10::List<at::Tensor> list;
      list.reserve(place.count);
      for (int i : which) list.push_back(entry(i, tensors));
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (int i : which) {
        list.push_back(i == kNone ? std::nullopt : std::optional(entry(i, tensors)));
      }
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

/* The promise was that in place and out= leave sizes as they are. */
void Task::checkWritten(c10::ArrayRef<at::Tensor> tensors) const {
  for (size_t i = 0; i < places.size(); ++i) {
    if (!info.isWritten[i]) continue;
    for (int which : c10::ArrayRef<int>(entries).slice(places[i].first, places[i].count)) {
      if (which < 0) continue;
      const auto at = static_cast<size_t>(which);
      TORCH_CHECK(operands[at].layout.describes(tensors[at]), "a kernel of ", info.name,
                  " resized its output to ", tensors[at].sizes(), " where ",
                  operands[at].layout.sizes(), " was promised");
    }
  }
}

bool liesIn(const void *data, const Reserved &memory) {
  const auto *begin = static_cast<const char *>(memory.address);
  return data >= begin && data < begin + memory.bytes;
}

/* Results that the kernel made elsewhere are copied to where they were promised. */
void Task::settle(Stack &stack, c10::ArrayRef<Reserved> reserved) const {
  std::vector<std::pair<at::Tensor, size_t>> moves;  // to reserved[second]
  std::vector<const Layout *> layouts;
  const auto take = [&](at::Tensor made, const Layout &layout) {
    if (made.defined() && made.is_mkldnn()) made = made.to_dense();
    // The default dtype is the process's, and may have changed since the call.
    if (made.defined() && c10::get_default_dtype_as_scalartype() != defaultDtype) {
      made = made.to(layout.dtype);
    }
    const bool exact = layout.describes(made);
    TORCH_CHECK(exact || (!memo->exactStrides && layout.describesSizes(made)), "a kernel of ",
                info.name, " made a result of sizes ",
                made.defined() ? made.sizes() : c10::IntArrayRef(), " and strides ",
                made.defined() ? made.strides() : c10::IntArrayRef(), " where ", layout.sizes(),
                " and ", layout.strides(), " was promised");
    if (!made.defined()) return;
    const size_t at = layouts.size();
    layouts.push_back(&layout);
    const bool inPlace =
        exact && made.storage().data() == reserved[at].address && made.storage_offset() == 0;
    if (layout.bytes != 0 && !inPlace) moves.emplace_back(std::move(made), at);
  };
  for (size_t i = 0; i < memo->results.size(); ++i) {
    const Result &result = memo->results[i];
    if (result.argument >= 0) continue;
    if (!result.isList) {
      take(stack[i].toTensor(), result.fresh[0]);
      continue;
    }
    const auto items = stack[i].toListRef();
    TORCH_CHECK(items.size() == result.fresh.size(), "a kernel of ", info.name, " made ",
                items.size(), " results where ", result.fresh.size(), " were promised");
    for (size_t k = 0; k < items.size(); ++k) take(items[k].toTensor(), result.fresh[k]);
  }
  for (auto &[made, at] : moves) {
    const void *data = made.storage().data();
    for (const Reserved &memory : reserved) {
      if (!liesIn(data, memory)) continue;
      made = made.clone();  // another result's place
      break;
    }
  }
  for (auto &[made, at] : moves) {
    cpuTensor(cpuStorage(reserved[at].address, layouts[at]->bytes), *layouts[at], 0).copy_(made);
  }
}

void Task::run() {
  OpTimer timer(info.counters->queued, info.counters->queuedNs);
  c10::SmallVector<c10::Storage, 4> storages;
  for (const Memory &memory : memories) {
    storages.push_back(cpuStorage(kernelAddress(memory), memory.bytes));
  }
  c10::SmallVector<at::Tensor, 4> tensors;
  for (const Operand &operand : operands) {
    tensors.push_back(cpuTensor(c10::Storage(storages[static_cast<size_t>(operand.memory)]),
                                operand.layout, operand.offset));
    if (operand.wrapped) tensors.back().unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  c10::SmallVector<Reserved, 2> reserved;
  for (const Memory &result : results) reserved.push_back({kernelAddress(result), result.bytes});
  Stack stack = kernelArguments(tensors);
  {
    LaneOutputs outputs(reserved.data(), reserved.size());
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  }
  checkWritten(tensors);
  settle(stack, reserved);
}

orError_t runTask(void *args) {
  Task &task = **static_cast<Task **>(args);
  std::vector<c10::Warning> warnings;
  orError_t result = orSuccess;
  try {
    runAsCaller(task.caller, warnings, [&] { task.run(); });
  } catch (const std::exception &error) {
    const std::string text = error.what();
    orSetTaskErrorMessage(text.substr(0, text.find('\n')).c_str());
    keepFailure(task.info.name, task.device, std::current_exception());
    result = orErrorLaunchFailure;
  } catch (...) {
    result = orErrorLaunchFailure;
  }
  if (!warnings.empty()) keepWarnings(warnings);
  return result;
}

void dropTask(void *args) { delete *static_cast<Task **>(args); }

void launch(std::unique_ptr<Task> task, orStream_t stream) {
  Task *args = task.get();
  orLaunch launch{};
  launch.size = sizeof(launch);
  launch.stream = stream;
  launch.fn = &runTask;
  launch.args = &args;
  launch.args_size = sizeof(args);
  launch.drop = &dropTask;
  launch.name = task->info.name;
  const uint64_t before = orGetLastCorrelation();
  const orError_t error = orLaunchKernelEx(&launch);
  // With OPENREG_LAUNCH_BLOCKING an error may be that of a task that was queued, and is gone.
  if (orGetLastCorrelation() != before) (void)task.release();
  OPENREG_CHECK(error);
}

}  // namespace

void enqueueCpuKernel(const OperatorHandle &op, const OpInfo &info, std::shared_ptr<const Memo> memo,
                      c10::Device device, orStream_t stream, Stack *stack) {
  auto task = std::make_unique<Task>(op, info, std::move(memo), device);
  const size_t count = info.isWritten.size();
  const auto arguments = torch::jit::last(*stack, count);
  for (const Resize &resize : task->memo->resizes) {
    const at::Tensor &output = arguments[resize.argument].toTensor();
    output.resize_(resize.layout.sizes());
    output.unsafeGetTensorImpl()->set_sizes_and_strides(resize.layout.sizes(),
                                                        resize.layout.strides());
  }
  for (const IValue &value : arguments) task->add(value);
  c10::SmallVector<IValue, 4> results;
  for (const Result &result : task->memo->results) {
    if (result.argument >= 0) {
      results.push_back(arguments[static_cast<size_t>(result.argument)]);
    } else if (result.isList) {
      c10::List<at::Tensor> list;
      for (const Layout &layout : result.fresh) list.push_back(task->makeResult(layout, stream));
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(task->makeResult(result.fresh[0], stream));
    }
  }
  launch(std::move(task), stream);
  torch::jit::drop(*stack, count);
  for (IValue &result : results) stack->push_back(std::move(result));
}

void forgetFailures(c10::DeviceIndex device) {
  Failures &f = failures();
  std::lock_guard<std::mutex> lock(f.mutex);
  f.byDevice.at(static_cast<size_t>(device)).clear();
}

}  // namespace torch_openreg
