/*
 * The work that the caller of a collective receives.
 */
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "../torch/compat.h"
#include "collective.h"

namespace torch_openreg {

/* A collective, or several that are waited for as one, and their outputs. Not empty. */
class CollectiveWork final : public c10d::Work {
 public:
  using Works = std::vector<c10::intrusive_ptr<Collective>>;
  CollectiveWork(c10d::OpType type, Works works, std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return works_.front()->sourceRank(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /* Complete at once, as on CUDA: a wait for it makes a stream wait. For a sparse tensor it is
   * complete when the size is known. */
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /* For one collective: complete when it is. */
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return works_.front()->getSequencenumber(); }
#if OPENREG_TORCH_SINCE(15)
  uint64_t getCompletionKey() const override { return completion_->key(); }
#endif

  const Works &works() const { return works_; }

 private:
  const Works works_;
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<Completion> completion_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // under mutex_
};

}  // namespace torch_openreg
