/*
 * Events as PyTorch's guard interface keeps them: a void* that is null before the first record and
 * then holds the core's 64-bit handle.
 */
#pragma once

#include <utility>

#include "check.h"
#include "device.h"
#include "stream.h"

namespace torch_openreg {

static_assert(sizeof(void *) >= sizeof(orEvent_t), "an event handle has to fit in a pointer");

inline orEvent_t eventHandle(void *event) {
  return static_cast<orEvent_t>(reinterpret_cast<uintptr_t>(event));
}
inline void *eventPointer(orEvent_t event) {
  return reinterpret_cast<void *>(static_cast<uintptr_t>(event));
}

/* Whether the newest record is complete. Never reports the error of a kernel. */
inline bool queryEvent(orEvent_t event) {
  const orError_t error = orEventQuery(event);
  if (error != orErrorNotReady) OPENREG_CHECK(error);
  return error == orSuccess;
}

/* An event of the core with an owner: created on `index`, destroyed with the object. */
class OPENREG_EXPORT OwnedEvent {
 public:
  OwnedEvent(c10::DeviceIndex index, unsigned flags) {
    DeviceSwitch device(index);
    OPENREG_CHECK(orEventCreateWithFlags(&event_, flags));
  }
  ~OwnedEvent() {
    // The destructor may run at exit or in a forked child, where the core returns an error that has
    // no caller to go to.
    if (event_ != 0) orEventDestroy(event_);
  }
  OwnedEvent(OwnedEvent &&other) noexcept : event_(other.event_) { other.event_ = 0; }
  OwnedEvent &operator=(OwnedEvent &&other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  orEvent_t get() const { return event_; }
  orEvent_t release() {
    const orEvent_t event = event_;
    event_ = 0;
    return event;
  }

 private:
  orEvent_t event_ = 0;
};

}  // namespace torch_openreg
