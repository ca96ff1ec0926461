/*
 * The C++ API of streams as the shipped headers give it, used as an extension's author does.
 * Compiled and loaded by test_cpp_api.py; runs in a process in which torch_openreg is imported.
 */
#include <torch_openreg/device.h>
#include <torch_openreg/stream.h>

#include <set>
#include <thread>

#include "expect.h"

using namespace torch_openreg;

namespace {

void pools() {
  std::set<c10::StreamId> ids;
  for (int i = 0; i < 2 * kStreamsPerPool; i++) {
    const OpenRegStream stream = getStreamFromPool(-2, 1);
    EXPECT(stream.device() == c10::Device(c10::DeviceType::PrivateUse1, 1));
    EXPECT(stream.priority() == -2);
    ids.insert(stream.id());
  }
  EXPECT(ids.size() == kStreamsPerPool && ids.count(0) == 0);
  EXPECT(ids.count(static_cast<c10::StreamId>(getDefaultOpenRegStream(1).stream())) == 0);
  EXPECT(throwsWith([] { getStreamFromPool(0, 2); }, "index 2 is out of range"));
  EXPECT(throwsWith([] { getStreamFromPool(true, -2); }, "index -2 is out of range"));
  EXPECT(getStreamFromPool(100, 0).priority() == priorityRange().least);
  EXPECT(getStreamFromPool(-100, 0).priority() == priorityRange().greatest);
  EXPECT(getStreamFromPool(true, 0).priority() == priorityRange().greatest);
  EXPECT(getStreamFromPool(false, 0).priority() == priorityRange().least);
  EXPECT(getStreamFromPool().id() != 0);
  {
    DeviceSwitch device(1);
    EXPECT(getStreamFromPool(0).device_index() == 1);
    EXPECT(getDefaultOpenRegStream().device_index() == 1);
    EXPECT(getCurrentOpenRegStream().device_index() == 1);
    EXPECT(getStreamFromPool(true).device_index() == 1);
    EXPECT(getStreamFromExternal(OR_STREAM_DEFAULT) == getDefaultOpenRegStream(1));
  }
  EXPECT(currentDevice() == 0);
}

void currentStreams() {
  const OpenRegStream standard = getDefaultOpenRegStream(1);
  EXPECT(standard.id() == 0 && getDefaultOpenRegStream(1) == standard);
  orStream_t handle = 0;
  EXPECT(orStreamGetDefault(&handle, 1) == orSuccess && handle == standard.stream());
  EXPECT(getCurrentOpenRegStream(1) == standard);
  const OpenRegStream other = getStreamFromPool(0, 1);
  setCurrentOpenRegStream(other);
  EXPECT(getCurrentOpenRegStream(0) == getDefaultOpenRegStream(0));
  EXPECT(getCurrentOpenRegStream(1) == other && currentDevice() == 0);
  std::thread([&] { EXPECT(getCurrentOpenRegStream(1) == standard); }).join();
  setCurrentOpenRegStream(standard);
  EXPECT(orStreamDestroy(handle) != orSuccess);
  // An id of another device: refused, and nothing has changed.
  const c10::Stream foreign(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, 0),
                            other.id());
  EXPECT(throwsWith([&] { setCurrentOpenRegStream(OpenRegStream(foreign)); },
                    "is a stream of openreg:1, not of openreg:0"));
  EXPECT(getCurrentOpenRegStream(0) == getDefaultOpenRegStream(0));
}

void externalStreams() {
  orStream_t handle = 0;
  {
    DeviceSwitch device(1);
    EXPECT(orStreamCreate(&handle) == orSuccess);
  }
  const OpenRegStream external = getStreamFromExternal(handle, 1);
  EXPECT(external.stream() == handle && external.query() && external.unwrap().id() != 0);
  EXPECT(orLaunchSleep(external, 1) == orSuccess);  // unwraps by itself
  external.synchronize();
  EXPECT(throwsWith([&] { getStreamFromExternal(handle, 0); }, "is a stream of openreg:1"));
  EXPECT(getStreamFromExternal(0, 1) == getDefaultOpenRegStream(1));
  const orStream_t standard = getDefaultOpenRegStream(1).stream();
  EXPECT(getStreamFromExternal(standard, 1) == getDefaultOpenRegStream(1));
  EXPECT(throwsWith([] { getStreamFromExternal(77, 0); }, "stream id 77 on openreg:0"));
  EXPECT(orStreamDestroy(handle) == orSuccess);
  EXPECT(throwsWith([&] { external.stream(); }, "does not name a live stream"));
  EXPECT(throwsWith([&] { setCurrentOpenRegStream(external); }, "does not name a live stream"));
  const c10::Stream cpu(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
  EXPECT(throwsWith([&] { OpenRegStream stream(cpu); }, "openreg device"));
}

}  // namespace

PROGRAM runStreams() { return runParts(pools, currentStreams, externalStreams); }
