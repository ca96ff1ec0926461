/*
 * One table for all operators, guarded by a reader-writer lock: written at a first call, read at
 * every later one. At its bound it starts anew, which costs each shape in use one waited call.
 */
#include "output_cache.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/DynamicCast.h>
#include <c10/util/accumulate.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <limits>
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

Table &table() {
  static auto *instance = new Table();
  return *instance;
}

enum Tag : int64_t {
  kTensor = 1,
  kUndefined,
  kTensors,
  kOptionalTensors,
  kOther,
  kNone,
  kInt,
  kBool,
  kDouble,
  kComplex,
  kList,
  kText,
  kDevice,
  kOverlap
};

/* What appendTensor puts beside a tag, and KeyReader takes from there. */
static_assert(kOverlap <= 0xff, "a tag has eight bits");
static_assert(c10::NumScalarTypes <= 1 << 8, "and so has a dtype");

constexpr size_t kHeader = 2;

/* What the dtypes hold at most, from the smallest; integers that are negative may wrap around in
 * unsigned ones. */
struct Range {
  double least, most;
};
constexpr Range kRanges[] = {{-128, 127},
                             {-240, 240},
                             {-255, 255},
                             {-448, 448},
                             {-32768, 32767},
                             {-57344, 57344},
                             {-65504, 65504},
                             {-65535, 65535},
                             {-0x1p31, 0x1p31 - 1},
                             {-(0x1p32 - 1), 0x1p32 - 1},
                             {-0x1p63, 0x1p63},
                             {-0x1p64, 0x1p64},
                             {-0x1.fep127, 0x1.fep127},
                             {-FLT_MAX, FLT_MAX},
                             {-DBL_MAX, DBL_MAX}};

/* By its sign and by which dtypes hold it: kernels refuse numbers for these, and for nothing else
 * on its own. */
int64_t kindOf(double number) {
  const int64_t sign = number > 0 ? 1 : number < 0 ? 2 : number == 0 ? 0 : 3;
  if (C10_LIKELY(number >= kRanges[0].least && number <= kRanges[0].most)) return sign;
  const auto *range = std::find_if(std::begin(kRanges), std::end(kRanges), [&](const Range &r) {
    return number >= r.least && number <= r.most;
  });
  return sign | (range - std::begin(kRanges)) << 2;
}

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

double numberIn(const IValue &value) {
  if (value.isInt()) return static_cast<double>(value.toInt());
  return value.isDouble() ? value.toDouble() : kNoNumber;
}

}  // namespace

int64_t kindOfNumber(const at::Tensor &tensor) {
  if (tensor.dim() != 0 || !tensor.is_cpu()) return 0;
  return kindOf(c10::fetch_and_cast<double>(tensor.scalar_type(), tensor.const_data_ptr()));
}

namespace {

void appendTensor(CallKey &key, const at::Tensor &tensor) {
  if (!tensor.defined()) return key.push_back(kUndefined);
  const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  const c10::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
  const size_t begin = key.size();
  key.resize_for_overwrite(begin + 2 + 2 * sizes.size());
  int64_t *next = key.data() + begin;
  *next++ = kTensor | static_cast<int64_t>(tensor.scalar_type()) << 8 | tensor.is_conj() << 16 |
            tensor.is_neg() << 17 | impl->is_wrapped_number() << 18 | tensor.is_cpu() << 19;
  *next++ = static_cast<int64_t>(sizes.size());
  next = std::copy(sizes.begin(), sizes.end(), next);
  std::copy(strides.begin(), strides.end(), next);
  key[begin] |= kindOfNumber(tensor) << 20;
}

/* What a task rebuilds from the key; the other arguments, which it has as they are, come after all
 * these. */
void appendTensors(CallKey &key, const IValue &value) {
  if (value.isTensor()) {
    appendTensor(key, value.toTensor());
  } else if (holdsTensors(value)) {
    const auto items = value.toListRef();
    key.push_back((value.isTensorList() ? kTensors : kOptionalTensors) |
                  static_cast<int64_t>(items.size()) << 8);
    for (const IValue &item : items) {
      appendTensor(key, item.isNone() ? at::Tensor() : item.toTensor());
    }
  } else {
    key.push_back(kOther);
  }
}

/* How what is written lies to the other tensors, where these reach into the same bytes. Of lists,
 * one that is written is taken with the others member by member. */
class Overlaps {
 public:
  explicit Overlaps(CallKey &key) : key_(key) {}

  void append(const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!traits.isWritten[i] || !holdsTensors(arguments[i])) continue;
      if (arguments[i].isTensor()) {
        compareWithOthers(arguments[i].toTensor(), arguments, i, 0, SIZE_MAX);
        continue;
      }
      const auto members = arguments[i].toListRef();
      for (size_t m = 0; m < members.size(); ++m) {
        if (!members[m].isNone()) compareWithOthers(members[m].toTensor(), arguments, i, m, m + 1);
      }
    }
  }

 private:
  static const c10::StorageImpl *storageOf(const at::Tensor &tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }

  /* Of one storage. */
  static bool meet(const at::Tensor &a, const at::Tensor &b) {
    const auto begin = [](const at::Tensor &tensor) {
      return static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    };
    return begin(a) < bytesNeeded(b) && begin(b) < bytesNeeded(a);
  }

  void compare(const at::Tensor &written, const at::Tensor &other) {
    ++compared_;
    if (C10_LIKELY(storageOf(other) != storageOf(written)) || !meet(written, other)) return;
    key_.push_back(kOverlap | compared_ << 8);
    key_.push_back(other.storage_offset() - written.storage_offset());
  }

  /* With the members `first` to `end` of lists. */
  void compareWithOthers(const at::Tensor &written, c10::ArrayRef<IValue> arguments, size_t own,
                         size_t first, size_t end) {
    if (!written.defined()) return;
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (k == own || !holdsTensors(arguments[k])) continue;
      if (arguments[k].isTensor()) {
        compare(written, arguments[k].toTensor());
        continue;
      }
      const auto members = arguments[k].toListRef();
      for (size_t m = first; m < std::min(end, members.size()); ++m) {
        if (!members[m].isNone()) compare(written, members[m].toTensor());
      }
    }
  }

  CallKey &key_;
  int64_t compared_ = 0;  // which pair it is: the key has the lengths of the lists
};

void appendText(CallKey &key, const std::string &text) {
  key.push_back(kText);
  key.push_back(static_cast<int64_t>(text.size()));
  for (char c : text) key.push_back(c);
}

// ---- What a call teaches ------------------------------------------------------------------------

bool isEmpty(const TensorMetadata &tensor) { return c10::multiply_integers(tensor.sizes) == 0; }

/* Arguments are as they were, but for outputs that the call gave a size, which are noted: they hold
 * nothing that is read, as what is written in place may. An operator that is neither may ask itself
 * whether they have one. */
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
  bool shared = !storages.insert(tensor.storage().unsafeGetStorageImpl()).second;
  for (const IValue &value : arguments) {
    eachTensor(value, [&](const at::Tensor &argument) {
      shared |= argument.defined() && argument.is_alias_of(tensor);
    });
  }
  return !shared;
}

/* Of a list of a foreach operator the member alone. */
template <typename F>
void eachTensorOfMember(const OpTraits &traits, const IValue &value, size_t member, F visit) {
  if (traits.isForeach && value.isTensorList()) return visit(value.toListRef()[member].toTensor());
  eachTensor(value, visit);
}

/* Their results tell nothing of the dtype in which they compare. */
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

bool appendToKey(CallKey &key, const IValue &value, bool kindOnly) {
  if (value.isNone() || value.isGenerator()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.push_back(kInt | (kindOnly ? kindOf(numberIn(value)) << 8 : 0));
    if (!kindOnly) key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(kBool | (kindOnly ? 0 : value.toBool() << 8));
  } else if (value.isDouble()) {
    key.push_back(kDouble | (kindOnly ? kindOf(numberIn(value)) << 8 : 0));
    if (!kindOnly) key.push_back(std::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {  // one without an imaginary part is as good as a real one
    const c10::complex<double> number = value.toComplexDouble();
    key.push_back(kComplex | kindOf(number.real()) << 8 | kindOf(number.imag()) << 16);
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(kList | static_cast<int64_t>(items.size()) << 8);
    for (const IValue &item : items) {
      if (!appendToKey(key, item, kindOnly)) return false;
    }
  } else if (value.isString()) {
    appendText(key, value.toStringRef());
  } else if (value.isDevice()) {
    key.push_back(kDevice);
  } else {
    return false;
  }
  return true;
}

bool makeKey(CallKey &key, const OpTraits &traits, c10::ArrayRef<IValue> arguments) {
  key.push_back(reinterpret_cast<intptr_t>(&traits));
  key.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  for (const IValue &value : arguments) appendTensors(key, value);
  double previous = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (holdsTensors(arguments[i])) continue;
    const bool kindOnly = traits.isNumber[i] && !traits.numbersCount;
    if (!appendToKey(key, arguments[i], kindOnly)) return false;
    if (!kindOnly) continue;
    const double number = numberIn(arguments[i]);
    key.back() |= kindOf(number - previous) << 24;                          // as of bounds
    key.back() |= static_cast<int64_t>((number > 1) - (number < 1)) << 33;  // as of probabilities
    previous = number;
  }
  Overlaps(key).append(traits, arguments);
  return true;
}

KeyReader::KeyReader(const CallKey &key) : next_(key.data() + kHeader) {}

KeyReader::Kind KeyReader::next() {
  word_ = *next_++;
  switch (static_cast<Tag>(word_ & 0xff)) {
    case Tag::kTensor:
      count_ = static_cast<size_t>(*next_++);
      dims_ = next_;
      next_ += 2 * count_;
      return kTensor;
    case Tag::kUndefined:
      return kUndefined;
    case Tag::kTensors:
      return kTensors;
    case Tag::kOptionalTensors:
      return kOptionalTensors;
    default:
      return kOther;
  }
}

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
