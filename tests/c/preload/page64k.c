/*
 * A system with pages of 64 KiB, as Arm64 and POWER kernels may have, on one with smaller pages:
 * preloaded, it has the calls that take pages refuse addresses that begin none, and act on whole
 * pages. `make ctest-page64k` runs the C tests over it.
 *
 * No state. A program finds mapped memory at multiples of 64 KiB, and where a call says how long,
 * as much as a page more than it asked for.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static const size_t page = 64 << 10;

static size_t whole(size_t bytes) { return (bytes + page - 1) & ~(page - 1); }

static long refuse(void) {
  errno = EINVAL;
  return -1;
}

/* Of a call that begins with an address and a length. */
static long call(long number, const void *at, size_t bytes, long third) {
  return (uintptr_t)at % page ? refuse() : syscall(number, at, whole(bytes), third);
}

EXPORT int munmap(void *at, size_t bytes) { return (int)call(SYS_munmap, at, bytes, 0); }

EXPORT int mprotect(void *at, size_t bytes, int protection) {
  return (int)call(SYS_mprotect, at, bytes, protection);
}

EXPORT int madvise(void *at, size_t bytes, int advice) {
  return (int)call(SYS_madvise, at, bytes, advice);
}

static void *map(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

/* Addresses for `bytes` that begin a page; nothing is mapped where the system has none. */
static char *place(size_t bytes) {
  char *from =
      map(NULL, bytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) return NULL;
  char *at = (char *)whole((uintptr_t)from);
  if (at > from) syscall(SYS_munmap, from, (size_t)(at - from));
  syscall(SYS_munmap, at + bytes, page - (size_t)(at - from));
  return at;
}

EXPORT void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (!bytes || (size_t)offset % page) return (void *)refuse();
  if (flags & MAP_FIXED && (uintptr_t)at % page) return (void *)refuse();
  if (!(flags & MAP_FIXED) && !(at = place(whole(bytes)))) return MAP_FAILED;
  return map(at, whole(bytes), protection, flags | MAP_FIXED, fd, offset);
}

EXPORT void *mremap(void *old, size_t old_bytes, size_t bytes, int flags, ...) {
  va_list more;
  va_start(more, flags);
  void *at = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
  va_end(more);
  if ((uintptr_t)old % page || (uintptr_t)at % page) return (void *)refuse();
  if (flags & MREMAP_MAYMOVE && !at && !(at = place(whole(bytes)))) return MAP_FAILED;
  if (flags & MREMAP_MAYMOVE) flags |= MREMAP_FIXED;
  return (void *)syscall(SYS_mremap, old, whole(old_bytes), whole(bytes), flags, at);
}

EXPORT long sysconf(int name) {
  long (*next)(int);
  *(void **)&next = dlsym(RTLD_NEXT, "sysconf");
  long value = next(name);
  if (name == _SC_PAGESIZE) return (long)page;
  return name == _SC_PHYS_PAGES ? value * next(_SC_PAGESIZE) / (long)page : value;
}

EXPORT int getpagesize(void) { return (int)page; }
