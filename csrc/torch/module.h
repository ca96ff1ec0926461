/*
 * Lets the higher folders (csrc/aten and csrc/distributed) add to torch_openreg._C.
 */
#pragma once

namespace pybind11 {
class module_;
}

namespace torch_openreg {

/* Called when the module is made, after all static registrations. */
using Binder = void (*)(pybind11::module_ &m);
bool addBinder(Binder binder);

}  // namespace torch_openreg
