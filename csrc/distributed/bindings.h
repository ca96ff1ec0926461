/* The backend as Python makes it. */
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_openreg {

void bindDistributed(pybind11::module_ &m);

}  // namespace torch_openreg
