/*
 * `Pools` is one leaked object under its mutex. The core holds each pool once for it, from the
 * first retainPool to the last releasePool. Functions of the core that may allocate, free or wait
 * are not called under the mutex: they report to the memory history, which reads a pool's id.
 */
#include "mempool.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "allocator.h"
#include "device.h"
#include "fork.h"
#include "module.h"
#include "sync_debug.h"

namespace py = pybind11;

namespace torch_openreg {

std::atomic<int> poolRoutes{0};

namespace {

using c10::MempoolId_t;

struct Pool {
  orMemPool_t handle = 0;
  uint64_t holders = 0;
  uint64_t objects = 0; /* those of them that are MemPool objects */
};

struct Route {
  c10::DeviceIndex device;
  MempoolId_t id;
  orMemPool_t handle;
  std::thread::id begun_by;
  StreamFilter filter;
};

using PoolKey = std::pair<c10::DeviceIndex, MempoolId_t>;

struct Pools {
  std::mutex mutex;
  std::map<PoolKey, Pool> all;
  std::map<orMemPool_t, MempoolId_t> ids;
  std::vector<Route> routes;
};

Pools &pools() { return leaked<Pools>(); }

std::string nameOf(MempoolId_t id) {
  return "(" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
}

/* Requires the mutex. */
Pool &held(c10::DeviceIndex device, MempoolId_t id) {
  const auto found = pools().all.find({device, id});
  TORCH_CHECK(found != pools().all.end(), "memory pool ", nameOf(id), " of ", deviceAt(device),
              " has no holder");
  return found->second;
}

}  // namespace

MempoolId_t newMemPoolId(bool user) {
  static std::atomic<c10::CaptureId_t> users{1}, graphs{1};
  return user ? MempoolId_t(0, users++) : MempoolId_t(graphs++, 0);
}

void retainPool(c10::DeviceIndex device, MempoolId_t id, bool object) {
  TORCH_CHECK_VALUE(id != MempoolId_t(0, 0),
                    "(0, 0) is the device's own memory, not a memory pool: use the id of a MemPool "
                    "or graph_pool_handle()");
  checkIndex(device);
  std::lock_guard<std::mutex> lock(pools().mutex);
  Pool &pool = pools().all[{device, id}];
  if (pool.holders == 0) {
    const orError_t error = orMemPoolCreate(&pool.handle, device);
    if (error != orSuccess) pools().all.erase({device, id});
    OPENREG_CHECK(error);
    pools().ids[pool.handle] = id;
  }
  ++pool.holders;
  pool.objects += object ? 1 : 0;
}

void releasePool(c10::DeviceIndex device, MempoolId_t id, bool object) {
  orMemPool_t last = 0;
  {
    std::lock_guard<std::mutex> lock(pools().mutex);
    Pool &pool = held(device, id);
    pool.objects -= object ? 1 : 0;
    if (--pool.holders != 0) return;
    last = pool.handle;
    pools().ids.erase(last);
    pools().all.erase({device, id});
  }
  OPENREG_CHECK(orMemPoolRelease(last));
}

uint64_t poolUseCount(c10::DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> lock(pools().mutex);
  const auto found = pools().all.find({device, id});
  return found == pools().all.end() ? 0 : found->second.holders;
}

void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, StreamFilter filter) {
  std::lock_guard<std::mutex> lock(pools().mutex);
  pools().routes.push_back(
      {device, id, held(device, id).handle, std::this_thread::get_id(), std::move(filter)});
  poolRoutes.fetch_add(1, std::memory_order_relaxed);
}

void endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> lock(pools().mutex);
  auto &routes = pools().routes;
  const auto ours = [&](const Route &r) { return r.device == device && r.id == id; };
  auto found = std::find_if(routes.rbegin(), routes.rend(), [&](const Route &r) {
    return ours(r) && r.begun_by == std::this_thread::get_id();
  });
  if (found == routes.rend()) found = std::find_if(routes.rbegin(), routes.rend(), ours);
  TORCH_CHECK(found != routes.rend(), "nothing is allocated to memory pool ", nameOf(id), " of ",
              deviceAt(device), " now");
  routes.erase(std::next(found).base());
  poolRoutes.fetch_sub(1, std::memory_order_relaxed);
}

orMemPool_t routedPool(c10::DeviceIndex device, orStream_t stream) {
  if (inKernel()) return 0;
  std::lock_guard<std::mutex> lock(pools().mutex);
  const auto &routes = pools().routes;
  const auto found = std::find_if(routes.rbegin(), routes.rend(), [&](const Route &r) {
    return r.device == device && r.filter(stream);
  });
  return found == routes.rend() ? 0 : found->handle;
}

MempoolId_t poolId(orMemPool_t pool) {
  if (pool == 0) return {0, 0};
  std::lock_guard<std::mutex> lock(pools().mutex);
  const auto found = pools().ids.find(pool);
  return found == pools().ids.end() ? MempoolId_t(0, 0) : found->second;
}

std::vector<std::pair<MempoolId_t, orMemPool_t>> poolsOf(c10::DeviceIndex device) {
  std::vector<std::pair<MempoolId_t, orMemPool_t>> all;
  std::lock_guard<std::mutex> lock(pools().mutex);
  for (const auto &[key, pool] : pools().all) {
    if (key.first == device) all.emplace_back(key.second, pool.handle);
  }
  return all;
}

void emptyPool(MempoolId_t id) {
  std::vector<orMemPool_t> idle;
  {
    std::lock_guard<std::mutex> lock(pools().mutex);
    for (const auto &[key, pool] : pools().all) {
      if (key.second != id) continue;
      TORCH_CHECK(pool.holders == pool.objects, "memory pool ", nameOf(id), " of ",
                  deviceAt(key.first), " is in use: ", pool.holders - pool.objects,
                  " graphs or scopes of use_mem_pool hold it; reset or leave them first");
      idle.push_back(pool.handle);
    }
  }
  for (const orMemPool_t handle : idle) OPENREG_CHECK(orCacheEmptyPool(handle));
}

namespace {

/* torch.openreg.MemPool: a pool of the device that was current at its creation. */
class MemPool : Uncopyable {
 public:
  MemPool() : device_(currentDevice()), id_(newMemPoolId(true)) { retainPool(device_, id_, true); }

  /* Idle memory is returned at once, unless a graph holds the pool too. */
  ~MemPool() {
    if (orInForkedChild()) return;          // another thread's locks may be held
    const py::gil_scoped_release released;  // kernels may need it
    try {
      if (useCount() == 1 && !inKernel()) emptyPool(id_);
      releasePool(device_, id_, true);
    } catch (const c10::Error &) {  // already released by another caller
    }
  }

  MempoolId_t id() const { return id_; }
  uint64_t useCount() const { return poolUseCount(device_, id_); }

 private:
  c10::DeviceIndex device_;
  MempoolId_t id_;
};

/* Routes this thread's allocations. */
void beginForThread(int64_t index, MempoolId_t id) {
  const c10::DeviceIndex device = checkIndex(index);
  retainPool(device, id);
  const auto thread = std::this_thread::get_id();
  beginAllocateToPool(device, id,
                      [thread](orStream_t) { return thread == std::this_thread::get_id(); });
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  py::class_<MemPool>(m, "_MemPool")
      .def(py::init<>())
      .def_property_readonly("id", &MemPool::id)
      .def("use_count", &MemPool::useCount);
  m.def(
      "_memory_empty_pool", [](MempoolId_t id) { deviceAllocator().emptyCache(id); },
      py::call_guard<py::gil_scoped_release>());
  m.def("_graph_pool_handle", [] { return newMemPoolId(true); });
  m.def("_beginAllocateCurrentThreadToPool", &beginForThread);
  m.def("_endAllocateToPool",
        [](int64_t index, MempoolId_t id) { endAllocateToPool(checkIndex(index), id); });
  m.def("_releasePool", [](int64_t index, MempoolId_t id) { releasePool(checkIndex(index), id); });
});

}  // namespace

}  // namespace torch_openreg
