/*
 * Sharing between processes, for torch_openreg/_sharing.py: descriptions of the core as bytes, and
 * storages over imported memory. A storage releases its import when it is destroyed.
 *
 * For the sanitizer, a stream of each device stands for the other processes: they may read what is
 * exported, until a stream waits for one of them.
 */
#include <c10/core/Storage.h>
#include <openreg_ipc.h>
#include <openreg_sanitizer.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>

#include <array>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "device.h"
#include "event.h"
#include "gil.h"
#include "module.h"
#include "sanitizer.h"
#include "stream.h"

namespace py = pybind11;

namespace torch_openreg {

namespace {

template <typename T>
py::bytes bytesOf(const T &value) {
  return {reinterpret_cast<const char *>(&value), sizeof value};
}

template <typename T>
T fromBytes(const std::string &bytes, const char *what) {
  T value;
  TORCH_CHECK_VALUE(bytes.size() == sizeof value, what, " has ", sizeof value, " bytes, got ",
                    bytes.size());
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

orIpcMemory memoryFrom(const std::string &bytes) {
  return fromBytes<orIpcMemory>(bytes, "the description of shared memory");
}

orIpcMoment momentFrom(const std::string &bytes) {
  return fromBytes<orIpcMoment>(bytes, "the handle of a shared event");
}

orIpcId idFrom(const std::string &bytes) { return fromBytes<orIpcId>(bytes, "the id of a file"); }

/* A deleter has no caller to report an error to, as in a forked child. */
void release(void *ptr) {
  if (ptr != nullptr && orIpcRelease(ptr) != orSuccess) orGetLastError();
}

orStream_t currentOn(int device) { return currentStreamHandle(checkIndex(device)); }

// ---- The sanitizer ------------------------------------------------------------------------------

/* The device's stream for the other processes. Requires the GIL. */
orStream_t othersOn(int device) {
  static std::array<orStream_t, OPENREG_MAX_DEVICES> all{};
  orStream_t &stream = all.at(static_cast<size_t>(device));
  if (stream == 0) {
    DeviceSwitch current(checkIndex(device));
    OPENREG_CHECK(orStreamCreate(&stream));
  }
  OPENREG_CHECK(orSanitizerMarkExternal(stream));
  return stream;
}

void order(orStream_t earlier, orStream_t later, int device) {
  const OwnedEvent event(checkIndex(device), orEventDisableTiming);
  OPENREG_CHECK(orEventRecord(event.get(), earlier));
  OPENREG_CHECK(orStreamWaitEvent(later, event.get()));
}

void othersMayRead(uintptr_t ptr, size_t bytes, int device) {
  if (C10_LIKELY(!sanitizerActive())) return;
  const orStream_t others = othersOn(device);
  order(currentOn(device), others, device);
  orMemoryAccess access{};
  access.data = reinterpret_cast<const void *>(ptr);
  access.width = bytes;
  OPENREG_CHECK(orSanitizerAccess(
      others, "another process holds this memory: order it with an interprocess event", &access,
      1));
  raiseRaces();
}

void haveWaitedForOthers(orStream_t stream, int device) {
  if (C10_UNLIKELY(sanitizerActive())) order(othersOn(device), stream, device);
}

// ---- Memory -------------------------------------------------------------------------------------

py::bytes exportMemory(uintptr_t ptr, size_t bytes, int device) {
  auto memory = sized<orIpcMemory>();
  const orStream_t stream = currentOn(device);
  {
    WithoutGil unlocked;
    OPENREG_CHECK(orIpcExport(&memory, reinterpret_cast<void *>(ptr), bytes, stream));
  }
  othersMayRead(ptr, bytes, device);
  return bytesOf(memory);
}

py::object importMemory(const std::string &description) {
  const orIpcMemory memory = memoryFrom(description);
  void *ptr = nullptr;
  const orStream_t stream = currentOn(memory.device);
  {
    WithoutGil unlocked;
    OPENREG_CHECK(orIpcImport(&ptr, &memory, stream));
  }
  haveWaitedForOthers(stream, memory.device);
  const c10::Device device = deviceAt(static_cast<c10::DeviceIndex>(memory.device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.bytes,
                       c10::DataPtr(ptr, ptr, &release, device), nullptr, false);
  return py::reinterpret_steal<py::object>(torch::createPyObject(storage));
}

void receive(const std::string &description) {
  const orIpcMemory memory = memoryFrom(description);
  const orStream_t stream = currentOn(memory.device);
  {
    WithoutGil unlocked;
    OPENREG_CHECK(orIpcReceive(&memory, stream));
  }
  haveWaitedForOthers(stream, memory.device);
}

/* How many descriptions of the block are in transit. Those above `most` end first, as lost. */
size_t transit(const std::string &description, size_t most) {
  const orIpcMemory memory = memoryFrom(description);
  size_t count = 0;
  OPENREG_CHECK(orIpcTransit(&count, &memory, most));
  return count;
}

/* (device, file, offset, bytes, generation, file of events or nothing, block) of a description. */
py::tuple read(const std::string &description) {
  const orIpcMemory m = memoryFrom(description);
  py::object events = py::none();
  if (m.ready.record != 0) events = bytesOf(m.ready.file);
  return py::make_tuple(m.device, bytesOf(m.file), m.offset, m.bytes, m.generation, events,
                        m.block);
}

/* A descriptor of the caller's. */
int duplicate(const std::string &file) {
  const orIpcId id = idFrom(file);
  int descriptor = -1;
  OPENREG_CHECK(orIpcFile(&descriptor, &id));
  return py::module_::import("os").attr("dup")(descriptor).cast<int>();
}

py::dict stats() {
  auto from = sized<orIpcStats>();
  OPENREG_CHECK(orIpcGetStats(&from));
  py::dict to;
  to["files"] = from.files;
  to["imported"] = from.imported;
  to["holds"] = from.holds;
  to["pending"] = from.pending;
  return to;
}

// ---- Events -------------------------------------------------------------------------------------

using StreamName = std::tuple<c10::StreamId, int>;

orStream_t handleOf(const StreamName &name) {
  const auto &[id, index] = name;
  return OpenRegStream(c10::Stream(c10::Stream::UNSAFE, deviceAt(checkIndex(index)), id)).stream();
}

py::bytes createEvent(int device) {
  DeviceSwitch current(checkIndex(device));
  orIpcMoment moment{};
  OPENREG_CHECK(orIpcEventCreate(&moment));
  return bytesOf(moment);
}

void destroyEvent(const std::string &event) {
  const orIpcMoment moment = momentFrom(event);
  if (orIpcEventDestroy(&moment) != orSuccess) orGetLastError();
}

void recordEvent(const std::string &event, const StreamName &stream) {
  orIpcMoment moment = momentFrom(event);
  const orStream_t handle = handleOf(stream);
  WithoutGil unlocked;
  OPENREG_CHECK(orIpcEventRecord(&moment, handle));
}

orIpcMoment newest(const std::string &event) {
  orIpcMoment moment = momentFrom(event);
  OPENREG_CHECK(orIpcEventNewest(&moment));
  return moment;
}

bool queryShared(const std::string &event) {
  const orIpcMoment moment = newest(event);
  const orError_t error = orIpcEventQuery(&moment);
  if (error != orErrorNotReady) OPENREG_CHECK(error);
  return error == orSuccess;
}

void waitEvent(const std::string &event, const StreamName &stream) {
  const orIpcMoment moment = newest(event);
  const orStream_t handle = handleOf(stream);
  {
    WithoutGil unlocked;
    OPENREG_CHECK(orIpcEventWait(&moment, handle));
  }
  haveWaitedForOthers(handle, std::get<1>(stream));
}

void synchronizeEvent(const std::string &event, int device) {
  const orIpcMoment moment = newest(event);
  orEvent_t local = 0;
  WithoutGil unlocked;
  OPENREG_CHECK(orIpcEventLocal(&local, &moment, checkIndex(device)));
  const orError_t error = orEventSynchronize(local);
  orEventDestroy(local);
  OPENREG_CHECK(error);
}

[[maybe_unused]] const bool added = addBinder([](py::module_ &m) {
  m.attr("_IPC_ID_BYTES") = sizeof(orIpcId);
  m.attr("_IPC_MOMENT_BYTES") = sizeof(orIpcMoment);
  m.attr("_IPC_MEMORY_BYTES") = sizeof(orIpcMemory);
  m.def("_ipc_export", &exportMemory);
  m.def("_ipc_import", &importMemory);
  m.def("_ipc_receive", &receive);
  m.def("_ipc_transit", &transit, py::arg(), py::arg("most") = SIZE_MAX);
  m.def("_ipc_read", &read);
  m.def("_ipc_has", [](const std::string &file) {
    const orIpcId id = idFrom(file);
    return orIpcHas(&id) != 0;
  });
  m.def("_ipc_file", &duplicate);
  m.def("_ipc_add_file", [](const std::string &file, int descriptor) {
    const orIpcId id = idFrom(file);
    OPENREG_CHECK(orIpcAddFile(&id, descriptor));
  });
  m.def("_ipc_collect", [] {
    WithoutGil unlocked;
    OPENREG_CHECK(orIpcCollect());
  });
  m.def("_ipc_stats", &stats);
  m.def("_ipc_event_create", &createEvent);
  m.def("_ipc_event_destroy", &destroyEvent);
  m.def("_ipc_event_record", &recordEvent);
  m.def("_ipc_event_query", &queryShared);
  m.def("_ipc_event_wait", &waitEvent);
  m.def("_ipc_event_synchronize", &synchronizeEvent);
});

}  // namespace

}  // namespace torch_openreg
