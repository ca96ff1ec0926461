/*
 * The random number generator of a device: a seed and a counter, both on the host.
 *
 * A random operator draws (seed, counter) when it is called and its kernel makes a fresh sequence
 * from the pair. So the state belongs to the order of the calls alone: reading, setting and
 * replaying it touches no stream, and no two streams share any.
 */
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <utility>

#include "check.h"

namespace torch_openreg {

class OPENREG_EXPORT OpenRegGeneratorImpl final : public c10::GeneratorImpl {
 public:
  /* Seed and counter as two little-endian 64-bit numbers. */
  static constexpr int64_t kStateBytes = 16;

  explicit OpenRegGeneratorImpl(c10::DeviceIndex index, uint64_t seed = c10::default_rng_seed_val);

  /* (seed, counter) for `count` random operators, by which the counter advances. Takes mutex_. */
  std::pair<uint64_t, uint64_t> draw(uint64_t count = 1);
  /* `count` draws from `first` on, which nobody has used, unless others were made since. Takes mutex_. */
  void giveBack(uint64_t first, uint64_t count);

  // As with every generator of PyTorch, the caller holds mutex_ for what changes the state. While the current stream
  // is being captured the counter is what it will be in a replay (graph.h), and a seed cannot be set.
  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  /* The counter. */
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  void set_state(const c10::TensorImpl &new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  OpenRegGeneratorImpl *clone_impl() const override;
  void set(uint64_t seed, uint64_t counter);

  uint64_t seed_;
  uint64_t counter_ = 0;
};

/* The device's default generator, made when it is first asked for. -1 is the current device. */
OPENREG_EXPORT const at::Generator &getDefaultGenerator(c10::DeviceIndex index = -1);
OPENREG_EXPORT at::Generator createGenerator(c10::DeviceIndex index = -1);

/* Seeds every default generator, also those not made yet. No use of any device. */
OPENREG_EXPORT void manualSeedAll(uint64_t seed);

}  // namespace torch_openreg
