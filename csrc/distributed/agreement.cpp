#include "agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace torch_openreg {

namespace {

using c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using GlooWork = c10::intrusive_ptr<c10d::Work>;

/* An Announcement as it is sent, with a fixed size for every call. `sends` and `expects` follow. */
struct Wire {
  uint64_t sequence;
  char name[32], reduction[16], parts[96];
  uint64_t digest;  // of all of `parts`, which may be longer
  int64_t root, dtype, elements, dropped;
};
constexpr auto kWords = static_cast<int64_t>(sizeof(Wire) / sizeof(int64_t));
static_assert(sizeof(Wire) % sizeof(int64_t) == 0);

at::Tensor message(int64_t words) { return at::zeros({words}, at::kLong); }

Wire &wireOf(at::Tensor &packed) { return *static_cast<Wire *>(packed.mutable_data_ptr()); }
int64_t *splitsOf(at::Tensor &packed) { return packed.mutable_data_ptr<int64_t>() + kWords; }

at::Tensor pack(uint64_t sequence, const Announcement &a, int size) {
  at::Tensor packed = message(kWords + 2 * size);
  Wire &wire = wireOf(packed);
  wire.sequence = sequence;
  a.name.copy(wire.name, sizeof(wire.name) - 1);
  a.reduction.copy(wire.reduction, sizeof(wire.reduction) - 1);
  a.parts.copy(wire.parts, sizeof(wire.parts) - 1);
  wire.digest = std::hash<std::string>{}(a.parts);
  wire.root = a.root;
  wire.dtype = static_cast<int64_t>(a.dtype);
  wire.elements = a.elements;
  wire.dropped = a.dropped ? 1 : 0;
  std::copy(a.sends.begin(), a.sends.end(), splitsOf(packed));
  std::copy(a.expects.begin(), a.expects.end(), splitsOf(packed) + size);
  return packed;
}

std::string dtypeName(int64_t dtype) { return c10::toString(static_cast<c10::ScalarType>(dtype)); }

/* "all_reduce (SUM) of 4 elements of Float" */
std::string described(const Wire &wire) {
  std::string text = wire.name;
  if (wire.reduction[0] != '\0') text += " (" + std::string(wire.reduction) + ")";
  if (wire.root >= 0) text += " with rank " + std::to_string(wire.root) + " as the root";
  if (wire.dtype == static_cast<int64_t>(c10::ScalarType::Undefined)) return text;
  if (wire.elements >= 0) text += " of " + std::to_string(wire.elements) + " elements";
  text += " of " + dtypeName(wire.dtype);
  if (wire.parts[0] != '\0') text += ": " + std::string(wire.parts);
  if (wire.parts[sizeof(wire.parts) - 2] != '\0') text += " ... " + std::to_string(wire.digest);
  return text;
}

/* "rank 0 calls A, ranks 1 and 2 call B": each call with its ranks; "" if all are equal. */
std::string differences(Tensors &announced) {
  std::vector<std::pair<std::string, std::vector<int>>> calls;
  for (size_t rank = 0; rank < announced.size(); ++rank) {
    const Wire &wire = wireOf(announced[rank]);
    std::string text = described(wire);
    if (wire.dropped != 0)
      text += ", whose inputs were dropped by a reset or a failure of its device";
    auto same = std::find_if(calls.begin(), calls.end(), [&](auto &c) { return c.first == text; });
    if (same == calls.end()) same = calls.insert(same, {std::move(text), {}});
    same->second.push_back(static_cast<int>(rank));
  }
  if (calls.size() == 1 && wireOf(announced[0]).dropped == 0) return "";
  std::string all;
  for (const auto &[what, ranks] : calls) {
    all += all.empty() ? "rank" : "; rank";
    if (ranks.size() > 1) all += "s";
    for (size_t i = 0; i < ranks.size() && i < 8; ++i)
      all += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
    if (ranks.size() > 8) all += " and " + std::to_string(ranks.size() - 8) + " more";
    all += (ranks.size() > 1 ? " call " : " calls ") + what;
  }
  return "the ranks do not agree: " + all;
}

/* The first pair of ranks of which one sends more or less than the other expects; "" if there is
 * none. */
std::string splitDifferences(Tensors &announced) {
  const auto size = static_cast<int64_t>(announced.size());
  for (int64_t from = 0; from < size; ++from) {
    for (int64_t to = 0; to < size; ++to) {
      const int64_t sent = splitsOf(announced[static_cast<size_t>(from)])[to];
      const int64_t expected = splitsOf(announced[static_cast<size_t>(to)])[size + from];
      if (sent == expected) continue;
      return "the ranks do not agree: rank " + std::to_string(from) + " sends " +
             std::to_string(sent) + " bytes to rank " + std::to_string(to) + ", which expects " +
             std::to_string(expected);
    }
  }
  return "";
}

/* A message's header: its length, its dtype, and the tag under which it follows. */
constexpr int64_t kHeaderWords = 3;

}  // namespace

std::string disagreement(Backend &gloo, uint64_t sequence, const Announcement &own,
                         const std::function<void(int)> &waiting) {
  const int size = gloo.getSize(), rank = gloo.getRank();
  if (size == 1) return "";
  const int tag = kOwnTags + static_cast<int>(sequence % (1 << 28));
  Tensors announced;  // outlives Gloo's use of it
  announced.reserve(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i)
    announced.push_back(i == rank ? pack(sequence, own, size) : message(kWords + 2 * size));
  Tensors mine{announced[static_cast<size_t>(rank)]};
  std::vector<GlooWork> sends, receives;
  for (int i = 0; i < size; ++i) {
    Tensors theirs{announced[static_cast<size_t>(i)]};
    receives.push_back(i == rank ? GlooWork() : gloo.recv(theirs, i, tag));
  }
  for (int i = 0; i < size; ++i) {
    if (i != rank) sends.push_back(gloo.send(mine, i, tag));
  }
  for (int i = 0; i < size; ++i) {
    if (i == rank) continue;
    waiting(i);
    receives[static_cast<size_t>(i)]->wait();
  }
  waiting(-1);
  for (const GlooWork &work : sends) work->wait();
  const std::string text = differences(announced);
  return text.empty() ? splitDifferences(announced) : text;
}

GlooWork sendWithSize(Backend &gloo, at::Tensor &host, c10::ScalarType dtype, int peer, int tag) {
  static std::atomic<int> count{0};
  const int follows = kMessageTags + (count.fetch_add(1) & ((1 << 28) - 1));
  Tensors header{message(kHeaderWords)}, data{host};
  auto *words = header[0].mutable_data_ptr<int64_t>();
  words[0] = static_cast<int64_t>(host.nbytes());
  words[1] = static_cast<int64_t>(dtype);
  words[2] = follows;
  const GlooWork first = gloo.send(header, peer, tag);
  GlooWork second = gloo.send(data, peer, follows);
  first->wait();
  return second;
}

GlooWork receiveWithSize(Backend &gloo, at::Tensor &host, c10::ScalarType dtype, int peer,
                         int tag) {
  Tensors header{message(kHeaderWords)}, data{host};
  const GlooWork first = peer < 0 ? gloo.recvAnysource(header, tag) : gloo.recv(header, peer, tag);
  first->wait();
  const int source = peer < 0 ? first->sourceRank() : peer;
  const auto *words = header[0].const_data_ptr<int64_t>();
  const bool fits =
      words[0] == static_cast<int64_t>(host.nbytes()) && words[1] == static_cast<int64_t>(dtype);
  if (!fits) data[0] = at::empty({words[0]}, at::kByte);
  GlooWork second = gloo.recv(data, source, static_cast<int>(words[2]));
  if (fits) return second;
  second->wait();
  throw std::runtime_error("the ranks do not agree: rank " + std::to_string(source) + " sends " +
                           std::to_string(words[0]) + " bytes of " + dtypeName(words[1]) +
                           ", this one expects " + std::to_string(host.nbytes()) + " of " +
                           c10::toString(dtype));
}

}  // namespace torch_openreg
