/*
 * Control of the failing core: a build of the core whose calls of the system can be made to fail.
 *
 * That library is the core's objects and failing.c, linked so that each call that FAILING_LIST
 * names goes through a wrapper (the linker's --wrap). So only calls of the core count and fail, and
 * sanitizers see them as ever.
 */
#ifndef FAILING_H
#define FAILING_H

#include <stdbool.h>
#include <stddef.h>

/* X(enumerator, name) */
/* clang-format off */
#define FAILING_LIST(X) \
  X(FAIL_MALLOC, "malloc") X(FAIL_MMAP, "mmap") X(FAIL_MUNMAP, "munmap") \
  X(FAIL_MADVISE, "madvise") X(FAIL_MPROTECT, "mprotect") X(FAIL_MEMFD, "memfd") \
  X(FAIL_THREAD, "thread") X(FAIL_FILE, "file")
/* clang-format on */

typedef enum FailKind {
#define X(name, text) name,
  FAILING_LIST(X)
#undef X
      FAIL_KINDS
} FailKind;

#define FAILING_API __attribute__((visibility("default")))

/* From now on calls of each kind are counted from 1, and call `at` of this kind fails (0: none), or
 * with `on` all from there on. */
FAILING_API void failingBegin(FailKind kind, long at, bool on);
/* Nothing fails any more. `calls`: how many there were of each kind. */
FAILING_API void failingEnd(long calls[FAIL_KINDS]);
/* Bytes of address space that the core has now. */
FAILING_API long failingMapped(void);

#endif
