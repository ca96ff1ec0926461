/*
 * One random program of stress.h, or random calls of fuzz.h, and what goes wrong meanwhile:
 * faults, lost devices, resets and forks in their midst, schedules, the sanitizer and tracing
 * switched on and off.
 *
 * A seed makes the program and decides what is switched on, and after which of its steps what
 * happens. Whatever that is, nothing may be lost or left behind: stress.c checks that work is done
 * once or dropped, that arguments are let go of once, and that contents are right where nothing
 * has failed; here, that no work, memory or handle is left. soak_rounds.c runs many.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"
#include "soak.h"

enum {
  DEVICES = 2,
  ACTS = 12,
  PROGRAM_LIMIT_S = 60, /* a hang names its seed before the test's limit */
  CHILD_LIMIT_MS = 30000,
  WARM_UP = 500, /* programs */
  GROWTH_LIMIT = 8 << 20,
  TRACE_ROOM = 4096,
  HANDLES = 64, /* more than a program has at once */
  MOST_SLOTS = 2048
};

/* X(name, percent of the programs that have it) */
/* clang-format off */
#define SWITCHES(X) \
  X(KERNEL_ERROR, 10) X(COPY_ERROR, 10) X(SLOW_STREAM, 8) X(OUT_OF_MEMORY, 15) \
  X(DEVICE_LOST, 10) X(RESET, 15) X(SCHEDULE, 30) X(SWITCH_SCHEDULE, 8) X(SANITIZER, 20) \
  X(SWITCH_SANITIZER, 5) X(TRACE, 20) X(SWITCH_TRACE, 5) X(FORK, 6) X(GRAPHS, 20)
/* clang-format on */

typedef enum Switch {
#define X_ENUM(name, percent) name,
  SWITCHES(X_ENUM)
#undef X_ENUM
      SWITCH_COUNT
} Switch;

/* What happens after a step, by the thread that has taken it. */
typedef struct Act {
  int step;
  Switch what;
  uint64_t random;
} Act;

static struct {
  uint64_t random;
  unsigned on; /* bit i: Switch i */
  Act act[ACTS];
  int acts;
  _Atomic bool tracing;
  char text[256];
} now;

static struct {
  uint64_t programs;
  size_t free_bytes[DEVICES];
  size_t heap, rss; /* after the warm-up */
} start;

static bool isOn(Switch what) { return now.on >> what & 1; }

static uint64_t draw(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
  return z ^ z >> 31;
}

static uint64_t below(uint64_t n) { return draw(&now.random) % n; }

/* ---- what happens in the midst of a program ---- */

static void resetDevice(int device) {
  int before;
  ASSERT_OK(orGetDevice(&before));
  ASSERT_OK(orSetDevice(device));
  ASSERT_OK(orDeviceReset());
  ASSERT_OK(orSetDevice(before));
  atomic_fetch_add(&trouble.resets, 1);
}

static void toggleTrace(void) {
  orTrace trace = {.size = sizeof trace};
  if (!atomic_exchange(&now.tracing, false)) {
    if (!orTraceStart(TRACE_ROOM)) atomic_store(&now.tracing, true);
  } else if (!orTraceStop(&trace)) {
    orTraceFree(&trace);
  }
}

static void toggleSanitizer(void) {
  if (__atomic_load_n(orSanitizerActive(), __ATOMIC_RELAXED)) {
    ASSERT_OK(orSanitizerDisable());
    return;
  }
  orError_t error = orSanitizerEnable(&(orSanitizerOptions){.size = sizeof(orSanitizerOptions)});
  if (error != orErrorAlreadyExists) ASSERT_OK(error); /* another thread has been faster */
}

#define REFUSED(call) \
  if ((call) != orErrorForked) return __LINE__

/* In a child, whose parent's other threads may have held any lock. 0, or the line of what was not
 * refused. */
static int callsInChild(void) {
  void *p;
  int count = 0;
  char byte = 0;
  orTrace trace = {.size = sizeof trace};
  if (!orInForkedChild() || orGetDeviceCount(&count) || count != DEVICES) return __LINE__;
  REFUSED(orSetDevice(0));
  REFUSED(orMalloc(&p, 1));
  REFUSED(orCacheMalloc(&p, 1, 0));
  REFUSED(orMemcpy(program.buffer[0].real, &byte, 1, orMemcpyDefault));
  REFUSED(orLaunchSleep(program.stream[HOSTS], 1));
  REFUSED(orStreamSynchronize(program.stream[HOSTS]));
  REFUSED(orStreamDestroy(program.stream[HOSTS]));
  REFUSED(orEventRecord(program.event[0].handle, program.stream[HOSTS]));
  REFUSED(orEventSynchronize(program.event[0].handle));
  REFUSED(orDeviceSynchronize());
  REFUSED(orDeviceReset());
  REFUSED(orScheduleSet(orScheduleFair, 0));
  REFUSED(orTraceStop(&trace));
  REFUSED(orSanitizerDisable());
  REFUSED(orFaultRemove(orFaultDeviceLost, 0));
  if (orSanitizerRefuse(0) || orSanitizerFound(NULL, NULL)) return __LINE__;
  return 0;
}

static void awaitChild(pid_t child) {
  int status;
  for (int ms = 0; waitpid(child, &status, WNOHANG) != child; ms++) {
    if (ms > CHILD_LIMIT_MS) {
      kill(child, SIGKILL);
      STRESS_FAIL("a forked child still runs after %d ms", CHILD_LIMIT_MS);
    }
    sleepMs(1);
  }
  if (WIFSIGNALED(status)) STRESS_FAIL("a forked child was ended by signal %d", WTERMSIG(status));
  if (WEXITSTATUS(status))
    STRESS_FAIL("a forked child was not refused in soak.c, line %d (mod 256)", WEXITSTATUS(status));
}

static void forkHere(bool calls) {
  pid_t child = fork();
  if (child < 0) STRESS_FAIL("fork failed");
  if (!child) _exit(calls ? callsInChild() & 0xff : 0);
  awaitChild(child);
  atomic_fetch_add(&soak->forks, 1);
}

static void switchSchedule(uint64_t random) {
  ASSERT_OK(orScheduleSwitch((orSchedulePolicy)(random % 4), random >> 32));
  atomic_fetch_add(&soak->schedules, 1);
}

static void act(const Act *a) {
  switch (a->what) {
    case RESET:
      resetDevice((int)(a->random % DEVICES));
      break;
    case FORK:
      forkHere(a->random % 4);
      break;
    case SWITCH_SCHEDULE:
      switchSchedule(a->random);
      break;
    case SWITCH_SANITIZER:
      toggleSanitizer();
      break;
    default:
      toggleTrace();
  }
}

static void afterStep(int step) {
  for (int i = 0; i < now.acts; i++)
    if (now.act[i].step == step) act(&now.act[i]);
}

/* ---- before a program and after it ---- */

static const unsigned char percent[] = {
#define X_PERCENT(name, percent) percent,
    SWITCHES(X_PERCENT)
#undef X_PERCENT
};

static void chooseSwitches(uint64_t seed) {
  static const char *const names[] = {
#define X_NAME(name, percent) " " #name,
      SWITCHES(X_NAME)
#undef X_NAME
  };
  now.random = seed;
  now.on = 0;
  now.text[0] = 0;
  bool calm = below(4) == 0;
  for (int i = 0; i < SWITCH_COUNT; i++) {
    if (below(100) >= percent[i] || calm) continue;
    now.on |= 1u << i;
    strcat(now.text, names[i]);
  }
}

static void chooseActs(void) {
  static const Switch kinds[] = {RESET, FORK, SWITCH_SCHEDULE, SWITCH_SANITIZER, SWITCH_TRACE};
  now.acts = 0;
  if (isOn(GRAPHS)) now.on &= ~(1u << RESET); /* it would end a capture */
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    for (uint64_t n = isOn(kinds[i]) ? 1 + below(2) : 0; n; n--)
      now.act[now.acts++] = (Act){(int)below((uint64_t)program.steps), kinds[i], draw(&now.random)};
}

static void armFaults(void) {
  static const struct {
    Switch on;
    orFaultKind kind;
  } faults[] = {{KERNEL_ERROR, orFaultKernelError},
                {COPY_ERROR, orFaultCopyError},
                {SLOW_STREAM, orFaultSlowStream},
                {OUT_OF_MEMORY, orFaultOutOfMemory},
                {DEVICE_LOST, orFaultDeviceLost}};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    for (int device = 0; device < DEVICES; device++) {
      uint64_t after = below(faults[i].kind == orFaultOutOfMemory ? 8 : 60), delay = below(100000);
      if (!isOn(faults[i].on) || below(3) == 0) continue;
      ASSERT_OK(
          orFaultInject(&(orFault){.size = sizeof(orFault),
                                   .kind = faults[i].kind,
                                   .device = device,
                                   .after = after,
                                   .delay_ns = faults[i].kind == orFaultSlowStream ? delay : 0}));
    }
}

/* What has been struck of work that then fails. */
static uint64_t disarmFaults(void) {
  uint64_t failed = 0;
  for (int device = 0; device < DEVICES; device++)
    for (int kind = 0; orFaultName(kind); kind++) {
      orFaultOutcome outcome = {.size = sizeof outcome};
      if (orFaultGetOutcome(&outcome, (orFaultKind)kind, device)) continue;
      ASSERT_OK(orFaultRemove((orFaultKind)kind, device));
      soak->struck[kind] += outcome.fired;
      if (kind != orFaultSlowStream && kind != orFaultOutOfMemory) failed += outcome.fired;
    }
  return failed;
}

/* What is queued and still going to fail does so here. */
static void calmDown(int device) {
  ASSERT_OK(orSetDevice(device));
  for (orError_t error; (error = orDeviceSynchronize());)
    if (error == orErrorDeviceLost && trouble.drops)
      resetDevice(device);
    else if (error != orErrorLaunchFailure || !trouble.fails)
      STRESS_FAIL("device %d at the end: %s", device, orGetLastErrorMessage());
}

static void afterSteps(void) {
  uint64_t failed = disarmFaults();
  for (int device = 0; device < DEVICES; device++) calmDown(device);
  trouble.harmless = !failed && !trouble.resets;
}

static void setTape(void) {
  char text[200];
  size_t length = 0;
  for (uint64_t n = 1 + below(20); n; n--)
    length += (size_t)snprintf(text + length, sizeof text - length, "%s%u:%u", length ? "," : "",
                               (unsigned)below(40), (unsigned)below(4));
  ASSERT_OK(orScheduleSetTape(text));
}

static void switchOn(void) {
  if (isOn(SCHEDULE)) {
    orSchedulePolicy policy = (orSchedulePolicy)(1 + below(4));
    if (policy == orScheduleTape)
      setTape();
    else
      ASSERT_OK(orScheduleSet(policy, below(UINT32_MAX)));
    soak->schedules++;
  }
  if (isOn(SANITIZER)) toggleSanitizer();
  if (isOn(TRACE)) toggleTrace();
  armFaults();
  trouble = (Trouble){.text = now.on ? now.text : " nothing",
                      .drops = isOn(DEVICE_LOST) || isOn(RESET),
                      .short_of_memory = isOn(OUT_OF_MEMORY),
                      .blocks = soak->launch_blocking,
                      .graphs = isOn(GRAPHS),
                      .after = afterStep,
                      .over = afterSteps};
  trouble.fails = trouble.drops || isOn(KERNEL_ERROR) || isOn(COPY_ERROR);
}

/* One record for each kernel, where all of it was traced. */
static void checkTrace(const orTrace *trace, uint64_t kernels) {
  uint64_t seen = 0;
  soak->traced += trace->count;
  for (size_t i = 0; i < trace->count; i++)
    seen += trace->records[i].kind == orTraceKernel && !strcmp(trace->records[i].name, "mix");
  if (trouble.harmless && !isOn(SWITCH_TRACE) && !trace->dropped && seen != kernels)
    STRESS_FAIL("%" PRIu64 " kernels ran, %" PRIu64 " were traced", kernels, seen);
}

/* What a program orders is not reported, nor is what it has ordered with work that failed. */
static void checkRaces(void) {
  orRaceReport report;
  size_t count = 0;
  uint64_t reports = 0;
  ASSERT_OK(orSanitizerReports(1, &report, sizeof(orRaceReport), 1, &count, &reports));
  if (count && !trouble.drops && !isOn(SWITCH_SANITIZER))
    STRESS_FAIL("the sanitizer has %" PRIu64 " reports; %s on %s and %s on %s: %s", reports,
                report.earlier.operation, report.earlier.where, report.later.operation,
                report.later.where, report.advice);
  ASSERT_OK(orSanitizerClearReports());
}

static void switchOff(uint64_t kernels) {
  orTrace trace = {.size = sizeof trace};
  ASSERT_OK(orScheduleSet(orScheduleFair, 0));
  if (atomic_exchange(&now.tracing, false)) {
    ASSERT_OK(orTraceStop(&trace));
    checkTrace(&trace, kernels);
    orTraceFree(&trace);
  }
  if (__atomic_load_n(orSanitizerActive(), __ATOMIC_RELAXED)) {
    checkRaces();
    ASSERT_OK(orSanitizerDisable());
  }
}

/* ---- nothing is left ---- */

static unsigned slotOf(uint64_t handle) { return handle >> 30 & 0xffffff; }

static int higherSlotFirst(const void *a, const void *b) {
  unsigned x = slotOf(*(const uint64_t *)a), y = slotOf(*(const uint64_t *)b);
  return (x < y) - (x > y);
}

/* A handle has the number of its slot, and free slots are used first: if `live` of the first
 * `*slots` are in use, as many handles as are left of them can be had without a new slot. One that
 * is new raises `*slots`. */
static bool fillsSlots(unsigned *slots, unsigned live, orError_t (*make)(uint64_t *),
                       orError_t (*end)(uint64_t)) {
  uint64_t handle[MOST_SLOTS];
  unsigned before = *slots, count = before - live;
  ASSERT_LE(before, MOST_SLOTS);
  for (unsigned i = 0; i < count; i++) {
    ASSERT_OK(make(&handle[i]));
    if (slotOf(handle[i]) >= *slots) *slots = slotOf(handle[i]) + 1;
  }
  /* The latest free slot is used first: low ones, as a slot keeps the memory of its queue. */
  qsort(handle, count, sizeof *handle, higherSlotFirst);
  for (unsigned i = 0; i < count; i++) ASSERT_OK(end(handle[i]));
  return *slots == before;
}

/* A destroyed stream's slot is free when its lane has let go of it. */
static void checkHandles(void) {
  static unsigned streams = HANDLES, events = HANDLES;
  if (streams < DEVICES + sharedStreams() + HANDLES) streams = DEVICES + sharedStreams() + HANDLES;
  for (int i = 0; !fillsSlots(&streams, DEVICES + sharedStreams(), orStreamCreate, orStreamDestroy);
       i++) {
    if (i == 500) STRESS_FAIL("streams are left");
    sleepMs(20);
  }
  if (!fillsSlots(&events, 0, orEventCreate, orEventDestroy)) STRESS_FAIL("events are left");
}

static size_t freeBytes(int device) {
  size_t free_bytes, all;
  ASSERT_OK(orSetDevice(device));
  ASSERT_OK(orMemGetInfo(&free_bytes, &all));
  return free_bytes;
}

static size_t residentBytes(void) {
  unsigned long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%*u %lu", &pages) != 1) FAIL("/proc/self/statm cannot be read");
  fclose(file);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void checkGrowth(void) {
  if (start.programs == WARM_UP) {
    start.heap = heapInUse();
    start.rss = residentBytes();
  }
  if (start.programs <= WARM_UP || start.programs % 64 || SLOW_BUILD) return;
  if (heapInUse() > start.heap + GROWTH_LIMIT)
    STRESS_FAIL("the heap has grown from %zu to %zu bytes", start.heap, heapInUse());
  if (residentBytes() > start.rss + 2 * GROWTH_LIMIT)
    STRESS_FAIL("the process has grown from %zu to %zu bytes", start.rss, residentBytes());
}

void measureSoak(void) {
  double heap = (double)heapInUse() / 0x1p20, resident = (double)residentBytes() / 0x1p20;
  soak->heap = heap;
  soak->resident = resident;
  soak->heap_grown = start.heap ? heap - (double)start.heap / 0x1p20 : 0;
  soak->resident_grown = start.rss ? resident - (double)start.rss / 0x1p20 : 0;
}

static void checkNothingIsLeft(void) {
  orWorkerInfo lanes = {.size = sizeof lanes};
  ASSERT_OK(orGetWorkerInfo(&lanes));
  if (lanes.queued) STRESS_FAIL("%zu tasks are left", lanes.queued);
  for (int device = 0; device < DEVICES; device++)
    if (freeBytes(device) != start.free_bytes[device])
      STRESS_FAIL("device %d has %zu bytes free, not %zu", device, freeBytes(device),
                  start.free_bytes[device]);
  checkHandles();
  checkGrowth();
}

/* ---- one program ---- */

void soakProgram(uint64_t seed) {
  uint64_t blocks = stressBlocks();
  chooseSwitches(seed);
  memcpy(soak->text, now.text, sizeof now.text);
  trouble.text = now.on ? now.text : " nothing";
  makeProgram(seed);
  chooseActs();
  switchOn();
  runProgram();
  switchOff(stressBlocks() - blocks);
  soak->clean += !now.on;
  soak->resets += (uint64_t)trouble.resets;
  soak->blocks += stressBlocks() - blocks;
}

void soakCalls(uint64_t seed, bool ends_inside) {
  memset(soak->text, 0, sizeof soak->text);
  trouble = (Trouble){.text = ends_inside ? " exit in its midst" : " random calls"};
  program.seed = seed;
  runCalls(ends_inside);
}

void checkSoak(void) {
  soak->programs++;
  start.programs++;
  checkNothingIsLeft();
}

void startSoak(void) {
  startStress();
  for (int device = 0; device < DEVICES; device++) {
    orStream_t stream;
    ASSERT_OK(orStreamGetDefault(&stream, device));
    start.free_bytes[device] = freeBytes(device);
  }
}
