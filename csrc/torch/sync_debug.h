/*
 * torch.openreg.set_sync_debug_mode: calls that make the host wait for a device say so, or refuse.
 * In a capture they are refused.
 *
 * Off, a note is two relaxed loads. It comes before anything is queued or changed, so that a
 * refused call leaves nothing behind; only a wait that the allocator had to make to find memory is
 * noted afterwards.
 */
#pragma once

#include <atomic>
#include <string>

#include "check.h"
#include "graph.h"

namespace torch_openreg {

enum class SyncDebugMode : int { Default, Warn, Error };

extern std::atomic<SyncDebugMode> syncDebugMode;

inline bool notesSynchronization() {
  return C10_UNLIKELY(syncDebugMode.load(std::memory_order_relaxed) != SyncDebugMode::Default ||
                      capturesNow.load(std::memory_order_relaxed) != 0);
}

/* Warns, or throws, with the name of the operator or call; it throws anyhow if the stream, which
 * the host is about to wait for, is being captured. */
void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream);

inline void noteSynchronization(const char *operation, orStream_t stream) {
  if (notesSynchronization()) warnOrThrowOnSynchronization(operation, stream);
}

/* What is called inside has been noted under its caller's name. */
class SyncNoted {
 public:
  SyncNoted(const char *operation, orStream_t stream) {
    noteSynchronization(operation, stream);
    ++depth_;
  }
  ~SyncNoted() { --depth_; }
  SyncNoted(const SyncNoted &) = delete;
  SyncNoted &operator=(const SyncNoted &) = delete;

 private:
  friend void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream);
  static thread_local int depth_;
};

}  // namespace torch_openreg
