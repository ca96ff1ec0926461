/*
 * The random number generator of a device: a seed and a counter, both on the host.
 *
 * A random operator draws (seed, counter) when it is called, and its kernel starts a new sequence
 * from the pair. So the state depends only on the order of the calls: to read, set or replay it
 * involves no stream, and no two streams share any.
 */
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <memory>
#include <mutex>

#include "check.h"

namespace torch_openreg {

/* The seed and counter that generators draw from. Two generators share one after
 * graphsafe_set_state(), so it has its own mutex: a leaf. */
class OPENREG_EXPORT GeneratorState {
 public:
  struct Value {
    uint64_t seed, counter;
  };

  explicit GeneratorState(Value value) : value_(value) {}

  Value get() const;
  void set(Value value);
  /* Draws for `count` random operators and advances the counter by it. */
  Value draw(uint64_t count = 1);
  /* Returns `count` unused draws from `first` on, unless others were made since. */
  void giveBack(uint64_t first, uint64_t count);

 private:
  mutable std::mutex mutex_;
  Value value_;
};
using GeneratorStatePtr = std::shared_ptr<GeneratorState>;

class OPENREG_EXPORT OpenRegGeneratorImpl final : public c10::GeneratorImpl {
 public:
  /* Seed and counter as two little-endian 64-bit numbers. */
  static constexpr int64_t kStateBytes = sizeof(GeneratorState::Value);

  explicit OpenRegGeneratorImpl(c10::DeviceIndex index, uint64_t seed = c10::default_rng_seed_val);
  OpenRegGeneratorImpl(c10::DeviceIndex index, GeneratorStatePtr state);

  /* The state that random operators draw from. Takes mutex_. */
  GeneratorStatePtr state();

  // As with every generator of PyTorch, the caller holds mutex_ to change the state. During a
  // capture of the current stream the counter has the value that it will have in a replay
  // (graph.h), and a seed cannot be set.
  void set_current_seed(uint64_t seed) override { set({seed, 0}); }
  uint64_t current_seed() const override { return state_->get().seed; }
  uint64_t seed() override;
  /* The offset is the counter. */
  void set_offset(uint64_t offset) override { set({current_seed(), offset}); }
  uint64_t get_offset() const override { return get().counter; }
  void set_state(const c10::TensorImpl &new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  /* From here on this generator draws what `other` would have drawn, and `other` does not draw it
   * again. */
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl> &other) override;
  /* Returns another generator with the same state. */
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  OpenRegGeneratorImpl *clone_impl() const override;
  GeneratorState::Value get() const;
  void set(GeneratorState::Value value);

  GeneratorStatePtr state_;  // never null; its contents have their own mutex
};

/* The device's default generator, created at the first call. -1 is the current device. */
OPENREG_EXPORT const at::Generator &getDefaultGenerator(c10::DeviceIndex index = -1);
OPENREG_EXPORT at::Generator createGenerator(c10::DeviceIndex index = -1);

/* Seeds every default generator, including those not created yet. Uses no device. */
OPENREG_EXPORT void manualSeedAll(uint64_t seed);

}  // namespace torch_openreg
