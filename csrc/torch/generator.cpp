/*
 * The default generators are leaked, because operators may draw from them while the process exits.
 * defaultsMutex guards the list and the pending seed; it is taken before a generator's own mutex_.
 */
#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstring>
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

Defaults &defaults() { return leaked<Defaults>(); }

void checkState(const c10::TensorImpl &state) {
  TORCH_CHECK_TYPE(state.device_type() == c10::DeviceType::CPU &&
                       state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                       state.layout() == c10::Layout::Strided && state.is_contiguous(),
                   "a generator state must be a contiguous uint8 tensor on the CPU, got one of "
                   "dtype ",
                   state.dtype().name(), " on ", state.device());
  TORCH_CHECK_VALUE(state.numel() == OpenRegGeneratorImpl::kStateBytes, "a generator state of ",
                    deviceName(), " has ", OpenRegGeneratorImpl::kStateBytes, " bytes, got ",
                    state.numel());
}

}  // namespace

GeneratorState::Value GeneratorState::get() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return value_;
}

void GeneratorState::set(Value value) {
  std::lock_guard<std::mutex> lock(mutex_);
  value_ = value;
}

GeneratorState::Value GeneratorState::draw(uint64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  return {value_.seed, std::exchange(value_.counter, value_.counter + count)};
}

void GeneratorState::giveBack(uint64_t first, uint64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (value_.counter == first + count) value_.counter = first;
}

OpenRegGeneratorImpl::OpenRegGeneratorImpl(c10::DeviceIndex index, uint64_t seed)
    : OpenRegGeneratorImpl(index,
                           std::make_shared<GeneratorState>(GeneratorState::Value{seed, 0})) {}

OpenRegGeneratorImpl::OpenRegGeneratorImpl(c10::DeviceIndex index, GeneratorStatePtr state)
    : c10::GeneratorImpl(c10::Device(device_type(), index),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

GeneratorStatePtr OpenRegGeneratorImpl::state() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

GeneratorState::Value OpenRegGeneratorImpl::get() const {
  const auto [seed, counter] = state_->get();
  const auto graph = graphOfCurrentStream(device().index());
  return {seed, counter + (graph ? graph->positions(state_).position : 0)};
}

void OpenRegGeneratorImpl::set(GeneratorState::Value value) {
  if (const auto graph = graphOfCurrentStream(device().index())) {
    const auto [seed, counter] = state_->get();
    const bool known =
        value.counter >= counter && value.counter - counter <= graph->positions(state_).drawn;
    TORCH_CHECK(value.seed == seed && known, "a generator of ", device(), " cannot be set to seed ",
                value.seed, " and offset ", value.counter,
                " in a capture, because replays begin with the generator's current state: ",
                "set it to a state that was read in it (the seed is ", seed, ")");
    return graph->setPosition(state_, value.counter - counter);
  }
  state_->set(value);
}

uint64_t OpenRegGeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return current_seed();
}

void OpenRegGeneratorImpl::set_state(const c10::TensorImpl &new_state) {
  checkState(new_state);
  GeneratorState::Value value;
  std::memcpy(&value, new_state.data(), sizeof(value));
  set(value);
}

c10::intrusive_ptr<c10::TensorImpl> OpenRegGeneratorImpl::get_state() const {
  auto tensor = at::detail::empty_cpu({kStateBytes}, c10::ScalarType::Byte);
  const GeneratorState::Value value = get();
  std::memcpy(tensor.mutable_data_ptr(), &value, sizeof(value));
  return tensor.getIntrusivePtr();
}

void OpenRegGeneratorImpl::graphsafe_set_state(
    const c10::intrusive_ptr<c10::GeneratorImpl> &other) {
  TORCH_CHECK_VALUE(other->device() == device(), "a generator of ", device(),
                    " cannot take the state of one of ", other->device());
  state_ = static_cast<OpenRegGeneratorImpl &>(*other).state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> OpenRegGeneratorImpl::graphsafe_get_state() const {
  return c10::make_intrusive<OpenRegGeneratorImpl>(device().index(), state_);
}

OpenRegGeneratorImpl *OpenRegGeneratorImpl::clone_impl() const {
  return new OpenRegGeneratorImpl(device().index(), std::make_shared<GeneratorState>(get()));
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
