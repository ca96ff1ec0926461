/* Memory statistics, snapshots and history, as Python sees them. */
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_openreg {

void bindMemory(pybind11::module_ &m);

}  // namespace torch_openreg
