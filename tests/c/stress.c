/*
 * Running random programs: see stress.h.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stress.h"

#define MUST(call)                                                            \
  do {                                                                        \
    orError_t must_ = (call);                                                 \
    if (must_)                                                                \
      STRESS_FAIL("step %d: %s: %s: %s", index, #call, orGetErrorName(must_), \
                  orGetLastErrorMessage());                                   \
  } while (0)

typedef struct KernelArgs {
  uint32_t *dst, *src;
  uint32_t words, a, b;
} KernelArgs;

static orError_t mixKernel(void *args) {
  KernelArgs *k = args;
  void *dst, *src;
  if (orMapForKernel(&dst, k->dst, k->words * 4) || orMapForKernel(&src, k->src, k->words * 4))
    return orErrorInvalidValue;
  uint32_t *d = dst, *s = src;
  for (uint32_t i = 0; i < k->words; i++) d[i] = mix(d[i], s[i], k->a, k->b);
  return orSuccess;
}

static orError_t launchMix(const Step *s) {
  KernelArgs k = {program.buffer[s->dst].real + s->dst_at, program.buffer[s->src].real + s->src_at,
                  s->words, s->a, s->b};
  orAccess accesses[] = {{k.dst, k.words * 4, 1}, {k.src, k.words * 4, 0}};
  return orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                      .stream = program.stream[s->line],
                                      .fn = mixKernel,
                                      .args = &k,
                                      .args_size = sizeof k,
                                      .accesses = accesses,
                                      .access_count = 2,
                                      .name = "mix",
                                      .flags = s->a >> 1 & 3}); /* orLaunchFlags, in every way */
}

static orError_t allocate(Buffer *b) {
  if (b->place == 2) return orMallocHost((void **)&b->real, b->words * 4);
  int before = 0;
  orGetDevice(&before);
  orSetDevice(b->place);
  orError_t error = orMalloc((void **)&b->real, b->words * 4);
  orSetDevice(before);
  return error;
}

static orError_t makeStream(int line) {
  orSetDevice(program.device[line]);
  return orStreamCreateWithPriority(&program.stream[line], -(line % 4));
}

static void upload(int index, const Step *s) {
  static _Thread_local uint32_t from[30000];
  for (uint32_t i = 0; i < s->words; i++) from[i] = uploaded(s, i);
  MUST(orMemcpyAsync(program.buffer[s->dst].real + s->dst_at, from, s->words * 4, orMemcpyDefault,
                     program.stream[s->line]));
  memset(from, 0xee, s->words * 4);
}

static void check(int index, const Step *s) {
  uint32_t seen[CHECK_WORDS];
  MUST(orMemcpyAsync(seen, program.buffer[s->src].real + s->src_at, s->words * 4, orMemcpyDefault,
                     program.stream[s->line]));
  for (uint32_t i = 0; i < s->words; i++)
    if (seen[i] != s->check[i])
      STRESS_FAIL("step %d: word %u of buffer %d is %#x, not %#x", index, s->src_at + i, s->src,
                  seen[i], s->check[i]);
}

static void replace(int index, const Step *s) {
  Buffer *b = &program.buffer[s->dst];
  MUST(b->place == 2 ? orFreeHost(b->real) : orFree(b->real));
  MUST(allocate(b));
  MUST(orMemset(b->real, (int)s->a, b->words * 4));
}

static void copyStep(int index, const Step *s) {
  MUST(orMemcpyAsync(program.buffer[s->dst].real + s->dst_at, program.buffer[s->src].real + s->src_at,
                     s->words * 4, orMemcpyDefault, program.stream[s->line]));
}

static void query(int index, const Step *s) {
  orError_t e = orStreamQuery(program.stream[s->line]);
  if (e && e != orErrorNotReady) MUST(e);
}

static void runStep(int index, const Step *s) {
  orStream_t stream = s->line < 0 ? 0 : program.stream[s->line];
  orEvent_t event = s->event < 0 ? 0 : program.event[s->event].handle;
  switch (s->kind) {
    case KERNEL:
      MUST(launchMix(s));
      break;
    case COPY:
      copyStep(index, s);
      break;
    case FILL:
      MUST(orMemsetAsync(program.buffer[s->dst].real + s->dst_at, (int)s->a, s->words * 4, stream));
      break;
    case UPLOAD:
      upload(index, s);
      break;
    case CHECK:
      check(index, s);
      break;
    case HOST_WRITE:
      for (uint32_t i = 0; i < s->words; i++)
        program.buffer[s->dst].real[s->dst_at + i] = uploaded(s, i);
      break;
    case REPLACE:
      replace(index, s);
      break;
    case RECORD:
      MUST(orEventRecord(event, stream));
      break;
    case WAIT:
      MUST(orStreamWaitEvent(stream, event));
      break;
    case SYNC_EVENT:
      MUST(orEventSynchronize(event));
      break;
    case SYNC_STREAM:
      MUST(orStreamSynchronize(stream));
      break;
    case SYNC_DEVICE:
      MUST(orDeviceSynchronize());
      break;
    case WRITE_VALUE:
      MUST(orStreamWriteValue32(stream, &program.words[s->line], s->a));
      break;
    case WAIT_VALUE:
      MUST(orStreamWaitValue32(stream, &program.words[s->src], s->a, (orWaitValue)s->b));
      break;
    case NEW_STREAM:
      MUST(orStreamDestroy(stream));
      MUST(makeStream(s->dst));
      break;
    case NAP:
      MUST(orLaunchSleep(stream, s->a));
      break;
    case CLOSE_GATE:
      MUST(orEventCreateWithFlags(&program.gate, orEventExternal));
      MUST(orStreamWaitEvent(stream, program.gate));
      break;
    case OPEN_GATE:
      MUST(orEventSignal(program.gate, orSuccess));
      MUST(orEventDestroy(program.gate));
      break;
    case QUERY:
      query(index, s);
      break;
  }
}

static void runHost(int host) {
  for (int i = 0; i < program.steps; i++) {
    const Step *s = &program.step[i];
    if (s->host == host) {
      for (int h = 0; h < program.hosts; h++)
        while (h != host &&
               atomic_load_explicit(&program.issued[h], memory_order_acquire) < s->need[h])
          sched_yield();
      runStep(i, s);
    }
    atomic_store_explicit(&program.issued[host], i + 1, memory_order_release);
  }
}

/* The helpers stay for all programs. */
static pthread_barrier_t start_line, end_line;

static void *helper(void *context) {
  int host = (int)(intptr_t)context;
  for (;;) {
    pthread_barrier_wait(&start_line);
    if (host < program.hosts) runHost(host);
    pthread_barrier_wait(&end_line);
  }
  return NULL;
}

static void setUp(void) {
  int index = -1;
  memset(program.words, 0, LINES * sizeof *program.words);
  for (int h = 0; h < HOSTS; h++) atomic_store(&program.issued[h], 0);
  for (int i = HOSTS; i < LINES; i++) program.stream[i] = 0;
  MUST(orDeviceEnablePeerAccess(0, 1));
  MUST(orDeviceEnablePeerAccess(1, 0));
  int streams = program.lines;
  for (int i = 0; i < program.steps; i++)
    if (program.step[i].kind == NEW_STREAM) streams--;
  for (int i = HOSTS; i < streams; i++) MUST(makeStream(i));
  for (int i = 0; i < 2 * EVENTS; i++) {
    MUST(orSetDevice(program.event[i].device));
    MUST(orEventCreateWithFlags(&program.event[i].handle, i % 2 ? orEventDisableTiming : 0));
  }
  for (int i = 0; i < BUFFERS; i++) {
    MUST(allocate(&program.buffer[i]));
    MUST(orMemset(program.buffer[i].real, 0, program.buffer[i].words * 4));
  }
}

static void tearDown(void) {
  int index = program.steps;
  static uint32_t seen[WORDS_MOST];
  for (int d = 0; d < 2; d++) {
    MUST(orSetDevice(d));
    MUST(orDeviceSynchronize());
  }
  for (int i = 0; i < BUFFERS; i++) {
    Buffer *b = &program.buffer[i];
    MUST(orMemcpy(seen, b->real, b->words * 4, orMemcpyDefault));
    for (uint32_t k = 0; k < b->words; k++)
      if (seen[k] != b->model[k])
        STRESS_FAIL("word %u of buffer %d is %#x, not %#x", k, i, seen[k], b->model[k]);
    MUST(b->place == 2 ? orFreeHost(b->real) : orFree(b->real));
  }
  for (int i = 0; i < 2 * EVENTS; i++) MUST(orEventDestroy(program.event[i].handle));
  for (int i = HOSTS; i < program.lines; i++)
    if (program.successor[i] < 0) MUST(orStreamDestroy(program.stream[i]));
}

static void runProgram(uint64_t seed) {
  makeProgram(seed);
  setUp();
  pthread_barrier_wait(&start_line);
  runHost(0);
  pthread_barrier_wait(&end_line);
  tearDown();
}

static uint64_t setting(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

TEST_WITH_LIMIT(stress_random_programs, 600) {
  uint64_t programs = setting("OPENREG_STRESS_PROGRAMS", 10000),
           seed = setting("OPENREG_STRESS_SEED", 0);
  pthread_t thread;
  pthread_barrier_init(&start_line, NULL, HOSTS);
  pthread_barrier_init(&end_line, NULL, HOSTS);
  for (int h = 1; h < HOSTS; h++)
    ASSERT_EQ(pthread_create(&thread, NULL, helper, (void *)(intptr_t)h), 0);
  for (int i = 0; i < BUFFERS; i++) program.buffer[i].model = malloc(WORDS_MOST * sizeof(uint32_t));
  ASSERT_OK(orMallocHost((void **)&program.words, LINES * sizeof *program.words));
  for (uint64_t i = 1; i <= programs; i++) runProgram(seed ? seed : i);
}
