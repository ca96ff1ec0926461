/*
 * Errors: their names and texts, and the last one of each thread.
 *
 * last_error, last_message and noted_errors are the thread's own, without a lock. The message of a
 * failure outlives orGetLastError(), which clears the code alone.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

enum { OR_MESSAGE_BYTES = 1024, OR_COLUMNS = 100 };

static _Thread_local orError_t last_error;
static _Thread_local char last_message[OR_MESSAGE_BYTES];
static _Thread_local uint64_t noted_errors;

static const struct {
  const char *name, *text;
} known[] = {
#define OR_X(name, text) {#name, text},
    OR_ERROR_LIST(OR_X)
#undef OR_X
};

bool orErrorIsKnown(orError_t error) { return (size_t)error < sizeof known / sizeof *known; }

const char *orGetErrorName(orError_t error) {
  return orErrorIsKnown(error) ? known[error].name : "unrecognized error code";
}

const char *orGetErrorString(orError_t error) {
  return orErrorIsKnown(error) ? known[error].text : "unrecognized error code";
}

orError_t orGetLastError(void) {
  orError_t error = last_error;
  last_error = orSuccess;
  return error;
}

orError_t orPeekAtLastError(void) { return last_error; }

const char *orGetLastErrorMessage(void) { return last_message; }

uint64_t orNotedErrors(void) { return noted_errors; }

const char *orErrorDetail(orError_t error, uint64_t before) {
  return noted_errors != before && last_error == error ? last_message : orGetErrorString(error);
}

/* An argument may point into last_message (an error reported again), so the text is made in a
 * buffer. */
orError_t orFail(orError_t error, const char *format, ...) {
  if (error == orErrorNotReady) return error;
  char text[OR_MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  memcpy(last_message, text, strlen(text) + 1);
  last_error = error;
  ++noted_errors;
  return error;
}

/* Copies a text in lines of at most OR_COLUMNS, with a line break in place of a space. A word is
 * not cut. Returns the length: 2 more for each break, which takes half a line at least. */
static size_t wrapLines(const char *text, char *out) {
  size_t length = 0, start = 0, space = 0;
  for (; *text; text++) {
    if (*text == ' ') space = length;
    out[length++] = *text;
    if (length - start <= OR_COLUMNS || space <= start) continue;
    memmove(out + space + 3, out + space + 1, length - space - 1);
    memcpy(out + space, "\n  ", 3);
    length += 2;
    start = space = space + 1;
  }
  return length;
}

/* A quoted value's control characters would make more lines. */
void orWarn(const char *format, ...) {
  char line[OR_MESSAGE_BYTES] = "openreg: ", lines[2 * OR_MESSAGE_BYTES];
  size_t start = strlen(line);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line + start, sizeof(line) - start, format, arguments);
  va_end(arguments);
  for (char *c = line + start; *c; c++)
    if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
  size_t length = wrapLines(line, lines);
  lines[length] = '\n';
  ssize_t written = write(STDERR_FILENO, lines, length + 1);
  (void)written; /* a closed stderr is no reason to fail */
}

void orAssertFailed(const char *file, int line, const char *text, unsigned long long a,
                    unsigned long long b) {
  orWarn("%s:%d: assertion %s failed: %lld (0x%llx) and %lld (0x%llx)", file, line, text,
         (long long)a, a, (long long)b, b);
  abort();
}
