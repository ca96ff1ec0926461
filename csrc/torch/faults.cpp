/* Python's interface to fault injection and the hang report. */
#include <ATen/record_function.h>
#include <openreg_fault.h>
#include <openreg_watchdog.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "device.h"
#include "fork.h"
#include "gil.h"
#include "module.h"
#include "stacks.h"

namespace torch_openreg {

namespace {

std::vector<std::string> kinds() {
  std::vector<std::string> names;
  for (int i = 0; const char *name = orFaultName(i); i++) names.emplace_back(name);
  return names;
}

std::pair<uint64_t, std::string> outcome(int kind, int64_t device) {
  auto outcome = sized<orFaultOutcome>();
  OPENREG_CHECK(orFaultGetOutcome(&outcome, static_cast<orFaultKind>(kind), checkIndex(device)));
  return {outcome.fired, outcome.operation};
}

// ---- The calls that faults were injected into ---------------------------------------------------

struct Call {
  bool armed;
  PythonStack stack;  // null until the fault is injected into an operator of PyTorch
};
using Fault = std::pair<int, int>;  // kind, device

/* Guarded by callsMutex, under which the core's lock is taken, and nothing else. */
std::mutex callsMutex;
std::map<Fault, Call> calls;
std::optional<at::CallbackHandle> watching;  // while a fault is armed

/* The faults that were armed when an operator began. */
struct Armed final : at::ObserverContext {
  std::vector<Fault> faults;
};

/* The thread whose operation an armed fault was injected into; 0 if there is none so far. */
int threadOf(const Fault &fault) {
  auto outcome = sized<orFaultOutcome>();
  orFaultGetOutcome(&outcome, static_cast<orFaultKind>(fault.first), fault.second);
  return outcome.thread;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction &) {
  auto before = std::make_unique<Armed>();
  if (orInForkedChild()) return before;  // the mutex may be held there for ever
  const std::lock_guard<std::mutex> lock(callsMutex);
  for (const auto &[fault, call] : calls)
    if (call.armed && !threadOf(fault)) before->faults.push_back(fault);
  return before;
}

/* The innermost operator that a fault was injected into ends first. */
void end(const at::RecordFunction &, at::ObserverContext *before) {
  if (orInForkedChild()) return;
  for (const Fault &fault : static_cast<Armed *>(before)->faults) {
    {
      const std::lock_guard<std::mutex> lock(callsMutex);
      const Call &call = calls[fault];
      if (!call.armed || call.stack || threadOf(fault) != gettid()) continue;
    }
    PythonStack stack = gatherStack();  // may wait for the GIL
    const std::lock_guard<std::mutex> lock(callsMutex);
    calls[fault].stack = std::move(stack);
  }
}

/* callsMutex held. */
void watch(const Fault &fault, bool armed) {
  calls[fault].armed = armed;
  if (armed) calls[fault].stack.reset();
  bool any = false;
  for (const auto &[other, call] : calls) any |= call.armed;
  if (any && !watching) {
    watching = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
  } else if (!any && watching) {
    at::removeCallback(*watching);
    watching.reset();
  }
}

void inject(int kind, int64_t device, uint64_t after, uint64_t delay) {
  const orFault fault{sizeof(orFault), static_cast<orFaultKind>(kind), checkIndex(device), after,
                      delay};
  refuseInForkedChild();
  const std::lock_guard<std::mutex> lock(callsMutex);
  OPENREG_CHECK(orFaultInject(&fault));
  watch({kind, fault.device}, true);
}

void remove(int kind, int64_t device) {
  const Fault fault{kind, checkIndex(device)};
  refuseInForkedChild();
  const std::lock_guard<std::mutex> lock(callsMutex);
  OPENREG_CHECK(orFaultRemove(static_cast<orFaultKind>(kind), fault.second));
  watch(fault, false);
}

/* The stack of the call that the last fault of this kind was injected into, or None. */
pybind11::object callOf(int kind, int64_t device) {
  PythonStack stack;
  refuseInForkedChild();
  {
    const std::lock_guard<std::mutex> lock(callsMutex);
    stack = calls[{kind, checkIndex(device)}].stack;
  }
  return linesOf(stack);
}

// ---- The hang report ----------------------------------------------------------------------------

std::string hangReport() {
  char *text = nullptr;
  OPENREG_CHECK(orHangReport(&text));
  const std::unique_ptr<char, decltype(&free)> owned(text, &free);
  return text;
}

/* A report that is printed by Python, in a thread of its own: whatever hangs may hold the GIL. */
struct Printing {
  explicit Printing(const char *said) : text(said) {}

  const std::string text;
  std::mutex mutex;
  std::condition_variable changed;
  enum { waits, prints, printed, failed, dropped } state = waits;

  bool become(decltype(state) next) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (state == dropped) return false;
    state = next;
    changed.notify_all();
    return true;
  }

  void run() {
    int gil = 0;
    if (!takeGil(gil)) return;
    if (become(prints)) become(print() ? printed : failed);
    giveGilBack(gil);
  }

  bool print() const {
    try {
      pybind11::module_::import("torch_openreg.openreg._texts").attr("print_hang_report")(text);
      return true;
    } catch (pybind11::error_already_set &) {
      return false;
    }
  }
};

/* Waits this long for the GIL, and then for Python. */
constexpr std::chrono::seconds kForGil{1}, kForPython{20};

int printByPython(const char *text) {
  try {
    const auto report = std::make_shared<Printing>(text);
    std::thread([report] { report->run(); }).detach();
    std::unique_lock<std::mutex> lock(report->mutex);
    const auto has = [&](auto state) { return [&, state] { return report->state >= state; }; };
    if (report->changed.wait_for(lock, kForGil, has(Printing::prints)) &&
        report->changed.wait_for(lock, kForPython, has(Printing::printed)) &&
        report->state == Printing::printed)
      return 1;
    report->state = Printing::dropped;
  } catch (const std::exception &) {  // no memory, or no thread
  }
  return 0;
}

[[maybe_unused]] const bool prints = (orSetHangPrint(&printByPython), true);

[[maybe_unused]] const bool added = addBinder([](pybind11::module_ &m) {
  m.def("_fault_kinds", &kinds);
  m.def("_fault_inject", &inject);
  m.def("_fault_outcome", &outcome);
  m.def("_fault_remove", &remove);
  m.def("_fault_call", &callOf);
  m.def("_hang_report", [] {
    WithoutGil unlocked;
    return hangReport();
  });
});

}  // namespace

}  // namespace torch_openreg
