/*
 * What guarding pinned memory costs: a copy to the device and one back, queued and waited for, with
 * the sanitizer off, with it on, and with checksums in place of guards.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "openreg.h"
#include "openreg_sanitizer.h"

#define CHECK(call)                                                                            \
  do {                                                                                         \
    orError_t check_ = (call);                                                                 \
    if (check_) {                                                                              \
      fprintf(stderr, "%s: %s: %s\n", #call, orGetErrorName(check_), orGetLastErrorMessage()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

enum { ROUNDS = 9, LARGEST = 16 << 20 };

static double nowUs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

typedef struct Way {
  const char *name;
  char *host;
  int sanitized;
} Way;

/* There and back, with the host's turn between: memory that it does not touch keeps its guards. */
static double roundTripUs(const Way *way, char *device, size_t bytes) {
  int times = (int)(LARGEST / bytes) * 4 > 2000 ? 2000 : (int)(LARGEST / bytes) * 4;
  if (way->sanitized) CHECK(orSanitizerEnable(NULL));
  double start = nowUs();
  for (int i = 0; i < times; i++) {
    memset(way->host, i, bytes);
    CHECK(orMemcpyAsync(device, way->host, bytes, orMemcpyHostToDevice, OR_STREAM_DEFAULT));
    CHECK(orMemcpyAsync(way->host, device, bytes, orMemcpyDeviceToHost, OR_STREAM_DEFAULT));
    CHECK(orDeviceSynchronize());
  }
  double us = (nowUs() - start) / times;
  if (way->sanitized) CHECK(orSanitizerDisable());
  return us;
}

static char *pinned(int guarded) {
  void *memory;
  if (guarded) CHECK(orSanitizerEnable(NULL));
  CHECK(orMallocHost(&memory, LARGEST));
  if (guarded) CHECK(orSanitizerDisable());
  return memory;
}

int main(void) {
  static const struct {
    size_t bytes;
    const char *name;
  } sizes[] = {{4 << 10, "4 KiB"}, {64 << 10, "64 KiB"}, {1 << 20, "1 MiB"}, {LARGEST, "16 MiB"}};
  void *device;
  CHECK(orMalloc(&device, LARGEST));
  char *plain = pinned(0);
  const Way ways[] = {
      {"sanitizer off", plain, 0}, {"guarded", pinned(1), 1}, {"checksums", plain, 1}};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
    double best[3] = {1e18, 1e18, 1e18};
    for (int round = 0; round < ROUNDS; round++)
      for (int w = 0; w < 3; w++) {
        double us = roundTripUs(&ways[w], device, sizes[s].bytes);
        if (us < best[w]) best[w] = us;
      }
    for (int w = 0; w < 3; w++)
      printf("{\"name\": \"pinned round trip of %s, %s\", \"value\": %.4g, \"unit\": \"us\"}\n",
             sizes[s].name, ways[w].name, best[w]);
    fflush(stdout);
  }
  return 0;
}
