/*
 * What the tests of streams, events, lanes and memory share: gates that hold a stream back for as
 * long as the test wants, kernels that say when they start and stay until they are let go, streams
 * and launches in a line.
 *
 * No test waits for something "long enough": what has to have happened is asked for, what must not
 * happen is held back by a gate.
 */
#ifndef GATE_H
#define GATE_H

#include <dirent.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "openreg_watchdog.h"

static inline orStream_t newStream(void) {
  orStream_t stream = 0;
  ASSERT_OK(orStreamCreate(&stream));
  return stream;
}

static inline orStream_t newStreamOn(int device) {
  int before = 0;
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orSetDevice(device));
  orStream_t stream = newStream();
  ASSERT_OK(orSetDevice(before));
  return stream;
}

static inline orStream_t newStreamOfPriority(int priority) {
  orStream_t stream = 0;
  ASSERT_OK(orStreamCreateWithPriority(&stream, priority));
  return stream;
}

static inline orEvent_t newEvent(unsigned flags) {
  orEvent_t event = 0;
  ASSERT_OK(orEventCreateWithFlags(&event, flags));
  return event;
}

static inline orEvent_t newGate(void) { return newEvent(orEventExternal); }

static inline void openGate(orEvent_t gate) { ASSERT_OK(orEventSignal(gate, orSuccess)); }

/* A gate with the stream behind it. */
static inline orEvent_t closeGate(orStream_t stream) {
  orEvent_t gate = newGate();
  ASSERT_OK(orStreamWaitEvent(stream, gate));
  return gate;
}

/* A kernel whose one argument is a pointer. */
static inline orError_t launchAs(orStream_t stream, orKernelFn fn, void *pointer, unsigned flags) {
  return orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                      .stream = stream,
                                      .fn = fn,
                                      .args = &pointer,
                                      .args_size = sizeof pointer,
                                      .name = "test",
                                      .flags = flags});
}

static inline void launch(orStream_t stream, orKernelFn fn, void *pointer) {
  ASSERT_OK(launchAs(stream, fn, pointer, 0));
}

/* The pointer is an atomic_int that counts. */
static inline orError_t countKernel(void *args) {
  atomic_fetch_add(*(atomic_int **)args, 1);
  return orSuccess;
}

static inline void awaitInt(atomic_int *value, int wanted) {
  while (atomic_load(value) < wanted) sched_yield();
}

/* A kernel that holds its lane: says that it has started, and stays until it is let go. */
typedef struct Holder {
  atomic_int started, released;
} Holder;

static inline orError_t holdKernel(void *args) {
  Holder *h = *(Holder **)args;
  atomic_store(&h->started, 1);
  while (!atomic_load(&h->released)) sleepMs(1);
  return orSuccess;
}

static inline void hold(orStream_t stream, Holder *holder) {
  launch(stream, holdKernel, holder);
  awaitInt(&holder->started, 1);
}

static inline void letGo(Holder *holder) { atomic_store(&holder->released, 1); }

/* Most lanes that there can be, anywhere. */
enum { LANE_MOST = 8 };

static inline int laneLimit(void) {
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_LE(info.limit, LANE_MOST);
  return info.limit;
}

/* Every lane runs a holder: nothing else runs until one is let go. The holders' streams are urgent,
 * so that none makes way when it is over: it would get into the list of streams that are ready once
 * more. */
static inline void holdAllLanes(Holder *holders) {
  int before = 0;
  ASSERT_OK(orGetDevice(&before));
  for (int i = 0; i < laneLimit(); i++) {
    ASSERT_OK(orSetDevice(i % 2));
    hold(newStreamOfPriority(INT_MIN), &holders[i]);
  }
  ASSERT_OK(orSetDevice(before));
}

static inline void letGoAllLanes(Holder *holders) {
  for (int i = 0; i < laneLimit(); i++) letGo(&holders[i]);
}

/* Until the hang report says that. */
static inline void awaitReport(const char *part) {
  for (bool found = false; !found; sched_yield()) {
    char *text = NULL;
    ASSERT_OK(orHangReport(&text));
    found = strstr(text, part);
    free(text);
  }
}

/* Threads of this process whose name begins with `prefix`. */
static inline int countThreads(const char *prefix) {
  int n = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *d; (d = readdir(tasks));) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", d->d_name);
    FILE *f = d->d_name[0] == '.' ? NULL : fopen(path, "r");
    if (!f) continue;
    if (fgets(name, sizeof name, f) && !strncmp(name, prefix, strlen(prefix))) n++;
    fclose(f);
  }
  closedir(tasks);
  return n;
}

#endif
