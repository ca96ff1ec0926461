/*
 * One boxed kernel for all operators: runs the CPU's kernel on a worker, over aliases of the
 * device's memory. Calls in the usual form end in fast_path.cpp. For other calls, `resolve` checks
 * and prepares the arguments and makes a plan, and `run` carries it out.
 *
 * If the caller waits, the worker makes aliases, runs the kernel and takes over its memory
 * (runOnAliases), and the caller's thread turns the results into its own tensors (finish). Where
 * kernels do not reach the device's memory, the aliases are of copies in host memory, which the
 * caller's thread makes before and copies back after. Only one thread at a time uses a Call.
 */
#include "fallback.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../torch/device.h"
#include "../torch/fork.h"
#include "../torch/generator.h"
#include "../torch/graph.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../torch/sync_debug.h"
#include "../torch/warnings.h"
#include "../task/cpu_alias.h"
#include "../task/cpu_memory.h"
#include "../task/host_copies.h"
#include "../task/task.h"
#include "../task/tensor_components.h"
#include "../task/worker_state.h"
#include "device_kernel.h"
#include "dry_run.h"
#include "op_generator.h"
#include "operator_accesses.h"
#include "operator_task.h"
#include "output_cache.h"
#include "python_kernels.h"
#include "shape_inference.h"
#include "sparse.h"

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

/* Operators that accept a 0-dim tensor from any device, and the position of that argument. */
struct NumberOfAnyDevice {
  std::string_view name;
  size_t place;
};
constexpr NumberOfAnyDevice kNumbersOfAnyDevice[] = {
    {"aten::fill_", 1}, {"aten::index_fill_", 3}, {"aten::_index_put_impl_", 2}};

bool isCpuByContract(const FunctionSchema &schema, const Argument &argument) {
  for (const CpuByContract &entry : kCpuByContract) {
    if (schema.name() == entry.name && argument.name() == entry.argument) return true;
  }
  return false;
}

/* Whether the argument is an index. A 0-dim index on the CPU is refused, as CUDA refuses it. */
bool isIndex(const FunctionSchema &schema, const Argument &argument) {
  const std::string &name = argument.name();
  return name == "index" || name == "indices" ||
         (name == "target" && schema.name().starts_with("aten::nll_loss"));
}

bool resultIsCpu(const FunctionSchema &schema, size_t result) {
  for (const CpuByContract &entry : kCpuByContract) {
    if (schema.name() == entry.name && static_cast<int>(result) == entry.result) return true;
  }
  return false;
}

/* Whether one thread suffices, as far as these tensors show. */
bool areSmall(c10::ArrayRef<IValue> values) {
  return !anyTensor(values, [](const at::Tensor &tensor) {
    return tensor.defined() && tensor.numel() > kSerial;
  });
}

/* The keys of autograd that the CPU's kernel has to handle itself. There are none for PyTorch's
 * operators, which have kernels for autograd. For another operator without such a kernel, the
 * operators inside its CPU kernel record gradients and increment versions: these keys are not
 * excluded there. */
DispatchKeySet keysOfAutograd(const OpTraits &traits) {
  if (traits.isAten) return {};
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView -
         c10::impl::tls_local_dispatch_key_set().excluded_;
}

uint32_t versionOf(const at::Tensor &tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

/* Whether the device is called "cuda" and the operator, an extension's, has a kernel for CUDA but
 * none for the CPU. Such an extension is built for the CPU, and its function for CUDA is the
 * device's. */
bool hasCudaKernelAlone(const OperatorHandle &op, const OpTraits &traits) {
  return !traits.isAten && op.hasKernelForDispatchKey(DispatchKey::CUDA) &&
         !op.hasComputedKernelForDispatchKey(DispatchKey::CPU) &&
         c10::get_privateuse1_backend() == "cuda";
}

void pushResults(Stack *stack, size_t taken, Results &results) {
  torch::jit::drop(*stack, taken);
  for (IValue &result : results) stack->push_back(std::move(result));
}

/* How a call is run. */
enum class CallStrategy {
  kQueue,      // the metadata of its results is known
  kWait,       // the results depend on data, or on the memory of components
  kInfer,      // PyTorch infers the results and calls the out= form
  kDevice,     // the device has a kernel of its own
  kCopy,       // kernels do not reach the device's memory
  kRecord,     // the operators inside the kernel record a gradient
  kComposite,  // a list on several devices, or the device has kernels for what is inside
};

/* The CPU's copy of a device tensor, whose gradient reaches the tensor. */
struct Copy {
  at::Tensor cpu;
  uint32_t version;  // before the kernel
};

struct Plan {
  CallStrategy strategy = CallStrategy::kWait;
  const char *name = nullptr;                // for kQueue and kDevice; null: the operator's
  CallKey key{};                             // for kQueue and kInfer
  std::shared_ptr<const OutputSpec> spec{};  // for kQueue
  std::vector<c10::Warning> warnings{};      // of a dry run
  std::unique_ptr<DeviceCall> call{};        // for kDevice
};

class Call {
 public:
  Call(const OperatorHandle &op, const OpTraits &traits, const ArgumentScan &scan, Stack *stack,
       DispatchKey kernel)
      : op_(op),
        traits_(traits),
        scan_(scan),
        kernel_(kernel),
        schema_(op.schema()),
        stack_(stack),
        arguments_(stack->data() + stack->size() - schema_.arguments().size(),
                   schema_.arguments().size()),
        device_(scan.device()),
        autograd_(keysOfAutograd(traits)) {}

  /* Chooses the strategy, and throws every error that can be found without running the call.
   * Queues, writes and draws nothing. */
  Plan resolve() {
    const bool maps = canMap(device_.index());
    const bool hasOwn = hasDeviceKernel(op_);
    const bool mixedList = traits_.isForeach && scan_.has(ArgumentScan::kMixed);
    if (mixedList || (!hasOwn && runsOwnKernels(device_.index()) && isComposite()))
      return {CallStrategy::kComposite};
    prepare();
    if (recordsGradient()) {
      checkCanRecord();
      return {CallStrategy::kRecord};
    }
    if (!(maps || hasOwn)) return {CallStrategy::kCopy};
    installCpuAllocator();
    Plan plan = predict();
    if (!maps || hasOwn) chooseOwn(plan, maps);
    return plan;
  }

  /* PyTorch has a kernel for it that calls other operators. */
  bool isComposite() const {
    return traits_.isForeach ||
           (hasInferringKernel(op_) && !op_.hasKernelForDispatchKey(DispatchKey::CPU));
  }

  /* Takes the device's own kernel if it accepts the call. Otherwise the CPU's kernel works on the
   * device's memory, or on copies if that cannot be mapped. */
  void chooseOwn(Plan &plan, bool maps) {
    if (plan.strategy == CallStrategy::kInfer) return;  // the out= form chooses
    if (maps && traits_.draws && graphBeingCaptured(stream_) != nullptr) return;
    if (plan.strategy == CallStrategy::kQueue) {
      plan.call = DeviceCall::make(op_, traits_, *plan.spec, device_, stream_, arguments());
    }
    if (plan.call != nullptr)
      plan.strategy = CallStrategy::kDevice;
    else if (!maps)
      plan.strategy = CallStrategy::kCopy;
  }

  /* Whether the results are known before the call runs. */
  Plan predict() {
    Plan plan;
    if (!canTryOut() || !makeKey(plan.key, traits_, arguments())) return plan;
    if (!isKnown(plan)) {
      if (isPredictable() && canInfer(traits_, arguments())) {
        plan.strategy = CallStrategy::kInfer;
        return plan;
      }
      tryOut(plan);
    }
    if (plan.spec->usable) plan.strategy = CallStrategy::kQueue;
    return plan;
  }

  /* A call that runs out of memory gives its draws back, because CUDA's kernels allocate before
   * they draw. A call on copies does so if the CPU's kernel refuses it. */
  void run(Plan plan) {
    const bool copies =
        plan.strategy == CallStrategy::kCopy || plan.strategy == CallStrategy::kRecord;
    try {
      runAs(std::move(plan));
    } catch (const c10::OutOfMemoryError &) {
      giveDrawsBack();
      throw;
    } catch (...) {
      if (copies) giveDrawsBack();
      throw;
    }
  }

 private:
  void giveDrawsBack() {
    for (const auto &[state, counter] : drawn_) state->giveBack(counter, 1);
  }
  c10::ArrayRef<IValue> arguments() const {
    return c10::ArrayRef<IValue>(arguments_.data(), arguments_.size());
  }
  /* Data decide whether the call succeeds, or the sizes of its results. */
  bool dataDecides() const {
    return (traits_.masksDecide ? scan_.has(ArgumentScan::kHasMask)
                                : op_.hasTag(at::Tag::dynamic_output_shape)) ||
           checksData(traits_, arguments());
  }
  bool metadataDecides() const { return traits_.predictable && !scan_.asksCpu() && !dataDecides(); }
  /* Its results can be promised before it runs. */
  bool isPredictable() const { return metadataDecides() && !readsHost_; }
  /* A dry run can find what the arguments decide. */
  bool canTryOut() const {
    return kernel_ == DispatchKey::CPU && (isPredictable() || dataDecides()) && !mayAlert();
  }
  /* The mode belongs to the process, and may have changed when a queued kernel reads it. */
  bool mayAlert() const { return traits_.alerts && at::globalContext().deterministicAlgorithms(); }
  /* It synchronises on every device, because its caller gets a value, a size or an error that
   * depends on data. */
  bool synchronizes() const { return !metadataDecides() || ordersAsSparse(); }
  bool ordersAsSparse() const {
    return (kernel_ == DispatchKey::SparseCPU || kernel_ == DispatchKey::SparseCsrCPU) &&
           synchronizesElsewhere(op_, kernel_);
  }

  // ---- Resolving --------------------------------------------------------------------------------

  void check(const at::Tensor &tensor, const Argument &argument) {
    if (!tensor.defined() || tensor.device() == device_) return;
    if (tensor.is_cpu() && !isWritten(argument)) {
      const bool number = tensor.dim() == 0 && !(traits_.isAten && isIndex(schema_, argument));
      if (number || isCpuByContract(schema_, argument)) return;
    }
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_, " and ", tensor.device(), "! (when checking argument ", argument.name(),
                " of ", op_.operator_name(), ")");
  }

  /* Refuses indices that are on neither the CPU nor the indexed tensor's device, with the message
   * of PyTorch's kernels, which is the same for every device. */
  void checkIndices() {
    if (!traits_.isAten || arguments_.empty() || !arguments_[0].isTensor()) return;
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

  /* The device's tensors, or the parts of those that consist of others. */
  template <typename Function>
  static void eachPart(const IValue &value, Function function) {
    eachTensor(value, [&](const at::Tensor &tensor) {
      if (!tensor.defined() || !tensor.is_privateuseone()) return;
      if (isPlain(tensor)) return function(tensor);
      for (const at::Tensor &part : componentsOf(tensor)) function(part);
    });
  }

  void checkStorages() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const std::string what =
          c10::str(op_.operator_name(), ", argument ", schema_.arguments()[i].name());
      eachPart(arguments_[i], [&](const at::Tensor &part) {
        if (!part._is_zerotensor()) checkFitsStorage(part, what.c_str());
      });
    }
  }

  void checkDevices() {
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

  /* Refuses an index in a CPU tensor without dimensions. The cache never has such a call, so each
   * comes here. */
  void checkNumbers() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isTensor()) check(arguments_[i].toTensor(), schema_.arguments()[i]);
    }
  }

  /* Copies the CPU's indices to the device, by a blocking copy, as on every device. */
  void moveIndices() {
    for (IValue &value : arguments_) {
      if (!value.isList() || !holdsOptionalTensors(value)) continue;
      value = argumentForCpu(value, [&](const at::Tensor &index) {
        return index.defined() && index.is_cpu() && index.dim() > 0 ? index.to(device_) : index;
      });
    }
  }

  /* Replaces zero tensors without memory, because a kernel needs memory to alias. */
  void makeZeros() {
    for (IValue &value : arguments_) {
      if (!value.isTensor() || !value.toTensor()._is_zerotensor()) continue;
      const at::Tensor tensor = value.toTensor();
      value = at::zeros(tensor.sizes(), tensor.options());
    }
  }

  void checkKernel() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(kernel_) && !hasPythonKernelAlone(op_, kernel_),
        "Could not run ", op_.operator_name(), " on ", deviceName(),
        ": there is neither a kernel for this device nor a compiled one for ",
        kernel_ == DispatchKey::CPU ? "the CPU" : c10::toString(kernel_));
  }

  /* Checks the arguments, and replaces those that no kernel could take. */
  void prepare() {
    const bool mixed = scan_.has(ArgumentScan::kMixed);
    if (mixed || traits_.masksDecide)
      checkDevices();
    else
      checkNumbers();
    if (mixed) moveIndices();
    if (scan_.has(ArgumentScan::kLacksMemory)) checkStorages();
    checkKernel();
    if (scan_.has(ArgumentScan::kHasZeros)) makeZeros();
    stream_ = getCurrentOpenRegStream(device_.index()).stream();
  }

  /* Whether the results are known, from an earlier call or from the one that infers. */
  bool isKnown(Plan &plan) {
    plan.spec = findOutputs(plan.key);
    const OpTraits *called = plan.spec == nullptr ? inferredBy(op_, traits_) : nullptr;
    if (called != nullptr) {
      plan.name = called->name;  // the name of later calls, which are not inferred
      checkTypes(op_, traits_, device_.index(), arguments());
      Results outputs;
      for (size_t i = 0; i < arguments_.size(); ++i) {
        if (traits_.isOut[i]) outputs.push_back(arguments_[i]);
      }
      const auto spec = writtenOutputs(traits_);
      spec->inDefaultDtype = inDefaultDtype(traits_, arguments(), outputs);
      plan.spec = spec;
    }
    return plan.spec != nullptr;
  }

  /* Whether the operators inside the kernel record a gradient. */
  bool recordsGradient() const {
    if (!autograd_.has(DispatchKey::AutogradFunctionality)) return false;
    return anyTensor(arguments(), [](const at::Tensor &tensor) {
      return tensor.defined() && ((c10::GradMode::is_enabled() && tensor.requires_grad()) ||
                                  tensor._fw_grad(/*level=*/0).defined());
    });
  }

  /* Refuses a call in which tensors have to share memory, because the copies of kRecord do not. */
  void checkCanRecord() {
    std::vector<std::pair<at::Tensor, bool>> tensors;  // with whether it is written
    for (size_t i = 0; i < arguments_.size(); ++i) {
      eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
        if (!tensor.defined() || !isPlain(tensor)) return;
        for (const auto &[other, written] : tensors) {
          const bool shared = !other.is_same(tensor) && other.is_alias_of(tensor);
          TORCH_CHECK_NOT_IMPLEMENTED(!shared || !(written || traits_.isWritten[i]),
                                      op_.operator_name(), " on ", deviceName(),
                                      " writes memory that two of its arguments share, and has no "
                                      "derivative of its own for those that require a gradient");
        }
        tensors.emplace_back(tensor, traits_.isWritten[i]);
      });
    }
    for (const Argument &result : schema_.returns()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!isView(result), op_.operator_name(), " on ", deviceName(),
                                  " returns a view, and has no derivative of its own for arguments "
                                  "that require a gradient");
    }
  }

  void tryOut(Plan &plan) {
    DryRun tried = dryRun(op_, traits_, device_.index(), arguments());
    plan.spec = std::move(tried.spec);
    // Where data decide, an operator in place still returns its argument.
    if (plan.spec == nullptr || !isPredictable()) {
      auto spec = std::make_shared<OutputSpec>();
      spec->usable = traits_.inPlace;
      if (!schema_.returns().empty()) spec->results.push_back({0, false, {}});
      plan.spec = std::move(spec);
    }
    plan.warnings = std::move(tried.warnings);
    // A kernel warns of indices of bytes, and of bounds, at each call. Such a call is not cached.
    const bool warns =
        scan_.has(ArgumentScan::kHasByteIndex) || (traits_.draws && !plan.warnings.empty());
    if (plan.spec->usable && warns) return;
    cacheOutputs(plan.key, plan.spec);
  }

  // ---- Running ----------------------------------------------------------------------------------

  GeneratorStatePtr generatorState(const IValue &given) {
    at::Generator generator =
        given.isNone() ? getDefaultGenerator(device_.index()) : given.toGenerator();
    TORCH_CHECK(generator.device().type() == device_.type(), "Expected a '", device_.type(),
                "' device type for generator but found '", generator.device().type(), "'");
    TORCH_CHECK(generator.device() == device_, "Expected a generator of ", device_, " for ",
                op_.operator_name(), " but found one of ", generator.device());
    return generator.get<OpenRegGeneratorImpl>()->state();
  }

  uint64_t drawFrom(const GeneratorStatePtr &state) {
    const auto [seed, counter] = state->draw();
    drawn_.emplace_back(state, counter);
    return mixedSeed(seed, counter);
  }

  /* A new CPU generator for this call alone, seeded by a draw from the device's generator. */
  IValue cpuGenerator(const IValue &given) {
    const auto state = generatorState(given);
    if (const auto graph = graphBeingCaptured(stream_))
      return at::make_generator<ReplayedGenerator>(CapturedGraph::draw(graph, state));
    return at::detail::createCPUGenerator(drawFrom(state));
  }

  void drawGenerators() {
    if (!traits_.draws) return;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      IValue &value = arguments_[i];
      if (traits_.isGenerator[i]) value = cpuGenerator(value);
    }
  }

  /* Draws, and counts writes. Nothing refuses the call after this. */
  void begin() {
    drawGenerators();
    countWrites(traits_, arguments());
  }

  const char *nameOf(const Plan &plan) const {
    return plan.name != nullptr ? plan.name : traits_.name;
  }

  void queue(Plan plan) {
    for (const c10::Warning &warning : plan.warnings) c10::warn(warning);
    begin();
    Results results;
    queueOperator(op_, traits_, nameOf(plan), plan.key, std::move(plan.spec), device_, stream_,
                  arguments(), results, !plan.warnings.empty());
    pushResults(stack_, arguments_.size(), results);
  }

  void queueOnDevice(Plan plan) {
    for (const c10::Warning &warning : plan.warnings) c10::warn(warning);
    TORCH_CHECK_NOT_IMPLEMENTED(!traits_.draws || graphBeingCaptured(stream_) == nullptr,
                                op_.operator_name(), " on ", deviceName(),
                                " draws random numbers and cannot be captured: each replay would "
                                "draw the same");
    countWrites(traits_, arguments());
    const char *name = nameOf(plan);
    Results results = DeviceCall::queue(std::move(plan.call), name, arguments(), [this](size_t i) {
      return drawFrom(generatorState(arguments_[i]));
    });
    pushResults(stack_, arguments_.size(), results);
  }

  at::Tensor aliasOf(const at::Tensor &tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_privateuseone()) return aliases_ ? aliases_->of(tensor) : recordedCopyOf(tensor);
    if (aliases_) aliases_->passed(tensor);
    return tensor;
  }

  IValue forKernel(const IValue &value) {
    return argumentForCpu(value, [this](const at::Tensor &tensor) { return aliasOf(tensor); });
  }

  /* Called on the worker, outside WorkerMemory. */
  void prepareResult(IValue &value, size_t position) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const at::Tensor &result = value.toTensor();
    if (scan_.asksCpu() || resultIsCpu(schema_, position)) {
      value = result.clone();
      aliases_->passed(value.toTensor());
    } else if (result.is_mkldnn()) {  // kernels of oneDNN may return its opaque layout
      value = result.to_dense();
    }
  }

  /* Makes the kernel's memory device memory, apart from results that stay on the CPU. */
  void adopt() {
    aliases_->adoptResized();
    for (const IValue &value : cpu_) {
      eachTensor(value, [&](const at::Tensor &tensor) { aliases_->adoptResult(tensor); });
    }
  }

  /* On a worker. */
  void runKernel() {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    const c10::impl::ForceDispatchKeyGuard guard(keys.included_, keys.excluded_ - autograd_);
    op_.redispatchBoxed(DispatchKeySet(kernel_), &cpu_);
  }

  void runOnAliases() {
    std::optional<WorkerMemory> memory;
    if (!copies_) memory.emplace(stream_, device_.index());
    for (const IValue &value : arguments_) cpu_.push_back(forKernel(value));
    if (late_) late_.resolve(schema_.name(), cpu_);
    runKernel();
    memory.reset();
    for (size_t i = 0; i < cpu_.size(); ++i) prepareResult(cpu_[i], i);
    if (!copies_) adopt();
  }

  IValue toCaller(const IValue &value, size_t position) {
    const auto convert = [&](const at::Tensor &tensor) {
      return aliases_ ? aliases_->toCaller(tensor) : fromRecorded(tensor, position);
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor &tensor : value.toTensorList()) list.push_back(convert(tensor));
      return list;
    }
    return value;
  }

  void finish() {
    if (aliases_) aliases_->updateCallers();
    torch::jit::drop(*stack_, arguments_.size());
    for (size_t i = 0; i < cpu_.size(); ++i) stack_->push_back(toCaller(cpu_[i], i));
  }

  at::Tensor recordedCopyOf(const at::Tensor &tensor) {
    if (const Copy *known = recorded_.find(tensor.unsafeGetTensorImpl())) return known->cpu;
    const at::Tensor copy = tensor.cpu();
    originals_.add(copy.unsafeGetTensorImpl(), tensor);
    return recorded_.add(tensor.unsafeGetTensorImpl(), Copy{copy, versionOf(copy)}).cpu;
  }

  /* Copies back what the kernel has written. Autograd sees a write to the original if it has seen
   * the kernel's. */
  void returnWrites() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
        const Copy *copy = recorded_.find(tensor.unsafeGetTensorImpl());
        if (copy == nullptr) return;
        if (versionOf(copy->cpu) != copy->version) {
          tensor.copy_(copy->cpu);
        } else if (traits_.isWritten[i]) {
          const at::AutoDispatchBelowADInplaceOrView unseen;
          at::_copy_from_and_resize(copy->cpu, tensor);
        }
      });
    }
  }

  at::Tensor fromRecorded(const at::Tensor &result, size_t position) {
    if (at::Tensor *original = originals_.find(result.unsafeGetTensorImpl())) return *original;
    if (!result.defined() || scan_.asksCpu() || resultIsCpu(schema_, position)) return result;
    return result.to(device_);
  }

  /* Copies everything to the CPU and back, for a kernel whose own operators record a gradient. They
   * do so for CPU tensors, on the thread that calls them. */
  void record() {
    const SyncNoted noted(traits_.name, stream_);
    begin();
    const OpTimer timer(traits_.counters->copied, traits_.counters->copiedNs);
    for (const IValue &value : arguments_) cpu_.push_back(forKernel(value));
    {
      const ForDevice kernelOnCopies;
      op_.redispatchBoxed(DispatchKeySet(kernel_), &cpu_);
    }
    returnWrites();
    finish();
  }

  /* Whether the kernel may read a storage outside of the tensor that it gets. */
  bool readsStorages() const {
    return !traits_.isAten || schema_.name().starts_with("aten::as_strided");
  }

  void fetchCopies() {
    copies_.emplace(stream_);
    for (const IValue &value : arguments_) {
      eachPart(value, [&](const at::Tensor &part) {
        const c10::StorageImpl &storage = *part.storage().unsafeGetStorageImpl();
        readsStorages() ? copies_->fetch(storage, 0, storage.nbytes()) : copies_->fetch(part);
      });
    }
    if (traits_.isAten) return;
    // An extension's kernel may write what the schema does not say, and around its tensors.
    for (const IValue &value : arguments_) {
      eachPart(value, [&](const at::Tensor &part) {
        copies_->keep(*part.storage().unsafeGetStorageImpl());
      });
    }
  }

  void returnCopies() {
    adopt();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!traits_.isWritten[i] && !traits_.isWrittenUnsaid[i]) continue;
      eachTensor(arguments_[i], [&](const at::Tensor &tensor) {
        if (tensor.defined() && tensor.is_privateuseone()) aliases_->writeBack(tensor);
      });
    }
    if (traits_.isAten) return;
    for (const IValue &value : arguments_)
      eachPart(value, [&](const at::Tensor &part) { copies_->writeChanges(part); });
  }

  /* The kernel runs while the caller waits. */
  void wait(bool onCopies) {
    const SyncNoted noted(traits_.name, stream_);
    begin();
    const OpTimer timer = onCopies ? OpTimer(traits_.counters->copied, traits_.counters->copiedNs)
                                   : OpTimer(traits_.counters->waited, traits_.counters->waitedNs);
    std::optional<OperatorReport> report;
    const bool small = areSmall(arguments());
    const bool orders = synchronizes();  // before `finish` removes the arguments
    if (sanitizerActive()) report.emplace(op_, stream_, arguments(), late_);
    std::optional<StreamTurn> turn;
    if (onCopies) {
      turn.emplace(stream_);
      fetchCopies();
    }
    aliases_.emplace(stream_, device_.index(), /*sharesVersions=*/!traits_.isAten,
                     onCopies ? &*copies_ : nullptr);
    cpu_.reserve(arguments_.size());
    runOnWorker(stream_, traits_.name, small, [this] { runOnAliases(); });
    if (onCopies) returnCopies();
    turn.reset();
    finish();
    if (report) report->reportResults(torch::jit::last(*stack_, schema_.returns().size()));
    if (orders) OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(stream_));
  }

  void runAs(Plan plan) {
    switch (plan.strategy) {
      case CallStrategy::kQueue:
        return queue(std::move(plan));
      case CallStrategy::kWait:
        return wait(/*onCopies=*/false);
      case CallStrategy::kDevice:
        return queueOnDevice(std::move(plan));
      case CallStrategy::kInfer:
        return inferAndRun(op_, traits_, stack_, plan.key);
      case CallStrategy::kCopy:
        return wait(/*onCopies=*/true);
      case CallStrategy::kRecord:
        return record();
      case CallStrategy::kComposite:  // as every backend without a kernel of its own does
        return op_.redispatchBoxed(kInferringKeys, stack_);
    }
  }

  const OperatorHandle &op_;
  const OpTraits &traits_;
  const ArgumentScan scan_;
  const DispatchKey kernel_;  // the CPU's for this kind of tensor
  const FunctionSchema &schema_;
  Stack *stack_;
  std::span<IValue> arguments_;  // on the stack
  const c10::Device device_;
  const DispatchKeySet autograd_;  // the keys that the kernel handles itself
  bool readsHost_ = false;         // an argument is a CPU tensor and no number
  orStream_t stream_ = 0;
  c10::SmallVector<std::pair<GeneratorStatePtr, uint64_t>, 1> drawn_;  // with the counter
  Stack cpu_;  // the kernel's arguments, then its results
  std::optional<CpuAliases> aliases_;
  LateAccess late_;  // of the first argument, while the sanitizer is on
  // For kCopy.
  std::optional<HostCopies> copies_;
  // For kRecord, which has no aliases.
  PairList<c10::TensorImpl, Copy> recorded_;         // by the device's tensor
  PairList<c10::TensorImpl, at::Tensor> originals_;  // by its copy
};

/* Moves the number of kNumbersOfAnyDevice to the device of the written tensor; returns false if
 * there is none to move. The operator's other arguments may all be on the CPU. */
bool moveNumber(const FunctionSchema &schema, std::span<IValue> arguments) {
  for (const NumberOfAnyDevice &entry : kNumbersOfAnyDevice) {
    if (schema.name() != entry.name) continue;
    IValue &value = arguments[entry.place];
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() != 0)
      return false;
    const c10::Device device = arguments[0].toTensor().device();
    if (value.toTensor().device() == device) return false;
    value = value.toTensor().to(device);
    return true;
  }
  return false;
}

}  // namespace

void runScanned(const OperatorHandle &op, const OpTraits &traits, const ArgumentScan &scan,
                Stack *stack, DispatchKey kernel) {
  if (C10_UNLIKELY(scan.has(ArgumentScan::kMixed)) && kernel == DispatchKey::CPU) {
    const size_t count = op.schema().arguments().size();
    const std::span<IValue> arguments(stack->data() + stack->size() - count, count);
    if (moveNumber(op.schema(), arguments)) {
      const bool ours = anyTensor(
          c10::ArrayRef<IValue>(arguments.data(), count),
          [](const at::Tensor &tensor) { return tensor.defined() && tensor.is_privateuseone(); });
      return op.redispatchBoxed(DispatchKeySet(ours ? DispatchKey::PrivateUse1 : DispatchKey::CPU),
                                stack);
    }
  }
  Call call(op, traits, scan, stack, kernel);
  call.run(call.resolve());
}

void runCpuKernel(const OperatorHandle &op, Stack *stack) {
  const OpTraits &traits = opTraits(op);
  const size_t taken = traits.isWritten.size();
  ArgumentScan scan;
  Results results;
  if (tryFastPath(op, traits, torch::jit::last(*stack, taken), scan, results)) {
    return pushResults(stack, taken, results);
  }
  if (C10_UNLIKELY(hasCudaKernelAlone(op, traits))) {
    return op.redispatchBoxed(DispatchKeySet(DispatchKey::CUDA), stack);
  }
  runScanned(op, traits, scan, stack);
}

void runCpuKernelWithComponents(const OperatorHandle &op, Stack *stack, DispatchKey kernel) {
  if (runWithoutWait(op, stack, kernel)) return;
  const OpTraits &traits = opTraits(op);
  ArgumentScan scan;
  scan.scan(traits, torch::jit::last(*stack, traits.isWritten.size()));
  runScanned(op, traits, scan, stack, kernel);
}

}  // namespace torch_openreg
