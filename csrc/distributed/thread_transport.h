/*
 * What takes Gloo's place where the ranks of a group are threads of one process: it moves and adds
 * tensors of the host, without sockets and without threads of its own.
 */
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch_openreg {

/* One rank's. The ranks meet through `store`. */
c10::intrusive_ptr<c10d::Backend> makeThreadTransport(
    c10d::Store &store, int rank, int size, c10::intrusive_ptr<c10d::Backend::Options> options);

}  // namespace torch_openreg
