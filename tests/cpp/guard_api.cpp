/*
 * Every virtual function of PyTorch's device guard, directly and through PyTorch's own guards.
 */
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch_openreg/event.h>
#include <torch_openreg/guard.h>
#include <torch_openreg/stream.h>

#include <stdexcept>
#include <thread>
#include <utility>

#include "expect.h"

using namespace torch_openreg;

namespace {

const OpenRegGuardImpl guard;
static_assert(noexcept(guard.deviceCount()));
static_assert(noexcept(guard.uncheckedSetDevice(std::declval<c10::Device &>())));

c10::Device at(int index) {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}
const c10::Device cpu(c10::DeviceType::CPU);

/* An event that holds streams until it is opened. */
class Gate {
 public:
  explicit Gate(const OpenRegStream &stream) : event_(stream.device_index(), orEventExternal) {
    OPENREG_CHECK(orStreamWaitEvent(stream, event_.get()));
  }
  ~Gate() { open(); }
  void open() {
    if (!opened_) orEventSignal(event_.get(), orSuccess);
    opened_ = true;
  }

 private:
  OwnedEvent event_;
  bool opened_ = false;
};

void devices() {
  EXPECT(guard.type() == c10::DeviceType::PrivateUse1 && guard.deviceCount() == 2);
  EXPECT(guard.exchangeDevice(at(1)).index() == 0 && guard.getDevice() == at(1));
  std::thread([] { EXPECT(guard.getDevice() == at(0)); }).join();
  guard.uncheckedSetDevice(at(0));
  guard.uncheckedSetDevice(at(9));
  guard.uncheckedSetDevice(at(-1));
  guard.setDevice(at(-1));
  EXPECT(guard.getDevice() == at(0));
  EXPECT(throwsWith([] { guard.setDevice(at(2)); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { guard.setDevice(cpu); }, "got cpu"));
  EXPECT(throwsWith([] { guard.exchangeDevice(cpu); }, "got cpu"));
  EXPECT(throwsWith([] { guard.synchronizeDevice(7); }, "index 7 is out of range"));
  EXPECT(throwsWith([] { guard.getDeviceCapability(at(3)); }, "index 3 is out of range"));
  EXPECT(throwsWith([] { guard.getDeviceCapability(cpu); }, "got cpu"));
  const c10::DeviceCapability all;
  EXPECT(guard.getDeviceCapability(at(1)).capability_data.capability_bits ==
         all.capability_data.capability_bits);
  EXPECT(guard.getDevice() == at(0));
}

void streams() {
  const c10::Stream stream = guard.getNewStream(at(1), -1);
  EXPECT(stream.device() == at(1) && OpenRegStream(stream).priority() == -1);
  EXPECT(guard.getNewStream(at(-1), 0).device() == at(0));  // the current device
  EXPECT(guard.getStreamFromGlobalPool(at(1), true).device() == at(1));
  EXPECT(guard.getStreamFromGlobalPool(at(1), false) != guard.getDefaultStream(at(1)));
  EXPECT(guard.exchangeStream(stream) == guard.getDefaultStream(at(1)));
  EXPECT(guard.getStream(at(1)) == stream && guard.getDevice() == at(0));
  EXPECT(guard.exchangeStream(guard.getDefaultStream(at(1))) == stream);
  orStream_t handle = OpenRegStream(stream).stream();
  EXPECT(guard.getStreamNativeHandle(stream) == reinterpret_cast<void *>(handle));
  EXPECT(stream.native_handle() == reinterpret_cast<void *>(handle));
  EXPECT(guard.getStreamNativeHandle(guard.getDefaultStream(at(1))) != nullptr);
  EXPECT(!guard.isStreamCapturing(stream));
  Gate gate{OpenRegStream(stream)};
  EXPECT(!guard.queryStream(stream) && guard.queryStream(guard.getDefaultStream(at(1))));
  gate.open();
  guard.synchronizeStream(stream);
  EXPECT(guard.queryStream(stream));
}

void badStreams() {
  const c10::Stream host(c10::Stream::DEFAULT, cpu);
  const c10::Stream unknown(c10::Stream::UNSAFE, at(1), 4711);
  const c10::Stream nowhere(c10::Stream::UNSAFE, at(5), 0);
  c10::DataPtr data = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(64);
  OwnedEvent event(1, orEventDefault);
  const auto expectRefusals = [&](const c10::Stream &stream, const char *text) {
    void *null = nullptr;
    EXPECT(throwsWith([&] { guard.exchangeStream(stream); }, text));
    EXPECT(throwsWith([&] { guard.getStreamNativeHandle(stream); }, text));
    EXPECT(throwsWith([&] { guard.queryStream(stream); }, text));
    EXPECT(throwsWith([&] { guard.synchronizeStream(stream); }, text));
    EXPECT(throwsWith([&] { guard.isStreamCapturing(stream); }, text));
    EXPECT(throwsWith([&] { guard.recordDataPtrOnStream(data, stream); }, text));
    EXPECT(throwsWith([&] { guard.block(eventPointer(event.get()), stream); }, text));
    EXPECT(throwsWith([&] { guard.record(&null, stream, -1, c10::EventFlag::BACKEND_DEFAULT); },
                      text));
    EXPECT(null == nullptr);
  };
  expectRefusals(host, "got one of cpu");
  expectRefusals(unknown, "4711 on openreg:1 does not name a live stream");
  expectRefusals(nowhere, "index 5 is out of range");
  EXPECT(throwsWith([] { guard.getStream(at(2)); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { guard.getDefaultStream(at(2)); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { guard.getNewStream(at(2), 0); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { guard.getStreamFromGlobalPool(at(2), true); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { guard.getNewStream(cpu, 0); }, "got cpu"));
  EXPECT(throwsWith([] { guard.getStreamFromGlobalPool(cpu, false); }, "got cpu"));
  EXPECT(throwsWith([] { guard.getStream(cpu); }, "got cpu"));
  EXPECT(throwsWith([] { guard.getDefaultStream(cpu); }, "got cpu"));
  EXPECT(guard.getDevice() == at(0) && guard.getStream(at(1)) == guard.getDefaultStream(at(1)));
}

void events() {
  const c10::Stream stream = guard.getNewStream(at(1), 0), other = guard.getNewStream(at(0), 0);
  void *event = nullptr, *untimed = nullptr;
  guard.destroyEvent(event, 1);
  guard.block(event, other);
  guard.synchronizeEvent(event);
  EXPECT(guard.queryEvent(event) && guard.queryStream(other));
  EXPECT(throwsWith([&] { guard.record(&event, stream, 0, c10::EventFlag::PYTORCH_DEFAULT); },
                    "belongs to openreg:0"));
  EXPECT(throwsWith([&] { guard.record(&event, stream, -1, c10::EventFlag::INVALID); }, "flag"));
  EXPECT(event == nullptr && guard.getDevice() == at(0));
  EXPECT(
      throwsWith([&] { guard.elapsedTime(event, event, 1); }, "start event has not been recorded"));
  guard.record(&untimed, stream, 1, c10::EventFlag::PYTORCH_DEFAULT);
  Gate gate{OpenRegStream(stream)};
  guard.record(&event, stream, -1, c10::EventFlag::BACKEND_DEFAULT);
  guard.block(event, other);
  EXPECT(!guard.queryEvent(event) && !guard.queryStream(other));
  EXPECT(
      throwsWith([&] { guard.elapsedTime(event, nullptr, 1); }, "end event has not been recorded"));
  EXPECT(throwsWith([&] { guard.elapsedTime(untimed, event, 1); },
                    "start event was created without timing"));
  EXPECT(throwsWith([&] { guard.elapsedTime(event, event, 1); }, "not finished"));
  EXPECT(throwsWith([&] { guard.record(&event, other, -1, c10::EventFlag::BACKEND_DEFAULT); },
                    "event of device 1 cannot be recorded on a stream of device 0"));
  gate.open();
  guard.synchronizeEvent(event);
  guard.synchronizeStream(other);
  EXPECT(guard.queryEvent(event) && guard.elapsedTime(event, event, 1) == 0);
  guard.destroyEvent(event, 1);
  guard.destroyEvent(event, 1);  // of a dead event: noexcept, and nothing happens
  guard.destroyEvent(untimed, 1);
  EXPECT(throwsWith([&] { guard.queryEvent(event); }, "not a live event"));
  EXPECT(orPeekAtLastError() == orSuccess && guard.getDevice() == at(0));
}

orError_t failingKernel(void *) { return orErrorInvalidValue; }

void failOn(const c10::Stream &stream) {
  orLaunch launch{};
  launch.size = sizeof launch;
  launch.stream = OpenRegStream(stream).stream();
  launch.fn = failingKernel;
  launch.name = "failing";
  OPENREG_CHECK(orLaunchKernelEx(&launch));
}

/* Without an index a device is the calling thread's current one. */
void currentDevices() {
  DeviceSwitch device(1);
  EXPECT(guard.exchangeDevice(at(-1)) == at(1) && guard.getDevice() == at(1));
  guard.setDevice(at(-1));
  guard.uncheckedSetDevice(at(-1));
  guard.getDeviceCapability(at(-1));
  EXPECT(guard.getDevice() == at(1));
  EXPECT(guard.getStream(at(-1)) == guard.getStream(at(1)));
  EXPECT(guard.getDefaultStream(at(-1)) == guard.getDefaultStream(at(1)));
  EXPECT(guard.getNewStream(at(-1), -1).device() == at(1));
  EXPECT(guard.getStreamFromGlobalPool(at(-1), true).device() == at(1));
  failOn(guard.getDefaultStream(at(1)));
  EXPECT(throwsWith([] { guard.synchronizeDevice(-1); }, "failing"));
  {
    c10::DeviceGuard unchanged(at(-1));
    EXPECT(guard.getDevice() == at(1));
  }
  EXPECT(getStreamFromPool(0, -1).device() == at(1) &&
         getStreamFromPool(true, -1).device() == at(1));
  EXPECT(getDefaultOpenRegStream(-1).device() == at(1));
  EXPECT(getStreamFromExternal(OR_STREAM_DEFAULT, -1).device() == at(1));
}

/* So is that of a stream. */
void currentDevicesOfStreams() {
  DeviceSwitch device(1);
  const c10::Stream stream = guard.getNewStream(at(1), 0);
  const c10::Stream same(c10::Stream::UNSAFE, at(-1), stream.id());
  const c10::Stream standard(c10::Stream::DEFAULT, at(-1));
  EXPECT(OpenRegStream(same) == OpenRegStream(stream));
  EXPECT(OpenRegStream(standard) == getDefaultOpenRegStream(1));
  EXPECT(guard.exchangeStream(same) == guard.getDefaultStream(at(1)));
  EXPECT(guard.getStream(at(1)) == stream && getCurrentOpenRegStream(-1) == OpenRegStream(stream));
  EXPECT(guard.exchangeStream(standard) == stream);
  setCurrentOpenRegStream(OpenRegStream(same));
  EXPECT(guard.exchangeStream(standard) == stream);
  EXPECT(guard.getStreamNativeHandle(same) == guard.getStreamNativeHandle(stream));
  EXPECT(!guard.isStreamCapturing(same));
  Gate gate{OpenRegStream(stream)};
  EXPECT(!guard.queryStream(same) && guard.queryStream(standard));
  void *event = nullptr, *second = nullptr;
  guard.record(&event, same, -1, c10::EventFlag::BACKEND_DEFAULT);
  guard.record(&second, same, 1, c10::EventFlag::BACKEND_DEFAULT);
  EXPECT(throwsWith([&] { guard.record(&event, same, 0, c10::EventFlag::BACKEND_DEFAULT); },
                    "cannot be recorded on a stream of openreg:1"));
  guard.block(event, standard);
  EXPECT(!guard.queryEvent(event) && !guard.queryStream(guard.getDefaultStream(at(1))));
  gate.open();
  guard.synchronizeStream(same);
  guard.synchronizeEvent(second);
  EXPECT(guard.queryEvent(event) && guard.elapsedTime(event, second, -1) >= 0);
  guard.destroyEvent(event, -1);
  guard.destroyEvent(second, -1);
  EXPECT(throwsWith([&] { guard.queryEvent(event); }, "not a live event"));
}

/* A block that another stream was recorded for is not handed out again while that stream is
 * busy. */
void recordedBlocks() {
  DeviceSwitch device(1);
  constexpr size_t kBytes = 3 << 20;
  c10::Allocator *allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  const c10::Stream stream = guard.getNewStream(at(1), 0);
  const c10::Stream same(c10::Stream::UNSAFE, at(-1), stream.id());
  guard.recordDataPtrOnStream(c10::DataPtr(), stream);
  for (bool recorded : {false, true}) {
    c10::DataPtr data = allocator->allocate(kBytes);
    const void *address = data.get();
    Gate gate{OpenRegStream(stream)};
    if (recorded) guard.recordDataPtrOnStream(data, same);
    data.clear();
    EXPECT((allocator->allocate(kBytes).get() == address) == !recorded);
    gate.open();
    guard.synchronizeStream(stream);
  }
}

/* Whatever switches the device gives it back when it throws. */
void restoring() {
  failOn(guard.getDefaultStream(at(1)));
  EXPECT(throwsWith([] { guard.synchronizeDevice(1); }, "failing"));
  EXPECT(guard.getDevice() == at(0));
  EXPECT(throwsWith(
      [] {
        DeviceSwitch device(1);
        TORCH_CHECK(false, "inside");
      },
      "inside"));
  EXPECT(throwsWith(
      [] {
        c10::DeviceGuard device(at(1));
        TORCH_CHECK(false, "inside");
      },
      "inside"));
  EXPECT(throwsWith(
      [] {
        c10::OptionalDeviceGuard device(at(1));
        guard.setDevice(at(4));
      },
      "index 4 is out of range"));
  EXPECT(guard.getDevice() == at(0));
  EXPECT(throwsWith([] { c10::DeviceGuard device(at(2)); }, "index 2 is out of range"));
  const c10::Stream stream = guard.getNewStream(at(1), 0), before = guard.getStream(at(1));
  try {
    c10::StreamGuard both(stream);
    EXPECT(guard.getDevice() == at(1) && guard.getStream(at(1)) == stream);
    EXPECT(getCurrentOpenRegStream() == OpenRegStream(stream));
    throw std::runtime_error("inside");
  } catch (const std::runtime_error &) {
  }
  EXPECT(guard.getDevice() == at(0) && guard.getStream(at(1)) == before);
  {
    const c10::Stream mine = guard.getNewStream(at(0), 0);
    c10::MultiStreamGuard streams({mine, stream});
    EXPECT(guard.getStream(at(0)) == mine && guard.getStream(at(1)) == stream);
  }
  EXPECT(guard.getStream(at(0)) == guard.getDefaultStream(at(0)));
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(stream);
  EXPECT(throwsWith([&] { event.record(guard.getDefaultStream(at(0))); }, "openreg:0"));
  event.block(guard.getDefaultStream(at(0)));
  event.synchronize();
  EXPECT(guard.getDevice() == at(0));
}

template <typename F>
bool refused(F &&call) {
  try {
    call();
    return false;
  } catch (const c10::Error &error) {
    return std::string(error.what_without_backtrace()).find("orError") == 0;
  }
}

/* Every call that uses a device says why it cannot; none of those that may not throw does. */
void refusals() {
  EXPECT(guard.deviceCount() == torch_openreg::deviceCount());
  guard.uncheckedSetDevice(at(0));
  guard.destroyEvent(nullptr, 0);
  EXPECT(refused([] { guard.setDevice(at(0)); }));
  EXPECT(refused([] { guard.exchangeDevice(at(0)); }));
  EXPECT(refused([] { guard.getNewStream(at(0), 0); }));
  EXPECT(refused([] { guard.synchronizeDevice(0); }));
  EXPECT(refused([] { OwnedEvent event(0, orEventDefault); }));
  EXPECT(orPeekAtLastError() == orSuccess);
}

void withoutDevices() {
  EXPECT(guard.deviceCount() == 0);
  EXPECT(refused([] { checkedDeviceCount(); }));
  EXPECT(refused([] { guard.getDefaultStream(at(0)); }));
  EXPECT(refused([] { getDefaultOpenRegStream(0); }));
}

}  // namespace

PROGRAM runGuard() {
  return runParts(devices, currentDevices, streams, currentDevicesOfStreams, badStreams, events,
                  recordedBlocks, restoring);
}
/* The core cannot start. */
PROGRAM runWithoutDevices() { return runParts(withoutDevices, refusals); }
/* A forked child, which may not use it. */
PROGRAM runInChild() { return runParts(refusals); }
