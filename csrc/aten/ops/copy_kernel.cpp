/*
 * A CopyTask carries both sides by value: address, sizes, strides.
 *
 * A large copy runs in pieces (orRunPieces). A piece may run on a host thread in the middle of
 * other work. So it runs without dispatch modes and opens no parallel region, because a second
 * OpenMP team beside the wide worker's would slow every kernel down (both: asNarrowWorker). It does
 * not change the treatment of denormals.
 */
#include "copy_kernel.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/copy_native.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../../torch/check.h"
#include "../../torch/fork.h"
#include "../../torch/host_allocator.h"
#include "../../torch/sanitizer.h"
#include "../../torch/sync_debug.h"
#include "../../torch/warnings.h"
#include "../../task/kernel_memory.h"
#include "../../task/task.h"
#include "../../task/task_half.h"
#include "../../task/tensor_accesses.h"
#include "../../task/tensor_metadata.h"
#include "../../task/worker_state.h"

namespace torch_openreg {

namespace {

using at::Tensor;

constexpr int64_t kUnit = 1 << 15;          // elements
constexpr int64_t kLeastToSplit = 1 << 17;  // elements

struct Side {
  /* `isGuarded`: tasks access it at another address, as pinned memory may be guarded. */
  Side(const Tensor &tensor, void *first, bool isGuarded)
      : metadata(metadataOf(tensor)),
        onDevice(tensor.is_privateuseone()),
        memory(onDevice || isGuarded ? KernelMemory(first, metadata.bytes())
                                     : KernelMemory::ofHost(first)) {}

  /* Call it in a task. */
  Tensor alias() const {
    return tensorOf(cpuStorage(memory.address(), metadata.bytes()), c10::DispatchKey::CPU,
                    metadata);
  }

  const KeptMetadata metadata;
  const bool onDevice;
  const KernelMemory memory;  // from the first element on
};

bool isSplittable(const Tensor &dst, const Tensor &src) {
  if (dst.numel() < kLeastToSplit) return false;
  // PyTorch has a blocked loop for a transposition, which pieces would not use,
  if (dst.scalar_type() == src.scalar_type() && dst.dim() == 2 && dst.is_contiguous() &&
      src.stride(0) == 1 && src.stride(1) == src.size(0)) {
    return false;
  }
  // and warns here; this thread drops the warning.
  return dst.is_complex() || !src.is_complex();
}

/* A copy over the loops that PyTorch would make: sorted by the destination's strides and merged
 * where possible. Each unit contains whole loops below `chunked_` and a step of that one; loops
 * above are taken one by one. A piece is a range of units: one at first, because help is called
 * after it, then a core's share of the rest. So a piece's own cost (1.1 us) is rare and the last
 * pieces are small. */
class SplitCopy {
 public:
  SplitCopy(const Tensor &dst, const Tensor &src) : flush_(CallerState::now().flush) {
    auto loops = at::TensorIteratorConfig()
                     .add_output(dst)
                     .add_const_input(src)
                     .resize_outputs(false)
                     .check_all_same_dtype(false)
                     .build();
    shape_ = c10::DimVector(loops.shape());
    const auto operandOf = [&](int which, const Tensor &tensor) {
      return Operand{static_cast<char *>(loops.data_ptr(which)),
                     c10::DimVector(loops.strides(which)), tensor.scalar_type(), tensor.is_conj(),
                     tensor.is_neg()};
    };
    dst_ = operandOf(0, dst);
    src_ = operandOf(1, src);
    int64_t inner = 1;
    while (chunked_ + 1 < shape_.size() && inner * shape_[chunked_] <= kUnit) {
      inner *= shape_[chunked_++];
    }
    step_ = std::max<int64_t>(1, kUnit / inner);
    steps_ = (shape_[chunked_] + step_ - 1) / step_;
  }

  void run() {
    int64_t units = steps_;
    for (size_t i = chunked_ + 1; i < shape_.size(); ++i) units *= shape_[i];
    // It reads a system file at each call (14 us).
    static const auto cores = std::max<int64_t>(2, std::thread::hardware_concurrency());
    for (int64_t end = 1; end < units; end += std::max<int64_t>(1, (units - end) / cores)) {
      ends_.push_back(end);
    }
    ends_.push_back(units);
    OPENREG_CHECK(orRunPieces(&runPiece, this, ends_.size()));
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct Operand {
    char *data = nullptr;
    c10::DimVector strides{};  // in bytes, in the order of the loops
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    bool conj = false, neg = false;
  };

  static void runPiece(void *context, size_t index) {
    auto *split = static_cast<SplitCopy *>(context);
    try {
      asNarrowWorker([&] { split->piece(index); });
    } catch (...) {
      if (!split->failed_.exchange(true)) split->error_ = std::current_exception();
    }
  }

  void piece(size_t index) const {
    DenormalMode denormals(flush_);
    int64_t unit = index == 0 ? 0 : ends_[index - 1];
    while (unit < ends_[index]) {
      const int64_t outer = unit / steps_, first = unit % steps_;
      const int64_t count = std::min(ends_[index] - unit, steps_ - first);
      const int64_t length = std::min(count * step_, shape_[chunked_] - first * step_);
      Tensor dst = slice(dst_, outer, first * step_, length);
      at::native::copy_(dst, slice(src_, outer, first * step_, length), false);
      unit += count;
    }
  }

  Tensor slice(const Operand &whole, int64_t outer, int64_t first, int64_t length) const {
    int64_t offset = first * whole.strides[chunked_];
    for (size_t i = chunked_ + 1; i < shape_.size(); ++i) {
      offset += outer % shape_[i] * whole.strides[i];
      outer /= shape_[i];
    }
    const auto itemsize = static_cast<int64_t>(c10::elementSize(whole.dtype));
    // A tensor's last dimension is the first loop.
    c10::DimVector sizes, strides;
    for (size_t i = chunked_ + 1; i-- > 0;) {
      sizes.push_back(i == chunked_ ? length : shape_[i]);
      strides.push_back(whole.strides[i] / itemsize);
    }
    const TensorMetadata part{sizes, strides, whole.dtype, whole.conj, whole.neg};
    return tensorOf(cpuStorage(whole.data + offset, part.bytes()), c10::DispatchKey::CPU, part);
  }

  Operand dst_, src_;
  c10::DimVector shape_;  // the innermost loop first
  size_t chunked_ = 0;
  int64_t step_ = 0, steps_ = 0;
  std::vector<int64_t> ends_;  // of the pieces, in units
  const unsigned flush_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

/* Makes PyTorch's copy refuse, or warn of, dtypes and bits at the call, for the caller: it copies
 * two elements. A combination that passed without a warning is not tried again. */
void judge(const Tensor &dst, const Tensor &src) {
  using Answers = std::array<std::atomic<uint16_t>, c10::NumScalarTypes>;  // by bits
  static std::array<Answers, c10::NumScalarTypes> fine{};
  std::atomic<uint16_t> &answers =
      fine.at(static_cast<size_t>(dst.scalar_type())).at(static_cast<size_t>(src.scalar_type()));
  const unsigned bits = dst.is_conj() | dst.is_neg() << 1 | src.is_conj() << 2 | src.is_neg() << 3;
  const auto answer = static_cast<uint16_t>(1u << bits);
  if (C10_LIKELY((answers.load(std::memory_order_relaxed) & answer) != 0)) return;
  // Two elements of the largest dtype, with a gap.
  alignas(16) std::array<std::array<char, 64>, 2> memory{};
  const auto two = [&](const Tensor &like, size_t which) {
    return tensorOf(cpuStorage(memory[which].data(), 64), c10::DispatchKey::CPU,
                    {{2}, {2}, like.scalar_type(), like.is_conj(), like.is_neg()});
  };
  Tensor to = two(dst, 0);
  asNarrowWorker([&] { asKernel([&] { at::native::copy_(to, two(src, 1), false); }); });
  // It warns each time, and the program's filters decide.
  if (dst.is_complex() || !src.is_complex()) answers.fetch_or(answer, std::memory_order_relaxed);
}

struct CopyTask final : Task {
  CopyTask(const CopyFacts &facts, bool isGuarded, Tensor ownedSource)
      : Task("aten::copy_", facts.stream.device()),
        dst(facts.dst, facts.dst.data_ptr(), isGuarded),
        src(facts.src, const_cast<void *>(facts.src.const_data_ptr()), isGuarded),
        owned(std::move(ownedSource)) {}

  void run() override {
    const Silence callerIsWarned;
    Tensor to = dst.alias();
    Tensor from = owned.defined() ? owned : src.alias();
    const orPart part = to.numel() > 1 ? orTaskPart() : orPartWhole;
    if (C10_UNLIKELY(part != orPartWhole)) {
      const TaskHalf half(part, to.sizes());
      to = half.of(to);
      from = half.of(from);
    }
    if (isSplittable(to, from)) {
      SplitCopy(to, from).run();
    } else {
      at::native::copy_(to, from, false);
    }
  }

  const Side dst, src;
  const Tensor owned;  // in place of src: host memory without another owner
};

/* A copy that opens a parallel region is for the wide worker; a long one without a waiting caller
 * is for any worker. */
bool isForAnyThread(const Tensor &dst, const Tensor &src, bool awaited) {
  return dst.numel() <= kSerial || (awaited && isSplittable(dst, src));
}

}  // namespace

CopyFacts::CopyFacts(const Tensor &to, const Tensor &from, bool isNonBlocking,
                     CopyStrategy strategy)
    : dst(to),
      src(from),
      nonBlocking(isNonBlocking),
      host(to.is_cpu()     ? &to
           : from.is_cpu() ? &from
                           : nullptr),
      stream(getCurrentOpenRegStream((from.is_cpu() ? to : from).device().index())),
      handle(stream.stream()),
      isCaptured(isCapturing(handle)),
      isPinned(host != nullptr && (strategy != CopyStrategy::kMemcpy || notesSynchronization()) &&
               torch_openreg::isPinned(host->const_data_ptr())) {}

void enqueueCopy(const CopyFacts &facts, bool awaited, const Tensor &owned) {
  const Tensor &dst = facts.dst, &src = facts.src;
  judge(dst, src);
  const bool isWatched = sanitizerActive();
  if (isWatched && owned.defined()) {
    reportTensors("aten::copy_", facts.handle, dst, {});
  } else if (isWatched) {
    const bool moves = facts.host == nullptr && src.scalar_type() == dst.scalar_type();
    reportTensors("aten::copy_", facts.handle, dst, src, moves);
  }
  unsigned flags = awaited ? orLaunchAwaited : 0;
  if (isForAnyThread(dst, src, awaited)) flags |= orLaunchAnyThread;
  auto task = std::make_unique<CopyTask>(facts, isWatched && facts.isPinned, owned);
  c10::SmallVector<orAccess, 2> accesses;
  for (const Side *side : {&task->dst, &task->src}) {
    if (side->onDevice) {
      accesses.push_back({side->memory.data, side->memory.bytes, side == &task->dst});
    }
  }
  launchTask(std::move(task), facts.handle, accesses, flags);
}

}  // namespace torch_openreg
