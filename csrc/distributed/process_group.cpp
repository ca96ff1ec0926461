/*
 * The c10d backend with the device's name: PyTorch's own Gloo over device memory, and its Python
 * interface.
 *
 * Every method describes its inputs, its outputs and the call of Gloo; `start` does the rest.
 * Collectives that only move data pass it to Gloo as bytes, so that every dtype works.
 */
#include <openreg_graph.h>
#include <openreg_package.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../torch/device.h"
#include "../torch/fork.h"
#include "../torch/gil.h"
#include "../torch/module.h"
#include "../torch/stream.h"
#include "../task/tensor_metadata.h"
#include "collective_work.h"
#include "thread_transport.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Places = std::vector<size_t>;

void checkDense(const char *name, const at::Tensor &tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, name,
              ": expected a dense tensor, got one with layout ", tensor.layout());
}

void checkTensor(const char *name, const at::Tensor &tensor, c10::Device device) {
  TORCH_CHECK(tensor.device() == device, name, " on ", deviceName(), ": expected every tensor on ",
              device, ", got one on ", tensor.device());
  checkDense(name, tensor);
  TORCH_CHECK(
      tensor.is_contiguous(tensor.suggest_memory_format()) && !tensor.is_conj() && !tensor.is_neg(),
      name, ": tensors must be contiguous, got sizes ", tensor.sizes(), " and strides ",
      tensor.strides(), tensor.is_conj() || tensor.is_neg() ? " with a lazy conj or neg" : "",
      "; pass tensor.contiguous()");
  checkFitsStorage(tensor, name);
}

void checkOne(const char *name, const Tensors &tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, ": expected one tensor, got ", tensors.size());
}

void checkPairs(const char *name, const Tensors &outputs, const Tensors &inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name,
                    ": expected as many outputs as inputs, got ", outputs.size(), " and ",
                    inputs.size());
}

/* Elements are moved in memory order, which has to be the same for both. */
void checkOrder(const char *name, const at::Tensor &a, const at::Tensor &b) {
  if (a.layout() != at::kStrided || b.layout() != at::kStrided) return;  // refused by `start`
  const auto both = [&](at::MemoryFormat format) {
    return a.is_contiguous(format) && b.is_contiguous(format);
  };
  TORCH_CHECK_VALUE(both(at::MemoryFormat::Contiguous) || both(a.suggest_memory_format()), name,
                    ": expected tensors of one memory format, got strides ", a.strides(), " and ",
                    b.strides(), "; pass tensor.contiguous()");
}

/* Checks that each of `parts` is as large as `whole`. */
void checkSame(const char *name, const Tensors &parts, const at::Tensor &whole) {
  for (const at::Tensor &part : parts) {
    TORCH_CHECK_VALUE(part.scalar_type() == whole.scalar_type() && part.numel() == whole.numel(),
                      name, ": expected tensors of ", whole.numel(), " elements of ",
                      whole.scalar_type(), ", got one of ", part.numel(), " of ",
                      part.scalar_type());
    checkOrder(name, part, whole);
  }
}

void checkKind(const char *name, const at::Tensor &part, const at::Tensor &whole) {
  TORCH_CHECK_VALUE(part.scalar_type() == whole.scalar_type(), name, ": expected tensors of ",
                    whole.scalar_type(), ", got one of ", part.scalar_type());
  checkOrder(name, part, part);
}

bool areUneven(const Tensors &tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor &tensor) {
    return tensor.numel() != tensors[0].numel();
  });
}

/* Checks that `large` has room for one `small` of each rank. */
void checkRatio(const char *name, const at::Tensor &large, const at::Tensor &small, int size) {
  TORCH_CHECK_TYPE(large.scalar_type() == small.scalar_type(), name,
                   ": expected tensors of one dtype, got ", large.scalar_type(), " and ",
                   small.scalar_type());
  TORCH_CHECK_VALUE(large.numel() == small.numel() * size, name, ": expected a tensor of ", size,
                    " x ", small.numel(), " elements of ", small.scalar_type(), ", got one of ",
                    large.numel(), " of ", large.scalar_type());
  checkOrder(name, large, small);
}

bool isBitwise(ReduceOp::RedOpType op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

const char *opName(ReduceOp::RedOpType op) {
  static constexpr const char *names[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                          "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};
  static_assert(std::size(names) == ReduceOp::UNUSED + 1);
  return names[op];
}

bool reduces(at::ScalarType dtype) {
  constexpr std::array kinds{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                             at::kByte,  at::kBool,   at::kInt,  at::kLong};
  return std::ranges::find(kinds, c10::toRealValueType(dtype)) != kinds.end();
}

/* Whether the CPU's kernel, with which Gloo adds sparse tensors, supports the dtype. */
bool addsSparse(at::ScalarType dtype) {
  return reduces(dtype) && !c10::isComplexType(dtype) && dtype != at::kHalf && dtype != at::kBool;
}

/* Gloo's limit for sparse tensors. */
constexpr int64_t kMostDims = 4;

Tensors part(const Tensors &host, size_t first, size_t count) {
  const auto start = host.begin() + static_cast<std::ptrdiff_t>(first);
  return {start, start + static_cast<std::ptrdiff_t>(count)};
}

int checkTag(const char *name, int tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < kOwnTags, name, ": expected a tag from 0 to ", kOwnTags - 1,
                    ", got ", tag);
  return tag;
}

int64_t sum(const std::vector<int64_t> &counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/* "2 of Float, 4 of Int" */
std::string listed(const Tensors &tensors) {
  std::string text;
  for (const at::Tensor &tensor : tensors) {
    text += (text.empty() ? "" : ", ") + c10::str(tensor.numel(), " of ", tensor.scalar_type());
  }
  return text;
}

/* In bytes. nbytes() throws for a sparse tensor, which is refused later. */
int64_t sizeOf(const at::Tensor &tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize());
}

std::vector<int64_t> sizesOf(const Tensors &tensors) {
  std::vector<int64_t> all;
  for (const at::Tensor &tensor : tensors) all.push_back(sizeOf(tensor));
  return all;
}

/* What every rank announces of a call. A rank's part is its input, except where one rank has it
 * all. */
void announce(Call &call) {
  Announcement &announcement = call.announcement;
  if (announcement.name.empty()) announcement.name = call.name;
  const bool takes = call.in.empty() || call.type == OpType::SCATTER;
  const Tensors &part = takes ? call.out : call.in;
  if (part.empty()) return;
  announcement.dtype = part.front().scalar_type();
  if (!announcement.sends.empty() || announcement.elements != 0) return;
  for (const at::Tensor &tensor : part) announcement.elements += tensor.numel();
  const bool coalesced = call.type == OpType::COALESCED ||
                         call.type == OpType::ALLREDUCE_COALESCED ||
                         call.type == OpType::ALLGATHER_COALESCED;
  if (coalesced && part.size() > 1) announcement.parts = listed(part);
}

/* In bytes, from counts of rows or, if there are none, equal parts. */
std::vector<int64_t> splitSizes(const char *name, const at::Tensor &tensor,
                                const std::vector<int64_t> &rows, int size) {
  const int64_t first = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (rows.empty()) {
    TORCH_CHECK_VALUE(first % size == 0, name, ": expected a first dimension that ", size,
                      " ranks can share, got ", first);
    return std::vector<int64_t>(static_cast<size_t>(size), bytes / size);
  }
  const bool negative = std::any_of(rows.begin(), rows.end(), [](int64_t n) { return n < 0; });
  TORCH_CHECK_VALUE(rows.size() == static_cast<size_t>(size) && !negative && sum(rows) == first,
                    name, ": expected ", size, " split sizes from 0 that add up to ", first,
                    ", got ", c10::IntArrayRef(rows));
  std::vector<int64_t> sizes = rows;
  for (int64_t &count : sizes) count *= first == 0 ? 0 : bytes / first;
  return sizes;
}

/* The factor of each rank's floats, before they are added. */
double factorOf(const ReduceOp &op, int size) {
  if (op.op_ == ReduceOp::AVG) return 1.0 / size;
  if (op.op_ != ReduceOp::PREMUL_SUM) return 1;
  const auto *given = dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, "ReduceOp.PREMUL_SUM without a factor");
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                        : given->double_factor;
}

/* A thread of run_ranks: its rank, and how many there are. A rank's device has its number. */
struct RankThread {
  int rank = 0, ranks = 0;
};
thread_local RankThread rankThread;

/* Two ranks on one device share its streams: the wait of one would hold the inputs of the other. */
void checkOwn(const char *name, c10::Device device) {
  const int owner = device.index();
  TORCH_CHECK_VALUE(owner >= rankThread.ranks || owner == rankThread.rank, name,
                    ": expected the device of rank ", rankThread.rank, ", ", deviceName(), ":",
                    rankThread.rank, ", got ", device, ", the device of rank ", owner);
}

Tensors pick(const Tensors &tensors, const Places &places) {
  Tensors picked;
  for (const size_t place : places) picked.push_back(tensors[place]);
  return picked;
}

/* Calls of one group come from one thread at a time, or in an order that is the same on every rank.
 * The call throws for a wrong argument; later errors belong to the Work. */
class ProcessGroupOpenReg final : public c10d::Backend {
 public:
  ProcessGroupOpenReg(c10::intrusive_ptr<c10d::Backend> gloo, Peers peers)
      : Backend(gloo->getRank(), gloo->getSize()),
        queues_(std::make_shared<CollectiveQueues>(std::move(gloo), std::move(peers))) {}

  ~ProcessGroupOpenReg() override {
    // A forked child has none of the threads, and while Python ends no thread may wait for a peer.
    // Gloo, which would join its threads, is then leaked.
    if (getpid() != process_ || !interpreterRuns()) {
      new std::shared_ptr<CollectiveQueues>(queues_);
      return;
    }
    // Without the GIL, which the thread with the last reference may hold: Gloo joins its threads,
    // if no collective is under way.
    WithoutGil unlocked;
    queues_->close();
    queues_.reset();
  }

  const std::string getBackendName() const override { return orDevicesName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return queues_->gloo().getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    queues_->gloo().setTimeout(timeout);
  }
  void abort() override {
    const std::exception_ptr error = queues_->hooks()->failed.run();
    queues_->gloo().abort();
    if (error) std::rethrow_exception(error);
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    queues_->hooks()->failed.add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { queues_->hooks()->failed.remove(id); }
#endif
#if OPENREG_TORCH_SINCE(15)
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    queues_->hooks()->completed.add(id, [hook = std::move(hook)](uint64_t key) {
      hook({.completionKey = key, .duration_ms = std::nullopt});
    });
  }
  void unregisterCompletionHook(int64_t id) override { queues_->hooks()->completed.remove(id); }
#endif
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsSplitting() const override { return true; }
  /* The number of splits so far: PyTorch's name for the next part. */
  uint64_t splits() const { return splits_; }

  /* Null for a rank that is not among `ranks`. */
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> &store,
                                          const std::vector<int> &ranks,
                                          const c10::intrusive_ptr<Options> &options) override {
    ++splits_;
    // All backends of the new group share the store, and its Gloo for the CPU writes the same keys.
    const auto own = c10::make_intrusive<c10d::PrefixStore>("openreg", store);
    auto gloo = queues_->gloo().split(own, ranks, options);
    if (!gloo) return nullptr;
    const auto &globalRanks = options->global_ranks_in_group;
    Peers peers(*own, gloo->getSize(), {globalRanks.begin(), globalRanks.end()});
    return c10::make_intrusive<ProcessGroupOpenReg>(std::move(gloo), std::move(peers));
  }

  void startCoalescing() override {
    std::lock_guard<std::mutex> lock(mutex_);
    coalescing_.emplace();
  }

  WorkPtr endCoalescing() override {
    const auto parts = takeCoalesced();
    if (parts.empty()) return nullptr;
    CollectiveWork::Works works;
    Tensors outputs;
    for (const auto &part : parts) {
      const Tensors own = part->result();
      works.insert(works.end(), part->works().begin(), part->works().end());
      outputs.insert(outputs.end(), own.begin(), own.end());
    }
    return c10::make_intrusive<CollectiveWork>(OpType::COALESCED, std::move(works),
                                               std::move(outputs));
  }

  // ---- Collectives -----------------------------------------------------------------------------

  WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
    checkOne("broadcast", tensors);
    Call call{.type = OpType::BROADCAST, .name = "broadcast", .in = {}, .out = tensors};
    call.announcement.root = checkRank("broadcast", options.rootRank);
    call.sends = call.announcement.root == getRank();
    return start(std::move(call),
                 [=](Backend &gloo, Tensors &host) { return gloo.broadcast(host, options); });
  }

  WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
    checkOne("all_reduce", tensors);
    if (tensors[0].layout() == at::kSparse) return allreduceSparse(tensors[0], options);
    Call call{.type = OpType::ALLREDUCE, .name = "all_reduce", .in = {}, .out = tensors};
    const auto ours = reducing(call, options);
    return start(std::move(call),
                 [=](Backend &gloo, Tensors &host) { return gloo.allreduce(host, ours); });
  }

  WorkPtr allreduce_coalesced(Tensors &tensors,
                              const c10d::AllreduceCoalescedOptions &options) override {
    const OpType type = OpType::ALLREDUCE_COALESCED;
    return reducingEachDtype("all_reduce", type, tensors, options, [&](const Places &those) {
      Call call{.type = type, .name = "all_reduce", .in = {}, .out = pick(tensors, those)};
      const auto ours = reducing(call, options);
      return start(std::move(call), [=](Backend &gloo, Tensors &host) {
        return gloo.allreduce_coalesced(host, ours);
      });
    });
  }

  WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
    checkOne("reduce", tensors);
    Call call{.type = OpType::REDUCE, .name = "reduce", .in = {}, .out = tensors};
    const auto ours = reducing(call, options);
    call.announcement.root = checkRank("reduce", options.rootRank);
    call.sends = call.announcement.root != getRank();
    return start(std::move(call), [=, sends = call.sends](Backend &gloo, Tensors &host) {
      Tensors parts = host;  // Gloo leaves partial sums in every rank's tensors
      if (sends) asKernel([&] { parts[0] = parts[0].clone(); });
      return gloo.reduce(parts, ours);
    });
  }

  WorkPtr allgather(Lists &outputs, Tensors &inputs,
                    const c10d::AllgatherOptions &options) override {
    checkOne("all_gather", inputs);
    TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather: expected one list of outputs, got ",
                      outputs.size());
    checkCount("all_gather", "outputs", outputs[0].size());
    if (areUneven(outputs[0])) return allgatherUneven(outputs[0], inputs[0], options);
    checkSame("all_gather", outputs[0], inputs[0]);
    return start({.type = OpType::ALLGATHER, .name = "all_gather", .in = inputs, .out = outputs[0]},
                 [=](Backend &gloo, Tensors &host) {
                   Lists to{part(host, 1, host.size() - 1)};
                   Tensors from{host[0]};
                   return gloo.allgather(to, from, options);
                 });
  }

  WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                          const c10d::AllgatherOptions &options) override {
    checkRatio("all_gather_single", output, input, getSize());
    return start({.type = OpType::_ALLGATHER_BASE,
                  .name = "all_gather_single",
                  .in = {input},
                  .out = {output}},
                 [=](Backend &gloo, Tensors &host) {
                   return gloo._allgather_base(host[1], host[0], options);
                 });
  }

  WorkPtr allgather_coalesced(Lists &outputs, Tensors &inputs,
                              const c10d::AllgatherOptions &options) override {
    const char *name = "all_gather_coalesced";
    checkCount(name, "lists of outputs", outputs.size());
    Call call{.type = OpType::ALLGATHER_COALESCED, .name = name, .in = inputs, .out = {}};
    for (const Tensors &list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), name, ": expected ", inputs.size(),
                        " outputs in each list, got ", list.size());
      for (size_t i = 0; i < list.size(); ++i) checkSame(name, {list[i]}, inputs[i]);
      call.out.insert(call.out.end(), list.begin(), list.end());
    }
    return start(std::move(call), [=, n = inputs.size()](Backend &gloo, Tensors &host) {
      Tensors from = part(host, 0, n);
      Lists to;
      for (size_t i = n; i < host.size(); i += n) to.push_back(part(host, i, n));
      return gloo.allgather_coalesced(to, from, options);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::AllgatherOptions &options) override {
    const char *name = "all_gather_single";
    checkPairs(name, outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) checkRatio(name, outputs[i], inputs[i], getSize());
    return start({.type = OpType::COALESCED, .name = name, .in = inputs, .out = outputs},
                 [=, n = inputs.size()](Backend &gloo, Tensors &host) {
                   Tensors from = part(host, 0, n), to = part(host, n, n);
                   return gloo.allgather_into_tensor_coalesced(to, from, options);
                 });
  }

  WorkPtr gather(Lists &outputs, Tensors &inputs, const c10d::GatherOptions &options) override {
    checkOne("gather", inputs);
    const bool root = isRoot("gather", "outputs", outputs, options.rootRank);
    Call call{.type = OpType::GATHER, .name = "gather", .in = inputs, .out = {}};
    call.announcement.root = static_cast<int>(options.rootRank);
    if (root) {
      checkCount("gather", "outputs", outputs[0].size());
      checkSame("gather", outputs[0], inputs[0]);
      call.out = outputs[0];
    }
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      Lists to;
      if (root) to.push_back(part(host, 1, host.size() - 1));
      Tensors from{host[0]};
      return gloo.gather(to, from, options);
    });
  }

  WorkPtr scatter(Tensors &outputs, Lists &inputs, const c10d::ScatterOptions &options) override {
    checkOne("scatter", outputs);
    const bool root = isRoot("scatter", "inputs", inputs, options.rootRank);
    Call call{.type = OpType::SCATTER, .name = "scatter", .in = {}, .out = outputs};
    call.announcement.root = static_cast<int>(options.rootRank);
    if (root) {
      checkCount("scatter", "inputs", inputs[0].size());
      checkSame("scatter", inputs[0], outputs[0]);
      call.in = inputs[0];
    }
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      Lists from;
      if (root) from.push_back(part(host, 0, host.size() - 1));
      Tensors to{host.back()};
      return gloo.scatter(to, from, options);
    });
  }

  WorkPtr reduce_scatter(Tensors &outputs, Lists &inputs,
                         const c10d::ReduceScatterOptions &options) override {
    const char *name = "reduce_scatter";
    checkOne(name, outputs);
    TORCH_CHECK_VALUE(inputs.size() == 1, name, ": expected one list of inputs, got ",
                      inputs.size());
    checkCount(name, "inputs", inputs[0].size());
    if (areUneven(inputs[0])) return reduceScatterUneven(outputs[0], inputs[0], options);
    checkSame(name, inputs[0], outputs[0]);
    Call call{.type = OpType::REDUCE_SCATTER, .name = name, .in = inputs[0], .out = outputs};
    const auto ours = reducing(call, options);
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      Lists from{part(host, 0, host.size() - 1)};
      Tensors to{host.back()};
      return gloo.reduce_scatter(to, from, ours);
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                               const c10d::ReduceScatterOptions &options) override {
    const char *name = "reduce_scatter_single";
    checkRatio(name, input, output, getSize());
    Call call{.type = OpType::_REDUCE_SCATTER_BASE, .name = name, .in = {input}, .out = {output}};
    const auto ours = reducing(call, options);
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      return gloo._reduce_scatter_base(host[1], host[0], ours);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::ReduceScatterOptions &options) override {
    const char *name = "reduce_scatter_single";
    checkPairs(name, outputs, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkTensor(name, inputs[i], inputs[0].device());
      checkRatio(name, inputs[i], outputs[i], getSize());
    }
    const OpType type = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
    return reducingEachDtype(name, type, outputs, options, [&](const Places &those) {
      Call call{.type = type, .name = name, .in = pick(inputs, those), .out = pick(outputs, those)};
      const auto ours = reducing(call, options);
      return start(std::move(call), [=, n = those.size()](Backend &gloo, Tensors &host) {
        Tensors from = part(host, 0, n), to = part(host, n, n);
        return gloo.reduce_scatter_tensor_coalesced(to, from, ours);
      });
    });
  }

  WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &outputSplits,
                        std::vector<int64_t> &inputSplits,
                        const c10d::AllToAllOptions &options) override {
    const char *name = "all_to_all_single";
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), name,
                      ": expected one dtype, got ", input.scalar_type(), " and ",
                      output.scalar_type());
    checkDense(name, output);
    checkDense(name, input);
    checkOrder(name, output, input);
    Call call{.type = OpType::ALLTOALL_BASE, .name = name, .in = {input}, .out = {output}};
    call.announcement.elements = -1;  // each rank may have a different number
    call.announcement.sends = splitSizes(name, input, inputSplits, getSize());
    call.announcement.expects = splitSizes(name, output, outputSplits, getSize());
    Issue issue = [options, from = call.announcement.sends, to = call.announcement.expects](
                      Backend &gloo, Tensors &host) {
      std::vector<int64_t> outSizes = to, inSizes = from;
      return gloo.alltoall_base(host[1], host[0], outSizes, inSizes, options);
    };
    return start(std::move(call), std::move(issue));
  }

  WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                   const c10d::AllToAllOptions &options) override {
    checkCount("all_to_all", "outputs", outputs.size());
    checkCount("all_to_all", "inputs", inputs.size());
    const auto own = static_cast<size_t>(getRank());
    checkOrder("all_to_all", outputs[own], inputs[own]);
    Call call{.type = OpType::ALLTOALL, .name = "all_to_all", .in = inputs, .out = outputs};
    call.announcement.elements = -1;
    call.announcement.sends = sizesOf(inputs);
    call.announcement.expects = sizesOf(outputs);
    return start(std::move(call), [=, n = inputs.size()](Backend &gloo, Tensors &host) {
      // Gloo's own accepts only tensors of one size. These are bytes.
      const Tensors froms = part(host, 0, n), tos = part(host, n, n);
      std::vector<int64_t> inSizes = sizesOf(froms), outSizes = sizesOf(tos);
      at::Tensor from = at::cat(froms);
      at::Tensor to = at::empty({sum(outSizes)}, from.options());
      auto work = gloo.alltoall_base(to, from, outSizes, inSizes, options);
      work->wait();
      const Tensors got = to.split_with_sizes(sizesOf(tos));
      for (size_t i = 0; i < n; ++i) tos[i].copy_(got[i]);
      return work;
    });
  }

  WorkPtr send(Tensors &tensors, int dstRank, int tag) override {
    checkOne("send", tensors);
    Call call{.type = OpType::SEND, .name = "send", .in = tensors, .out = {}};
    call.peers = {checkPeer("send", dstRank)};
    call.queue = sendsTo(dstRank, checkTag("send", tag));
    return start(std::move(call),
                 [=, dtype = tensors[0].scalar_type()](Backend &gloo, Tensors &host) {
                   return sendWithSize(gloo, host[0], dtype, dstRank, tag);
                 });
  }

  WorkPtr recv(Tensors &tensors, int srcRank, int tag) override {
    return receive(OpType::RECV, tensors, srcRank, tag);
  }

  WorkPtr recvAnysource(Tensors &tensors, int tag) override {
    return receive(OpType::RECVANYSOURCE, tensors, -1, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions &options) override {
    c10::Device device(c10::DeviceType::PrivateUse1, currentDevice());
    if (!options.device_ids.empty()) {
      device.set_index(checkIndex(options.device_ids[0]));
    } else if (options.device && options.device->is_privateuseone() &&
               options.device->has_index()) {
      device.set_index(checkIndex(options.device->index()));
    }
    Call call{.type = OpType::BARRIER, .name = "barrier", .in = {}, .out = {}};
    call.blocks = true;
    return startOn(device, std::move(call),
                   [=](Backend &gloo, Tensors &) { return gloo.barrier(options); });
  }

 private:
  std::string groupName() const {
    return getGroupDesc().empty() ? getGroupUid() : getGroupDesc() + " (" + getGroupUid() + ")";
  }

  std::vector<int> others() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank != getRank()) ranks.push_back(rank);
    }
    return ranks;
  }

  void checkCount(const char *name, const char *what, size_t count) const {
    TORCH_CHECK_VALUE(count == static_cast<size_t>(getSize()), name, ": expected ", getSize(), " ",
                      what, ", one for each rank, got ", count);
  }

  int checkRank(const char *name, int64_t rank) const {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), name, ": expected a rank from 0 to ",
                      getSize() - 1, ", got ", rank);
    return static_cast<int>(rank);
  }

  /* The root alone has a list for the other ranks. */
  bool isRoot(const char *name, const char *what, const Lists &lists, int64_t rank) const {
    const bool root = checkRank(name, rank) == getRank();
    TORCH_CHECK_VALUE(lists.size() == (root ? 1 : 0), name, ": expected ",
                      root ? "one list" : "no list", " of ", what, " on rank ", getRank(), ", got ",
                      lists.size());
    return root;
  }

  int checkPeer(const char *name, int rank) const {
    TORCH_CHECK_VALUE(rank != getRank(), name, ": expected another rank than this one, ", getRank(),
                      ", which cannot exchange messages with itself");
    return checkRank(name, rank);
  }

  WorkPtr start(Call call, Issue issue) {
    const Tensors &some = call.out.empty() ? call.in : call.out;
    TORCH_CHECK_VALUE(!some.empty(), call.name, ": expected at least one tensor, got none");
    const c10::Device device = some.front().device();
    for (const at::Tensor &tensor : call.in) checkTensor(call.name, tensor, device);
    for (const at::Tensor &tensor : call.out) checkTensor(call.name, tensor, device);
    return startOn(device, std::move(call), std::move(issue));
  }

  WorkPtr startOn(c10::Device device, Call call, Issue issue) {
    WithoutGil unlocked;
    checkOwn(call.name, device);
    if (call.peers.empty()) call.peers = others();
    announce(call);
    const QueueKey queue = call.queue;
    const bool message = queue != collectives();
    // Checked before the lock, which a thread of the parent may have held for ever.
    TORCH_CHECK(getpid() == process_, orGetErrorString(orErrorForked));
    OPENREG_CHECK(orStreamRefuseCapture(
        currentStreamHandle(device.index()), call.name,
        "a replay cannot involve the other ranks: call it between the replays of two "
        "graphs"));
    std::lock_guard<std::mutex> lock(mutex_);
    const OpType type = call.type;
    Tensors outputs = call.sparse.empty() ? call.out : call.sparse;
    auto collective =
        c10::make_intrusive<Collective>(queues_, groupName(), message ? ++messages_ : ++sequence_,
                                        device, std::move(call), std::move(issue));
    // Before it can complete, so that no hook is called here.
    auto work = c10::make_intrusive<CollectiveWork>(type, CollectiveWork::Works{collective},
                                                    std::move(outputs));
    queues_->push(queue, collective);
    collective->joinDevice();
    collective->letBegin();
    if (coalescing_) coalescing_->push_back(work);
    return work;
  }

  std::vector<c10::intrusive_ptr<CollectiveWork>> takeCoalesced() {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(coalescing_, "endCoalescing without startCoalescing");
    return *std::exchange(coalescing_, std::nullopt);
  }

  /* Returns the reduction in a form that Gloo supports, and checks the rest. */
  ReduceOp reduction(const char *name, at::ScalarType dtype, const ReduceOp &op) const {
    TORCH_CHECK_NOT_IMPLEMENTED(reduces(dtype), name, ": a reduction of ", dtype,
                                " is not supported on ", deviceName(),
                                ", because Gloo lacks it; use Float, Double, Half, BFloat16, "
                                "Char, Byte, Int, Long or Bool, or a complex type of these");
    TORCH_CHECK_VALUE(!isBitwise(op.op_) || c10::isIntegralType(dtype, true), name, ": ReduceOp.",
                      opName(op.op_), " takes integers, got ", dtype);
    TORCH_CHECK_VALUE(!c10::isComplexType(dtype) || c10d::isComplexViewAsRealAllowed(op), name,
                      ": ReduceOp.", opName(op.op_), " does not take ", dtype);
    TORCH_CHECK_VALUE(dtype != at::kBool || op.op_ != ReduceOp::AVG, name,
                      ": ReduceOp.AVG does not take ", dtype);
    TORCH_CHECK_VALUE(op.op_ != ReduceOp::PREMUL_SUM || !c10::isIntegralType(dtype, true), name,
                      ": ReduceOp.PREMUL_SUM takes floats, got ", dtype);
    // Gloo adds bools as bytes: two of them are 2, which is not a bool.
    if (dtype == at::kBool && op.op_ == ReduceOp::SUM) return ReduceOp::MAX;
    const bool scales = op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM;
    return scales ? ReduceOp(ReduceOp::SUM) : op;
  }

  /* Makes `call` a reduction of its outputs, of one dtype; returns options that Gloo supports. */
  template <typename Given>
  Given reducing(Call &call, const Given &options) const {
    call.bytes = false;
    call.announcement.reduction = opName(options.reduceOp.op_);
    call.average = options.reduceOp == ReduceOp::AVG;
    Given ours = options;
    const Tensors &some = call.out.empty() ? call.sparse : call.out;
    if (some.empty()) return ours;  // refused by `start`
    const at::ScalarType dtype = some[0].scalar_type();
    ours.reduceOp = reduction(call.name, dtype, options.reduceOp);
    call.factor = factorOf(options.reduceOp, getSize());
    return ours;
  }

  /* Gloo reduces several tensors of one dtype at once: this makes one collective for each dtype, as
   * one work. All outputs are checked before any collective begins; the caller checks inputs. */
  template <typename Given, typename Start>
  WorkPtr reducingEachDtype(const char *name, OpType type, const Tensors &outputs,
                            const Given &options, const Start &startThose) {
    std::vector<std::pair<at::ScalarType, Places>> dtypes;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const at::ScalarType dtype = outputs[i].scalar_type();
      checkTensor(name, outputs[i], outputs[0].device());
      const auto found = std::find_if(dtypes.begin(), dtypes.end(),
                                      [&](const auto &other) { return other.first == dtype; });
      if (found != dtypes.end()) {
        found->second.push_back(i);
        continue;
      }
      reduction(name, dtype, options.reduceOp);
      dtypes.push_back({dtype, {i}});
    }
    if (dtypes.size() < 2) return startThose(outputs.empty() ? Places{} : dtypes[0].second);
    CollectiveWork::Works works;
    for (const auto &[dtype, those] : dtypes) {
      const WorkPtr work = startThose(those);
      const auto &own = static_cast<const CollectiveWork &>(*work).works();
      works.insert(works.end(), own.begin(), own.end());
    }
    return c10::make_intrusive<CollectiveWork>(type, std::move(works), outputs);
  }

  /* Gloo gathers all elements and adds those with equal indices. The number of elements in the
   * result is therefore unknown before it has run. */
  WorkPtr allreduceSparse(const at::Tensor &tensor, const c10d::AllreduceOptions &options) {
    const char *what = "all_reduce of a sparse tensor";
    const ReduceOp::RedOpType op = options.reduceOp.op_;
    TORCH_CHECK_VALUE(op == ReduceOp::SUM || op == ReduceOp::AVG, what,
                      ": expected ReduceOp.SUM or ReduceOp.AVG, got ReduceOp.", opName(op));
    TORCH_CHECK_VALUE(tensor.sparse_dim() <= kMostDims && tensor.dense_dim() <= kMostDims, what,
                      ": expected at most ", kMostDims, " sparse and ", kMostDims,
                      " dense dimensions, got ", tensor.sparse_dim(), " and ", tensor.dense_dim());
    TORCH_CHECK_NOT_IMPLEMENTED(addsSparse(tensor.scalar_type()), what, ": ", tensor.scalar_type(),
                                " is not supported on ", deviceName(),
                                ", because Gloo lacks it; use Float, "
                                "Double, BFloat16, Char, Byte, "
                                "Int or Long");
    Call call{.type = OpType::ALLREDUCE, .name = "all_reduce", .in = {}, .out = {}};
    call.in = {tensor._indices().contiguous(), tensor._values().contiguous()};
    call.sparse = {tensor};
    const auto ours = reducing(call, options);
    call.announcement.name = what;
    call.announcement.elements = tensor.numel();
    call.announcement.parts =
        c10::str("sizes ", tensor.sizes(), ", ", tensor.sparse_dim(), " sparse and ",
                 tensor.dense_dim(), " dense dimensions, ", tensor.scalar_type());
    call.blocks = true;
    return start(
        std::move(call), [ours, sizes = tensor.sizes().vec(), coalesced = tensor.is_coalesced(),
                          places = call.in[0].sizes().vec(),
                          shape = call.in[1].sizes().vec()](Backend &gloo, Tensors &host) {
          const at::Tensor indices = host[0].view(places), values = host[1].view(shape);
          Tensors sparse{
              at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options(), coalesced)};
          auto work = gloo.allreduce(sparse, ours);
          work->wait();
          host.push_back(sparse[0]);
          return work;
        });
  }

  /* Gloo gathers only tensors of one size, so each rank broadcasts its own. */
  WorkPtr allgatherUneven(const Tensors &outputs, const at::Tensor &input,
                          const c10d::AllgatherOptions &options) {
    const auto rank = static_cast<size_t>(getRank());
    checkSame("all_gather", {outputs[rank]}, input);
    for (const at::Tensor &output : outputs) checkKind("all_gather", output, input);
    Call call{.type = OpType::ALLGATHER, .name = "all_gather", .in = {input}, .out = outputs};
    call.announcement.elements = -1;  // each rank has a different number
    call.announcement.sends.assign(outputs.size(), sizeOf(input));
    call.announcement.expects = sizesOf(outputs);
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      asKernel([&] { host[1 + rank].copy_(host[0]); });
      WorkPtr work;
      for (size_t root = 0; root + 1 < host.size(); ++root) {
        Tensors part{host[1 + root]};
        if (part[0].numel() == 0) continue;
        c10d::BroadcastOptions from;
        from.rootRank = static_cast<int64_t>(root);
        from.timeout = options.timeout;
        work = gloo.broadcast(part, from);
        work->wait();
      }
      return work;
    });
  }

  /* Each rank is the root of a reduction of its part. */
  WorkPtr reduceScatterUneven(const at::Tensor &output, const Tensors &inputs,
                              const c10d::ReduceScatterOptions &options) {
    const char *name = "reduce_scatter";
    const auto rank = static_cast<size_t>(getRank());
    checkSame(name, {inputs[rank]}, output);
    for (const at::Tensor &input : inputs) checkKind(name, input, output);
    Call call{.type = OpType::REDUCE_SCATTER, .name = name, .in = inputs, .out = {output}};
    const auto ours = reducing(call, options);
    call.announcement.elements = -1;  // each rank gets a different number
    call.announcement.sends = sizesOf(inputs);
    call.announcement.expects.assign(inputs.size(), sizeOf(output));
    return start(std::move(call), [=](Backend &gloo, Tensors &host) {
      WorkPtr work;
      for (size_t root = 0; root + 1 < host.size(); ++root) {
        if (host[root].numel() == 0) continue;
        Tensors part(1);
        asKernel([&] { part[0] = host[root].clone(); });
        c10d::ReduceOptions to;
        to.reduceOp = ours.reduceOp;
        to.rootRank = static_cast<int64_t>(root);
        to.timeout = options.timeout;
        work = gloo.reduce(part, to);
        work->wait();
        if (root == rank) asKernel([&] { host.back().copy_(part[0]); });
      }
      return work;
    });
  }

  WorkPtr receive(OpType type, Tensors &tensors, int srcRank, int tag) {
    checkOne("recv", tensors);
    Call call{.type = type, .name = "recv", .in = {}, .out = tensors};
    if (type == OpType::RECV) call.peers = {checkPeer("recv", srcRank)};
    call.queue = receivesFrom(srcRank, checkTag("recv", tag));
    call.blocks = type == OpType::RECVANYSOURCE;  // the host needs the sender's number
    return start(std::move(call),
                 [=, dtype = tensors[0].scalar_type()](Backend &gloo, Tensors &host) {
                   return receiveWithSize(gloo, host[0], dtype, srcRank, tag);
                 });
  }

  std::shared_ptr<CollectiveQueues> queues_;  // empty in the destructor alone
  std::atomic<uint64_t> splits_ = 0;
  const pid_t process_ = getpid();
  // Guards the fields below, and keeps the queue's order the same as the numbers'.
  std::mutex mutex_;
  uint64_t sequence_ = 0;  // of collectives, equal on all ranks
  uint64_t messages_ = 0;  // sent and received
  std::optional<std::vector<c10::intrusive_ptr<CollectiveWork>>> coalescing_;
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::module_::import("torch.distributed");  // which registers the base
  py::class_<ProcessGroupOpenReg, c10::intrusive_ptr<ProcessGroupOpenReg>, c10d::Backend>(
      m, "ProcessGroupOpenReg")
      .def_property_readonly("_gloo_options", &ProcessGroupOpenReg::getBackendOptions)
      .def("comm_split_count", &ProcessGroupOpenReg::splits)
      // Called where the process belongs to no part of a split group: Gloo needs no other rank for
      // it.
      .def("perform_nocolor_split", [](const ProcessGroupOpenReg &, c10::Device) {});
  m.def("_make_process_group",
        [](c10::intrusive_ptr<c10d::Backend> gloo, const c10::intrusive_ptr<c10d::Store> &store,
           std::vector<int64_t> globalRanks) -> c10::intrusive_ptr<c10d::Backend> {
          Peers peers(*store, gloo->getSize(), std::move(globalRanks));
          return c10::make_intrusive<ProcessGroupOpenReg>(std::move(gloo), std::move(peers));
        });
  m.def("_set_rank_thread", [](int rank, int ranks) { rankThread = {rank, ranks}; });
  m.def("_make_thread_transport", [](const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                     int size, c10::intrusive_ptr<c10d::Backend::Options> options) {
    WithoutGil unlocked;
    return makeThreadTransport(*store, rank, size, std::move(options));
  });
});

}  // namespace

}  // namespace torch_openreg
