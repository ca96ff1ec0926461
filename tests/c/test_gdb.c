/*
 * A process that stands still, for tests/device/test_gdb.py: streams that wait for an external
 * event, another stream and a value, one that is running, and a host thread that waits for one of
 * them.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "openreg_watchdog.h"

typedef struct Parked {
  orEvent_t gate, record;
  orStream_t gated, after, running;
} Parked;

/* Where gdb stops; not inlined, and there is something in it to stop at. */
void gdbStopsHere(const Parked *parked);
__attribute__((noinline)) void gdbStopsHere(const Parked *parked) {
  __asm__ volatile("" : : "r"(parked) : "memory");
}

static bool says(const char *const *parts, int count) {
  char *report = NULL;
  bool all = true;
  ASSERT_OK(orHangReport(&report));
  for (int i = 0; i < count; i++) all = all && strstr(report, parts[i]);
  free(report);
  return all;
}

static void *synchronize(void *stream) {
  ASSERT_OK(orStreamSynchronize(*(orStream_t *)stream));
  return NULL;
}

static void nothing(void *unused) { (void)unused; }

static void launchNamed(orStream_t stream, const char *name, atomic_int *ran) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = countKernel,
                                         .args = &ran,
                                         .args_size = sizeof ran,
                                         .name = name}));
}

HELPER(gdb_parked) {
  Holder holder = {0};
  atomic_int ran = 0;
  pthread_t host;
  Parked p = {.gated = newStreamOn(1), .after = newStreamOfPriority(-2), .running = newStream()};
  ASSERT_OK(orSetDevice(1));
  p.record = newEvent(0);
  ASSERT_OK(orSetDevice(0));
  launchNamed(p.gated, "first", &ran);
  ASSERT_OK(orStreamSynchronize(p.gated));
  p.gate = closeGate(p.gated);
  launchNamed(p.gated, "second", &ran);
  ASSERT_OK(orLaunchHostFunc(p.gated, nothing, NULL));
  ASSERT_OK(orEventRecord(p.record, p.gated));
  for (int i = 0; i < 20; i++) launchNamed(p.gated, "later", &ran);
  ASSERT_OK(orStreamWaitEvent(p.after, p.record));
  hold(p.running, &holder);
  ASSERT_EQ(pthread_create(&host, NULL, synchronize, &p.gated), 0);
  const char *all[] = {"external event", "recorded as", "running", "host thread"};
  while (!says(all, 4)) sched_yield();
  gdbStopsHere(&p);
  openGate(p.gate);
  letGo(&holder);
  pthread_join(host, NULL);
  ASSERT_OK(orDeviceSynchronize());
  while (!says((const char *[]){"no stream of this process has work"}, 1)) sched_yield();
  gdbStopsHere(&p);
}
