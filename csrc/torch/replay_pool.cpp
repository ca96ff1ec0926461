/*
 * Pools of graphs that can be captured again: those of torch.compile(mode="reduce-overhead"). The
 * graphs of a pool share its memory. All of them are dropped where an allocation would otherwise
 * fail.
 *
 * A pool belongs to the one thread that captures and replays its graphs, which holds it meanwhile;
 * a held pool is not dropped. Any thread may drop another pool: the allocator calls on the thread
 * that is short of memory, which may have the GIL or not, and may itself hold a pool.
 *
 * All fields are under `mutex`, one for all pools. It is a leaf: under it no function is called
 * that takes a lock, the GIL included, and no graph is destroyed. A thread that drops a pool takes
 * its graphs out and counts the drop under the lock, and resets the graphs afterwards. The owner
 * compares the count with that of its capture while it holds the pool. A pool has weak references:
 * its owner keeps the graphs alive.
 */
#include <ATen/accelerator/Graph.h>
#include <openreg_graph.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "device.h"
#include "fork.h"
#include "module.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

using Graph = at::accelerator::Graph;
using Graphs = std::vector<std::shared_ptr<Graph>>;

std::mutex mutex;

class ReplayPool;

/* Pools may be destroyed while the process exits. */
std::vector<ReplayPool *> &allPools() { return leaked<std::vector<ReplayPool *>>(); }

void resetAll(const Graphs &graphs) {
  for (const auto &graph : graphs) graph->reset();
}

class ReplayPool : Uncopyable {
 public:
  explicit ReplayPool(int64_t device) : device_(checkIndex(device)) {
    static const bool hooked = [] {
      OPENREG_CHECK(orSetShortageHook(&dropOldest));
      return true;
    }();
    (void)hooked;
    std::lock_guard<std::mutex> lock(mutex);
    allPools().push_back(this);
  }
  ~ReplayPool() {
    if (orInForkedChild()) return;  // another thread may hold the mutex for ever
    std::lock_guard<std::mutex> lock(mutex);
    auto &all = allPools();
    all.erase(std::find(all.begin(), all.end(), this));
  }

  /* False if it is already held: a finalizer calls the owner again during a capture or a replay. */
  bool hold() {
    if (orInForkedChild()) return false;
    std::lock_guard<std::mutex> lock(mutex);
    if (held_) return false;
    static uint64_t holds = 0;
    held_ = ++holds;
    return true;
  }
  void letGo() {
    std::lock_guard<std::mutex> lock(mutex);
    used_ = std::exchange(held_, 0);
  }

  void add(const std::shared_ptr<Graph> &graph) {
    std::lock_guard<std::mutex> lock(mutex);
    graphs_.erase(std::remove_if(graphs_.begin(), graphs_.end(),
                                 [](const auto &other) { return other.expired(); }),
                  graphs_.end());
    graphs_.push_back(graph);
  }
  uint64_t drops() const {
    std::lock_guard<std::mutex> lock(mutex);
    return drops_;
  }
  /* Called by the owner. */
  void drop() {
    Graphs graphs;
    {
      std::lock_guard<std::mutex> lock(mutex);
      graphs = takeGraphs();
    }
    resetAll(graphs);
  }

 private:
  /* Requires the mutex. */
  bool hasGraphs() const {
    return std::any_of(graphs_.begin(), graphs_.end(),
                       [](const auto &graph) { return !graph.expired(); });
  }

  /* Requires the mutex. The caller destroys the graphs without it. */
  Graphs takeGraphs() {
    Graphs taken;
    for (const auto &graph : graphs_) {
      if (auto alive = graph.lock()) taken.push_back(std::move(alive));
    }
    graphs_.clear();
    ++drops_;
    return taken;
  }

  /* Called without a lock where memory is short: drops the least recently used pool. */
  static int dropOldest(int device) {
    Graphs graphs;
    {
      std::lock_guard<std::mutex> lock(mutex);
      ReplayPool *oldest = nullptr;
      for (ReplayPool *pool : allPools()) {
        if (pool->device_ != device || pool->held_ != 0 || !pool->hasGraphs()) continue;
        if (oldest == nullptr || pool->used_ < oldest->used_) oldest = pool;
      }
      if (oldest == nullptr) return 0;
      graphs = oldest->takeGraphs();
    }
    resetAll(graphs);
    return 1;
  }

  const c10::DeviceIndex device_;
  uint64_t held_ = 0; /* the owner's number of the hold; 0: not held */
  uint64_t used_ = 0; /* the number of the last hold */
  uint64_t drops_ = 0;
  std::vector<std::weak_ptr<Graph>> graphs_;
};

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<ReplayPool>(m, "_ReplayPool")
      .def(py::init<int64_t>())
      .def("hold", &ReplayPool::hold)
      .def("let_go", &ReplayPool::letGo)
      .def("add", &ReplayPool::add)
      .def("drop", &ReplayPool::drop, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("drops", &ReplayPool::drops);
});

}  // namespace

}  // namespace torch_openreg
