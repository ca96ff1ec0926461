/*
 * A CpuAliases belongs to one call. The worker and the caller use it in turns, never together: the
 * caller waits while the task runs.
 */
#include "cpu_alias.h"

#include <c10/core/TensorImpl.h>

#include <cstring>

#include "../torch/allocator.h"
#include "../torch/device.h"
#include "../torch/host_access.h"
#include "cpu_memory.h"
#include "kernel_memory.h"

namespace torch_openreg {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

void copyLayout(TensorImpl *to, const at::Tensor &from) {
  to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

void copyBits(const at::Tensor &to, const at::Tensor &from) {
  if (to.is_conj() != from.is_conj()) to._set_conj(from.is_conj());
  if (to.is_neg() != from.is_neg()) to._set_neg(from.is_neg());
}

bool sameLayout(const at::Tensor &a, const at::Tensor &b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace

void shareVersion(const at::Tensor &to, const at::Tensor &from) {
  if (to.is_inference() || from.is_inference()) return;
  to.unsafeGetTensorImpl()->set_version_counter(from.unsafeGetTensorImpl()->version_counter());
}

c10::Storage &CpuAliases::cpuStorage(const at::Tensor &tensor) {
  const c10::Storage &storage = tensor.storage();
  StorageImpl *impl = storage.unsafeGetStorageImpl();
  if (Shared *known = shared_.find(impl)) return known->cpu;
  void *address = copies_ ? copies_->find(impl->data()) : KernelMemory(*impl).address();
  c10::Storage cpu = torch_openreg::cpuStorage(address, impl->nbytes(), impl->resizable());
  toDevice_.add(cpu.unsafeGetStorageImpl(), storage);
  return shared_.add(impl, Shared{storage, std::move(cpu), address, tensor.scalar_type()}).cpu;
}

at::Tensor CpuAliases::ofComponents(const at::Tensor &tensor) {
  Components parts = componentsOf(tensor);
  for (at::Tensor &part : parts) part = of(part);
  return assemble(tensor, parts);
}

at::Tensor CpuAliases::of(const at::Tensor &tensor) {
  if (Alias *known = aliases_.find(tensor.unsafeGetTensorImpl())) return known->cpu;
  at::Tensor cpu = isPlain(tensor) ? tensorOf(cpuStorage(tensor), DispatchKey::CPU,
                                              metadataOf(tensor), tensor.storage_offset())
                                   : ofComponents(tensor);
  if (sharesVersions_) shareVersion(cpu, tensor);
  callers_.add(cpu.unsafeGetTensorImpl(), tensor);
  aliases_.add(tensor.unsafeGetTensorImpl(), Alias{tensor, cpu});
  return cpu;
}

void CpuAliases::passed(const at::Tensor &cpu) {
  if (cpu.has_storage()) passed_.add(cpu.storage().unsafeGetStorageImpl(), true);
}

c10::DataPtr CpuAliases::deviceMemory(StorageImpl *cpu, c10::ScalarType dtype) {
  c10::DataPtr &from = cpu->_mutable_data_ptr_no_checks();
  const size_t bytes = cpu->nbytes();
  if (from.get() == nullptr || bytes == 0) return ownBlock(nullptr, device_);
  if (c10::DataPtr taken = takeWorkerMemory(from)) return taken;
  describeNextBlock(dtype);
  c10::DataPtr copy = ownBlock(allocateBlock(bytes, stream_, device_), device_);
  if (copies_ != nullptr)
    copies_->upload(copy.get(), from.get(), bytes);
  else
    std::memcpy(KernelMemory(copy.get(), bytes).address(), from.get(), bytes);
  return copy;
}

/* A resized alias has what its copy contained. Of a storage with other tensors that is a part. */
void CpuAliases::fetchRest(const StorageImpl &device, StorageImpl *cpu) {
  ByteRanges written;
  for (auto &[impl, alias] : aliases_) {
    const at::Tensor &tensor = alias.cpu;
    if (!isPlain(tensor) || tensor.storage().unsafeGetStorageImpl() != cpu || tensor.numel() == 0)
      continue;
    written.add(bytesBefore(tensor), bytesNeeded(tensor));
  }
  copies_->fetchRest(device, static_cast<char *>(cpu->mutable_data()), cpu->nbytes(), written);
}

void CpuAliases::adoptResized() {
  for (auto &[impl, shared] : shared_) {
    StorageImpl *cpu = shared.cpu.unsafeGetStorageImpl();
    if (cpu->data() == shared.address) continue;
    StorageImpl *device = shared.device.unsafeGetStorageImpl();
    const size_t bytes = cpu->nbytes();
    if (copies_ != nullptr) fetchRest(*device, cpu);
    device->set_data_ptr_noswap(deviceMemory(cpu, shared.dtype));
    device->set_nbytes(bytes);
  }
  // An operator may also have given an alias an entirely different storage.
  for (auto &[impl, alias] : aliases_) adoptResult(alias.cpu);
}

void CpuAliases::adoptResult(const at::Tensor &result) {
  if (!result.defined()) return;
  if (!isPlain(result)) {
    for (const at::Tensor &part : componentsOf(result)) adoptResult(part);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided && result.has_storage(),
                              "a result with layout ", result.layout(), " is not supported on ",
                              deviceName());
  StorageImpl *cpu = result.storage().unsafeGetStorageImpl();
  if (toDevice_.find(cpu) != nullptr || passed_.find(cpu) != nullptr) return;
  const size_t bytes = cpu->nbytes();
  toDevice_.add(cpu, c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                                  deviceMemory(cpu, result.scalar_type()), &deviceAllocator(),
                                  /*resizable=*/true));
}

void CpuAliases::writeBack(const at::Tensor &caller) {
  const Alias *alias = aliases_.find(caller.unsafeGetTensorImpl());
  if (alias == nullptr) return;
  const at::Tensor &cpu = alias->cpu;
  for (const at::Tensor &part : isPlain(cpu) ? Components{cpu} : componentsOf(cpu)) {
    const c10::Storage *storage = toDevice_.find(part.storage().unsafeGetStorageImpl());
    const Shared *shared = shared_.find(storage->unsafeGetStorageImpl());
    if (shared == nullptr || part.storage().data() != shared->address) continue;
    copies_->writeBack(
        tensorOf(*storage, DispatchKey::PrivateUse1, metadataOf(part), part.storage_offset()));
  }
}

bool CpuAliases::hasSameComponents(const Alias &alias) {
  const Components before = componentsOf(alias.caller), now = componentsOf(alias.cpu);
  if (before.size() != now.size()) return false;
  for (size_t i = 0; i < now.size(); ++i) {
    const c10::Storage *storage = toDevice_.find(now[i].storage().unsafeGetStorageImpl());
    const bool same = storage != nullptr && before[i].storage().is_alias_of(*storage) &&
                      before[i].dtype() == now[i].dtype() && sameLayout(before[i], now[i]);
    if (!same) return false;
  }
  return isDescribedAs(alias.caller, alias.cpu);
}

Components CpuAliases::componentsToCaller(const at::Tensor &cpu) {
  Components parts = componentsOf(cpu);
  for (at::Tensor &part : parts) part = toCaller(part);
  return parts;
}

void CpuAliases::updateCallers() {
  for (auto &[impl, alias] : aliases_) {
    if (!isPlain(alias.caller)) {
      // Other threads may read the caller's tensor meanwhile: only what the kernel has written is
      // modified.
      if (!hasSameComponents(alias))
        reassemble(alias.caller, alias.cpu, componentsToCaller(alias.cpu));
      continue;
    }
    TensorImpl *caller = alias.caller.unsafeGetTensorImpl();
    const c10::Storage &storage = *toDevice_.find(alias.cpu.storage().unsafeGetStorageImpl());
    if (!alias.caller.storage().is_alias_of(storage)) {
      caller->set_storage_keep_dtype(c10::Storage(storage));
    }
    if (!sameLayout(alias.caller, alias.cpu)) copyLayout(caller, alias.cpu);
    copyBits(alias.caller, alias.cpu);
  }
}

at::Tensor CpuAliases::toCaller(const at::Tensor &result) {
  if (!result.defined()) return result;
  if (at::Tensor *caller = callers_.find(result.unsafeGetTensorImpl())) return *caller;
  if (!isPlain(result)) return assemble(result, componentsToCaller(result));
  StorageImpl *cpu = result.storage().unsafeGetStorageImpl();
  const c10::Storage *storage = toDevice_.find(cpu);
  if (storage == nullptr) return result;  // a CPU tensor that was passed through
  at::Tensor tensor;
  if (shared_.find(storage->unsafeGetStorageImpl()) != nullptr) {
    tensor = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(*storage),
                                                 viewKeys(*storage), result.dtype());
    if (sharesVersions_) shareVersion(tensor, result);
  } else {
    tensor = at::detail::make_tensor<TensorImpl>(
        c10::Storage(*storage), DispatchKeySet(DispatchKey::PrivateUse1), result.dtype());
  }
  copyLayout(tensor.unsafeGetTensorImpl(), result);
  copyBits(tensor, result);
  return tensor;
}

/* A view is an inference tensor exactly if its base is one, as its keys show. */
c10::DispatchKeySet CpuAliases::viewKeys(const c10::Storage &storage) {
  for (auto &[impl, alias] : aliases_) {
    if (isPlain(alias.caller) && alias.caller.storage().is_alias_of(storage))
      return alias.caller.key_set();
  }
  return DispatchKeySet(DispatchKey::PrivateUse1);
}

}  // namespace torch_openreg
