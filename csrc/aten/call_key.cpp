#include "call_key.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/DynamicCast.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <limits>
#include <string>

#include "../task/arguments.h"

namespace torch_openreg {

namespace {

using c10::IValue;

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

/* appendTensor packs the tag and the dtype into eight bits each, and KeyReader unpacks them. */
static_assert(kOverlap <= 0xff, "a tag has eight bits");
static_assert(c10::NumScalarTypes <= 1 << 8, "and so has a dtype");

constexpr size_t kHeader = 2;

/* The range of each dtype, from the smallest. Unsigned dtypes also accept negative integers, which
 * may wrap around. */
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

/* A number's sign and the first of kRanges that holds it. Kernels refuse a single number for no
 * other reason. */
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

/* Appends the tensors, which a task rebuilds from the key. The task keeps the other arguments as
 * they are; the key holds them after all tensors. */
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

/* Appends where each written tensor lies relative to the tensors that overlap it. A member of a
 * written list is compared with single tensors, and with the members at the same position of other
 * lists. */
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

  /* Whether two tensors of one storage overlap. */
  static bool meet(const at::Tensor &a, const at::Tensor &b) {
    return bytesBefore(a) < bytesNeeded(b) && bytesBefore(b) < bytesNeeded(a);
  }

  void compare(const at::Tensor &written, const at::Tensor &other) {
    ++compared_;
    if (C10_LIKELY(storageOf(other) != storageOf(written)) || !meet(written, other)) return;
    key_.push_back(kOverlap | compared_ << 8);
    key_.push_back(other.storage_offset() - written.storage_offset());
  }

  /* Compares with single tensors and with the members [first, end) of other lists. */
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
  int64_t compared_ = 0;  // identifies the pair, as the key has the lengths of lists
};

void appendText(CallKey &key, const std::string &text) {
  key.push_back(kText);
  key.push_back(static_cast<int64_t>(text.size()));
  for (char c : text) key.push_back(c);
}

}  // namespace

int64_t kindOfNumber(const at::Tensor &tensor) {
  if (tensor.dim() != 0 || !tensor.is_cpu()) return 0;
  return kindOf(c10::fetch_and_cast<double>(tensor.scalar_type(), tensor.const_data_ptr()));
}

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
  } else if (value.isComplexDouble()) {  // without an imaginary part it counts as real
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
    key.back() |= kindOf(number - previous) << 24;                          // for bounds
    key.back() |= static_cast<int64_t>((number > 1) - (number < 1)) << 33;  // for probabilities
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

}  // namespace torch_openreg
