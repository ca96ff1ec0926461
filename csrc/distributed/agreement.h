/*
 * What ranks tell each other before Gloo has a collective. Gloo ends the process where they
 * disagree about a size, in a thread of its own; it waits for ever, or mixes up data, where they
 * call different collectives.
 *
 * Each rank sends what it calls to each other rank, and compares all that it gets: so all come to
 * the same result, and Gloo is called by all or by none. A group whose ranks disagreed can go on.
 */
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_openreg {

/* What has to be the same on every rank. Elements are those of one rank's part. */
struct Announcement {
  std::string name;
  std::string reduction;  // "SUM"; "": none
  int root = -1;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t elements = 0;
  std::string parts = {};  // what else has to be the same, as text: the tensors of a list
  std::vector<int64_t> sends = {}, expects = {};  // bytes by rank, where they may differ
  bool dropped = false;                           // the sender has no inputs
};

/* Tags of our own messages; programs have those below. */
constexpr int kOwnTags = 1 << 30, kMessageTags = kOwnTags + (1 << 29);

/* Returns "" if all agree, else how they do not. `waiting` is told whom it waits for. What Gloo
 * throws is thrown. */
std::string disagreement(c10d::Backend &gloo, uint64_t sequence, const Announcement &own,
                         const std::function<void(int rank)> &waiting);

/* A message says how long it is before it comes. `peer` and `tag` are the program's. */
c10::intrusive_ptr<c10d::Work> sendWithSize(c10d::Backend &gloo, at::Tensor &host,
                                            c10::ScalarType dtype, int peer, int tag);
/* `peer` -1: from anybody. A message of another size or dtype is received, and is an error. */
c10::intrusive_ptr<c10d::Work> receiveWithSize(c10d::Backend &gloo, at::Tensor &host,
                                               c10::ScalarType dtype, int peer, int tag);

}  // namespace torch_openreg
