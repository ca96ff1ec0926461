/*
 * The report of a host access to device memory: what it says, where it is written, and what runs
 * after it.
 */
#include "openreg_host_access.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"

static volatile char sink;

static void readByte(const void *at) { sink = *(const volatile char *)at; }
static void writeByte(void *at) { *(volatile char *)at = 1; }

/* Before the first use, as a sanitizer has a handler of its own. */
static void haveNoHandler(void) { signal(SIGSEGV, SIG_DFL); }

static char *allocate(size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orMalloc(&p, bytes));
  return p;
}

static char *cached(size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orCacheMalloc(&p, bytes, OR_STREAM_DEFAULT));
  return p;
}

/* What the child wrote before it died of the signal. */
static const char *reportOf(void (*body)(void)) {
  beginCapture();
  int status = forkAndRun(body);
  const char *text = endCapture();
  ASSERT(WIFSIGNALED(status));
  ASSERT_EQ(WTERMSIG(status), SIGSEGV);
  return text;
}

/* ---- what it says ---- */

static void readAllocation(void) {
  haveNoHandler();
  char *first = allocate(100000);
  allocate(5000);
  readByte(first + 50000);
}

static void writeOnTheOther(void) {
  haveNoHandler();
  ASSERT_OK(orSetDevice(1));
  writeByte(allocate(10) + 3);
}

static void readFreed(void) {
  haveNoHandler();
  char *p = allocate(5000);
  ASSERT_OK(orFree(p));
  readByte(p);
}

TEST(host_access_names_the_allocation) {
  const char *text = reportOf(readAllocation);
  ASSERT_CONTAINS(text, "openreg: SIGSEGV: the host reads 0x");
  ASSERT_CONTAINS(text, ", memory of openreg:0, ");
  ASSERT_CONTAINS(text, "byte 50000 of a block of 100000 bytes\n");
  ASSERT_CONTAINS(text, "copy it to the host first: x.cpu()");
  text = reportOf(writeOnTheOther);
  ASSERT_CONTAINS(text, "the host writes 0x");
  ASSERT_CONTAINS(text, "memory of openreg:1, ");
  ASSERT_CONTAINS(text, "byte 3 of a block of 10 bytes\n");
  ASSERT_CONTAINS(reportOf(readFreed), "nothing is allocated there\n");
}

static const orOrigin origin = {sizeof origin, "float32", "scale.py", 12};

static void readBlock(void) {
  haveNoHandler();
  for (int i = 0; i < 1000; i++) cached(100); /* the table grows */
  orCacheSetOrigin(&origin);
  char *p = cached(4000);
  cached(4000);
  readByte(p + 17);
}

static void readFreeBlock(void) {
  haveNoHandler();
  orCacheSetOrigin(&origin);
  char *p = cached(4000);
  cached(4000);
  ASSERT_OK(orCacheFree(p));
  readByte(p);
}

static void readBlockAfterIt(void) {
  haveNoHandler();
  orCacheSetOrigin(&origin);
  cached(4000);
  readByte(cached(4000));
}

TEST(host_access_names_the_block_and_its_origin) {
  ASSERT_CONTAINS(reportOf(readBlock),
                  "byte 17 of a block of 4000 bytes, of float32, allocated at scale.py:12\n");
  ASSERT_CONTAINS(reportOf(readFreeBlock), "byte 0 of a block that is free, of ");
  ASSERT_CONTAINS(reportOf(readBlockAfterIt), "byte 0 of a block of 4000 bytes\n");
}

static void readInAnOperation(void) {
  haveNoHandler();
  ASSERT_PTR(orHostAccessOperation("my::outer"), NULL);
  ASSERT_STR(orHostAccessOperation("my::inner"), "my::outer");
  readByte(allocate(10));
}

static void readAfterALaunch(void) {
  haveNoHandler();
  atomic_int ran = 0;
  launch(OR_STREAM_DEFAULT, countKernel, &ran);
  readByte(allocate(10));
}

static orError_t readsItself(void *args) {
  readByte(*(char **)args);
  return orSuccess;
}

static void readInATask(void) {
  haveNoHandler();
  launch(OR_STREAM_DEFAULT, readsItself, allocate(10));
  ASSERT_OK(orDeviceSynchronize());
}

TEST(host_access_names_what_the_thread_does) {
  ASSERT_CONTAINS(reportOf(readInAnOperation), "in the operation my::inner\n");
  ASSERT_CONTAINS(reportOf(readAfterALaunch), "the thread has queued last: test\n");
  const char *text = reportOf(readInATask);
  ASSERT_CONTAINS(text, "a task reads 0x");
  ASSERT_CONTAINS(text, "in the task test\n");
  ASSERT_CONTAINS(text, "orMapForKernel");
}

/* ---- where ---- */

static void *readThere(void *at) {
  readByte(at);
  return NULL;
}

static void readInAThread(void) {
  pthread_t thread;
  haveNoHandler();
  ASSERT_EQ(pthread_create(&thread, NULL, readThere, allocate(10)), 0);
  pthread_join(thread, NULL);
}

static void readInAChild(void) {
  haveNoHandler();
  char *p = allocate(10);
  int status;
  pid_t child = fork();
  if (!child) readByte(p + 1);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT(WIFSIGNALED(status));
  raise(SIGSEGV); /* of this process, that has touched nothing */
}

TEST(host_access_is_reported_in_threads_and_children) {
  ASSERT_CONTAINS(reportOf(readInAThread), "byte 0 of a block of 10 bytes\n");
  const char *text = reportOf(readInAChild);
  ASSERT_CONTAINS(text, "byte 1 of a block of 10 bytes\n");
  ASSERT_PTR(strstr(strstr(text, "SIGSEGV") + 1, "SIGSEGV"), NULL);
}

static void readNothing(void) {
  haveNoHandler();
  allocate(10);
  char *volatile nothing = (char *)(uintptr_t)8; /* not null, of which UBSan has a word to say */
  readByte(nothing);
}

TEST(host_access_says_nothing_of_other_faults) { ASSERT_STR(reportOf(readNothing), ""); }

static void readWithAHint(void) {
  haveNoHandler();
  orHostAccessHint("openreg:   more is to be had\n");
  readByte(allocate(10));
}

static void readIntoAFile(void) {
  FILE *file = tmpfile();
  int status;
  haveNoHandler();
  orHostAccessOutput(fileno(file));
  pid_t child = fork();
  if (!child) readByte(allocate(10));
  ASSERT_EQ(waitpid(child, &status, 0), child);
  char text[32] = "";
  ASSERT_EQ(pread(fileno(file), text, 17, 0), 17);
  ASSERT_STR(text, "openreg: SIGSEGV:");
  raise(SIGSEGV);
}

TEST(host_access_ends_with_a_hint_and_goes_to_a_file) {
  ASSERT_CONTAINS(reportOf(readWithAHint), "openreg:   more is to be had\n");
  ASSERT_STR(reportOf(readIntoAFile), "");
}

/* ---- other handlers ---- */

static struct {
  char *memory;
  char *alternate;
  bool onAlternate, blocked, blockedItself;
} seen;

enum { ALTERNATE = 64 << 10 };

static void leave(int number) {
  char here;
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, NULL, &mask);
  seen.onAlternate = (size_t)(&here - seen.alternate) < ALTERNATE;
  seen.blocked = sigismember(&mask, SIGUSR2);
  seen.blockedItself = sigismember(&mask, number);
  _exit(seen.onAlternate + 2 * seen.blocked + 4 * seen.blockedItself + 8);
}

static char alternate_stack[ALTERNATE];

static void readUnder(int flags) {
  struct sigaction action = {.sa_handler = leave, .sa_flags = flags};
  seen.alternate = alternate_stack;
  ASSERT_EQ(sigaltstack(&(stack_t){.ss_sp = alternate_stack, .ss_size = ALTERNATE}, NULL), 0);
  sigaddset(&action.sa_mask, SIGUSR2);
  sigaction(SIGSEGV, &action, NULL);
  orHostAccessHint("openreg:   more is to be had\n");
  readByte(allocate(10));
}

static void readUnderAHandler(void) { readUnder(0); }
static void readUnderOneOnItsStack(void) { readUnder(SA_ONSTACK | SA_NODEFER); }

static const char *textOf(void (*body)(void), int exit_status) {
  beginCapture();
  int status = forkAndRun(body);
  const char *text = endCapture();
  ASSERT(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), exit_status);
  return text;
}

/* ThreadSanitizer blocks a handler's own signal. */
#ifdef __SANITIZE_THREAD__
enum { OWN = 4 };
#else
enum { OWN = 0 };
#endif

TEST(host_access_calls_the_earlier_handler_as_it_asked) {
  const char *text = textOf(readUnderAHandler, 8 + 4 + 2);
  ASSERT_CONTAINS(text, "the host reads 0x");
  ASSERT_PTR(strstr(text, "more is to be had"), NULL);
  ASSERT_CONTAINS(textOf(readUnderOneOnItsStack, 8 + OWN + 2 + 1), "the host reads 0x");
}

static struct sigaction earlier;

/* As Python's faulthandler does. */
static void restoreAndRaise(int number) {
  static const char text[] = "the later one\n";
  ASSERT_GT(write(STDERR_FILENO, text, sizeof text - 1), 0);
  sigaction(number, &earlier, NULL);
  raise(number);
}

static void readUnderALaterHandler(void) {
  haveNoHandler();
  char *p = allocate(10);
  sigaction(SIGSEGV, &(struct sigaction){.sa_handler = restoreAndRaise, .sa_flags = SA_NODEFER},
            &earlier);
  readByte(p);
}

/* Put there while the library's has given way. */
static void readUnderOneThatIsBelow(void) {
  haveNoHandler();
  char *p = allocate(10);
  ASSERT_EQ(orHostAccessHandler(0), 1);
  sigaction(SIGSEGV, &(struct sigaction){.sa_handler = restoreAndRaise, .sa_flags = SA_NODEFER},
            &earlier);
  ASSERT_EQ(orHostAccessHandler(1), 0);
  readByte(p);
}

TEST(host_access_is_reported_once_beside_a_later_handler) {
  const char *text = reportOf(readUnderALaterHandler);
  ASSERT_CONTAINS(text, "the later one\nopenreg: SIGSEGV: the host reads 0x");
  text = reportOf(readUnderOneThatIsBelow);
  ASSERT_CONTAINS(text, "openreg: SIGSEGV: the host reads 0x");
  ASSERT_CONTAINS(text, "\nthe later one\n");
  ASSERT_PTR(strstr(strstr(text, "SIGSEGV") + 1, "SIGSEGV"), NULL);
}
