/*
 * Ranks compare what they call before Gloo starts a collective. Where they disagree about a size,
 * Gloo ends the process, in its own thread; where they call different collectives, it waits for
 * ever or mixes up data.
 *
 * Each rank sends its call to every other rank and compares all that it receives. So all reach the
 * same result, and either all ranks call Gloo or none does. A group whose ranks disagreed can
 * continue.
 */
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_openreg {

/* The properties that must be equal on every rank. Elements are those of one rank's part. */
struct Announcement {
  std::string name;
  std::string reduction;  // "SUM"; "": none
  int root = -1;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t elements = 0;
  std::string parts = {};  // what else has to be equal, as text: the tensors of a list
  std::vector<int64_t> sends = {}, expects = {};  // bytes by rank, where they may differ
  bool dropped = false;                           // the sender has no inputs
};

/* Tags of our own messages; programs use those below. */
constexpr int kOwnTags = 1 << 30, kMessageTags = kOwnTags + (1 << 29);

/* Returns "" if all agree, and otherwise the differences. Reports to `waiting` the ranks that it
 * waits for. Throws what Gloo throws. */
std::string disagreement(c10d::Backend &gloo, uint64_t sequence, const Announcement &own,
                         const std::function<void(int rank)> &waiting);

/* Sends a message's length before the message. `peer` and `tag` are the program's. */
c10::intrusive_ptr<c10d::Work> sendWithSize(c10d::Backend &gloo, at::Tensor &host,
                                            c10::ScalarType dtype, int peer, int tag);
/* `peer` -1: from any rank. A message of another size or dtype is received, and is an error. */
c10::intrusive_ptr<c10d::Work> receiveWithSize(c10d::Backend &gloo, at::Tensor &host,
                                               c10::ScalarType dtype, int peer, int tag);

}  // namespace torch_openreg
