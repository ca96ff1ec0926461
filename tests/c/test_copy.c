/*
 * Copies and fills: checks, kinds, what is asynchronous with which memory, large ones in pieces.
 */
#include <stdlib.h>
#include <string.h>

#include "gate.h"

static void *device(size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orMalloc(&p, bytes));
  return p;
}

static void *deviceOn(int index, size_t bytes) {
  ASSERT_OK(orSetDevice(index));
  void *p = device(bytes);
  ASSERT_OK(orSetDevice(0));
  return p;
}

static unsigned char *pinned(size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orMallocHost(&p, bytes));
  return p;
}

static unsigned char *noise(size_t bytes, uint32_t seed) {
  unsigned char *p = malloc(bytes);
  for (size_t i = 0; i < bytes; i++) {
    seed = seed * 1664525u + 1013904223u;
    p[i] = (unsigned char)(seed >> 24);
  }
  return p;
}

static void fillWith(void *memory, const void *bytes, size_t size) {
  ASSERT_OK(orMemcpy(memory, bytes, size, orMemcpyHostToDevice));
}

static void assertHolds(const void *memory, const void *bytes, size_t size) {
  void *host = malloc(size);
  ASSERT_OK(orMemcpy(host, memory, size, orMemcpyDefault));
  ASSERT_MEM(host, bytes, size);
  free(host);
}

TEST(copy_every_pair_of_memories) {
  enum { SIZE = 100000 };
  unsigned char *data = noise(SIZE, 1), *other = noise(SIZE, 2);
  void *places[5] = {device(SIZE), deviceOn(1, SIZE), pinned(SIZE), malloc(SIZE), NULL};
  ASSERT_OK(orHostRegister(places[4] = malloc(SIZE), SIZE));
  for (int to = 0; to < 5; to++)
    for (int from = 0; from < 5; from++) {
      if (to == from) continue;
      ASSERT_OK(orMemcpy(places[to], other, SIZE, orMemcpyDefault));
      ASSERT_OK(orMemcpy(places[from], data, SIZE, orMemcpyDefault));
      orMemcpyKind kind = (orMemcpyKind)((from < 2 ? 2 : 0) + (to < 2 ? 1 : 0));
      for (int k = 0; k < 4; k++)
        if (k != (int)kind)
          ASSERT_REFUSED(orMemcpy(places[to], places[from], SIZE, (orMemcpyKind)k),
                         orErrorInvalidMemcpyDirection, to < 2 ? "to device" : "host");
      assertHolds(places[to], other, SIZE); /* nothing moved */
      ASSERT_OK(orMemcpy(places[to], places[from], SIZE, kind));
      assertHolds(places[to], data, SIZE);
    }
  ASSERT_REFUSED(orMemcpy(places[0], places[1], 1, (orMemcpyKind)5), orErrorInvalidValue,
                 "copy kind 5");
}

TEST(copy_past_the_end_moves_nothing) {
  unsigned char *data = noise(10000, 3), *host = noise(10000, 4), *stays = noise(10000, 4);
  void *a = device(5000), *b = device(6000);
  unsigned char *p = pinned(5000);
  fillWith(a, data, 5000);
  fillWith(b, data, 6000);
  memcpy(p, stays, 5000);
  ASSERT_REFUSED(orMemcpy(host, a, 5001, orMemcpyDeviceToHost), orErrorInvalidValue,
                 "copy source: [");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "ends 1 bytes past its device allocation");
  ASSERT_MEM(host, stays, 10000);
  ASSERT_REFUSED(orMemcpy(a, host, 5001, orMemcpyHostToDevice), orErrorInvalidValue,
                 "copy destination");
  ASSERT_REFUSED(orMemcpy((char *)a + 4000, b, 1001, orMemcpyDefault), orErrorInvalidValue,
                 "ends 1 bytes past");
  ASSERT_REFUSED(orMemcpyAsync(a, (char *)b + 5999, 2, orMemcpyDefault, 0), orErrorInvalidValue,
                 "copy source");
  ASSERT_REFUSED(orMemcpyAsync(p, b, 5001, orMemcpyDefault, 0), orErrorInvalidValue,
                 "pinned host allocation");
  ASSERT_REFUSED(orMemcpyAsync(p, b, SIZE_MAX, orMemcpyDefault, 0), orErrorInvalidValue, "past");
  ASSERT_REFUSED(orMemset(a, 0, 5001), orErrorInvalidValue, "memset");
  ASSERT_REFUSED(orMemsetAsync((char *)a + 1, 0, 5000, 0), orErrorInvalidValue, "memset");
  ASSERT_OK(orDeviceSynchronize());
  assertHolds(a, data, 5000);
  ASSERT_MEM(p, stays, 5000);
  ASSERT_REFUSED(orMemcpy(NULL, a, 1, orMemcpyDefault), orErrorInvalidValue,
                 "copy destination: null");
  ASSERT_REFUSED(orMemcpy(a, NULL, 1, orMemcpyDefault), orErrorInvalidValue, "copy source: null");
  ASSERT_REFUSED(orMemset(host, 0, 10), orErrorInvalidValue, "not in device or pinned memory");
}

/* Memory that was freed is nobody's: not pageable host memory, which a lane would then touch. */
TEST(copy_of_freed_device_memory_is_refused) {
  void *a = device(4096), *b = device(4096);
  char host[64];
  ASSERT_OK(orFree(b));
  ASSERT_REFUSED(orMemcpy(host, b, 64, orMemcpyDefault), orErrorInvalidValue,
                 "device memory that is not allocated");
  ASSERT_REFUSED(orMemcpy(b, host, 64, orMemcpyDefault), orErrorInvalidValue,
                 "device memory that is not allocated");
  ASSERT_REFUSED(orMemcpyAsync(a, b, 64, orMemcpyDefault, 0), orErrorInvalidValue, "not allocated");
  ASSERT_REFUSED(orMemcpyAsync(a, b, 64, orMemcpyHostToDevice, 0), orErrorInvalidValue,
                 "not allocated");
  ASSERT_OK(orMemset(a, 0, 64));
}

TEST(copy_of_nothing) {
  orStream_t s = newStream();
  void *a = device(64);
  ASSERT_OK(orMemcpyAsync(NULL, NULL, 0, orMemcpyDefault, s));
  ASSERT_OK(orMemcpy(a, NULL, 0, orMemcpyDefault));
  ASSERT_OK(orMemsetAsync(NULL, 0, 0, s));
  ASSERT_OK(orStreamDestroy(s));
  ASSERT_ERROR(orMemcpyAsync(a, a, 0, orMemcpyDefault, s), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orMemsetAsync(a, 0, 0, s), orErrorInvalidResourceHandle);
}

/* ---- when the caller's memory may be touched again ---- */

TEST(copy_small_pageable_source_may_be_overwritten_at_once) {
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  unsigned char buffer[1024], wanted[16 * 1024];
  void *a = device(sizeof wanted);
  for (int i = 0; i < 16; i++) {
    memset(buffer, i + 1, sizeof buffer);
    memset(wanted + i * 1024, i + 1, 1024);
    ASSERT_OK(orMemcpyAsync((char *)a + i * 1024, buffer, 1024, orMemcpyHostToDevice, s));
  }
  memset(buffer, 0xff, sizeof buffer);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(a, wanted, sizeof wanted);
}

/* The largest that a queue takes with the task: no longer one waits for the gate. */
TEST(copy_of_64_kib_waits_for_nothing) {
  enum { SIZE = 64 << 10 };
  orStream_t s = newStream();
  unsigned char *data = noise(SIZE, 21), *buffer = malloc(SIZE);
  void *a = device(SIZE);
  orEvent_t gate = closeGate(s);
  memcpy(buffer, data, SIZE);
  ASSERT_OK(orMemcpyAsync(a, buffer, SIZE, orMemcpyHostToDevice, s));
  memset(buffer, 0, SIZE);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(a, data, SIZE);
}

TEST(copy_large_pageable_source_has_been_read_at_return) {
  orStream_t s = newStream();
  enum { SIZE = 3 << 20 };
  unsigned char *data = noise(SIZE, 5), *buffer = malloc(SIZE);
  void *a = device(SIZE);
  memcpy(buffer, data, SIZE);
  ASSERT_OK(orLaunchSleep(s, 3000000));
  ASSERT_OK(orMemcpyAsync(a, buffer, SIZE, orMemcpyHostToDevice, s));
  memset(buffer, 0, SIZE);
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(a, data, SIZE);
}

TEST(copy_pageable_destination_is_written_at_return) {
  orStream_t s = newStream();
  unsigned char *data = noise(5000, 6), buffer[5000] = {0};
  void *a = device(5000);
  fillWith(a, data, 5000);
  ASSERT_OK(orLaunchSleep(s, 3000000));
  ASSERT_OK(orMemcpyAsync(buffer, a, 5000, orMemcpyDeviceToHost, s));
  ASSERT_MEM(buffer, data, 5000);
}

/* Pinned memory is read when the copy runs, not when it is queued: that is the caller's to
 * order. */
TEST(copy_pinned_source_is_read_later) {
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  unsigned char *p = pinned(64), late[64];
  void *a = device(64);
  memset(p, 1, 64);
  memset(late, 2, 64);
  ASSERT_OK(orMemcpyAsync(a, p, 64, orMemcpyHostToDevice, s)); /* returns behind a closed gate */
  memset(p, 2, 64);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(a, late, 64);
}

TEST(copy_pinned_destination_is_written_later) {
  orStream_t s = newStream();
  void *a = device(64);
  unsigned char *p = pinned(64);
  ASSERT_OK(orMemset(a, 9, 64));
  orEvent_t gate = closeGate(s);
  ASSERT_OK(orMemcpyAsync(p, a, 64, orMemcpyDeviceToHost, s));
  ASSERT_EQ(p[0], 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(p[0], 9);
  ASSERT_EQ(p[63], 9);
}

TEST(copy_between_pinned_memories_is_asynchronous) {
  orStream_t s = newStream();
  unsigned char *p = pinned(128);
  orEvent_t gate = closeGate(s);
  p[64] = 7;
  ASSERT_OK(orMemcpyAsync(p, p + 64, 64, orMemcpyDefault, s));
  ASSERT_EQ(p[0], 0);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(p[0], 7);
}

/* Whatever its size and the kind of memory; and for what was queued before on its stream alone. */
TEST(copy_with_stream_synchronizes_its_stream) {
  orStream_t s = newStream(), other = newStream();
  orEvent_t gate = closeGate(other);
  enum { SIZE = 256 << 10 };
  unsigned char *p = pinned(SIZE), *pageable = malloc(SIZE);
  void *a = device(SIZE);
  for (size_t size = 64; size <= SIZE; size = size == 64 ? SIZE : SIZE + 1) {
    for (int i = 0; i < 4; i++) {
      unsigned char *host = i < 2 ? p : pageable;
      ASSERT_OK(orLaunchSleep(s, 3000000));
      ASSERT_OK(orMemcpyWithStream(i % 2 ? a : host, i % 2 ? host : a, size, orMemcpyDefault, s));
      ASSERT_OK(orStreamQuery(s));
    }
  }
  ASSERT_ERROR(orStreamQuery(other), orErrorNotReady);
  openGate(gate);
}

TEST(copy_with_stream_reports_what_failed_before_it) {
  orStream_t s = newStream();
  unsigned char host[64] = {0};
  void *a = device(64);
  orEvent_t done;
  ASSERT_OK(orEventCreateWithFlags(&done, orEventExternal));
  ASSERT_OK(orStreamWaitEvent(s, done));
  ASSERT_OK(orEventSignal(done, orErrorLaunchFailure));
  ASSERT_ERROR(orMemcpyWithStream(a, host, 64, orMemcpyDefault, s), orErrorLaunchFailure);
  ASSERT_OK(orMemcpyWithStream(a, host, 64, orMemcpyDefault, s));
}

/* The blocking form is ordered on the current device's default stream, and on nothing else. */
TEST(copy_blocking_is_ordered_on_the_default_stream) {
  orStream_t side = newStream();
  orEvent_t gate = closeGate(side);
  void *a = device(64);
  ASSERT_OK(orMemsetAsync(a, 1, 64, OR_STREAM_DEFAULT));
  ASSERT_OK(orMemsetAsync(a, 2, 64, side));
  unsigned char host[64];
  ASSERT_OK(orMemcpy(host, a, 64, orMemcpyDefault));
  ASSERT_EQ(host[63], 1);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(side));
}

/* ---- large ones ---- */

TEST_WITH_LIMIT(copy_large_both_ways, 60) {
  const size_t sizes[] = {(1 << 20) - 1,     1 << 20,  (1 << 20) + 1,
                          (3 << 20) + 12345, 64 << 20, (64 << 20) - 7};
  unsigned char *data = noise(64 << 20, 7), *back = malloc(64 << 20);
  void *here = device(64 << 20), *there = deviceOn(1, 64 << 20);
  for (int i = 0; i < 6; i++) {
    size_t n = sizes[i], odd = i % 2 ? 3 : 0;
    if (n + odd > 64 << 20) n -= odd;
    ASSERT_OK(orMemcpy(here, data + odd, n, orMemcpyHostToDevice));
    ASSERT_OK(orMemcpy(there, here, n, orMemcpyDeviceToDevice));
    memset(back, 0, n);
    ASSERT_OK(orMemcpy(back, there, n, orMemcpyDeviceToHost));
    ASSERT(!memcmp(back, data + odd, n));
  }
}

TEST(copy_overlapping_ranges) {
  enum { SIZE = 4 << 20 };
  unsigned char *data = noise(SIZE, 8), *model = malloc(SIZE);
  void *a = device(SIZE);
  const int shifts[] = {1, 64, 5000, 1 << 20, (1 << 20) + 1, 3 << 20};
  for (int i = 0; i < 12; i++) {
    size_t shift = (size_t)shifts[i / 2], n = SIZE - shift;
    memcpy(model, data, SIZE);
    fillWith(a, data, SIZE);
    memmove(model + (i % 2 ? shift : 0), model + (i % 2 ? 0 : shift), n);
    ASSERT_OK(orMemcpy((char *)a + (i % 2 ? shift : 0), (char *)a + (i % 2 ? 0 : shift), n,
                       orMemcpyDefault));
    assertHolds(a, model, SIZE);
  }
}

/* Several at once, on streams of both devices, with hosts that wait and help. */
static void copyOwn(int thread, void *context) {
  unsigned char *data = context, *back;
  enum { SIZE = 5 << 20 };
  ASSERT_OK(orSetDevice(thread % 2));
  orStream_t s = newStream();
  void *a = device(SIZE), *b = device(SIZE);
  back = pinned(SIZE);
  for (int i = 0; i < 6; i++) {
    size_t at = (size_t)(thread * 1000 + i * 77);
    ASSERT_OK(orMemcpyAsync(a, data + at, SIZE, orMemcpyDefault, s));
    ASSERT_OK(orMemcpyAsync(b, a, SIZE, orMemcpyDefault, s));
    ASSERT_OK(orMemcpyAsync(back, b, SIZE, orMemcpyDefault, s));
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT(!memcmp(back, data + at, SIZE));
  }
}

TEST_WITH_LIMIT(copy_large_from_several_threads, 60) { runThreads(4, copyOwn, noise(6 << 20, 9)); }

/* A lane that helps with a copy does not keep a stream from running. */
TEST(copy_large_beside_small_work) {
  enum { SIZE = 32 << 20 };
  unsigned char *p = pinned(SIZE);
  void *a = device(SIZE);
  orStream_t big = newStream(), small = newStream();
  atomic_int ran = 0;
  for (int i = 0; i < 4; i++) ASSERT_OK(orMemcpyAsync(a, p, SIZE, orMemcpyDefault, big));
  for (int i = 0; i < 200; i++) {
    launch(small, countKernel, &ran);
    ASSERT_OK(orStreamSynchronize(small));
  }
  ASSERT_EQ(ran, 200);
  ASSERT_OK(orStreamSynchronize(big));
}

/* ---- fills, peers ---- */

TEST(copy_memset) {
  enum { SIZE = 3 << 20 };
  unsigned char *model = calloc(1, SIZE), *p = pinned(100);
  void *a = device(SIZE);
  orStream_t s = newStream();
  ASSERT_OK(orMemset(a, 0, SIZE));
  ASSERT_OK(orMemsetAsync((char *)a + 3, 0x1ab, 1001, s)); /* the low byte counts */
  memset(model + 3, 0xab, 1001);
  ASSERT_OK(orMemsetAsync(p, 5, 99, s));
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(a, model, SIZE);
  ASSERT_EQ(p[98], 5);
  ASSERT_EQ(p[99], 0);
}

TEST(copy_peer) {
  unsigned char *data = noise(70000, 10);
  void *here = device(70000), *there = deviceOn(1, 70000);
  orStream_t s = newStreamOn(1);
  int can = -1;
  ASSERT_OK(orDeviceCanAccessPeer(&can, 0, 1));
  ASSERT_EQ(can, 1);
  ASSERT_OK(orDeviceCanAccessPeer(&can, 1, 1));
  ASSERT_EQ(can, 0);
  ASSERT_REFUSED(orDeviceCanAccessPeer(&can, 0, 7), orErrorInvalidDevice, "7");
  fillWith(here, data, 70000);
  ASSERT_OK(orMemcpyPeerAsync(there, 1, here, 0, 70000, s));
  ASSERT_OK(orStreamSynchronize(s));
  assertHolds(there, data, 70000);
  ASSERT_REFUSED(orMemcpyPeerAsync(there, 0, here, 0, 8, s), orErrorInvalidValue,
                 "is not memory of device 0");
  ASSERT_REFUSED(orMemcpyPeerAsync(there, 1, here, 1, 8, s), orErrorInvalidValue,
                 "is not memory of device 1");
  ASSERT_REFUSED(orMemcpyPeerAsync(there, 1, data, 0, 8, s), orErrorInvalidValue,
                 "is not memory of device 0");
  ASSERT_REFUSED(orMemcpyPeerAsync(there, 2, here, 0, 8, s), orErrorInvalidDevice,
                 "device index 2");
}

static orError_t mapForeign(void *args) {
  void **p = *(void ***)args, *address;
  ASSERT_OK(orMapForKernel(&address, p[0], 8));
  ASSERT_REFUSED(orMapForKernel(&address, p[1], 8), orErrorNotSupported, "peer access");
  return orSuccess;
}

static orError_t mapPeer(void *args) {
  void **p = *(void ***)args, *address = NULL;
  ASSERT_OK(orMapForKernel(&address, p[1], 8));
  ASSERT_EQ(*(unsigned char *)address, 3);
  return orSuccess;
}

/* One way, and only once enabled. */
TEST(copy_peer_access_of_kernels) {
  void *p[2] = {device(64), deviceOn(1, 64)}, *back[2] = {p[1], p[0]};
  ASSERT_OK(orMemset(p[1], 3, 64));
  launch(OR_STREAM_DEFAULT, mapForeign, p);
  ASSERT_OK(orDeviceSynchronize());
  for (int i = 0; i < 2; i++) ASSERT_OK(orDeviceEnablePeerAccess(0, 1));
  launch(OR_STREAM_DEFAULT, mapPeer, p);
  ASSERT_OK(orDeviceSynchronize());
  launch(newStreamOn(1), mapForeign, back);
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_REFUSED(orDeviceEnablePeerAccess(0, 0), orErrorNotSupported,
                 "device 0 has no peer access");
  ASSERT_REFUSED(orDeviceEnablePeerAccess(0, 2), orErrorInvalidDevice, "device index 2");
  ASSERT_REFUSED(orDeviceEnablePeerAccess(-1, 0), orErrorInvalidDevice, "device index -1");
}

TEST(copy_without_peer_access) {
  setenv("OPENREG_PEER_ACCESS", "0", 1);
  unsigned char *data = noise(70000, 11);
  void *p[2] = {device(70000), deviceOn(1, 70000)};
  int can = -1;
  ASSERT_OK(orDeviceCanAccessPeer(&can, 0, 1));
  ASSERT_EQ(can, 0);
  ASSERT_REFUSED(orDeviceEnablePeerAccess(0, 1), orErrorNotSupported, "no peer access to device 1");
  fillWith(p[0], data, 70000);
  /* Staged: still right. */
  ASSERT_OK(orMemcpyPeerAsync(p[1], 1, p[0], 0, 70000, OR_STREAM_DEFAULT));
  ASSERT_OK(orDeviceSynchronize());
  assertHolds(p[1], data, 70000);
  launch(OR_STREAM_DEFAULT, mapForeign, p); /* a kernel cannot */
  ASSERT_OK(orDeviceSynchronize());
}
