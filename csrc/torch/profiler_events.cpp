/*
 * torch.autograd.profiler.profile(use_device="openreg") without Kineto: records an event on the
 * current stream before and after each operator. It is cruder than the trace (profiler.cpp): it
 * gives the stream's time between the two.
 */
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "device.h"
#include "event.h"
#include "sanitizer.h"
#include "stream.h"

namespace torch_openreg {

namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

orEvent_t handleOf(const ProfilerVoidEventStub *event) {
  return static_cast<const OwnedEvent *>(event->get())->get();
}

struct OpenRegStubs final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex *device, ProfilerVoidEventStub *event,
              int64_t *cpu_ns) const override {
    const OpenRegStream stream = getCurrentOpenRegStream();
    auto recorded = std::make_shared<OwnedEvent>(stream.device_index(), orEventDefault);
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
    OPENREG_CHECK(orEventRecord(recorded->get(), stream.stream()));
    if (device != nullptr) *device = stream.device_index();
    *event = std::move(recorded);
  }

  /* Microseconds. */
  float elapsed(const ProfilerVoidEventStub *from, const ProfilerVoidEventStub *to) const override {
    const OwnWait own;
    float milliseconds = 0;
    OPENREG_CHECK(orEventSynchronize(handleOf(from)));
    OPENREG_CHECK(orEventSynchronize(handleOf(to)));
    OPENREG_CHECK(orEventElapsedTime(&milliseconds, handleOf(from), handleOf(to)));
    return milliseconds * 1000;
  }

  void onEachDevice(std::function<void(int)> op) const override {
    for (c10::DeviceIndex index = 0; index < deviceCount(); ++index) {
      const DeviceSwitch device(index);
      op(index);
    }
  }

  void synchronize() const override {
    const OwnWait own;
    OPENREG_CHECK(orDeviceSynchronize());
  }
  bool enabled() const override { return true; }
  // These are for tools of other devices, such as NVIDIA's.
  void mark(const char *) const override {}
  void rangePush(const char *) const override {}
  void rangePop() const override {}
};

[[maybe_unused]] const bool registered = [] {
  torch::profiler::impl::registerPrivateUse1Methods(new OpenRegStubs());
  return true;
}();

}  // namespace

}  // namespace torch_openreg
