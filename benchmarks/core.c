/*
 * Micro-benchmarks of the core: the cost of queueing, waking, allocating and copying, beside what
 * the machine itself takes for the same in the same run.
 *
 * Prints one JSON object a line: name, value, unit; limit is the most the value may be; floor is
 * the machine's own figure. Costs that noise can only raise are the minimum over the repetitions;
 * latencies are the median.
 */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "openreg.h"

#define CHECK(call)                                                                            \
  do {                                                                                         \
    orError_t check_ = (call);                                                                 \
    if (check_) {                                                                              \
      fprintf(stderr, "%s: %s: %s\n", #call, orGetErrorName(check_), orGetLastErrorMessage()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

static double nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void napNs(long ns) {
  struct timespec t = {ns / 1000000000, ns % 1000000000};
  while (nanosleep(&t, &t) && errno == EINTR) {
  }
}

/* A limit or floor of 0 means none. */
static void report(const char *name, double value, const char *unit, double limit, double floor) {
  printf("{\"name\": \"%s\", \"value\": %.4g, \"unit\": \"%s\"", name, value, unit);
  if (limit > 0) printf(", \"limit\": %.4g", limit);
  if (floor > 0) printf(", \"floor\": %.4g", floor);
  printf("}\n");
  fflush(stdout);
}

static int compareDoubles(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, compareDoubles);
  return values[count / 2];
}

static void keepMin(double *best, double value) {
  if (*best <= 0 || value < *best) *best = value;
}

static orStream_t newStream(void) {
  orStream_t s;
  CHECK(orStreamCreate(&s));
  return s;
}

static orEvent_t newEvent(unsigned flags) {
  orEvent_t e;
  CHECK(orEventCreateWithFlags(&e, flags));
  return e;
}

static orEvent_t closeGate(orStream_t stream) {
  orEvent_t gate = newEvent(orEventExternal);
  CHECK(orStreamWaitEvent(stream, gate));
  return gate;
}

static void openGate(orEvent_t gate) {
  CHECK(orEventSignal(gate, orSuccess));
  CHECK(orEventDestroy(gate));
}

/* ---- enqueue ---- */

typedef struct Args {
  void *pointers[4];
} Args; /* about those of an operator of two inputs and an output */

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

static double enqueue(orStream_t stream, int count) {
  Args args = {{&args}};
  orLaunch launch = {.size = sizeof launch,
                     .stream = stream,
                     .fn = nothing,
                     .args = &args,
                     .args_size = sizeof args,
                     .name = "nothing"};
  double start = nowNs();
  for (int i = 0; i < count; i++) CHECK(orLaunchKernelEx(&launch));
  return (nowNs() - start) / count;
}

/* The queue's minimum: its lock, and writing the arguments to memory. */
static double lockAndCopy(int count) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static char memory[1 << 17];
  Args args = {{&args}};
  double start = nowNs();
  for (int i = 0; i < count; i++) {
    pthread_mutex_lock(&lock);
    memcpy(memory + (size_t)i % 512 * 256, &args, sizeof args);
    __asm__ volatile("" : : "r"(memory) : "memory");
    pthread_mutex_unlock(&lock);
  }
  return (nowNs() - start) / count;
}

static void benchEnqueueOne(void) {
  orStream_t s = newStream();
  double burst = 0, steady = 0, floor = 0;
  for (int i = 0; i < 200; i++) {
    orEvent_t gate = closeGate(s);
    keepMin(&burst, enqueue(s, 1000));
    openGate(gate);
    CHECK(orStreamSynchronize(s));
    keepMin(&floor, lockAndCopy(1000));
  }
  for (int i = 0; i < 30; i++) {
    keepMin(&steady, enqueue(s, 100000));
    CHECK(orStreamSynchronize(s));
  }
  report("enqueue, one producer, burst of 1000", burst, "ns/task", 60, floor);
  report("enqueue, one producer, steady", steady, "ns/task", 60, floor);
}

enum { PRODUCERS = 3, SHARE = 50000 };

typedef struct Team {
  orStream_t stream;
  pthread_barrier_t start, end;
} Team;

static void *produce(void *context) {
  Team *t = context;
  pthread_barrier_wait(&t->start);
  enqueue(t->stream, SHARE);
  pthread_barrier_wait(&t->end);
  return NULL;
}

static double enqueueTogether(void) {
  Team t = {.stream = newStream()};
  pthread_t threads[PRODUCERS];
  pthread_barrier_init(&t.start, NULL, PRODUCERS + 1);
  pthread_barrier_init(&t.end, NULL, PRODUCERS + 1);
  for (int i = 0; i < PRODUCERS; i++) pthread_create(&threads[i], NULL, produce, &t);
  pthread_barrier_wait(&t.start);
  double start = nowNs();
  pthread_barrier_wait(&t.end);
  double took = nowNs() - start;
  for (int i = 0; i < PRODUCERS; i++) pthread_join(threads[i], NULL);
  CHECK(orStreamSynchronize(t.stream));
  CHECK(orStreamDestroy(t.stream));
  return took / (PRODUCERS * SHARE);
}

static void benchEnqueueThree(void) {
  double best = 0;
  for (int i = 0; i < 20; i++) keepMin(&best, enqueueTogether());
  report("enqueue, three producers, one stream", best, "ns/task", 200, 0);
}

/* ---- events ---- */

static void benchRecordAndWait(void) {
  orStream_t a = newStream(), b = newStream();
  orEvent_t e = newEvent(orEventDisableTiming);
  double best = 0;
  for (int i = 0; i < 200; i++) {
    orEvent_t gate = closeGate(a); /* so that every wait has to wait */
    double start = nowNs();
    for (int k = 0; k < 1000; k++) {
      CHECK(orEventRecord(e, a));
      CHECK(orStreamWaitEvent(b, e));
    }
    keepMin(&best, (nowNs() - start) / 1000);
    openGate(gate);
    CHECK(orStreamSynchronize(b));
  }
  report("event: record and wait", best, "ns", 200, 0);
}

/* ---- wake-up ---- */

static _Atomic uint32_t ping;
static _Atomic double pinged;
static _Atomic double started;

static void futex(_Atomic uint32_t *word, int what, uint32_t value) {
  syscall(SYS_futex, word, what, value, NULL, NULL, 0);
}

static void *sleeper(void *context) {
  (void)context;
  for (uint32_t seen = 0;;) {
    while (atomic_load(&ping) == seen) futex(&ping, FUTEX_WAIT_PRIVATE, seen);
    atomic_store(&pinged, nowNs());
    seen = atomic_load(&ping);
  }
  return NULL;
}

static orError_t noteStart(void *args) {
  (void)args;
  atomic_store(&started, nowNs());
  return orSuccess;
}

static void pingSleeper(void) {
  atomic_store(&pinged, 0);
  atomic_fetch_add(&ping, 1);
  futex(&ping, FUTEX_WAKE_PRIVATE, 1);
}

static double wakeFutex(void) {
  double start = nowNs();
  pingSleeper();
  while (atomic_load(&pinged) == 0) {
  }
  return atomic_load(&pinged) - start;
}

static double wakeDevice(orStream_t s) {
  orLaunch launch = {.size = sizeof launch, .stream = s, .fn = noteStart, .name = "start"};
  atomic_store(&started, 0);
  double start = nowNs();
  CHECK(orLaunchKernelEx(&launch));
  while (atomic_load(&started) == 0) {
  }
  return atomic_load(&started) - start;
}

static double roundTrip(orStream_t s) {
  orLaunch launch = {.size = sizeof launch, .stream = s, .fn = nothing, .name = "nothing"};
  double start = nowNs();
  CHECK(orLaunchKernelEx(&launch));
  CHECK(orStreamSynchronize(s));
  return nowNs() - start;
}

/* Whether a small kernel is done after a millisecond of the host's own work, following a round trip
 * that the host ran itself. */
static bool overlaps(orStream_t s) {
  orLaunch launch = {.size = sizeof launch,
                     .stream = s,
                     .fn = nothing,
                     .name = "nothing",
                     .flags = orLaunchAnyThread};
  CHECK(orLaunchKernelEx(&launch));
  launch.flags |= orLaunchAwaited;
  CHECK(orLaunchKernelEx(&launch));
  CHECK(orStreamSynchronize(s));
  launch.flags = orLaunchAnyThread;
  launch.fn = noteStart;
  atomic_store(&started, 0);
  double start = nowNs();
  CHECK(orLaunchKernelEx(&launch));
  while (nowNs() - start < 1e6) {
  }
  bool done = atomic_load(&started) != 0;
  CHECK(orStreamSynchronize(s));
  return done;
}

/* The same with a bare thread, which is woken a second time as soon as it has answered. */
static bool bareOverlaps(void) {
  wakeFutex();
  double start = nowNs();
  pingSleeper();
  while (nowNs() - start < 1e6) {
  }
  bool done = atomic_load(&pinged) != 0;
  while (atomic_load(&pinged) == 0) napNs(10000);
  return done;
}

/* Alternates with a bare thread. A thread that has just slept on its waker's core has had more than
 * its share of that core, and Linux may keep it waiting there. That happens to the worker as well,
 * and the host then runs the kernel when it next waits. */
static void benchOverlap(void) {
  enum { TRIES = 400 };
  orStream_t s = newStream();
  double late = 0, bare = 0;
  for (int i = 0; i < TRIES; i++) {
    late += !overlaps(s);
    bare += !bareOverlaps();
  }
  late *= 40.0 / TRIES, bare *= 40.0 / TRIES;
  report("kernels of 40 not begun 1 ms after a round trip", late, "", 0.5, bare);
}

static void benchWake(void) {
  enum { TIMES = 301 };
  static double device[TIMES], bare[TIMES], trip[TIMES], busy[TIMES];
  orStream_t s = newStream();
  for (int i = 0; i < TIMES; i++) { /* alternating, after a sleep each */
    napNs(500000);
    bare[i] = wakeFutex();
    napNs(500000);
    device[i] = wakeDevice(s);
    napNs(500000);
    trip[i] = roundTrip(s);
    busy[i] = roundTrip(s);
  }
  double floor = median(bare, TIMES) / 1e3;
  report("wake-up of a sleeping device", median(device, TIMES) / 1e3, "us", 1.5 * floor, floor);
  report("launch and synchronise, device asleep", median(trip, TIMES) / 1e3, "us", 0, floor);
  report("launch and synchronise, device awake", median(busy, TIMES) / 1e3, "us", 0, 0);
}

/* ---- memory ---- */

/* Nanoseconds of a free and an allocation with `live` live blocks. */
static double churn(int live) {
  void **blocks = calloc((size_t)live, sizeof *blocks);
  uint32_t x = 1;
  double best = 0;
  for (int i = 0; i < live; i++) CHECK(orMalloc(&blocks[i], 4096));
  for (int run = 0; run < 30; run++) {
    double start = nowNs();
    for (int i = 0; i < 1000; i++) {
      x = x * 1664525u + 1013904223u;
      void **b = &blocks[(x >> 8) % (uint32_t)live];
      CHECK(orFree(*b));
      CHECK(orMalloc(b, 4096));
    }
    keepMin(&best, (nowNs() - start) / 1000);
  }
  for (int i = 0; i < live; i++) CHECK(orFree(blocks[i]));
  free(blocks);
  return best;
}

static void benchMalloc(void) {
  double few = churn(10), many = churn(10000);
  report("orMalloc and orFree, 10 live", few, "ns", 0, 0);
  report("orMalloc and orFree, 10,000 live", many, "ns", 2 * few, few);
}

/* ---- copies ---- */

enum { COPY_BYTES = 64 << 20 };

typedef struct Half {
  char *dst;
  const char *src;
  size_t bytes;
} Half;

static void *copyHalf(void *context) {
  Half *h = context;
  memcpy(h->dst, h->src, h->bytes);
  return NULL;
}

static double copyWithTwo(char *dst, const char *src) {
  pthread_t thread;
  Half halves[2] = {{dst, src, COPY_BYTES / 2},
                    {dst + COPY_BYTES / 2, src + COPY_BYTES / 2, COPY_BYTES / 2}};
  double start = nowNs();
  pthread_create(&thread, NULL, copyHalf, &halves[1]);
  copyHalf(&halves[0]);
  pthread_join(thread, NULL);
  return nowNs() - start;
}

static double copyWithOne(char *dst, const char *src) {
  double start = nowNs();
  copyHalf(&(Half){dst, src, COPY_BYTES});
  return nowNs() - start;
}

static double copyBlocking(void *dst, const void *src) {
  double start = nowNs();
  CHECK(orMemcpy(dst, src, COPY_BYTES, orMemcpyDefault));
  return nowNs() - start;
}

static void benchCopy(void) {
  void *device, *pinned;
  char *other = malloc(COPY_BYTES);
  CHECK(orMalloc(&device, COPY_BYTES));
  CHECK(orMallocHost(&pinned, COPY_BYTES));
  memset(pinned, 1, COPY_BYTES);
  memset(other, 2, COPY_BYTES);
  CHECK(orMemset(device, 0, COPY_BYTES));
  double one[15], two[15], there[15], back[15];
  for (int i = 0; i < 15; i++) {
    one[i] = copyWithOne(other, pinned);
    two[i] = copyWithTwo(other, pinned);
    there[i] = copyBlocking(device, pinned);
    back[i] = copyBlocking(pinned, device);
  }
  double single = median(one, 15) / 1e6, pair = median(two, 15) / 1e6,
         floor = pair < single ? pair : single;
  report("memcpy of 64 MiB, one thread", single, "ms", 0, 0);
  report("memcpy of 64 MiB, two threads", pair, "ms", 0, 0);
  report("copy of 64 MiB, host to device", median(there, 15) / 1e6, "ms", 1.1 * single, floor);
  report("copy of 64 MiB, device to host", median(back, 15) / 1e6, "ms", 1.1 * single, floor);
}

/* ---- idle ---- */

static double cpuMs(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e3 +
         (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e3;
}

static void benchIdle(void) {
  CHECK(orDeviceSynchronize());
  double before = cpuMs();
  napNs(1000000000);
  report("processor time of an idle second", cpuMs() - before, "ms", 10, 0);
}

int main(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, sleeper, NULL);
  benchEnqueueOne();
  benchEnqueueThree();
  benchRecordAndWait();
  benchWake();
  benchOverlap();
  benchMalloc();
  benchCopy();
  benchIdle();
  return 0;
}
