#include "kernel_failures.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <openreg.h>

#include <memory>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "device.h"

namespace torch_openreg {

namespace {

struct Failure {
  std::string name;
  c10::DeviceIndex device;
  std::exception_ptr exception;
};

void dropFailure(void *failure) { delete static_cast<Failure *>(failure); }

}  // namespace

void setFailure(std::string name, c10::DeviceIndex device, std::exception_ptr exception) {
  orSetFailureCause(new Failure{std::move(name), device, std::move(exception)}, dropFailure);
}

void throwFailure() {
  unsigned others = 0;
  const std::unique_ptr<Failure> failure(static_cast<Failure *>(orTakeFailureCause(&others)));
  if (!failure) return;
  orGetLastError();
  std::string context =
      c10::str("raised by ", failure->name, " on ", deviceAt(failure->device), ", queued earlier");
  if (others != 0) context += c10::str(" (and ", others, " more failed after it)");
  try {
    std::rethrow_exception(failure->exception);
  } catch (c10::DistBackendError &) {
    throw;  // a collective's, which names its origin itself
  } catch (c10::Error &error) {
    error.add_context(context);
    throw;
  } catch (const std::runtime_error &error) {
    if (typeid(error) != typeid(std::runtime_error)) throw;
    // A compiled kernel's.
    throw c10::Error({__func__, __FILE__, __LINE__}, error.what() + (" (" + context + ")"));
  }
}

}  // namespace torch_openreg
