/*
 * Gives a kernel CPU tensors over the memory of device tensors, or over copies of it.
 *
 * They are made inside a task (a kernel's addresses are valid nowhere else) and short-lived:
 * nothing here may outlive the kernel's run except memory that became device memory.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <openreg.h>

#include <utility>

#include "host_copies.h"
#include "tensor_components.h"
#include "tensor_metadata.h"

namespace torch_openreg {

/* A list of pairs that is searched by key: linearly while short, by hash after that. */
template <typename Key, typename Value>
class PairList {
 public:
  Value *find(const Key *key) {
    if (index_.empty()) {
      for (auto &pair : pairs_) {
        if (pair.first == key) return &pair.second;
      }
      return nullptr;
    }
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &pairs_[found->second].second;
  }
  Value &add(const Key *key, Value value) {
    pairs_.emplace_back(key, std::move(value));
    if (pairs_.size() == kLinear) {
      for (size_t i = 0; i < pairs_.size(); ++i) index_.emplace(pairs_[i].first, i);
    } else if (pairs_.size() > kLinear) {
      index_.emplace(key, pairs_.size() - 1);
    }
    return pairs_.back().second;
  }
  auto begin() { return pairs_.begin(); }
  auto end() { return pairs_.end(); }

 private:
  static constexpr size_t kLinear = 16;
  c10::SmallVector<std::pair<const Key *, Value>, 4> pairs_;
  ska::flat_hash_map<const Key *, size_t> index_;
};

/* Makes both tensors share one version counter: autograd sees a write to either as a write to
 * both. */
void shareVersion(const at::Tensor &to, const at::Tensor &from);

class CpuAliases {
 public:
  /* `sharesVersions`: aliases share version counters with the caller's tensors. `copies`: of the
   * memory of all tensors that `of` is asked for, if kernels do not reach the device's; then the
   * caller's thread calls what is for the task after the kernel, and no task does. */
  CpuAliases(orStream_t stream, c10::DeviceIndex device, bool sharesVersions,
             HostCopies *copies = nullptr)
      : stream_(stream), device_(device), sharesVersions_(sharesVersions), copies_(copies) {}

  /* The CPU tensor over the memory of `tensor`, with the same sizes, strides, offset, dtype, conj
   * and neg. The alias of a tensor with components is made of their aliases. Tensors that share a
   * storage have aliases that share one; the same tensor has the same alias. Call it in a task. */
  at::Tensor of(const at::Tensor &tensor);

  /* Called in the task after the kernel: device storages get the memory of resized aliases. */
  void adoptResized();
  /* Called in the task after the kernel: makes the memory of a CPU tensor from the kernel device
   * memory, without a copy if it came from WorkerMemory. */
  void adoptResult(const at::Tensor &result);
  /* Registers a CPU tensor that the kernel gets unchanged: it stays a CPU tensor. */
  void passed(const at::Tensor &cpu);
  /* Copies back what a kernel has written to the copies of this tensor, whose resized aliases have
   * been adopted. */
  void writeBack(const at::Tensor &caller);

  /* Called after the task, on the caller's thread: updates tensors with resized aliases. */
  void updateCallers();
  /* The caller's tensor for one that the kernel returned: its own if the kernel returned an alias,
   * a view if it returned a view of one, and otherwise a tensor over what adoptResult made. */
  at::Tensor toCaller(const at::Tensor &result);

 private:
  struct Shared {
    c10::Storage device, cpu;
    void *address;
    c10::ScalarType dtype;
  };
  struct Alias {
    at::Tensor caller, cpu;
  };

  at::Tensor ofComponents(const at::Tensor &tensor);
  bool hasSameComponents(const Alias &alias);
  Components componentsToCaller(const at::Tensor &cpu);
  c10::Storage &cpuStorage(const at::Tensor &tensor);
  c10::DataPtr deviceMemory(c10::StorageImpl *cpu, c10::ScalarType dtype);
  void fetchRest(const c10::StorageImpl &device, c10::StorageImpl *cpu);
  c10::DispatchKeySet viewKeys(const c10::Storage &storage);

  orStream_t stream_;
  c10::DeviceIndex device_;
  bool sharesVersions_;
  HostCopies *copies_;
  PairList<c10::StorageImpl, Shared> shared_;          // by device storage
  PairList<c10::StorageImpl, c10::Storage> toDevice_;  // by CPU storage: aliases and results
  PairList<c10::StorageImpl, bool> passed_;            // CPU storages of inputs
  PairList<c10::TensorImpl, Alias> aliases_;           // by the caller's tensor
  PairList<c10::TensorImpl, at::Tensor> callers_;      // by alias
};

}  // namespace torch_openreg
