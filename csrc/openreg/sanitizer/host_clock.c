/*
 * Clocks of host threads: what happens before each of them.
 *
 * At first the host is one: what a thread has waited for goes to `host`, the clock of all threads.
 * A thread has a clock of its own from orSanitizerThreadBegins to its end; so has the main thread
 * as soon as another one has. Such a thread uses `host` and its own clock, and what it waits for
 * goes to its own clock. Objects carry clocks from one thread to another.
 *
 * All other threads cannot be followed: C++ threads, threads older than the sanitizer, and threads
 * that run a task. They count as ordered with every thread: their clock is `seen`, the union of
 * all, and what they acquire goes to `host`. One of them may act for a thread that waits meanwhile
 * (orSanitizerOptions.thread), and has that thread's clock then.
 *
 * While a single thread has a clock, that is `host`: a program without threads keeps nothing here,
 * and pays a load for each call.
 *
 * All under orSanitizerMutex, but for the calling thread's identity, which is found before.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sanitizer/private.h"

enum { OR_OBJECTS = 1 << 16 };

#define NOBODY UINT64_MAX /* that runs a task */

typedef struct orHostThread {
  uint64_t serial;
  orClock clock;
} orHostThread;

typedef struct orObject {
  orTreeNode node; /* of its address; first, so that a node's address is its object's */
  orClock clock;
  bool starts; /* a thread, which has not begun */
} orObject;

static orClock host, seen;
static orHostThread *threads;
static uint32_t count, room;
static uint32_t starting; /* that will begin */
static uint64_t serials;
static orTree objects = OR_TREE_INITIALIZER;
static uint32_t object_count;
static _Atomic bool follows; /* some thread has a clock */
static uint64_t (*_Atomic ask)(void);

static _Thread_local uint64_t own, acting;
static _Thread_local bool inside; /* orSanitizerLock */

/* ---- who ---- */

static bool isMain(void) {
  static _Thread_local int main_thread; /* 0: not asked yet */
  if (!main_thread) main_thread = getpid() == gettid() ? 1 : 2;
  return main_thread == 1;
}

static bool isFollowing(void) { return atomic_load_explicit(&follows, memory_order_relaxed); }

void orThreadsIdentify(void) {
  if (OR_LIKELY(!isFollowing())) return;
  uint64_t (*other)(void) = atomic_load_explicit(&ask, memory_order_relaxed);
  acting = orProcessTask() != OR_TASK_NONE ? NOBODY : own ? own : other ? other() : 0;
}

void orSanitizerLock(void) {
  orThreadsIdentify();
  orMutexLock(&orSanitizerMutex);
  inside = true;
}

void orSanitizerUnlock(void) {
  inside = false;
  orMutexUnlock(&orSanitizerMutex);
}

bool orSanitizerIsInside(void) { return inside; }

static orHostThread *find(uint64_t serial) {
  for (uint32_t i = 0; i < count; i++)
    if (threads[i].serial == serial) return &threads[i];
  return NULL;
}

static orHostThread *add(const orClock *clock) {
  if (count == room) {
    room = room ? room * 2 : 8;
    threads = orSanitizerResize(threads, room * sizeof *threads);
  }
  orHostThread *t = &threads[count++];
  *t = (orHostThread){.serial = own = acting = ++serials};
  orClockJoin(&t->clock, clock);
  atomic_store_explicit(&follows, true, memory_order_relaxed);
  return t;
}

/* The calling thread's; null if it is not followed. */
static orHostThread *me(void) {
  orHostThread *t = find(acting);
  return t || !count || acting == NOBODY || !isMain() ? t : add(&seen);
}

static bool isAlone(void) { return count == 1 && !starting; }

static const orClock *myClock(void) {
  const orHostThread *t = me();
  return t ? &t->clock : &seen;
}

/* What the calling thread learns goes here. */
static orClock *mine(void) {
  orHostThread *t = me();
  return t && !isAlone() ? &t->clock : &host;
}

/* ---- what they know ---- */

void orHostAcquire(const orClock *clock) {
  orClockJoin(mine(), clock);
  if (count) orClockJoin(&seen, clock);
}

void orHostAcquireAll(const orClock *clock) {
  orClockJoin(&host, clock);
  if (count) orClockJoin(&seen, clock);
}

void orHostRelease(orClock *clock) {
  if (OR_UNLIKELY(count)) orClockJoin(clock, myClock());
}

void orHostReleaseAll(orClock *clock) {
  orClockJoin(clock, &host);
  orHostRelease(clock);
}

bool orHappensBeforeThread(uint32_t timeline, uint64_t counter) {
  if (orClockIncludes(&host, timeline, counter)) return true;
  return OR_UNLIKELY(count) && orClockIncludes(myClock(), timeline, counter);
}

bool orHappensBeforeAny(uint32_t timeline, uint64_t counter) {
  return orClockIncludes(&host, timeline, counter) || orClockIncludes(&seen, timeline, counter);
}

bool orHappensBeforeAll(uint32_t timeline, uint64_t counter) {
  if (orClockIncludes(&host, timeline, counter)) return true;
  uint32_t knowing = 0;
  while (knowing < count && orClockIncludes(&threads[knowing].clock, timeline, counter)) knowing++;
  return count && knowing == count && !starting;
}

uint64_t orHostThreadNumber(void) {
  const orHostThread *t = me();
  return t ? t->serial : 0;
}

static void settle(void) {
  if (!isAlone()) return;
  orClockJoin(&host, &threads[0].clock);
  orClockClear(&threads[0].clock);
}

/* ---- objects ---- */

static orObject *objectAt(const void *address) {
  return (orObject *)orTreeFind(&objects, (uintptr_t)address, (uintptr_t)address + 1);
}

static void forget(orObject *object) {
  starting -= object->starts;
  orTreeRemove(&objects, &object->node);
  orClockClear(&object->clock);
  free(object);
  object_count--;
}

static orObject *objectMade(const void *address) {
  orObject *object = objectAt(address);
  if (object) return object;
  object = orSanitizerAllocate(sizeof *object);
  *object = (orObject){.starts = false};
  orTreeInsert(&objects, &object->node, (uintptr_t)address, (uintptr_t)address + 1);
  object_count++;
  return object;
}

/* True with the lock held, if there is anything to follow. */
static bool enter(bool starts) {
  if (OR_LIKELY(!starts && !isFollowing())) return false;
  if (!orSanitizerIsOn() || OR_UNLIKELY(orInForkedChild())) return false;
  orThreadsIdentify();
  orMutexLock(&orSanitizerMutex);
  bool follow = orSanitizerIsOn() && (starts || count);
  if (!follow) orMutexUnlock(&orSanitizerMutex);
  return follow;
}

static void leave(void) { orMutexUnlock(&orSanitizerMutex); }

void orSanitizerRelease(const void *object) {
  if (!enter(false)) return;
  const orClock *clock = myClock();
  bool room_left = object_count < OR_OBJECTS || objectAt(object);
  if (clock->size) orClockJoin(room_left ? &objectMade(object)->clock : &host, clock);
  leave();
}

void orSanitizerAcquire(const void *object) {
  if (!enter(false)) return;
  orClock *to = mine();
  const orObject *known = object ? objectAt(object) : NULL;
  if (known) orClockJoin(to, &known->clock);
  if (!object && me()) orClockJoin(to, &seen); /* who is not followed knows that */
  leave();
}

void orSanitizerObjectGone(const void *object) {
  if (!enter(false)) return;
  orObject *known = objectAt(object);
  if (known) forget(known);
  settle();
  leave();
}

/* ---- begin and end ---- */

void orSanitizerThreadStarts(const void *object) {
  if (!enter(true)) return;
  if (!count && acting != NOBODY && isMain()) add(&seen);
  orObject *begin = objectMade(object);
  orClockJoin(&begin->clock, myClock());
  begin->starts = true;
  starting++;
  atomic_store_explicit(&follows, true, memory_order_relaxed);
  leave();
}

void orSanitizerThreadBegins(const void *object) {
  if (!enter(true)) return;
  orObject *begin = objectAt(object);
  if (begin && begin->starts) { /* else it has been off meanwhile */
    add(&begin->clock);
    forget(begin);
  }
  leave();
}

void orSanitizerThreadEnds(void) {
  if (!own || !enter(false)) return;
  orHostThread *t = find(own);
  if (t) {
    orClockClear(&t->clock);
    *t = threads[--count];
    settle();
  }
  own = 0;
  leave();
}

uint64_t orSanitizerThread(void) {
  if (!enter(false)) return 0;
  uint64_t serial = orHostThreadNumber();
  leave();
  return serial;
}

void orThreadsForget(uint64_t (*thread)(void)) {
  while (count) orClockClear(&threads[--count].clock);
  while (objects.root) forget((orObject *)objects.root);
  orClockJoin(&host, &seen);
  orClockClear(&seen);
  starting = 0;
  atomic_store_explicit(&ask, thread, memory_order_relaxed);
  atomic_store_explicit(&follows, false, memory_order_relaxed);
}
