/*
 * Reads and sets modes of the calling thread; nothing here is shared.
 */
#include "caller_state.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <cstring>
#include <mutex>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace torch_openreg {

namespace {

#if defined(__SSE2__)
constexpr unsigned kFlushBits = _MM_FLUSH_ZERO_ON | 0x40;  // and denormals-are-zero
unsigned flushMode() { return _mm_getcsr() & kFlushBits; }
void setFlushMode(unsigned mode) {
  if (flushMode() != mode) _mm_setcsr((_mm_getcsr() & ~kFlushBits) | mode);
}
#else
unsigned flushMode() { return 0; }
void setFlushMode(unsigned) {}
#endif

bool isFromGomp(void *function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && std::strstr(info.dli_fname, "libgomp") != nullptr;
}

}  // namespace

DenormalMode::DenormalMode(unsigned flush) : before_(flushMode()) { setFlushMode(flush); }

DenormalMode::~DenormalMode() { setFlushMode(before_); }

/* The OpenMP runtime that libtorch_cpu is linked to; a process may contain others. */
const ThreadControl &threadControl() {
  static const ThreadControl control = [] {
    ThreadControl found;
    Dl_info info{};
    if (dladdr(reinterpret_cast<void *>(&at::get_num_threads), &info) == 0) return found;
    void *library = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return found;
    found.openmp = reinterpret_cast<void (*)(int)>(dlsym(library, "omp_set_num_threads"));
    found.mklLocal = reinterpret_cast<int (*)(int)>(dlsym(library, "MKL_Set_Num_Threads_Local"));
    // In other runtimes the call affects every thread's team.
    void *pause = dlsym(library, "omp_pause_resource_all");
    if (isFromGomp(pause)) found.endTeam = reinterpret_cast<int (*)(int)>(pause);
    return found;
  }();
  return control;
}

void initialiseThread() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  at::get_num_threads();
}

int setThreads(int count, int mkl) {
  if (threadControl().openmp != nullptr) threadControl().openmp(count);
  return threadControl().mklLocal != nullptr ? threadControl().mklLocal(mkl) : 0;
}

CallerState CallerState::now() { return {at::get_num_threads(), flushMode()}; }

void CallerState::takeOver() const {
  setFlushMode(flush);
  initialiseThread();
  if (at::get_num_threads() != threads) setThreads(threads, threads);
}

}  // namespace torch_openreg
