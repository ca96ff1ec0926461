/*
 * The operators' part of torch_openreg._C.
 */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <string>

#include "../torch/module.h"
#include "fallback.h"
#include "op_traits.h"
#include "operator_task.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

py::dict statsOf(std::atomic<uint64_t> &count, std::atomic<uint64_t> &ns, bool reset) {
  py::dict stats;
  stats["count"] = reset ? count.exchange(0) : count.load();
  stats["seconds"] = static_cast<double>(reset ? ns.exchange(0) : ns.load()) * 1e-9;
  return stats;
}

py::dict fallbackStats(bool reset) {
  py::dict all;
  forEachOperator([&](const std::string &name, OpCounters &c) {
    if (c.queued + c.waited + c.copied == 0) return;
    py::dict entry;
    entry["asynchronous"] = statsOf(c.queued, c.queuedNs, reset);
    entry["waited"] = statsOf(c.waited, c.waitedNs, reset);
    entry["copying"] = statsOf(c.copied, c.copiedNs, reset);
    all[py::str(name)] = entry;
  });
  return all;
}

/* The operators that have run by a kernel of the device's own. */
py::set ownKernels() {
  py::set names;
  forEachOperator([&](const std::string &name, OpCounters &c) {
    if (c.own != 0) names.add(name);
  });
  return names;
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  registerMakers();
  m.def("_register_operators", &registerOperators);
  m.def("_task_blocks", &taskBlocks);
  m.def("_fallback_stats", &fallbackStats);
  m.def("_own_kernels", &ownKernels);
});

}  // namespace

}  // namespace torch_openreg
