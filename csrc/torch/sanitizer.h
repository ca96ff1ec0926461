/*
 * The shim's side of the sanitizer (openreg_sanitizer.h). csrc/aten/operator_accesses.h reports
 * reads and writes; findings become an exception or a warning here, with Python's stacks.
 *
 * While it is off, the cost is relaxed loads of one word of the core.
 */
#pragma once

#include <c10/macros/Macros.h>

#include <openreg_sanitizer.h>

#include <atomic>
#include <memory>

#include "check.h"

namespace torch_openreg {

inline const uint32_t *const sanitizerWord = orSanitizerActive();

inline bool sanitizerActive() {
  return C10_UNLIKELY(__atomic_load_n(sanitizerWord, __ATOMIC_RELAXED) != 0);
}

/* Whether reads of uninitialized memory are reported, and whether possible conflicts are: those
 * whose accesses may not share bytes. */
inline std::atomic<bool> checksFresh{false}, tellsPossible{true};
/* Whether it keeps the stacks of accesses. */
inline std::atomic<bool> keepsStacks{true};

/* Throws DataRaceError, or warns, if the core has found a conflict in a call of this thread. */
void raiseRaces();

/* The same for an operator of the host, where throwing is impossible: the error is raised as the
 * operator returns to Python, or else by this thread's next raiseRaces. */
void raiseRacesOfHost();

/* A stack that reports may show; null: none. */
using SanitizerStack = std::shared_ptr<const void>;
SanitizerStack captureStack();
/* Reports a graph's memory (orSanitizerFinding), whose `size` and `stack` are set here. */
void reportFinding(orGraphFinding finding, const SanitizerStack &earlier);

/* Copies and fills that this thread queues inside the scope are reported under the operator's name,
 * which outlives the process. */
class SanitizedAs : Uncopyable {
 public:
  explicit SanitizedAs(const char *operation) : active_(sanitizerActive()) {
    if (active_) before_ = orSanitizerOperation(operation);
  }
  ~SanitizedAs() {
    if (active_) orSanitizerOperation(before_);
  }

 private:
  const bool active_;
  const char *before_ = nullptr;
};

/* Waits, queries and frees of this thread inside the scope are the backend's own: they order
 * nothing for the program, and are not judged. */
class OwnWait : Uncopyable {
 public:
  OwnWait() : before_(orSanitizerIgnore(1)) {}
  ~OwnWait() { orSanitizerIgnore(before_); }

 private:
  const uint32_t before_;
};

/* Whether CPU operators report what they do to pinned memory. */
inline void (*watchHost)(bool on) = nullptr;  // set by csrc/aten as it is loaded

}  // namespace torch_openreg
