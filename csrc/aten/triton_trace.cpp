#include "triton_trace.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "../torch/check.h"
#include "../torch/gil.h"
#include "../torch/graph_outputs.h"
#include "../torch/touched_types.h"
#include "index_accesses.h"

namespace torch_openreg {

namespace {

constexpr int64_t kPeeked = 1 << 20;  // bytes of a storage; a larger one is not read
constexpr size_t kRanges = 64;
// Of a word for the writer, in trace.h: LOADED and MANY.
constexpr uint32_t kLoaded = 0x40000000u, kMany = 0x3fffffffu;

/* The bytes of one access, which grows by ranges in the order of their addresses. */
class Ranges {
 public:
  explicit Ranges(uint32_t write) : write_(write) {}

  void add(const char *begin, size_t width) {
    if (!all_.empty() && extend(all_.back(), begin, width)) return;
    orMemoryAccess access{};
    access.data = begin;
    access.width = width;
    access.write = write_;
    all_.push_back(access);
  }

  void append(std::vector<orMemoryAccess> &to) {
    if (all_.size() > kRanges) {
      orMemoryAccess hull{};
      hull.data = all_.front().data;
      hull.width = static_cast<size_t>(endOf(all_.back()) - static_cast<const char *>(hull.data));
      hull.write = write_ | OR_ACCESS_PARTIAL;
      all_ = {hull};
    }
    to.insert(to.end(), all_.begin(), all_.end());
  }

 private:
  static const char *endOf(const orMemoryAccess &access) {
    const size_t before = access.dims == 0 ? 0 : (access.count[0] - 1) * access.stride[0];
    return static_cast<const char *>(access.data) + before + access.width;
  }
  static bool extend(orMemoryAccess &access, const char *begin, size_t width) {
    if (width != access.width) return false;
    const auto distance = static_cast<size_t>(begin - static_cast<const char *>(access.data));
    if (access.dims == 0) {
      access.dims = 1;
      access.count[0] = 2;
      access.stride[0] = distance;
      return true;
    }
    if (distance != access.count[0] * access.stride[0]) return false;
    ++access.count[0];
    return true;
  }

  const uint32_t write_;
  std::vector<orMemoryAccess> all_;
};

/* Adds the ranges of words for which `on` holds. */
template <typename On>
void addRanges(Ranges &ranges, size_t count, const char *begin, int64_t bytes, int32_t shift,
               const On &on) {
  for (size_t first = 0; first < count;) {
    if (!on(first)) {
      ++first;
      continue;
    }
    size_t end = first + 1;
    while (end < count && on(end)) ++end;
    const auto from = static_cast<int64_t>(first) << shift;
    const int64_t to = std::min(static_cast<int64_t>(end) << shift, bytes);
    ranges.add(begin + from, static_cast<size_t>(to - from));
    first = end;
  }
}

}  // namespace

TritonTrace::TritonTrace(const CompiledCall &call, size_t sites, const std::vector<size_t> &peeked)
    : call_(call), blind_(sites) {
  for (size_t i = 0; i < call.count(); ++i) {
    const at::Tensor &tensor = call.tensor(i);
    if (call.role(i) != 'w') readsStorage(tensor.storage().unsafeGetStorageImpl());
    addStorage(tensor, std::find(peeked.begin(), peeked.end(), i) != peeked.end());
  }
  shadows_.resize(call.count());
}

void TritonTrace::addStorage(const at::Tensor &tensor, bool peeked) {
  const auto *begin = static_cast<const char *>(tensor.storage().data());
  const int32_t shift = std::min(3, std::countr_zero(tensor.itemsize()));
  auto words = std::find_if(storages_.begin(), storages_.end(),
                            [&](const Words &known) { return known.begin == begin; });
  if (words == storages_.end()) {
    storages_.push_back(
        {begin, static_cast<int64_t>(tensor.storage().nbytes()), shift, {}, {}, {}});
    words = storages_.end() - 1;
  }
  words->shift = std::min(words->shift, shift);
  if (peeked && words->host.empty() && words->bytes <= kPeeked) {
    const char *host = call_.hostCopy(begin);
    if (host != nullptr) {
      words->host.assign(host, host + words->bytes);
    } else {
      words->host = peekedBytes(begin, static_cast<size_t>(words->bytes));
    }
  }
}

void TritonTrace::Words::clear() {
  const auto count = static_cast<size_t>((bytes >> shift) + 1);
  writer.assign(count, 0);
  reader.assign(count, 0);
}

Shadow TritonTrace::Words::shadow() {
  return {
      begin, bytes, shift, 0, writer.data(), reader.data(), host.empty() ? nullptr : host.data()};
}

int64_t TritonTrace::find(Record *record, const char *address) {
  auto &trace = *static_cast<TritonTrace *>(record->owner);
  auto memory = sized<orPointerAttributes>();
  const orError_t error = orPointerGetAttributes(&memory, address);
  if (error != orSuccess || memory.type == orMemoryTypeUnregistered) return -1;
  const auto *begin = static_cast<const char *>(memory.base);
  trace.storages_.push_back({begin, static_cast<int64_t>(memory.size), 0, {}, {}, {}});
  trace.storages_.back().clear();
  trace.shadows_.push_back(trace.storages_.back().shadow());
  record->tensors = trace.shadows_.data();
  record->count = static_cast<int64_t>(trace.shadows_.size());
  return record->count - 1;
}

void TritonTrace::run(TraceEntry entry) {
  for (Words &words : storages_) words.clear();
  for (size_t i = 0; i < shadows_.size(); ++i) {
    const void *begin = call_.tensor(i).storage().data();
    for (Words &words : storages_) {
      if (words.begin == begin) shadows_[i] = words.shadow();
    }
  }
  record_.find = &find;
  record_.owner = this;
  record_.wanted = {-1, -1, ~0u, 0, nullptr};
  record_.tensors = shadows_.data();
  record_.count = static_cast<int64_t>(shadows_.size());
  record_.blind = blind_.data();
  call(entry);
}

void TritonTrace::call(TraceEntry entry) {
  std::vector<void *> pointers;
  for (size_t i = 0; i < call_.count(); ++i) {
    pointers.push_back(const_cast<char *>(firstByte(call_.tensor(i))));
  }
  const WithoutGil unlocked;
  entry(pointers.data(), call_.task().numbers.data(), &record_);
}

Hit TritonTrace::partner(TraceEntry entry) {
  const Hit hit = record_.first_race;
  const Shadow &shadow = shadows_[static_cast<size_t>(hit.argument)];
  for (Words &words : storages_) words.clear();  // keeps their addresses
  // Each access of this word, and of no other one, meets an access of no program.
  const int64_t word = hit.offset >> shadow.shift;
  shadow.writer[word] = shadow.reader[word] = kMany;
  constexpr uint32_t reads = 1u << READS, atomic = 1u << UPDATES | 1u << STORES;
  const uint32_t harmless = hit.kind == READS ? reads : hit.kind == WRITES ? 0 : atomic;
  record_.wanted = {hit.other, hit.program, ~harmless, 0, shadow.writer + word};
  record_.races = 0;
  call(entry);
  return record_.races != 0 ? record_.first_race : hit;
}

std::vector<size_t> TritonTrace::blind() const {
  std::vector<size_t> sites;
  for (size_t i = 0; i < blind_.size(); ++i) {
    if (blind_[i] != 0) sites.push_back(i);
  }
  return sites;
}

std::vector<orMemoryAccess> TritonTrace::accesses() const {
  std::vector<orMemoryAccess> all;
  for (const Words &words : storages_) {
    Ranges read(0), written(OR_ACCESS_WRITES);
    const auto add = [&](Ranges &to, const auto &on) {
      addRanges(to, words.writer.size(), words.begin, words.bytes, words.shift, on);
    };
    // What an atomic operation updates, it reads.
    add(read, [&](size_t i) { return words.reader[i] != 0 || (words.writer[i] & kLoaded) != 0; });
    add(written, [&](size_t i) { return words.writer[i] != 0; });
    read.append(all);
    written.append(all);
  }
  for (const orMemoryAccess &access : all) {
    for (size_t i = 0; i < call_.count(); ++i) {
      const auto *data = static_cast<const char *>(access.data);
      if (data >= shadows_[i].begin && data < shadows_[i].begin + shadows_[i].bytes) {
        touchedTypes.add(data, call_.tensor(i).scalar_type());
        break;
      }
    }
  }
  return all;
}

}  // namespace torch_openreg
