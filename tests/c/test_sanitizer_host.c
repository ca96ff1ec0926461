/*
 * The sanitizer: pinned memory that the host touches without a call, by a pointer, under a queued
 * copy.
 *
 * A copy has run or has not: it is held back only where that is what a test is about.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "openreg_host_access.h"
#include "refuse.h"
#include "sanitizer_helpers.h"

#define PAGE ((int)pageSize())
#define BYTES (8 * PAGE)

static uint64_t touchedHere(void) { return orSanitizerFound(NULL, NULL); }

static char readByte(const volatile char *p) { return *p; }
static void writeByte(volatile char *p, char value) { *p = value; }

static void toHost(void *host, const void *device, size_t bytes) {
  ASSERT_OK(orMemcpyAsync(host, device, bytes, orMemcpyDeviceToHost, OR_STREAM_DEFAULT));
}

static void toDevice(void *device, const void *host, size_t bytes) {
  ASSERT_OK(orMemcpyAsync(device, host, bytes, orMemcpyHostToDevice, OR_STREAM_DEFAULT));
}

/* ---- What is reported ---- */

TEST(sanitizer_host_reads_what_is_being_written) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  ASSERT_OK(orMemset(device, 7, BYTES));
  toHost(host, device, BYTES);
  readByte(host + 5 * PAGE + 3);
  ASSERT_EQ(touchedHere(), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.memory, "pinned host memory");
  ASSERT_STR(r.later.operation, "memory access");
  ASSERT_STR(r.later.where, "the host");
  ASSERT_STR(r.earlier.operation, "orMemcpyAsync");
  ASSERT_EQ(r.later.write, 0);
  ASSERT_PTR(r.begin, host + 5 * PAGE + 3);
  ASSERT_CONTAINS(r.advice, "s.synchronize() before memory access");
  ASSERT_OK(orDeviceSynchronize());
  for (int i = 0; i < BYTES; i++) ASSERT_EQ(host[i], 7);
  ASSERT_EQ(touchedHere(), 0);
}

TEST(sanitizer_host_writes_what_is_being_read) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  memset(host, 1, BYTES);
  toDevice(device, host, BYTES);
  ASSERT_EQ(readByte(host + 9), 1); /* two readers */
  ASSERT_EQ(touchedHere(), 0);
  writeByte(host + 9, 2);
  ASSERT_EQ(touchedHere(), 1);
  ASSERT_EQ(reportAt(1).later.write, OR_ACCESS_WRITES);
  ASSERT_EQ(host[9], 2);
}

/* A copy that is done is not one that the host has waited for. */
TEST(sanitizer_host_is_early_though_the_copy_is_done) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
  orSanitizerIgnore(1);
  ASSERT_OK(orStreamSynchronize(s));
  orSanitizerIgnore(0);
  readByte(host);
  ASSERT_EQ(touchedHere(), 1);
}

/* One of a copy, though it is touched in many places; again of the next. */
TEST(sanitizer_host_is_told_once_of_a_copy) {
  sanitizeStrictly();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  for (int i = 0; i < 2; i++) {
    toHost(host, device, BYTES);
    memset(host, 3, BYTES);
    ASSERT_EQ(touchedHere(), 1);
    ASSERT_EQ(reportCount(), 1);
    memset(host, 4, BYTES);
    ASSERT_EQ(touchedHere(), 0);
    ASSERT_OK(orDeviceSynchronize());
  }
}

/* Another stream's conflict with the copy is not the host's. */
TEST(sanitizer_host_is_told_after_a_stream_was) {
  sanitizeStrictly();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, BYTES);
  ASSERT_EQ(writes(newStream(), "other", host, BYTES), 1);
  readByte(host);
  ASSERT_EQ(touchedHere(), 2);
}

/* ---- What is right ---- */

TEST(sanitizer_host_may_touch_what_it_has_waited_for) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  for (int way = 0; way < 4; way++) {
    ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
    orEvent_t e = record(s);
    if (way == 0) ASSERT_OK(orStreamSynchronize(s));
    if (way == 1) ASSERT_OK(orEventSynchronize(e));
    if (way == 2) ASSERT_OK(orDeviceSynchronize());
    while (way == 3 && orEventQuery(e) == orErrorNotReady) {
    }
    ASSERT_OK(orEventDestroy(e));
    memset(host, way, BYTES);
    ASSERT_EQ(readByte(host + BYTES - 1), way);
  }
  ASSERT_OK(orMemcpy(host, device, BYTES, orMemcpyDeviceToHost));
  memset(host, 1, BYTES);
  ASSERT_CLEAN();
}

/* Of several copies the host has waited for some. */
TEST(sanitizer_host_pages_are_guarded_by_what_is_left) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream(), other = newStream();
  ASSERT_OK(orMemcpyAsync(device, host, 4 * PAGE, orMemcpyHostToDevice, s));
  ASSERT_OK(orMemcpyAsync(device + BYTES / 2, host + PAGE, 4 * PAGE, orMemcpyHostToDevice, other));
  ASSERT_OK(orStreamSynchronize(s));
  writeByte(host, 1);
  writeByte(host + 5 * PAGE, 1);
  ASSERT_EQ(touchedHere(), 0);
  writeByte(host + PAGE, 1);
  ASSERT_EQ(touchedHere(), 1);
  ASSERT_EQ(reportAt(1).earlier.stream, other);
}

/* A page may hold parts of several buffers: the byte decides. */
TEST(sanitizer_host_may_touch_what_is_beside_a_copy) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  for (int i = 0; i < 8; i++) {
    memset(host + 1000 * i, i, 1000);
    toDevice(device + 1000 * i, host + 1000 * i, 1000);
  }
  ASSERT_CLEAN();
  writeByte(host + 7 * 1000 - 1, 0);
  ASSERT_EQ(reportCount(), 1);
}

TEST(sanitizer_host_page_beside_a_copy_is_lifted_alone) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, 100);
  toHost(host + 4 * PAGE, device, 100);
  readByte(host + 200);
  ASSERT_EQ(touchedHere(), 0);
  readByte(host + 4 * PAGE);
  ASSERT_EQ(touchedHere(), 1);
}

/* What is told of a page's first access leaves the guard of its second one. */
TEST(sanitizer_host_is_told_of_both_accesses_of_a_page) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, 100);
  toDevice(device + 200, host + 200, 100);
  readByte(host + 5);
  ASSERT_EQ(touchedHere(), 1);
  readByte(host + 250);
  ASSERT_EQ(touchedHere(), 0);
  writeByte(host + 250, 1);
  ASSERT_EQ(touchedHere(), 2);
}

TEST(sanitizer_host_operation_is_told_and_not_its_memory) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, BYTES);
  ASSERT_EQ(writes(0, "fill", host, BYTES), 1);
  memset(host, 1, BYTES);
  ASSERT_EQ(touchedHere(), 0);
  ASSERT_EQ(reportCount(), 1);
}

TEST(sanitizer_host_memory_behind_a_gate_is_judged_when_it_is_open) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemcpyAsync(device, host, BYTES, orMemcpyHostToDevice, s));
  memset(host, 5, BYTES); /* before the gate opens, and so before the copy */
  ASSERT_CLEAN();
  openGate(gate);
  writeByte(host + PAGE, 6);
  ASSERT_EQ(touchedHere(), 1);
}

/* ---- Tasks have a way of their own ---- */

TEST(sanitizer_host_tasks_reach_guarded_memory) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  ASSERT_OK(orMemsetAsync(host, 9, BYTES, s));
  ASSERT_OK(orMemcpyAsync(device, host, BYTES, orMemcpyHostToDevice, s));
  ASSERT_OK(orMemsetAsync(host, 1, BYTES, s));
  ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
  ASSERT_OK(orMemcpyAsync(host, host + BYTES / 2, BYTES / 2, orMemcpyHostToHost, s));
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < BYTES; i++) ASSERT_EQ(host[i], 9);
  ASSERT_CLEAN();
}

static orError_t addOne(void *args) {
  char *host = *(char **)args;
  void *mapped;
  orError_t error = orMapForKernel(&mapped, host, BYTES);
  if (error) return error;
  for (int i = 0; i < BYTES; i++) ((char *)mapped)[i]++;
  host[3] += 10; /* by the caller's mapping: no host either */
  return orSuccess;
}

TEST(sanitizer_host_kernels_reach_guarded_memory) {
  sanitize();
  char *host = pinnedMemory(BYTES);
  orAccess access = {host, BYTES, 1};
  memset(host, 1, BYTES);
  orLaunch l = {.size = sizeof l,
                .fn = addOne,
                .args = &host,
                .args_size = sizeof host,
                .name = "add",
                .accesses = &access,
                .access_count = 1};
  ASSERT_OK(orLaunchKernelEx(&l));
  ASSERT_OK(orDeviceSynchronize());
  for (int i = 0; i < BYTES; i++) ASSERT_EQ(host[i], i == 3 ? 12 : 2);
  ASSERT_CLEAN();
}

/* ---- System calls, forks, threads, what is not guarded ---- */

TEST(sanitizer_host_system_calls_fail) {
  sanitize();
  ASSERT_OK(orFreeHost(pinnedMemory(BYTES))); /* which nothing guards */
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  int nowhere = open("/dev/zero", O_RDWR), pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  toHost(host + 2 * PAGE, device, PAGE);
  ASSERT_EQ(write(pipes[1], host + PAGE, 100), 100); /* of other pages */
  ASSERT_EQ(write(pipes[1], host + 3 * PAGE, 100), 100);
  toHost(host, device, BYTES);
  toHost(host, device, BYTES); /* guarded already */
  errno = 0;
  ASSERT_EQ(write(pipes[1], host, 100), -1);
  ASSERT_EQ(errno, EFAULT);
  ASSERT_CLEAN();
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(write(pipes[1], host, 100), 100);
  toDevice(device, host, BYTES);
  ASSERT_EQ(write(pipes[1], host, 100), 100); /* it reads, as the copy does */
  ASSERT_EQ(read(nowhere, host, 100), -1);
  ASSERT_EQ(errno, EFAULT);
  ASSERT_OK(orSanitizerUsed(host, (size_t)BYTES, defaultOf(0))); /* an allocator has waited */
  ASSERT_EQ(read(nowhere, host, 100), 100);
  ASSERT_CLEAN();
}

static void liftWhatIsRefused(size_t below) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  refuseCalls(REFUSE_MPROTECT, PROT_READ | PROT_WRITE, below, INT_MAX);
  toHost(host, device, BYTES / 2);
  ASSERT_OK(orDeviceSynchronize());
  memset(host, 3, BYTES);
  ASSERT_CLEAN();
  toHost(host, device, BYTES / 2);
  writeByte(host + PAGE, 4);
  ASSERT_EQ(touchedHere(), 1);
  memset(host, 5, BYTES);
  ASSERT_EQ(touchedHere(), 0);
}

/* A guard that cannot be lifted from some pages is lifted from all, or by a new mapping: none stays
 * where nothing is queued. */
TEST(sanitizer_host_guards_that_the_system_does_not_lift) { liftWhatIsRefused((size_t)BYTES); }
TEST(sanitizer_host_guards_that_the_system_never_lifts) { liftWhatIsRefused(SIZE_MAX); }

/* With what the parent had, and nothing of it is the parent's. */
TEST(sanitizer_host_memory_of_a_child_is_its_own) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  memset(host, 4, BYTES);
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
  fflush(NULL);
  pid_t child = fork();
  if (!child) {
    for (int i = 0; i < BYTES; i++)
      if (host[i] != 4) _exit(1);
    memset(host, 5, BYTES);
    pid_t grandchild = fork();
    int end = 1;
    if (!grandchild) _exit(host[9] != 5);
    _exit(waitpid(grandchild, &end, 0) != grandchild || end);
  }
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_CLEAN();
  openGate(gate);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(readByte(host), 0);
}

static void *readLate(void *host) {
  readByte(host);
  return NULL;
}

TEST(sanitizer_host_thread_that_never_asks_is_told_of) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  pthread_t thread;
  toHost(host, device, BYTES);
  ASSERT_EQ(pthread_create(&thread, NULL, readLate, host), 0);
  pthread_join(thread, NULL);
  ASSERT_EQ(touchedHere(), 0);
  ASSERT_EQ(orSanitizerLeft(NULL, NULL), 1);
  ASSERT_EQ(orSanitizerLeft(NULL, NULL), 0);
}

enum { THREADS = 4, TIMES = 50 };

static atomic_int wrong;

/* With a buffer of its own, and a page of one that all share. */
static void *comeAndGo(void *arg) {
  char *shared = arg, *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  for (int i = 0; i < TIMES; i++) {
    memset(host, i, BYTES);
    if (touchedHere()) wrong++;
    ASSERT_OK(orMemcpyAsync(device, host, BYTES, orMemcpyHostToDevice, s));
    ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
    ASSERT_OK(orMemcpyAsync(shared, device, 100, orMemcpyDeviceToHost, s));
    if (i % 3 == 0) {
      readByte(host + i * 100);
      if (!touchedHere()) wrong++;
    }
    ASSERT_OK(orStreamSynchronize(s));
    readByte(host + i * 100);
    if (touchedHere()) wrong++;
    shared[200]++;
  }
  return NULL;
}

TEST(sanitizer_host_threads_that_fault_at_once) {
  sanitizeStrictly();
  char *shared = pinnedMemory(THREADS * 1000);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    ASSERT_EQ(pthread_create(&threads[i], NULL, comeAndGo, shared + 1000 * i), 0);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  ASSERT_EQ(wrong, 0);
}

TEST(sanitizer_host_memory_that_is_handed_out_again_is_guarded) {
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  sanitize();
  toHost(host, device, BYTES);
  orSanitizerIgnore(1);
  ASSERT_OK(orDeviceSynchronize());
  orSanitizerIgnore(0);
  readByte(host); /* early, and not seen */
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_CLEAN();
  ASSERT_OK(orSanitizerHostBlock(host));
  ASSERT_OK(orSanitizerHostBlock(host));
  toHost(host, device, BYTES);
  readByte(host);
  ASSERT_EQ(touchedHere(), 1);
  ASSERT_ERROR(orSanitizerHostBlock(device), orErrorInvalidValue);
}

TEST(sanitizer_host_memory_is_free_when_it_is_switched_off) {
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, BYTES);
  ASSERT_OK(orSanitizerDisable());
  memset(host, 1, BYTES);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orFreeHost(host));
  sanitize();
  host = pinnedMemory(BYTES);
  toHost(host, device, BYTES);
  ASSERT_OK(orFreeHost(host)); /* while it is guarded */
  ASSERT_CLEAN();
}

/* ---- Memory that is not ours: checksums ---- */

static char *registeredMemory(void) {
  char *memory = malloc(BYTES);
  memset(memory, 1, BYTES);
  ASSERT_OK(orHostRegister(memory, BYTES));
  return memory;
}

TEST(sanitizer_host_source_that_is_registered_is_overwritten) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  for (int early = 0; early < 2; early++) {
    Holder h = {0};
    ASSERT_OK(launchAs(s, holdKernel, &h, 0));
    ASSERT_OK(orMemcpyAsync(device, host, BYTES / 2, orMemcpyHostToDevice, s));
    if (early) host[77]++;
    ASSERT_OK(orMemcpyAsync(device, host + BYTES / 2, BYTES / 2, orMemcpyHostToDevice, s));
    letGo(&h);
    ASSERT_OK(orStreamSynchronize(s));
    host[78]++;
    ASSERT_EQ(reportCount(), early);
  }
  ASSERT_EQ(touchedHere(), 1);
  orRaceReport r = reportAt(1);
  ASSERT_STR(r.later.operation, "memory access");
  ASSERT_EQ(r.later.write, OR_ACCESS_WRITES);
  ASSERT_EQ(r.earlier.write, 0);
}

static void nothingOnHost(void *data) { (void)data; }

/* What is forgotten of one copy is not forgotten of another. */
TEST(sanitizer_host_source_is_overwritten_beside_one_that_is_given_back) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  Holder h = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, holdKernel, &h, 0));
  for (int i = 0; i < 2; i++)
    ASSERT_OK(orMemcpyAsync(device, host + i * BYTES / 2, BYTES / 2, orMemcpyHostToDevice, s));
  ASSERT_OK(orSanitizerUsed(host + BYTES / 2, BYTES / 2, 0));
  host[77]++;
  letGo(&h);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(touchedHere(), 1);
}

/* A host function tells the host, but of no sums. */
TEST(sanitizer_host_source_is_overwritten_before_a_host_function) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  Holder h = {0};
  orStream_t s = newStream();
  ASSERT_OK(launchAs(s, holdKernel, &h, 0));
  ASSERT_OK(orMemcpyAsync(device, host, BYTES, orMemcpyHostToDevice, s));
  host[77]++;
  letGo(&h);
  synchronizeUnseen(s);
  ASSERT_OK(orLaunchHostFunc(s, nothingOnHost, NULL));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(touchedHere(), 1);
}

TEST(sanitizer_host_destination_that_is_registered_is_overwritten) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  for (int early = 0; early < 2; early++) {
    toHost(host, device, BYTES);
    orSanitizerIgnore(1);
    ASSERT_OK(orDeviceSynchronize()); /* the copy is done, and the program cannot know */
    orSanitizerIgnore(0);
    if (early) host[77]++;
    ASSERT_OK(orDeviceSynchronize());
    host[78]++;
    ASSERT_EQ(reportCount(), early);
  }
  ASSERT_EQ(touchedHere(), 1);
}

/* The sum is that of the copy's end, not of a later task's. */
TEST(sanitizer_host_destination_is_overwritten_before_a_later_task) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  Holder h = {0};
  orStream_t s = newStream();
  ASSERT_OK(orMemcpyAsync(host, device, BYTES, orMemcpyDeviceToHost, s));
  hold(s, &h);
  host[77]++;
  letGo(&h);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(touchedHere(), 1);
}

TEST(sanitizer_host_memory_from_before_has_a_checksum) {
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  void *other = block(BYTES, defaultOf(0));
  sanitize();
  toHost(host, device, BYTES);
  ASSERT_OK(orCacheFree(other));
  ASSERT_OK(orSanitizerUsed(host - 8, 8, 0));
  ASSERT_OK(orSanitizerUsed(host + BYTES, 8, 0));
  orSanitizerIgnore(1);
  ASSERT_OK(orDeviceSynchronize());
  orSanitizerIgnore(0);
  host[5]++;
  ASSERT_ERROR(orStreamQuery(OR_STREAM_DEFAULT), orErrorNotReady);
  ASSERT_OK(orStreamQuery(OR_STREAM_DEFAULT)); /* which tells the host as well */
  ASSERT_EQ(touchedHere(), 1);
}

/* More accesses than there are marks for. */
TEST(sanitizer_host_checksums_the_first_accesses_of_a_call) {
  enum { MANY = 65 };
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  for (int of_host = 0; of_host < MANY; of_host += MANY - 1) {
    orMemoryAccess all[MANY];
    for (int i = 0; i < MANY; i++)
      all[i] = (orMemoryAccess){.data = i == of_host ? host : device + i, .width = 1};
    ASSERT_OK(orSanitizerAccess(s, "many", all, MANY));
    ASSERT_OK(orStreamSynchronize(s));
  }
  ASSERT_CLEAN();
}

/* In between others write, in order. */
TEST(sanitizer_host_checksums_of_what_is_right) {
  sanitize();
  char *host = registeredMemory(), *device = deviceMemory(BYTES);
  orStream_t s = newStream();
  toHost(host, device, BYTES);
  ASSERT_OK(orMemsetAsync(host, 3, BYTES, OR_STREAM_DEFAULT));
  toDevice(device, host, BYTES);
  toHost(host, device, BYTES / 2);
  ASSERT_OK(orDeviceSynchronize());
  memset(host, 4, BYTES);
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemcpyAsync(device, host, BYTES, orMemcpyHostToDevice, s));
  memset(host, 5, BYTES); /* and then the gate opens */
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  memset(host, 6, BYTES);
  ASSERT_OK(orMemcpy(device, host, BYTES, orMemcpyHostToDevice));
  ASSERT_OK(orMemcpy(host, device, BYTES, orMemcpyDeviceToHost));
  memset(host, 7, BYTES);
  toHost(host, device, BYTES);
  ASSERT_OK(orHostUnregister(host));
  memset(host, 8, BYTES);
  free(host);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_CLEAN();
}

/* ---- Other faults ---- */

static volatile sig_atomic_t others;
static char *wild;

static void countOther(int number) {
  (void)number;
  others = others + 1;
  _exit(others == 1 ? 33 : 34);
}

static void faultElsewhere(void) {
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, BYTES);
  readByte(host);
  if (touchedHere() != 1) _exit(1);
  readByte(device);
}

static int exitOf(void (*body)(void)) {
  int status;
  fflush(NULL);
  pid_t child = fork();
  if (!child) {
    body();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, &status, 0), child);
  return status;
}

static void underAHandler(void) {
  signal(SIGSEGV, countOther);
  sanitize();
  faultElsewhere();
}

/* Put there later, as Python's faulthandler is. */
static void underALaterHandler(void) {
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  signal(SIGSEGV, countOther);
  faultElsewhere();
}

static void exitBySignal(int number, siginfo_t *info, void *context) {
  (void)number;
  _exit(info->si_addr == wild && context ? 33 : 34);
}

static void underAHandlerThatIsTold(void) {
  sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = exitBySignal, .sa_flags = SA_SIGINFO},
            NULL);
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  wild = deviceMemory(BYTES);
  readByte(wild);
}

static void underNone(void) {
  signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own */
  sanitize();
  faultElsewhere();
}

TEST(sanitizer_host_leaves_other_faults_to_others) {
  ASSERT_EQ(WEXITSTATUS(exitOf(underAHandler)), 33);
  ASSERT_EQ(WEXITSTATUS(exitOf(underAHandlerThatIsTold)), 33);
  ASSERT_EQ(WEXITSTATUS(exitOf(underALaterHandler)), 33);
  int status = exitOf(underNone);
  ASSERT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* It stays, whatever the sanitizer lifts. */
static void underAProtectionOfItsOwn(void) {
  signal(SIGSEGV, countOther);
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  toHost(host, device, BYTES);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(mprotect(host, (size_t)PAGE, PROT_NONE), 0);
  readByte(host);
}

TEST(sanitizer_host_leaves_the_protection_of_others_to_others) {
  ASSERT_EQ(WEXITSTATUS(exitOf(underAProtectionOfItsOwn)), 33);
}

static int *handled; /* shared with the child */

static void faultAgain(int number) {
  (void)number;
  ++*handled;
  readByte(wild);
}

static void underAHandlerThatFaults(void) {
  sigaction(SIGSEGV, &(struct sigaction){.sa_handler = faultAgain, .sa_flags = SA_NODEFER}, NULL);
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  wild = deviceMemory(BYTES);
  readByte(wild);
}

TEST(sanitizer_host_ends_with_a_handler_that_faults) {
  handled = mmap(NULL, sizeof *handled, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT(handled != MAP_FAILED);
  int status = exitOf(underAHandlerThatFaults);
  ASSERT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  ASSERT_EQ(*handled, 1);
}

static sigjmp_buf back;

static void leaveByJump(int number) {
  (void)number;
  others = others + 1;
  siglongjmp(back, 1);
}

/* As of a language whose errors are exceptions. */
static void faultUnderAJumper(void) {
  signal(SIGSEGV, leaveByJump);
  sanitize();
  char *device = deviceMemory(BYTES);
  toHost(pinnedMemory(BYTES), device, BYTES);
  sigsetjmp(back, 1);
  if (others < 3) readByte(device);
  _exit(33);
}

TEST(sanitizer_host_calls_a_handler_that_jumps_again) {
  ASSERT_EQ(WEXITSTATUS(exitOf(faultUnderAJumper)), 33);
}

static bool isFirst(void) {
  struct sigaction now;
  ASSERT_EQ(sigaction(SIGSEGV, NULL, &now), 0);
  return now.sa_handler != countOther;
}

static void giveWayAndComeBack(void) {
  signal(SIGSEGV, countOther);
  sanitize();
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  ASSERT_EQ(orHostAccessHandler(0), 1);
  ASSERT(!isFirst());
  toHost(host, device, BYTES);
  ASSERT(isFirst());
  ASSERT_EQ(orHostAccessHandler(0), 1);
  ASSERT(!isFirst());
  ASSERT_EQ(orHostAccessHandler(1), 0);
  ASSERT_EQ(orHostAccessHandler(1), 1);
  ASSERT(isFirst());
  readByte(host);
  ASSERT_EQ(touchedHere(), 1);
  readByte(device);
}

TEST(sanitizer_host_handler_gives_way_and_comes_back) {
  ASSERT_EQ(WEXITSTATUS(exitOf(giveWayAndComeBack)), 33);
}

static void raiseUnderNone(void) {
  signal(SIGSEGV, SIG_DFL);
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  raise(SIGSEGV);
}

static void raiseIgnored(void) {
  signal(SIGSEGV, SIG_IGN);
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  raise(SIGSEGV);
  raise(SIGSEGV);
  _exit(33);
}

TEST(sanitizer_host_leaves_what_is_sent_to_the_system) {
  int status = exitOf(raiseUnderNone);
  ASSERT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  ASSERT_EQ(WEXITSTATUS(exitOf(raiseIgnored)), 33);
}

/* ---- Alternate stacks ---- */

enum { ALTERNATE = 16 << 10 };

static char *useAlternateStack(void) {
  char *stack = calloc(1, ALTERNATE);
  ASSERT_EQ(sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = ALTERNATE}, NULL), 0);
  return stack;
}

static int overflow(volatile char *above) {
  volatile char here[PAGE];
  here[0] = above[0];
  if (here[0]) return 0; /* not reached */
  return overflow(here) + here[0];
}

static void overflowTheStack(void) {
  char first = 0;
  useAlternateStack();
  sigaction(SIGSEGV, &(struct sigaction){.sa_handler = countOther, .sa_flags = SA_ONSTACK}, NULL);
  sanitize();
  toHost(pinnedMemory(BYTES), deviceMemory(BYTES), BYTES);
  overflow(&first);
}

TEST(sanitizer_host_leaves_a_stack_overflow_to_its_handler) {
  ASSERT_EQ(WEXITSTATUS(exitOf(overflowTheStack)), 33);
}

/* ThreadSanitizer blocks a handler's own signal. */
#ifdef __SANITIZE_THREAD__
enum { NESTED = 0 };
#else
enum { NESTED = 1 };
#endif

static struct {
  volatile int calls; /* changed by an instruction that is no call */
  char *nested;       /* touched in the midst of a report */
} deep;

/* More stack than the alternate one has, and a fault of its own. */
static void touchDeeply(void *context) {
  volatile char room[4 * ALTERNATE];
  (void)context;
  for (size_t i = 0; i < sizeof room; i += 512) room[i] = 1;
  deep.calls = deep.calls + 1;
  if (deep.calls == 1 && NESTED) readByte(deep.nested);
}

TEST(sanitizer_host_reports_on_the_stack_that_is_interrupted) {
  char *alternate = useAlternateStack();
  stack_t now;
  ASSERT_OK(orSanitizerEnable(
      &(orSanitizerOptions){.size = sizeof(orSanitizerOptions), .touched = touchDeeply}));
  char *host = pinnedMemory(BYTES), *device = deviceMemory(BYTES);
  deep.nested = pinnedMemory(BYTES);
  toHost(host, device, BYTES);
  toHost(deep.nested, device, BYTES);
  memset(alternate, 0x5a, 64); /* its far end */
  readByte(host + 3);
  ASSERT_EQ(deep.calls, 1 + NESTED);
  for (int i = 0; i < 64; i++) ASSERT_EQ(alternate[i], 0x5a);
  ASSERT_EQ(sigaltstack(NULL, &now), 0);
  ASSERT_PTR(now.ss_sp, alternate);
  ASSERT_EQ(now.ss_flags, 0);
}
