/*
 * torch.openreg.set_sync_debug_mode: calls that make the host wait for a device warn or throw. In a
 * capture they always throw.
 *
 * While it is off, a note is two relaxed loads. It precedes all queued work and changes, so that a
 * refused call leaves nothing behind. Only a wait of the allocator for memory is noted afterwards.
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

/* Warns or throws with the name of the operator or call. Always throws if the stream, for which the
 * host is about to wait, is being captured. */
void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream);

inline void noteSynchronization(const char *operation, orStream_t stream) {
  if (notesSynchronization()) warnOrThrowOnSynchronization(operation, stream);
}

/* Calls inside the scope have been noted under their caller's name. */
class SyncNoted : Uncopyable {
 public:
  SyncNoted(const char *operation, orStream_t stream) {
    noteSynchronization(operation, stream);
    ++depth_;
  }
  ~SyncNoted() { --depth_; }

 private:
  friend void warnOrThrowOnSynchronization(const std::string &operation, orStream_t stream);
  static thread_local int depth_;
};

}  // namespace torch_openreg
