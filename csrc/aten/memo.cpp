/*
 * One table for all operators, guarded by a reader-writer lock: written at a first call, read at every
 * later one. At its bound it starts anew, which costs each shape in use one waited call.
 */
#include "memo.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <limits>
#include <mutex>
#include <shared_mutex>

namespace torch_openreg {

namespace {

using c10::IValue;

constexpr size_t kMostMemos = 1 << 14;

struct KeyHash {
  size_t operator()(const MemoKey &key) const {
    uint64_t h = 0x9e3779b97f4a7c15ull;
    for (int64_t word : key)
      h = (std::rotl(h, 23) ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
    return h ^ (h >> 32);
  }
};

struct Table {
  std::shared_mutex mutex;
  ska::flat_hash_map<MemoKey, std::shared_ptr<const Memo>, KeyHash> memos;
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

/* What the dtypes hold at most, from the smallest; integers that are negative may wrap around in unsigned ones. */
struct Range {
  double least, most;
};
constexpr Range kRanges[] = {
    {-128, 127},         {-255, 255},           {-448, 448},
    {-32768, 32767},     {-57344, 57344},       {-65504, 65504},
    {-65535, 65535},     {-0x1p31, 0x1p31 - 1}, {-(0x1p32 - 1), 0x1p32 - 1},
    {-0x1p63, 0x1p63},   {-0x1p64, 0x1p64},     {-0x1.fep127, 0x1.fep127},
    {-FLT_MAX, FLT_MAX}, {-DBL_MAX, DBL_MAX}};

/* By its sign and by which dtypes hold it: kernels refuse numbers for these, and for nothing else on its own. */
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

/* In a CPU tensor of no dimensions; of the dtypes that numbers have in Python. */
double numberIn(const at::Tensor &tensor) {
  const void *data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      return *static_cast<const double *>(data);
    case c10::kFloat:
      return *static_cast<const float *>(data);
    case c10::kLong:
      return static_cast<double>(*static_cast<const int64_t *>(data));
    default:
      return 0;
  }
}

void appendTensor(MemoKey &key, const at::Tensor &tensor) {
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
  if (sizes.empty() && tensor.is_cpu()) key[begin] |= kindOf(numberIn(tensor)) << 20;
}

/* What a task rebuilds from the key; the other arguments, which it has as they are, come after all these. */
void appendTensors(MemoKey &key, const IValue &value) {
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

/* How what is written lies to the other tensors, where it shares memory with them. */
void appendOverlaps(MemoKey &key, const OpInfo &info, c10::ArrayRef<IValue> arguments) {
  const auto storageOf = [](const at::Tensor &tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  const at::Tensor *written = nullptr;
  int64_t position = 0;
  const auto compare = [&](const at::Tensor &other) {
    ++position;
    if (C10_LIKELY(storageOf(other) != storageOf(*written))) return;
    key.push_back(kOverlap | position << 8);
    key.push_back(other.storage_offset() - written->storage_offset());
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!info.isWritten[i] || !arguments[i].isTensor()) continue;
    written = &arguments[i].toTensor();
    if (!written->defined()) continue;
    position = static_cast<int64_t>(i) << 32;
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (k == i || !holdsTensors(arguments[k])) continue;
      if (arguments[k].isTensor()) {
        compare(arguments[k].toTensor());
        continue;
      }
      for (const IValue &item : arguments[k].toListRef()) {
        if (!item.isNone()) compare(item.toTensor());
      }
    }
  }
}

void appendText(MemoKey &key, const std::string &text) {
  key.push_back(kText);
  key.push_back(static_cast<int64_t>(text.size()));
  for (char c : text) key.push_back(c);
}

}  // namespace

Layout::Layout(const at::Tensor &tensor) {
  if (!tensor.defined()) return;
  dims.append(tensor.sizes().begin(), tensor.sizes().end());
  dims.append(tensor.strides().begin(), tensor.strides().end());
  dtype = tensor.scalar_type();
  conj = tensor.is_conj();
  neg = tensor.is_neg();
  measure();
}

void Layout::measure() {
  bytes = at::detail::computeStorageNbytes(sizes(), strides(), c10::elementSize(dtype));
}

bool Layout::describes(const at::Tensor &tensor) const {
  return describesSizes(tensor) && (!tensor.defined() || tensor.strides() == strides());
}

bool Layout::describesSizes(const at::Tensor &tensor) const {
  if (!tensor.defined()) return dtype == c10::ScalarType::Undefined;
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes() && tensor.is_conj() == conj &&
         tensor.is_neg() == neg;
}

bool appendToKey(MemoKey &key, const IValue &value, bool kindOnly) {
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
  } else if (value.isComplexDouble()) {
    key.push_back(kComplex);
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

bool makeKey(MemoKey &key, const OpInfo &info, c10::ArrayRef<IValue> arguments) {
  key.push_back(reinterpret_cast<intptr_t>(&info));
  key.push_back(c10::get_default_dtype_as_scalartype() == c10::kFloat);
  for (const IValue &value : arguments) appendTensors(key, value);
  double previous = kNoNumber;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (holdsTensors(arguments[i])) continue;
    const bool kindOnly = info.isNumber[i] && !info.numbersCount;
    if (!appendToKey(key, arguments[i], kindOnly)) return false;
    if (!kindOnly) continue;
    const double number = numberIn(arguments[i]);
    key.back() |= static_cast<int64_t>(number < previous) << 32;  // as of bounds
    key.back() |= static_cast<int64_t>((number > 1) - (number < 1)) << 33;  // as of probabilities
    previous = number;
  }
  appendOverlaps(key, info, arguments);
  return true;
}

KeyReader::KeyReader(const MemoKey &key) : next_(key.data() + kHeader) {}

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

std::shared_ptr<Memo> memoOfOutputs(const OpInfo &info) {
  auto memo = std::make_shared<Memo>();
  memo->usable = true;
  for (size_t i = 0; i < info.isWritten.size(); ++i) {
    if (info.isWritten[i]) memo->results.push_back(Result{static_cast<int>(i), false, {}});
  }
  return memo;
}

bool sameStrides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

std::shared_ptr<const Memo> findMemo(const MemoKey &key) {
  Table &t = table();
  std::shared_lock<std::shared_mutex> lock(t.mutex);
  const auto found = t.memos.find(key);
  return found == t.memos.end() ? nullptr : found->second;
}

void addMemo(const MemoKey &key, std::shared_ptr<const Memo> memo) {
  Table &t = table();
  std::unique_lock<std::shared_mutex> lock(t.mutex);
  if (t.memos.size() >= kMostMemos) t.memos.clear();
  t.memos[key] = std::move(memo);
}

}  // namespace torch_openreg
