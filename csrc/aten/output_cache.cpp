/*
 * One table for all operators, guarded by a reader-writer lock. A first call writes it, and later
 * calls read it. When it is full it is cleared, which costs one waited call for each shape in use.
 */
#include "output_cache.h"

#include <c10/core/DefaultDtype.h>
#include <c10/util/accumulate.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_set>

#include "../task/tensor_components.h"

namespace torch_openreg {

namespace {

using c10::IValue;

constexpr size_t kMostSpecs = 1 << 14;

struct KeyHash {
  size_t operator()(const CallKey &key) const {
    uint64_t h = 0x9e3779b97f4a7c15ull;
    for (int64_t word : key)
      h = (std::rotl(h, 23) ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
    return h ^ (h >> 32);
  }
};

struct Table {
  std::shared_mutex mutex;
  ska::flat_hash_map<CallKey, std::shared_ptr<const OutputSpec>, KeyHash> specs;
};

Table &table() { return leaked<Table>(); }

// ---- The results of a call that has finished ----------------------------------------------------

bool isEmpty(const TensorMetadata &tensor) { return c10::multiply_integers(tensor.sizes) == 0; }

/* Whether the metadata of the arguments are unchanged, apart from outputs that the call has
 * resized, which are added to `resizes`. An output (out=) may be resized because its old contents
 * are not read, and a tensor that is written in place if it was empty. Other operators may check
 * whether what they write has a size. */
bool unchanged(const OpTraits &traits, c10::ArrayRef<IValue> arguments,
               const std::vector<KeptMetadata> &before, std::vector<Resize> &resizes) {
  const bool inPlace = std::string_view(traits.name).back() == '_';
  auto kept = before.begin();
  bool same = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    eachTensor(arguments[i], [&](const at::Tensor &tensor) {
      const TensorMetadata old = *kept++;
      if (old.describes(tensor)) return;
      const bool sized = (traits.isOut[i] || (traits.isWritten[i] && inPlace && isEmpty(old))) &&
                         arguments[i].isTensor() && tensor.defined() &&
                         old.dtype == tensor.scalar_type() && old.conj == tensor.is_conj() &&
                         old.neg == tensor.is_neg();
      if (sized) resizes.push_back({i, metadataOf(tensor)});
      same &= sized;
    });
  }
  return same;
}

bool ownsItsStorage(const at::Tensor &tensor, c10::ArrayRef<IValue> arguments,
                    std::unordered_set<const void *> &storages) {
  if (!tensor.defined()) return true;
  if (!isPlain(tensor) || !tensor.has_storage() || tensor.storage_offset() != 0 ||
      tensor.storage().nbytes() < metadataOf(tensor).bytes()) {
    return false;
  }
  if (!storages.insert(tensor.storage().unsafeGetStorageImpl()).second) return false;
  return !anyTensor(arguments, [&](const at::Tensor &argument) {
    return argument.defined() && argument.is_alias_of(tensor);
  });
}

/* Visits the tensors of an argument; of a foreach operator's list, only the one at `member`. */
template <typename F>
void eachTensorOfMember(const OpTraits &traits, const IValue &value, size_t member, F visit) {
  if (traits.isForeach && value.isTensorList()) return visit(value.toListRef()[member].toTensor());
  eachTensor(value, visit);
}

/* Comparisons: the results do not show the dtype in which they compare. */
constexpr std::string_view kComparing[] = {"aten::eq", "aten::ne", "aten::lt",  "aten::le",
                                           "aten::gt", "aten::ge", "aten::isin"};

bool compares(const OpTraits &traits) {
  std::string_view name(traits.name);
  if (name.back() == '_') name.remove_suffix(1);
  return std::find(std::begin(kComparing), std::end(kComparing), name) != std::end(kComparing);
}

bool computesInDefaultDtype(const OpTraits &traits, c10::ArrayRef<IValue> arguments,
                            c10::ArrayRef<IValue> results, size_t member) {
  const c10::ScalarType byDefault = c10::get_default_dtype_as_scalartype();
  bool floats = false, number = false;  // among what is read
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.isOut[i]) continue;
    number |= arguments[i].isDouble() || arguments[i].isComplexDouble();
    eachTensorOfMember(traits, arguments[i], member, [&](const at::Tensor &tensor) {
      if (!tensor.defined()) return;
      floats |= isFloating(tensor);
      number |= !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
    });
  }
  bool makes = false;
  for (const IValue &result : results) {
    eachTensorOfMember(traits, result, member, [&](const at::Tensor &tensor) {
      makes |= isFloating(tensor) && c10::toRealValueType(tensor.scalar_type()) == byDefault;
    });
  }
  return !floats && (makes || (number && compares(traits)));
}

int argumentThatIs(const IValue &result, const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.isWritten[i] && result.isTensor() && arguments[i].isTensor() &&
        result.toTensor().is_same(arguments[i].toTensor())) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

std::vector<KeptMetadata> keptMetadata(c10::ArrayRef<IValue> arguments) {
  std::vector<KeptMetadata> kept;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &tensor) { kept.emplace_back(metadataOf(tensor)); });
  }
  return kept;
}

std::shared_ptr<OutputSpec> describeOutputs(const OpTraits &traits, c10::ArrayRef<IValue> arguments,
                                            const std::vector<KeptMetadata> &before,
                                            c10::ArrayRef<IValue> results) {
  auto spec = std::make_shared<OutputSpec>();
  std::unordered_set<const void *> storages;
  spec->usable = unchanged(traits, arguments, before, spec->resizes);
  spec->inDefaultDtype = inDefaultDtype(traits, arguments, results);
  for (const IValue &value : results) {
    ResultSpec result;
    result.argument = argumentThatIs(value, traits, arguments);
    result.isList = !value.isTensor();
    if (result.argument < 0) {
      eachTensor(value, [&](const at::Tensor &tensor) {
        if (!ownsItsStorage(tensor, arguments, storages)) {
          spec->usable = false;
        } else {
          result.fresh.emplace_back(metadataOf(tensor));
        }
      });
    }
    spec->results.push_back(std::move(result));
  }
  return spec;
}

InDefaultDtype inDefaultDtype(const OpTraits &traits, c10::ArrayRef<IValue> arguments,
                              c10::ArrayRef<IValue> results) {
  size_t members = 1;
  if (traits.isForeach) members = results.empty() ? 0 : results[0].toListRef().size();
  InDefaultDtype where;
  for (size_t member = 0; member < members; ++member) {
    where.push_back(computesInDefaultDtype(traits, arguments, results, member));
  }
  const bool somewhere = std::find(where.begin(), where.end(), true) != where.end();
  return somewhere ? where : InDefaultDtype();
}

std::shared_ptr<OutputSpec> writtenOutputs(const OpTraits &traits) {
  auto spec = std::make_shared<OutputSpec>();
  spec->usable = true;
  for (size_t i = 0; i < traits.isWritten.size(); ++i) {
    if (traits.isWritten[i]) spec->results.push_back(ResultSpec{static_cast<int>(i), false, {}});
  }
  return spec;
}

std::shared_ptr<const OutputSpec> findOutputs(const CallKey &key) {
  Table &t = table();
  std::shared_lock<std::shared_mutex> lock(t.mutex);
  const auto found = t.specs.find(key);
  return found == t.specs.end() ? nullptr : found->second;
}

void cacheOutputs(const CallKey &key, std::shared_ptr<const OutputSpec> spec) {
  Table &t = table();
  std::unique_lock<std::shared_mutex> lock(t.mutex);
  if (t.specs.size() >= kMostSpecs) t.specs.clear();
  t.specs[key] = std::move(spec);
}

}  // namespace torch_openreg
