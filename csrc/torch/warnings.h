/*
 * What kernels warn of, and calls that synchronise: a lane cannot issue a warning, because that takes the
 * GIL. It is kept until a thread has waited for the device anyway.
 */
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "check.h"
#include "sanitizer.h"

namespace torch_openreg {

/* Any thread. Beyond a hundred nothing is kept. */
void keepWarnings(std::vector<c10::Warning> &warnings);

/* At once, as a UserWarning, through Python's `warnings`; throws as below. Not on a lane. */
void issueWarning(const std::string &text);

/* Issues what is kept, through Python's `warnings`. A warning that a filter turns into an exception is thrown. */
void issueKeptWarnings();

}  // namespace torch_openreg

/* For calls of the core that synchronise. A kernel's failure comes before warnings, which then stay. */
#define OPENREG_CHECK_SYNCHRONIZED(call)                                   \
  do {                                                                     \
    OPENREG_CHECK(call);                                                   \
    ::torch_openreg::issueKeptWarnings();                                  \
    if (::torch_openreg::sanitizerActive()) ::torch_openreg::raiseRaces(); \
  } while (false)
