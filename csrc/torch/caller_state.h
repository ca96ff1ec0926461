/*
 * The modes of a thread that its kernels take over: how many threads they use, and denormal
 * numbers.
 */
#pragma once

namespace torch_openreg {

/* What a task takes over from the thread that queues it: how many threads a kernel may use (on the
 * wide worker), and what becomes of denormal numbers. Dispatch modes stay behind. */
struct CallerState {
  int threads;
  unsigned flush;
  static CallerState now();
  /* Gives the calling thread these modes. */
  void takeOver() const;
};

/* What the calling thread does with denormal numbers until the end of the scope: a CallerState's
 * `flush`. */
class DenormalMode {
 public:
  explicit DenormalMode(unsigned flush);
  ~DenormalMode();
  DenormalMode(const DenormalMode &) = delete;
  DenormalMode &operator=(const DenormalMode &) = delete;

 private:
  const unsigned before_;
};

/* Functions of PyTorch's own OpenMP runtime and of MKL, of the calling thread alone. Null: there is
 * none. */
struct ThreadControl {
  void (*openmp)(int) = nullptr;
  int (*mklLocal)(int) = nullptr;
  int (*endTeam)(int) = nullptr;
};
const ThreadControl &threadControl();

/* Trips PyTorch's lazy initialisation of this thread, which would undo what is set afterwards. In a
 * forked child the first one makes PyTorch's pool of threads anew, with no lock
 * (caffe2::pthreadpool): whoever comes meanwhile finds none, and throws. */
void initialiseThread();

/* How many threads the kernels of the calling one use. */
void setThreads(int count);

}  // namespace torch_openreg
