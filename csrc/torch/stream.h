/*
 * Streams as a C++ API: what a custom operator or a vendor's code needs to queue work where
 * PyTorch expects it.
 *
 *   c10::StreamId of an openreg stream
 *     0         the default stream of the stream's device: one a device, never destroyed,
 *               never in the pool
 *     other     the core's handle (orStream_t), bit for bit
 *
 * The core's handle contains its device and its generation. So an id that was never handed out,
 * that belongs to another device, or whose stream was destroyed is an error at its first use, but
 * not when the c10::Stream is made: PyTorch calls no backend there.
 *
 * Every `device_index` of -1 means the calling thread's current device.
 */
#pragma once

#include <c10/core/Stream.h>

#include "check.h"
#include "device.h"

namespace torch_openreg {

/* A c10::Stream of an openreg device. Copying it copies the name of a stream, not the stream. */
class OPENREG_EXPORT OpenRegStream {
 public:
  enum Unchecked { UNCHECKED };

  /* Throws if the stream is not of an openreg device. A stream without an index is the current
   * device's. */
  explicit OpenRegStream(c10::Stream stream);
  /* For a stream whose device is known. */
  OpenRegStream(Unchecked, c10::Stream stream) : stream_(stream) {}

  /* The core's handle. Throws for an id that does not name a live stream of this device. */
  orStream_t stream() const;
  operator orStream_t() const { return stream(); }

  c10::Stream unwrap() const { return stream_; }
  operator c10::Stream() const { return stream_; }

  c10::StreamId id() const { return stream_.id(); }
  c10::DeviceIndex device_index() const { return stream_.device_index(); }
  c10::Device device() const { return stream_.device(); }

  /* Lower is more urgent; 0 is the least urgent. */
  int priority() const;
  /* Whether the last task has finished. Never blocks, and never reports the error of a kernel. */
  bool query() const;
  /* Blocks until everything queued so far has finished; the error of a failed kernel surfaces
   * here. */
  void synchronize() const;

  bool operator==(const OpenRegStream &other) const { return stream_ == other.stream_; }

 private:
  c10::Stream stream_;
};

/* {least urgent, most urgent}: 0 and a negative number. */
struct PriorityRange {
  int least;
  int greatest;
};
OPENREG_EXPORT PriorityRange priorityRange();

/* The number of streams in the pool of each device and priority, which are handed out in turn. */
constexpr int kStreamsPerPool = OPENREG_STREAMS_PER_POOL;

/* A stream of the device's pool, never the default one, in turn. The priority is clamped to
 * priorityRange(). A stream of the pool is created at its first turn and never destroyed. */
OPENREG_EXPORT OpenRegStream getStreamFromPool(int priority, c10::DeviceIndex device_index = -1);
/* The same with the most or the least urgent priority. */
OPENREG_EXPORT OpenRegStream getStreamFromPool(bool isHighPriority = false,
                                               c10::DeviceIndex device_index = -1);

/* The device's fixed default stream. */
OPENREG_EXPORT OpenRegStream getDefaultOpenRegStream(c10::DeviceIndex device_index = -1);

/* The stream on which the calling thread queues for this device: the default stream if not set. */
OPENREG_EXPORT OpenRegStream getCurrentOpenRegStream(c10::DeviceIndex device_index = -1);
/* Its handle, for a device that is known to exist. The stream may have been destroyed since it was
 * set: the core then refuses the handle. */
orStream_t currentStreamHandle(c10::DeviceIndex device_index);
/* Sets it for the calling thread and the stream's device, after a check of the stream. The current
 * device does not change. */
OPENREG_EXPORT void setCurrentOpenRegStream(OpenRegStream stream);

/* A stream that other code made with orStreamCreate and will destroy. The device must be the
 * handle's own. A handle of 0 is the default stream. */
OPENREG_EXPORT OpenRegStream getStreamFromExternal(orStream_t ext_stream,
                                                   c10::DeviceIndex device_index = -1);

}  // namespace torch_openreg
