/*
 * Warnings of kernels, and calls that synchronise. A worker cannot issue a warning, because that
 * takes the GIL. It is kept until a thread has waited for the device anyway.
 */
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "check.h"
#include "sanitizer.h"

namespace torch_openreg {

/* Callable on any thread. At most a hundred are kept. */
void keepWarnings(std::vector<c10::Warning> &warnings);

/* Issues a UserWarning at once through Python's `warnings`; throws as below. Not on a worker. */
void issueWarning(const std::string &text);

/* Issues the kept warnings through Python's `warnings`. A warning that a filter turns into an
 * exception is thrown, or printed if another error is about to be thrown. */
void issueKeptWarnings(bool besideError = false);

/* Drops the calling thread's warnings until the end of the scope. */
class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning &) override {}

 private:
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
};

/* For calls of the core that synchronise. A kernel's failure is thrown even if a warning raises. */
void checkSynchronized(orError_t error, c10::SourceLocation location);

}  // namespace torch_openreg

#define OPENREG_CHECK_SYNCHRONIZED(call) \
  ::torch_openreg::checkSynchronized((call), {__func__, __FILE__, static_cast<uint32_t>(__LINE__)})
