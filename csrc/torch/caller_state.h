/*
 * The modes of a thread that its kernels take over: the number of threads, and denormal numbers.
 */
#pragma once

#include "check.h"

namespace torch_openreg {

/* What a task takes over from the thread that queues it: how many threads a kernel may use (on the
 * wide worker), and how denormal numbers are treated. Dispatch modes are not taken over. */
struct CallerState {
  int threads;
  unsigned flush;
  static CallerState now();
  /* Gives the calling thread these modes. */
  void takeOver() const;
};

/* Sets how the calling thread treats denormal numbers until the end of the scope. The value is a
 * CallerState's `flush`. */
class DenormalMode : Uncopyable {
 public:
  explicit DenormalMode(unsigned flush);
  ~DenormalMode();

 private:
  const unsigned before_;
};

/* Functions of PyTorch's own OpenMP runtime and of MKL that act on the calling thread alone. Null
 * where there is none. */
struct ThreadControl {
  void (*openmp)(int) = nullptr;
  int (*mklLocal)(int) = nullptr;
  int (*endTeam)(int) = nullptr;
};
const ThreadControl &threadControl();

/* Triggers PyTorch's lazy initialisation of this thread, which would otherwise undo later settings.
 * In a forked child the first call makes PyTorch's pool of threads anew, without a lock
 * (caffe2::pthreadpool): a thread that comes meanwhile finds no pool and throws. */
void initialiseThread();

/* Sets how many threads the calling thread's kernels use, those of OpenMP and of MKL. Returns what
 * MKL has used. */
int setThreads(int count, int mkl);

}  // namespace torch_openreg
