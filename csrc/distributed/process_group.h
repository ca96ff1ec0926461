/*
 * The c10d backend "openreg": PyTorch's own Gloo over device memory.
 */
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective_work.h"

namespace torch_openreg {

/* Calls of one group come from one thread at a time, or in an order that is the same on every rank.
 * The call throws for a wrong argument; later errors belong to the Work. */
class ProcessGroupOpenReg final : public c10d::Backend {
 public:
  ProcessGroupOpenReg(c10::intrusive_ptr<c10d::Backend> gloo, Peers peers);
  ~ProcessGroupOpenReg() override;

  const std::string getBackendName() const override { return "openreg"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return queues_->gloo().getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    queues_->gloo().setTimeout(timeout);
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsSplitting() const override { return true; }
  /* Null for a rank that is not among `ranks`. */
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> &store,
                                          const std::vector<int> &ranks,
                                          const c10::intrusive_ptr<Options> &options) override;
  /* The number of splits so far: PyTorch's name for the next part. */
  uint64_t splits() const { return splits_; }

  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override;
  WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override;
  WorkPtr allreduce_coalesced(Tensors &tensors,
                              const c10d::AllreduceCoalescedOptions &options) override;
  WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &options) override;
  WorkPtr allgather(Lists &outputs, Tensors &inputs,
                    const c10d::AllgatherOptions &options) override;
  WorkPtr _allgather_base(at::Tensor &output, at::Tensor &input,
                          const c10d::AllgatherOptions &options) override;
  WorkPtr allgather_coalesced(Lists &outputs, Tensors &inputs,
                              const c10d::AllgatherOptions &options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::AllgatherOptions &options) override;
  WorkPtr gather(Lists &outputs, Tensors &inputs, const c10d::GatherOptions &options) override;
  WorkPtr scatter(Tensors &outputs, Lists &inputs, const c10d::ScatterOptions &options) override;
  WorkPtr reduce_scatter(Tensors &outputs, Lists &inputs,
                         const c10d::ReduceScatterOptions &options) override;
  WorkPtr _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                               const c10d::ReduceScatterOptions &options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                          const c10d::ReduceScatterOptions &options) override;
  WorkPtr alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &outputSplits,
                        std::vector<int64_t> &inputSplits,
                        const c10d::AllToAllOptions &options) override;
  WorkPtr alltoall(Tensors &outputs, Tensors &inputs,
                   const c10d::AllToAllOptions &options) override;
  WorkPtr send(Tensors &tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors &tensors, int srcRank, int tag) override {
    return receive(c10d::OpType::RECV, tensors, srcRank, tag);
  }
  WorkPtr recvAnysource(Tensors &tensors, int tag) override {
    return receive(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions &options) override;

 private:
  WorkPtr start(Call call, Issue issue);
  WorkPtr startOn(c10::Device device, Call call, Issue issue);
  WorkPtr receive(c10d::OpType type, Tensors &tensors, int srcRank, int tag);
  WorkPtr allreduceSparse(const at::Tensor &tensor, const c10d::AllreduceOptions &options);
  WorkPtr allgatherUneven(const Tensors &outputs, const at::Tensor &input,
                          const c10d::AllgatherOptions &options);
  WorkPtr reduceScatterUneven(const at::Tensor &output, const Tensors &inputs,
                              const c10d::ReduceScatterOptions &options);
  c10d::ReduceOp reduction(const char *name, at::ScalarType dtype, const c10d::ReduceOp &op) const;
  template <typename Given>
  Given reducing(Call &call, const Given &options) const;
  template <typename Given, typename Start>
  WorkPtr reducingEachDtype(const char *name, c10d::OpType type, const Tensors &outputs,
                            const Given &options, const Start &startThose);
  void checkCount(const char *name, const char *what, size_t count) const;
  int checkRank(const char *name, int64_t rank) const;
  int checkPeer(const char *name, int rank) const;
  std::string groupName() const;
  std::vector<int> others() const;

  std::shared_ptr<CollectiveQueues> queues_;  // empty in the destructor alone
  std::atomic<uint64_t> splits_ = 0;
  const pid_t process_ = getpid();
  // Guards the fields below, and keeps the queue's order the same as the numbers'.
  std::mutex mutex_;
  uint64_t sequence_ = 0;  // of collectives, equal on all ranks
  uint64_t messages_ = 0;  // sent and received
  std::optional<std::vector<c10::intrusive_ptr<CollectiveWork>>> coalescing_;
};

}  // namespace torch_openreg
