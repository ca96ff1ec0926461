/*
 * The C tests: a registry, one process a test with a time limit, assertions that print both
 * operands.
 *
 *   run-tests              every test, each in a process of its own; a line each and a summary
 *   run-tests NAME         one test in this process (for a debugger; OPENREG_TEST_TIMEOUT_SCALE=0
 *                          lifts the limit)
 *   run-tests NAME NAME... these, each in a process of its own
 *   run-tests --list       the names
 *
 * A test is a function: TEST(name) { ... }. It passes by returning. Every test starts in a fresh
 * process, so settings are made with setenv() before the first call of the library.
 */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openreg.h"

enum { TEST_DEFAULT_LIMIT = 20, TEST_MAX_TEXT = 4096 };

typedef struct TestCase {
  const char *name;
  void (*body)(void);
  int limit;   /* seconds */
  int is_test; /* 0: a helper, started by runHelper() alone */
  struct TestCase *next;
} TestCase;

void harnessAdd(TestCase *test);

#define TEST_CASE_(name, seconds, listed)                               \
  static void test_##name(void);                                        \
  __attribute__((constructor)) static void add_##name(void) {           \
    static TestCase test = {#name, test_##name, seconds, listed, NULL}; \
    harnessAdd(&test);                                                  \
  }                                                                     \
  static void test_##name(void)

#define TEST(name) TEST_CASE_(name, TEST_DEFAULT_LIMIT, 1)
#define TEST_WITH_LIMIT(name, seconds) TEST_CASE_(name, seconds, 1)
/* A body for a process that a test starts with runHelper(): not a test. */
#define HELPER(name) TEST_CASE_(name, TEST_DEFAULT_LIMIT, 0)

/* ---- Assertions: any thread; a failed one prints and ends the process ---- */

_Noreturn void harnessFail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
_Noreturn void harnessSkip(const char *reason);

#define SKIP(reason) harnessSkip(reason)
#define FAIL(...) harnessFail(__FILE__, __LINE__, __VA_ARGS__)

#define ASSERT(condition)                              \
  do {                                                 \
    if (!(condition)) FAIL("%s is false", #condition); \
  } while (0)

#define ASSERT_COMPARE_(a, op, b)                                               \
  do {                                                                          \
    long long a_ = (long long)(a), b_ = (long long)(b);                         \
    if (!(a_ op b_))                                                            \
      FAIL("%s %s %s is false: %lld (%#llx) and %lld (%#llx)", #a, #op, #b, a_, \
           (unsigned long long)a_, b_, (unsigned long long)b_);                 \
  } while (0)
/* Integers. */
#define ASSERT_EQ(a, b) ASSERT_COMPARE_(a, ==, b)
#define ASSERT_NE(a, b) ASSERT_COMPARE_(a, !=, b)
#define ASSERT_LT(a, b) ASSERT_COMPARE_(a, <, b)
#define ASSERT_LE(a, b) ASSERT_COMPARE_(a, <=, b)
#define ASSERT_GT(a, b) ASSERT_COMPARE_(a, >, b)
#define ASSERT_GE(a, b) ASSERT_COMPARE_(a, >=, b)

#define ASSERT_PTR(a, b)                                                \
  do {                                                                  \
    const void *a_ = (a), *b_ = (b);                                    \
    if (a_ != b_) FAIL("%s == %s is false: %p and %p", #a, #b, a_, b_); \
  } while (0)

#define ASSERT_NEAR(a, b, distance)                                           \
  do {                                                                        \
    double a_ = (a), b_ = (b), d_ = (distance);                               \
    if (!(a_ - b_ <= d_ && b_ - a_ <= d_))                                    \
      FAIL("%s is not within %g of %s: %.17g and %.17g", #a, d_, #b, a_, b_); \
  } while (0)

#define ASSERT_STR(a, b) harnessSameText(__FILE__, __LINE__, #a, (a), #b, (b))
/* The second is part of the first. */
#define ASSERT_CONTAINS(text, part) harnessContains(__FILE__, __LINE__, #text, (text), (part))
#define ASSERT_MEM(a, b, bytes) harnessSameBytes(__FILE__, __LINE__, #a, (a), #b, (b), (bytes))
/* The call returns orSuccess, or the error that is named. */
#define ASSERT_OK(call) harnessResult(__FILE__, __LINE__, #call, (call), orSuccess)
#define ASSERT_ERROR(call, error) harnessResult(__FILE__, __LINE__, #call, (call), (error))
/* The call returns the error, and the thread's message has the part. */
#define ASSERT_REFUSED(call, error, part)           \
  do {                                              \
    ASSERT_ERROR(call, error);                      \
    ASSERT_CONTAINS(orGetLastErrorMessage(), part); \
  } while (0)

void harnessSameText(const char *file, int line, const char *a_text, const char *a,
                     const char *b_text, const char *b);
void harnessContains(const char *file, int line, const char *name, const char *text,
                     const char *part);
void harnessSameBytes(const char *file, int line, const char *a_text, const void *a,
                      const char *b_text, const void *b, size_t bytes);
void harnessResult(const char *file, int line, const char *call, orError_t got, orError_t wanted);

/* ---- Helpers ---- */

/* Removes every OPENREG_* setting from the environment: for tests of defaults. */
void clearSettings(void);
/* From now on stderr goes to a file; endCapture gives it back and returns what was written. */
void beginCapture(void);
const char *endCapture(void);
int countLines(const char *text); /* without the lines that continue others, which are indented */
const char *unwrapped(const char *text); /* with these in the lines that they continue */

/* Runs `body` in a forked child; the wait status. A failed assertion there exits with 1. */
int forkAndRun(void (*body)(void));
#define ASSERT_FORK_OK(body) ASSERT_EQ(forkAndRun(body), 0)
/* Starts this program anew with a HELPER; the wait status, and what it wrote on stderr. */
int runHelper(const char *name, char *text, size_t size);

/* Whether a plugin is built that not every build of the tests has. */
bool hasPlugin(const char *file);
/* Full path of one of the plugins, in OPENREG_TEST_VENDOR_DIR or beside this program. */
const char *pluginPath(const char *file);

/* The system's, of which a test under preload/page64k.c has larger ones than the machine. */
size_t pageSize(void);

/* Bytes that malloc has handed out; 0 where the C library has no figure (musl). */
size_t heapInUse(void);

uint64_t nowNs(void);
void sleepMs(int milliseconds);

/* Runs `body(context)` on `count` threads that start together. */
void runThreads(int count, void (*body)(int thread, void *context), void *context);

#endif
