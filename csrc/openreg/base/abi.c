/*
 * The version, and structures that a caller passes, whose header may be older or newer than this
 * library.
 *
 * As Linux's copy_struct_from_user: members that an older structure lacks at its end are 0, their
 * default; members that a newer one has beyond must be 0, as this library cannot honour them. In
 * structures that the library fills, such members become 0. No state.
 */
#include <string.h>

#include "base/base.h"

/* the largest structure; a limit of the interface, not the system's page */
#define OR_MOST_SIZE 4096u

int orGetVersion(void) { return OPENREG_VERSION; }

orError_t orCheckSize(const char *type, size_t has, size_t least) {
  if (has >= least && has <= OR_MOST_SIZE) return orSuccess;
  return orFail(orErrorInvalidValue, "%s: size is %zu bytes; it must be %zu to %u", type, has,
                least, OR_MOST_SIZE);
}

const void *orCopyVersioned(const char *type, const void *given, size_t has, size_t least,
                            void *room, size_t size) {
  if (orCheckSize(type, has, least)) return NULL;
  const unsigned char *bytes = given;
  for (size_t i = size; i < has; i++)
    if (bytes[i]) {
      orFail(orErrorInvalidValue,
             "%s: size is %zu bytes; this library defines %zu, and byte %zu after them is not 0",
             type, has, size, i - size);
      return NULL;
    }
  memset(room, 0, size);
  return memcpy(room, given, has < size ? has : size);
}

void orFillElement(void *to, size_t has, const void *from, size_t size) {
  memcpy(to, from, has < size ? has : size);
  if (has > size) memset((char *)to + size, 0, has - size);
}

orError_t orFill(const char *type, void *to, const void *from, size_t least, size_t size) {
  size_t has = *(const size_t *)to;
  OR_TRY(orCheckSize(type, has, least));
  orFillElement(to, has, from, size);
  *(size_t *)to = has;
  return orSuccess;
}
