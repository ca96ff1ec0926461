/*
 * Walks over the failing core (failing.h): every call of the system that the core makes fails once,
 * and all from it on.
 *
 *   walk                          every scene, every kind of call, every n-th call
 *   walk SCENE [KIND]             of that scene alone, and of that kind
 *   walk SCENE KIND N once|on     one run in this process, for a debugger
 *
 * A scene is a small program over one part of the core. A run plays it three times in a process of
 * its own: once while calls fail, where a call may return an error but has to keep its word if it
 * returns none; and twice with nothing failing, where every call has to succeed. At the end each
 * argument was dropped, each object destroyed, and the core has as much memory as after a run
 * without failures.
 *
 * OPENREG_WALK_SAMPLE=k runs one call out of k, of each kind from another one on.
 */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include "failing.h"
#include "openreg.h"
#include "openreg_fault.h"
#include "openreg_graph.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"
#include "openreg_watchdog.h"
#include "stub_factory.h"

enum { LIMIT_S = 10, MOST_FAILED = 4, SMALL = 4096, LARGE = 1 << 20 };

static const char *const kindNames[] = {
#define X(name, text) [name] = text,
    FAILING_LIST(X)
#undef X
};

/* ---- One round ---- */

static bool strict;       /* nothing fails in this round: every call has to succeed */
static bool disappointed; /* some call of this round has failed */

static struct {
  atomic_int queued, ran, dropped, retained, destroyed;
} tally;

_Noreturn static void __attribute__((format(printf, 2, 3))) wrong(int line, const char *format,
                                                                  ...) {
  va_list list;
  va_start(list, format);
  printf("%s:%d: ", __FILE__, line);
  vprintf(format, list);
  va_end(list);
  printf("; the last message: \"%s\"\n", orGetLastErrorMessage());
  fflush(stdout);
  if (getenv("OPENREG_WALK_ABORT")) abort();
  _exit(1);
}

#define CHECK(condition) \
  if (!(condition)) wrong(__LINE__, "%s is false", #condition)

static bool succeeded(orError_t error, const char *call, int line) {
  if (!error) return true;
  if (strict) wrong(line, "%s is %s in a round without failures", call, orGetErrorName(error));
  if (error == orErrorNotReady || !*orGetLastErrorMessage())
    wrong(line, "%s is %s without a message", call, orGetErrorName(error));
  disappointed = true;
  return false;
}

/* True if the call succeeds, which it need not while calls of the system fail. */
#define OK(call) succeeded((call), #call, __LINE__)

/* ---- What scenes share ---- */

static void drop(void *args) {
  (void)args;
  tally.dropped++;
}

/* Adds 1 to the bytes of a device range. */
typedef struct Add {
  unsigned char *at;
  size_t bytes;
} Add;

static orError_t addKernel(void *args) {
  const Add *add = args;
  void *memory;
  orError_t error = orMapForKernel(&memory, add->at, add->bytes);
  for (size_t i = 0; !error && i < add->bytes; i++) ((unsigned char *)memory)[i]++;
  tally.ran++;
  return error;
}

static void addOne(orStream_t stream, void *at, size_t bytes) {
  int queued = 0;
  Add add = {at, bytes};
  orAccess access = {at, bytes, 1};
  OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                  .stream = stream,
                                  .fn = addKernel,
                                  .args = &add,
                                  .args_size = sizeof add,
                                  .drop = drop,
                                  .accesses = &access,
                                  .access_count = 1,
                                  .name = "add",
                                  .queued = &queued}));
  tally.queued += queued;
}

/* All bytes of the range; only if nothing has failed so far. */
static void expectBytes(const void *device, size_t bytes, int value) {
  static unsigned char host[LARGE];
  if (disappointed || !OK(orMemcpy(host, device, bytes, orMemcpyDeviceToHost)) || disappointed)
    return;
  for (size_t i = 0; i < bytes; i++)
    if (host[i] != value) wrong(__LINE__, "byte %zu is %d, not %d", i, host[i], value);
}

static orStream_t stream(void) {
  orStream_t made = 0;
  return OK(orStreamCreate(&made)) ? made : 0;
}

static void destroyStream(orStream_t given) {
  if (given) OK(orStreamDestroy(given));
}

static void *memory(size_t bytes) {
  void *made = NULL;
  return OK(orMalloc(&made, bytes)) ? made : NULL;
}

/* What a call has refused to free is freed when nothing fails any more. */
static struct {
  void *device[16], *pinned[16];
  int devices, pins;
} left;

static void freeDevice(void *given) {
  if (!OK(orFree(given))) left.device[left.devices++] = given;
}

static void freePinned(void *given) {
  if (!OK(orFreeHost(given))) left.pinned[left.pins++] = given;
}

static void freeLeft(void) {
  while (left.devices) OK(orFree(left.device[--left.devices]));
  while (left.pins) OK(orFreeHost(left.pinned[--left.pins]));
}

static void *pinned(size_t bytes) {
  void *made = NULL;
  return OK(orMallocHost(&made, bytes)) ? made : NULL;
}

static orEvent_t event(unsigned flags) {
  orEvent_t made = 0;
  return OK(orEventCreateWithFlags(&made, flags)) ? made : 0;
}

static void destroyEvent(orEvent_t given) {
  if (given) OK(orEventDestroy(given));
}

/* ---- Scenes ---- */

static void sceneMemory(void) {
  static const size_t sizes[] = {100, SMALL, 3 << 20};
  for (int i = 0; i < 3; i++) {
    void *device = memory(sizes[i]), *host = pinned(sizes[i]), *own = calloc(1, LARGE);
    bool registered = OK(orHostRegister(own, LARGE));
    if (device) OK(orMemset(device, 7, sizes[i]));
    if (device && host) OK(orMemcpy(host, device, sizes[i], orMemcpyDefault));
    if (device && host && !disappointed) CHECK(((char *)host)[sizes[i] - 1] == 7);
    if (device) OK(orMemcpy(own, device, 100, orMemcpyDefault));
    if (registered) OK(orHostUnregister(own));
    free(own);
    freeDevice(device);
    freePinned(host);
  }
}

static void hostFunction(void *data) { (*(atomic_int *)data)++; }

static void piece(void *context, size_t index) {
  (void)index;
  ++*(atomic_int *)context;
}

static orError_t piecesKernel(void *args) { return orRunPieces(piece, *(void **)args, 64); }

static void sceneStreams(void) {
  static atomic_int count;
  orStream_t streams[] = {stream(), stream(), 0};
  void *at = memory(SMALL);
  count = 0;
  if (at) OK(orMemset(at, 0, SMALL));
  for (int i = 0; at && i < 100; i++) addOne(streams[2], at, 8);
  for (int i = 0; at && i < 3; i++) addOne(streams[i], (char *)at + 1000 * (i + 1), 8);
  OK(orLaunchHostFunc(streams[0], hostFunction, &count));
  void *context = &count;
  OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                  .stream = streams[1],
                                  .fn = piecesKernel,
                                  .args = &context,
                                  .args_size = sizeof context,
                                  .name = "pieces"}));
  OK(orLaunchSleep(streams[1], 1000));
  for (int i = 0; i < 3; i++) OK(orStreamSynchronize(streams[i]));
  if (!disappointed) CHECK(count == 65);
  if (at) expectBytes(at, 8, 100);
  destroyStream(streams[0]);
  destroyStream(streams[1]);
  orStream_t shared;
  /* Bytes of its own: where the waits have failed, the other streams still run. */
  if (OK(orStreamGetFromPool(&shared, 0, 0)) && at) addOne(shared, (char *)at + 512, 8);
  OK(orDeviceSynchronize());
  freeDevice(at);
}

/* Arguments that need chunks of the queue. */
static orError_t bigKernel(void *args) {
  (void)args;
  tally.ran++;
  return orSuccess;
}

static void sceneQueue(void) {
  static char args[OR_MAX_ARGS];
  orStream_t queue = stream();
  orEvent_t gate = event(orEventExternal);
  bool closed = queue && gate && OK(orStreamWaitEvent(queue, gate));
  for (int i = 0; i < 12; i++) {
    int queued = 0;
    OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                    .stream = queue,
                                    .fn = bigKernel,
                                    .args = args,
                                    .args_size = (size_t)(i % 2 ? 1000 : OR_MAX_ARGS),
                                    .drop = drop,
                                    .name = "big",
                                    .queued = &queued}));
    tally.queued += queued;
  }
  if (closed) OK(orEventSignal(gate, orSuccess));
  OK(orDeviceSynchronize());
  destroyStream(queue);
  destroyEvent(gate);
}

static void sceneEvents(void) {
  orStream_t a = stream(), b = stream();
  orEvent_t done = event(0), again = event(0), gate = event(orEventExternal);
  void *at = memory(SMALL);
  bool closed = a && gate && OK(orStreamWaitEvent(a, gate));
  if (at) OK(orMemsetAsync(at, 0, SMALL, a));
  bool recorded = done && OK(orEventRecord(done, a));
  if (recorded) OK(orStreamWaitEvent(b, done));
  if (at && (recorded || !a)) addOne(b, at, 8);
  if (again && OK(orEventRecord(again, b))) OK(orStreamWaitEvent(a, again));
  if (closed) {
    orError_t asked = orStreamQuery(a);
    if (asked != orErrorNotReady) OK(asked);
    OK(orEventSignal(gate, orSuccess));
  }
  if (recorded) OK(orEventSynchronize(done));
  OK(orDeviceSynchronize());
  float ms;
  if (recorded && again && !disappointed) OK(orEventElapsedTime(&ms, done, again));
  if (at) expectBytes(at, 8, 1);
  destroyStream(a);
  destroyStream(b);
  destroyEvent(done);
  destroyEvent(again);
  destroyEvent(gate);
  freeDevice(at);
}

static void sceneCopies(void) {
  orStream_t a = stream();
  void *from = pinned(LARGE), *at = memory(LARGE), *other = NULL;
  unsigned char pageable[3000];
  if (from) memset(from, 3, LARGE);
  memset(pageable, 5, sizeof pageable);
  if (from && at) OK(orMemcpyAsync(at, from, LARGE, orMemcpyDefault, a));
  if (at) OK(orMemcpyAsync(at, pageable, sizeof pageable, orMemcpyDefault, a));
  memset(pageable, 6, sizeof pageable);
  if (at) OK(orMemcpyAsync(pageable, at, sizeof pageable, orMemcpyDefault, a));
  OK(orStreamSynchronize(a));
  if (!disappointed) CHECK(pageable[0] == 5 && pageable[2999] == 5);
  OK(orSetDevice(1));
  if (OK(orMalloc(&other, LARGE)) && at) {
    OK(orMemset(other, 9, LARGE));
    OK(orMemcpyPeerAsync(at, 0, other, 1, LARGE, a));
    OK(orStreamSynchronize(a));
  }
  freeDevice(other);
  OK(orSetDevice(0));
  if (at) expectBytes(at, LARGE, 9);
  OK(orDeviceSynchronize());
  destroyStream(a);
  freeDevice(at);
  freePinned(from);
}

static void destroyObject(void *object) { ++*(atomic_int *)object; }

static bool captures(orStream_t given) {
  orCaptureStatus status = orCaptureStatusNone;
  if (given) OK(orStreamGetCaptureInfo(given, &status, NULL));
  return status != orCaptureStatusNone;
}

/* A launch that succeeds is queued as a whole. */
static void replay(orGraph_t graph, orStream_t on) {
  if (!OK(orGraphReplay(graph, on))) return;
  orError_t error = orDeviceSynchronize();
  CHECK(error != orErrorMemoryAllocation);
  OK(error);
}

static void sceneGraphs(void) {
  orStream_t a = stream(), b = stream();
  orEvent_t fork = event(0), join = event(0);
  orGraph_t graph = 0;
  void *at = memory(SMALL);
  if (at) OK(orMemset(at, 0, SMALL));
  if (a && b && fork && join && OK(orStreamBeginCapture(a))) {
    if (at) addOne(a, at, 8);
    bool joined = OK(orEventRecord(fork, a)) && OK(orStreamWaitEvent(b, fork));
    CHECK(captures(b) == joined);
    if (joined) {
      if (at) addOne(b, (char *)at + 100, 8);
      if (OK(orEventRecord(join, b))) OK(orStreamWaitEvent(a, join));
    }
    if (at) OK(orMemsetAsync((char *)at + 200, 3, 100, a));
    if (!OK(orStreamEndCapture(a, &graph))) graph = 0;
  }
  CHECK(!captures(a) && !captures(b));
  if (graph) {
    if (OK(orGraphRetainUserObject(graph, &tally.destroyed, destroyObject))) tally.retained++;
    OK(orGraphDebugDotPrint(graph, "/dev/null"));
    for (int i = 0; i < 3; i++) replay(graph, i % 2 ? b : a);
    if (at) expectBytes(at, 8, 3);
    OK(orGraphDestroy(graph));
  }
  OK(orDeviceSynchronize());
  destroyStream(a);
  destroyStream(b);
  destroyEvent(fork);
  destroyEvent(join);
  freeDevice(at);
}

static orError_t allocatingKernel(void *args) {
  void *block = NULL;
  orError_t error = orCacheMalloc(&block, 3000, *(orStream_t *)args);
  return error ? error : orCacheFree(block);
}

static void sceneCache(void) {
  orStream_t a = stream(), b = stream();
  void *blocks[14] = {NULL};
  orMemPool_t pool;
  for (int i = 0; i < 14; i++)
    if (!OK(orCacheMalloc(&blocks[i], (size_t)1 << (9 + i), a))) blocks[i] = NULL;
  for (int i = 0; i < 14; i++) {
    if (!blocks[i]) continue;
    addOne(b, blocks[i], 8);
    OK(orCacheRecordStream(blocks[i], b));
    OK(orCacheFree(blocks[i]));
  }
  if (OK(orMemPoolCreate(&pool, 0))) {
    void *block = NULL;
    if (OK(orCacheMallocFromPool(&block, 5000, a, pool))) OK(orCacheFree(block));
    OK(orMemPoolRelease(pool));
  }
  OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                  .stream = a,
                                  .fn = allocatingKernel,
                                  .args = &a,
                                  .args_size = sizeof a,
                                  .name = "allocates"}));
  size_t count = 0;
  orCacheSnapshot(NULL, sizeof(orCacheBlock), &count, 0);
  OK(orDeviceSynchronize());
  destroyStream(a);
  destroyStream(b);
}

static void sceneCapturedCache(void) {
  orStream_t a = stream();
  orMemPool_t pool = 0;
  orGraph_t graph = 0;
  void *block = NULL, *other = NULL;
  if (!OK(orMemPoolCreate(&pool, 0))) pool = 0;
  if (a && pool && OK(orStreamBeginCapture(a))) {
    if (OK(orCacheMallocFromPool(&block, 5000, a, pool))) {
      addOne(a, block, 8);
      OK(orCacheFree(block));
    }
    if (OK(orCacheMalloc(&other, 3 << 20, a))) OK(orCacheFree(other));
    if (!OK(orStreamEndCapture(a, &graph))) graph = 0;
  }
  if (graph) {
    OK(orGraphReplay(graph, a));
    OK(orDeviceSynchronize());
    OK(orGraphDestroy(graph));
  }
  if (pool) OK(orMemPoolRelease(pool));
  OK(orDeviceSynchronize());
  destroyStream(a);
}

static void sceneTools(void) {
  orTrace trace = {.size = sizeof trace};
  char *text = NULL;
  void *at = memory(SMALL);
  orFault fault = {.size = sizeof fault, .kind = orFaultSlowStream, .delay_ns = 1000};
  bool faulty = OK(orFaultInject(&fault)), traced = OK(orTraceStart(100));
  if (at) addOne(0, at, 8);
  OK(orDeviceSynchronize());
  if (OK(orHangReport(&text))) free(text);
  if (traced && OK(orTraceStop(&trace))) orTraceFree(&trace);
  if (faulty) OK(orFaultRemove(orFaultSlowStream, 0));
  freeDevice(at);
}

static void sceneSchedule(void) {
  static const orSchedulePolicy policies[] = {orScheduleSeeded, orScheduleLate, orScheduleTape};
  orStream_t a = stream(), b = stream();
  void *at = memory(SMALL);
  OK(orScheduleRecord(1));
  for (int i = 0; i < 3; i++) {
    char *tape = NULL;
    size_t steps;
    OK(policies[i] == orScheduleTape ? orScheduleSetTape("1,2:1") : orScheduleSet(policies[i], 2));
    if (at) OK(orMemset(at, 0, SMALL));
    if (at) addOne(a, at, 8);
    if (at) addOne(b, (char *)at + 100, 8);
    OK(orDeviceSynchronize());
    if (at) expectBytes(at, 8, 1);
    if (policies[i] == orScheduleTape && !disappointed && OK(orScheduleGetTape(&tape))) free(tape);
    if (!disappointed) OK(orScheduleSteps(0, NULL, sizeof(orScheduleStep), 0, &steps));
  }
  OK(orScheduleSet(orScheduleFair, 0));
  OK(orScheduleRecord(0));
  destroyStream(a);
  destroyStream(b);
  freeDevice(at);
}

static void sceneSanitizer(void) {
  orStream_t a = stream(), b = stream();
  void *at = memory(SMALL), *host = NULL;
  if (OK(orSanitizerEnable(NULL))) {
    host = pinned(2 * SMALL);
    if (at) addOne(a, at, 8);
    orSanitizerIgnore(1); /* for it the copy races, while no byte is touched at once */
    OK(orStreamSynchronize(a));
    orSanitizerIgnore(0);
    if (at && host) {
      OK(orMemcpyAsync(host, at, SMALL, orMemcpyDefault, b));
      OK(orStreamSynchronize(b));
      CHECK(*(volatile char *)host || true);
    }
    OK(orDeviceSynchronize());
    OK(orSanitizerClearReports());
    freePinned(host);
    OK(orSanitizerDisable());
  }
  destroyStream(a);
  destroyStream(b);
  freeDevice(at);
}

static void sceneDevices(void) {
  orDevice *device, *host;
  const orAllocator *allocator;
  int64_t shape = 100;
  static const char bytes[100];
  orTensor tensor = {.size = sizeof tensor};
  orTensorProto proto = {orUint8, 1, &shape, bytes, sizeof bytes};
  void *block;
  if (OK(orGetDeviceByIndex(&device, "openreg", 0))) {
    for (unsigned attributes = 0; attributes < 4; attributes++)
      if (attributes != orAllocatorPinned &&
          OK(orDeviceGetAllocator(device, attributes, &allocator)) &&
          OK(allocator->alloc(allocator->self, SMALL, &block)))
        OK(allocator->free(allocator->self, block));
    if (OK(orDeviceGetAllocator(device, 0, &allocator)) &&
        OK(orDeviceMakeTensor(device, &proto, 0, &tensor)))
      OK(allocator->free(allocator->self, tensor.data));
  }
  if (OK(orGetDeviceByIndex(&host, "CPU", 0)))
    OK(orDeviceCompute(host, &(orKernel){bigKernel, NULL, "host"}, 0));
  OK(orDeviceSynchronize());
}

/* A device is lost and comes back. */
static void sceneLost(void) {
  orStream_t a = stream();
  void *at = memory(SMALL);
  orFault fault = {.size = sizeof fault, .kind = orFaultDeviceLost};
  if (at && OK(orFaultInject(&fault))) {
    addOne(a, at, 8);
    orDeviceSynchronize();
    OK(orFaultRemove(orFaultDeviceLost, 0));
  }
  OK(orDeviceReset());
  if (at) orFree(at);
  orStreamDestroy(a);
  orGetLastError();
}

/* With settings that are read at first use, of which one has no value that is allowed. */
static void sceneSettings(void) {
  setenv("OPENREG_WATCHDOG_S", "30", 1);
  setenv("OPENREG_TRACE_RECORDS", "100", 1);
  setenv("OPENREG_SCHEDULE_TAPE", "1,2:1", 1);
  setenv("OPENREG_PEER_ACCESS", "perhaps", 1);
  sceneEvents();
  sceneCache();
}

/* With the example plugin, which is beside this program. */
static void scenePlugin(void) {
  static char path[PATH_MAX + 16];
  ssize_t length = readlink("/proc/self/exe", path, PATH_MAX);
  while (length > 0 && path[length - 1] != '/') length--;
  strcpy(path + length, "libvendor.so");
  setenv("OPENREG_PLUGIN", path, 1);
  sceneMemory();
  sceneStreams();
}

static orError_t toyDevices(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; i++) devices[i].memory_limit = LARGE;
  return orSuccess;
}

/* A type of devices of this program's own. */
static void sceneFactory(void) {
  static const orDeviceFactory toy = STUB_FACTORY("toy", toyDevices);
  static bool asked;
  orDeviceCount count = {"toy", 2};
  orDevice *device;
  bool registered = !asked && OK(orRegisterDeviceFactory("toy", 1, &toy));
  bool added =
      registered && OK(orAddDevices(&(orDeviceConfig){sizeof(orDeviceConfig), &count, 1}, "walk"));
  asked = true;
  if (added) OK(orGetDeviceByIndex(&device, "toy", 1));
  sceneDevices();
}

enum { NONE = -1 };

/* `spares`: calls of this kind do not fail. */
typedef struct Scene {
  const char *name;
  void (*play)(void);
  int spares;
} Scene;

static const Scene scenes[] = {
    {"memory", sceneMemory, NONE},
    {"streams", sceneStreams, NONE},
    {"queue", sceneQueue, NONE},
    {"events", sceneEvents, NONE},
    {"copies", sceneCopies, NONE},
    {"graphs", sceneGraphs, NONE},
    {"cache", sceneCache, NONE},
    {"captured_cache", sceneCapturedCache, NONE},
    {"tools", sceneTools, NONE},
    {"schedule", sceneSchedule, NONE},
    /* Without host memory the sanitizer ends the process, as it would miss races afterwards. */
    {"sanitizer", sceneSanitizer, FAIL_MALLOC},
    {"devices", sceneDevices, NONE},
    {"lost", sceneLost, NONE},
    {"settings", sceneSettings, NONE},
    {"plugin", scenePlugin, NONE},
    {"factory", sceneFactory, NONE},
};
enum { SCENES = sizeof scenes / sizeof scenes[0] };

/* ---- One run ---- */

/* A run's end, in memory that the walk shares with its children. */
typedef struct Outcome {
  long calls[FAIL_KINDS], mapped;
} Outcome;

typedef struct Plan {
  const Scene *scene;
  FailKind kind;
  long at;
  bool on;
} Plan;

/* Every stream has drained by now; a destroyed one's arguments are dropped by the worker that ends
 * it. */
static void awaitTally(void) {
  struct timespec nap = {0, 100000};
  while (tally.dropped != tally.queued || tally.destroyed != tally.retained) nanosleep(&nap, NULL);
}

static void settle(void) {
  size_t unused, all;
  OK(orDeviceSynchronize());
  awaitTally();
  OK(orCacheEmpty(0));
  OK(orMemGetInfo(&unused, &all));
  if (strict && unused != all)
    wrong(__LINE__, "%zu bytes of the device are in use at the end", all - unused);
}

/* What nothing points to any more. */
static void findLeaks(void) {
#if defined(__SANITIZE_ADDRESS__)
  if (__lsan_do_recoverable_leak_check()) wrong(__LINE__, "memory has leaked");
#endif
}

static void run(const Plan *plan, Outcome *outcome) {
  failingBegin(plan->kind, plan->at, plan->on);
  plan->scene->play();
  failingEnd(outcome->calls);
  orDeviceSynchronize(); /* takes what failed on the device */
  orGetLastError();
  strict = true;
  freeLeft();
  for (int i = 0; i < 2; i++) {
    disappointed = false;
    plan->scene->play();
  }
  settle();
  findLeaks();
  outcome->mapped = failingMapped();
}

/* ---- The walk ---- */

static unsigned limit(void) {
  const char *given = getenv("OPENREG_TEST_TIMEOUT_SCALE");
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  unsigned scale = 5;
#else
  unsigned scale = 1;
#endif
  return (unsigned)(LIMIT_S * (given ? atof(given) : 1) * scale);
}

static const char *describe(const Plan *plan) {
  static char text[128];
  snprintf(text, sizeof text, "walk %s %s %ld %s", plan->scene->name, kindNames[plan->kind],
           plan->at, plan->on ? "on" : "once");
  return text;
}

/* In a child; false if it fails. The alarm ends one that hangs. */
static bool runApart(const Plan *plan, Outcome *outcome) {
  FILE *text = tmpfile();
  fflush(stdout);
  pid_t child = text ? fork() : -1;
  if (child < 0) {
    perror("walk");
    exit(2);
  }
  if (!child) {
    dup2(fileno(text), STDOUT_FILENO);
    dup2(fileno(text), STDERR_FILENO);
    alarm(limit());
    run(plan, outcome);
    fflush(stdout);
    _exit(0);
  }
  int status;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status) {
    printf("FAILED %s: %s\n", describe(plan),
           WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "");
    rewind(text);
    for (int c; (c = fgetc(text)) != EOF;) putchar(c);
  }
  fclose(text);
  return !status;
}

/* More address space than a run without failures leaves is a leak. */
static bool accounts(const Plan *plan, const Outcome *outcome, const Outcome *usual) {
  bool keeps = plan->kind == FAIL_MUNMAP; /* what cannot be unmapped stays mapped */
  if (outcome->mapped <= usual->mapped || keeps) return true;
  printf("FAILED %s: %ld bytes are mapped at the end, without failures %ld\n", describe(plan),
         outcome->mapped, usual->mapped);
  return false;
}

static long more(long a, long b) { return a > b ? a : b; }

/* What runs without failures come to at most: how fast workers are decides how much a queue needs.
 * False if one fails. */
static bool findUsual(const Scene *scene, Outcome *outcome, Outcome *usual) {
  *usual = (Outcome){.mapped = 0};
  for (int i = 0; i < 3; i++) {
    if (!runApart(&(Plan){.scene = scene}, outcome)) return false;
    for (int kind = 0; kind < FAIL_KINDS; kind++)
      usual->calls[kind] = more(usual->calls[kind], outcome->calls[kind]);
    usual->mapped = more(usual->mapped, outcome->mapped);
  }
  return true;
}

static int walkKind(const Scene *scene, FailKind kind, Outcome *outcome, const Outcome *usual) {
  const char *given = getenv("OPENREG_WALK_SAMPLE");
  long step = given && atol(given) > 1 ? atol(given) : 1, runs = 0, calls = usual->calls[kind];
  int failed = 0;
  Plan plan = {scene, kind, 1 + ((scene - scenes) * 7 + kind * 3) % step, false};
  for (; failed < MOST_FAILED && plan.at <= calls; plan.at += step)
    for (int on = 0; on < 2; on++, runs++) {
      plan.on = on;
      failed += !runApart(&plan, outcome) || !accounts(&plan, outcome, usual);
    }
  if (runs) printf("%-16s %-8s %4ld calls, %4ld runs\n", scene->name, kindNames[kind], calls, runs);
  return failed;
}

/* -1: every kind. */
static int walkScene(const Scene *scene, int only, Outcome *outcome) {
  Outcome usual;
  if (!findUsual(scene, outcome, &usual)) return 1;
  int failed = 0;
  for (int kind = 0; kind < FAIL_KINDS; kind++)
    if ((only < 0 || only == kind) && scene->spares != kind)
      failed += walkKind(scene, (FailKind)kind, outcome, &usual);
  return failed;
}

static const Scene *findScene(const char *name) {
  for (int i = 0; i < SCENES; i++)
    if (!strcmp(scenes[i].name, name)) return &scenes[i];
  fprintf(stderr, "there is no scene '%s'\n", name);
  exit(2);
}

static FailKind findKind(const char *name) {
  for (int kind = 0; kind < FAIL_KINDS; kind++)
    if (!strcmp(kindNames[kind], name)) return (FailKind)kind;
  fprintf(stderr, "there is no kind '%s'\n", name);
  exit(2);
}

int main(int argc, char **argv) {
  Outcome *outcome =
      mmap(NULL, sizeof *outcome, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const Scene *only = argc > 1 ? findScene(argv[1]) : NULL;
  int kind = argc > 2 ? (int)findKind(argv[2]) : -1, failed = 0;
  setenv("OPENREG_DEVICE_COUNT", "2", 1);
  setenv("OPENREG_DEVICE_MEMORY", "64M", 1);
  if (argc > 4) {
    run(&(Plan){only, (FailKind)kind, atol(argv[3]), !strcmp(argv[4], "on")}, outcome);
    printf("%ld calls, %ld bytes mapped at the end\n", outcome->calls[kind], outcome->mapped);
    return 0;
  }
  for (int i = 0; i < SCENES; i++)
    if (!only || only == &scenes[i]) failed += walkScene(&scenes[i], kind, outcome);
  if (failed) printf("%d runs failed\n", failed);
  return failed != 0;
}
