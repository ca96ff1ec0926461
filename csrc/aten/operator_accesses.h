/*
 * Reports what operators read and write to the sanitizer, before they are queued. Called only while
 * it is active.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <openreg_sanitizer.h>

#include <vector>

#include "../torch/check.h"
#include "index_accesses.h"

namespace torch_openreg {

/* Reports an operator's accesses, which follow from its schema's annotations: a view touches no
 * memory. Of `results`, those with memory of their own are written. Throws what raiseRaces
 * throws. */
void reportOperator(const c10::OperatorHandle &op, orStream_t stream,
                    c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results);

/* The same for a task that resolves `late` when it runs, which is made here if indices decide what
 * the task touches. */
void reportTask(const c10::OperatorHandle &op, orStream_t stream,
                c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results,
                LateAccess &late, bool captures);

/* The same for an operator whose results exist only after it has run: the constructor reports the
 * arguments, with `late` as reportTask does, and reportResults the rest. */
class OperatorReport {
 public:
  OperatorReport(const c10::OperatorHandle &op, orStream_t stream,
                 c10::ArrayRef<c10::IValue> arguments, LateAccess &late);
  void reportResults(c10::ArrayRef<c10::IValue> results) const;

 private:
  const c10::OperatorHandle &op_;
  orStream_t stream_;
  std::vector<c10::IValue> arguments_;
  std::vector<const void *> before_;  // the memory of the written arguments
};

/* Reports the operators that are queued inside under the name of this one, which is composed of
 * them. */
class ReportedAs : Uncopyable {
 public:
  explicit ReportedAs(const c10::OperatorHandle &op);
  ~ReportedAs();

 private:
  const c10::OperatorHandle *const before_;
};

}  // namespace torch_openreg
