/*
 * The default generators are leaked: operators may draw from them while the process exits.
 * defaultsMutex guards the list and the pending seed; it is taken before a generator's own mutex_.
 */
#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "device.h"
#include "graph.h"

namespace torch_openreg {

namespace {

struct Defaults {
  std::mutex mutex;
  std::optional<uint64_t> pendingSeed;
  std::array<at::Generator, OPENREG_MAX_DEVICES> generators;
};

Defaults &defaults() {
  static auto *instance = new Defaults();
  return *instance;
}

struct State {
  uint64_t seed;
  uint64_t counter;
};
static_assert(sizeof(State) == OpenRegGeneratorImpl::kStateBytes);

void checkState(const c10::TensorImpl &state) {
  TORCH_CHECK_TYPE(state.device_type() == c10::DeviceType::CPU &&
                       state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                       state.layout() == c10::Layout::Strided && state.is_contiguous(),
                   "a generator state must be a contiguous uint8 tensor on the CPU, got one of "
                   "dtype ",
                   state.dtype().name(), " on ", state.device());
  TORCH_CHECK_VALUE(state.numel() == OpenRegGeneratorImpl::kStateBytes,
                    "an openreg generator state has ", OpenRegGeneratorImpl::kStateBytes,
                    " bytes, got ", state.numel());
}

}  // namespace

OpenRegGeneratorImpl::OpenRegGeneratorImpl(c10::DeviceIndex index, uint64_t seed)
    : c10::GeneratorImpl(c10::Device(device_type(), index),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      seed_(seed) {}

std::pair<uint64_t, uint64_t> OpenRegGeneratorImpl::draw(uint64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  return {seed_, std::exchange(counter_, counter_ + count)};
}

void OpenRegGeneratorImpl::giveBack(uint64_t first, uint64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (counter_ == first + count) counter_ = first;
}

void OpenRegGeneratorImpl::set(uint64_t seed, uint64_t counter) {
  if (const auto graph = graphOfCurrentStream(device().index())) {
    TORCH_CHECK(seed == seed_ && counter >= counter_, "a generator of ", device(),
                " cannot be set to seed ", seed, " and offset ", counter,
                " in a capture, where replays draw from what they find: ",
                "only to a state that was read in it (the seed is ", seed_, ")");
    return graph->setPosition(
        at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(this)),
        counter - counter_);
  }
  seed_ = seed;
  counter_ = counter;
}

void OpenRegGeneratorImpl::set_current_seed(uint64_t seed) { set(seed, 0); }

uint64_t OpenRegGeneratorImpl::current_seed() const { return seed_; }

uint64_t OpenRegGeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void OpenRegGeneratorImpl::set_offset(uint64_t offset) { set(seed_, offset); }

uint64_t OpenRegGeneratorImpl::get_offset() const {
  const auto graph = graphOfCurrentStream(device().index());
  return graph ? counter_ + graph->position(this) : counter_;
}

void OpenRegGeneratorImpl::set_state(const c10::TensorImpl &new_state) {
  checkState(new_state);
  State state;
  std::memcpy(&state, new_state.data(), sizeof(state));
  set(state.seed, state.counter);
}

c10::intrusive_ptr<c10::TensorImpl> OpenRegGeneratorImpl::get_state() const {
  auto tensor = at::detail::empty_cpu({kStateBytes}, c10::ScalarType::Byte);
  const State state{seed_, get_offset()};
  std::memcpy(tensor.mutable_data_ptr(), &state, sizeof(state));
  return tensor.getIntrusivePtr();
}

OpenRegGeneratorImpl *OpenRegGeneratorImpl::clone_impl() const {
  auto *copy = new OpenRegGeneratorImpl(device().index(), seed_);
  copy->counter_ = get_offset();
  return copy;
}

const at::Generator &getDefaultGenerator(c10::DeviceIndex index) {
  const c10::DeviceIndex device = indexOrCurrent(index);
  Defaults &all = defaults();
  std::lock_guard<std::mutex> lock(all.mutex);
  at::Generator &generator = all.generators[device];
  if (!generator.defined()) {
    generator = at::make_generator<OpenRegGeneratorImpl>(
        device, all.pendingSeed.value_or(c10::default_rng_seed_val));
  }
  return generator;
}

at::Generator createGenerator(c10::DeviceIndex index) {
  return at::make_generator<OpenRegGeneratorImpl>(indexOrCurrent(index));
}

void manualSeedAll(uint64_t seed) {
  Defaults &all = defaults();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (at::Generator &generator : all.generators) {
    if (!generator.defined()) continue;
    std::lock_guard<std::mutex> own(generator.mutex());
    generator.set_current_seed(seed);
  }
  all.pendingSeed = seed;
}

}  // namespace torch_openreg
