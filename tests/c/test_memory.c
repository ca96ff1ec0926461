/*
 * Memory: addresses the host cannot touch and kernels can, capacity, pointers and what they belong
 * to.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"
#include "refuse.h"

static void *allocate(size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orMalloc(&p, bytes));
  return p;
}

static size_t freeBytes(void) {
  size_t now, total;
  ASSERT_OK(orMemGetInfo(&now, &total));
  return now;
}

static size_t capacity(void) {
  size_t now, total;
  ASSERT_OK(orMemGetInfo(&now, &total));
  return total;
}

/* ---- isolation ---- */

static volatile char sink;

static void touchAllocation(void) {
  char *p = allocate(100000);
  ASSERT_OK(orMemset(p, 1, 100000));
  signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own */
  sink = p[50000];
}

static void touchWhileAKernelUsesIt(void) {
  char *p = allocate(4096);
  static Holder h;
  hold(newStream(), &h);
  signal(SIGSEGV, SIG_DFL);
  sink = p[0];
}

static void writeFreed(void) {
  char *p = allocate(4096);
  ASSERT_OK(orFree(p));
  signal(SIGSEGV, SIG_DFL);
  *(volatile char *)p = 1;
}

TEST(memory_host_access_is_fatal) {
  void (*const bodies[])(void) = {touchAllocation, touchWhileAKernelUsesIt, writeFreed};
  for (int i = 0; i < 3; i++) {
    int status = forkAndRun(bodies[i]); /* before first use, so that the child may use the device */
    ASSERT(WIFSIGNALED(status));
    ASSERT_EQ(WTERMSIG(status), SIGSEGV);
  }
}

typedef struct Sum {
  const char *ptr;
  size_t bytes;
  long result;
} Sum;

static orError_t sumKernel(void *args) {
  Sum *s = *(Sum **)args;
  void *address;
  ASSERT_OK(orMapForKernel(&address, s->ptr, s->bytes));
  s->result = 0;
  for (size_t i = 0; i < s->bytes; i++) s->result += ((unsigned char *)address)[i];
  return orSuccess;
}

TEST(memory_kernels_read_it) {
  Sum s = {.ptr = allocate(10000), .bytes = 9000};
  ASSERT_OK(orMemset((void *)s.ptr, 2, 10000));
  s.ptr += 500; /* any interior range */
  launch(OR_STREAM_DEFAULT, sumKernel, &s);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(s.result, 18000);
}

static orError_t mapWrongly(void *args) {
  char *p = *(char **)args;
  void *address;
  ASSERT_REFUSED(orMapForKernel(&address, p, 10001), orErrorInvalidValue,
                 "not within one allocation");
  ASSERT_REFUSED(orMapForKernel(&address, p + 9999, 2), orErrorInvalidValue,
                 "not within one allocation");
  ASSERT_REFUSED(orMapForKernel(&address, &address, 2), orErrorInvalidValue,
                 "not within one allocation");
  ASSERT_ERROR(orMapForKernel(NULL, p, 1), orErrorInvalidValue);
  ASSERT_OK(orMapForKernel(&address, p + 9999, 1));
  ASSERT_NE((uintptr_t)address, (uintptr_t)(p + 9999));
  return orSuccess;
}

TEST(memory_map_is_checked) {
  char *p = allocate(10000);
  void *address;
  ASSERT_REFUSED(orMapForKernel(&address, p, 1), orErrorNotPermitted, "only a kernel may call it");
  launch(OR_STREAM_DEFAULT, mapWrongly, p);
  ASSERT_OK(orDeviceSynchronize());
}

/* ---- pointers ---- */

static void assertAttributes(const void *ptr, orMemoryType type, int device, const void *base,
                             size_t size) {
  orPointerAttributes a = {.struct_size = sizeof a};
  memset(&a.type, 0x55, sizeof a - sizeof a.struct_size);
  ASSERT_OK(orPointerGetAttributes(&a, ptr));
  ASSERT_EQ(a.type, type);
  ASSERT_EQ(a.device, device);
  ASSERT_PTR(a.base, base);
  ASSERT_EQ(a.size, size);
}

TEST(memory_attributes_of_any_pointer) {
  char *d = allocate(5000), *p, local[10];
  static char registered[10000];
  ASSERT_OK(orSetDevice(1));
  char *e = allocate(1);
  ASSERT_OK(orMallocHost((void **)&p, 300));
  ASSERT_OK(orHostRegister(registered, sizeof registered));
  assertAttributes(d, orMemoryTypeDevice, 0, d, 5000);
  assertAttributes(d + 4999, orMemoryTypeDevice, 0, d, 5000);
  assertAttributes(d + 5000, orMemoryTypeUnregistered, -1, NULL,
                   0); /* the rest of the page is not the caller's */
  assertAttributes(e, orMemoryTypeDevice, 1, e, 1);
  assertAttributes(p + 299, orMemoryTypeHost, -1, p, 300);
  assertAttributes(registered + 77, orMemoryTypeHost, -1, registered, 10000);
  assertAttributes(local, orMemoryTypeUnregistered, -1, NULL, 0);
  assertAttributes(NULL, orMemoryTypeUnregistered, -1, NULL, 0);
  ASSERT_OK(orFree(d));
  assertAttributes(d, orMemoryTypeUnregistered, -1, NULL, 0);
  ASSERT_OK(orHostUnregister(registered));
  assertAttributes(registered, orMemoryTypeUnregistered, -1, NULL, 0);
  ASSERT_ERROR(orPointerGetAttributes(NULL, d), orErrorInvalidValue);
}

typedef struct Range {
  const char *ptr;
  size_t bytes;
  orError_t result;
} Range;

static orError_t mapRange(void *args) {
  Range *r = *(Range **)args;
  void *address;
  r->result = orMapForKernel(&address, r->ptr, r->bytes);
  return orSuccess;
}

static orError_t mapOnLane(const char *ptr, size_t bytes) {
  Range range = {.ptr = ptr, .bytes = bytes};
  launch(OR_STREAM_DEFAULT, mapRange, &range);
  ASSERT_OK(orDeviceSynchronize());
  return range.result;
}

/* Threads keep what they have found. */
TEST(memory_that_is_gone_is_found_by_no_thread) {
  static char registered[10000];
  char *d = allocate(5000);
  ASSERT_OK(orHostRegister(registered, 10000));
  assertAttributes(registered, orMemoryTypeHost, -1, registered, 10000);
  ASSERT_OK(mapOnLane(registered, 10000));
  ASSERT_OK(orHostUnregister(registered));
  ASSERT_OK(orHostRegister(registered, 4000));
  assertAttributes(registered, orMemoryTypeHost, -1, registered, 4000);
  ASSERT_EQ(mapOnLane(registered, 10000), orErrorInvalidValue);
  ASSERT_OK(mapOnLane(registered, 4000));
  ASSERT_OK(mapOnLane(d, 5000));
  ASSERT_OK(orFree(d));
  ASSERT_EQ(mapOnLane(d, 5000), orErrorInvalidValue);
}

TEST(memory_free_refuses_what_is_not_a_start) {
  char *d = allocate(5000), *p, local;
  ASSERT_OK(orMallocHost((void **)&p, 5000));
  ASSERT_REFUSED(orFree(d + 1), orErrorInvalidValue,
                 "is not the start of a live device allocation");
  ASSERT_REFUSED(orFree(&local), orErrorInvalidValue, "is not the start");
  ASSERT_REFUSED(orFree(p), orErrorInvalidValue, "is not the start");
  ASSERT_REFUSED(orFreeHost(d), orErrorInvalidValue,
                 "is not the start of a live pinned allocation");
  ASSERT_REFUSED(orFreeHost(p + 8), orErrorInvalidValue, "is not the start");
  ASSERT_REFUSED(orHostUnregister(p), orErrorInvalidValue,
                 "is not the start of a registered range");
  ASSERT_OK(orFree(d));
  ASSERT_REFUSED(orFree(d), orErrorInvalidValue, "is not the start");
  ASSERT_OK(orFreeHost(p));
  ASSERT_REFUSED(orFreeHost(p), orErrorInvalidValue, "is not the start");
  ASSERT_OK(orFree(NULL));
  ASSERT_OK(orFreeHost(NULL));
}

TEST(memory_zero_bytes_is_null) {
  void *p = &p;
  size_t before = freeBytes();
  ASSERT_OK(orMalloc(&p, 0));
  ASSERT_PTR(p, NULL);
  p = &p;
  ASSERT_OK(orMallocHost(&p, 0));
  ASSERT_PTR(p, NULL);
  ASSERT_EQ(freeBytes(), before);
  ASSERT_ERROR(orMalloc(NULL, 1), orErrorInvalidValue);
  ASSERT_ERROR(orMallocHost(NULL, 1), orErrorInvalidValue);
}

TEST(memory_register_refuses_overlaps) {
  static char bytes[3000];
  void *p, *d = allocate(4096);
  ASSERT_OK(orMallocHost(&p, 4096));
  ASSERT_OK(orHostRegister(bytes + 1000, 1000));
  ASSERT_REFUSED(orHostRegister(bytes + 1000, 1000), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister(bytes, 1001), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister(bytes + 1999, 10), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister(bytes, 3000), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister((char *)p + 10, 10), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister(d, 10), orErrorAlreadyExists, "overlaps");
  ASSERT_REFUSED(orHostRegister(bytes, 0), orErrorInvalidValue, "empty");
  ASSERT_REFUSED(orHostRegister(NULL, 10), orErrorInvalidValue, "empty");
  ASSERT_REFUSED(orHostRegister(bytes, SIZE_MAX), orErrorInvalidValue, "address space");
  ASSERT_OK(orHostRegister(bytes, 1000));
  ASSERT_OK(orHostRegister(bytes + 2000, 1000));
  for (int i = 0; i < 3; i++) ASSERT_OK(orHostUnregister(bytes + i * 1000));
}

TEST(memory_pinned_is_zeroed_and_the_hosts) {
  unsigned char *p;
  ASSERT_OK(orMallocHost((void **)&p, 10000));
  for (int i = 0; i < 10000; i++) ASSERT_EQ(p[i], 0);
  memset(p, 1, 10000);
  ASSERT_OK(orFreeHost(p));
}

/* ---- capacity ---- */

TEST(memory_capacity) {
  setenv("OPENREG_DEVICE_MEMORY", "64M", 1);
  ASSERT_EQ(capacity(), 64 << 20);
  ASSERT_EQ(freeBytes(), 64 << 20);
  ASSERT_EQ(orDeviceIsActive(0), 0); /* asking is no use */
  char *a = allocate(40 << 20);
  ASSERT_EQ(freeBytes(), 24 << 20);
  void *b = &b;
  ASSERT_REFUSED(orMalloc(&b, (24 << 20) + 1), orErrorMemoryAllocation,
                 "device 0: 25165825 bytes were requested, 25165824 of 67108864 are free");
  ASSERT_PTR(b, NULL);
  ASSERT_EQ(orGetLastError(), orErrorMemoryAllocation);
  ASSERT_REFUSED(orMalloc(&b, SIZE_MAX), orErrorMemoryAllocation, "were requested");
  ASSERT_EQ(freeBytes(), 24 << 20); /* everything as it was */
  b = allocate(24 << 20);
  ASSERT_EQ(freeBytes(), 0);
  ASSERT_ERROR(orMalloc(&b, 1), orErrorMemoryAllocation);
  ASSERT_OK(orSetDevice(1)); /* the other device has its own */
  ASSERT_EQ(freeBytes(), 64 << 20);
  b = allocate(64 << 20);
  ASSERT_OK(orSetDevice(0));
  ASSERT_OK(orFree(b));
  ASSERT_OK(orFree(a));
  ASSERT_EQ(freeBytes(), 40 << 20);
  a = allocate(40 << 20);
  ASSERT_OK(orMemset(a, 1, 40 << 20));
}

TEST(memory_sizes_count_in_pages) {
  char sixteen[32];
  snprintf(sixteen, sizeof sixteen, "%zu", 16 * pageSize());
  setenv("OPENREG_DEVICE_MEMORY", sixteen, 1);
  for (int i = 0; i < 16; i++) allocate(1);
  void *p;
  ASSERT_ERROR(orMalloc(&p, 1), orErrorMemoryAllocation);
}

/* What is freed has no contents left, and costs the machine nothing. */
typedef struct Usage {
  long addresses, resident, shared; /* bytes */
} Usage;

static Usage usage(void) {
  FILE *f = fopen("/proc/self/statm", "r");
  Usage u = {0};
  if (!f || fscanf(f, "%ld %ld %ld", &u.addresses, &u.resident, &u.shared) != 3)
    FAIL("statm: %s", strerror(errno));
  fclose(f);
  long page = (long)pageSize();
  return (Usage){u.addresses * page, u.resident * page, u.shared * page};
}

TEST(memory_freed_pages_go_back) {
  long before = usage().shared;
  void *p = allocate(32 << 20);
  ASSERT_OK(orMemset(p, 1, 32 << 20));
  ASSERT_GE(usage().shared - before, 31 << 20);
  ASSERT_OK(orFree(p));
  ASSERT_LE(usage().shared - before, 8 << 20);
}

/* Whatever the pattern of sizes and lives, what fits the capacity fits the addresses. */
TEST_WITH_LIMIT(memory_fragmentation_never_fails, 60) {
  enum { SLOTS = 4000, PAGES = 4096 };
  static void *slots[SLOTS];
  static size_t sizes[SLOTS];
  const size_t page = pageSize(), total = PAGES * page;
  char capacity[32];
  snprintf(capacity, sizeof capacity, "%zu", total);
  setenv("OPENREG_DEVICE_MEMORY", capacity, 1);
  size_t used = 0;
  uint32_t x = 1;
  for (int i = 0; i < 60000; i++) {
    x = x * 1664525u + 1013904223u;
    int k = (int)((x >> 8) % SLOTS);
    if (slots[k]) {
      ASSERT_OK(orFree(slots[k]));
      used -= sizes[k];
      slots[k] = NULL;
    }
    size_t size = page << (x >> 28) % 10;
    size += size * ((x >> 20) % 16) / 16;
    size = (size + page - 1) / page * page;
    if (size > total - used) continue;
    slots[k] = allocate(size);
    sizes[k] = size;
    used += size;
    ASSERT_EQ(freeBytes(), total - used);
  }
  /* The worst for buddies: all single pages, every second one freed, then larger and larger
   * ones. */
  for (int k = 0; k < SLOTS; k++) ASSERT_OK(orFree(slots[k]));
  static void *pages[PAGES];
  for (int k = 0; k < PAGES; k++) pages[k] = allocate(page);
  for (size_t step = 2, size = 2 * page; size <= total / 2; step *= 2, size *= 2) {
    for (int k = 0; k < PAGES; k++)
      if (pages[k] && (size_t)k % step != 0) {
        ASSERT_OK(orFree(pages[k]));
        pages[k] = NULL;
      }
    size_t room = freeBytes();
    static void *large[PAGES];
    int n = 0;
    for (; room >= size; room -= size) large[n++] = allocate(size);
    while (n) ASSERT_OK(orFree(large[--n]));
  }
}

TEST(memory_allocations_do_not_overlap) {
  enum { COUNT = 300 };
  static char *p[COUNT];
  for (int i = 0; i < COUNT; i++) {
    p[i] = allocate((size_t)(i * 37 % 9000 + 1));
    ASSERT_EQ((uintptr_t)p[i] % 512, 0);
    ASSERT_OK(orMemsetAsync(p[i], i, (size_t)(i * 37 % 9000 + 1), 0));
  }
  for (int i = 0; i < COUNT; i++) {
    unsigned char bytes[9001];
    size_t n = (size_t)(i * 37 % 9000 + 1);
    ASSERT_OK(orMemcpy(bytes, p[i], n, orMemcpyDefault));
    for (size_t k = 0; k < n; k++) ASSERT_EQ(bytes[k], (unsigned char)i);
  }
}

static void churn(int thread, void *context) {
  (void)context;
  uint32_t x = (uint32_t)thread + 1;
  void *mine[32] = {0};
  ASSERT_OK(orSetDevice(thread % 2));
  for (int i = 0; i < 2000; i++) {
    x = x * 1664525u + 1013904223u;
    void **slot = &mine[x >> 27];
    ASSERT_OK(orFree(*slot));
    *slot = NULL;
    if (x & 0x10000) *slot = allocate((x >> 8) % 200000 + 1);
    orPointerAttributes a = {.struct_size = sizeof a};
    ASSERT_OK(orPointerGetAttributes(&a, *slot));
    if (*slot) ASSERT_EQ(a.device, thread % 2);
  }
  for (int i = 0; i < 32; i++) ASSERT_OK(orFree(mine[i]));
}

TEST(memory_from_several_threads) {
  size_t before = freeBytes();
  runThreads(4, churn, NULL);
  ASSERT_EQ(freeBytes(), before);
}

/* ---- frees and queued work ---- */

static void *openLater(void *gate) {
  sleepMs(20);
  ASSERT_OK(orEventSignal(*(orEvent_t *)gate, orSuccess));
  return NULL;
}

TEST(memory_free_waits_for_work_of_every_device) {
  void *p = allocate(4096);
  uint32_t *host;
  ASSERT_OK(orMallocHost((void **)&host, 4096));
  ASSERT_OK(orMemset(p, 5, 4096));
  orStream_t there = newStreamOn(1);
  orEvent_t gate = closeGate(there);
  ASSERT_OK(orMemcpyAsync(host, p, 4096, orMemcpyDefault, there));
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, openLater, &gate), 0);
  ASSERT_OK(orFree(p));
  ASSERT_EQ(host[0], 0x05050505); /* the copy came first */
  pthread_join(thread, NULL);
}

/* ---- systems that refuse ---- */

static void assertWorks(void) {
  char *p = allocate(100000), byte = 0;
  ASSERT_OK(orMemset(p, 7, 100000));
  ASSERT_OK(orMemcpy(&byte, p + 99999, 1, orMemcpyDefault));
  ASSERT_EQ(byte, 7);
  ASSERT_OK(orFree(p));
}

static void limit(int resource, rlim_t value) {
  ASSERT_EQ(setrlimit(resource, &(struct rlimit){value, value}), 0);
}

/* Its pages are numbers of more than 32 bits. */
TEST(memory_device_of_more_than_two_to_the_32_pages) {
  setenv("OPENREG_DEVICE_COUNT", "1", 1);
  setenv("OPENREG_DEVICE_MEMORY", "16T", 1);
  char *a, byte = 0;
  if (orMalloc((void **)&a, (size_t)9 << 40) == orErrorSystem) SKIP("there are too few addresses");
  ASSERT_OK(orMemset(a + pageSize(), 1, pageSize()));
  ASSERT_OK(orFree(allocate(4096)));
  ASSERT_OK(orMemcpy(&byte, a + pageSize(), 1, orMemcpyDefault));
  ASSERT_EQ(byte, 1);
  ASSERT_OK(orFree(a));
}

TEST(memory_may_be_larger_than_a_file) {
  signal(SIGXFSZ, SIG_DFL);
  limit(RLIMIT_FSIZE, 1 << 20);
  assertWorks();
  sigset_t now;
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, NULL, &now), 0);
  ASSERT_EQ(sigismember(&now, SIGXFSZ), 0);
}

TEST(memory_needs_no_file) {
  int count;
  ASSERT_OK(orGetDeviceCount(&count));
  limit(RLIMIT_NOFILE, 0);
  assertWorks();
}

TEST(memory_that_cannot_be_mapped_leaves_nothing) {
  void *p;
  long before = 0;
  for (int i = 0; i < 4; i++) {
    refuseCalls(REFUSE_MADVISE, MADV_DONTFORK, SIZE_MAX, 1);
    ASSERT_REFUSED(orMalloc(&p, 4096), orErrorSystem, "cannot map");
    if (!i) before = usage().addresses;
  }
  ASSERT_LT(usage().addresses - before, 1 << 20);
  assertWorks();
}

/* What the system does not take stays with its addresses, and is told once. */
TEST(memory_that_the_system_does_not_take_back_is_free) {
  size_t before = freeBytes();
  refuseCalls(REFUSE_MADVISE, MADV_REMOVE, SIZE_MAX, 3);
  beginCapture();
  for (int i = 0; i < 3; i++) assertWorks();
  ASSERT_EQ(countLines(endCapture()), 1);
  ASSERT_EQ(freeBytes(), before);
  assertWorks();
}

TEST(memory_of_the_host_that_cannot_be_unmapped_goes_back) {
  enum { SIZE = 8 << 20 };
  orPointerAttributes a = {.struct_size = sizeof a};
  char *p;
  ASSERT_OK(orMallocHost((void **)&p, SIZE));
  memset(p, 1, SIZE);
  long before = usage().resident;
  refuseCalls(REFUSE_MUNMAP, 0, SIZE_MAX, 1);
  ASSERT_OK(orFreeHost(p));
  ASSERT_LE(usage().resident, before - SIZE / 2);
  ASSERT_OK(orPointerGetAttributes(&a, p));
  ASSERT_EQ(a.type, orMemoryTypeUnregistered);
}

/* Bytes of mappings that a core file would have. */
static long dumped(void) {
  FILE *f = fopen("/proc/self/smaps", "r");
  if (!f) SKIP("there is no smaps");
  char line[512], access = '-';
  unsigned long from = 0, to = 0;
  long sum = 0;
  while (fgets(line, sizeof line, f)) {
    unsigned long low, high;
    char first;
    if (sscanf(line, "%lx-%lx %c", &low, &high, &first) == 3) {
      from = low;
      to = high;
      access = first;
    }
    bool flags = !strncmp(line, "VmFlags:", 8);
    if (flags && access == 'r' && !strstr(line, " dd")) sum += (long)(to - from);
  }
  fclose(f);
  return sum;
}

/* The kernel would read, and so allocate, all that a device may ever map. */
TEST(memory_of_devices_is_not_in_core_files) {
#if defined(__SANITIZE_THREAD__)
  SKIP("the sanitizer maps more beside it");
#endif
  setenv("OPENREG_DEVICE_MEMORY", "1G", 1);
  long before = dumped();
  assertWorks();
  ASSERT_LT(dumped() - before, 64 << 20);
}

/* ---- inert until used ---- */

TEST(memory_nothing_before_first_use) {
  int count = 0, least, greatest;
  orDeviceProperties properties = {.size = sizeof properties};
  orSetting setting = {.size = sizeof setting};
  ASSERT_OK(orGetDeviceCount(&count));
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_OK(orDeviceGetStreamPriorityRange(&least, &greatest));
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orGetSetting(0, &setting));
  ASSERT_GT(capacity(), 0);
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_EQ(info.started, 0);
  for (int d = 0; d < 2; d++) ASSERT_EQ(orDeviceIsActive(d), 0);
  ASSERT_STR(properties.name, "/openreg:1");
  allocate(1);
  ASSERT_EQ(orDeviceIsActive(0), 0);
  ASSERT_EQ(orDeviceIsActive(1), 1);
}

/* `ulimit -v`: who sets it is told what to make smaller. */
TEST(memory_short_of_addresses_names_the_setting) {
  void *p;
  struct rlimit limit = {.rlim_cur = 64 << 20, .rlim_max = 64 << 20};
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  SKIP("a sanitizer needs more addresses than that");
#endif
  ASSERT_EQ(setenv("OPENREG_DEVICE_MEMORY", "1G", 1), 0);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  ASSERT_ERROR(orMalloc(&p, 1), orErrorSystem);
  ASSERT_CONTAINS(orGetLastErrorMessage(), "for 2 devices of 1073741824 bytes");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "a smaller OPENREG_DEVICE_MEMORY needs fewer");
}
