/*
 * The functions that a program, or PyTorch's flight recorder, registers with a process group, to be
 * called when a collective fails or completes (torch/csrc/distributed/c10d/Hooks.hpp, from PyTorch
 * 2.14 on).
 */
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../torch/gil.h"

namespace torch_openreg {

/* A hook may be a Python function, which takes Python's lock when it is copied, called or
 * destroyed. So none of these happens under the mutex, which is a leaf. */
template <typename... Arguments>
class HookTable {
 public:
  using Hook = std::function<void(Arguments...)>;

  void add(int64_t id, Hook hook) { put(id, std::make_shared<const Hook>(std::move(hook))); }
  void remove(int64_t id) { put(id, nullptr); }

  /* Calls all of them, and returns the first exception. */
  std::exception_ptr run(Arguments... arguments) const {
    std::vector<std::shared_ptr<const Hook>> all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto &[id, hook] : hooks_) all.push_back(hook);
    }
    std::exception_ptr first;
    for (auto &hook : all) {
      withoutUnwinding([&] {
        try {
          if (interpreterRuns()) (*hook)(arguments...);
        } catch (const std::exception &) {
          if (!first) first = std::current_exception();
        }
        hook.reset();
      });
    }
    return first;
  }

 private:
  void put(int64_t id, std::shared_ptr<const Hook> hook) {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks_[id].swap(hook);  // the old one is destroyed after the lock is released
    if (hooks_[id] == nullptr) hooks_.erase(id);
  }

  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_;
};

struct GroupHooks {
  HookTable<> failed;
  HookTable<uint64_t> completed;  // with the Work's key
};

/* Tells the hooks when all `parts` collectives of a Work have succeeded. */
class Completion {
 public:
  Completion(std::shared_ptr<const GroupHooks> hooks, size_t parts)
      : hooks_(std::move(hooks)), left_(parts) {}

  uint64_t key() const { return key_; }
  /* Called once for each part that has succeeded. */
  void arrive() {
    if (--left_ == 0) (void)hooks_->completed.run(key_);
  }

 private:
  static uint64_t nextKey() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const std::shared_ptr<const GroupHooks> hooks_;
  const uint64_t key_ = nextKey();  // of this Work alone
  std::atomic<size_t> left_;
};

}  // namespace torch_openreg
