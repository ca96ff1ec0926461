/* The backend's Python interface. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../torch/module.h"
#include "process_group.h"

namespace torch_openreg {

namespace py = pybind11;

namespace {

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
});

}  // namespace

}  // namespace torch_openreg
