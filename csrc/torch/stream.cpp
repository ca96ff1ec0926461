/*
 * Streams for PyTorch. The current streams are thread-local.
 */
#include "stream.h"

#include <array>
#include <atomic>

#include "stream_origins.h"
#include "sync_debug.h"
#include "warnings.h"

namespace torch_openreg {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kDefaultId = 0;

std::array<std::atomic<orStream_t>, OPENREG_MAX_DEVICES> defaultHandles{};

thread_local std::array<c10::StreamId, OPENREG_MAX_DEVICES> currentIds{};

OpenRegStream makeStream(c10::DeviceIndex index, c10::StreamId id) {
  return OpenRegStream(OpenRegStream::UNCHECKED,
                       c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id));
}

orStream_t defaultHandle(c10::DeviceIndex index) {
  checkIndex(index);
  orStream_t handle = defaultHandles[index].load(std::memory_order_relaxed);
  if (C10_LIKELY(handle != 0)) return handle;
  OPENREG_CHECK(orStreamGetDefault(&handle, index));
  defaultHandles[index].store(handle, std::memory_order_relaxed);
  return handle;
}

/* The device of a handle, or an error that names the id and the device that it was used with. */
int deviceOf(orStream_t handle, c10::DeviceIndex index) {
  int owner = -1;
  const orError_t error = orStreamGetDevice(handle, &owner);
  if (C10_UNLIKELY(error == orErrorInvalidResourceHandle)) {
    orGetLastError();
    TORCH_CHECK(false, "stream id ", static_cast<c10::StreamId>(handle), " on ", deviceAt(index),
                " does not name a live stream: it was never handed out, or its owner has "
                "destroyed it");
  }
  OPENREG_CHECK(error);
  return owner;
}

void checkOwner(orStream_t handle, c10::DeviceIndex index) {
  const int owner = deviceOf(handle, index);
  TORCH_CHECK(owner == index, "stream id ", static_cast<c10::StreamId>(handle), " is a stream of ",
              deviceAt(static_cast<c10::DeviceIndex>(owner)), ", not of ", deviceAt(index));
}

}  // namespace

OpenRegStream::OpenRegStream(c10::Stream stream) : stream_(stream) {
  TORCH_CHECK(stream.device_type() == kType, "expected a stream of ", aDevice(), ", got one of ",
              stream.device());
  if (C10_UNLIKELY(device_index() == -1)) *this = makeStream(currentDevice(), id());
}

orStream_t OpenRegStream::stream() const {
  const c10::DeviceIndex index = device_index();
  if (id() == kDefaultId) return defaultHandle(index);
  checkIndex(index);
  const auto handle = static_cast<orStream_t>(id());
  checkOwner(handle, index);
  return handle;
}

int OpenRegStream::priority() const {
  int priority = 0;
  OPENREG_CHECK(orStreamGetPriority(stream(), &priority));
  return priority;
}

bool OpenRegStream::query() const {
  const orError_t error = orStreamQuery(stream());
  if (error != orErrorNotReady) OPENREG_CHECK(error);
  return error == orSuccess;
}

void OpenRegStream::synchronize() const {
  const orStream_t handle = stream();
  noteSynchronization("Stream.synchronize", handle);
  OPENREG_CHECK_SYNCHRONIZED(orStreamSynchronize(handle));
}

PriorityRange priorityRange() {
  PriorityRange range{};
  OPENREG_CHECK(orDeviceGetStreamPriorityRange(&range.least, &range.greatest));
  return range;
}

OpenRegStream getStreamFromPool(int priority, c10::DeviceIndex device_index) {
  const c10::DeviceIndex index = indexOrCurrent(device_index);
  orStream_t handle = 0;
  OPENREG_CHECK(orStreamGetFromPool(&handle, priority, index));
  noteStreamMade(handle);
  return makeStream(index, static_cast<c10::StreamId>(handle));
}

OpenRegStream getStreamFromPool(bool isHighPriority, c10::DeviceIndex device_index) {
  const PriorityRange range = priorityRange();
  return getStreamFromPool(isHighPriority ? range.greatest : range.least, device_index);
}

OpenRegStream getDefaultOpenRegStream(c10::DeviceIndex device_index) {
  return makeStream(indexOrCurrent(device_index), kDefaultId);
}

OpenRegStream getCurrentOpenRegStream(c10::DeviceIndex device_index) {
  const c10::DeviceIndex index = indexOrCurrent(device_index);
  return makeStream(index, currentIds[index]);
}

orStream_t currentStreamHandle(c10::DeviceIndex device_index) {
  const c10::StreamId id = currentIds[device_index];
  if (C10_UNLIKELY(id != kDefaultId)) return static_cast<orStream_t>(id);
  const orStream_t handle = defaultHandles[device_index].load(std::memory_order_relaxed);
  return C10_LIKELY(handle != 0) ? handle : defaultHandle(device_index);
}

void setCurrentOpenRegStream(OpenRegStream stream) {
  const c10::DeviceIndex index = checkIndex(stream.device_index());
  if (stream.id() != kDefaultId) checkOwner(static_cast<orStream_t>(stream.id()), index);
  currentIds[index] = stream.id();
}

OpenRegStream getStreamFromExternal(orStream_t ext_stream, c10::DeviceIndex device_index) {
  const c10::DeviceIndex index = indexOrCurrent(device_index);
  if (ext_stream == OR_STREAM_DEFAULT) return makeStream(index, kDefaultId);
  checkOwner(ext_stream, index);
  // A stream has one id: the default stream's own handle becomes the default stream.
  if (ext_stream == defaultHandle(index)) return makeStream(index, kDefaultId);
  return makeStream(index, static_cast<c10::StreamId>(ext_stream));
}

}  // namespace torch_openreg
