/*
 * Calls of the system that a test has refused. This program's definitions come before the C
 * library's, so they are what the core calls.
 */
#ifndef REFUSE_H
#define REFUSE_H

#include <stddef.h>
#include <sys/mman.h>

typedef enum Refusable { REFUSE_MADVISE, REFUSE_MPROTECT, REFUSE_MUNMAP } Refusable;

/* From now on `count` calls are refused with ENOMEM: of madvise and mprotect those with this last
 * argument, of less than `below` bytes. */
void refuseCalls(Refusable call, int argument, size_t below, int count);

#endif
