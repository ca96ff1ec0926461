/*
 * Derives an operator's accesses from its schema, and watches the host's operators on pinned
 * memory.
 *
 * Effects are what a schema says about accesses. They are kept for PyTorch's own operators, whose
 * schemas are never removed, and computed at each call for others. `watchMutex` guards `watching`,
 * the callback's handle.
 */
// PyTorch is compiled with NDEBUG; without it at::RecordFunction has another layout.
#ifndef NDEBUG
#define NDEBUG
#endif

#include "operator_accesses.h"

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "../torch/fork.h"
#include "../torch/host_allocator.h"
#include "../torch/sanitizer.h"
#include "../task/arguments.h"
#include "../task/tensor_accesses.h"
#include "../task/tensor_components.h"
#include "index_accesses.h"
#include "op_traits.h"

namespace torch_openreg {

namespace {

using at::Tensor;
using c10::Argument;
using c10::DispatchKey;
using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;

using Accesses = c10::SmallVector<orMemoryAccess, 16>;

struct Report {
  Accesses device, host;
  LateAccess *late = nullptr;  // of the task; null: the task does not read its indices
  bool captures = false;

  void add(const Tensor &tensor, bool write) {
    if (!tensor.defined()) return;
    if (!isPlain(tensor)) {
      for (const Tensor &part : componentsOf(tensor)) add(part, write);
    } else if (hasMemory(tensor)) {
      if (tensor.is_privateuseone()) {
        device.push_back(accessOf(tensor, write));
      } else if (tensor.is_cpu() && isPinned(tensor.storage().data())) {
        host.push_back(accessOf(tensor, write));
      }
    }
  }

  /* Adds rows of a device tensor, or if they are not known a partial access to the whole tensor. */
  void addRows(const Tensor &tensor, bool write, const Rows &rows) {
    const size_t first = device.size();
    uint32_t partial = OR_ACCESS_PARTIAL;
    if (late != nullptr && *late) partial |= OR_ACCESS_LATE;
    if (!rows.known) {
      add(tensor, write);
    } else {
      for (const auto &run : rows.runs) {
        device.push_back(accessOfRows(tensor, rows.dim, run, write));
      }
    }
    for (size_t i = first; i < device.size() && !(rows.known && rows.exact); ++i) {
      device[i].write |= partial;
    }
  }

  /* Numbers in host memory are read during the call, by the calling thread. */
  void send(orStream_t stream, const char *operation) const {
    if (!host.empty()) {
      OPENREG_CHECK(orSanitizerAccess(0, operation, host.data(), host.size()));
    }
    if (!device.empty()) {
      OPENREG_CHECK(orSanitizerAccessLate(stream, operation, device.data(), device.size(),
                                          late == nullptr ? nullptr : late->get()));
    }
  }
};

// ---- Operators ----------------------------------------------------------------------------------

struct Effects {
  std::string name;
  std::string schema;
  bool none = false;  // touches no memory: a view, or new metadata
  bool takesIndices = false, takesThemInPlace = false;
  bool readsSelf = true, isConvolutionBackward = false;
  std::optional<size_t> beta;
  bool readsWritten = false;  // it reads the old values of what it writes
  bool ofCpuItself = false;   // the CPU's kernel is not made of other operators
  std::vector<bool> written;
  std::vector<size_t> writtenInTraining;
  std::optional<size_t> training;
};

bool isAten(const OperatorHandle &op) { return op.schema().name().starts_with("aten::"); }

/* The only operator that Tensor.tolist calls. Tensor.numpy, which reads nothing, also calls it,
 * with an alias that has no Python object. */
constexpr std::string_view kReadsByHand = "aten::resolve_conj";
/* A composite operator that accesses memory itself. */
constexpr std::string_view kCopy = "aten::copy_";

Effects findEffects(const OperatorHandle &op) {
  const FunctionSchema &schema = op.schema();
  const std::string &name = schema.name();
  const auto &returns = schema.returns();
  Effects effects;
  effects.name = c10::toString(op.operator_name());
  effects.schema = name;
  effects.takesIndices = takesIndices(name);
  // These act in place if their `out` is their input. Otherwise they touch all of both.
  static const std::set<std::string_view> scatters{"aten::index_copy",   "aten::index_add",
                                                   "aten::index_reduce", "aten::scatter",
                                                   "aten::scatter_add",  "aten::scatter_reduce"};
  effects.takesThemInPlace = scatters.count(name) != 0;
  effects.isConvolutionBackward = effects.name == "aten::convolution_backward";
  effects.readsSelf = effects.name != "aten::bernoulli.p";  // reads the shape alone
  effects.readsWritten = op.hasTag(at::Tag::pointwise) && name.ends_with('_');
  const bool views = std::any_of(returns.begin(), returns.end(), isView) && name != kReadsByHand;
  effects.none =
      views || op.hasTag(at::Tag::inplace_view) || name == "aten::set_" || name == "aten::resize_";
  effects.ofCpuItself = !isAten(op) || name == kCopy || name == kReadsByHand ||
                        op.hasKernelForDispatchKey(DispatchKey::CPU);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const Argument &argument = schema.arguments()[i];
    const bool written = isWritten(argument);
    effects.written.push_back(written);
    if (argument.name() == "beta" && name.find("add") != std::string::npos) effects.beta = i;
    if (argument.name() == "training" || argument.name() == "train") effects.training = i;
    if (isWrittenUnsaid(schema, argument)) effects.writtenInTraining.push_back(i);
  }
  return effects;
}

std::shared_ptr<const Effects> effectsOf(const OperatorHandle &op) {
  if (!isAten(op)) return std::make_shared<const Effects>(findEffects(op));
  thread_local ska::flat_hash_map<const FunctionSchema *, std::shared_ptr<const Effects>> known;
  auto &entry = known[&op.schema()];
  if (entry == nullptr) entry = std::make_shared<const Effects>(findEffects(op));
  return entry;
}

bool isOurs(const IValue &value) {
  return value.isTensor() && value.toTensor().is_privateuseone() && isPlain(value.toTensor()) &&
         hasMemory(value.toTensor());
}

bool isOutItself(const Effects &effects, c10::ArrayRef<IValue> arguments) {
  const Tensor &self = arguments[0].toTensor();
  for (size_t i = 1; i < std::min(arguments.size(), effects.written.size()); ++i) {
    if (effects.written[i] && isOurs(arguments[i])) {
      const Tensor &out = arguments[i].toTensor();
      return out.storage().data() == self.storage().data() &&
             out.storage_offset() == self.storage_offset() && out.sizes() == self.sizes();
    }
  }
  return false;
}

/* The rows of the first argument that indices select, and whether the operator writes them. */
std::optional<std::pair<Rows, bool>> rowsTouched(const Effects &effects,
                                                 c10::ArrayRef<IValue> arguments) {
  if (C10_LIKELY(!effects.takesIndices) || !isOurs(arguments[0])) return std::nullopt;
  if (effects.takesThemInPlace && !isOutItself(effects, arguments)) return std::nullopt;
  return std::make_pair(rowsOf(effects.schema, arguments),
                        effects.takesThemInPlace || effects.written[0]);
}

/* Makes the task's late access, where the rows are not known at the call. In a capture they never
 * are, as each replay has its own. Indices that the host has decide it at once. */
void beginLate(LateAccess &late, const Effects &effects, c10::ArrayRef<IValue> arguments,
               Rows &rows, bool captures) {
  if (captures) rows.known = false;
  if ((rows.known && rows.exact) || !canResolve(effects.schema, arguments)) return;
  late.begin(firstByte(arguments[0].toTensor()));
  if (late && !captures) late.resolve(effects.schema, arguments);
}

/* Whether argument `i` is read. It is not if its factor is 0, or if only a gradient that is not
 * requested would need it. */
bool isRead(const Effects &effects, c10::ArrayRef<IValue> arguments, size_t i) {
  if (i == 0 && effects.beta && *effects.beta < arguments.size()) {
    const IValue &beta = arguments[*effects.beta];
    return !beta.isScalar() || !beta.toScalar().equal(0);
  }
  if (effects.isConvolutionBackward && (i == 1 || i == 2) && arguments.back().isBoolList()) {
    // The weight's gradient needs the input, and the input's gradient the weight.
    return arguments.back().toBoolList().get(2 - i);
  }
  return i != 0 || effects.readsSelf;
}

void addArguments(Report &report, const Effects &effects, c10::ArrayRef<IValue> arguments) {
  const bool trains = !effects.training.has_value() || (*effects.training < arguments.size() &&
                                                        arguments[*effects.training].isBool() &&
                                                        arguments[*effects.training].toBool());
  const auto &running = effects.writtenInTraining;
  auto rows = rowsTouched(effects, arguments);
  if (rows && report.late != nullptr) {
    beginLate(*report.late, effects, arguments, rows->first, report.captures);
  }
  for (size_t i = 0; i < std::min(arguments.size(), effects.written.size()); ++i) {
    if (rows && i == 0) {
      report.addRows(arguments[0].toTensor(), rows->second, rows->first);
      continue;
    }
    if (rows && effects.takesThemInPlace && effects.written[i]) continue;  // the same
    if (!effects.written[i] && !isRead(effects, arguments, i)) continue;
    const bool write = effects.written[i] ||
                       (trains && std::find(running.begin(), running.end(), i) != running.end());
    const bool reads = write && effects.readsWritten && checksFresh.load(std::memory_order_relaxed);
    eachTensor(arguments[i], [&](const Tensor &tensor) {
      if (reads) report.add(tensor, false);
      report.add(tensor, write);
    });
  }
}

template <typename F>
void eachWritten(const Effects &effects, c10::ArrayRef<IValue> arguments, F visit) {
  for (size_t i = 0; i < std::min(arguments.size(), effects.written.size()); ++i) {
    if (effects.written[i]) eachTensor(arguments[i], visit);
  }
}

/* The tensor's memory; null if it has none. */
const void *memoryOf(const Tensor &tensor) {
  return isPlain(tensor) && hasMemory(tensor) ? tensor.storage().data() : nullptr;
}

bool sharesMemory(const Tensor &result, c10::ArrayRef<IValue> arguments) {
  return anyTensor(arguments, [&](const Tensor &tensor) {
    return tensor.defined() && tensor.has_storage() && result.has_storage() &&
           tensor.storage().data() == result.storage().data();
  });
}

/* A result that shares memory with an argument was reported with it. */
void addResults(Report &report, c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) {
  for (const IValue &value : results) {
    eachTensor(value, [&](const Tensor &result) {
      if (result.defined() && !sharesMemory(result, arguments)) report.add(result, true);
    });
  }
}

thread_local const OperatorHandle *caller = nullptr;

/* Sends the report under the name of the outermost operator. */
void sendNamed(const Report &report, orStream_t stream, const Effects &effects) {
  report.send(stream, (caller == nullptr ? effects : *effectsOf(*caller)).name.c_str());
}

// ---- The host -----------------------------------------------------------------------------------

/* Whether the inputs include pinned memory and no device tensor. With a device tensor, the queued
 * task reports all accesses. */
bool touchesPinned(c10::ArrayRef<const IValue> inputs) {
  bool pinned = false, ours = false;
  for (const IValue &value : inputs) {
    eachTensor(value, [&](const Tensor &tensor) {
      if (!tensor.defined()) return;
      ours |= tensor.is_privateuseone();
      if (!pinned && !ours && tensor.is_cpu() && isPlain(tensor) && hasMemory(tensor)) {
        pinned = isPinned(tensor.storage().data());
      }
    });
  }
  return pinned && !ours;
}

bool isPythons(const Tensor &tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr;
}

std::unique_ptr<at::ObserverContext> onOperator(const at::RecordFunction &function) {
  if (inKernel() || !sanitizerActive()) return nullptr;
  const auto inputs = function.inputs();
  if (C10_LIKELY(!touchesPinned(inputs))) return nullptr;
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op) return nullptr;
  const auto effects = effectsOf(*op);
  if (effects->none || !effects->ofCpuItself) return nullptr;
  if (name->name == kReadsByHand && !isPythons(inputs[0].toTensor())) return nullptr;
  Report report;
  addArguments(report, *effects, c10::ArrayRef<IValue>(inputs.data(), inputs.size()));
  report.send(0, effects->name.c_str());
  raiseRacesOfHost();
  return nullptr;
}

std::mutex watchMutex;
std::optional<at::CallbackHandle> watching;

void watch(bool on) {
  std::lock_guard<std::mutex> lock(watchMutex);
  if (on == watching.has_value()) return;
  if (on) {
    watching = at::addGlobalCallback(at::RecordFunctionCallback(&onOperator)
                                         .needsInputs(true)
                                         .scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(*watching);
    watching.reset();
  }
}

[[maybe_unused]] const bool registered = (watchHost = &watch, true);

}  // namespace

namespace {

void sendAll(Report report, const OperatorHandle &op, orStream_t stream,
             c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) {
  const auto effects = effectsOf(op);
  if (effects->none) return;
  addArguments(report, *effects, arguments);
  addResults(report, arguments, results);
  raiseRaces();  // races of earlier calls; then this one is neither made nor reported
  sendNamed(report, stream, *effects);
  raiseRaces();
}

}  // namespace

void reportOperator(const OperatorHandle &op, orStream_t stream, c10::ArrayRef<IValue> arguments,
                    c10::ArrayRef<IValue> results) {
  sendAll({}, op, stream, arguments, results);
}

void reportTask(const OperatorHandle &op, orStream_t stream, c10::ArrayRef<IValue> arguments,
                c10::ArrayRef<IValue> results, LateAccess &late, bool captures) {
  Report report;
  report.late = &late;
  report.captures = captures;
  sendAll(std::move(report), op, stream, arguments, results);
}

OperatorReport::OperatorReport(const OperatorHandle &op, orStream_t stream,
                               c10::ArrayRef<IValue> arguments, LateAccess &late)
    : op_(op), stream_(stream), arguments_(arguments.begin(), arguments.end()) {
  reportTask(op, stream, arguments, {}, late, /*captures=*/false);
  eachWritten(*effectsOf(op), arguments_,
              [&](const Tensor &tensor) { before_.push_back(memoryOf(tensor)); });
}

void OperatorReport::reportResults(c10::ArrayRef<IValue> results) const {
  const auto effects = effectsOf(op_);
  if (effects->none) return;
  Report report;
  // Outputs that got their memory in the call.
  auto before = before_.begin();
  eachWritten(*effects, arguments_, [&](const Tensor &tensor) {
    if (memoryOf(tensor) != *before++) report.add(tensor, true);
  });
  addResults(report, arguments_, results);
  sendNamed(report, stream_, *effects);
  raiseRaces();
}

ReportedAs::ReportedAs(const OperatorHandle &op) : before_(caller) {
  if (caller == nullptr) caller = &op;
}

ReportedAs::~ReportedAs() { caller = before_; }

}  // namespace torch_openreg
