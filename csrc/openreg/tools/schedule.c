/*
 * Schedules: one task at a time, only while a host thread is inside a call, in an order that a seed
 * or a tape decides.
 *
 * With a schedule on, a stream that becomes ready is held here instead of in the scheduler's lists.
 * A thread at a point sets an orGoal (so many tasks, a stream's progress, or a cell), chooses the
 * first stream and passes it to worker 0. That worker runs one task of it, gives it back, and
 * chooses the next, until the goal is reached or nothing can run. The thread waits meanwhile, so
 * nothing runs but what was chosen. It is always worker 0, the wide one, so that kernels split
 * their sums in the same way each time.
 *
 * A thread that synchronises and finds nothing to run sleeps until something changes from outside:
 * an event is signalled, or another thread queues work. Every such change, and the end of worker
 * 0's work, changes `word`, which the sleeper reads before it checks.
 *
 * Note [Change of a schedule]: `orDispatcherNow` and `policy` are written under `lock` and read
 * anywhere. They change when nothing is queued, except for orScheduleSwitch and threads that queue
 * at that moment:
 *   - a worker that takes a stream from the scheduler's lists passes it here once a schedule is on
 *   - a worker that still runs a stream checks at the end
 *   - streams that are held when the schedule ends go to the scheduler's lists
 *   - worker 0 ends a goal that it serves then, as any other
 *   - sleeping hosts wake up and sleep in the other way, as they may have to make tasks run; none
 *     is missed, as a host enters the list of sleepers and reads its futex, which a wake-up
 *     changes, before it checks the policy
 *
 * `plan.lock` is taken last, and guards the rest of `plan` but the atomics:
 *   held      streams that can run, in the order of their numbers; linked by ready_next
 *   goal      what worker 0 works for, or null; the goal itself is worker 0's until it sets this to
 *             null
 *   random    the generator's state
 *   tape, taken, steps   the given choices, those that were made, the record of both
 * A stream's schedule_number and schedule_epoch are under it too.
 *
 * Every order that the program allows is possible under some seed: points take any number of tasks,
 * from any stream that can run. A seed also decides how much runs at points and how long a stream
 * is stayed with; otherwise the two most different orders, a stream far ahead and one far behind,
 * would be the rarest.
 *
 * Under a tape, and under every fourth seed, a kernel, copy or fill that can be run in two halves
 * is (orTaskPart). After the first half its stream is held again, and another one may be chosen.
 *
 * Every second seed, the odd ones, gives the host and the streams random priorities instead, and
 * changes them a few times on the way (PCT). A bug that takes one late task and few changes is then
 * likelier, the longer the program is.
 *
 * A tape's choices are among those that can go on (openreg_schedule.h). A stream that has a record,
 * a wait or the allocator's poison before its next task is held `forced`: it is run up to that
 * task, or until it waits, before any choice. A replay of a tape has the same options at each
 * choice. Streams are therefore numbered by their first queued task, which the host alone decides,
 * and not when they are first held.
 *
 * Two calls are no points: an event's record, as destructors record events and may not block; and
 * an allocation, which may run ahead of nothing that the point before it could not run.
 */
#include "openreg_schedule.h"

#include <stdlib.h>

#include "cache/cache.h"
#include "tools/choices.h"

enum { OR_ALL_TASKS = -1, OR_MOST_TASKS = 1 << 20 };
enum { OR_NOBODY = UINT32_MAX, OR_THE_HOST = UINT32_MAX - 1, OR_UNNUMBERED = UINT32_MAX - 2 };
enum { OR_MOST_CHANGES = 3 };

typedef struct orGoal {
  orWaitGoal until; /* if not empty: the goal is reached when this is over */
  int tasks;        /* run this many more, or OR_ALL_TASKS */
  bool waits;       /* if nothing can run, wait for a change from outside */
  bool host_may;    /* the host could go on: the goal ends when the host is chosen */
  bool left;        /* ... and a stream was chosen instead */
  bool over;        /* ... and the host was chosen */
  bool forced;      /* runs forced steps only */
  bool refused;     /* worker 0 cannot be started */
} orGoal;

static struct {
  orMutex lock;
  _Atomic int policy; /* an orSchedulePolicy */
  uint64_t seed, random;
  unsigned haste,
      stay; /* chances in 256: that a point runs one more task; that a stream is stayed with */
  uint64_t epoch;    /* incremented by each change of schedule */
  uint32_t numbered; /* streams numbered in this epoch */
  orStream *held;
  const orStream *latest; /* only compared */
  _Atomic(orGoal *) goal;
  _Atomic uint32_t word;
  uint32_t left; /* the one to which a return is no preemption: a stream's number, the host, none */
  orTape tape, taken;
  orSteps steps;
  _Atomic bool records; /* whether to record this schedule; `record`: those that begin */
  bool record;
  struct {
    uint64_t count, at[OR_MOST_CHANGES];
    /* those whose priority was lowered, the last one behind all others */
    uint32_t who[OR_MOST_CHANGES];
  } changes;
} plan = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF)};

static _Thread_local bool was_split; /* this thread's task is to run again */

static bool configured; /* under plan.lock */

static bool isOn(void) { return orDispatching() != NULL; }

static bool policyIs(orSchedulePolicy policy) {
  return atomic_load_explicit(&plan.policy, memory_order_relaxed) == (int)policy;
}

static bool isByPriority(void) { return policyIs(orScheduleSeeded) && plan.seed % 2; }

static void note(orScheduleStep step) {
  if (atomic_load_explicit(&plan.records, memory_order_relaxed)) orStepsAdd(&plan.steps, step);
}

static void noteAlone(orScheduleStep step) {
  if (!atomic_load_explicit(&plan.records, memory_order_relaxed)) return;
  orMutexLock(&plan.lock);
  note(step);
  orMutexUnlock(&plan.lock);
}

/* ---- chance (lock held) ---- */

/* SplitMix64: the first draws of neighbouring seeds differ. */
static uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static uint64_t draw(void) { return mixed(plan.random += 0x9e3779b97f4a7c15u); }

static bool chance(unsigned in_256) { return draw() % 256 < in_256; }

/* Even seeds, which do not use priorities, decide one more thing: whether tasks are split, or freed
 * memory is kept back. */
static bool seedIs(unsigned rest) { return policyIs(orScheduleSeeded) && plan.seed % 4 == rest; }

/* Called on worker 0 for a task that can be split. */
static bool splits(void) {
  orMutexLock(&plan.lock);
  was_split = policyIs(orScheduleTape) || seedIs(2);
  orMutexUnlock(&plan.lock);
  return was_split;
}

/* ---- held streams (lock held) ---- */

static bool isNumbered(const orStream *s) {
  return s->schedule_epoch == plan.epoch && s->schedule_number != OR_UNNUMBERED;
}

static void number(orStream *s) {
  if (isNumbered(s)) return;
  s->schedule_epoch = plan.epoch;
  s->schedule_number = plan.numbered++;
}

static void insert(orStream *s) {
  orStream **at = &plan.held;
  if (!policyIs(orScheduleTape) && s->schedule_forced != OR_FORCED_POISON) number(s);
  if (!isNumbered(s)) {
    s->schedule_epoch = plan.epoch;
    s->schedule_number = OR_UNNUMBERED;
  }
  while (*at && (*at)->schedule_number < s->schedule_number) at = &(*at)->ready_next;
  s->ready_next = *at;
  *at = s;
}

static orStream *takeAt(orStream **at) {
  orStream *s = *at;
  *at = s->ready_next;
  plan.latest = s;
  return s;
}

static orStream **placeOf(const orStream *s) {
  orStream **at = &plan.held;
  while (*at && *at != s) at = &(*at)->ready_next;
  return at;
}

/* Called with its first task: the stream may be held already, for a record or wait before that. */
static void numberInPlace(orStream *s) {
  if (isNumbered(s)) return;
  orStream **at = placeOf(s);
  bool is_held = *at != NULL;
  if (is_held) *at = s->ready_next;
  number(s);
  if (is_held) insert(s);
}

/* Under a tape records are forced too; else only poison, so that a seed means the same without
 * it. */
static bool isForced(orScheduleForced forced) {
  return forced >= (policyIs(orScheduleTape) ? OR_FORCED_RECORD : OR_FORCED_POISON);
}

static orStream **forcedPlace(void) {
  orStream **at = &plan.held;
  while (*at && !isForced((*at)->schedule_forced)) at = &(*at)->ready_next;
  return at;
}

static orStream *takeForced(void) {
  orStream **at = forcedPlace(), *s = *at;
  if (s) *at = s->ready_next;
  return s;
}

static orStream **anyPlace(void) {
  unsigned count = 0;
  for (const orStream *s = plan.held; s; s = s->ready_next) count++;
  orStream **at = &plan.held;
  for (uint64_t i = draw() % count; i; i--) at = &(*at)->ready_next;
  return at;
}

/* The goal may be worker 0's; its owner reads the choice when it has it back. */
static orStream *hostGoesOn(orGoal *g) {
  g->over = true;
  return NULL;
}

static int tasksAtPoint(void) {
  int n = 0;
  if (policyIs(orScheduleEarly)) return OR_MOST_TASKS;
  while (policyIs(orScheduleSeeded) && plan.held && chance(plan.haste)) n++;
  return n;
}

/* ---- by a tape (lock held) ---- */

typedef struct orOptions {
  uint32_t current; /* ran last and can go on, or none */
  bool host;        /* the host is an option */
  uint32_t count, free;
} orOptions;

/* Lower classes come first. */
static int classOf(const orOptions *o, uint32_t who) {
  return who == o->current ? 0 : o->current == OR_NOBODY || who == plan.left ? 1 : 2;
}

static orOptions optionsOf(const orGoal *g) {
  orOptions o = {.current = OR_NOBODY, .host = g->host_may};
  if (g->host_may && !g->left)
    o.current = OR_THE_HOST;
  else if (plan.latest && *placeOf(plan.latest))
    o.current = plan.latest->schedule_number;
  if (o.host) o.count++, o.free += classOf(&o, OR_THE_HOST) < 2;
  for (const orStream *s = plan.held; s; s = s->ready_next)
    o.count++, o.free += classOf(&o, s->schedule_number) < 2;
  return o;
}

/* The stream of this option; null: the host. */
static orStream **placeOfOption(const orOptions *o, uint32_t option) {
  for (int class = 0; class < 3; class++) {
    if (o->host && classOf(o, OR_THE_HOST) == class && !option--) return NULL;
    for (orStream **at = &plan.held; *at; at = &(*at)->ready_next)
      if (classOf(o, (*at)->schedule_number) == class && !option--) return at;
  }
  return NULL; /* not reached: option < count */
}

static uint32_t nextOption(const orOptions *o) {
  if (o->count < 2) return 0;
  size_t i = plan.taken.count;
  uint32_t option = i < plan.tape.count ? plan.tape.choices[i] : 0;
  if (option >= o->count) option = 0;
  if (!orTapeAdd(&plan.taken, option)) plan.steps.short_of_memory = true;
  note((orScheduleStep){.kind = orStepChooses, .flags = option, .a = o->count, .b = o->free});
  return option;
}

/* Returns null if the host goes on, or if neither it nor a stream can. */
static orStream *chooseByTape(orGoal *g) {
  orOptions o = optionsOf(g);
  if (!o.count) return NULL;
  orStream **at = placeOfOption(&o, nextOption(&o));
  uint32_t who = at ? (*at)->schedule_number : OR_THE_HOST;
  if (who != o.current)
    plan.left = o.current == OR_NOBODY || who == plan.left ? OR_NOBODY : o.current;
  g->left = true;
  return at ? takeAt(at) : hostGoesOn(g);
}

/* ---- by priorities (lock held) ---- */

/* Random, until lowered. */
static uint64_t priorityOf(uint32_t who) {
  for (int i = 0; i < OR_MOST_CHANGES; i++)
    if (plan.changes.who[i] == who) return (uint64_t)(OR_MOST_CHANGES - i);
  return mixed(plan.seed + who * 0x9e3779b97f4a7c15u) | 1u << 8;
}

static void beginPriorities(void) {
  uint64_t most = UINT64_C(4) << draw() % 7; /* the length of the program is unknown */
  plan.changes.count = 0;
  for (int i = 0; i < OR_MOST_CHANGES; i++) {
    plan.changes.who[i] = OR_NOBODY;
    plan.changes.at[i] = draw() % 2 ? draw() % most : UINT64_MAX;
  }
}

static orStream **placeOfHighest(void) {
  orStream **highest = &plan.held;
  for (orStream **at = &plan.held; *at; at = &(*at)->ready_next)
    if (priorityOf((*at)->schedule_number) > priorityOf((*highest)->schedule_number)) highest = at;
  return highest;
}

static orStream *chooseByPriority(orGoal *g) {
  orStream **at = placeOfHighest();
  uint64_t now = plan.changes.count++;
  for (int i = 0; i < OR_MOST_CHANGES; i++) {
    if (plan.changes.at[i] != now) continue;
    bool host =
        g->host_may && (!*at || priorityOf(OR_THE_HOST) > priorityOf((*at)->schedule_number));
    plan.changes.who[i] = host ? OR_THE_HOST : *at ? (*at)->schedule_number : OR_NOBODY;
    at = placeOfHighest();
  }
  if (!*at || (g->host_may && priorityOf(OR_THE_HOST) > priorityOf((*at)->schedule_number)))
    return hostGoesOn(g);
  return takeAt(at);
}

/* `needed`: the stream that "late" runs, if it can run. */
static orStream *choose(orGoal *g, const orStream *needed) {
  orStream *forced = takeForced();
  if (forced || g->forced) return forced;
  if (policyIs(orScheduleTape)) return chooseByTape(g);
  if (isByPriority()) return chooseByPriority(g);
  if (!plan.held) return NULL;
  if (!policyIs(orScheduleSeeded)) {
    orStream **at = needed ? placeOf(needed) : &plan.held;
    return takeAt(*at ? at : &plan.held);
  }
  orStream **at = plan.latest ? placeOf(plan.latest) : &plan.held;
  return takeAt(plan.latest && *at && chance(plan.stay) ? at : anyPlace());
}

static void notice(void);

static bool hold(orStream *s) {
  const orTask *first = orWorkerFirst(s);
  bool record = first->kind == OR_KIND_RECORD || first->kind == OR_KIND_WAIT;
  orScheduleForced forced = first->internal ? OR_FORCED_POISON
                            : record        ? OR_FORCED_RECORD
                                            : OR_FORCED_NOT;
  orMutexLock(&plan.lock);
  s->schedule_forced = forced;
  bool on = isOn();
  bool served = atomic_load_explicit(&plan.goal, memory_order_relaxed) != NULL;
  if (on) insert(s);
  orMutexUnlock(&plan.lock);
  if (on && !served) notice();
  return on;
}

/* ---- goals ---- */

static void notice(void) {
  atomic_fetch_add_explicit(&plan.word, 1, memory_order_release);
  orFutexWake(&plan.word, INT32_MAX);
}

static bool isReached(const orGoal *g) {
  if (!g->tasks || g->over || !isOn() || orProcessExiting()) return true;
  return (g->until.stream || g->until.cell) && orIsOver(&g->until);
}

/* The stream that the goal's stream waits for, directly or not. A wait is for a record that was
 * queued before it, so this ends. */
static const orStream *neededFor(const orGoal *g) {
  if (!policyIs(orScheduleLate)) return NULL;
  orStream *s = g->until.stream;
  for (orStream *other; s && (other = orStreamBlocker(s));) s = other;
  return s;
}

/* On worker 0: the next stream for the goal. Null when the goal is reached or nothing can run; the
 * goal is then its owner's again. */
static orStream *next(orGoal *g) {
  bool over = isReached(g);
  const orStream *needed = over ? NULL : neededFor(g);
  orMutexLock(&plan.lock);
  orStream *s = over ? NULL : choose(g, needed);
  if (!s) atomic_store_explicit(&plan.goal, NULL, memory_order_release);
  orMutexUnlock(&plan.lock);
  if (!s) notice();
  return s;
}

static void serve(orStream *s) {
  orGoal *g = atomic_load_explicit(&plan.goal, memory_order_acquire);
  do {
    /* A wait that only parks its stream is not counted as a task. */
    uint64_t first = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
    orScheduleForced forced = s->schedule_forced;
    orStream_t handle = s->last_handle;
    was_split = false;
    bool ran = orWorkerRun(s, first, 0);
    if (!ran && !was_split) continue;
    if (!forced) noteAlone((orScheduleStep){.kind = orStepRuns, .flags = !ran, .stream = handle});
    if (g->tasks > 0 && !isForced(forced)) g->tasks--;
  } while ((s = next(g)));
}

/* Called if the system refuses worker 0 a thread. */
static void refuse(orStream *s) {
  orMutexLock(&plan.lock);
  orGoal *g = atomic_load_explicit(&plan.goal, memory_order_relaxed);
  bool on = isOn();
  if (on) insert(s);
  g->refused = true;
  atomic_store_explicit(&plan.goal, NULL, memory_order_release);
  orMutexUnlock(&plan.lock);
  if (!on) orWorkerSchedule(s);
  notice();
}

/* Passes the goal to worker 0, unless it has another one or nothing can run. */
static bool start(orGoal *g) {
  const orStream *needed = neededFor(g);
  orMutexLock(&plan.lock);
  bool busy = atomic_load_explicit(&plan.goal, memory_order_relaxed) != NULL;
  orStream *s = busy || !isOn() ? NULL : choose(g, needed);
  if (s) atomic_store_explicit(&plan.goal, g, memory_order_release);
  orMutexUnlock(&plan.lock);
  if (s) orWorkerServe(s, serve, refuse);
  return s;
}

static bool isServed(const orGoal *g) {
  return atomic_load_explicit(&plan.goal, memory_order_acquire) == g;
}

static bool spinWhile(uint32_t word) {
  uint64_t until = orNow() + OR_SPIN_NS;
  do {
    for (int i = 0; i < 64; i++) {
      if (atomic_load_explicit(&plan.word, memory_order_acquire) != word) return true;
      orPause();
    }
  } while (orNow() < until);
  return false;
}

typedef struct orGoalSleep {
  bool entered;
  void *token;
  orSleeper wait;
} orGoalSleep;

static void enterSleep(orGoalSleep *sleep, const orGoal *g) {
  if (sleep->entered) return;
  sleep->entered = true;
  sleep->token = orBlockEnter();
  orSleeperBegin(&sleep->wait, g->waits ? &g->until : &(orWaitGoal){.stream = NULL});
}

static void leaveSleep(orGoalSleep *sleep) {
  if (!sleep->entered) return;
  orSleeperEnd(&sleep->wait);
  orBlockLeave(sleep->token);
}

static orError_t pursue(orGoal *g) {
  orGoalSleep sleep = {0};
  while (isServed(g) || !orProcessExiting()) { /* a worker uses the goal, which is on this stack */
    uint32_t word = atomic_load_explicit(&plan.word, memory_order_acquire);
    if (!isServed(g)) {
      if ((g->refused && g->until.stream) || isReached(g)) break;
      bool started = !g->refused && start(g);
      if (!started && !g->waits) break;
      if (!started) noteAlone((orScheduleStep){.kind = orStepOutside});
    }
    if (spinWhile(word)) continue;
    enterSleep(&sleep, g);
    if (isServed(g) || !orProcessExiting()) orFutexWait(&plan.word, word, 0);
  }
  leaveSleep(&sleep);
  return g->refused && g->until.stream && !orIsOver(&g->until) ? orWorkerRefuse() : orSuccess;
}

/* ---- points; a task that calls is at none ---- */

/* Runs poison at once, so that seeds choose as they do without it. */
static void runForced(void) {
  if (orProcessTask() != OR_TASK_NONE) return;
  orMutexLock(&plan.lock);
  bool any = !policyIs(orScheduleTape) && *forcedPlace();
  orMutexUnlock(&plan.lock);
  if (any) pursue(&(orGoal){.tasks = OR_ALL_TASKS, .forced = true});
}

static void point(void) {
  if (orProcessTask() != OR_TASK_NONE) return;
  runForced();
  orMutexLock(&plan.lock);
  note((orScheduleStep){.kind = orStepPoint});
  bool chooses = policyIs(orScheduleTape) || isByPriority();
  int tasks = chooses ? (plan.held ? OR_ALL_TASKS : 0) : tasksAtPoint();
  orMutexUnlock(&plan.lock);
  if (tasks) pursue(&(orGoal){.tasks = tasks, .host_may = chooses});
}

/* An identifier that lives as long as the event's record. */
static uint64_t idOf(const orCell *cell) { return (uint64_t)(uintptr_t)cell; }

/* The slot may be another stream's by now. */
static void noteAsked(const orWaitGoal *goal) {
  if (!atomic_load_explicit(&plan.records, memory_order_relaxed)) return;
  orStream_t stream = goal->stream ? orStreamHandleOf(goal->stream) : 0;
  noteAlone((orScheduleStep){.kind = orStepAsks, .stream = stream, .a = idOf(goal->cell)});
}

static orError_t step(const orWaitGoal *goal) {
  if (orProcessTask() != OR_TASK_NONE) return orSuccess;
  noteAsked(goal);
  return pursue(&(orGoal){.until = *goal, .tasks = 1});
}

static orError_t await(const orWaitGoal *goal) {
  if (!goal->stream)
    atomic_fetch_or_explicit(&goal->cell->state, OR_CELL_SLEEPERS, memory_order_acq_rel);
  return pursue(&(orGoal){.until = *goal, .tasks = OR_ALL_TASKS, .waits = true});
}

/* ---- the record ---- */

void orScheduleTouched(orStream_t stream, uintptr_t begin, uintptr_t end, bool write) {
  if (!atomic_load_explicit(&plan.records, memory_order_relaxed)) return;
  bool pinned = orRegionIs((const void *)begin, orMemoryTypeHost); /* NOLINT */
  noteAlone((orScheduleStep){.kind = orStepTouches,
                             .flags = (write ? orTouchWrites : 0u) | (pinned ? orTouchPinned : 0u),
                             .stream = stream,
                             .a = begin,
                             .b = end});
}

static void noteBytes(orStream_t stream, const void *data, size_t bytes, bool write) {
  uintptr_t begin = (uintptr_t)data;
  if (data) orScheduleTouched(stream, begin, begin + bytes, write);
}

/* Numbers a stream under a tape by its first task, else by whatever is queued first but poison. */
static void numberOnQueue(const orProbe *p) {
  orStream *s = orHandleFind(&orStreamTable, p->stream);
  if (!s || p->internal) return;
  orMutexLock(&plan.lock);
  if (isOn() && (!policyIs(orScheduleTape) || p->kind <= (int)OR_KIND_SET)) numberInPlace(s);
  orMutexUnlock(&plan.lock);
}

static void onQueued(orProbe *p) {
  numberOnQueue(p);
  if (!isOn() || p->kind > (int)OR_KIND_SET) return;
  orStream *s = orHandleFind(&orStreamTable, p->stream);
  if (!s) return;
  noteBytes(p->stream, p->dst, p->bytes, true);
  noteBytes(p->stream, p->src, p->bytes, false);
  orMutexLock(&plan.lock);
  note((orScheduleStep){.kind = orStepQueued,
                        .flags = p->internal,
                        .stream = p->stream,
                        .a = (uint64_t)orHandleDevice(p->stream)});
  orMutexUnlock(&plan.lock);
}

static void onRecord(orProbe *p) {
  noteAlone((orScheduleStep){.kind = orStepRecords, .stream = p->stream, .a = idOf(p->cell)});
}

/* An external event is signalled from outside. */
static void onWait(orProbe *p) {
  noteAlone((orScheduleStep){.kind = p->cell->stream ? orStepWaits : orStepOutside,
                             .stream = p->stream,
                             .a = idOf(p->cell)});
}

static void onHostWaits(orProbe *p) {
  noteAlone((orScheduleStep){.kind = orStepAwaits,
                             .stream = p->stream,
                             .a = idOf(p->cell),
                             .b = (uint64_t)(int64_t)p->device});
}

static void onHostAcquires(orProbe *p) {
  noteAlone((orScheduleStep){.kind = orStepKnows, .stream = p->stream, .a = idOf(p->cell)});
}

static void onLooked(orProbe *p) {
  noteAlone((orScheduleStep){.kind = orStepLooks, .stream = p->stream});
}

static void onOutside(orProbe *p) {
  (void)p;
  noteAlone((orScheduleStep){.kind = orStepOutside});
}

static void onFirstUse(orProbe *p);

static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse,
                             [OR_PROBE_QUEUED] = onQueued,
                             [OR_PROBE_RECORD] = onRecord,
                             [OR_PROBE_WAIT] = onWait,
                             [OR_PROBE_HOST_WAITS] = onHostWaits,
                             [OR_PROBE_HOST_ACQUIRES] = onHostAcquires,
                             [OR_PROBE_LOOKED] = onLooked,
                             [OR_PROBE_SIGNAL] = onOutside,
                             [OR_PROBE_RESET] = onOutside}};

/* Switches the tool on, which numbers streams and records. */
static void listen(void) { orToolSwitch(&tool, !policyIs(orScheduleFair)); }

/* ---- change ---- */

static const orDispatcher dispatcher = {.hold = hold,
                                        .point = point,
                                        .step = step,
                                        .await = await,
                                        .forced = runForced,
                                        .splits = splits,
                                        .notice = notice};

static void begin(orSchedulePolicy policy, uint64_t seed) {
  static const unsigned char hastes[] = {0, 64, 128, 192}, stays[] = {0, 128, 232};
  plan.seed = plan.random = seed;
  plan.left = OR_NOBODY;
  plan.taken.count = plan.steps.count = 0;
  plan.steps.short_of_memory = false;
  atomic_store_explicit(&plan.records, plan.record && policy != orScheduleFair,
                        memory_order_relaxed);
  plan.haste = hastes[draw() % sizeof hastes];
  plan.stay = stays[draw() % sizeof stays];
  plan.epoch++;
  plan.numbered = 0;
  plan.latest = NULL;
  beginPriorities();
  atomic_store_explicit(&plan.policy, (int)policy, memory_order_relaxed);
  atomic_store_explicit(&orDispatcherNow, policy == orScheduleFair ? NULL : &dispatcher,
                        memory_order_seq_cst);
}

/* Applies the newest policy, whichever thread has set it. */
static void setReuse(void) {
  for (uint64_t seen = 0, epoch;; seen = epoch) {
    orMutexLock(&plan.lock);
    epoch = plan.epoch;
    orCacheReuse reuse = {.fresh_only = !policyIs(orScheduleFair),
                          .in_stream_order = seedIs(0), /* keeps freed memory back */
                          .poison = policyIs(orScheduleTape)};
    orMutexUnlock(&plan.lock);
    if (epoch == seen) return;
    orCacheSetReuse(reuse);
  }
}

/* plan.lock held. */
static orError_t configure(const orConfig *c) {
  if (c->schedule.tape && !orTapeParse(&plan.tape, c->schedule.tape))
    return orFail(
        orErrorMemoryAllocation,
        "OPENREG_SCHEDULE_TAPE: there is no memory for its choices, or they are too many");
  begin(c->schedule.tape ? orScheduleTape : (orSchedulePolicy)c->schedule.policy, c->schedule.seed);
  configured = true;
  return orSuccess;
}

static orError_t configureOnce(void) {
  const orConfig *c = orConfigGet(); /* takes a lock of its own */
  orMutexLock(&plan.lock);
  bool begins = !configured;
  orError_t error = begins ? configure(c) : orSuccess;
  orMutexUnlock(&plan.lock);
  if (begins) setReuse(), listen();
  return error;
}

static void onFirstUse(orProbe *p) {
  orError_t error = configureOnce();
  if (error) p->error = error;
}

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

/* See Note [Change of a schedule]. */
static orError_t change(orSchedulePolicy policy, uint64_t seed, bool settle) {
  OR_TRY(orEnterBlocking());
  if (policy < orScheduleFair || policy > orScheduleTape)
    return orFail(orErrorInvalidValue, "orScheduleSet: policy %d is out of range: 0 to 4",
                  (int)policy);
  OR_TRY(configureOnce());
  if (settle) OR_TRY(orStreamSettle());
  orMutexLock(&plan.lock);
  begin(policy, seed);
  orStream *left = plan.held;
  plan.held = NULL;
  orMutexUnlock(&plan.lock);
  setReuse();
  listen();
  for (orStream *s; (s = left);) {
    left = s->ready_next;
    orWorkerSchedule(s);
  }
  notice();
  orSleepersWake();
  return orSuccess;
}

orError_t orScheduleSet(orSchedulePolicy policy, uint64_t seed) {
  return change(policy, seed, true);
}

orError_t orScheduleSwitch(orSchedulePolicy policy, uint64_t seed) {
  return change(policy, seed, false);
}

orError_t orScheduleSetTape(const char *text) {
  OR_TRY(orEnterBlocking());
  orTape tape = {0}, old;
  if (!text || !orTapeParse(&tape, text)) {
    free(tape.choices);
    return orFail(
        orErrorInvalidValue,
        "orScheduleSetTape: \"%.64s\"; a tape is numbers separated by commas, and \"12:2\" stands "
        "for 12 zeros and a 2, as in \"1,12:2\"",
        text ? text : "(null)");
  }
  orError_t error = configureOnce();
  if (!error) error = orStreamSettle();
  if (error) {
    free(tape.choices);
    return error;
  }
  orMutexLock(&plan.lock);
  old = plan.tape;
  plan.tape = tape;
  orMutexUnlock(&plan.lock);
  free(old.choices);
  return change(orScheduleTape, 0, true);
}

orError_t orScheduleGetTape(char **tape) {
  if (!tape) return orFail(orErrorInvalidValue, "orScheduleGetTape: null result");
  OR_TRY(orEnter());
  orMutexLock(&plan.lock);
  *tape = orTapeText(&plan.taken);
  orMutexUnlock(&plan.lock);
  return *tape ? orSuccess : orFail(orErrorMemoryAllocation, "no memory for the text of a tape");
}

orError_t orScheduleRecord(uint32_t record) {
  OR_TRY(orEnter());
  orMutexLock(&plan.lock);
  plan.record = record;
  orMutexUnlock(&plan.lock);
  return orSuccess;
}

orError_t orScheduleSteps(size_t first, orScheduleStep *steps, size_t step_size, size_t capacity,
                          size_t *count) {
  if (!count || (capacity && !steps))
    return orFail(orErrorInvalidValue, "orScheduleSteps: null result");
  OR_TRY(orEnter());
  OR_TRY(orCheckSize("orScheduleStep", step_size, OR_END(orScheduleStep, b)));
  orMutexLock(&plan.lock);
  *count = first < plan.steps.count ? plan.steps.count - first : 0;
  if (*count > capacity) *count = capacity;
  for (size_t i = 0; i < *count; i++)
    orFillElement((char *)steps + i * step_size, step_size, &plan.steps.at[first + i],
                  sizeof(orScheduleStep));
  orMutexUnlock(&plan.lock);
  return orSuccess;
}

orError_t orScheduleGet(orSchedulePolicy *policy, uint64_t *seed) {
  if (!policy || !seed) return orFail(orErrorInvalidValue, "orScheduleGet: null result");
  OR_TRY(orEnter());
  OR_TRY(configureOnce());
  orMutexLock(&plan.lock);
  *policy = (orSchedulePolicy)atomic_load_explicit(&plan.policy, memory_order_relaxed);
  *seed = plan.seed;
  orMutexUnlock(&plan.lock);
  return orSuccess;
}
