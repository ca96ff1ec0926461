/*
 * What is known of an operator from its schema alone, looked up once.
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
  std::atomic<uint64_t> queuedNs{0}, waitedNs{0}, copiedNs{0};
};

struct OpTraits {
  const char *name;  // interned
  OpCounters *counters;
  bool isAten;
  /* Its results' metadata follow from its arguments' metadata, and are tensors. */
  bool predictable;
  /* It writes its first argument and returns it, or nothing, and leaves sizes as they are. */
  bool inPlace;
  /* PyTorch can tell its results before it runs (the meta function of a structured operator), in
   * C++. */
  bool inferable;
  /* Indexing: its results' sizes depend on data if an index is a mask. */
  bool masksDecide = false;
  bool pointwise = false;
  /* In place, on each element of its only tensor alike: what it says of two elements it says of
   * all. */
  bool elementwise = false;
  /* Numbers decide the sizes of its output, as of arange: it reads no tensor. */
  bool numbersCount;
  /* By argument. */
  c10::SmallVector<bool, 8> isNumber;   // Scalar, Scalar?, Scalar[], float, float?
  c10::SmallVector<bool, 8> isWritten;  // in place, out=
  c10::SmallVector<bool, 8> isOut;      // of these the latter
  c10::SmallVector<bool, 8> isGenerator;
  bool draws = false;  // one of them is
  bool isForeach = false;
  /* Data are judged at the call, on every device ... */
  bool checks = false;
  /* ... or an argument asks for that with this value; -1: none does. */
  int check = -1;
  bool checksIf = true;
  bool alerts = false;       // refuses, or warns, where deterministic algorithms are asked for
  bool writesLists = false;  // and nobody else counts their tensors' versions
};

const OpTraits &opTraits(const c10::OperatorHandle &op);

/* The caller hears at the call whether the data are good. */
inline bool checksData(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments) {
  return traits.checks ||
         (traits.check >= 0 &&
          arguments[static_cast<size_t>(traits.check)].toBool() == traits.checksIf);
}

/* By the schema's annotations. */
inline bool isWritten(const c10::Argument &argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}
inline bool isView(const c10::Argument &result) {
  return result.alias_info() != nullptr && !result.alias_info()->isWrite();
}

/* What other backends put a list of tensors through one by one, where it is on one device, is one
 * task here. */
bool isForeach(std::string_view name);

/* Visits every operator that was called, with its overload. */
void forEachOperator(const std::function<void(const std::string &, OpCounters &)> &visit);

/* Adds the time from its making to its end. */
class OpTimer : Uncopyable {
 public:
  OpTimer(std::atomic<uint64_t> &count, std::atomic<uint64_t> &ns);
  ~OpTimer();

 private:
  std::atomic<uint64_t> &ns_;
  const uint64_t start_;
};

/* A structured operator has a kernel for every backend that infers the results, makes them, and
 * calls its out= form. It stands before a fallback, and is reached through a backend that nobody
 * uses. */
bool hasInferringKernel(const c10::OperatorHandle &op);
constexpr c10::DispatchKeySet kInferringKeys(c10::DispatchKey::PrivateUse2);

}  // namespace torch_openreg
