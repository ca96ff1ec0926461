/*
 * The making of torch_openreg._C, to which the higher folders (csrc/aten and csrc/distributed) add.
 */
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_openreg {

/* Registers PyTorch's hooks and the factory of graphs, once, after the device type has its name. */
void registerHooks();

/* Called when the module is made, after all static registrations. */
using Binder = void (*)(pybind11::module_ &m);
bool addBinder(Binder binder);

}  // namespace torch_openreg
