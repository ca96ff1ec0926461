/*
 * Facts about an operator that follow from its schema alone, found once.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "../torch/check.h"

namespace torch_openreg {

/* Whether two operators take the same argument: one of this name and type. */
inline bool isSameArgument(const c10::Argument &a, const c10::Argument &b) {
  return a.name() == b.name() && *a.type() == *b.type();
}

/* How often an operator was run with which strategy, and for how long: on a worker (queued), or
 * while its caller waited. */
struct OpCounters {
  std::atomic<uint64_t> queued{0}, waited{0}, copied{0};
  std::atomic<uint64_t> own{0};  // of the queued ones, those to a kernel of the device's own
  std::atomic<uint64_t> queuedNs{0}, waitedNs{0}, copiedNs{0};
};

struct OpTraits {
  const char *name;  // interned
  OpCounters *counters;
  bool isAten;
  /* Its results are tensors, whose metadata follow from the arguments' metadata. */
  bool predictable;
  /* It writes its first argument, returns that or nothing, and changes no sizes. */
  bool inPlace;
  /* A structured operator, whose meta function in C++ gives the results before it runs. */
  bool inferable;
  /* Indexing: the sizes of its results depend on data if an index is a mask. */
  bool masksDecide = false;
  bool pointwise = false;
  /* In place, and alike on each element of its only tensor: it fails for many elements as for
   * two. */
  bool elementwise = false;
  /* It reads no tensor, and numbers decide the sizes of its output, as for arange. */
  bool numbersCount;
  /* One entry for each argument. */
  c10::SmallVector<bool, 8> isNumber;   // Scalar, Scalar?, Scalar[], float, float?
  c10::SmallVector<bool, 8> isWritten;  // in place, out=
  c10::SmallVector<bool, 8> isOut;      // out=
  c10::SmallVector<bool, 8> isWrittenUnsaid;
  c10::SmallVector<bool, 8> isGenerator;
  bool draws = false;  // one of its arguments is a generator
  bool isForeach = false;
  /* On every device, the call itself reports invalid data. */
  bool checks = false;
  /* The same, if the argument at this position has the value `checksIf`; -1: there is none. */
  int check = -1;
  bool checksIf = true;
  bool alerts = false;       // refuses, or warns, if deterministic algorithms are requested
  bool writesLists = false;  // whose tensors' versions PyTorch does not count
};

const OpTraits &opTraits(const c10::OperatorHandle &op);

/* Whether the call itself reports invalid data. */
inline bool checksData(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  return traits.checks ||
         (traits.check >= 0 &&
          arguments[static_cast<size_t>(traits.check)].toBool() == traits.checksIf);
}

/* As the schema's annotations say. */
inline bool isWritten(const c10::Argument &argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}
/* What PyTorch's kernels write although the schema does not say so: the running statistics of batch
 * norm's old forms, while they train, and a weight that is saturated. */
bool isWrittenUnsaid(const c10::FunctionSchema &schema, const c10::Argument &argument);
inline bool isView(const c10::Argument &result) {
  return result.alias_info() != nullptr && !result.alias_info()->isWrite();
}

/* A foreach operator whose lists are on one device is one task here. Other backends without a
 * kernel for lists run the members one by one. */
bool isForeach(std::string_view name);

/* Visits every operator that was called, with its overload. */
void forEachOperator(const std::function<void(const std::string &, OpCounters &)> &visit);

/* Counts a call, and adds the time from construction to destruction. */
class OpTimer : Uncopyable {
 public:
  OpTimer(std::atomic<uint64_t> &count, std::atomic<uint64_t> &ns);
  ~OpTimer();

 private:
  std::atomic<uint64_t> &ns_;
  const uint64_t start_;
};

/* Whether the operator is structured. A structured operator has a kernel for every backend, which
 * infers the results, allocates them and calls the out= form. The dispatcher finds that kernel
 * before a fallback. kInferringKeys, the key of an unused backend, leads to it. */
bool hasInferringKernel(const c10::OperatorHandle &op);
constexpr c10::DispatchKeySet kInferringKeys(c10::DispatchKey::PrivateUse2);

}  // namespace torch_openreg
