#include <Python.h>

#include "texts.h"

#include <c10/util/StringUtil.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "fork.h"
#include "gil.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

/* An argument for Python, made under the GIL. */
py::object argument(const PythonStack &stack) { return linesOf(stack); }
template <typename T>
py::object argument(const T &value) {
  return py::cast(value);
}

/* The result of a function of _texts.py; `otherwise`, where Python cannot be called: while it ends,
 * and in a kernel, for which a thread that forks waits with the GIL. */
template <typename Result, typename... Arguments>
Result told(const char *function, Result otherwise, const Arguments &...arguments) {
  if (!interpreterRuns() || inKernel() || orInForkedChild()) return otherwise;
  int gil = 0;
  if (!takeGil(gil)) return otherwise;
  try {
    const py::error_scope pending;
    const py::object texts = py::module_::import("torch_openreg.openreg._texts");
    otherwise = texts.attr(function)(argument(arguments)...).template cast<Result>();
  } catch (const std::exception &) {  // the error matters more than its layout
  }
  giveGilBack(gil);
  return otherwise;
}

constexpr size_t kLine = 76;  // beside the name of the exception

}  // namespace

std::string errorText(const std::string &text) {
  const bool fits = text.size() <= kLine && text.find("aten::") == std::string::npos &&
                    text.find("stream 0x") == std::string::npos &&
                    text.find("injected fault") == std::string::npos;
  return fits ? text : told("error", text, text);
}

std::vector<std::string> failureLines(const std::string &kernel, c10::Device device,
                                      unsigned others, const PythonStack &stack,
                                      const std::string &words) {
  std::vector<std::string> plain{c10::str("raised by ", kernel, " on ", device, ", queued earlier"),
                                 c10::str(others, " more failed after it")};
  return told("failed_kernel", plain, kernel, device.str(), others, stack, words);
}

std::string memoryText(c10::DeviceIndex device) {
  return told("memory", std::string(), static_cast<int>(device));
}

}  // namespace torch_openreg
