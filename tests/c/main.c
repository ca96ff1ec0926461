/*
 * The runner of the C tests and the helpers of harness.h.
 *
 * firstTest and lastTest are written by constructors, before main; capture and its text belong to
 * the thread that runs the test.
 */
#include "harness.h"

#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STATUS_SKIPPED = 77 };

extern char **environ;

static TestCase *firstTest, **lastTest = &firstTest;

void harnessAdd(TestCase *test) {
  *lastTest = test;
  lastTest = &test->next;
}

/* What the core holds at exit hangs on mappings that the leak checker does not search. */
OR_API const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

/* ---- Assertions ---- */

_Noreturn void harnessFail(const char *file, int line, const char *format, ...) {
  char text[TEST_MAX_TEXT];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  fprintf(stdout, "%s:%d: %s\n", file, line, text);
  fflush(stdout);
  _exit(1); /* whatever else runs in this process is not to be trusted any more */
}

_Noreturn void harnessSkip(const char *reason) {
  fprintf(stdout, "skipped: %s\n", reason);
  fflush(stdout);
  _exit(STATUS_SKIPPED);
}

void harnessSameText(const char *file, int line, const char *a_text, const char *a,
                     const char *b_text, const char *b) {
  if (a && b && !strcmp(a, b)) return;
  harnessFail(file, line, "%s == %s is false: \"%s\" and \"%s\"", a_text, b_text, a ? a : "(null)",
              b ? b : "(null)");
}

void harnessContains(const char *file, int line, const char *name, const char *text,
                     const char *part) {
  if (text && strstr(text, part)) return;
  harnessFail(file, line, "%s has no \"%s\": \"%s\"", name, part, text ? text : "(null)");
}

void harnessSameBytes(const char *file, int line, const char *a_text, const void *a,
                      const char *b_text, const void *b, size_t bytes) {
  const unsigned char *x = a, *y = b;
  for (size_t i = 0; i < bytes; ++i)
    if (x[i] != y[i])
      harnessFail(file, line, "%s and %s differ at byte %zu of %zu: %#x and %#x", a_text, b_text, i,
                  bytes, x[i], y[i]);
}

void harnessResult(const char *file, int line, const char *call, orError_t got, orError_t wanted) {
  if (got == wanted) return;
  harnessFail(file, line, "%s is %s, expected %s; last message: \"%s\"", call, orGetErrorName(got),
              orGetErrorName(wanted), orGetLastErrorMessage());
}

/* ---- Helpers ---- */

void clearSettings(void) {
  for (int i = 0; environ[i];) {
    char name[128];
    size_t length = strcspn(environ[i], "=");
    int ours = !strncmp(environ[i], "OPENREG_", 8) && strncmp(environ[i], "OPENREG_TEST_", 13) &&
               length < sizeof(name);
    /* Of much memory an emulator takes long to make a device. */
    if (getenv("OPENREG_TEST_EMULATOR") && !strncmp(environ[i], "OPENREG_DEVICE_MEMORY=", 22))
      ours = 0;
    if (!ours) {
      ++i;
      continue;
    }
    memcpy(name, environ[i], length);
    name[length] = 0;
    unsetenv(name);
  }
}

static FILE *temporaryFile(void) {
  FILE *file = tmpfile();
  if (!file) FAIL("tmpfile: %s", strerror(errno));
  return file;
}

static int savedStderr = -1;
static FILE *captureFile;

void beginCapture(void) {
  captureFile = temporaryFile();
  fflush(stderr);
  savedStderr = dup(STDERR_FILENO);
  dup2(fileno(captureFile), STDERR_FILENO);
}

static size_t readAll(FILE *file, char *text, size_t size) {
  rewind(file);
  size_t length = fread(text, 1, size - 1, file);
  text[length] = 0;
  fclose(file);
  return length;
}

const char *endCapture(void) {
  static char text[TEST_MAX_TEXT];
  fflush(stderr);
  dup2(savedStderr, STDERR_FILENO);
  close(savedStderr);
  readAll(captureFile, text, sizeof(text));
  return text;
}

int countLines(const char *text) {
  int lines = 0;
  for (; *text; ++text) lines += *text == '\n' && strncmp(text + 1, "  ", 2) != 0;
  return lines;
}

const char *unwrapped(const char *text) {
  static char whole[TEST_MAX_TEXT];
  size_t length = 0;
  for (; *text; text++) {
    bool continued = !strncmp(text, "\n  ", 3);
    whole[length++] = continued ? ' ' : *text;
    text += continued ? 2 : 0;
  }
  whole[length] = 0;
  return whole;
}

static int waitFor(pid_t pid) {
  int status;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) FAIL("waitpid: %s", strerror(errno));
  return status;
}

int forkAndRun(void (*body)(void)) {
  fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) FAIL("fork: %s", strerror(errno));
  if (pid == 0) {
    body();
    fflush(stdout);
    _exit(0);
  }
  return waitFor(pid);
}

/* The system runs no program of another processor. */
static _Noreturn void execInEmulator(const char *emulator, const char *name) {
  char self[PATH_MAX] = "";
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) > 0)
    execlp(emulator, emulator, self, name, (char *)NULL);
  _exit(127);
}

static _Noreturn void execSelf(const char *name) {
  char *arguments[] = {"run-tests", (char *)name, NULL};
  const char *emulator = getenv("OPENREG_TEST_EMULATOR");
  if (emulator) execInEmulator(emulator, name);
  execv("/proc/self/exe", arguments);
  _exit(127);
}

int runHelper(const char *name, char *text, size_t size) {
  FILE *file = temporaryFile();
  fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) FAIL("fork: %s", strerror(errno));
  if (pid == 0) {
    dup2(fileno(file), STDERR_FILENO);
    execSelf(name);
  }
  int status = waitFor(pid);
  readAll(file, text, size);
  return status;
}

static const char *findPlugin(const char *file) {
  static char path[PATH_MAX + 64];
  const char *folder = getenv("OPENREG_TEST_VENDOR_DIR");
  char self[PATH_MAX] = "";
  if (!folder) {
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *slash = length > 0 ? strrchr(self, '/') : NULL;
    if (slash) *slash = 0;
    folder = self;
  }
  snprintf(path, sizeof(path), "%s/%s", folder, file);
  return path;
}

bool hasPlugin(const char *file) { return !access(findPlugin(file), R_OK); }

const char *pluginPath(const char *file) {
  const char *path = findPlugin(file);
  if (access(path, R_OK)) FAIL("the plugin %s is not built: %s", path, strerror(errno));
  return path;
}

size_t pageSize(void) { return (size_t)sysconf(_SC_PAGESIZE); }

size_t heapInUse(void) {
#ifdef __GLIBC__
  struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
#else
  return 0;
#endif
}

uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sleepMs(int milliseconds) {
  struct timespec t = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
  while (nanosleep(&t, &t) && errno == EINTR) {
  }
}

typedef struct ThreadStart {
  pthread_t thread;
  pthread_barrier_t *start;
  int number;
  void (*body)(int, void *);
  void *context;
} ThreadStart;

static void *runThread(void *argument) {
  ThreadStart *t = argument;
  pthread_barrier_wait(t->start);
  t->body(t->number, t->context);
  return NULL;
}

void runThreads(int count, void (*body)(int thread, void *context), void *context) {
  ThreadStart *threads = calloc((size_t)count, sizeof(*threads));
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, (unsigned)count);
  for (int i = 0; i < count; ++i) {
    threads[i] = (ThreadStart){.start = &start, .number = i, .body = body, .context = context};
    int error = pthread_create(&threads[i].thread, NULL, runThread, &threads[i]);
    if (error) FAIL("pthread_create: %s", strerror(error));
  }
  for (int i = 0; i < count; ++i) pthread_join(threads[i].thread, NULL);
  pthread_barrier_destroy(&start);
  free(threads);
}

/* ---- Runner ---- */

static unsigned limitOf(const TestCase *test) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  double scale = 10;
#else
  double scale = 1;
#endif
  const char *given = getenv("OPENREG_TEST_TIMEOUT_SCALE");
  if (given) scale = atof(given);
  return (unsigned)(test->limit * scale);
}

/* Polls: a grandchild that outlives the test must not hold the runner, so no pipe is read to its
 * end. */
static int waitWithLimit(pid_t pid, unsigned seconds, int *timed_out) {
  uint64_t end = nowNs() + (uint64_t)seconds * 1000000000u;
  int status;
  *timed_out = 0;
  for (int nap = 1;; nap = nap < 10 ? nap + 1 : nap) {
    pid_t got = waitpid(pid, &status, WNOHANG);
    if (got == pid) break;
    if (seconds && nowNs() > end) {
      *timed_out = 1;
      kill(-pid, SIGKILL);
      return waitFor(pid);
    }
    sleepMs(nap);
  }
  kill(-pid, SIGKILL); /* what the test has left behind */
  return status;
}

/* `failures`: what failed tests have printed, for the end, where eyes and the tail of a log are. */
typedef struct Tally {
  int passed, failed, skipped;
  FILE *failures, *names;
} Tally;

static void moveText(FILE *from, FILE *to) {
  char text[4096], last = '\n';
  rewind(from);
  for (size_t length; (length = fread(text, 1, sizeof(text), from)); last = text[length - 1])
    fwrite(text, 1, length, to);
  if (last != '\n') fputc('\n', to);
  fclose(from);
}

static const char *describe(int status, int timed_out, unsigned limit, char *text, size_t size) {
  if (timed_out)
    snprintf(text, size, "FAILED  still running after %u s", limit);
  else if (WIFSIGNALED(status))
    snprintf(text, size, "FAILED  %s", strsignal(WTERMSIG(status)));
  else if (WEXITSTATUS(status) == 0)
    snprintf(text, size, "ok");
  else if (WEXITSTATUS(status) == STATUS_SKIPPED)
    snprintf(text, size, "skipped");
  else
    snprintf(text, size, "FAILED  exit status %d", WEXITSTATUS(status));
  return text;
}

static void tallyUp(const TestCase *test, int status, FILE *output, Tally *tally) {
  if (status == 0) {
    ++tally->passed;
    fclose(output);
  } else if (WIFEXITED(status) && WEXITSTATUS(status) == STATUS_SKIPPED) {
    ++tally->skipped;
    moveText(output, stdout);
  } else {
    ++tally->failed;
    fprintf(tally->failures, "\n---- %s ----\n", test->name);
    moveText(output, tally->failures);
    fprintf(tally->names, "FAILED %s\n", test->name);
  }
}

static void runApart(const TestCase *test, Tally *tally) {
  FILE *output = temporaryFile();
  uint64_t start = nowNs();
  fflush(stdout);
  pid_t pid = fork();
  if (pid < 0) FAIL("fork: %s", strerror(errno));
  if (pid == 0) {
    setpgid(0, 0);
    dup2(fileno(output), STDOUT_FILENO);
    dup2(fileno(output), STDERR_FILENO);
    execSelf(test->name);
  }
  setpgid(pid, pid); /* whoever comes first */
  int timed_out;
  unsigned limit = limitOf(test);
  int status = waitWithLimit(pid, limit ? limit + 2 : 0, &timed_out);
  char text[128];
  printf("%-44s %6.0f ms  %s\n", test->name, (double)(nowNs() - start) / 1e6,
         describe(status, timed_out, limit, text, sizeof(text)));
  tallyUp(test, status, output, tally);
  fflush(stdout);
}

static const TestCase *findTest(const char *name) {
  for (const TestCase *t = firstTest; t; t = t->next)
    if (!strcmp(t->name, name)) return t;
  fprintf(stderr, "there is no test '%s'; --list prints the names\n", name);
  exit(2);
}

static int runHere(const TestCase *test) {
  alarm(limitOf(test)); /* the default action of SIGALRM ends a process that hangs */
  test->body();
  fflush(stdout);
  return 0;
}

static int runMany(int count, char **names) {
  Tally tally = {.failures = temporaryFile(), .names = temporaryFile()};
  for (int i = 0; i < count; ++i) runApart(findTest(names[i]), &tally);
  for (const TestCase *t = count ? NULL : firstTest; t; t = t->next)
    if (t->is_test) runApart(t, &tally);
  moveText(tally.failures, stdout);
  moveText(tally.names, stdout);
  printf("%d passed, %d failed", tally.passed, tally.failed);
  if (tally.skipped) printf(", %d skipped", tally.skipped);
  printf("\n");
  return tally.failed != 0;
}

int main(int argc, char **argv) {
  if (argc == 2 && !strcmp(argv[1], "--list")) {
    for (const TestCase *t = firstTest; t; t = t->next)
      if (t->is_test) printf("%s\n", t->name);
    return 0;
  }
  if (argc == 2) return runHere(findTest(argv[1]));
  return runMany(argc - 1, argv + 1);
}
