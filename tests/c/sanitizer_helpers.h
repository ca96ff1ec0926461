/*
 * What the tests of the sanitizer share: accesses in a line, the reports, memory and streams.
 *
 * Nothing has to run for a report: the analysis is by the order of the calls. So these tests hold
 * nothing back unless it is the host's own order that they are about.
 */
#ifndef SANITIZER_HELPERS_H
#define SANITIZER_HELPERS_H

#include <stdio.h>

#include "gate.h"
#include "openreg_sanitizer.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static inline void sanitize(void) { ASSERT_OK(orSanitizerEnable(NULL)); }

/* What is in conflict is not queued. */
static inline void sanitizeStrictly(void) {
  orSanitizerRefuse(1);
  sanitize();
}

static inline uint64_t tellAccess(orStream_t stream, const char *operation, const void *data,
                                  size_t bytes, uint32_t write) {
  orMemoryAccess a = {.data = data, .width = bytes, .write = write};
  ASSERT_OK(orSanitizerAccess(stream, operation, &a, 1));
  return orSanitizerFound(NULL, NULL);
}

static inline uint64_t reads(orStream_t stream, const char *operation, const void *data,
                             size_t bytes) {
  return tellAccess(stream, operation, data, bytes, 0);
}

static inline uint64_t writes(orStream_t stream, const char *operation, const void *data,
                              size_t bytes) {
  return tellAccess(stream, operation, data, bytes, 1);
}

static inline uint64_t reportCount(void) {
  uint64_t total;
  size_t count;
  ASSERT_OK(orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, &count, &total));
  return total;
}

static inline orRaceReport reportAt(uint64_t number) {
  orRaceReport report;
  size_t count;
  ASSERT_OK(orSanitizerReports(number, &report, sizeof(orRaceReport), 1, &count, NULL));
  ASSERT_EQ(count, 1);
  ASSERT_EQ(report.number, number);
  return report;
}

static inline void printReports(void) {
  for (uint64_t i = 1; i <= reportCount(); i++) {
    orRaceReport r = reportAt(i);
    printf("%s: %s after %s; %s\n", r.memory, r.later.operation, r.earlier.operation, r.advice);
  }
}

#define ASSERT_CLEAN()                 \
  do {                                 \
    if (reportCount()) printReports(); \
    ASSERT_EQ(reportCount(), 0);       \
  } while (0)

static inline orStream_t defaultOf(int device) {
  orStream_t stream;
  ASSERT_OK(orStreamGetDefault(&stream, device));
  return stream;
}

static inline void *deviceMemory(size_t bytes) {
  void *memory;
  ASSERT_OK(orMalloc(&memory, bytes));
  return memory;
}

static inline void *pinnedMemory(size_t bytes) {
  void *memory;
  ASSERT_OK(orMallocHost(&memory, bytes));
  return memory;
}

static inline void *block(size_t bytes, orStream_t stream) {
  void *memory;
  ASSERT_OK(orCacheMalloc(&memory, bytes, stream));
  return memory;
}

static inline orEvent_t record(orStream_t stream) {
  orEvent_t event = 0;
  int before, device;
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orStreamGetDevice(stream, &device));
  ASSERT_OK(orSetDevice(device));
  ASSERT_OK(orEventCreate(&event));
  ASSERT_OK(orSetDevice(before));
  ASSERT_OK(orEventRecord(event, stream));
  return event;
}

/* later.wait_stream(earlier) */
static inline void waitStream(orStream_t later, orStream_t earlier) {
  orEvent_t event = record(earlier);
  ASSERT_OK(orStreamWaitEvent(later, event));
  ASSERT_OK(orEventDestroy(event));
}

/* So that two tasks that race for the sanitizer do not race for ThreadSanitizer. */
static inline void synchronizeUnseen(orStream_t stream) {
  orSanitizerIgnore(1);
  ASSERT_OK(orStreamSynchronize(stream));
  orSanitizerIgnore(0);
}

#endif
