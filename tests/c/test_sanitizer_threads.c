/*
 * The sanitizer: what one thread of the host has waited for, and who knows of it.
 *
 * Each step of a test is a thread of its own that has ended when the next one begins. That is the
 * order in which they are called, of which the sanitizer is not told.
 */
#include <pthread.h>

#include "sanitizer_helpers.h"

typedef struct Step {
  void (*body)(struct Step *);
  const void *begin; /* what it was started with; null: nobody says that it begins */
  const void *object;
  orStream_t stream;
  orEvent_t event;
  char *memory;
  uint64_t found;
} Step;

static void *run(void *given) {
  Step *step = given;
  if (step->begin) orSanitizerThreadBegins(step->begin);
  step->body(step);
  if (step->begin) orSanitizerThreadEnds();
  return NULL;
}

/* Unless it is null, whoever is at `begin` has been told that it starts. */
static uint64_t step(void (*body)(Step *), const void *begin, Step given) {
  pthread_t thread;
  given.body = body;
  given.begin = begin;
  ASSERT_EQ(pthread_create(&thread, NULL, run, &given), 0);
  ASSERT_EQ(pthread_join(thread, NULL), 0);
  return given.found;
}

static void waits(Step *s) { ASSERT_OK(orStreamSynchronize(s->stream)); }

static void acquiresAndWrites(Step *s) {
  if (s->object) orSanitizerAcquire(s->object);
  s->found = writes(s->stream, "write in a thread", s->memory, KIB);
}

static void waitsAndReleases(Step *s) {
  waits(s);
  orSanitizerRelease(s->object);
}

typedef struct Two {
  orStream_t s0, s1;
  char *memory;
  char first, second, lock; /* objects */
} Two;

/* s0 has written, and two threads are to begin. */
static void prepare(Two *t) {
  *t = (Two){.s0 = defaultOf(0), .s1 = newStream()};
  sanitize();
  t->memory = deviceMemory(KIB);
  writes(t->s0, "write", t->memory, KIB);
  orSanitizerThreadStarts(&t->first);
  orSanitizerThreadStarts(&t->second);
}

TEST(sanitizer_knows_what_each_thread_has_waited_for) {
  Two t;
  prepare(&t);
  step(waits, &t.first, (Step){.stream = t.s0});
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 1);
  ASSERT_STR(reportAt(1).later.operation, "write in a thread");
  ASSERT_CONTAINS(reportAt(1).advice, "because another thread has waited for it");
}

TEST(sanitizer_passes_it_on_with_an_object) {
  Two t;
  prepare(&t);
  step(waitsAndReleases, &t.first, (Step){.stream = t.s0, .object = &t.lock});
  Step second = {.stream = t.s1, .memory = t.memory, .object = &t.lock};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
}

TEST(sanitizer_passes_nothing_on_with_another_object) {
  Two t;
  prepare(&t);
  step(waitsAndReleases, &t.first, (Step){.stream = t.s0, .object = &t.lock});
  orSanitizerObjectGone(&t.lock);
  Step second = {.stream = t.s1, .memory = t.memory, .object = &t.lock};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 1);
}

TEST(sanitizer_counts_other_threads_as_ordered) {
  Two t;
  prepare(&t);
  step(waits, NULL, (Step){.stream = t.s0});
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
  ASSERT_OK(orStreamSynchronize(t.s1));
  writes(t.s0, "write", t.memory, KIB);
  step(waits, &t.first, (Step){.stream = t.s0});
  ASSERT_EQ(step(acquiresAndWrites, NULL, second), 0);
}

static void acquires(Step *s) { orSanitizerAcquire(s->object); }

/* It may pass it on in a way that cannot be followed. */
TEST(sanitizer_lets_all_know_what_other_threads_acquire) {
  Two t;
  prepare(&t);
  step(waitsAndReleases, &t.first, (Step){.stream = t.s0, .object = &t.lock});
  step(acquires, NULL, (Step){.object = &t.lock});
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
}

TEST(sanitizer_gives_a_thread_what_its_starter_knew) {
  Two t;
  prepare(&t);
  char third;
  ASSERT_OK(orStreamSynchronize(t.s0));
  orSanitizerThreadStarts(&third);
  Step write = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &third, write), 0);
  ASSERT_EQ(step(acquiresAndWrites, &t.first, (Step){.stream = newStream(), .memory = t.memory}),
            1);
  ASSERT_EQ(reportAt(1).earlier.stream, t.s1);
}

TEST(sanitizer_takes_what_a_thread_knows_along_with_what_it_queues) {
  Two t;
  prepare(&t);
  char *other = deviceMemory(KIB);
  orStream_t s2 = newStream();
  ASSERT_OK(orStreamSynchronize(t.s0));
  writes(t.s1, "by the one that waited", other, KIB);
  waitStream(s2, t.s1);
  Step second = {.stream = s2, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
  second.stream = newStream();
  ASSERT_EQ(step(acquiresAndWrites, &t.first, second), 1);
  ASSERT_EQ(reportAt(1).earlier.stream, s2); /* which came after s0's */
}

static void records(Step *s) {
  waits(s);
  s->event = record(s->object ? *(const orStream_t *)s->object : s->stream);
}

TEST(sanitizer_takes_it_along_with_an_event) {
  Two t;
  prepare(&t);
  orStream_t s2 = newStream();
  step(records, &t.first, (Step){.stream = t.s0, .object = &t.s1});
  waitStream(s2, t.s1);
  Step second = {.stream = s2, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
}

/* To wait for a stream puts nothing there. */
TEST(sanitizer_takes_nothing_along_with_a_wait) {
  Two t;
  prepare(&t);
  ASSERT_OK(orStreamSynchronize(t.s0));
  ASSERT_OK(orStreamSynchronize(t.s1));
  ASSERT_OK(orStreamQuery(t.s1));
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 1);
}

TEST(sanitizer_counts_the_host_as_one_when_one_thread_is_left) {
  Two t;
  prepare(&t);
  step(waits, &t.first, (Step){.stream = t.s1});
  orSanitizerObjectGone(&t.second); /* it could not be started */
  ASSERT_OK(orStreamSynchronize(t.s0));
  Step later = {.stream = t.s1, .memory = t.memory};
  char third;
  orSanitizerThreadStarts(&third);
  ASSERT_EQ(step(acquiresAndWrites, &third, later), 0);
}

TEST(sanitizer_gives_all_that_anybody_knows_for_what_cannot_be_followed) {
  Two t;
  prepare(&t);
  step(waits, &t.first, (Step){.stream = t.s0});
  orSanitizerAcquire(NULL);
  ASSERT_EQ(writes(t.s1, "write", t.memory, KIB), 0);
  ASSERT_EQ(step(acquiresAndWrites, &t.second, (Step){.stream = newStream(), .memory = t.memory}),
            1);
}

TEST(sanitizer_gives_it_to_the_last_thread) {
  Two t;
  prepare(&t);
  orSanitizerObjectGone(&t.second);
  step(waitsAndReleases, &t.first, (Step){.stream = t.s0, .object = &t.lock});
  ASSERT_EQ(writes(t.s1, "write", t.memory, KIB), 1);
  writes(t.s0, "write", t.memory, KIB);
  uint64_t before = reportCount();
  orSanitizerThreadStarts(&t.first);
  step(waitsAndReleases, &t.first, (Step){.stream = t.s0, .object = &t.lock});
  orSanitizerAcquire(NULL);
  ASSERT_EQ(writes(newStream(), "last", t.memory, KIB), 0);
  ASSERT_EQ(reportCount(), before);
}

/* What all threads know then is no more than before. */
TEST(sanitizer_keeps_what_another_thread_knows_to_itself) {
  Two t;
  prepare(&t);
  step(waits, &t.first, (Step){.stream = t.s0});
  step(acquires, NULL, (Step){.object = NULL});
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 1);
}

static uint64_t acted_for;
static uint64_t actsFor(void) { return acted_for; }

TEST(sanitizer_lets_a_thread_act_for_another) {
  Two t = {.s0 = defaultOf(0), .s1 = newStream()};
  orSanitizerOptions options = {.size = sizeof options, .thread = actsFor};
  ASSERT_OK(orSanitizerEnable(&options));
  t.memory = deviceMemory(KIB);
  writes(t.s0, "write", t.memory, KIB);
  orSanitizerThreadStarts(&t.first);
  acted_for = orSanitizerThread();
  ASSERT_NE(acted_for, 0);
  step(waits, &t.first, (Step){.stream = t.s0});
  Step engine = {.stream = t.s1, .memory = t.memory};
  orSanitizerThreadStarts(&t.second); /* and it does not begin: the main thread is not alone */
  ASSERT_EQ(step(acquiresAndWrites, NULL, engine), 1);
  step(waits, NULL, (Step){.stream = t.s0});
  ASSERT_EQ(writes(newStream(), "write", t.memory, KIB), 2); /* s1's, and not s0's */
  ASSERT_EQ(reportAt(2).earlier.stream, t.s1);
}

static void frees(Step *s) { ASSERT_OK(orCacheFree(s->memory)); }

/* Whoever had the memory let go of it before it was freed. */
TEST(sanitizer_forgets_what_anybody_knows_of_memory_that_is_freed) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  char first, second;
  sanitize();
  char *memory = block(MIB, s0);
  writes(s1, "write", memory, MIB);
  orSanitizerThreadStarts(&first);
  orSanitizerThreadStarts(&second);
  ASSERT_OK(orStreamSynchronize(s1));
  step(frees, &first, (Step){.memory = memory});
  char *again = block(MIB, s0);
  ASSERT_PTR(again, memory);
  ASSERT_EQ(step(acquiresAndWrites, &second, (Step){.stream = s0, .memory = again}), 0);
}

static void nothing(void *data) { (void)data; }

static void launches(Step *s) { ASSERT_OK(orLaunchHostFunc(s->stream, nothing, NULL)); }

TEST(sanitizer_lets_all_know_what_a_host_function_may_tell) {
  Two t;
  prepare(&t);
  step(launches, &t.first, (Step){.stream = t.s0});
  Step second = {.stream = t.s1, .memory = t.memory};
  ASSERT_EQ(step(acquiresAndWrites, &t.second, second), 0);
}

TEST(sanitizer_knows_no_thread_that_is_older) {
  Two t;
  prepare(&t);
  ASSERT_OK(orSanitizerDisable());
  sanitize();
  writes(t.s0, "write", t.memory, KIB);
  char third;
  orSanitizerThreadStarts(&third);
  step(waits, &t.first, (Step){.stream = t.s0});
  ASSERT_EQ(writes(t.s1, "write", t.memory, KIB), 0);
}

static void hasNoNumber(Step *s) {
  (void)s;
  ASSERT_EQ(orSanitizerThread(), 0);
}

static void endsTwice(Step *s) {
  (void)s;
  ASSERT_NE(orSanitizerThread(), 0);
  orSanitizerThreadEnds();
  ASSERT_EQ(orSanitizerThread(), 0);
}

TEST(sanitizer_follows_a_thread_from_its_beginning_to_its_end) {
  Two t = {.s0 = defaultOf(0)};
  orSanitizerThreadStarts(&t.first); /* it is off */
  step(hasNoNumber, &t.first, (Step){.stream = 0});
  prepare(&t);
  step(endsTwice, &t.first, (Step){.stream = 0});
}

static atomic_int stage;

static void *staysAndWrites(void *given) {
  Step *s = given;
  orSanitizerThreadBegins(s->object);
  atomic_store(&stage, 1);
  awaitInt(&stage, 2);
  s->found = writes(s->stream, "write in a thread", s->memory, KIB);
  orSanitizerThreadEnds();
  return NULL;
}

static pthread_t late_thread;
static Step late;

static void startsAnother(Step *s) {
  late = *s;
  orSanitizerThreadStarts(late.object);
  ASSERT_EQ(pthread_create(&late_thread, NULL, staysAndWrites, &late), 0);
}

/* The main thread is followed then, though it has started nobody. */
TEST(sanitizer_follows_a_thread_that_one_unknown_has_started) {
  orStream_t s0 = defaultOf(0), s1 = newStream();
  char begin;
  sanitize();
  char *memory = deviceMemory(KIB);
  writes(s0, "write", memory, KIB);
  step(startsAnother, NULL, (Step){.stream = s1, .memory = memory, .object = &begin});
  awaitInt(&stage, 1);
  ASSERT_OK(orStreamSynchronize(s0));
  atomic_store(&stage, 2);
  ASSERT_EQ(pthread_join(late_thread, NULL), 0);
  ASSERT_EQ(late.found, 1);
}

/* ---- Many at once ---- */

enum { THREADS = 4, ROUNDS = 300 };

typedef struct Crowd {
  pthread_mutex_t mutex;
  orStream_t streams[THREADS];
  char *memory, begins[THREADS];
} Crowd;

typedef struct Member {
  Crowd *crowd;
  int index;
} Member;

/* All write the same bytes, each on a stream of its own, and wait before the next one may. */
static void *takesTurns(void *given) {
  Member *m = given;
  Crowd *c = m->crowd;
  orSanitizerThreadBegins(&c->begins[m->index]);
  for (int i = 0; i < ROUNDS; i++) {
    pthread_mutex_lock(&c->mutex);
    orSanitizerAcquire(&c->mutex);
    writes(c->streams[m->index], "write", c->memory, KIB);
    ASSERT_OK(orStreamSynchronize(c->streams[m->index]));
    orSanitizerRelease(&c->mutex);
    pthread_mutex_unlock(&c->mutex);
  }
  orSanitizerThreadEnds();
  return NULL;
}

TEST(sanitizer_follows_threads_that_take_turns) {
  Crowd c = {.mutex = PTHREAD_MUTEX_INITIALIZER};
  Member members[THREADS];
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) c.streams[i] = newStream();
  sanitize();
  c.memory = deviceMemory(KIB);
  for (int i = 0; i < THREADS; i++) {
    members[i] = (Member){&c, i};
    orSanitizerThreadStarts(&c.begins[i]);
    ASSERT_EQ(pthread_create(&threads[i], NULL, takesTurns, &members[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) ASSERT_EQ(pthread_join(threads[i], NULL), 0);
  ASSERT_CLEAN();
}
