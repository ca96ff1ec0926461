/*
 * The version, and structures that a caller gives, whose header may be older or newer than this
 * library.
 *
 * As Linux's copy_struct_from_user: what an older one lacks at the end is 0, which is its default;
 * what a newer one has beyond must be 0, as nobody here knows what it asks for. No state.
 */
#include <string.h>

#include "core.h"

#define OR_MOST_SIZE 4096u /* of a structure: a limit of the interface, not the system's page */

int orGetVersion(void) { return OPENREG_VERSION; }

const void *orGivenOther(const char *type, const void *given, size_t has, size_t least, void *room,
                         size_t size) {
  if (has < least || has > OR_MOST_SIZE) {
    orFail(orErrorInvalidValue, "%s: size is %zu bytes; it must be %zu to %u", type, has, least,
           OR_MOST_SIZE);
    return NULL;
  }
  const unsigned char *bytes = given;
  for (size_t i = size; i < has; i++)
    if (bytes[i]) {
      orFail(orErrorInvalidValue,
             "%s: size is %zu bytes; this library knows %zu, and byte %zu beyond them is not 0",
             type, has, size, i - size);
      return NULL;
    }
  memset(room, 0, size);
  return memcpy(room, given, has < size ? has : size);
}
