/*
 * The system's pages: their size (not 4 KiB everywhere: Arm and POWER have kernels with 16 or 64
 * KiB), files in memory to map, and mappings that end.
 *
 * No state.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

size_t orPageSize(void) { return (size_t)sysconf(_SC_PAGESIZE); }

void orUnmap(void *at, size_t bytes) {
  if (munmap(at, bytes) && madvise(at, bytes, MADV_REMOVE)) (void)madvise(at, bytes, MADV_DONTNEED);
}

size_t orWholePages(size_t bytes) {
  size_t page = orPageSize();
  return (bytes + page - 1) & ~(page - 1);
}

/* Past RLIMIT_FSIZE (ulimit -f), ftruncate() fails and sends its thread a SIGXFSZ that would end
 * the process. The signal is blocked meanwhile, and consumed unless one was pending before. */
static bool resize(int fd, size_t bytes) {
  sigset_t over, pending, before;
  sigemptyset(&over);
  sigaddset(&over, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &over, &before);
  sigpending(&pending);
  bool resized = !ftruncate(fd, (off_t)bytes);
  int why = errno;
  if (!resized && !sigismember(&pending, SIGXFSZ)) sigtimedwait(&over, NULL, &(struct timespec){0});
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  errno = why;
  return resized;
}

int orMemoryFile(const char *name, size_t bytes) {
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 || resize(fd, bytes)) return fd;
  int why = errno;
  close(fd);
  errno = why;
  return -1;
}
