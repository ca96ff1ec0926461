/* Fault injection and the hang report, as Python sees them. */
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_openreg {

void bindFaults(pybind11::module_ &m);

}  // namespace torch_openreg
