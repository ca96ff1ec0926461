#include "operator_task.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/Resize.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "../torch/allocator.h"
#include "../torch/gil.h"
#include "../torch/graph.h"
#include "../torch/host_access.h"
#include "../torch/kernel_failures.h"
#include "../torch/sanitizer.h"
#include "../task/task_half.h"
#include "../task/tensor_metadata.h"
#include "device_kernel.h"
#include "graph_node.h"
#include "index_accesses.h"
#include "operator_accesses.h"
#include "recycled_memory.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

/* The spec of a destroyed task is released when its memory is used again, so that only threads that
 * make tasks change its count of references. */
using TaskMemory = RecycledMemory<std::shared_ptr<const OutputSpec>>;
thread_local TaskMemory taskMemory;

IValue withCpuAsDevice(const IValue &value) {
  const bool ours = value.isDevice() && value.toDevice().is_privateuseone();
  return ours ? IValue(c10::Device(c10::DeviceType::CPU)) : value;
}

/* ---- results that are not where they were promised ---- */

struct Move {
  at::Tensor made;
  TensorMetadata promised;
  const Reserved &to;
};

bool liesIn(const void *data, const Reserved &memory) {
  const auto *begin = static_cast<const char *>(memory.address);
  return data >= begin && data < begin + memory.bytes;
}

/* Copies results to where they were promised. A kernel may have made a tensor in the memory of
 * another result; such a tensor is cloned before that result is written. */
void finishMoves(c10::ArrayRef<Reserved> reserved, std::vector<Move> &moves) {
  for (Move &move : moves) {
    const void *data = move.made.storage().data();
    const bool inTheWay = std::any_of(reserved.begin(), reserved.end(),
                                      [&](const Reserved &memory) { return liesIn(data, memory); });
    if (inTheWay) move.made = move.made.clone();
  }
  for (const Move &move : moves) {
    tensorOf(cpuStorage(move.to.address, move.to.bytes), DispatchKey::CPU, move.promised)
        .copy_(move.made);
  }
}

std::string described(const TensorMetadata &metadata) {
  return c10::str(metadata.dtype, " of sizes ", metadata.sizes, " and strides ", metadata.strides,
                  metadata.conj ? " with the conj bit" : "",
                  metadata.neg ? " with the neg bit" : "");
}

/* Checks that the kernel has made the promised sizes and dtype. Strides may differ: a meta function
 * guesses them, and a kernel may choose them by the number of its threads or by oneDNN's switch
 * (convolution). A tensor with other strides is copied. */
void checkResult(const at::Tensor &made, const TensorMetadata &promised, const OperatorTask &task) {
  TORCH_CHECK(promised.describesSizes(made), "a kernel of ", task.traits.name, " made ",
              described(metadataOf(made)), " where ", described(promised), " was promised");
}

/* Visits the fresh results on the kernel's stack, with their promised metadata. */
template <typename F>
void eachFresh(const OperatorTask &task, const Stack &stack, F visit) {
  for (size_t i = 0; i < task.spec->results.size(); ++i) {
    const ResultSpec &result = task.spec->results[i];
    if (result.argument >= 0) continue;
    if (!result.isList) {
      visit(stack[i].toTensor(), result.fresh[0]);
      continue;
    }
    const auto items = stack[i].toListRef();
    TORCH_CHECK(items.size() == result.fresh.size(), "a kernel of ", task.traits.name, " made ",
                items.size(), " results where ", result.fresh.size(), " were promised");
    for (size_t k = 0; k < items.size(); ++k) visit(items[k].toTensor(), result.fresh[k]);
  }
}

/* Their kernels raise an error for some values. The others are those that take indices. */
constexpr std::string_view kRefuse[] = {"aten::_assert_async",
                                        "aten::bernoulli",
                                        "aten::bernoulli_",
                                        "aten::binary_cross_entropy",
                                        "aten::embedding_dense_backward",
                                        "aten::embedding_renorm_",
                                        "aten::masked_scatter_",
                                        "aten::multi_margin_loss",
                                        "aten::multilabel_margin_loss_forward",
                                        "aten::multinomial",
                                        "aten::nll_loss2d_forward",
                                        "aten::nll_loss_forward",
                                        "aten::poisson"};

bool refusesValues(const OpTraits &traits) {
  thread_local ska::flat_hash_map<const OpTraits *, bool> known;
  const auto found = known.find(&traits);
  if (C10_LIKELY(found != known.end())) return found->second;
  std::string_view name = traits.name;
  name = name.substr(0, name.find('.'));
  const bool refuses = takesIndices(name) ||
                       std::find(std::begin(kRefuse), std::end(kRefuse), name) != std::end(kRefuse);
  return known[&traits] = refuses;
}

/* The out= form of a comparison in place. */
OperatorHandle outFormOf(const OperatorHandle &op) {
  const std::string &name = op.schema().name();
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, name.size() - 1).c_str(), (op.schema().overload_name() + "_out").c_str());
}

/* Resizes the outputs that get their size from the call, and then makes the key of the arguments
 * anew. */
void resizeOutputs(const OutputSpec &spec, const OpTraits &traits, c10::ArrayRef<IValue> arguments,
                   CallKey &key, bool warned) {
  if (C10_LIKELY(spec.resizes.empty())) return;
  if (!warned && spec.resizeWarnings) {
    for (const c10::Warning &warning : *spec.resizeWarnings) c10::warn(warning);
    warned = true;
  }
  for (const Resize &resize : spec.resizes) {
    const at::Tensor &output = arguments[resize.argument].toTensor();
    const KeptMetadata &metadata = resize.metadata;
    if (!warned) at::native::resize_output_check(output, metadata.sizes());
    output.resize_(metadata.sizes());
    output.unsafeGetTensorImpl()->set_sizes_and_strides(metadata.sizes(), metadata.strides());
  }
  key.clear();
  makeKey(key, traits, arguments);
}

}  // namespace

/* ---- a task ---- */

void *OperatorTask::operator new(size_t bytes) { return taskMemory.take(bytes); }

void OperatorTask::operator delete(OperatorTask *task, std::destroying_delete_t) {
  std::shared_ptr<const OutputSpec> last = std::move(task->spec);
  task->~OperatorTask();
  TaskMemory::give(task, std::move(last));
}

size_t OperatorTask::addMemory(StorageImpl *storage, Storages &known) {
  if (const size_t *memory = known.find(storage)) return *memory;
  memories.emplace_back(*storage);
  return known.add(storage, memories.size() - 1);
}

void OperatorTask::addTensor(const at::Tensor &tensor, Storages &known) {
  if (!tensor.defined()) return;
  largest = std::max(largest, tensor.numel());
  if (tensor.is_privateuseone()) {
    places.push_back(
        {addMemory(tensor.storage().unsafeGetStorageImpl(), known), tensor.storage_offset()});
  } else {
    TORCH_INTERNAL_ASSERT(tensor.dim() == 0, traits.name, " would read a CPU tensor later");
    std::memcpy(numbers.emplace_back().bytes.data(), tensor.const_data_ptr(), tensor.itemsize());
  }
}

void OperatorTask::add(const IValue &value, Storages &known) {
  if (value.isTensor()) {
    addTensor(value.toTensor(), known);
  } else if (!value.isList()) {
    others.push_back(withCpuAsDevice(value));
  } else if (value.isTensorList() || holdsOptionalTensors(value)) {
    for (const IValue &item : value.toListRef()) {
      if (!item.isNone()) addTensor(item.toTensor(), known);
    }
  } else if (value.toList().use_count() > 2) {
    others.emplace_back(value.toList().copy());  // TorchScript's own, which the script may change
  } else {
    others.push_back(value);
  }
}

at::Tensor allocateResult(const KeptMetadata &metadata, c10::Device device, orStream_t stream,
                          KernelMemory &memory) {
  if (!metadata.isDefined()) return {};
  const size_t bytes = metadata.bytes();
  void *block = nullptr;
  if (bytes != 0) {
    describeNextBlock(TensorMetadata(metadata).dtype);
    block = allocateBlock(bytes, stream, device.index());
  }
  memory = KernelMemory(block, bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, ownBlock(block, device.index()),
                       &deviceAllocator(), /*resizable=*/true);
  return tensorOf(std::move(storage), DispatchKey::PrivateUse1, metadata);
}

at::Tensor OperatorTask::makeResult(const KeptMetadata &metadata, orStream_t stream) {
  if (!metadata.isDefined()) return {};
  largest = std::max(largest, c10::multiply_integers(metadata.sizes()));
  return allocateResult(metadata, device, stream, results.emplace_back());
}

/* ---- on the worker ---- */

KernelArguments::KernelArguments(OperatorTask &task) : task_(task), reader_(task.key) {
  for (const KernelMemory &memory : task.memories) {
    storages_.push_back(cpuStorage(memory.address(), memory.bytes));
  }
}

at::Tensor KernelArguments::tensor() {
  const bool number = reader_.isCpu();
  const int64_t offset = number ? 0 : task_.places[places_].offset;
  c10::Storage storage =
      number ? cpuStorage(task_.numbers[numbers_++].bytes.data(), sizeof(OperatorTask::Number))
             : storages_[task_.places[places_++].memory];
  const TensorMetadata metadata = reader_.tensor();
  at::Tensor made = tensorOf(std::move(storage), DispatchKey::CPU, metadata, offset);
  if (writing_) written_.push_back({made, metadata});
  return made;
}

at::Tensor KernelArguments::item() {
  return reader_.next() == KeyReader::kTensor ? tensor() : at::Tensor();
}

IValue KernelArguments::next(bool written) {
  writing_ = written;
  const KeyReader::Kind kind = reader_.next();
  if (kind == KeyReader::kTensor) return tensor();
  if (kind == KeyReader::kUndefined) return at::Tensor();
  if (kind == KeyReader::kOther) return task_.others[others_++];
  const size_t count = reader_.count();
  if (kind == KeyReader::kTensors) {
    c10::List<at::Tensor> list;
    list.reserve(count);
    for (size_t i = 0; i < count; ++i) list.push_back(item());
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (size_t i = 0; i < count; ++i) {
    at::Tensor made = item();
    list.push_back(made.defined() ? std::optional(std::move(made)) : std::nullopt);
  }
  return list;
}

Stack KernelArguments::stack() {
  Stack stack;
  stack.reserve(task_.traits.isWritten.size());
  for (const bool written : task_.traits.isWritten) stack.push_back(next(written));
  return stack;
}

/* In place and with out=, the kernel has promised to leave metadata unchanged. */
void KernelArguments::checkWritten() const {
  for (const auto &[tensor, promised] : written_) {
    TORCH_CHECK(tensor.sizes() == promised.sizes && tensor.strides() == promised.strides,
                "a kernel of ", task_.traits.name, " resized its output to ", tensor.sizes(),
                " where ", promised.sizes, " was promised");
    const bool conj = tensor.is_conj() != promised.conj;
    TORCH_CHECK(!conj && tensor.is_neg() == promised.neg, "a kernel of ", task_.traits.name,
                " changed the ", conj ? "conj" : "neg", " bit of its output");
  }
}

void OperatorTask::place(Stack &stack, c10::ArrayRef<Reserved> reserved) const {
  std::vector<Move> moves;
  size_t next = 0;
  eachFresh(*this, stack, [&](at::Tensor made, const TensorMetadata &promised) {
    if (made.defined() && made.is_mkldnn()) made = made.to_dense();
    checkResult(made, promised, *this);
    if (!made.defined()) return;
    const Reserved &to = reserved[next++];
    const bool there = made.storage().data() == to.address && made.storage_offset() == 0 &&
                       promised.hasPlaces(made.strides());
    if (to.bytes != 0 && !there) moves.push_back({std::move(made), promised, to});
  });
  if (!moves.empty()) finishMoves(reserved, moves);
}

/* Runs half of a pointwise operator with at most one fresh result. Returns false if it cannot be
 * divided. */
bool OperatorTask::runHalf(orPart part, Stack &stack, c10::ArrayRef<Reserved> reserved) const {
  const KeptMetadata *made = nullptr;
  if (spec != nullptr) {
    const ResultSpec &result = spec->results[0];
    if (spec->results.size() != 1 || result.isList || !result.fresh[0].isDefined()) return false;
    made = &result.fresh[0];
  }
  std::vector<int64_t> sizes;
  for (const IValue &value : stack) {
    if (value.isTensor() && value.toTensor().defined()) {
      sizes = at::infer_size(sizes, value.toTensor().sizes());
    }
  }
  const TaskHalf half(part, sizes);
  if (!half.isPossible()) return false;
  for (IValue &value : stack) {
    if (value.isTensor() && value.toTensor().defined()) value = half.of(value.toTensor());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  if (made == nullptr || reserved[0].bytes == 0) return true;
  const at::Tensor whole =
      tensorOf(cpuStorage(reserved[0].address, reserved[0].bytes), DispatchKey::CPU, *made);
  half.of(whole).copy_(stack[0].toTensor());
  return true;
}

void OperatorTask::runKernel(Stack &stack, c10::SmallVectorImpl<Reserved> &reserved) const {
  WorkerOutputs outputs(reserved.data(), reserved.size());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

/* ---- in a graph ---- */

/* Gives the kernel the default dtype of the call, because the process's may have changed since. It
 * is the dtype argument of operators that have one. For other operators, integers are converted
 * before the kernel, except conditions and a tensor that all members of a list share. For a
 * comparison in place `op` is the out= form, which compares the converted tensors. */
void OperatorTask::useDefaultDtype(Stack &stack) const {
  if (C10_LIKELY(inDefaultDtype.empty())) return;
  const auto &arguments = op.schema().arguments();
  if (const auto dtype = op.schema().argumentIndexWithName("dtype")) {
    IValue &asked = stack[static_cast<size_t>(*dtype)];
    if (asked.isNone()) asked = static_cast<int64_t>(defaultDtype);
    return;
  }
  if (traits.inPlace) stack.push_back(stack[0]);
  for (size_t i = 0; i < traits.isWritten.size(); ++i) {
    const bool written = traits.isWritten[i] && !traits.inPlace;
    if (written || arguments[i].name() == "condition") continue;
    if (traits.isForeach && !stack[i].isTensorList()) continue;
    size_t member = 0;
    stack[i] = argumentForCpu(stack[i], [&](const at::Tensor &tensor) {
      const bool converts = !traits.isForeach || inDefaultDtype[member++];
      return converts && tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()
                 ? tensor.to(defaultDtype)
                 : tensor;
    });
  }
}

c10::SmallVector<Reserved, 2> OperatorTask::reserved() const {
  c10::SmallVector<Reserved, 2> places;
  for (const KernelMemory &result : results) places.push_back({result.address(), result.bytes});
  return places;
}

void OperatorTask::runAsNode() {
  if (node_ == nullptr || !node_->fits(*this)) node_ = std::make_shared<GraphNode>(*this);
  try {
    node_->run(*this);
  } catch (...) {
    node_.reset();  // the kernel may have left its arguments in any state
    throw;
  }
}

void OperatorTask::run() {
  try {
    runWhole();
  } catch (...) {
    setFailureStack(stack);
    throw;
  }
}

/* Replays are not counted as calls, and neither are the halves of a split one. */
void OperatorTask::runWhole() {
  const orPart part = canSplit() ? orTaskPart() : orPartWhole;
  if (isNode && part == orPartWhole) return runAsNode();
  std::optional<OpTimer> timer;
  if (C10_LIKELY(!isNode)) timer.emplace(traits.counters->queued, traits.counters->queuedNs);
  c10::SmallVector<Reserved, 2> places = reserved();
  KernelArguments arguments(*this);
  Stack stack = arguments.stack();
  if (C10_UNLIKELY(late)) late.resolve(op.schema().name(), stack);
  useDefaultDtype(stack);
  if (C10_UNLIKELY(part != orPartWhole)) {
    if (runHalf(part, stack, places) || part == orPartSecond) return;
  }
  runKernel(stack, places);
  arguments.checkWritten();
  if (spec != nullptr) place(stack, places);
}

size_t taskBlocks() { return TaskMemory::live.load(std::memory_order_relaxed); }

void queueOperator(const OperatorHandle &op, const OpTraits &traits, const char *name, CallKey &key,
                   std::shared_ptr<const OutputSpec> spec, c10::Device device, orStream_t stream,
                   c10::ArrayRef<IValue> arguments, Results &results, bool warned) {
  resizeOutputs(*spec, traits, arguments, key, warned);
  auto task = std::make_unique<OperatorTask>(op, traits, name, key, device);
  task->warned = warned;
  if (C10_UNLIKELY(refusesValues(traits)) && mayBeInPython()) task->stack = gatherStack();
  task->inDefaultDtype = spec->inDefaultDtype;
  if (traits.inPlace && !task->inDefaultDtype.empty()) task->op = outFormOf(op);
  OperatorTask::Storages known;
  for (const IValue &value : arguments) task->add(value, known);
  bool fresh = false;
  for (const ResultSpec &result : spec->results) {
    fresh |= result.argument < 0;
    if (result.argument >= 0) {
      results.push_back(arguments[static_cast<size_t>(result.argument)]);
    } else if (result.isList) {
      c10::List<at::Tensor> list;
      for (const KeptMetadata &made : result.fresh) list.push_back(task->makeResult(made, stream));
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(task->makeResult(result.fresh[0], stream));
    }
  }
  if (fresh) task->spec = std::move(spec);
  task->isNode = isCapturing(stream);
  if (sanitizerActive()) {
    reportTask(op, stream, arguments, results, task->late, task->isNode);
  }
  const bool serial = task->largest <= kSerial;
  if (serial) task->caller.threads = 1;
  launchTask(std::move(task), stream, {}, serial ? orLaunchAnyThread : 0);
}

}  // namespace torch_openreg
