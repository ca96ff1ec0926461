/*
 * A program of its own author's: the C++ API of streams as the shipped headers give it. Compiled and
 * loaded by test_cpp_api.py; runs in a process in which torch_openreg is imported.
 */
#include <torch_openreg/device.h>
#include <torch_openreg/guard.h>
#include <torch_openreg/stream.h>

#include <cstdio>
#include <set>
#include <string>
#include <thread>

using namespace torch_openreg;

namespace {

int failures = 0;

void expect(bool ok, const char *what, int line) {
  if (ok) return;
  std::printf("line %d: %s\n", line, what);
  failures++;
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)

template <typename F>
bool throwsWith(F &&f, const std::string &text) {
  try {
    f();
  } catch (const c10::Error &error) {
    const std::string message = error.what_without_backtrace();
    if (message.find(text) != std::string::npos) return true;
    std::printf("unexpected text: %s\n", message.c_str());
  }
  return false;
}

void pools() {
  std::set<c10::StreamId> ids;
  for (int i = 0; i < 2 * kStreamsPerPool; i++) {
    const OpenRegStream stream = getStreamFromPool(-2, 1);
    EXPECT(stream.device() == c10::Device(c10::DeviceType::PrivateUse1, 1));
    EXPECT(stream.priority() == -2);
    ids.insert(stream.id());
  }
  EXPECT(ids.size() == kStreamsPerPool && ids.count(0) == 0);
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
  }
  EXPECT(currentDevice() == 0);
}

void currentStreams() {
  const OpenRegStream standard = getDefaultOpenRegStream(1);
  orStream_t handle = 0;
  EXPECT(orStreamGetDefault(&handle, 1) == orSuccess && handle == standard.stream());
  EXPECT(getCurrentOpenRegStream(1) == standard);
  const OpenRegStream other = getStreamFromPool(0, 1);
  setCurrentOpenRegStream(other);
  EXPECT(getCurrentOpenRegStream(1) == other && currentDevice() == 0);
  std::thread([&] { EXPECT(getCurrentOpenRegStream(1) == standard); }).join();
  setCurrentOpenRegStream(standard);
  EXPECT(orStreamDestroy(handle) != orSuccess);
}

void externalStreams() {
  orStream_t handle = 0;
  {
    DeviceSwitch device(1);
    EXPECT(orStreamCreate(&handle) == orSuccess);
  }
  const OpenRegStream external = getStreamFromExternal(handle, 1);
  EXPECT(external.stream() == handle && external.query());
  EXPECT(throwsWith([&] { getStreamFromExternal(handle, 0); }, "is a stream of openreg:1"));
  EXPECT(getStreamFromExternal(0, 1) == getDefaultOpenRegStream(1));
  EXPECT(orStreamDestroy(handle) == orSuccess);
  EXPECT(throwsWith([&] { external.stream(); }, "does not name a live stream"));
  EXPECT(throwsWith([&] { setCurrentOpenRegStream(external); }, "does not name a live stream"));
  const c10::Stream cpu(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
  EXPECT(throwsWith([&] { OpenRegStream stream(cpu); }, "openreg device"));
}

void guards() {
  const OpenRegGuardImpl guard;
  const auto at = [](int index) {
    return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
  };
  EXPECT(guard.exchangeDevice(at(1)).index() == 0 && guard.getDevice().index() == 1);
  guard.uncheckedSetDevice(at(0));
  guard.uncheckedSetDevice(at(9));
  guard.uncheckedSetDevice(at(-1));
  guard.setDevice(at(-1));
  EXPECT(guard.getDevice().index() == 0);
  EXPECT(throwsWith([&] { guard.setDevice(at(2)); }, "index 2 is out of range"));
  EXPECT(throwsWith([&] { guard.exchangeDevice(at(-1)); }, "index -1 is out of range"));
  EXPECT(throwsWith([&] { guard.getStream(at(5)); }, "index 5 is out of range"));
  EXPECT(throwsWith([&] { guard.synchronizeDevice(7); }, "index 7 is out of range"));
  EXPECT(throwsWith([&] { guard.setDevice(c10::Device(c10::DeviceType::CPU)); }, "got cpu"));
  EXPECT(guard.deviceCount() == 2);
  const c10::Stream stream = guard.getNewStream(at(1), 0);
  EXPECT(guard.exchangeStream(stream) == guard.getDefaultStream(at(1)));
  EXPECT(guard.exchangeStream(guard.getDefaultStream(at(1))) == stream);
  EXPECT(guard.getStreamNativeHandle(stream) != nullptr && !guard.isStreamCapturing(stream));
  void *event = nullptr;
  guard.destroyEvent(event, 1);
  EXPECT(guard.queryEvent(event));
  EXPECT(throwsWith([&] { guard.record(&event, stream, 0, c10::EventFlag::PYTORCH_DEFAULT); },
                    "belongs to openreg:0"));
  EXPECT(throwsWith([&] { guard.record(&event, stream, -1, c10::EventFlag::INVALID); }, "flag"));
  EXPECT(event == nullptr && guard.getDevice().index() == 0);
  guard.record(&event, stream, -1, c10::EventFlag::BACKEND_DEFAULT);
  guard.block(event, guard.getDefaultStream(at(0)));
  guard.synchronizeEvent(event);
  EXPECT(guard.queryEvent(event) && guard.elapsedTime(event, event, 1) == 0);
  guard.destroyEvent(event, 1);
  EXPECT(guard.getDevice().index() == 0);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run() {
  try {
    pools();
    currentStreams();
    externalStreams();
    guards();
  } catch (const std::exception &error) {
    std::printf("unexpected exception: %s\n", error.what());
    failures++;
  }
  std::fflush(stdout);
  return failures;
}
