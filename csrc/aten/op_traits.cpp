/*
 * Derives the traits of an operator from its schema and name.
 *
 * An entry is made once for each definition of an operator and never destroyed, because tasks,
 * errors and the output cache refer to it. Each thread has a table of its own in front of the
 * shared one, so that it takes the lock once for each operator.
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

/* Operators whose results' sizes depend on data although they have no such tag. */
constexpr std::string_view kUntagged[] = {"aten::linalg_lstsq",
                                          "aten::linalg_lstsq_out",
                                          "aten::_ctc_loss",
                                          "aten::_pack_padded_sequence",
                                          "aten::_padded_dense_to_jagged_forward",
                                          "aten::_rowwise_prune"};

/* CPU kernels without a deterministic form. */
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

/* Whether the argument is the degree of a norm: some kernels accept only a few values of it. */
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

/* Structured operators whose results are not inferred, for one of these reasons. The out= form
 * resizes its output twice and warns of that, sets the conj bit of its output, or leaves part of an
 * output with other strides unchanged. The meta function gives another size or other strides than
 * the kernel, or accepts sizes that the kernel refuses. A composite kernel is registered in place
 * of the inferring one, and has other strides and errors than the CPU's. Names have an overload or
 * stand for all. */
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

/* In place by name, but the result may be larger than the argument, or be refused for its size,
 * which the call itself should report. */
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

/* In-place forms do not always have the tags of the functional form. */
bool isTaggedPointwise(const c10::OperatorHandle &op) {
  if (op.hasTag(at::Tag::pointwise)) return true;
  c10::OperatorName name = op.operator_name();
  if (name.name.back() != '_') return false;
  name.name.pop_back();
  const auto functional = c10::Dispatcher::singleton().findOp(name);
  return functional.has_value() && functional->hasTag(at::Tag::pointwise);
}

/* Decompositions that may not converge. CUDA's kernels also synchronise and raise. */
constexpr std::string_view kChecks[] = {"aten::linalg_eig", "aten::_linalg_eigvals",
                                        "aten::linalg_eigvals", "aten::_linalg_eigh",
                                        "aten::_linalg_svd"};

/* Whether the argument is a tensor of standard deviations. CUDA also synchronises to check it. */
bool isStandardDeviation(const FunctionSchema &schema, const Argument &argument) {
  return schema.name() == "aten::normal" && argument.name() == "std" &&
         isKind(*argument.real_type(), TypeKind::TensorType);
}

/* Whether the argument requests a check of data. segment_reduce checks lengths if `unsafe` is
 * false. */
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
    traits->isWrittenUnsaid.push_back(isWrittenUnsaid(schema, argument));
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
  // A composite kernel would pass the generator to its own operators, but by then it is the CPU's.
  traits->inferable &= !traits->draws;
  traits->numbersCount = hasOut && !reads;
  // They are not tagged as pointwise.
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

/* Removes the entries of an unloaded library, because new schemas may get the addresses of its
 * schemas. */
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

bool isWrittenUnsaid(const c10::FunctionSchema &schema, const c10::Argument &argument) {
  if (isWritten(argument) || !schema.name().starts_with("aten::")) return false;
  if (schema.name() == "aten::_saturate_weight_to_fp16") return true;
  const bool running = argument.name() == "running_mean" || argument.name() == "running_var";
  return running && schema.name().find("backward") == std::string::npos &&
         schema.name() != "aten::_batch_norm_no_update";
}

/* _foreach_copy is not one, because it may copy between devices. */
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
