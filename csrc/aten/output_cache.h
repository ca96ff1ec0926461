/*
 * A cache of results' metadata, by the key of a call (call_key.h).
 *
 * Sizes, strides and dtypes of results follow from the arguments' metadata for every operator that
 * is not tagged as depending on data.
 */
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <vector>

#include "../task/arguments.h"
#include "../task/tensor_metadata.h"
#include "call_key.h"
#include "op_traits.h"

namespace torch_openreg {

struct ResultSpec {
  int argument = -1;  // the position of the caller's own tensor (in place, out=); -1: fresh tensors
  bool isList = false;
  std::vector<KeptMetadata> fresh;  // one, or those of a list; undefined ones have no dtype
};

/* An output (out=) that gets its size from the call. */
struct Resize {
  size_t argument;
  KeptMetadata metadata;
};

/* Whether a kernel computes with integers in the default dtype. Empty: it does not. Otherwise one
 * element for the call, or one for each member of a foreach operator's lists, because each member
 * is computed separately. */
using InDefaultDtype = c10::SmallVector<bool, 8>;

struct OutputSpec {
  bool usable = false;  // false: results share memory or are views, and cannot be promised
  InDefaultDtype inDefaultDtype;
  std::vector<ResultSpec> results;
  std::vector<Resize> resizes;
  /* The kernel's warnings about resizes, if known. Some kernels resize outputs without a warning,
   * or with one of their own. */
  std::optional<std::vector<c10::Warning>> resizeWarnings;
};

/* The metadata of the tensors among the arguments. Taken before the call. */
std::vector<KeptMetadata> keptMetadata(c10::ArrayRef<c10::IValue> arguments);

/* Describes the results of later calls with the same key, from a finished call. Not usable unless
 * each result is a written argument or has fresh memory of its own. */
std::shared_ptr<OutputSpec> describeOutputs(const OpTraits &traits,
                                            c10::ArrayRef<c10::IValue> arguments,
                                            const std::vector<KeptMetadata> &before,
                                            c10::ArrayRef<c10::IValue> results);

/* Where the call makes floats from integers, or compares integers with a floating-point number. */
InDefaultDtype inDefaultDtype(const OpTraits &traits, c10::ArrayRef<c10::IValue> arguments,
                              c10::ArrayRef<c10::IValue> results);

/* Promises the tensors that are written, as they are, and nothing else. */
std::shared_ptr<OutputSpec> writtenOutputs(const OpTraits &traits);

/* Thread-safe and bounded. Null: never seen. */
std::shared_ptr<const OutputSpec> findOutputs(const CallKey &key);
void cacheOutputs(const CallKey &key, std::shared_ptr<const OutputSpec> spec);

}  // namespace torch_openreg
