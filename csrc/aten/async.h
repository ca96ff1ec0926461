/*
 * An operator as a task that nobody waits for.
 */
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include <openreg.h>

#include <memory>

#include "memo.h"
#include "opinfo.h"

namespace torch_openreg {

/* Queues the CPU kernel of `op`, whose arguments on the stack `key` describes (and goes on to, where outputs get
 * a size), on `stream` and puts the results that `memo` promises on the stack, in place of the
 * arguments. A kernel that fails, or makes something else than was promised, is the device's error, raised with
 * its type at the next call that synchronises. */
void enqueueCpuKernel(const c10::OperatorHandle &op, const OpInfo &info, MemoKey &key,
                      std::shared_ptr<const Memo> memo, c10::Device device, orStream_t stream,
                      torch::jit::Stack *stack);

}  // namespace torch_openreg
