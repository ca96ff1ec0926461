/* The backend as Python makes it. */
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../torch/module.h"
#include "process_group.h"

namespace torch_openreg {

namespace py = pybind11;

namespace {

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.def("_make_process_group",
        [](c10::intrusive_ptr<c10d::Backend> gloo, const c10::intrusive_ptr<c10d::Store> &store,
           std::vector<int64_t> globalRanks) -> c10::intrusive_ptr<c10d::Backend> {
          Peers peers(*store, gloo->getSize(), std::move(globalRanks));
          return c10::make_intrusive<ProcessGroupOpenReg>(std::move(gloo), std::move(peers));
        });
});

}  // namespace

}  // namespace torch_openreg
