/*
 * One boxed kernel for all operators: the CPU's, run on a lane over aliases of the device's memory. Calls in their usual form
 * do not come further than known.cpp.
 *
 * On the caller's thread: arguments are checked and made ready (`prepare`), and results become the
 * caller's tensors (`finish`). On the lane: aliases, the kernel, and taking over its memory
 * (`run`). The caller waits in between, so a Call has one user at a time.
 */
#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "../torch/generator.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../torch/sync_debug.h"
#include "../torch/warnings.h"
#include "accesses.h"
#include "alias.h"
#include "async.h"
#include "cpu_memory.h"
#include "dry_run.h"
#include "extent.h"
#include "known.h"
#include "lane.h"
#include "lesson.h"
#include "memo.h"
#include "opinfo.h"
#include "parts.h"
#include "sparse.h"
#include "versions.h"

namespace torch_openreg {

namespace {

using c10::Argument;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

/* Operators with an argument or a result that stays on the CPU on every device. */
struct CpuByContract {
  std::string_view name;
  std::string_view argument;
  int result;
};
constexpr CpuByContract kCpuByContract[] = {
    {"aten::_pack_padded_sequence", "lengths", 1},
    {"aten::_nested_from_padded", "cpu_nested_shape_example", -1},
    {"aten::_ctc_loss", "input_lengths", -1},
    {"aten::_ctc_loss", "target_lengths", -1},
    {"aten::_ctc_loss_backward", "input_lengths", -1},
    {"aten::_ctc_loss_backward", "target_lengths", -1},
};

bool isCpuByContract(const FunctionSchema &schema, const Argument &argument) {
  for (const CpuByContract &entry : kCpuByContract) {
    if (schema.name() == entry.name && argument.name() == entry.argument) return true;
  }
  return false;
}

bool resultIsCpu(const FunctionSchema &schema, size_t result) {
  for (const CpuByContract &entry : kCpuByContract) {
    if (schema.name() == entry.name && static_cast<int>(result) == entry.result) return true;
  }
  return false;
}

/* A kernel that is registered for the CPU alone from Python expects the CPU's own tensors, and would
 * take the GIL on a lane. The dispatcher tells only where it was registered. */
bool hasPythonKernel(const OperatorHandle &op, const OpInfo &info, DispatchKey kernel) {
  static auto *known = new std::map<std::pair<const OpCounters *, DispatchKey>, bool>();
  static auto *mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  const auto [entry, isNew] = known->try_emplace({info.counters, kernel}, false);
  if (!isNew) return entry->second;
  const std::string key = "\n" + std::string(c10::toString(kernel)) + ": ";
  const std::string table = "\n" + op.dumpComputedTable();
  const size_t begin = table.find(key);
  const size_t end = table.find('\n', begin + 1);
  const std::string line = begin == std::string::npos ? "" : table.substr(begin, end - begin);
  // A file, or one of "<stdin>", "<string>", "<ipython-input ...>".
  entry->second = line.find(".py:") != std::string::npos || line.find(" at <") != std::string::npos;
  return entry->second;
}

bool hasItsMemory(const at::Tensor &tensor) {
  if (isPlain(tensor)) return tensor._is_zerotensor() || fitsStorage(tensor);
  const Parts parts = partsOf(tensor);
  return std::all_of(parts.begin(), parts.end(), hasItsMemory);
}

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/* For one thread, as far as these tell. */
bool areSmall(c10::ArrayRef<IValue> values) {
  bool small = true;
  for (const IValue &value : values) {
    eachTensor(value, [&](const at::Tensor &tensor) {
      small &= !tensor.defined() || tensor.numel() <= kSerial;
    });
  }
  return small;
}

class Call {
 public:
  Call(const OperatorHandle &op, const OpInfo &info, Stack *stack, DispatchKey kernel)
      : op_(op),
        info_(info),
        kernel_(kernel),
        schema_(op.schema()),
        stack_(stack),
        arguments_(stack->data() + stack->size() - schema_.arguments().size(),
                   schema_.arguments().size()) {}

  /* False: its lists are on several devices, and it has to be run one by one. */
  bool prepare();
  /* Its results can be promised, and `key` describes it. */
  bool canQueue(MemoKey &key) const {
    return isPredictable() && !dependsOnDefaultDtype() && !mayAlert() &&
           makeKey(key, info_, c10::ArrayRef<IValue>(arguments_.data(), arguments_.size()));
  }
  /* set_sync_debug_mode may refuse it. */
  void wait();
  /* Once, when nothing can refuse the call any more. */
  void drawGenerators();
  void countWrites() const {
    torch_openreg::countWrites(info_, c10::ArrayRef<IValue>(arguments_.data(), arguments_.size()));
  }
  void runCopying();
  c10::Device device() const { return *device_; }
  orStream_t stream() const { return stream_; }

 private:
  bool isPredictable() const {
    return info_.predictable && !cpuResults_ && !readsHost_ && !(info_.masksDecide && hasMask_);
  }
  bool dependsOnDefaultDtype() const;
  /* The mode is the process's, and may be another when a queued kernel asks. */
  bool mayAlert() const { return info_.alerts && at::globalContext().deterministicAlgorithms(); }
  /* Its caller learns a value or a size that depends on data: on every device it synchronises. */
  bool tellsValues() const {
    return !info_.predictable || cpuResults_ || (info_.masksDecide && hasMask_) || ordersAsSparse();
  }
  bool ordersAsSparse() const {
    return (kernel_ == DispatchKey::SparseCPU || kernel_ == DispatchKey::SparseCsrCPU) &&
           synchronizesElsewhere(op_, kernel_);
  }
  void run();
  void finish();
  at::Tensor copyOf(const at::Tensor &tensor);
  void copyBack();
  at::Tensor fromCopy(const at::Tensor &result, size_t position);
  bool findDevice();
  void check(const at::Tensor &tensor, const Argument &argument);
  void checkDevices();
  void checkIndices();
  void moveIndices();
  void checkStorages();
  void makeZeros();
  IValue forKernel(const IValue &value);
  at::Tensor aliasOf(const at::Tensor &tensor);
  IValue cpuGenerator(const IValue &given) const;
  void adopt(IValue &value, size_t position);
  IValue toCaller(const IValue &value, size_t position);

  const OperatorHandle &op_;
  const OpInfo &info_;
  const DispatchKey kernel_;  // the CPU's for this kind of tensor
  const FunctionSchema &schema_;
  Stack *stack_;
  std::span<IValue> arguments_;  // on the stack
  std::optional<c10::Device> device_;
  std::optional<c10::Device> asked_;  // by a device argument
  bool cpuResults_ = false;           // it asks for the CPU
  bool hasZeros_ = false;             // a tensor without memory
  bool readsHost_ = false;            // a CPU tensor is among the arguments that is not a number
  bool hasMask_ = false;              // among indices
  orStream_t stream_ = 0;
  Stack cpu_;  // the kernel's arguments, then its results
  std::optional<Aliases> aliases_;
  // Without it everything is copied.
  PairList<c10::TensorImpl, at::Tensor> copies_;     // by the device's tensor
  PairList<c10::TensorImpl, at::Tensor> originals_;  // by its copy
};

/* One pass over what nearly every call has: tensors of one device, numbers, nothing to object to. The first tensor of
 * this device decides, then a device argument. */
bool Call::findDevice() {
  bool doubtful = false, lacksMemory = false;
  for (const IValue &value : arguments_) {
    if (value.isDevice()) asked_ = value.toDevice();
    const bool indices = value.isList() && holdsOptionalTensors(value);
    eachTensor(value, [&](const at::Tensor &tensor) {
      if (!tensor.defined()) return;
      if (!tensor.is_privateuseone()) {
        doubtful = true;
      } else if (!device_) {
        device_ = tensor.device();
      } else if (tensor.device() != *device_) {
        doubtful = true;
      }
      hasZeros_ |= tensor._is_zerotensor();
      lacksMemory |= tensor.is_privateuseone() && !hasItsMemory(tensor);
      if (indices) {
        hasMask_ |= tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte;
      }
    });
  }
  cpuResults_ = asked_.has_value() && asked_->is_cpu();
  if (!device_ && asked_.has_value() && asked_->is_privateuseone()) {
    device_ = c10::Device(asked_->type(), indexOrCurrent(asked_->index()));
  }
  if (!device_) device_ = c10::Device(c10::DeviceType::PrivateUse1, currentDevice());
  if (doubtful && info_.isForeach) return false;
  if (doubtful) {
    checkDevices();
    moveIndices();
  }
  if (lacksMemory) checkStorages();
  return true;
}

void Call::check(const at::Tensor &tensor, const Argument &argument) {
  if (!tensor.defined() || tensor.device() == *device_) return;
  if (tensor.is_cpu() && !isWritten(argument)) {
    if (tensor.dim() == 0 || isCpuByContract(schema_, argument)) return;
  }
  TORCH_CHECK(false,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *device_, " and ", tensor.device(), "! (when checking argument ", argument.name(),
              " of ", op_.operator_name(), ")");
}

/* In the words of PyTorch's kernels, which are the same for every device. */
void Call::checkIndices() {
  if (!info_.isAten || arguments_.empty() || !arguments_[0].isTensor()) return;
  const c10::Device self = arguments_[0].toTensor().device();
  for (const IValue &value : arguments_) {
    if (!value.isList() || !holdsOptionalTensors(value)) continue;
    eachTensor(value, [&](const at::Tensor &index) {
      TORCH_CHECK(!index.defined() || index.is_cpu() || index.device() == self,
                  "indices should be either on ", c10::kCPU,
                  " or on the same device as the indexed tensor (", self, ")");
    });
  }
}

void Call::checkStorages() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const std::string what =
        c10::str(op_.operator_name(), ", argument ", schema_.arguments()[i].name());
    eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
      if (!tensor.defined() || !tensor.is_privateuseone() || hasItsMemory(tensor)) return;
      if (isPlain(tensor)) return checkFitsStorage(tensor, what.c_str());
      for (const at::Tensor &part : partsOf(tensor)) checkFitsStorage(part, what.c_str());
    });
  }
}

void Call::checkDevices() {
  checkIndices();
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool indices = arguments_[i].isList() && holdsOptionalTensors(arguments_[i]);
    eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
      const bool host = tensor.defined() && tensor.is_cpu();
      if (host && tensor.dim() > 0 && !indices) readsHost_ = true;
      if (!(indices && host)) check(tensor, schema_.arguments()[i]);
    });
  }
}

/* Those of the CPU, by a blocking copy, as on every device. */
void Call::moveIndices() {
  for (IValue &value : arguments_) {
    if (!value.isList() || !holdsOptionalTensors(value)) continue;
    value = forCpu(value, [&](const at::Tensor &index) {
      return index.defined() && index.is_cpu() && index.dim() > 0 ? index.to(*device_) : index;
    });
  }
}

/* A fresh CPU generator for this call alone, seeded by what the device's one draws. */
IValue Call::cpuGenerator(const IValue &given) const {
  at::Generator generator =
      given.isNone() ? getDefaultGenerator(device_->index()) : given.toGenerator();
  TORCH_CHECK(generator.device() == *device_, "Expected a generator of ", *device_, " for ",
              op_.operator_name(), " but found one of ", generator.device());
  const auto [seed, counter] = generator.get<OpenRegGeneratorImpl>()->draw();
  return at::detail::createCPUGenerator(mixed(seed ^ mixed(counter)));
}

void Call::drawGenerators() {
  if (!info_.draws) return;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    IValue &value = arguments_[i];
    if (info_.isGenerator[i]) value = cpuGenerator(value);
  }
}

/* Zeros without memory would have nothing to alias. */
void Call::makeZeros() {
  for (IValue &value : arguments_) {
    if (!value.isTensor() || !value.toTensor()._is_zerotensor()) continue;
    const at::Tensor tensor = value.toTensor();
    value = at::zeros(tensor.sizes(), tensor.options());
  }
}

bool Call::prepare() {
  if (!findDevice()) return false;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op_.hasComputedKernelForDispatchKey(kernel_) &&
          (info_.isAten || !hasPythonKernel(op_, info_, kernel_)),
      "Could not run ", op_.operator_name(),
      " on openreg: there is neither a kernel for this device nor a compiled one for ",
      kernel_ == DispatchKey::CPU ? "the CPU" : c10::toString(kernel_));
  if (hasZeros_) makeZeros();
  stream_ = getCurrentOpenRegStream(device_->index()).stream();
  return true;
}

at::Tensor Call::aliasOf(const at::Tensor &tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_privateuseone()) return aliases_ ? aliases_->of(tensor) : copyOf(tensor);
  if (aliases_) aliases_->passed(tensor);
  return tensor;
}

IValue Call::forKernel(const IValue &value) {
  return forCpu(value, [this](const at::Tensor &tensor) { return aliasOf(tensor); });
}

/* On the lane, outside of LaneMemory. */
void Call::adopt(IValue &value, size_t position) {
  const bool ordinary = cpuResults_ || resultIsCpu(schema_, position);
  if (ordinary && value.isTensor() && value.toTensor().defined()) {
    value = value.toTensor().clone();
    return aliases_->passed(value.toTensor());
  }
  // Kernels of oneDNN may return its opaque layout.
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_mkldnn()) {
    value = value.toTensor().to_dense();
  }
  eachTensor(value, [&](const at::Tensor &tensor) { aliases_->adoptResult(tensor); });
}

void Call::run() {
  {
    LaneMemory memory(stream_, device_->index());
    for (const IValue &value : arguments_) cpu_.push_back(forKernel(value));
    op_.redispatchBoxed(DispatchKeySet(kernel_), &cpu_);
  }
  aliases_->adoptResized();
  for (size_t i = 0; i < cpu_.size(); ++i) adopt(cpu_[i], i);
}

IValue Call::toCaller(const IValue &value, size_t position) {
  const auto convert = [&](const at::Tensor &tensor) {
    return aliases_ ? aliases_->toCaller(tensor) : fromCopy(tensor, position);
  };
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor &tensor : value.toTensorList()) list.push_back(convert(tensor));
    return list;
  }
  return value;
}

void Call::finish() {
  if (aliases_) aliases_->updateCallers();
  torch::jit::drop(*stack_, arguments_.size());
  for (size_t i = 0; i < cpu_.size(); ++i) stack_->push_back(toCaller(cpu_[i], i));
}

at::Tensor Call::copyOf(const at::Tensor &tensor) {
  if (at::Tensor *known = copies_.find(tensor.unsafeGetTensorImpl())) return *known;
  const at::Tensor copy = tensor.cpu();
  originals_.add(copy.unsafeGetTensorImpl(), tensor);
  return copies_.add(tensor.unsafeGetTensorImpl(), copy);
}

void Call::copyBack() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!info_.isWritten[i]) continue;
    eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
      const at::Tensor *copy = copies_.find(tensor.unsafeGetTensorImpl());
      if (copy != nullptr) at::_copy_from_and_resize(*copy, tensor);
    });
  }
}

at::Tensor Call::fromCopy(const at::Tensor &result, size_t position) {
  if (at::Tensor *original = originals_.find(result.unsafeGetTensorImpl())) return *original;
  if (!result.defined() || cpuResults_ || resultIsCpu(schema_, position)) return result;
  if (schema_.returns()[position].alias_info() != nullptr) {
    TORCH_WARN(op_.operator_name(), " gives a copy on ", *device_,
               ", where it would be a view: kernels cannot reach the device's memory");
  }
  return result.to(*device_);
}

/* Where kernels cannot reach the device's memory: everything is copied to the CPU and back. A fork waits for the kernel
 * alone, because a copy may need what the thread that forks holds: a lane, the GIL. */
void Call::runCopying() {
  SyncNoted noted(info_.name);
  drawGenerators();
  countWrites();
  OpTimer timer(info_.counters->copied, info_.counters->copiedNs);
  for (const IValue &value : arguments_) cpu_.push_back(forKernel(value));
  asKernel([this] { op_.redispatchBoxed(DispatchKeySet(kernel_), &cpu_); });
  copyBack();
  finish();
}

/* The default dtype is the process's: with another than PyTorch's own, a kernel that makes it of
 * integers cannot be left to run when it may have changed back. */
bool Call::dependsOnDefaultDtype() const {
  if (C10_LIKELY(c10::get_default_dtype_as_scalartype() == c10::kFloat)) return false;
  bool floating = false;
  for (const IValue &value : arguments_) {
    eachTensor(value, [&](const at::Tensor &tensor) {
      floating |= tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
                  !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
    });
  }
  return !floating;
}

void Call::wait() {
  noteSynchronization(info_.name);
  drawGenerators();
  countWrites();
  OpTimer timer(info_.counters->waited, info_.counters->waitedNs);
  std::optional<ToldOperator> told;
  const bool small = areSmall(c10::ArrayRef(arguments_.data(), arguments_.size()));
  if (sanitizerActive())
    told.emplace(op_, stream_, c10::ArrayRef(arguments_.data(), arguments_.size()));
  aliases_.emplace(stream_, device_->index());
  cpu_.reserve(arguments_.size());
  runOnLane(stream_, info_.name, small, [this] { run(); });
  finish();
  if (told) told->tellResults(torch::jit::last(*stack_, schema_.returns().size()));
  if (tellsValues()) OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream_));
}

/* In place: what comes out is what went in. */
std::shared_ptr<const Memo> inPlaceMemo(size_t results) {
  static const auto none = std::make_shared<const Memo>(Memo{true, {}, {}});
  static const auto self = std::make_shared<const Memo>(Memo{true, {Result{0, false, {}}}, {}});
  return results == 0 ? none : self;
}

/* The operator whose result is being inferred. When its out= form is called its output has the right
 * size; composite kernels, which are registered in the same place, call others. */
thread_local const OpInfo *inferring = nullptr;

/* False: the CPU's kernel may give its result other strides, as it casts first, and what it has cast is dense. */
bool metaKnowsStrides(const OpInfo &info, c10::ArrayRef<IValue> arguments) {
  if (!info.pointwise || info.inPlace) return true;
  std::optional<c10::ScalarType> dtype;
  bool casts = false, dense = true;
  for (const IValue &value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor &tensor = value.toTensor();
    if (!dtype) dtype = tensor.scalar_type();
    casts |= tensor.scalar_type() != *dtype || c10::isIntegralType(*dtype, /*includeBool=*/true);
    dense &= tensor.is_non_overlapping_and_dense();
  }
  return dense || !casts;
}

/* The call is that of the out= form. */
bool isInferred(const OperatorHandle &op, const OpInfo &info) {
  if (inferring == nullptr) return false;
  const std::string_view functional(inferring->name);
  if (info.name != functional.substr(0, functional.size() - inferring->inPlace)) return false;
  inferring = nullptr;
  return memoOfOutputs(info)->results.size() == op.schema().returns().size();
}

/* Makes the results by way of the operator's meta function, and queues its out= form. */
void inferAndRemember(const OperatorHandle &op, const OpInfo &info, Stack *stack,
                      const MemoKey &key) {
  struct Inferring {
    explicit Inferring(const OpInfo &functional) { inferring = &functional; }
    ~Inferring() { inferring = nullptr; }
  } scope(info);
  std::optional<ToldAs> told;
  if (sanitizerActive()) told.emplace(op);
  const Stack arguments(stack->end() - static_cast<int64_t>(info.isWritten.size()), stack->end());
  const std::vector<Layout> before = layoutsOf(arguments);
  op.redispatchBoxed(kInferringKeys, stack);
  const auto results = torch::jit::last(*stack, op.schema().returns().size());
  addMemo(key, lesson(info, arguments, before, results));
}

/* No dry run tells what comes out. */
std::shared_ptr<const Memo> whereDataDecides(const OperatorHandle &op, const OpInfo &info) {
  static const auto unknown = std::make_shared<const Memo>();
  return info.inPlace ? inPlaceMemo(op.schema().returns().size()) : unknown;
}

/* As every backend without a kernel for lists does. */
void runOneByOne(const OperatorHandle &op, Stack *stack) {
  op.redispatchBoxed(kInferringKeys, stack);
}

}  // namespace

void runCpuKernelWithParts(const OperatorHandle &op, Stack *stack, DispatchKey kernel) {
  if (runSparse(op, stack, kernel)) return;
  Call call(op, opInfo(op), stack, kernel);
  if (!call.prepare()) return runOneByOne(op, stack);
  if (!canMap(call.device().index())) return call.runCopying();
  installCpuAllocator();
  call.wait();
}

void runCpuKernel(const OperatorHandle &op, Stack *stack) {
  const OpInfo &info = opInfo(op);
  const size_t taken = info.isWritten.size();
  Results results;
  const auto giveResults = [&] {
    torch::jit::drop(*stack, taken);
    for (IValue &result : results) stack->push_back(std::move(result));
  };
  if (queueKnown(op, info, torch::jit::last(*stack, taken), results)) return giveResults();
  Call call(op, info, stack, DispatchKey::CPU);
  if (!call.prepare()) return runOneByOne(op, stack);
  if (!canMap(call.device().index())) return call.runCopying();
  installCpuAllocator();
  MemoKey key;
  if (!call.canQueue(key)) return call.wait();
  DryRun told{findMemo(key), {}};
  if (told.memo == nullptr) {
    const Stack arguments(stack->end() - static_cast<int64_t>(taken), stack->end());
    if (isInferred(op, info)) {
      checkTypes(op, info, call.device().index(), arguments);
      told.memo = memoOfOutputs(info);
    } else if (info.inferable && metaKnowsStrides(info, arguments)) {
      return inferAndRemember(op, info, stack, key);
    } else {
      told = dryRun(op, info, call.device().index(), arguments);
      if (told.memo == nullptr) told.memo = whereDataDecides(op, info);
      addMemo(key, told.memo);
    }
  }
  if (!told.memo->usable) return call.wait();
  for (const c10::Warning &warning : told.warnings) c10::warn(warning);
  call.drawGenerators();
  call.countWrites();
  enqueueCpuKernel(op, info, key, std::move(told.memo), call.device(), call.stream(),
                   torch::jit::last(*stack, taken), results, !told.warnings.empty());
  giveResults();
}

}  // namespace torch_openreg
