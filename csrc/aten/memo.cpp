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
  kDevice
};

/* What appendTensor puts beside a tag, and KeyReader takes from there. */
static_assert(kDevice <= 0xff, "a tag has eight bits");
static_assert(c10::NumScalarTypes <= 1 << 8, "and so has a dtype");

constexpr size_t kHeader = 2;

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
}

bool holdsTensors(const IValue &value) {
  return value.isTensor() ||
         (value.isList() && (value.isTensorList() || value.isOptionalTensorList()));
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

bool appendToKey(MemoKey &key, const IValue &value, bool typeOnly) {
  if (value.isNone() || value.isGenerator()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.push_back(kInt);
    if (!typeOnly) key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(kBool | (typeOnly ? 0 : value.toBool() << 8));
  } else if (value.isDouble()) {
    key.push_back(kDouble);
    if (!typeOnly) key.push_back(std::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {
    key.push_back(kComplex);
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(kList | static_cast<int64_t>(items.size()) << 8);
    for (const IValue &item : items) {
      if (!appendToKey(key, item, typeOnly)) return false;
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
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool typeOnly = info.isNumber[i] && !info.numbersCount;
    if (!holdsTensors(arguments[i]) && !appendToKey(key, arguments[i], typeOnly)) return false;
  }
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
