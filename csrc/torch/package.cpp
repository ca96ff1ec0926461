/*
 * A device of another name, which a package offers (torch_openreg/_packages.py). Called under the
 * GIL, once, right after the module is made, when PyTorch has the name already.
 */
#include <ATen/core/GraphImplInterface.h>
#include <openreg_package.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "check.h"
#include "module.h"

namespace torch_openreg {

namespace {

void nameDevices(const std::string &name, const std::string &plugin) {
  OPENREG_CHECK(orNameDevices(name.c_str(), plugin.c_str()));
  // PyTorch finds the factory of graphs by the device's name.
  std::string upper = name;
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  at::GraphImplRegistry()->Register(upper, [](const at::GraphImplArgs &args) {
    return at::GraphImplRegistry()->Create("OPENREG", args);
  });
}

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  m.def("_name_devices", &nameDevices);
  m.def("_own_name", &orDevicesName);
});

}  // namespace

}  // namespace torch_openreg
