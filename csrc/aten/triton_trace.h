/*
 * The bytes that a launch of a Triton kernel will access, from its trace: C++ of the same kernel
 * that tells addresses and computes nothing else. It runs at the call, on addresses of the device,
 * and reads copies of small integer tensors alone.
 */
#pragma once

#include <openreg_sanitizer.h>

#include <cstdint>
#include <vector>

#include "../../torch_openreg/_triton/record.h"
#include "compiled_kernel.h"

namespace torch_openreg {

using TraceEntry = void (*)(void *const *pointers, const int64_t *numbers, Record *record);

/* Arguments are counted among the pointers. */
class TritonTrace {
 public:
  /* `peeked`: the arguments from which the kernel loads what addresses depend on. */
  TritonTrace(const CompiledCall &call, size_t sites, const std::vector<size_t> &peeked);

  /* Runs without the GIL. */
  void run(TraceEntry entry);

  /* Whether a loop waits for other programs: not all accesses have been told. */
  bool endedEarly() const { return record_.stop != 0; }
  /* Sites that could not load what an address needs. Accesses that need it are left out. */
  std::vector<size_t> blind() const;
  /* The first access out of bounds; null: there is none. */
  const Hit *outOfBounds() const { return record_.bad != 0 ? &record_.first_bad : nullptr; }
  /* The first access that another program's may meet; null: there is none. */
  const Hit *race() const { return record_.races != 0 ? &record_.first_race : nullptr; }
  /* The other program's access. Runs the trace again; nothing but this is valid afterwards. */
  Hit partner(TraceEntry entry);
  int64_t bytesOf(size_t argument) const { return shadows_[argument].bytes; }
  const void *beginOf(size_t argument) const { return shadows_[argument].begin; }

  /* The accesses that the trace has reported. If a storage has too many strided ranges, one access
   * stands for all of them, from the first byte to the last. */
  std::vector<orMemoryAccess> accesses() const;

 private:
  struct Words {
    const char *begin;
    int64_t bytes;
    int32_t shift;
    std::vector<uint32_t> writer, reader;
    std::vector<char> host;
    void clear();
    Shadow shadow();
  };
  void addStorage(const at::Tensor &tensor, bool peeked);
  /* Record::find. */
  static int64_t find(Record *record, const char *address);
  void call(TraceEntry entry);

  const CompiledCall &call_;
  std::vector<Words> storages_;
  std::vector<Shadow> shadows_;
  std::vector<uint8_t> blind_;
  Record record_{};
};

}  // namespace torch_openreg
