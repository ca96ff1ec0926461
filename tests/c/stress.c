/*
 * Running random programs: see stress.h.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openreg_graph.h"
#include "openreg_sanitizer.h"
#include "stress.h"

Trouble trouble;

/* Of the step with this number: how often it was queued, has run, and had its arguments dropped. */
static struct {
  _Atomic int queued, ran, dropped;
} account[STEPS];
static _Atomic int bad_bytes; /* of arguments, as kernels have found them */
static uint64_t blocks;

static bool maps, peers; /* what kernels reach */
static uint32_t *staging[LINES];
static size_t staging_words; /* of a destination; as many of a source follow */
/* Which the steps of one line are queued on, to be launched as a graph. */
static orStream_t captured;

uint64_t stressBlocks(void) { return blocks; }

void stressFailed(void) {
  printf("OPENREG_STRESS_SEED=%llu replays this%s%s\n", (unsigned long long)program.seed,
         trouble.text ? "; switched on:" : "", trouble.text ? trouble.text : "");
}

static void resetLost(int index) {
  int lost = -1, before = 0;
  const char *at = strstr(orGetLastErrorMessage(), "openreg:");
  if (!at || sscanf(at, "openreg:%d is lost", &lost) != 1)
    STRESS_FAIL("step %d: no lost device in \"%s\"", index, orGetLastErrorMessage());
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orSetDevice(lost));
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orSetDevice(before));
  atomic_fetch_add(&trouble.resets, 1);
}

/* What a call has returned: whether it is to be made again. What nothing has caused on purpose is a
 * failure of the test. */
static bool isRefused(orError_t error, int index, const char *call) {
  if (!error || (error == orErrorLaunchFailure && trouble.fails)) return false;
  if (error == orErrorDeviceLost && trouble.drops)
    resetLost(index);
  else if (error != orErrorMemoryAllocation || !trouble.short_of_memory)
    STRESS_FAIL("step %d: %s: %s: %s", index, call, orGetErrorName(error), orGetLastErrorMessage());
  return true;
}

#define MUST(call) \
  do {             \
  } while (isRefused((call), index, #call))

/* Where work is dropped, nothing orders what is left: each line has a place of its own in each
 * buffer. */
static uint32_t *place(int buffer, int line, uint32_t at) {
  const Buffer *b = &program.buffer[buffer];
  return b->real + (trouble.drops ? (size_t)line * b->words : 0) + at;
}

static size_t bytesOf(const Buffer *b) {
  return (size_t)b->words * 4 * (trouble.drops ? LINES : 1);
}

typedef struct KernelArgs {
  uint32_t *dst, *src;
  uint32_t words, a, b, extra;
  int step;
  unsigned char bytes[]; /* `extra` of them */
} KernelArgs;

static orError_t mixKernel(void *args) {
  KernelArgs *k = args;
  void *dst, *src;
  atomic_fetch_add(&account[k->step].ran, 1);
  for (uint32_t i = 0; i < k->extra; i++)
    if (k->bytes[i] != argumentByte(k->b, i)) atomic_fetch_add(&bad_bytes, 1);
  if (orMapForKernel(&dst, k->dst, k->words * 4) || orMapForKernel(&src, k->src, k->words * 4))
    return orErrorInvalidValue;
  uint32_t *d = dst, *s = src;
  for (uint32_t i = 0; i < k->words; i++) d[i] = mix(d[i], s[i], k->a, k->b);
  return orSuccess;
}

static void dropArguments(void *args) {
  atomic_fetch_add(&account[((KernelArgs *)args)->step].dropped, 1);
}

static void noteCall(void *user_data) { atomic_fetch_add(&account[(intptr_t)user_data].ran, 1); }

/* For the sanitizer: copies and fills tell it themselves. */
static void tell(orStream_t stream, const char *what, const orAccess *accesses, int count) {
  orMemoryAccess told[2];
  if (!__atomic_load_n(orSanitizerActive(), __ATOMIC_RELAXED)) return;
  for (int i = 0; i < count; i++)
    told[i] = (orMemoryAccess){.data = accesses[i].address,
                               .width = accesses[i].bytes,
                               .write = (uint32_t)accesses[i].write};
  ASSERT_OK(orSanitizerAccess(stream, what, told, (size_t)count));
}

/* What the queue owns is not launched again, whatever the call has said of it. */
static void launchOnce(int index, const orLaunch *launch) {
  do {
  } while (isRefused(orLaunchKernelEx(launch), index, "orLaunchKernelEx") && !*launch->queued);
}

static void launchMix(int index, const Step *s, orStream_t stream, uint32_t *dst, uint32_t *src) {
  static _Thread_local _Alignas(16) char block[OR_MAX_ARGS];
  int queued = 0;
  KernelArgs *k = (KernelArgs *)block;
  *k = (KernelArgs){dst, src, s->words, s->a, s->b, s->extra, index};
  for (uint32_t i = 0; i < s->extra; i++) k->bytes[i] = argumentByte(s->b, i);
  orAccess accesses[] = {{k->dst, k->words * 4, 1}, {k->src, k->words * 4, 0}};
  tell(captured ? captured : program.stream[s->line], "mix", accesses, 2);
  launchOnce(index, &(orLaunch){.size = sizeof(orLaunch),
                                .stream = stream,
                                .fn = mixKernel,
                                .args = k,
                                .args_size = sizeof *k + s->extra,
                                .drop = dropArguments,
                                .accesses = accesses,
                                .access_count = 2,
                                .name = "mix",
                                .flags = s->a >> 1 & 3, /* orLaunchFlags, in every way */
                                .queued = &queued});
  memset(k->bytes, 0xee, s->extra);
  account[index].queued = 1;
}

static bool reaches(int device, int place) {
  return place == PINNED || (maps && (place == device || peers));
}

/* Where a kernel cannot reach the memory, it works on the line's pinned memory. */
static void queueMix(int index, const Step *s, orStream_t stream) {
  uint32_t *dst = place(s->dst, s->line, s->dst_at), *src = place(s->src, s->line, s->src_at);
  int device = program.device[s->line];
  if (reaches(device, program.buffer[s->dst].place) &&
      reaches(device, program.buffer[s->src].place)) {
    launchMix(index, s, stream, dst, src);
    return;
  }
  uint32_t *near = staging[s->line], *other = near + staging_words;
  MUST(orMemcpyAsync(near, dst, s->words * 4, orMemcpyDefault, stream));
  MUST(orMemcpyAsync(other, src, s->words * 4, orMemcpyDefault, stream));
  launchMix(index, s, stream, near, other);
  MUST(orMemcpyAsync(dst, near, s->words * 4, orMemcpyDefault, stream));
}

static orError_t allocate(Buffer *b) {
  if (b->place == 2) return orMallocHost((void **)&b->real, bytesOf(b));
  int before = 0;
  orGetDevice(&before);
  orSetDevice(b->place);
  orError_t error = orMalloc((void **)&b->real, bytesOf(b));
  orSetDevice(before);
  return error;
}

static orError_t makeStream(int line) {
  orSetDevice(program.device[line]);
  if (program.standard[line])
    return orStreamGetDefault(&program.stream[line], program.device[line]);
  return orStreamCreateWithPriority(&program.stream[line], -(line % 4));
}

static void upload(int index, const Step *s, orStream_t stream) {
  static _Thread_local uint32_t from[30000];
  for (uint32_t i = 0; i < s->words; i++) from[i] = uploaded(s, i);
  MUST(orMemcpyAsync(place(s->dst, s->line, s->dst_at), from, s->words * 4, orMemcpyDefault,
                     stream));
  memset(from, 0xee, s->words * 4);
}

static void check(int index, const Step *s, orStream_t stream) {
  uint32_t seen[CHECK_WORDS];
  MUST(orMemcpyAsync(seen, place(s->src, s->line, s->src_at), s->words * 4, orMemcpyDefault,
                     stream));
  for (uint32_t i = 0; i < s->words && !trouble.fails; i++)
    if (seen[i] != s->check[i])
      STRESS_FAIL("step %d: word %u of buffer %d is %#x, not %#x", index, s->src_at + i, s->src,
                  seen[i], s->check[i]);
}

static void writeOfHost(const Step *s) {
  uint32_t *dst = place(s->dst, s->host, s->dst_at);
  tell(OR_STREAM_DEFAULT, "write", &(orAccess){dst, s->words * 4, 1}, 1);
  for (uint32_t i = 0; i < s->words; i++) dst[i] = uploaded(s, i);
}

static void replace(int index, const Step *s) {
  Buffer *b = &program.buffer[s->dst];
  MUST(b->place == 2 ? orFreeHost(b->real) : orFree(b->real));
  MUST(allocate(b));
  MUST(orMemset(b->real, (int)s->a, b->words * 4));
}

static void copyStep(int index, const Step *s, orStream_t stream) {
  MUST(orMemcpyAsync(place(s->dst, s->line, s->dst_at), place(s->src, s->line, s->src_at),
                     s->words * 4, orMemcpyDefault, stream));
}

static void query(int index, orStream_t stream) {
  orError_t e = orStreamQuery(stream);
  if (e && e != orErrorNotReady) MUST(e);
}

static void waitForSignal(int index, orEvent_t *event, orStream_t stream) {
  MUST(orEventCreateWithFlags(event, orEventExternal));
  MUST(orStreamWaitEvent(stream, *event));
}

static void signalEvent(orEvent_t event) {
  ASSERT_OK(orEventSignal(event, orSuccess));
  ASSERT_OK(orEventDestroy(event));
}

static void openTheGate(const Step *s) {
  if (s->b == GATE_SIGNALLED) {
    ASSERT_OK(orEventSignal(program.gate, orSuccess));
    ASSERT_REFUSED(orEventSignal(program.gate, orSuccess), orErrorInvalidValue, "already");
  }
  ASSERT_OK(orEventDestroy(program.gate));
}

/* A default stream goes by two names. */
static orStream_t streamOf(int index, const Step *s) {
  if (s->line < 0) return 0;
  if (!program.standard[s->line] || index % 2) return program.stream[s->line];
  ASSERT_OK(orSetDevice(program.device[s->line]));
  return OR_STREAM_DEFAULT;
}

/* What work there is for a stream. */
static void queueWork(int index, const Step *s, orStream_t stream) {
  switch (s->kind) {
    case KERNEL:
      queueMix(index, s, stream);
      break;
    case COPY:
      copyStep(index, s, stream);
      break;
    case FILL:
      MUST(orMemsetAsync(place(s->dst, s->line, s->dst_at), (int)s->a, s->words * 4, stream));
      break;
    case UPLOAD:
      upload(index, s, stream);
      break;
    case CHECK:
      check(index, s, stream);
      break;
    case HOST_FUNC:
      MUST(orLaunchHostFunc(stream, noteCall, (void *)(intptr_t)index));
      account[index].queued = 1;
      break;
    default:
      MUST(orLaunchSleep(stream, s->a));
  }
}

static bool isNode(const Step *s) {
  return s->kind == KERNEL || s->kind == COPY || s->kind == FILL || s->kind == HOST_FUNC;
}

static void beginGraph(int index, const Step *s) {
  MUST(orSetDevice(program.device[s->line]));
  MUST(orStreamCreate(&captured));
  MUST(orStreamBeginCapture(captured));
}

static void launchGraph(int index, orStream_t stream) {
  orGraph_t graph;
  MUST(orStreamEndCapture(captured, &graph));
  if (!trouble.blocks)
    MUST(orGraphReplay(graph, stream));
  else /* it may have been launched and then have failed */
    isRefused(orGraphReplay(graph, stream), index, "orGraphReplay");
  MUST(orGraphDestroy(graph));
  MUST(orStreamDestroy(captured));
  captured = 0;
}

/* What one line does without a pause is one graph. */
static void captureStep(int index, const Step *s, orStream_t stream) {
  const Step *next = index + 1 < program.steps ? s + 1 : NULL;
  if (!captured) beginGraph(index, s);
  queueWork(index, s, captured);
  if (!next || !isNode(next) || next->line != s->line) launchGraph(index, stream);
}

static void runStep(int index, const Step *s) {
  orStream_t stream = streamOf(index, s);
  orEvent_t event = s->event < 0 ? 0 : program.event[s->event].handle;
  switch (s->kind) {
    case HOST_WRITE:
      writeOfHost(s);
      break;
    case REPLACE:
      replace(index, s);
      break;
    case RECORD:
      MUST(orEventRecord(event, stream));
      break;
    case RECORD_REFUSED:
      ASSERT_REFUSED(orEventRecord(event, stream), orErrorInvalidValue, "cannot be recorded");
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
      ASSERT_OK(orSetDevice((int)s->a));
      MUST(orDeviceSynchronize());
      break;
    case WAIT_SIGNAL:
      waitForSignal(index, &program.signal[s->src], stream);
      break;
    case SIGNAL:
      signalEvent(program.signal[s->host]);
      break;
    case NEW_STREAM:
      MUST(orStreamDestroy(stream));
      MUST(makeStream(s->dst));
      break;
    case CLOSE_GATE:
      waitForSignal(index, &program.gate, stream);
      break;
    case OPEN_GATE:
      openTheGate(s);
      break;
    case QUERY:
      query(index, stream);
      break;
    default:
      if (trouble.graphs && program.hosts == 1 && isNode(s))
        captureStep(index, s, stream);
      else
        queueWork(index, s, stream);
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
      if (trouble.after) trouble.after(i);
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

static void findReach(void) {
  int index = -1, can = 0;
  orDeviceProperties properties = {.size = sizeof properties};
  MUST(orGetDeviceProperties(&properties, 0));
  MUST(orDeviceCanAccessPeer(&can, 0, 1));
  maps = properties.can_map;
  peers = can;
  for (int d = 0; d < 2 && peers; d++) MUST(orDeviceEnablePeerAccess(d, !d));
  staging_words = 0;
  for (int i = 0; i < BUFFERS; i++)
    if (program.buffer[i].words > staging_words) staging_words = program.buffer[i].words;
}

static void setUp(void) {
  int index = -1;
  memset(account, 0, sizeof account);
  for (int h = 0; h < HOSTS; h++) atomic_store(&program.issued[h], 0);
  for (int i = HOSTS; i < LINES; i++) program.stream[i] = 0;
  findReach();
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
  for (int i = HOSTS; i < program.lines && !(maps && peers); i++)
    MUST(orMallocHost((void **)&staging[i], staging_words * 2 * sizeof **staging));
}

/* Work was done once, or if it was dropped not at all; arguments were dropped once. */
static void settleAccounts(bool exact) {
  for (int i = 0; i < program.steps; i++) {
    int queued = account[i].queued, ran = account[i].ran, dropped = account[i].dropped;
    bool kernel = program.step[i].kind == KERNEL;
    if (ran > queued || (exact && ran != queued) || (kernel && dropped != queued))
      STRESS_FAIL(
          "step %d was queued %d times, has run %d times, its arguments were dropped %d times", i,
          queued, ran, dropped);
    blocks += (unsigned)(kernel ? queued : 0);
  }
  if (bad_bytes) STRESS_FAIL("%d bytes of arguments are not what was queued", bad_bytes);
}

static void compare(int index, int buffer) {
  static uint32_t seen[WORDS_MOST];
  const Buffer *b = &program.buffer[buffer];
  MUST(orMemcpy(seen, b->real, b->words * 4, orMemcpyDefault));
  for (uint32_t k = 0; k < b->words; k++)
    if (seen[k] != b->model[k])
      STRESS_FAIL("word %u of buffer %d is %#x, not %#x", k, buffer, seen[k], b->model[k]);
}

static void tearDown(void) {
  int index = program.steps;
  if (trouble.over) trouble.over();
  bool exact = !trouble.fails || trouble.harmless;
  for (int d = 0; d < 2; d++) {
    MUST(orSetDevice(d));
    MUST(orDeviceSynchronize());
  }
  settleAccounts(exact);
  for (int i = 0; i < BUFFERS; i++) {
    Buffer *b = &program.buffer[i];
    if (exact && !trouble.drops) compare(index, i);
    MUST(b->place == 2 ? orFreeHost(b->real) : orFree(b->real));
  }
  for (int i = 0; i < 2 * EVENTS; i++) MUST(orEventDestroy(program.event[i].handle));
  for (int i = HOSTS; i < program.lines; i++) {
    MUST(orFreeHost(staging[i]));
    staging[i] = NULL;
    if (program.successor[i] >= 0) continue;
    if (program.standard[i])
      ASSERT_ERROR(orStreamDestroy(program.stream[i]), orErrorInvalidValue);
    else
      MUST(orStreamDestroy(program.stream[i]));
  }
}

void runProgram(void) {
  setUp();
  pthread_barrier_wait(&start_line);
  runHost(0);
  pthread_barrier_wait(&end_line);
  tearDown();
}

uint64_t stressSetting(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

void startStress(void) {
  pthread_t thread;
  pthread_barrier_init(&start_line, NULL, HOSTS);
  pthread_barrier_init(&end_line, NULL, HOSTS);
  for (int h = 1; h < HOSTS; h++)
    ASSERT_EQ(pthread_create(&thread, NULL, helper, (void *)(intptr_t)h), 0);
  for (int i = 0; i < BUFFERS; i++) program.buffer[i].model = malloc(WORDS_MOST * sizeof(uint32_t));
}

TEST_WITH_LIMIT(stress_random_programs, 600) {
  uint64_t programs = stressSetting("OPENREG_STRESS_PROGRAMS", 10000),
           seed = stressSetting("OPENREG_STRESS_SEED", 0);
  startStress();
  for (uint64_t i = 1; i <= programs; i++) {
    makeProgram(seed ? seed : i);
    runProgram();
  }
}
