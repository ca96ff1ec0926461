/*
 * The addresses of a group's ranks, for messages about the other end.
 */
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_openreg {

class Peers {
 public:
  /* `store` is the one through which Gloo has met its peers. Ranks that it does not contain stay
   * unnamed: no call here waits for a key. `globalRanks` is empty where they are the group's
   * own. */
  Peers(c10d::Store &store, int size, std::vector<int64_t> globalRanks);

  /* "rank 1 (global rank 3)" */
  std::string rank(int rank) const;
  /* "rank 1 at [127.0.0.1]:40123" */
  std::string place(int rank) const;
  /* The ranks of `candidates` that an error of Gloo's is about: the one whose address it contains,
   * or else all of them. "rank 1 at [127.0.0.1]:40123, rank 2 at ..." */
  std::string named(const std::string &error, const std::vector<int> &candidates) const;

 private:
  const std::vector<int64_t> globalRanks_;
  std::vector<std::string> addresses_;  // by rank, as Gloo prints them; "": not known
};

}  // namespace torch_openreg
