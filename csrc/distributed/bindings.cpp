#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "process_group.h"

namespace torch_openreg {

namespace py = pybind11;

void bindDistributed(py::module_ &m) {
  m.def("_make_process_group",
        [](c10::intrusive_ptr<c10d::Backend> gloo, const c10::intrusive_ptr<c10d::Store> &store,
           std::vector<int64_t> globalRanks) -> c10::intrusive_ptr<c10d::Backend> {
          Peers peers(*store, gloo->getSize(), std::move(globalRanks));
          return c10::make_intrusive<ProcessGroupOpenReg>(std::move(gloo), std::move(peers));
        });
}

}  // namespace torch_openreg
