/*
 * Work in pieces: each piece runs once, on the worker of the task or on an idle thread.
 */
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "gate.h"
#include "harness.h"

enum { PIECES = 1000 };

typedef struct Shared {
  atomic_int ran[PIECES];
  atomic_int inside, most_inside;
  size_t count;
} Shared;

static void countPiece(void *context, size_t index) {
  Shared *s = context;
  int n = atomic_fetch_add(&s->inside, 1) + 1, most = atomic_load(&s->most_inside);
  while (n > most && !atomic_compare_exchange_weak(&s->most_inside, &most, n)) {
  }
  atomic_fetch_add(&s->ran[index], 1);
  atomic_fetch_sub(&s->inside, 1);
}

static orError_t splitKernel(void *args) {
  Shared *s = *(Shared **)args;
  ASSERT_OK(orRunPieces(countPiece, s, s->count));
  ASSERT_EQ(s->inside, 0);
  return orSuccess;
}

TEST(parallel_for_runs_every_piece_once) {
  static Shared shared[4];
  const size_t counts[4] = {0, 1, 2, PIECES};
  orStream_t s = newStream();
  for (int i = 0; i < 4; i++) shared[i].count = counts[i];
  for (int round = 1; round <= 50; round++)
    for (int i = 0; i < 4; i++) {
      launch(s, splitKernel, &shared[i]);
      if (round % 2) ASSERT_OK(orStreamSynchronize(s));
    }
  ASSERT_OK(orStreamSynchronize(s));
  for (int i = 0; i < 4; i++)
    for (size_t k = 0; k < PIECES; k++) ASSERT_EQ(shared[i].ran[k], k < counts[i] ? 50 : 0);
}

static void splitOwn(int thread, void *context) {
  Shared *s = &((Shared *)context)[thread];
  orStream_t stream = newStreamOn(thread % 2);
  s->count = PIECES;
  for (int i = 0; i < 20; i++) {
    launch(stream, splitKernel, s);
    ASSERT_OK(orStreamSynchronize(stream));
  }
  for (size_t k = 0; k < PIECES; k++) ASSERT_EQ(s->ran[k], 20);
}

TEST_WITH_LIMIT(parallel_for_from_several_threads, 60) {
  static Shared shared[4];
  runThreads(4, splitOwn, shared);
}

/* A thread that is preempted with a piece in hand keeps all others waiting: no more of them than
 * cores. */
TEST(parallel_for_over_no_more_threads_than_cores) {
  static Shared shared;
  orDeviceProperties p = {.size = sizeof p};
  ASSERT_OK(orGetDeviceProperties(&p, 0));
  shared.count = PIECES;
  orStream_t s = newStream();
  for (int i = 0; i < 50; i++) launch(s, splitKernel, &shared);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT(shared.most_inside >= 1);
  ASSERT(shared.most_inside <= p.host_cores);
}

TEST(parallel_for_outside_a_kernel_is_refused) {
  static Shared shared;
  ASSERT_REFUSED(orRunPieces(countPiece, &shared, 1), orErrorNotPermitted,
                 "only a kernel may call it");
  ASSERT_REFUSED(orRunPieces(NULL, &shared, 1), orErrorInvalidValue, "null function");
  ASSERT_EQ(shared.ran[0], 0);
}

/* ---- helpers and cores ---- */

enum { ROUNDS = 40 };

typedef struct Meeting {
  pthread_t host;
  atomic_int helper_core; /* -1: no helper yet */
  int before, after;      /* the host's core */
} Meeting;

/* The host stays in its piece until a helper is in another. */
static void meet(void *context, size_t index) {
  Meeting *m = context;
  int none = -1;
  if (!pthread_equal(m->host, pthread_self())) {
    atomic_compare_exchange_strong(&m->helper_core, &none, sched_getcpu());
  } else if (index == 0) {
    m->before = sched_getcpu(); /* helpers are called after this piece */
  } else {
    while (atomic_load(&m->helper_core) < 0) sched_yield();
    m->after = sched_getcpu();
  }
}

static orError_t meetKernel(void *args) {
  Meeting *m = *(Meeting **)args;
  m->host = pthread_self();
  return orRunPieces(meet, m, 3);
}

/* All threads there are, and those they start. */
static void allow(const cpu_set_t *cores) {
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *d; (d = readdir(tasks));)
    if (d->d_name[0] != '.') sched_setaffinity(atoi(d->d_name), sizeof *cores, cores);
  closedir(tasks);
}

/* A lane that last ran on the host's core would often be woken there, and keep the host from its
 * own piece. */
TEST(parallel_for_helper_leaves_the_core_of_who_called_it) {
  atomic_int ran = 0;
  cpu_set_t all, here;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) < 2) SKIP("one core");
  orStream_t s = newStream();
  int together = 0, apart = 0;
  for (int round = 0; round < ROUNDS; round++) {
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    allow(&here);
    launch(s, countKernel, &ran); /* by a lane */
    awaitInt(&ran, round + 1);
    sleepMs(2); /* it sleeps */
    allow(&all);
    Meeting m = {.helper_core = -1};
    ASSERT_OK(launchAs(s, meetKernel, &m, orLaunchAnyThread | orLaunchAwaited));
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT(pthread_equal(m.host, pthread_self()));
    if (m.before != m.after) continue; /* somebody moved the host */
    if (m.helper_core == m.before)
      together++;
    else
      apart++;
  }
  ASSERT_LE(together, apart / 4);
}
