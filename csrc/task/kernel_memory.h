/*
 * Memory that a task uses, by value. A task holds no storage. The order of its stream keeps memory
 * alive, as on any device, and a worker never drops the last reference to a Python object.
 */
#pragma once

#include <c10/core/StorageImpl.h>

#include <openreg.h>

#include <cstddef>

#include "../torch/check.h"

namespace torch_openreg {

/* A range of device memory; or, with 0 bytes, host memory, which kernels access at its own address;
 * or none. */
struct KernelMemory {
  KernelMemory() = default;
  KernelMemory(const void *device, size_t size)
      : data(size == 0 ? nullptr : const_cast<void *>(device)), bytes(data == nullptr ? 0 : size) {}
  explicit KernelMemory(c10::StorageImpl &storage)
      : KernelMemory(storage._mutable_data_ptr_no_checks().get(), storage.nbytes()) {}
  static KernelMemory ofHost(const void *address) {
    KernelMemory memory;
    memory.data = const_cast<void *>(address);
    return memory;
  }

  bool isOnDevice() const { return bytes != 0; }
  /* The address for kernels; null without memory. Valid only inside a task. */
  void *address() const {
    void *address = data;
    if (isOnDevice()) OPENREG_CHECK(orMapForKernel(&address, data, bytes));
    return address;
  }

  void *data = nullptr;
  size_t bytes = 0;
};

}  // namespace torch_openreg
