/*
 * Runs a CPU kernel on stand-ins in zeroed memory. The only shared state is the output cache, in
 * which dtypes that were checked have a kind of key of their own.
 */
#include "dry_run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <sys/mman.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "../torch/allocator.h"
#include "../task/cpu_alias.h"
#include "../task/cpu_memory.h"
#include "../task/worker_state.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;
using torch::jit::Stack;

bool isOurs(const at::Tensor &tensor) { return tensor.defined() && tensor.is_privateuseone(); }

/* Zeroed memory, in pieces on pages of their own. mincore() shows which pages have been touched. */
class Zeros : Uncopyable {
 public:
  explicit Zeros(size_t bytes) : bytes_(bytes) {
    if (bytes_ == 0) return;
    void *mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, mapped != MAP_FAILED, "no ", bytes_,
                     " bytes of address space for a dry run: ", std::strerror(errno));
    begin_ = static_cast<char *>(mapped);
  }
  ~Zeros() {
    if (begin_ != nullptr) munmap(begin_, bytes_);
  }

  char *begin() const { return begin_; }
  bool touched() const { return touched(0, bytes_); }
  bool touched(size_t offset, size_t bytes) const {
    std::vector<unsigned char> resident((bytes + pageSize() - 1) / pageSize());
    if (resident.empty()) return false;
    if (mincore(begin_ + offset, bytes, resident.data()) != 0) return true;
    return std::any_of(resident.begin(), resident.end(), [](auto page) { return (page & 1) != 0; });
  }
  static size_t pageSize() {
    static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return size;
  }

 private:
  const size_t bytes_;
  char *begin_ = nullptr;
};

/* The contents of stand-ins. Some kernels refuse one of these and accept another. */
enum class Data { kZeros, kOnes, kIdentity };

c10::DimVector cut(c10::IntArrayRef sizes, int64_t most) {
  c10::DimVector smaller(sizes);
  for (int64_t &size : smaller) size = std::min(size, most);
  return smaller;
}

/* CPU tensors in place of the device tensors of one call, which share memory as those do. Each
 * dimension has at most `most` elements. */
class StandIns {
 public:
  StandIns(Arguments arguments, int64_t most) : most_(most), zeros_(reserve(arguments)) {}

  at::Tensor of(const at::Tensor &tensor);
  bool touched() const { return zeros_.touched(); }
  bool integersTouched();
  void fill(Data data);

 private:
  struct Piece {
    size_t begin = 0, bytes = 0;
    c10::Storage storage;
  };
  size_t reserve(Arguments arguments);
  Piece &pieceOf(const at::Tensor &tensor);

  const int64_t most_;
  PairList<c10::StorageImpl, Piece> pieces_;
  Zeros zeros_;
  PairList<c10::TensorImpl, at::Tensor> made_;  // by the device's tensor
};

StandIns::Piece &StandIns::pieceOf(const at::Tensor &tensor) {
  const c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
  Piece *known = pieces_.find(storage);
  return known != nullptr ? *known : pieces_.add(storage, Piece{});
}

/* The bytes that the stand-ins need. A storage needs only as many as the arguments use of it. */
size_t StandIns::reserve(Arguments arguments) {
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &tensor) {
      if (!isOurs(tensor)) return;
      size_t &bytes = pieceOf(tensor).bytes;
      bytes = std::max(bytes, at::detail::computeStorageNbytes(
                                  cut(tensor.sizes(), most_), tensor.strides(), tensor.itemsize(),
                                  static_cast<size_t>(tensor.storage_offset())));
    });
  }
  size_t end = 0;
  const size_t page = Zeros::pageSize();
  for (auto &[storage, piece] : pieces_) {
    piece.begin = end;
    end += (piece.bytes + page - 1) / page * page;
  }
  return end;
}

at::Tensor StandIns::of(const at::Tensor &tensor) {
  if (!isOurs(tensor)) return tensor;
  if (const at::Tensor *known = made_.find(tensor.unsafeGetTensorImpl())) return *known;
  Piece &piece = pieceOf(tensor);
  if (!piece.storage) {
    piece.storage = cpuStorage(piece.bytes != 0 ? zeros_.begin() + piece.begin : nullptr,
                               piece.bytes, /*resizable=*/true);
  }
  const c10::DimVector sizes = cut(tensor.sizes(), most_);
  TensorMetadata metadata = metadataOf(tensor);
  metadata.sizes = sizes;
  return made_.add(tensor.unsafeGetTensorImpl(),
                   tensorOf(piece.storage, DispatchKey::CPU, metadata, tensor.storage_offset()));
}

bool StandIns::integersTouched() {
  return std::any_of(made_.begin(), made_.end(), [&](const auto &made) {
    const at::Tensor &tensor = made.second;
    if (!c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) return false;
    const auto *data = static_cast<const char *>(tensor.storage().data());
    return data != nullptr &&
           zeros_.touched(static_cast<size_t>(data - zeros_.begin()), tensor.storage().nbytes());
  });
}

/* Fills the stand-ins, which contain zeros before. */
void StandIns::fill(Data data) {
  if (data == Data::kZeros) return;
  for (const auto &[of, tensor] : made_) {
    if (tensor.numel() == 0) continue;
    if (data == Data::kIdentity && tensor.dim() >= 2) {
      tensor.diagonal(0, -2, -1).fill_(1);
      continue;
    }
    const auto count = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    tensorOf(tensor.storage(), DispatchKey::CPU, {{count}, {1}, tensor.scalar_type()}).fill_(1);
  }
}

/* The kernel's arguments, with stand-ins for tensors. A generator is replaced, because a dry run
 * must not advance it. */
template <typename F>
Stack stackOf(const OpTraits &traits, Arguments arguments, F standIn) {
  Stack stack;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(traits.isGenerator[i] ? IValue(at::detail::createCPUGenerator(0))
                                          : argumentForCpu(arguments[i], standIn));
  }
  return stack;
}

void runKernel(const c10::OperatorHandle &op, Stack &stack, c10::DeviceIndex device,
               std::vector<c10::Warning> &warnings) {
  runAsCaller(CallerState::now(), warnings, [&] {
    const DryMemory memory(device);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
    for (IValue &result : stack) {
      if (!result.isTensor() || !result.toTensor().defined()) continue;
      if (result.toTensor().is_mkldnn()) result = result.toTensor().to_dense();
    }
  });
}

/* Operators for which neither zeros nor ones are valid data. */
constexpr std::string_view kJudgeData[] = {
    "aten::segment_reduce", "aten::_segment_reduce_backward", "aten::fake_quantize_per_channel",
    "aten::_fake_quantize_learnable_per_channel", "aten::_fused_moving_avg_obs"};

bool judgesData(const OpTraits &traits) {
  return std::any_of(std::begin(kJudgeData), std::end(kJudgeData), [&](std::string_view name) {
    return std::string_view(traits.name).starts_with(name);
  });
}

/* The first line of the message. */
std::string lineOf(const std::exception &error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

/* How messages about dtypes and numbers begin. These do not depend on data, even if the kernel has
 * read some. */
constexpr std::string_view kNotOfData[] = {
    "expected scalar type", "value cannot be converted to type", "norm(): input dtype should be"};

bool saysNothingOfData(const std::exception &error) {
  if (dynamic_cast<const c10::NotImplementedError *>(&error) != nullptr) return true;
  const std::string line = lineOf(error);
  return std::any_of(std::begin(kNotOfData), std::end(kNotOfData),
                     [&](std::string_view begin) { return line.starts_with(begin); });
}

/* ---- types ---- */

constexpr int64_t kOfTypes = -1;  // no OpTraits is at this address

void appendType(CallKey &key, const at::Tensor &tensor) {
  if (!tensor.defined()) return key.push_back(-1);
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) | tensor.is_conj() << 8 |
                tensor.is_neg() << 9 | (tensor.dim() == 0) << 10 | tensor.is_cpu() << 11 |
                tensor.unsafeGetTensorImpl()->is_wrapped_number() << 12 |
                (tensor.numel() == 0) << 13 | kindOfNumber(tensor) << 14);
}

bool makeTypeKey(const OpTraits &traits, Arguments arguments, CallKey &key) {
  key.push_back(kOfTypes);
  key.push_back(reinterpret_cast<intptr_t>(&traits));
  key.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue &value = arguments[i];
    if (!holdsTensors(value)) {
      if (!appendToKey(key, value, traits.isNumber[i])) return false;
      continue;
    }
    eachTensor(value, [&](const at::Tensor &tensor) { appendType(key, tensor); });
    key.push_back(kOfTypes);
  }
  return true;
}

/* A tensor of zeros in place of `tensor`, with at most two elements in each dimension. */
at::Tensor shrunk(const at::Tensor &tensor) {
  if (!isOurs(tensor)) return tensor;
  at::Tensor made = at::zeros(cut(tensor.sizes(), 2), at::TensorOptions(tensor.dtype()));
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

bool takesShrunk(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
                 Arguments arguments) {
  std::vector<c10::Warning> ignored;
  try {
    Stack stack;
    asNarrowWorker([&] { stack = stackOf(traits, arguments, shrunk); });
    runKernel(op, stack, device, ignored);
  } catch (const std::exception &) {
    return false;
  }
  return true;
}

std::vector<size_t> storageBytes(const Stack &arguments) {
  std::vector<size_t> bytes;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &t) {
      bytes.push_back(t.has_storage() ? t.storage().nbytes() : 0);
    });
  }
  return bytes;
}

/* Whether the kernel has used more memory of an argument than that needs in the end. Some kernels
 * compute in the result's tensor with larger sizes, and resize it at the end (huber_loss with a
 * reduction and out=). A task's results have memory for their final sizes only. */
bool hadOtherSizes(const Stack &arguments, const std::vector<size_t> &before) {
  size_t i = 0;
  bool had = false;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &t) {
      const size_t known = before[i++];
      had |= t.has_storage() && t.storage().nbytes() > std::max<size_t>(known, bytesNeeded(t));
    });
  }
  return had;
}

bool hasOut(const OpTraits &traits) {
  return std::find(traits.isOut.begin(), traits.isOut.end(), true) != traits.isOut.end();
}

/* The overload with the same arguments apart from outputs (out=). */
std::optional<c10::OperatorHandle> functionalForm(const c10::FunctionSchema &schema) {
  std::vector<c10::Argument> read;
  std::copy_if(schema.arguments().begin(), schema.arguments().end(), std::back_inserter(read),
               [](const c10::Argument &argument) { return !argument.is_out(); });
  for (const auto &form :
       torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(schema.name()))) {
    const auto &arguments = form->schema().arguments();
    if (std::equal(arguments.begin(), arguments.end(), read.begin(), read.end(), isSameArgument))
      return c10::Dispatcher::singleton().findOp(form->schema().operator_name());
  }
  return {};
}

/* inDefaultDtype for a call with outputs (out=). An output may have another dtype than the one in
 * which the kernel computes, so the functional form is run to find that. */
InDefaultDtype inDefaultDtypeWithoutOut(const c10::OperatorHandle &op, const OpTraits &traits,
                                        c10::DeviceIndex device, Arguments given) {
  Stack stack;
  bool floats = false;
  for (size_t i = 0; i < given.size(); ++i) {
    if (traits.isOut[i]) continue;
    stack.push_back(given[i]);
    eachTensor(given[i], [&](const at::Tensor &tensor) { floats |= isFloating(tensor); });
  }
  if (floats && !traits.isForeach) return {};
  const auto functional = functionalForm(op.schema());
  if (!functional) return {};
  std::vector<c10::Warning> ignored;
  try {
    runKernel(*functional, stack, device, ignored);
  } catch (const std::exception &) {
    return {};
  }
  return inDefaultDtype(traits, given, stack);
}

bool isOfResize(const c10::Warning &warning) {
  return warning.msg().find("resized") != std::string::npos;
}

}  // namespace

/* Runs the kernel on zeros, then on ones, then on identity matrices, until a run succeeds. An error
 * is the call's own if the kernel had read no stand-in, or if it has the same message for other
 * data. The second is no proof where the caller requests a check of data, or where the kernel reads
 * integers that are more than numbers: few indices and offsets are valid, so all stand-ins may fail
 * alike. */
DryRun dryRun(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
              Arguments arguments) {
  DryRun outcome;
  std::string ofZeros;
  bool mayJudge = false;
  for (const Data data : {Data::kZeros, Data::kOnes, Data::kIdentity}) {
    const bool first = data == Data::kZeros;
    StandIns standIns(arguments, traits.elementwise ? 2 : INT64_MAX);
    Stack stack = stackOf(traits, arguments, [&](const at::Tensor &t) { return standIns.of(t); });
    const Stack given = stack;
    const std::vector<KeptMetadata> before = keptMetadata(given);
    const std::vector<size_t> bytes = storageBytes(given);
    outcome.warnings.clear();
    try {
      asNarrowWorker([&] { standIns.fill(data); });
      runKernel(op, stack, device, outcome.warnings);
    } catch (const TooLarge &refused) {
      allocateOn(device, refused.bytes).clear();  // throws, and counts, as it will for the kernel
      throw;
    } catch (const std::exception &error) {
      if (saysNothingOfData(error)) throw;
      if (first ? !standIns.touched() : lineOf(error) == ofZeros && !mayJudge) throw;
      if (first) {
        ofZeros = lineOf(error);
        mayJudge = judgesData(traits) || checksData(traits, arguments) ||
                   (!traits.isForeach && !traits.pointwise && standIns.integersTouched());
      }
      continue;
    }
    const auto spec = describeOutputs(traits, given, before, stack);
    spec->usable = spec->usable && !hadOtherSizes(given, bytes);
    if (hasOut(traits)) {
      spec->inDefaultDtype = inDefaultDtypeWithoutOut(op, traits, device, given);
    }
    auto &warnings = spec->resizeWarnings.emplace();
    std::copy_if(outcome.warnings.begin(), outcome.warnings.end(), std::back_inserter(warnings),
                 isOfResize);
    outcome.spec = spec;
    return outcome;
  }
  return outcome;
}

void checkTypes(const c10::OperatorHandle &op, const OpTraits &traits, c10::DeviceIndex device,
                Arguments arguments) {
  CallKey key;
  const bool hasKey = makeTypeKey(traits, arguments, key);
  if (hasKey && findOutputs(key) != nullptr) return;
  if (!takesShrunk(op, traits, device, arguments)) dryRun(op, traits, device, arguments);
  if (hasKey) cacheOutputs(key, writtenOutputs(traits));
}

}  // namespace torch_openreg
