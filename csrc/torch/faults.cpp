/* Python's interface to fault injection and the hang report. */
#include <openreg_fault.h>
#include <openreg_watchdog.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "device.h"
#include "gil.h"
#include "module.h"

namespace torch_openreg {

namespace {

std::vector<std::string> kinds() {
  std::vector<std::string> names;
  for (int i = 0; const char *name = orFaultName(i); i++) names.emplace_back(name);
  return names;
}

void inject(int kind, int64_t device, uint64_t after, uint64_t delay) {
  const orFault fault{sizeof(orFault), static_cast<orFaultKind>(kind), checkIndex(device), after,
                      delay};
  OPENREG_CHECK(orFaultInject(&fault));
}

std::pair<uint64_t, std::string> outcome(int kind, int64_t device) {
  auto outcome = sized<orFaultOutcome>();
  OPENREG_CHECK(orFaultGetOutcome(&outcome, static_cast<orFaultKind>(kind), checkIndex(device)));
  return {outcome.fired, outcome.operation};
}

void remove(int kind, int64_t device) {
  OPENREG_CHECK(orFaultRemove(static_cast<orFaultKind>(kind), checkIndex(device)));
}

std::string hangReport() {
  char *text = nullptr;
  OPENREG_CHECK(orHangReport(&text));
  const std::unique_ptr<char, decltype(&free)> owned(text, &free);
  return text;
}

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  m.def("_fault_kinds", &kinds);
  m.def("_fault_inject", &inject);
  m.def("_fault_outcome", &outcome);
  m.def("_fault_remove", &remove);
  m.def("_hang_report", [] {
    WithoutGil unlocked;
    return hangReport();
  });
});

}  // namespace

}  // namespace torch_openreg
