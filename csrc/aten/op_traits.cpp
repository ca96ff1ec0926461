/*
 * Entries are made once for each definition of an operator and never destroyed, as tasks, errors
 * and the table of outputs refer to them. A thread keeps a table of its own in front, so that the
 * lock is taken once for each operator and thread.
 */
#include "op_traits.h"

#include <ATen/core/enum_tag.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "../torch/fork.h"

namespace torch_openreg {

namespace {

using c10::Argument;
using c10::DispatchKey;
using c10::FunctionSchema;
using c10::TypeKind;

/* Results whose sizes depend on values although no tag says so. */
constexpr std::string_view kUntagged[] = {"aten::linalg_lstsq",
                                          "aten::linalg_lstsq_out",
                                          "aten::_ctc_loss",
                                          "aten::_pack_padded_sequence",
                                          "aten::_padded_dense_to_jagged_forward",
                                          "aten::_rowwise_prune"};

/* Those of the CPU's kernels that have no deterministic form. */
constexpr std::string_view kAlerts[] = {"aten::put_", "aten::max_unpool2d", "aten::max_unpool3d"};

bool isAmong(std::string_view name, c10::ArrayRef<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/* Traces and errors may name an operator after its library is gone. */
const char *interned(const std::string &name) {
  static auto *names = new std::unordered_set<std::string>();
  static auto *mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  return names->insert(name).first->c_str();
}

struct AllCounters {
  std::mutex mutex;
  std::map<std::string, OpCounters> byName;  // nodes stay where they are
};

AllCounters &allCounters() { return leaked<AllCounters>(); }

OpCounters *countersOf(const c10::OperatorName &name) {
  AllCounters &all = allCounters();
  std::lock_guard<std::mutex> lock(all.mutex);
  return &all.byName[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name];
}

uint64_t now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

bool isKind(const c10::Type &type, TypeKind kind) {
  if (type.kind() == kind) return true;
  if (type.kind() != TypeKind::OptionalType && type.kind() != TypeKind::ListType) return false;
  const auto inner = type.containedTypes();
  return !inner.empty() && isKind(*inner[0], kind);
}

/* Lists of floats are bounds (histogram), which kernels compare with each other. */
bool isNumber(const c10::Type &type) {
  return isKind(type, TypeKind::NumberType) ||
         (isKind(type, TypeKind::FloatType) && !isKind(type, TypeKind::ListType));
}

/* Of a norm: some kernels take but a few, by their value. */
bool isDegree(const Argument &argument) {
  return argument.name() == "p" && isKind(*argument.real_type(), TypeKind::NumberType);
}

bool isIndexing(const c10::OperatorHandle &op) {
  return op.schema().name() == "aten::index" || op.schema().name() == "aten::_unsafe_index";
}

bool isPredictable(const c10::OperatorHandle &op) {
  const FunctionSchema &schema = op.schema();
  if (isAmong(schema.name(), kUntagged) || schema.name().starts_with("aten::_to_sparse"))
    return false;
  if (isIndexing(op)) return true;
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
      op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const Argument &result) {
    return !isView(result) && isKind(*result.real_type(), TypeKind::TensorType);
  });
}

/* Its out= form resizes its output twice, and warns of it, or sets the conj bit of its output, or
 * leaves part of an output with other strides as it was; or its meta function gives another size
 * than its kernel, or other strides; or its kernel refuses sizes that the meta function takes; or a
 * composite kernel is registered in that place, which has other strides and errors than the CPU's.
 * Names, with an overload or without. */
constexpr std::string_view kInfersBadly[] = {"aten::mse_loss",
                                             "aten::smooth_l1_loss",
                                             "aten::linalg_lu_solve",
                                             "aten::_linalg_solve_ex",
                                             "aten::narrow_copy",
                                             "aten::pixel_shuffle",
                                             "aten::pixel_unshuffle",
                                             "aten::tril_",
                                             "aten::triu_",
                                             "aten::isin.Scalar_Tensor",
                                             "aten::replication_pad2d",
                                             "aten::replication_pad3d",
                                             "aten::reflection_pad3d",
                                             "aten::fractional_max_pool2d"};

bool isOut(const Argument &argument) { return argument.is_out(); }

bool isInferable(const c10::OperatorHandle &op) {
  const std::string full = c10::toString(op.operator_name());
  if (isAmong(op.schema().name(), kInfersBadly) || isAmong(full, kInfersBadly)) return false;
  const auto &arguments = op.schema().arguments();
  return hasInferringKernel(op) && std::none_of(arguments.begin(), arguments.end(), isOut);
}

/* In place by name: the result may be larger, or is refused for its size, which is better told at
 * the call. */
constexpr std::string_view kSizesItself[] = {"aten::addbmm_", "aten::addr_"};

bool isInPlace(const c10::OperatorHandle &op) {
  const FunctionSchema &schema = op.schema();
  if (op.hasTag(at::Tag::inplace_view) || schema.arguments().empty()) return false;
  if (isAmong(schema.name(), kSizesItself)) return false;
  const Argument &self = schema.arguments()[0];
  const bool returnsSelf =
      schema.returns().empty() || (schema.returns().size() == 1 && isWritten(schema.returns()[0]));
  return isWritten(self) && !self.is_out() && returnsSelf && schema.name().back() == '_' &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), isOut);
}

/* Operators in place do not always carry the tags of the operator that they are a form of. */
bool isTaggedPointwise(const c10::OperatorHandle &op) {
  if (op.hasTag(at::Tag::pointwise)) return true;
  c10::OperatorName name = op.operator_name();
  if (name.name.back() != '_') return false;
  name.name.pop_back();
  const auto functional = c10::Dispatcher::singleton().findOp(name);
  return functional.has_value() && functional->hasTag(at::Tag::pointwise);
}

/* Decompositions that may not converge: CUDA's synchronise and raise, too. */
constexpr std::string_view kChecks[] = {"aten::linalg_eig", "aten::_linalg_eigvals",
                                        "aten::linalg_eigvals", "aten::_linalg_eigh",
                                        "aten::_linalg_svd"};

/* CUDA synchronises for these, too. */
bool isStandardDeviation(const FunctionSchema &schema, const Argument &argument) {
  return schema.name() == "aten::normal" && argument.name() == "std" &&
         isKind(*argument.real_type(), TypeKind::TensorType);
}

/* With unsafe=false lengths are checked. */
bool asksForCheck(const FunctionSchema &schema, const Argument &argument) {
  return argument.name() == "check_errors" ||
         (argument.name() == "unsafe" && schema.name() == "aten::segment_reduce");
}

OpTraits *makeTraits(const c10::OperatorHandle &op) {
  const FunctionSchema &schema = op.schema();
  auto *traits = new OpTraits();
  traits->name = interned(schema.name());
  traits->counters = countersOf(op.operator_name());
  traits->isAten = schema.name().compare(0, 6, "aten::") == 0;
  traits->predictable = traits->isAten && isPredictable(op);
  traits->inPlace = traits->predictable && isInPlace(op);
  traits->inferable = traits->predictable && isInferable(op);
  traits->masksDecide = isIndexing(op);
  traits->isForeach = isForeach(schema.name());
  traits->alerts = isAmong(schema.name(), kAlerts);
  traits->checks = isAmong(schema.name(), kChecks);
  traits->pointwise = traits->predictable && isTaggedPointwise(op);
  bool reads = false, hasOut = false;
  int tensors = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const Argument &argument = schema.arguments()[i];
    const bool written = isWritten(argument);
    traits->isNumber.push_back(isNumber(*argument.real_type()) && !isDegree(argument));
    traits->isWritten.push_back(written);
    traits->isOut.push_back(argument.is_out());
    traits->isGenerator.push_back(isKind(*argument.real_type(), TypeKind::GeneratorType));
    traits->draws |= traits->isGenerator.back();
    traits->writesLists |=
        traits->isForeach && written && argument.real_type()->kind() == TypeKind::ListType;
    tensors += isKind(*argument.real_type(), TypeKind::TensorType);
    if (argument.is_out()) hasOut = true;
    traits->checks |= isStandardDeviation(schema, argument);
    if (asksForCheck(schema, argument)) {
      traits->check = static_cast<int>(i);
      traits->checksIf = argument.name() != "unsafe";
    }
    if (!written && isKind(*argument.real_type(), TypeKind::TensorType)) reads = true;
  }
  // A composite would ask its own operators for a generator, where the kernel's is the CPU's by
  // then.
  traits->inferable &= !traits->draws;
  traits->numbersCount = hasOut && !reads;
  // These are not tagged.
  const bool fills = schema.name() == "aten::zero_" || schema.name() == "aten::fill_";
  traits->elementwise = traits->inPlace && tensors == 1 && !traits->isForeach &&
                        (traits->pointwise || traits->draws || fills);
  return traits;
}

using TraitsBySchema = ska::flat_hash_map<const FunctionSchema *, const OpTraits *>;

struct AllTraits {
  std::mutex mutex;
  TraitsBySchema traits;
  std::atomic<uint64_t> removals{0};
};

AllTraits &allTraits() { return leaked<AllTraits>(); }

/* A library may go, with its operators, and the addresses of their schemas come back for others. */
class Removals final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle &) override {}
  void onOperatorDeregistered(const c10::OperatorHandle &op) override {
    AllTraits &all = allTraits();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.traits.erase(&op.schema()) != 0) all.removals.fetch_add(1, std::memory_order_release);
  }
};

[[maybe_unused]] const bool listens =
    (new c10::RegistrationHandleRAII(
         c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Removals>())),
     true);

}  // namespace

void forEachOperator(const std::function<void(const std::string &, OpCounters &)> &visit) {
  AllCounters &all = allCounters();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto &[name, counters] : all.byName) visit(name, counters);
}

OpTimer::OpTimer(std::atomic<uint64_t> &count, std::atomic<uint64_t> &ns) : ns_(ns), start_(now()) {
  count.fetch_add(1, std::memory_order_relaxed);
}

OpTimer::~OpTimer() { ns_.fetch_add(now() - start_, std::memory_order_relaxed); }

/* A copy may be between devices. */
bool isForeach(std::string_view name) {
  return name.starts_with("aten::_foreach_") && !name.starts_with("aten::_foreach_copy");
}

bool hasInferringKernel(const c10::OperatorHandle &op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

const OpTraits &opTraits(const c10::OperatorHandle &op) {
  refuseInForkedChild();
  thread_local TraitsBySchema mine;
  thread_local uint64_t known = 0;  // removals
  AllTraits &all = allTraits();
  const uint64_t removals = all.removals.load(std::memory_order_acquire);
  if (C10_UNLIKELY(known != removals)) mine.clear();
  known = removals;
  const FunctionSchema *key = &op.schema();
  if (const auto found = mine.find(key); found != mine.end()) return *found->second;
  std::lock_guard<std::mutex> lock(all.mutex);
  const OpTraits *&entry = all.traits[key];
  if (entry == nullptr) entry = makeTraits(op);
  mine.emplace(key, entry);
  return *entry;
}

}  // namespace torch_openreg
