/*
 * Measures the caching allocator: allocating from the cache and freeing to it, with 10 and with
 * 100,000 live blocks.
 *
 * "pair": one size, freed at once. "churn": a random live block is freed and one of its size
 * allocated; the memory touched grows with the number of live blocks, so part of its growth is due
 * to the processor's caches. "cut and merge": the block is cut from a larger one and merges with it
 * again. The floor is two uncontended lock and unlock pairs.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "openreg.h"

enum { MANY = 100000, FEW = 10, ROUNDS = 10000, REPEATS = 200 };

static void *live[MANY];
static size_t sizeOf[MANY];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void check(orError_t error) {
  if (!error) return;
  fprintf(stderr, "%s: %s\n", orGetErrorName(error), orGetLastErrorMessage());
  exit(1);
}

static orStream_t stream;
static double floor_ns;

static void report(const char *name, double value, const char *unit, double limit) {
  printf("{\"name\": \"cache: %s\", \"value\": %.2f, \"unit\": \"%s\"", name, value, unit);
  if (limit > 0) printf(", \"limit\": %.1f", limit);
  if (floor_ns > 0 && unit[0] == 'n') printf(", \"floor\": %.2f", floor_ns);
  printf("}\n");
}

/* The best of many short windows: other load on the machine only adds. */
static double best(void (*body)(int), int count) {
  double least = 1e300;
  for (int i = 0; i < REPEATS; i++) {
    double start = now();
    body(count);
    double took = (now() - start) / ROUNDS;
    if (took < least) least = took;
  }
  return least;
}

static void locks(int count) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  (void)count;
  for (int i = 0; i < ROUNDS * 2; i++) {
    pthread_mutex_lock(&lock);
    pthread_mutex_unlock(&lock);
  }
}

static void pairOf(size_t bytes) {
  for (int i = 0; i < ROUNDS; i++) {
    void *p;
    check(orCacheMalloc(&p, bytes, stream));
    check(orCacheFree(p));
  }
}

static void pairSmall(int count) {
  (void)count;
  pairOf(4096);
}

static void pairLarge(int count) {
  (void)count;
  pairOf(3 << 20);
}

static void churn(int count) {
  static uint64_t x = 88172645463325252u;
  for (int i = 0; i < ROUNDS; i++) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    size_t at = x % (uint64_t)count;
    check(orCacheFree(live[at]));
    check(orCacheMalloc(&live[at], sizeOf[at], stream));
  }
}

/* Live blocks of a few sizes, with free ones of each between them, so that the bins are not
 * empty. */
static void fill(int count) {
  for (int i = 0; i < count; i++) {
    sizeOf[i] = 512u * (size_t)(1 + i % 8);
    check(orCacheMalloc(&live[i], sizeOf[i], stream));
  }
}

static void drain(int count) {
  for (int i = 0; i < count; i++) check(orCacheFree(live[i]));
  check(orCacheEmpty(0));
}

/* Every eighth block is freed, which leaves holes that are too small for the pair. */
static void pairAmongHoles(int count) {
  (void)count;
  pairOf(64 << 10);
}

int main(void) {
  setenv("OPENREG_DEVICE_MEMORY", "4G", 1);
  check(orStreamGetDefault(&stream, 0));
  /* A second thread in the process makes locks cost what they cost in use. */
  void *first;
  check(orCacheMalloc(&first, 512, stream));
  check(orMemset(first, 0, 512));
  check(orCacheFree(first));
  floor_ns = best(locks, 0);
  double few[3], many[3];
  const int counts[2] = {FEW, MANY};
  for (int k = 0; k < 2; k++) {
    double *out = k ? many : few;
    fill(counts[k]);
    void *keep;
    /* a hole of the pair's size, enclosed by live blocks */
    check(orCacheMalloc(&keep, 4096, stream));
    void *wall;
    check(orCacheMalloc(&wall, 512, stream));
    check(orCacheFree(keep));
    out[0] = best(pairSmall, counts[k]);
    out[1] = best(churn, counts[k]);
    for (int i = 0; i < counts[k]; i += 8) check(orCacheFree(live[i]));
    out[2] = best(pairAmongHoles, counts[k]);
    for (int i = 0; i < counts[k]; i += 8) check(orCacheMalloc(&live[i], sizeOf[i], stream));
    check(orCacheFree(wall));
    drain(counts[k]);
  }
  report("pair of 4 KiB, 10 live", few[0], "ns", 100);
  report("pair of 4 KiB, 100000 live", many[0], "ns", 100);
  report("pair, 100000 live by 10 live", many[0] / few[0], "ratio", 2);
  report("pair cut and merged, 10 live", few[2], "ns", 0);
  report("pair cut and merged, 100000 live, 12500 holes", many[2], "ns", 0);
  report("cut and merged, 100000 live by 10 live", many[2] / few[2], "ratio", 2);
  report("churn, 10 live", few[1], "ns", 100);
  report("churn, 100000 live", many[1], "ns", 0);
  report("churn, 100000 live by 10 live", many[1] / few[1], "ratio", 0);
  report("pair of 3 MiB", best(pairLarge, 0), "ns", 100);
  return 0;
}
