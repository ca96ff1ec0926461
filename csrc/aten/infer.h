/*
 * Results of operators that have no meta function and were never seen with these shapes.
 *
 * For a pointwise operator or a reduction (tags of PyTorch) sizes follow from a rule; dtypes do not, and are
 * remembered from the first call with like types, which also has to confirm the rule. A guess at strides may
 * be wrong: the result is then copied to where it was promised.
 */
#pragma once

#include <ATen/core/stack.h>

#include <memory>

#include "memo.h"
#include "opinfo.h"

namespace torch_openreg {

/* The memo for a call with new shapes, or null: it has to be waited for. */
std::shared_ptr<const Memo> inferByRule(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments);

/* False: the CPU's kernel may give its result other strides than the meta function, as it casts first. */
bool metaKnowsStrides(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments);

/* Promises the tensors that are written, as they are, and nothing else. */
std::shared_ptr<Memo> memoOfOutputs(const OpInfo &info);

/* Keeps what a finished call tells of its types, if the rule held for it. */
void learnTypes(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments, const Memo &memo);

/* False: the arguments of an operator in place do not fit, and its kernel will say how. */
bool fitsInPlace(const OpInfo &info, c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_openreg
