/*
 * The system's pages: their size, which is not 4 KiB everywhere (Arm and POWER have kernels with 16
 * or 64 KiB).
 *
 * No state.
 */
#include <unistd.h>

#include "core.h"

size_t orPageSize(void) { return (size_t)sysconf(_SC_PAGESIZE); }

size_t orWholePages(size_t bytes) {
  size_t page = orPageSize();
  return (bytes + page - 1) & ~(page - 1);
}
