/*
 * Runs operators of sparse tensors, and some of quantized and nested ones.
 *
 * Most of PyTorch's kernels for sparse tensors are one function for the CPU and CUDA, composed of
 * operators on the components. With the device's tensors they run on the calling thread, and the
 * operators that they call are queued, or wait, as everywhere. The kernels that inspect, make or
 * copy quantized and nested tensors run in the same way (kSharedKernels...). The other kernels read
 * memory themselves (kOwnKernels). Of these, a product with a dense result is one task, over a
 * result that is allocated first. The rest have sizes that depend on data, and wait.
 *
 * A SparseTask carries CPU tensors over storages that have no address until it runs. It holds no
 * device tensor.
 */
#include "sparse.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "../torch/device.h"
#include "../torch/sanitizer.h"
#include "../torch/stream.h"
#include "../task/arguments.h"
#include "../task/cpu_alias.h"
#include "../task/kernel_memory.h"
#include "../task/task.h"
#include "../task/tensor_components.h"
#include "../task/worker_state.h"
#include "op_traits.h"
#include "operator_accesses.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

using Sizes = c10::SmallVector<int64_t, 2>;

/* Operators whose CPU kernels read memory themselves. A name without an overload stands for all.
 * Also those shared kernels that use a stub or go through the CPU: _sparse_mask_projection,
 * sparse_mask, to_sparse_bsc and to_sparse_bsr. */
constexpr std::string_view kOwnKernels[] = {
    "_coalesce",
    "_pin_memory",
    "_sparse_csr_prod",
    "_sparse_csr_sum",
    "_sparse_log_softmax",
    "_sparse_log_softmax_backward_data",
    "_sparse_mask_projection",
    "_sparse_mm_reduce_impl",
    "_sparse_mm_reduce_impl_backward",
    "_sparse_softmax",
    "_sparse_softmax_backward_data",
    "_sparse_sparse_matmul",
    "_sparse_sum_backward",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "add.out",
    "addmm",
    "addmm.out",
    "addmm_",
    "addmv.out",
    "bmm",
    "bmm.out",
    "hspmm",
    "hspmm.out",
    "index_select",
    "is_pinned",
    "mul.out",
    "sparse_mask",
    "sparse_sampled_addmm",
    "sparse_sampled_addmm.out",
    "sspaddmm.out",
    "triangular_solve.X",
};

/* The name without its namespace. */
std::string_view plainName(const OperatorHandle &op) {
  return std::string_view(op.schema().name()).substr(sizeof("aten::") - 1);
}

/* Exchanging rows and columns uses a stub of the CPU's. */
constexpr std::string_view kOwnKernelsOfCompressed[] = {"_to_sparse_csc", "_to_sparse_csr"};

/* Most kernels of quantized and nested tensors are the CPU's own. These are not. */
constexpr std::string_view kSharedKernelsOfQuantized[] = {
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "_reshape_alias",
    "as_strided",
    "clone",
    "empty.memory_format",
    "empty_like",
    "empty_quantized",
    "empty_strided",
    "q_per_channel_axis",
    "q_per_channel_scales",
    "q_per_channel_zero_points",
    "q_scale",
    "q_zero_point",
    "qscheme",
    "set_.source_Storage_storage_offset",
    "unfold",
    "view",
};
constexpr std::string_view kSharedKernelsOfNested[] = {
    "_nested_tensor_size",
    "_nested_tensor_storage_offsets",
    "_nested_tensor_strides",
    "_to_copy",
    "alias",
    "clone",
    "copy_",
    "empty_like",
    "unbind.int",
    "values",
    "view",
    "zero_",
};

bool isNamed(const OperatorHandle &op, std::string_view given) {
  const std::string_view name = plainName(op), overload = op.schema().overload_name();
  if (!given.starts_with(name)) return false;
  given.remove_prefix(name.size());
  return given.empty() || (given[0] == '.' && given.substr(1) == overload);
}

bool isAmong(const OperatorHandle &op, c10::ArrayRef<std::string_view> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](std::string_view given) { return isNamed(op, given); });
}

bool isMadeOfOperators(const OperatorHandle &op, DispatchKey kernel) {
  switch (kernel) {
    case DispatchKey::SparseCPU:
      return !isAmong(op, kOwnKernels);
    case DispatchKey::SparseCsrCPU:
      return !isAmong(op, kOwnKernels) && !isAmong(op, kOwnKernelsOfCompressed);
    case DispatchKey::QuantizedCPU:
      return isAmong(op, kSharedKernelsOfQuantized);
    default:
      return isAmong(op, kSharedKernelsOfNested);
  }
}

/* Whether a factor is dense. The product's kernel handles this first, in code that it shares with
 * CUDA's. */
bool isProductWithDense(const OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
  return plainName(op) == "mul" &&
         std::any_of(arguments.begin(), arguments.end() - 1,
                     [](auto &value) { return value.toTensor().layout() == c10::kStrided; });
}

/* The device of a device argument, else of the first tensor. */
c10::Device deviceOf(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> found;
  for (const IValue &value : arguments) {
    if (value.isDevice()) return value.toDevice();
    eachTensor(value, [&](const Tensor &tensor) {
      if (!found && tensor.defined() && tensor.is_privateuseone()) found = tensor.device();
    });
  }
  return found.value_or(c10::Device(c10::DeviceType::PrivateUse1, currentDevice()));
}

/* Runs a shared kernel on the calling thread. It makes new components on the current device. */
void runHere(const OperatorHandle &op, Stack *stack, DispatchKey kernel, c10::Device device) {
  std::optional<DeviceSwitch> current;
  if (device.is_privateuseone()) current.emplace(indexOrCurrent(device.index()));
  std::optional<ReportedAs> reported;
  if (sanitizerActive()) reported.emplace(op);
  const ForDevice kernelIsShared;
  op.redispatchBoxed(c10::DispatchKeySet(kernel), stack);
}

// ---- One task -----------------------------------------------------------------------------------

/* Runs an operator that leaves sizes as they are and makes no tensor. */
class SparseTask final : public Task {
 public:
  SparseTask(const OperatorHandle &op, const OpTraits &traits, DispatchKey kernel, c10::Device on)
      : Task(traits.name, on), op_(op), traits_(traits), kernel_(kernel) {}
  void add(const IValue &value);
  bool isSmall() const { return largest_ <= kSerial; }
  void run() override;

 private:
  struct Memory {
    KernelMemory device;
    c10::Storage cpu;
  };
  Tensor alias(const Tensor &tensor);
  c10::Storage storage(const c10::Storage &device);

  const OperatorHandle op_;
  const OpTraits &traits_;
  const DispatchKey kernel_;
  Stack arguments_;
  c10::SmallVector<Memory, 5> memories_;
  PairList<c10::StorageImpl, size_t> known_;  // position in `memories_`; used while it is made
  int64_t largest_ = 0;                       // elements of a tensor
};

c10::Storage SparseTask::storage(const c10::Storage &device) {
  c10::StorageImpl *impl = device.unsafeGetStorageImpl();
  if (const size_t *at = known_.find(impl)) return memories_[*at].cpu;
  known_.add(impl, memories_.size());
  memories_.push_back({KernelMemory(*impl), cpuStorage(nullptr, impl->nbytes())});
  return memories_.back().cpu;
}

Tensor SparseTask::alias(const Tensor &tensor) {
  if (!isPlain(tensor)) {
    Components parts = componentsOf(tensor);
    for (Tensor &part : parts) part = alias(part);
    return assemble(tensor, parts);
  }
  checkFitsStorage(tensor, name);
  largest_ = std::max(largest_, tensor.numel());
  return tensorOf(storage(tensor.storage()), DispatchKey::CPU, metadataOf(tensor),
                  tensor.storage_offset());
}

void SparseTask::add(const IValue &value) {
  arguments_.push_back(value.isTensor() ? IValue(alias(value.toTensor())) : value);
}

void SparseTask::run() {
  OpTimer timer(traits_.counters->queued, traits_.counters->queuedNs);
  for (Memory &memory : memories_) {
    if (!memory.device.isOnDevice()) continue;
    memory.cpu.set_data_ptr_noswap(
        c10::DataPtr(memory.device.address(), c10::Device(c10::DeviceType::CPU)));
  }
  Stack stack = arguments_;  // a graph's next replay needs the arguments too
  op_.redispatchBoxed(c10::DispatchKeySet(kernel_), &stack);
}

void queue(const OperatorHandle &op, c10::ArrayRef<IValue> arguments, DispatchKey kernel,
           c10::Device device) {
  const OpTraits &traits = opTraits(op);
  const orStream_t stream = getCurrentOpenRegStream(device.index()).stream();
  auto task = std::make_unique<SparseTask>(op, traits, kernel, device);
  for (const IValue &value : arguments) task->add(value);
  if (sanitizerActive()) reportOperator(op, stream, arguments, {});
  const bool small = task->isSmall();
  if (small) task->caller.threads = 1;
  launchTask(std::move(task), stream, {}, small ? orLaunchAnyThread : 0);
}

// ---- Sparse by dense ----------------------------------------------------------------------------

/* Whether CUDA's kernels accept the matrix without sorting it first: it has no block, batch or
 * dense dimension. */
bool isSparseMatrix(const Tensor &tensor) {
  if (tensor.dim() != 2) return false;
  if (tensor.is_sparse()) return tensor.sparse_dim() == 2 && tensor.is_coalesced();
  return tensor.layout() == c10::kSparseCsr || (tensor.layout() == c10::kSparseCsc && at::hasMKL());
}

/* The sizes of the dense result of `self + matrix @ dense` or `self + sparse`. None if a kernel may
 * refuse the arguments, or has to wait. */
std::optional<Sizes> sizesOfResult(std::string_view name, c10::ArrayRef<IValue> arguments) {
  const Tensor &self = arguments[0].toTensor(), &other = arguments[1].toTensor();
  if (self.layout() != c10::kStrided) return std::nullopt;
  if (name == "add") {
    const bool usual = other.is_sparse() || other.layout() == c10::kSparseCsr;
    if (!usual || self.sizes() != other.sizes()) return std::nullopt;
    return Sizes(self.sizes().begin(), self.sizes().end());
  }
  const Tensor &dense = arguments[2].toTensor();
  if (!isSparseMatrix(other) || dense.layout() != c10::kStrided) return std::nullopt;
  if (dense.dim() != (name == "addmv" ? 1 : 2) || dense.size(0) != other.size(1)) {
    return std::nullopt;
  }
  Sizes sizes{other.size(0)};
  if (name != "addmv") sizes.push_back(dense.size(1));
  return at::is_expandable_to(self.sizes(), sizes) ? std::optional(sizes) : std::nullopt;
}

/* A tensor of this device and dtype, or a number that fits it. */
bool isUsual(const IValue &value, c10::Device device, c10::ScalarType dtype) {
  if (value.isScalar()) return !value.toScalar().isComplex() || c10::isComplexType(dtype);
  if (!value.isTensor()) return true;
  const Tensor &tensor = value.toTensor();
  return tensor.defined() && tensor.device() == device && tensor.scalar_type() == dtype &&
         !tensor._is_zerotensor();
}

/* Whether the CPU's kernels accept all layouts of the dtype. */
bool isUsual(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kComplexFloat ||
         dtype == at::kComplexDouble;
}

bool queueWithDenseResult(const OperatorHandle &op, Stack *stack, DispatchKey kernel,
                          c10::Device device) {
  std::string_view name = plainName(op);
  const bool inPlace = name.ends_with('_');
  if (inPlace) name.remove_suffix(1);
  if (name != "addmm" && name != "addmv" && name != "add") return false;
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const c10::ScalarType dtype = arguments[0].toTensor().scalar_type();
  const bool usual =
      isUsual(dtype) && std::all_of(arguments.begin(), arguments.end(), [&](const IValue &value) {
        return isUsual(value, device, dtype);
      });
  if (!usual) return false;
  const std::optional<Sizes> sizes = sizesOfResult(name, arguments);
  if (!sizes) return false;
  const bool given = op.schema().overload_name() == "out";
  Tensor out = inPlace ? arguments[0].toTensor()
               : given ? arguments[count - 1].toTensor()
                       : at::empty(*sizes, arguments[0].toTensor().options());
  if (given && out.layout() == c10::kStrided && out.numel() == 0) out.resize_(*sizes);
  if (out.layout() != c10::kStrided || out.sizes() != *sizes) return false;
  if (inPlace || given) {
    queue(op, arguments, kernel, device);
  } else {
    Stack more(arguments.begin(), arguments.end());
    more.emplace_back(out);
    static auto &dispatcher = c10::Dispatcher::singleton();
    queue(dispatcher.findSchemaOrThrow(op.schema().name().c_str(), "out"), more, kernel, device);
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(out));
  return true;
}

}  // namespace

bool synchronizesElsewhere(const OperatorHandle &op, DispatchKey kernel) {
  const std::string_view name = plainName(op);
  // The CPU's kernel merges entries that CUDA's only puts side by side.
  if (name == "add" && kernel == DispatchKey::SparseCPU) return false;
  return name != "sparse_sampled_addmm";
}

bool runWithoutWait(const OperatorHandle &op, Stack *stack, DispatchKey kernel) {
  if (!opTraits(op).isAten || !op.hasKernelForDispatchKey(kernel)) return false;
  const bool sparse = kernel == DispatchKey::SparseCPU || kernel == DispatchKey::SparseCsrCPU;
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const c10::Device device = deviceOf(arguments);
  if (isMadeOfOperators(op, kernel) || (sparse && isProductWithDense(op, arguments))) {
    runHere(op, stack, kernel, device);
    return true;
  }
  return sparse && canMap(device.index()) && queueWithDenseResult(op, stack, kernel, device);
}

}  // namespace torch_openreg
