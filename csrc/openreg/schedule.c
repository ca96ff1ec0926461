/*
 * Schedules: one task at a time, only while a host thread is inside a call, in an order that a seed
 * decides.
 *
 * With a schedule on, a stream that becomes ready is not put into the scheduler's lists but held
 * here. A thread at a point says what it wants (an orGoal: so many tasks, or a stream's progress,
 * or a cell), chooses the first stream and hands it to lane 0, which runs one task of it, gives it
 * back, chooses the next and so on until the goal is reached or nothing is left that can run. The
 * thread waits meanwhile, so nothing runs but what was chosen. That it is always lane 0, the wide
 * one, makes kernels split their sums in the same way each time.
 *
 * A thread that synchronises and finds nothing to run sleeps for whatever comes from outside: a
 * signalled event, a value, another thread's work. Every such change, and the end of lane 0's work,
 * changes `word`, which the sleeper read before it looked.
 *
 * `orDispatcherNow` and `policy` are written under `lock` and read anywhere. It changes when
 * nothing is queued, but for orScheduleSwitch and threads that queue at that very moment: what a
 * lane takes from the scheduler's lists once a schedule is on comes here; a lane that still runs a
 * stream notices it at the end; what is held when it ends goes there; a goal that is being served
 * then is ended by lane 0 as any other; and hosts that sleep wake up to sleep in the other way,
 * since they may be the ones that have to make tasks run. A host looks at the policy after it has
 * entered the list of sleepers and read its futex, which waking changes, so it is not missed.
 *
 * `plan.lock` is taken last, and guards the rest of `plan` but the atomics:
 *   held      streams that can run, in the order of their numbers; linked by ready_next
 *   goal      what lane 0 works for, or null; the goal itself is lane 0's until it sets this to
 *             null
 *   random    the generator's state
 * A stream's schedule_number and schedule_epoch are under it too.
 *
 * Every order that the program allows is possible under some seed: points take any number of tasks,
 * from any stream that can run. A seed also decides how much is run at points and how long a stream
 * is stayed with, since the two orders that differ most, a stream far ahead and one far behind,
 * would otherwise be the rarest.
 *
 * What is no point: an event's record, which deleters make, and they may not block; an allocation,
 * which may run ahead of nothing that the point before it could not run.
 */
#include "openreg_schedule.h"

#include "core.h"

enum { OR_POLL_NS = 200000, OR_ALL_TASKS = -1, OR_MOST_TASKS = 1 << 20 };

typedef struct orGoal {
  orAwaited until; /* it is over, if there is something */
  int tasks;       /* until so many more have finished, or OR_ALL_TASKS */
  bool waits;      /* for what comes from outside, if nothing can run */
} orGoal;

static struct {
  orMutex lock;
  _Atomic int policy; /* an orSchedulePolicy */
  uint64_t seed, random;
  unsigned haste,
      stay; /* chances in 256: that a point runs one more task; that a stream is stayed with */
  uint64_t epoch;    /* grows with each change of schedule */
  uint32_t numbered; /* streams, in this epoch */
  orStream *held;
  const orStream *latest; /* only compared */
  _Atomic(orGoal *) goal;
  _Atomic uint32_t word;
} plan = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF)};

static pthread_once_t configured = PTHREAD_ONCE_INIT;

static bool isOn(void) { return orDispatching() != NULL; }

static bool policyIs(orSchedulePolicy policy) {
  return atomic_load_explicit(&plan.policy, memory_order_relaxed) == (int)policy;
}

/* ---- chance (lock held) ---- */

/* SplitMix64: of neighbouring seeds the first draws differ already. */
static uint64_t draw(void) {
  uint64_t z = plan.random += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static bool chance(unsigned in_256) { return draw() % 256 < in_256; }

static int tasksAtPoint(void) {
  int n = 0;
  switch ((orSchedulePolicy)atomic_load_explicit(&plan.policy, memory_order_relaxed)) {
    case orScheduleSeeded:
      while (plan.held && chance(plan.haste)) n++;
      return n;
    case orScheduleEarly:
      return OR_MOST_TASKS;
    default:
      return 0;
  }
}

/* ---- held streams (lock held) ---- */

static void number(orStream *s) {
  if (s->schedule_epoch == plan.epoch) return;
  s->schedule_epoch = plan.epoch;
  s->schedule_number = plan.numbered++;
}

static void insert(orStream *s) {
  orStream **at = &plan.held;
  number(s);
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

static orStream **anyPlace(void) {
  unsigned count = 0;
  for (const orStream *s = plan.held; s; s = s->ready_next) count++;
  orStream **at = &plan.held;
  for (uint64_t i = draw() % count; i; i--) at = &(*at)->ready_next;
  return at;
}

/* `needed`: the one that "late" runs, if it can run. */
static orStream *choose(const orStream *needed) {
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
  orMutexLock(&plan.lock);
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
  if (!g->tasks || !isOn()) return true;
  return (g->until.stream || g->until.cell) && orIsOver(&g->until);
}

/* What the goal's stream waits for, in the end. A wait is for a mark that was queued before it, so
 * this ends. */
static const orStream *neededFor(const orGoal *g) {
  if (!policyIs(orScheduleLate)) return NULL;
  orStream *s = g->until.stream;
  for (orStream *other; s && (other = orStreamBlocker(s));) s = other;
  return s;
}

/* Lane 0: what runs next for the goal; null when it is reached or nothing can run, and the goal is
 * its owner's again. */
static orStream *next(orGoal *g) {
  orLanePollValues();
  bool over = isReached(g);
  const orStream *needed = over ? NULL : neededFor(g);
  orMutexLock(&plan.lock);
  orStream *s = over ? NULL : choose(needed);
  if (!s) atomic_store_explicit(&plan.goal, NULL, memory_order_release);
  orMutexUnlock(&plan.lock);
  if (!s) notice();
  return s;
}

static void serve(orStream *s) {
  orGoal *g = atomic_load_explicit(&plan.goal, memory_order_acquire);
  do {
    /* A wait that only parks its stream is no task that has run. */
    uint64_t first = atomic_load_explicit(&s->completed, memory_order_relaxed) + 1;
    if (orLaneRun(s, first, 0) && g->tasks > 0) g->tasks--;
  } while ((s = next(g)));
}

/* Hands the goal to lane 0, unless it has another one or nothing can run. */
static bool start(orGoal *g) {
  const orStream *needed = neededFor(g);
  orMutexLock(&plan.lock);
  bool busy = atomic_load_explicit(&plan.goal, memory_order_relaxed) != NULL;
  orStream *s = busy || !isOn() ? NULL : choose(needed);
  if (s) atomic_store_explicit(&plan.goal, g, memory_order_release);
  orMutexUnlock(&plan.lock);
  if (s) orLaneServe(s, serve);
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
  orHostWait wait;
} orGoalSleep;

static void enterSleep(orGoalSleep *sleep, const orGoal *g) {
  if (sleep->entered) return;
  sleep->entered = true;
  sleep->token = orBlockEnter();
  orHostWaitBegin(&sleep->wait, g->waits ? &g->until : &(orAwaited){.stream = NULL});
}

static void leaveSleep(orGoalSleep *sleep) {
  if (!sleep->entered) return;
  orHostWaitEnd(&sleep->wait);
  orBlockLeave(sleep->token);
}

static void pursue(orGoal *g) {
  orGoalSleep sleep = {0};
  while (isServed(g) || !orProcessExiting()) { /* a lane has the goal, which is on this stack */
    uint32_t word = atomic_load_explicit(&plan.word, memory_order_acquire);
    if (!isServed(g)) {
      orLanePollValues();
      if (isReached(g) || (!start(g) && !g->waits)) break;
    }
    if (spinWhile(word)) continue;
    enterSleep(&sleep, g);
    /* A value may be written by a plain store. */
    orFutexWait(&plan.word, word, orLaneValueWaits() ? OR_POLL_NS : 0);
  }
  leaveSleep(&sleep);
}

/* ---- points; a task that calls is at none ---- */

static void point(void) {
  if (orProcessTask() != OR_TASK_NONE) return;
  orLanePollValues();
  orMutexLock(&plan.lock);
  int tasks = tasksAtPoint();
  orMutexUnlock(&plan.lock);
  if (tasks) pursue(&(orGoal){.tasks = tasks});
}

static void step(const orAwaited *awaited) {
  if (orProcessTask() != OR_TASK_NONE) return;
  pursue(&(orGoal){.until = *awaited, .tasks = 1});
}

static void await(const orAwaited *awaited) {
  if (!awaited->stream)
    atomic_fetch_or_explicit(&awaited->cell->state, OR_CELL_SLEEPERS, memory_order_acq_rel);
  pursue(&(orGoal){.until = *awaited, .tasks = OR_ALL_TASKS, .waits = true});
}

/* ---- change ---- */

static const orDispatcher dispatcher = {
    .hold = hold, .point = point, .step = step, .await = await, .notice = notice};

static void begin(orSchedulePolicy policy, uint64_t seed) {
  static const unsigned char hastes[] = {0, 64, 128, 192}, stays[] = {0, 128, 232};
  plan.seed = plan.random = seed;
  plan.haste = hastes[draw() % sizeof hastes];
  plan.stay = stays[draw() % sizeof stays];
  plan.epoch++;
  plan.numbered = 0;
  plan.latest = NULL;
  atomic_store_explicit(&plan.policy, (int)policy, memory_order_relaxed);
  atomic_store_explicit(&orDispatcherNow, policy == orScheduleFair ? NULL : &dispatcher,
                        memory_order_seq_cst);
}

static void configure(void) {
  const orConfig *c = orConfigGet();
  orMutexLock(&plan.lock);
  begin((orSchedulePolicy)c->schedule.policy, c->schedule.seed);
  orMutexUnlock(&plan.lock);
}

static void configureOnce(void) { pthread_once(&configured, configure); }

static void onFirstUse(orProbe *p) {
  (void)p;
  configureOnce();
}

static orTool tool = {.on = {[OR_PROBE_FIRST_USE] = onFirstUse}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

static orError_t change(orSchedulePolicy policy, uint64_t seed, bool settle) {
  OR_TRY(orEnterBlocking());
  if (policy < orScheduleFair || policy > orScheduleEarly)
    return orFail(orErrorInvalidValue, "orScheduleSet: policy %d; 0 to 3 are known", (int)policy);
  configureOnce();
  if (settle) orStreamSettle();
  orMutexLock(&plan.lock);
  begin(policy, seed);
  orStream *left = plan.held;
  plan.held = NULL;
  orMutexUnlock(&plan.lock);
  for (orStream *s; (s = left);) {
    left = s->ready_next;
    orLaneSchedule(s);
  }
  notice();
  orHostWaitsWake();
  if (policy == orScheduleFair && orLaneValueWaits()) orLaneWakeIdle(1);
  return orSuccess;
}

orError_t orScheduleSet(orSchedulePolicy policy, uint64_t seed) {
  return change(policy, seed, true);
}

orError_t orScheduleSwitch(orSchedulePolicy policy, uint64_t seed) {
  return change(policy, seed, false);
}

orError_t orScheduleGet(orSchedulePolicy *policy, uint64_t *seed) {
  if (!policy || !seed) return orFail(orErrorInvalidValue, "orScheduleGet: null result");
  OR_TRY(orEnter());
  configureOnce();
  orMutexLock(&plan.lock);
  *policy = (orSchedulePolicy)atomic_load_explicit(&plan.policy, memory_order_relaxed);
  *seed = plan.seed;
  orMutexUnlock(&plan.lock);
  return orSuccess;
}
