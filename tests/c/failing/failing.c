/*
 * The wrappers of the failing core (failing.h). FAILING_WRAPPED in the Makefile names what is
 * wrapped.
 *
 * All state is atomic: calls come from every thread of the core. `plan` is written while no call of
 * the core is on its way but those of idle workers, which call nothing here.
 */
#include "failing.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct {
  _Atomic int kind; /* FAIL_KINDS: none */
  _Atomic long at;
  atomic_bool on;
} plan = {.kind = FAIL_KINDS};

static _Atomic long calls[FAIL_KINDS], mapped;

void failingBegin(FailKind kind, long at, bool on) {
  for (int i = 0; i < FAIL_KINDS; i++) calls[i] = 0;
  plan.at = at;
  plan.on = on;
  plan.kind = kind;
}

void failingEnd(long counted[FAIL_KINDS]) {
  plan.kind = FAIL_KINDS;
  for (int i = 0; i < FAIL_KINDS; i++) counted[i] = calls[i];
}

long failingMapped(void) { return mapped; }

/* For a debugger: a breakpoint here shows who meets the failure. */
__attribute__((noinline)) static bool fail(int error) {
  errno = error;
  return true;
}

static bool fails(FailKind kind, int error) {
  long call = ++calls[kind], at = plan.at;
  if (plan.kind != (int)kind || !at) return false;
  return (call == at || (call > at && plan.on)) && fail(error);
}

/* ---- memory ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);

void *__wrap_malloc(size_t bytes) {
  return fails(FAIL_MALLOC, ENOMEM) ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes) {
  return fails(FAIL_MALLOC, ENOMEM) ? NULL : __real_calloc(count, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return fails(FAIL_MALLOC, ENOMEM) ? NULL : __real_aligned_alloc(alignment, bytes);
}

void *__wrap_realloc(void *old, size_t bytes) {
  return fails(FAIL_MALLOC, ENOMEM) ? NULL : __real_realloc(old, bytes);
}

char *__wrap_strdup(const char *text) {
  size_t bytes = strlen(text) + 1;
  char *copy = __wrap_malloc(bytes);
  return copy ? memcpy(copy, text, bytes) : NULL;
}

/* ---- mappings ---- */

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t bytes);
int __real_madvise(void *at, size_t bytes, int advice);
int __real_mprotect(void *at, size_t bytes, int protection);
int __real_memfd_create(const char *name, unsigned flags);
int __real_ftruncate(int fd, off_t bytes);

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fails(FAIL_MMAP, ENOMEM)) return MAP_FAILED;
  void *memory = __real_mmap(at, bytes, protection, flags, fd, offset);
  if (memory == MAP_FAILED || flags & MAP_FIXED) return memory;
  mapped += (long)bytes;
#if defined(__SANITIZE_ADDRESS__)
  if (protection != PROT_NONE) __lsan_register_root_region(memory, bytes);
#endif
  return memory;
}

int __wrap_munmap(void *at, size_t bytes) {
  if (fails(FAIL_MUNMAP, ENOMEM)) return -1;
  int failed = __real_munmap(at, bytes);
  if (!failed) mapped -= (long)bytes;
  return failed;
}

int __wrap_madvise(void *at, size_t bytes, int advice) {
  return fails(FAIL_MADVISE, ENOMEM) ? -1 : __real_madvise(at, bytes, advice);
}

int __wrap_mprotect(void *at, size_t bytes, int protection) {
  return fails(FAIL_MPROTECT, ENOMEM) ? -1 : __real_mprotect(at, bytes, protection);
}

int __wrap_memfd_create(const char *name, unsigned flags) {
  return fails(FAIL_MEMFD, EMFILE) ? -1 : __real_memfd_create(name, flags);
}

int __wrap_ftruncate(int fd, off_t bytes) {
  return fails(FAIL_MEMFD, ENOSPC) ? -1 : __real_ftruncate(fd, bytes);
}

/* ---- threads and files ---- */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *context);
FILE *__real_fopen(const char *path, const char *mode);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *context) {
  if (fails(FAIL_THREAD, EAGAIN)) return EAGAIN;
  return __real_pthread_create(thread, attributes, body, context);
}

FILE *__wrap_fopen(const char *path, const char *mode) {
  return fails(FAIL_FILE, EMFILE) ? NULL : __real_fopen(path, mode);
}
