/*
 * Streams: handles, query and synchronise, priority and device, back-pressure.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "openreg_graph.h"

/* ---- query, synchronise, destroy ---- */

TEST(stream_query_and_synchronize) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamQuery(s));
  ASSERT_OK(orStreamSynchronize(s));
  orEvent_t gate = closeGate(s);
  atomic_int ran = 0;
  launch(s, countKernel, &ran);
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  ASSERT_EQ(orPeekAtLastError(), orSuccess); /* "not ready" is no error */
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orStreamQuery(s));
}

TEST(stream_query_waits_for_the_end_of_the_task) {
  orStream_t s = newStream();
  Holder h = {0};
  hold(s, &h);
  ASSERT_ERROR(orStreamQuery(s), orErrorNotReady);
  letGo(&h);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_OK(orStreamQuery(s));
}

TEST(stream_default) {
  for (int d = 0; d < 2; d++) {
    orStream_t standard = 0;
    int device = -1, priority = -1;
    ASSERT_OK(orSetDevice(d));
    ASSERT_OK(orStreamGetDefault(&standard, d));
    ASSERT_NE(standard, 0);
    ASSERT_OK(orStreamGetDevice(OR_STREAM_DEFAULT, &device));
    ASSERT_EQ(device, d);
    ASSERT_OK(orStreamGetPriority(standard, &priority));
    ASSERT_EQ(priority, 0);
    ASSERT_REFUSED(orStreamDestroy(standard), orErrorInvalidValue, "default stream");
    ASSERT_REFUSED(orStreamDestroy(OR_STREAM_DEFAULT), orErrorInvalidValue, "default stream");
    ASSERT_OK(orStreamQuery(standard));
    /* 0 and the handle are one stream. */
    orEvent_t gate = closeGate(OR_STREAM_DEFAULT);
    ASSERT_ERROR(orStreamQuery(standard), orErrorNotReady);
    openGate(gate);
    ASSERT_OK(orStreamSynchronize(standard));
  }
  orStream_t other;
  ASSERT_REFUSED(orStreamGetDefault(&other, 2), orErrorInvalidDevice, "0 to 1");
  ASSERT_REFUSED(orStreamGetDefault(&other, -1), orErrorInvalidDevice, "-1");
}

TEST(stream_pools_go_round) {
  enum { TWO_ROUNDS = 2 * OPENREG_STREAMS_PER_POOL };
  orStream_t streams[2][2][TWO_ROUNDS], standard;
  for (int d = 0; d < 2; d++) {
    ASSERT_OK(orStreamGetDefault(&standard, d));
    for (int p = 0; p < 2; p++) {
      orStream_t *pool = streams[d][p];
      for (int i = 0; i < TWO_ROUNDS; i++) {
        int device = -1, priority = 1;
        ASSERT_OK(orStreamGetFromPool(&pool[i], p ? -1000 : 1000, d));
        ASSERT_OK(orStreamGetDevice(pool[i], &device));
        ASSERT_OK(orStreamGetPriority(pool[i], &priority));
        ASSERT_EQ(device, d);
        ASSERT_EQ(priority, p ? -3 : 0);
        ASSERT_NE(pool[i], standard);
        for (int k = 0; k < i; k++)
          ASSERT_EQ(pool[k] == pool[i], k + OPENREG_STREAMS_PER_POOL == i);
      }
    }
  }
  ASSERT_REFUSED(orStreamGetFromPool(NULL, 0, 0), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orStreamGetFromPool(&standard, 0, 2), orErrorInvalidDevice, "0 to 1");
  ASSERT_REFUSED(orStreamDestroy(streams[1][0][0]), orErrorInvalidValue, "pool of device 1");
  ASSERT_OK(orLaunchSleep(streams[1][0][0], 1));
}

static void refuseEverywhere(orStream_t s) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", (unsigned long long)s);
  int value;
  void *pinned;
  orEvent_t event = newEvent(0);
  ASSERT_OK(orEventRecord(event, OR_STREAM_DEFAULT));
  ASSERT_OK(orMallocHost(&pinned, 64));
  ASSERT_REFUSED(orStreamQuery(s), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamDestroy(s), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamGetDevice(s, &value), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamGetPriority(s, &value), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orLaunchSleep(s, 1), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orLaunchHostFunc(s, free, NULL), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orEventRecord(event, s), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orStreamWaitEvent(s, event), orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orMemcpyAsync(pinned, (char *)pinned + 32, 8, orMemcpyDefault, s),
                 orErrorInvalidResourceHandle, text);
  ASSERT_REFUSED(orMemsetAsync(pinned, 0, 8, s), orErrorInvalidResourceHandle, text);
  ASSERT_OK(orStreamSynchronize(OR_STREAM_DEFAULT));
  ASSERT_OK(orEventDestroy(event));
  ASSERT_OK(orFreeHost(pinned));
}

TEST(stream_destroyed_handle_is_refused) {
  orStream_t s = newStream();
  ASSERT_OK(orStreamDestroy(s));
  refuseEverywhere(s);
  orStream_t again = newStream(); /* takes the same slot */
  ASSERT_NE(again, s);
  refuseEverywhere(s);
  ASSERT_OK(orStreamQuery(again));
}

TEST(stream_foreign_handle_is_refused) {
  refuseEverywhere(newEvent(0));
  refuseEverywhere(1);
  refuseEverywhere(UINT64_MAX);
  refuseEverywhere(newStream() ^ (1ull << 54)); /* another device's number */
  refuseEverywhere(newStream() + 1);            /* another generation */
  refuseEverywhere(newStream() + (1ull << 30)); /* a slot never handed out */
}

TEST(stream_garbage_handles_never_crash) {
  orStream_t live = newStream(), standard = 0;
  ASSERT_OK(orStreamGetDefault(&standard, 0));
  uint64_t x = 88172645463325252u;
  for (int i = 0; i < 200000; i++) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    uint64_t handle = i % 2 ? x : live ^ 1ull << (x >> 58);
    if (handle == live || handle == standard || !handle) continue;
    ASSERT_ERROR(orStreamQuery(handle), orErrorInvalidResourceHandle);
    ASSERT_ERROR(orEventQuery(handle), orErrorInvalidResourceHandle);
  }
}

TEST(stream_destroy_runs_what_is_queued) {
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s), end = newEvent(0);
  atomic_int ran = 0;
  for (int i = 0; i < 100; i++) launch(s, countKernel, &ran);
  ASSERT_OK(orEventRecord(end, s));
  ASSERT_OK(orStreamDestroy(s)); /* does not wait for the gate */
  ASSERT_REFUSED(orStreamQuery(s), orErrorInvalidResourceHandle, "not a live stream");
  ASSERT_EQ(ran, 0);
  openGate(gate);
  ASSERT_OK(orEventSynchronize(end));
  ASSERT_EQ(ran, 100);
}

/* A slot is used again only when its last task has run, and what waits for the old one is
 * served. */
TEST(stream_slots_are_reused) {
  atomic_int ran = 0;
  for (int round = 0; round < 2000; round++) {
    orStream_t s = newStream();
    launch(s, countKernel, &ran);
    ASSERT_OK(orStreamDestroy(s));
  }
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 2000);
}

TEST(stream_device_synchronize_covers_its_device_only) {
  orStream_t here = newStreamOn(0), there = newStreamOn(1);
  orEvent_t gate = closeGate(there);
  atomic_int ran = 0;
  launch(here, countKernel, &ran);
  ASSERT_OK(orDeviceSynchronize()); /* device 1 is still behind its gate */
  ASSERT_EQ(ran, 1);
  ASSERT_ERROR(orStreamQuery(there), orErrorNotReady);
  openGate(gate);
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orStreamQuery(there));
}

/* Threads that make, use and destroy streams do not disturb a synchronisation of the other
 * device. */
static void makeAndDestroy(int thread, void *context) {
  atomic_int *stop = context;
  if (thread == 0) {
    for (int i = 0; i < 3000; i++) ASSERT_OK(orDeviceSynchronize());
    atomic_store(stop, 1);
    return;
  }
  orEvent_t gate = 0;
  for (int i = 0; !atomic_load(stop) || gate; i++) {
    orStream_t s = newStreamOn(i % 2);
    if (i % 2) { /* device 1's streams stay closed while device 0 is synchronised */
      ASSERT_OK(orSetDevice(1));
      if (!gate)
        gate = closeGate(s);
      else
        ASSERT_OK(orStreamWaitEvent(s, gate));
    } else {
      ASSERT_OK(orLaunchSleep(s, 1));
      if (i % 16 == 0) ASSERT_OK(orStreamSynchronize(s)); /* not too far ahead */
    }
    ASSERT_OK(orStreamDestroy(s));
    if (i % 8 == 7 && gate) {
      openGate(gate);
      gate = 0;
    }
  }
}

TEST(stream_synchronize_beside_streams_that_come_and_go) {
  atomic_int stop = 0;
  runThreads(2, makeAndDestroy, &stop);
}

/* ---- priority, device ---- */

static uint64_t shortestSynchronize(void) {
  uint64_t shortest = UINT64_MAX;
  for (int i = 0; i < 50; i++) {
    uint64_t began = nowNs();
    ASSERT_OK(orDeviceSynchronize());
    uint64_t took = nowNs() - began;
    if (took < shortest) shortest = took;
  }
  return shortest;
}

/* The shortest of many calls: no load makes each of them long. */
TEST(stream_synchronize_takes_no_time_for_streams_that_are_gone) {
  enum { MANY = 30000 };
  static orStream_t streams[MANY];
  for (int i = 0; i < MANY; i++) streams[i] = newStream();
  uint64_t with_them = shortestSynchronize();
  for (int i = 0; i < MANY; i++) ASSERT_OK(orStreamDestroy(streams[i]));
  ASSERT_LT(4 * shortestSynchronize(), with_them);
}

TEST(stream_priority_is_clamped) {
  int least, greatest;
  ASSERT_OK(orDeviceGetStreamPriorityRange(&least, &greatest));
  ASSERT_EQ(least, 0);
  ASSERT_LT(greatest, 0);
  const int given[] = {0, -1, greatest, greatest - 1, -1000000, 1, 1000000};
  const int kept[] = {0, -1, greatest, greatest, greatest, 0, 0};
  for (int i = 0; i < 7; i++) {
    int priority = 77;
    ASSERT_OK(orStreamGetPriority(newStreamOfPriority(given[i]), &priority));
    ASSERT_EQ(priority, kept[i]);
  }
}

static void checkCurrentDevice(int thread, void *context) {
  pthread_barrier_t *all = context;
  int device = -1, of_stream = -1;
  ASSERT_OK(orGetDevice(&device));
  ASSERT_EQ(device, 0);
  ASSERT_OK(orSetDevice(thread % 2));
  pthread_barrier_wait(all);
  ASSERT_OK(orGetDevice(&device));
  ASSERT_EQ(device, thread % 2);
  ASSERT_OK(orStreamGetDevice(newStream(), &of_stream));
  ASSERT_EQ(of_stream, thread % 2);
}

TEST(stream_current_device_is_per_thread) {
  pthread_barrier_t all;
  pthread_barrier_init(&all, NULL, 4);
  ASSERT_OK(orSetDevice(1));
  runThreads(4, checkCurrentDevice, &all);
  int device = -1;
  ASSERT_OK(orGetDevice(&device));
  ASSERT_EQ(device, 1);
  ASSERT_REFUSED(orSetDevice(2), orErrorInvalidDevice,
                 "device index 2 is out of range: it must be 0 to 1");
  ASSERT_REFUSED(orSetDevice(-1), orErrorInvalidDevice, "device index -1");
  ASSERT_OK(orGetDevice(&device));
  ASSERT_EQ(device, 1);
}

/* ---- back-pressure ---- */

static atomic_int sleeping; /* threads inside the block hooks */
static _Thread_local int awake_token;

static void *enterBlock(void) {
  atomic_fetch_add(&sleeping, 1);
  return &awake_token;
}

static void leaveBlock(void *token) {
  ASSERT_PTR(token, &awake_token); /* the one that this thread's `enter` gave */
  atomic_fetch_sub(&sleeping, 1);
}

typedef struct Filler {
  orStream_t stream;
  int count;
  size_t args_size; /* of kernels */
  void *pinned;     /* copies instead */
  orGraph_t graph;  /* launches of it instead */
  atomic_int queued, ran;
} Filler;

typedef struct FillerArgs {
  Filler *filler;
  char rest[OR_MAX_ARGS - sizeof(void *)];
} FillerArgs;

static orError_t fillerKernel(void *args) {
  atomic_fetch_add(&((FillerArgs *)args)->filler->ran, 1);
  return orSuccess;
}

static void *fill(void *context) {
  static FillerArgs args;
  Filler *f = context;
  args.filler = f;
  orLaunch launch = {.size = sizeof launch,
                     .stream = f->stream,
                     .fn = fillerKernel,
                     .args = &args,
                     .args_size = f->args_size,
                     .name = "fill"};
  for (int i = 0; i < f->count; i++) {
    if (f->pinned)
      ASSERT_OK(orMemcpyAsync(f->pinned, (char *)f->pinned + 64, 64, orMemcpyDefault, f->stream));
    else if (f->graph)
      ASSERT_OK(orGraphReplay(f->graph, f->stream));
    else
      ASSERT_OK(orLaunchKernelEx(&launch));
    atomic_fetch_add(&f->queued, 1);
  }
  return NULL;
}

/* Another thread fills the queue and falls asleep; records and waits still do not; then the gate is
 * opened. */
static void fillBehindGate(Filler *f) {
  static const orBlockHooks hooks = {enterBlock, leaveBlock};
  pthread_t thread;
  orEvent_t event = newEvent(0), gate = closeGate(f->stream);
  ASSERT_OK(orSetBlockHooks(&hooks));
  ASSERT_EQ(pthread_create(&thread, NULL, fill, f), 0);
  awaitInt(&sleeping, 1);
  ASSERT_GT(f->queued, 0);
  ASSERT_LT(f->queued, f->count);
  for (int i = 0; i < 3000; i++) {
    ASSERT_OK(orEventRecord(event, f->stream));
    ASSERT_OK(orStreamWaitEvent(f->stream, gate));
    ASSERT_ERROR(orStreamQuery(f->stream), orErrorNotReady);
  }
  ASSERT_EQ(sleeping, 1);
  openGate(gate);
  pthread_join(thread, NULL);
  ASSERT_OK(orStreamSynchronize(f->stream));
  ASSERT_EQ(f->queued, f->count);
  ASSERT_EQ(sleeping, 0);
}

TEST(stream_full_queue_holds_kernels) {
  Filler f = {.stream = newStream(), .count = 5000, .args_size = sizeof(void *)};
  fillBehindGate(&f);
  ASSERT_EQ(f.ran, 5000);
}

TEST(stream_full_queue_counts_bytes) {
  Filler f = {.stream = newStream(), .count = 200, .args_size = OR_MAX_ARGS};
  fillBehindGate(&f);
  ASSERT_EQ(f.ran, 200);
}

TEST(stream_full_queue_holds_copies) {
  Filler f = {.stream = newStream(), .count = 5000};
  ASSERT_OK(orMallocHost(&f.pinned, 4096));
  fillBehindGate(&f);
}

TEST(stream_full_queue_holds_graphs) {
  Filler f = {.stream = newStream(), .count = 2000};
  atomic_int ran = 0;
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, countKernel, &ran);
  ASSERT_OK(orStreamEndCapture(s, &f.graph));
  fillBehindGate(&f);
  ASSERT_EQ(ran, 2000);
}

TEST(stream_full_queue_stays_bounded) {
  Filler f = {.stream = newStream(), .count = 100000, .args_size = sizeof(void *)};
  pthread_t thread;
  orEvent_t gate = closeGate(f.stream);
  static const orBlockHooks hooks = {enterBlock, leaveBlock};
  ASSERT_OK(orSetBlockHooks(&hooks));
  ASSERT_EQ(pthread_create(&thread, NULL, fill, &f), 0);
  awaitInt(&sleeping, 1);
  orWorkerInfo info = {.size = sizeof info};
  ASSERT_OK(orGetWorkerInfo(&info));
  ASSERT_LE(info.queued, 4096);
  openGate(gate);
  pthread_join(thread, NULL);
  ASSERT_OK(orStreamSynchronize(f.stream));
  ASSERT_EQ(f.ran, 100000);
}

TEST(stream_block_hooks_are_checked) {
  static const orBlockHooks none = {0}, good = {enterBlock, leaveBlock};
  ASSERT_ERROR(orSetBlockHooks(NULL), orErrorInvalidValue);
  ASSERT_ERROR(orSetBlockHooks(&none), orErrorInvalidValue);
  ASSERT_OK(orSetBlockHooks(&good));
  ASSERT_REFUSED(orSetBlockHooks(&good), orErrorAlreadyExists, "already");
}

/* Several threads on one stream: everything runs, each thread's tasks in its order. */
typedef struct Ordered {
  orStream_t stream;
  int last[4]; /* touched by the stream's tasks alone, so not atomic */
} Ordered;

typedef struct OrderedArgs {
  Ordered *all;
  int thread, number;
} OrderedArgs;

static orError_t orderedKernel(void *args) {
  OrderedArgs *a = args;
  ASSERT_EQ(a->all->last[a->thread] + 1, a->number);
  a->all->last[a->thread] = a->number;
  return orSuccess;
}

static void launchOrdered(int thread, void *context) {
  Ordered *all = context;
  for (int i = 1; i <= 5000; i++)
    ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                           .stream = all->stream,
                                           .fn = orderedKernel,
                                           .args = &(OrderedArgs){all, thread, i},
                                           .args_size = sizeof(OrderedArgs),
                                           .name = "ordered"}));
}

TEST(stream_of_several_threads_keeps_order) {
  Ordered all = {.stream = newStream()};
  runThreads(4, launchOrdered, &all);
  ASSERT_OK(orStreamSynchronize(all.stream));
  for (int i = 0; i < 4; i++) ASSERT_EQ(all.last[i], 5000);
}
