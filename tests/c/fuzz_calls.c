/*
 * The threads that make random calls, what they share, and the accounts at the end: see fuzz.h.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"
#include "fuzz.h"
#include "soak.h"

Fuzz fuzz;

static _Thread_local uint64_t random_state;
static _Thread_local uint64_t latest[TYPES]; /* handles that this thread used last */

uint64_t draw(void) {
  uint64_t z = random_state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

/* ---- what a call may return ---- */

orError_t judge(orError_t error, const char *call) {
  switch (error) {
    case orErrorNoDevice:
    case orErrorAlreadyInitialized:
    case orErrorForked:
    case orErrorPluginLoad:
    case orErrorPluginSymbol:
    case orErrorPluginVersion:
    case orErrorSystem:
      STRESS_FAIL("%s: %s: %s", call, orGetErrorName(error), orGetLastErrorMessage());
    default:
      break;
  }
  if (error && error != orErrorNotReady && !*orGetLastErrorMessage())
    STRESS_FAIL("%s: %s without a message", call, orGetErrorName(error));
  atomic_fetch_add_explicit(&soak->outcomes[error], 1, memory_order_relaxed);
  return error;
}

/* ---- the lock of the block hooks ---- */

static pthread_mutex_t big;
static _Thread_local int big_depth, hook_depth;

static void lockBig(void) {
  pthread_mutex_lock(&big);
  big_depth++;
}

static void unlockBig(void) {
  big_depth--;
  pthread_mutex_unlock(&big);
}

static void *enterBlocked(void) {
  int depth = big_depth;
  hook_depth++;
  while (big_depth) unlockBig();
  return (void *)(intptr_t)depth;
}

static void leaveBlocked(void *token) {
  if (--hook_depth < 0) STRESS_FAIL("a block hook was left that was not entered");
  while (big_depth < (int)(intptr_t)token) lockBig();
}

void touchBig(void) {
  lockBig();
  unlockBig();
}

/* ---- objects ---- */

Object *anyObject(Type type) { return &fuzz.object[type][below(OBJECTS)]; }

static bool move(Object *o, int from, int to) {
  return atomic_compare_exchange_strong(&o->pins, &from, to);
}

Object *freePlace(Type type) {
  Object *o = anyObject(type);
  return move(o, FREE, BUSY) ? o : NULL;
}

void fillPlace(Object *o, uint64_t handle, void *data, size_t size) {
  o->data = data;
  o->size = size;
  atomic_store(&o->taken, 0);
  atomic_store(&o->handle, handle);
  atomic_store(&o->pins, 0);
}

void leavePlace(Object *o) {
  atomic_store(&o->handle, 0);
  atomic_store(&o->pins, FREE);
}

Object *pin(Type type) {
  Object *o = anyObject(type);
  int pins = atomic_load(&o->pins);
  while (pins >= 0)
    if (atomic_compare_exchange_weak(&o->pins, &pins, pins + 1)) return o;
  return NULL;
}

void unpin(Object *o) {
  if (o) atomic_fetch_sub(&o->pins, 1);
}

Object *takeAway(Type type) {
  Object *o = anyObject(type);
  return move(o, 0, BUSY) ? o : NULL;
}

uint64_t loose(Type type) {
  uint64_t handle = oneIn(16) ? latest[type] : atomic_load(&anyObject(type)->handle);
  if (handle) latest[type] = handle;
  return oneIn(64) ? draw() : handle;
}

uint64_t guess(Type type) {
  uint64_t handle = loose(type);
  if (oneIn(4)) handle += (uint64_t)below(3) << 30;
  if (oneIn(4)) handle += below(3);
  return oneIn(8) ? handle ^ UINT64_C(1) << below(64) : handle;
}

int anyDevice(void) { return oneIn(40) ? (int)below(80) - 8 : (int)below(DEVICE_COUNT); }

int nextIndex(_Atomic int *count) {
  int index = atomic_fetch_add(count, 1);
  return index < MOST ? index : -1;
}

/* ---- the threads ---- */

static const struct {
  void (*call)(void);
  uint32_t weight;
} calls[] = {
#define FUZZ_ROW(name, weight) {name, weight},
    FUZZ_CALLS(FUZZ_ROW)};
enum { CALL_KINDS = sizeof calls / sizeof *calls };

static void callSomething(void) {
  uint32_t total = 0, at;
  for (int i = 0; i < CALL_KINDS; i++) total += calls[i].weight;
  at = below(total);
  int kind = 0;
  while (at >= calls[kind].weight) at -= calls[kind++].weight;
  bool locks = oneIn(2);
  if (locks) lockBig();
  calls[kind].call();
  if (locks) unlockBig();
}

static void startThread(int number) {
  random_state = program.seed * 1000003 + (uint64_t)number;
  draw();
}

static void *runCaller(void *context) {
  int number = (int)(intptr_t)context;
  startThread(number);
  if (orSetDevice((int)below(DEVICE_COUNT))) STRESS_FAIL("%s", orGetLastErrorMessage());
  for (int i = 0; i < 12; i++) {
    makeStream();
    makeEvent();
  }
  for (int i = 0; i < CALLS; i++) callSomething();
  if (big_depth || hook_depth)
    STRESS_FAIL("the block hooks were left %d times too few", hook_depth);
  atomic_fetch_sub(&fuzz.callers_left, 1);
  return NULL;
}

static void openSomeGate(_Atomic uint64_t *gate) {
  orEvent_t event = atomic_exchange(gate, 0);
  if (!event) return;
  if (oneIn(20)) {
    setCause();
    CALL(orEventSignal(event, orErrorLaunchFailure));
  } else if (oneIn(2)) {
    CALL(orEventSignal(event, orSuccess));
  }
  ASSERT_OK(orEventDestroy(event));
}

static void noteSignal(int number) {
  (void)number;
  atomic_fetch_add(&soak->signals, 1);
}

/* This thread never blocks, so what waits for a gate goes on. */
static void *keepGates(void *unused) {
  startThread(CALLERS);
  while (atomic_load(&fuzz.callers_left)) {
    for (int i = 0; i < OPEN_GATES; i++)
      if (oneIn(2)) openSomeGate(&fuzz.gate[i]);
    if (!fuzz.ends_inside && oneIn(4)) pthread_kill(fuzz.caller[below(CALLERS)], SIGUSR1);
    usleep(50);
  }
  for (int i = 0; i < OPEN_GATES; i++) openSomeGate(&fuzz.gate[i]);
  return unused;
}

/* ---- before and after ---- */

static void noteCache(const orCacheRecord *r) {
  atomic_fetch_add(&fuzz.cache_count[r->action], 1);
  atomic_fetch_add(&fuzz.cache_bytes[r->action], (int64_t)r->bytes);
}

static void keepMemory(void) {
  for (int i = 0; i <= DEVICE_COUNT; i++) {
    void *p = NULL;
    if (i < DEVICE_COUNT) ASSERT_OK(orSetDevice(i));
    ASSERT_OK(i < DEVICE_COUNT ? orMalloc(&p, KEPT_BYTES) : orMallocHost(&p, KEPT_BYTES));
    fillPlace(&fuzz.kept[i], 0, p, KEPT_BYTES);
  }
}

static void begin(void) {
  memset(&fuzz, 0, sizeof fuzz);
  for (int t = 0; t < TYPES; t++)
    for (int i = 0; i < OBJECTS; i++) atomic_store(&fuzz.object[t][i].pins, FREE);
  atomic_store(&fuzz.callers_left, CALLERS);
  ASSERT_OK(orSetCacheHook(noteCache));
  keepMemory();
  startThread(CALLERS + 3);
  if (oneIn(3)) CALL(orScheduleSwitch((orSchedulePolicy)(1 + below(3)), below(100)));
}

static void toolsOff(void) {
  orTrace t = {.size = sizeof t};
  for (int device = 0; device < DEVICE_COUNT; device++) {
    for (int kind = 0; orFaultName(kind); kind++) orFaultRemove((orFaultKind)kind, device);
    ASSERT_OK(orCacheSetFraction(device, 1));
  }
  if (!orTraceStop(&t)) orTraceFree(&t);
  ASSERT_OK(orCacheSetOptions(&(orCacheOptions){.size = sizeof(orCacheOptions)}));
  ASSERT_OK(orScheduleRecord(0));
  ASSERT_OK(orScheduleSwitch(orScheduleFair, 0));
  orCachePoison(0);
  if (__atomic_load_n(orSanitizerActive(), __ATOMIC_RELAXED)) ASSERT_OK(orSanitizerDisable());
  CALL(orSanitizerClearReports());
  orSanitizerInitcheck(0);
  orSanitizerPossible(1);
}

static void endCaptures(void) {
  for (int i = 0; i < OBJECTS; i++) {
    orStream_t stream = fuzz.object[STREAM][i].handle;
    orGraph_t graph = 0;
    if (stream && !orStreamEndCapture(stream, &graph)) ASSERT_OK(orGraphDestroy(graph));
  }
}

static void calm(int device) {
  ASSERT_OK(orSetDevice(device));
  for (orError_t error; (error = CALL(orDeviceSynchronize()));) {
    if (error == orErrorDeviceLost)
      ASSERT_OK(orDeviceReset());
    else if (error != orErrorLaunchFailure)
      STRESS_FAIL("device %d at the end: %s", device, orGetLastErrorMessage());
  }
}

static void endAll(Type type, void (*end)(void)) {
  for (int i = 0; i < OBJECTS; i++)
    while (fuzz.object[type][i].pins != FREE) end();
}

static void freeKept(void) {
  for (int i = 0; i <= DEVICE_COUNT; i++)
    ASSERT_OK(i < DEVICE_COUNT ? orFree(fuzz.kept[i].data) : orFreeHost(fuzz.kept[i].data));
}

static void *endProgram(void *unused) {
  startThread(CALLERS + 1);
  toolsOff();
  endCaptures();
  endAll(GRAPH, endGraph);
  for (int d = 0; d < DEVICE_COUNT; d++) calm(d);
  endAll(DEVICE_MEMORY, freeDeviceMemory);
  endAll(PINNED_MEMORY, freePinned);
  endAll(REGISTERED, freeRegistered);
  endAll(CACHED, freeCached);
  endAll(POOL, releasePool);
  endAll(STREAM, endStream);
  endAll(PLAIN_STREAM, endStream);
  endAll(EVENT, endEvent);
  endAll(PLAIN_EVENT, endEvent);
  freeKept();
  for (int d = 0; d < DEVICE_COUNT; d++) calm(d);
  ASSERT_OK(orScheduleSet(orScheduleFair, 0)); /* waits until nothing is queued */
  for (int d = 0; d < DEVICE_COUNT; d++) ASSERT_OK(orCacheEmpty(d));
  return unused;
}

/* ---- accounts ---- */

static int least(int a, int b) { return a < b ? a : b; }

static bool argumentsAreSettled(bool fail) {
  for (int i = 0; i < least(fuzz.argument_count, MOST); i++) {
    const Account *a = &fuzz.arguments[i];
    int most = a->captured ? 1 + fuzz.launches : 1;
    if (a->dropped == a->queued && a->ran <= (a->queued ? most : 0)) continue;
    if (fail)
      STRESS_FAIL(
          "arguments %d were queued %d times, their kernel has run %d times, they were dropped %d "
          "times",
          i, a->queued, a->ran, a->dropped);
    return false;
  }
  return true;
}

static bool causesAreSettled(bool fail) {
  for (int i = 0; i < least(fuzz.cause_count, MOST); i++) {
    const Account *a = &fuzz.causes[i];
    if (a->dropped + a->ran == 1) continue;
    if (fail)
      STRESS_FAIL("cause %d was dropped %d times and handed out %d times", i, a->dropped, a->ran);
    return false;
  }
  return true;
}

static bool objectsAreSettled(bool fail) {
  for (int i = 0; i < least(fuzz.object_count, MOST); i++) {
    const Account *a = &fuzz.objects[i];
    if (a->dropped == a->queued) continue;
    if (fail)
      STRESS_FAIL("a graph's object %d was given %d times and destroyed %d times", i, a->queued,
                  a->dropped);
    return false;
  }
  return true;
}

static bool cacheIsSettled(bool fail) {
  static const orCacheAction pairs[][2] = {{orCacheActionAlloc, orCacheActionFreeRequested},
                                           {orCacheActionAlloc, orCacheActionFreeCompleted},
                                           {orCacheActionSegmentAlloc, orCacheActionSegmentFree}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
    orCacheAction a = pairs[i][0], b = pairs[i][1];
    if (fuzz.cache_count[a] == fuzz.cache_count[b] && fuzz.cache_bytes[a] == fuzz.cache_bytes[b])
      continue;
    if (fail)
      STRESS_FAIL("the cache told of %" PRId64 " actions %d with %" PRId64 " bytes, and of %" PRId64
                  " actions %d with %" PRId64,
                  fuzz.cache_count[a], a, fuzz.cache_bytes[a], fuzz.cache_count[b], b,
                  fuzz.cache_bytes[b]);
    return false;
  }
  return true;
}

/* A function of the second world runs once unless a reset or a lost device drops it. */
static void checkFunctions(void) {
  bool none_is_dropped = !fuzz.resets && !fuzz.losses;
  for (int i = 0; i < least(fuzz.function_count, MOST); i++) {
    const Account *a = &fuzz.functions[i];
    int most = a->queued * (a->captured ? 1 + fuzz.launches : 1);
    int fewest = a->captured || !none_is_dropped ? 0 : a->queued;
    if (a->ran < fewest || a->ran > most)
      STRESS_FAIL("host function %d was queued %d times and has run %d times", i, a->queued,
                  a->ran);
  }
}

static bool isSettled(bool fail) {
  return argumentsAreSettled(fail) && causesAreSettled(fail) && objectsAreSettled(fail) &&
         cacheIsSettled(fail);
}

/* A lane may drop its last arguments after the wait for them has ended. */
static void settle(void) {
  for (int i = 0; i < 2000 && !isSettled(false); i++) {
    for (int d = 0; d < DEVICE_COUNT; d++) ASSERT_OK(orCacheEmpty(d));
    sleepMs(5);
  }
  isSettled(true);
  checkFunctions();
  if (fuzz.bad_bytes) STRESS_FAIL("%d bytes of arguments are not what was queued", fuzz.bad_bytes);
  ASSERT_OK(orSetCacheHook(NULL));
}

static pthread_t startIt(void *(*body)(void *), void *context) {
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, body, context), 0);
  return thread;
}

/* ---- an exit in the midst ---- */

enum { LAST_BYTES = 100000, LAST_BYTE = 0x5a };

static bool isWritten(void) {
  for (int i = 0; i < LAST_BYTES; i++)
    if (fuzz.last[i] != LAST_BYTE) return false;
  return true;
}

/* Registered before the first use of the library, so it runs after the library's own handler:
 * queued work is done or the wait returns an error, and memory can be freed. */
static void atExit(void) {
  if (!fuzz.ends_inside) return;
  orError_t error = orStreamSynchronize(fuzz.last_stream);
  bool certain = !error && !fuzz.resets && !fuzz.losses && !fuzz.faults;
  if (certain && !isWritten()) {
    fprintf(stderr, "orStreamSynchronize succeeded at exit, and its work is not done\n");
    _exit(1);
  }
  orFreeHost(fuzz.last);
  orDeviceSynchronize();
}

_Noreturn static void exitInside(pthread_t keeper) {
  void *p = NULL;
  for (int i = 0; i < CALLERS; i++) pthread_detach(fuzz.caller[i]);
  pthread_detach(keeper);
  startThread(CALLERS + 2);
  sleepMs((int)below(5));
  ASSERT_OK(orMallocHost(&p, LAST_BYTES));
  fuzz.last = p;
  CALL(orStreamCreate(&fuzz.last_stream));
  CALL(orLaunchSleep(fuzz.last_stream, below(3000000)));
  if (CALL(orMemsetAsync(p, LAST_BYTE, LAST_BYTES, fuzz.last_stream))) fuzz.faults++;
  forbidForks();
  exit(EXIT_STATUS);
}

/* ---- the whole ---- */

void runCalls(bool ends_inside) {
  begin();
  fuzz.ends_inside = ends_inside;
  for (int i = 0; i < CALLERS; i++) fuzz.caller[i] = startIt(runCaller, (void *)(intptr_t)i);
  pthread_t keeper = startIt(keepGates, NULL);
  if (ends_inside) exitInside(keeper);
  pthread_join(keeper, NULL); /* which sends signals to callers: none may be joined before */
  for (int i = 0; i < CALLERS; i++) pthread_join(fuzz.caller[i], NULL);
  pthread_join(startIt(endProgram, NULL), NULL);
  settle();
  soak->calls += CALLERS * CALLS;
}

void startCalls(void) {
  atexit(atExit);
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&big, &recursive);
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){enterBlocked, leaveBlocked}));
  struct sigaction action = {.sa_handler = noteSignal};
  sigaction(SIGUSR1, &action, NULL);
}
