/*
 * torch.openreg.memory's part of torch_openreg._C.
 */
#pragma once

#include <pybind11/pybind11.h>

namespace torch_openreg {

void bindMemory(pybind11::module_ &m);

}  // namespace torch_openreg
