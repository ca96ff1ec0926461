/*
 * Copies in host memory of device memory that kernels do not reach (a device without `map`).
 *
 * What shares memory on the device shares it in the copies, also if two storages begin in one
 * block, as after torch.from_dlpack.
 */
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <openreg.h>

#include <cstddef>
#include <map>

#include "../torch/check.h"

namespace torch_openreg {

/* Calls on copies of one stream take turns: each copies, runs and copies back before the next one
 * begins, as if it were one task. A thread has one turn at a time; a second one, for a call inside
 * a call, waits for nobody. The constructor releases the GIL while it waits. */
class StreamTurn : Uncopyable {
 public:
  explicit StreamTurn(orStream_t stream);
  ~StreamTurn();

 private:
  const orStream_t stream_;
  const bool first_;  // of this thread
};

/* Ranges of bytes, each up to the one behind its last. No two of them touch. */
class ByteRanges {
 public:
  void add(size_t begin, size_t end);
  bool has(size_t begin, size_t end) const;
  size_t count() const { return ranges_.size(); }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  std::map<size_t, size_t> ranges_;
};

/* The copies of one call. All copying is on one stream, and waits. It is the backend's own: to the
 * sanitizer it is no access of the program and orders nothing, so the call reports what it
 * touches. */
class HostCopies : Uncopyable {
 public:
  explicit HostCopies(orStream_t stream) : stream_(stream) {}

  /* Makes a copy, with any contents. It is as large as the storage, because a kernel may resize
   * it. May move the copies of storages that share its memory. */
  void reserve(const c10::StorageImpl &storage);
  /* Copies bytes from `begin` to `end` of a storage to the host. */
  void fetch(const c10::StorageImpl &storage, size_t begin, size_t end);
  /* The same for the range from a tensor's first element to its last. */
  void fetch(const at::Tensor &tensor);
  /* Copies what a storage has on the device to new memory of `bytes` bytes, apart from what has
   * been fetched before and from these ranges. */
  void fetchRest(const c10::StorageImpl &storage, char *memory, size_t bytes, ByteRanges known);
  /* The copy of device memory; null: there is none. */
  char *find(const void *memory);
  /* The CPU tensor over the copy of what has been fetched for a tensor. */
  at::Tensor of(const at::Tensor &tensor);
  /* Fills device memory. */
  void upload(void *device, const void *host, size_t bytes) const;
  /* Whether `write` copies a whole range, because the elements lie in too many pieces: what is
   * between them has to be fetched before, and other streams must not write there. */
  static bool isWrittenAsRange(const at::Tensor &tensor);
  /* Copies a tensor's elements from the copy of its storage. */
  void write(const at::Tensor &tensor);
  /* The same for what a kernel has written, by the device's own kernel if that spares a range. */
  void writeBack(const at::Tensor &tensor);
  /* Keeps what the copy of a storage contains now, for writeChanges. To be called after all
   * fetches. */
  void keep(const c10::StorageImpl &storage);
  /* Copies back what has changed in the copy of the tensor's storage, inside and outside of the
   * tensor, and has not been written back. If it lies in too many pieces, other streams must not
   * write between them. */
  void writeChanges(const at::Tensor &tensor);

 private:
  struct HostCopy {
    c10::DataPtr data;
    size_t bytes = 0;
    c10::DataPtr before{};  // by keep()
    ByteRanges fetched{};
  };
  /* A copy, and where in it some memory is. */
  struct Place {
    HostCopy *copy;
    size_t offset;
    char *now() const { return static_cast<char *>(copy->data.get()) + offset; }
    char *before() const { return static_cast<char *>(copy->before.get()) + offset; }
  };

  Place place(const void *memory);
  /* Copies ranges of the copy to the storage that begins at `device`, and waits. */
  void uploadPieces(char *device, const ByteRanges &pieces);

  orStream_t stream_;
  std::map<const char *, HostCopy> copies_;  // by the device's address; no two overlap
};

}  // namespace torch_openreg
