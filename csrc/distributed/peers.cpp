/*
 * Gloo stores under "0/RANK" what other ranks need to reach a rank: the host's name and a socket
 * address, each after its length. The address is the one in its errors. It is read when the group
 * is made, because the store may die with a peer.
 */
#include "peers.h"

#include <netdb.h>

#include <cstring>
#include <exception>
#include <utility>

namespace torch_openreg {

namespace {

/* Returns the field at `offset` and moves `offset` behind it; empty if there is none. */
std::vector<uint8_t> field(const std::vector<uint8_t> &bytes, size_t &offset) {
  uint64_t length = 0;
  if (bytes.size() < offset + sizeof(length)) return {};
  std::memcpy(&length, bytes.data() + offset, sizeof(length));
  offset += sizeof(length);
  if (length > bytes.size() - offset) return {};
  const auto start = bytes.begin() + static_cast<std::ptrdiff_t>(offset);
  offset += length;
  return {start, start + static_cast<std::ptrdiff_t>(length)};
}

std::string text(const std::vector<uint8_t> &address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (address.size() < sizeof(sockaddr_storage)) return "";
  const auto *given = reinterpret_cast<const sockaddr *>(address.data());
  if (getnameinfo(given, sizeof(sockaddr_storage), host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "";
  return "[" + std::string(host) + "]:" + port;
}

std::string addressOf(c10d::Store &store, int rank) {
  try {
    const std::string key = "0/" + std::to_string(rank);
    if (!store.check({key})) return "";
    const std::vector<uint8_t> bytes = store.get(key);
    size_t offset = 0;
    field(bytes, offset);  // the host's name
    return text(field(bytes, offset));
  } catch (const std::exception &) {
    return "";  // a message will do without
  }
}

constexpr size_t kMostNamed = 8;

}  // namespace

Peers::Peers(c10d::Store &store, int size, std::vector<int64_t> globalRanks)
    : globalRanks_(std::move(globalRanks)) {
  for (int rank = 0; rank < size; ++rank) addresses_.push_back(addressOf(store, rank));
}

std::string Peers::rank(int rank) const {
  std::string name = "rank " + std::to_string(rank);
  const auto index = static_cast<size_t>(rank);
  if (index < globalRanks_.size() && globalRanks_[index] != rank) {
    name += " (global rank " + std::to_string(globalRanks_[index]) + ")";
  }
  return name;
}

std::string Peers::place(int at) const {
  const std::string &address = addresses_[static_cast<size_t>(at)];
  return rank(at) + (address.empty() ? "" : " at " + address);
}

std::string Peers::named(const std::string &error, const std::vector<int> &candidates) const {
  std::string all;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const std::string &address = addresses_[static_cast<size_t>(candidates[i])];
    const size_t found = address.empty() ? std::string::npos : error.find(address);
    // A longer port may start with the same digits.
    if (found != std::string::npos && !std::isdigit(error[found + address.size()])) {
      return place(candidates[i]);
    }
    if (i < kMostNamed) all += (i == 0 ? "" : ", ") + place(candidates[i]);
  }
  if (candidates.size() > kMostNamed) {
    all += " and " + std::to_string(candidates.size() - kMostNamed) + " more";
  }
  return all;
}

}  // namespace torch_openreg
