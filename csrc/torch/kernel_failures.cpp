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

/* What CUDA's error says where a kernel fails like this: a kernel that refuses a value fails an
 * assertion. The call checks everything else, so exceptions of other types are not a card's. */
const char *wordsOfCuda(const std::exception_ptr &exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception &error) {
    const std::type_info &type = typeid(error);
    if (type == typeid(StrayPointer)) return "an illegal memory access was encountered";
    for (const std::type_info *refusal : {&typeid(c10::Error), &typeid(c10::IndexError),
                                          &typeid(c10::ValueError), &typeid(std::runtime_error)}) {
      if (type == *refusal) return "device-side assert triggered";
    }
  } catch (...) {
  }
  return "";
}

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
      failureLines(failure->name, deviceAt(failure->device), others, failure->stack,
                   wordsOfCuda(failure->exception));
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
