#include "kernel_failures.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <openreg.h>

#include <memory>
#include <stdexcept>
#include <typeinfo>
#include <utility>
#include <vector>

#include "device.h"
#include "texts.h"

namespace torch_openreg {

namespace {

struct Failure {
  std::string name;
  c10::DeviceIndex device;
  std::exception_ptr exception;
  PythonStack stack;
};

thread_local PythonStack nextStack;

void dropFailure(void *failure) { delete static_cast<Failure *>(failure); }

}  // namespace

void setFailureStack(PythonStack stack) { nextStack = std::move(stack); }

void setFailure(std::string name, c10::DeviceIndex device, std::exception_ptr exception) {
  orSetFailureCause(
      new Failure{std::move(name), device, std::move(exception), std::exchange(nextStack, nullptr)},
      dropFailure);
}

void throwFailure() {
  unsigned others = 0;
  const std::unique_ptr<Failure> failure(static_cast<Failure *>(orTakeFailureCause(&others)));
  if (!failure) return;
  orGetLastError();
  const std::vector<std::string> lines =
      failureLines(failure->name, deviceAt(failure->device), others, failure->stack);
  try {
    std::rethrow_exception(failure->exception);
  } catch (c10::DistBackendError &) {
    throw;  // a collective's, which names its origin itself
  } catch (c10::Error &error) {
    for (const std::string &line : lines) error.add_context(line);
    throw;
  } catch (const std::runtime_error &error) {
    if (typeid(error) != typeid(std::runtime_error)) throw;
    // A compiled kernel's.
    throw c10::Error({__func__, __FILE__, __LINE__},
                     error.what() + ("\n  " + c10::Join("\n  ", lines)));
  }
}

}  // namespace torch_openreg
