/*
 * Schedules: what a seed decides is decided alike each time, every order that the program allows
 * comes up, and no other.
 *
 * Kernels note their letter in a log. A schedule runs one at a time, so the log needs no lock.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "gate.h"
#include "openreg_schedule.h"
#include "openreg_watchdog.h"

enum { MOST_LETTERS = 4000 };

static struct {
  char text[MOST_LETTERS + 1];
  int count;
} notes;

static orError_t noteKernel(void *args) {
  if (notes.count < MOST_LETTERS) notes.text[notes.count++] = *(const char *)args;
  return orSuccess;
}

static void note(orStream_t stream, char letter) {
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = noteKernel,
                                         .args = &letter,
                                         .args_size = 1,
                                         .name = "note"}));
}

static void useSeed(uint64_t seed) { ASSERT_OK(orScheduleSet(orScheduleSeeded, seed)); }

/* What has run since the last call. */
static const char *noted(void) {
  static char text[MOST_LETTERS + 1];
  memcpy(text, notes.text, (size_t)notes.count);
  text[notes.count] = 0;
  notes.count = 0;
  return text;
}

static const char *notedInTheEnd(void) {
  ASSERT_OK(orScheduleSet(orScheduleFair, 0));
  return noted();
}

static orEvent_t markOn(orStream_t stream) {
  orEvent_t event = newEvent(0);
  ASSERT_OK(orEventRecord(event, stream));
  return event;
}

/* ---- seeds ---- */

/* Streams, waits and queries by a rule of its own; always the same program. */
static void runProgram(void) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567";
  orStream_t streams[4];
  uint32_t x = 12345;
  for (int i = 0; i < 4; i++) streams[i] = newStreamOn(i % 2);
  for (int i = 0; i < 60; i++) {
    x = x * 1664525 + 1013904223;
    int s = x >> 28 & 3, other = x >> 24 & 3;
    note(streams[s], letters[i]);
    if (x >> 20 & 1) {
      ASSERT_OK(orSetDevice(s % 2));
      orEvent_t event = markOn(streams[s]);
      ASSERT_OK(orStreamWaitEvent(streams[other], event));
      ASSERT_OK(orEventDestroy(event));
    }
    if (i % 7 == 0) orStreamQuery(streams[other]);
    if (i % 20 == 19) ASSERT_OK(orStreamSynchronize(streams[s]));
  }
  for (int i = 0; i < 4; i++) ASSERT_OK(orStreamDestroy(streams[i]));
  ASSERT_OK(orSetDevice(0));
}

TEST(schedule_a_seed_repeats_its_order) {
  char first[MOST_LETTERS + 1], zero[MOST_LETTERS + 1] = "";
  int different = 0;
  for (uint64_t seed = 0; seed < 20; seed++) {
    useSeed(seed);
    runProgram();
    strcpy(first, notedInTheEnd());
    ASSERT_EQ(strlen(first), 60);
    useSeed(seed);
    runProgram();
    ASSERT_STR(notedInTheEnd(), first);
    if (!seed) strcpy(zero, first);
    different += strcmp(zero, first) != 0;
  }
  ASSERT_GT(different, 10);
}

/* A process of its own, whose lanes have run other things before. Even seeds are uniform, odd ones
 * go by priorities. */
TEST(schedule_a_seed_means_the_same_in_every_process) {
  newStream();
  note(newStream(), 'z');
  ASSERT_OK(orDeviceSynchronize());
  noted();
  useSeed(6);
  runProgram();
  ASSERT_STR(notedInTheEnd(), "abcglmoprdehfinjkqstuxGCDINvwyJSzABQREFHKLMTUOY0PV1WXZ234765");
  useSeed(7);
  runProgram();
  ASSERT_STR(notedInTheEnd(), "abcdeghlmoprfijknqstuvwxyzABCEFGHJKLMDINOPQRTUVS1WXZ5Y023467");
}

static char *order_of_child;

/* The freed blocks are poisoned, or not. */
static void runAndFree(void) {
  orStream_t a = newStream(), b = newStream();
  void *block;
  useSeed(6);
  for (int i = 0; i < 20; i++) {
    ASSERT_OK(orCacheMalloc(&block, 512, i % 2 ? a : b)); /* b has poison before any task */
    note(a, (char)('a' + i));
    if (i % 2) ASSERT_OK(orDeviceSynchronize());
    ASSERT_OK(orCacheFree(block));
    if (i % 2) ASSERT_OK(orStreamQuery(a)); /* a point where nothing else can run */
    note(b, (char)('A' + i));
  }
  strcpy(order_of_child, notedInTheEnd());
}

TEST(schedule_a_seed_means_the_same_with_poison) {
  char without[MOST_LETTERS + 1];
  order_of_child =
      mmap(NULL, sizeof without, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT(order_of_child != MAP_FAILED);
  ASSERT_FORK_OK(runAndFree);
  strcpy(without, order_of_child);
  setenv("OPENREG_POISON", "1", 1);
  ASSERT_FORK_OK(runAndFree);
  ASSERT_STR(order_of_child, without);
}

/* One stream is left in its midst until the other is at its end. */
static bool isLeftOnce(const char *order) {
  const char *b = strchr(order, 'b'), *a = b ? strchr(b, 'a') : NULL;
  return b != order && a && !strchr(a, 'b');
}

TEST(schedule_priorities_leave_a_stream_for_long) {
  orStream_t a = newStream(), b = newStream();
  int left[2] = {0};
  for (uint64_t seed = 0; seed < 200; seed++) {
    useSeed(seed);
    for (int i = 0; i < 30; i++) note(a, 'a');
    for (int i = 0; i < 30; i++) note(b, 'b');
    left[seed % 2] += isLeftOnce(notedInTheEnd());
  }
  ASSERT_GT(left[1], 3 * left[0]);
  ASSERT_GE(left[1], 10);
}

TEST(schedule_unordered_streams_run_in_both_orders) {
  orStream_t a = newStream(), b = newStream();
  int first_a = 0;
  for (uint64_t seed = 0; seed < 24; seed++) {
    useSeed(seed);
    note(a, 'a');
    note(b, 'b');
    ASSERT_OK(orStreamSynchronize(b));
    first_a += notedInTheEnd()[0] == 'a';
  }
  ASSERT_GE(first_a, 3);
  ASSERT_LE(first_a, 21);
}

TEST(schedule_every_order_of_three_tasks_comes_up) {
  static const char *const orders[] = {"abc", "acb", "bac", "bca", "cab", "cba"};
  int seen[6] = {0};
  orStream_t streams[] = {newStream(), newStream(), newStreamOn(1)};
  for (uint64_t seed = 0; seed < 200; seed++) {
    useSeed(seed);
    for (int i = 0; i < 3; i++) note(streams[i], (char)('a' + i));
    const char *order = notedInTheEnd();
    for (int i = 0; i < 6; i++) seen[i] += !strcmp(order, orders[i]);
  }
  int total = 0;
  for (int i = 0; i < 6; i++) {
    ASSERT_GE(seen[i], 3);
    total += seen[i];
  }
  ASSERT_EQ(total, 200);
}

enum { MOST_ORDERS = 128, MOST_STEPS = 8 };

/* Every order of some letters that keeps what has to come before what ("ab,bc": a before b, b
 * before c). */
static struct {
  char text[MOST_ORDERS][MOST_STEPS];
  int count, seen[MOST_ORDERS];
} orders;

static bool mayFollow(const char *rules, const char *order, char letter) {
  for (const char *rule = rules; *rule; rule += rule[2] ? 3 : 2)
    if (rule[1] == letter && !strchr(order, rule[0])) return false;
  return !strchr(order, letter);
}

static void listOrders(const char *letters, const char *rules, char *order, size_t length) {
  if (!letters[length]) {
    ASSERT_LT(orders.count, MOST_ORDERS);
    strcpy(orders.text[orders.count++], order);
  }
  for (const char *letter = letters; *letter; letter++)
    if (mayFollow(rules, order, *letter)) {
      order[length] = *letter;
      listOrders(letters, rules, order, length + 1);
      order[length] = 0;
    }
}

static void seeOrder(const char *order) {
  int i = 0;
  while (i < orders.count && strcmp(orders.text[i], order) != 0) i++;
  if (i == orders.count) FAIL("%s is no order that the program allows", order);
  orders.seen[i]++;
}

static void assertEveryOrder(const char *letters, const char *rules, int count, uint64_t seeds,
                             void (*program)(void)) {
  char order[MOST_STEPS] = "";
  listOrders(letters, rules, order, 0);
  ASSERT_EQ(orders.count, count);
  for (uint64_t seed = 0; seed < seeds; seed++) {
    useSeed(seed);
    program();
    seeOrder(notedInTheEnd());
  }
  for (int i = 0; i < count; i++)
    if (!orders.seen[i]) FAIL("%s comes up under no seed", orders.text[i]);
}

/* a then A, b then B, c then C; and B after a. */
static void runThreeStreams(void) {
  static orStream_t a, b, c;
  if (!a) a = newStream(), b = newStream(), c = newStreamOn(1);
  note(a, 'a');
  orEvent_t event = markOn(a);
  note(b, 'b');
  note(c, 'c');
  note(a, 'A');
  ASSERT_OK(orStreamWaitEvent(b, event));
  note(b, 'B');
  note(c, 'C');
  ASSERT_OK(orEventDestroy(event));
}

TEST_WITH_LIMIT(schedule_every_order_of_three_streams_comes_up, 120) {
  assertEveryOrder("aAbBcC", "aA,bB,cC,aB", 75, 6000, runThreeStreams);
}

static void noteHere(char letter) { noteKernel(&letter); }

/* The host's steps 1, 2, 3 come after one call each. */
static void runBesideHost(void) {
  static orStream_t a, b;
  if (!a) a = newStream(), b = newStreamOn(1);
  note(a, 'a');
  noteHere('1');
  note(b, 'b');
  noteHere('2');
  note(a, 'A');
  noteHere('3');
}

TEST_WITH_LIMIT(schedule_every_order_of_tasks_and_the_host_comes_up, 120) {
  assertEveryOrder("aAb123", "12,23,aA,1b,2A", 33, 3000, runBesideHost);
}

/* A host that looks without a call sees the task done, or not. */
TEST(schedule_a_task_may_run_right_after_its_launch_or_not) {
  orStream_t s = newStream();
  int ran = 0;
  for (uint64_t seed = 0; seed < 24; seed++) {
    useSeed(seed);
    note(s, 'a');
    ran += *noted() == 'a';
    notedInTheEnd();
  }
  ASSERT_GE(ran, 3);
  ASSERT_LE(ran, 21);
}

TEST(schedule_a_query_may_come_before_the_task_or_after) {
  orStream_t s = newStream();
  int ready = 0;
  for (uint64_t seed = 0; seed < 24; seed++) {
    useSeed(seed);
    note(s, 'a');
    ready += orStreamQuery(s) == orSuccess;
    ASSERT_OK(orStreamQuery(s));
  }
  ASSERT_GE(ready, 3);
  ASSERT_LE(ready, 21);
}

TEST(schedule_priorities_order_nothing) {
  orStream_t low = newStreamOfPriority(0), high = newStreamOfPriority(-3);
  int low_first = 0;
  for (uint64_t seed = 0; seed < 24; seed++) {
    useSeed(seed);
    note(low, 'l');
    note(high, 'h');
    low_first += notedInTheEnd()[0] == 'l';
  }
  ASSERT_GE(low_first, 3);
  ASSERT_LE(low_first, 21);
}

TEST(schedule_waits_order_streams) {
  orStream_t a = newStream(), b = newStreamOn(1);
  for (uint64_t seed = 0; seed < 50; seed++) {
    useSeed(seed);
    for (int i = 0; i < 20; i++) {
      note(a, 'a');
      ASSERT_OK(orSetDevice(0));
      ASSERT_OK(orStreamWaitEvent(b, markOn(a)));
      note(b, 'b');
      ASSERT_OK(orSetDevice(1));
      ASSERT_OK(orStreamWaitEvent(a, markOn(b)));
    }
    ASSERT_STR(notedInTheEnd(), "abababababababababababababababababababab");
  }
}

/* ---- tapes ---- */

static void useTape(const char *tape) { ASSERT_OK(orScheduleSetTape(tape)); }

static void assertTape(const char *expected) {
  char *tape;
  ASSERT_OK(orScheduleGetTape(&tape));
  ASSERT_STR(tape, expected);
  free(tape);
}

/* The host queues a a b b, and waits. */
static void runTwoByTwo(void) {
  static orStream_t a, b;
  if (!a) a = newStream(), b = newStream();
  note(a, 'a');
  note(a, 'A');
  note(b, 'b');
  note(b, 'B');
  ASSERT_OK(orStreamSynchronize(b));
  ASSERT_OK(orStreamSynchronize(a));
}

TEST(schedule_a_tape_makes_each_choice) {
  static const struct {
    const char *tape, *taken, *order;
  } cases[] = {{"0", "0", "aAbB"},
               {"4:1", "4:1", "bBaA"},
               {"4:0,1", "5:1", "abBA"},
               {"5:1,1", "5:1,1", "abAB"},
               {"5:1,0,1", "5:1", "abBA"},
               {"1", "1", "aAbB"},
               {"0,0,0,0,1,1", "4:1,1", "baAB"},
               {"99", "0", "aAbB"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    useTape(cases[i].tape);
    runTwoByTwo();
    assertTape(cases[i].taken);
    ASSERT_STR(notedInTheEnd(), cases[i].order);
  }
}

/* Not by what comes before its first task. */
TEST(schedule_a_tape_numbers_streams_by_their_first_task) {
  orStream_t a = newStream(), b = newStream();
  useTape("0");
  orEvent_t gate = closeGate(b);
  note(a, 'a');
  note(b, 'b');
  openGate(gate);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_STR(notedInTheEnd(), "ab");
}

static void runManyByTwo(void) {
  static orStream_t a, b;
  if (!a) a = newStream(), b = newStream();
  for (int i = 0; i < 40; i++) note(i % 2 ? a : b, 'x');
  ASSERT_OK(orDeviceSynchronize());
}

TEST(schedule_a_long_tape_comes_back) {
  char tape[128];
  char *taken;
  for (int i = 0; i < 60; i++) memcpy(tape + (size_t)2 * i, i ? ",1" : " 1", 2);
  tape[120] = 0;
  useTape(tape + 1);
  runManyByTwo();
  ASSERT_OK(orScheduleGetTape(&taken));
  ASSERT_GT(strlen(taken), 60);
  useTape(taken);
  runManyByTwo();
  assertTape(taken);
  free(taken);
}

TEST(schedule_bad_tapes_are_refused) {
  static const char *const bad[] = {
      "", ",", "1,", "1,,2", "a", "1:", ":1", "1:2:3", "1 2", "-1", "9999999999"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    ASSERT_REFUSED(orScheduleSetTape(bad[i]), orErrorInvalidValue, "numbers separated by commas");
  ASSERT_REFUSED(orScheduleSetTape(NULL), orErrorInvalidValue, "(null)");
  ASSERT_REFUSED(orScheduleGetTape(NULL), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orScheduleSteps(0, NULL, sizeof(orScheduleStep), 1, NULL), orErrorInvalidValue,
                 "null");
}

TEST(schedule_tape_of_the_environment) {
  setenv("OPENREG_SCHEDULE_TAPE", "5:1,1", 1);
  setenv("OPENREG_SCHEDULE_SEED", "late", 1);
  runTwoByTwo();
  assertTape("5:1,1");
  ASSERT_STR(notedInTheEnd(), "abAB");
}

TEST(schedule_a_bad_tape_of_the_environment_is_none) {
  orSchedulePolicy policy;
  uint64_t seed;
  setenv("OPENREG_SCHEDULE_TAPE", "1,,2", 1);
  newStream();
  ASSERT_OK(orScheduleGet(&policy, &seed));
  ASSERT_EQ(policy, orScheduleFair);
}

TEST(schedule_a_set_of_the_policy_starts_the_tape_anew) {
  useTape("4:1");
  for (int i = 0; i < 2; i++) {
    runTwoByTwo();
    ASSERT_OK(orScheduleSet(orScheduleTape, 0));
    ASSERT_STR(noted(), "bBaA");
  }
}

enum { MOST_CHOICES = 64, STEPS = 4096 };

/* A search over all tapes that leave somebody who could go on `most` times at most. */
typedef struct Search {
  void (*program)(void);
  int most, runs;
} Search;

typedef struct Tape {
  uint32_t choices[MOST_CHOICES], options[MOST_CHOICES], free[MOST_CHOICES];
  int count;
} Tape;

static void runTape(const Search *s, const Tape *given, int length, Tape *made) {
  static orScheduleStep steps[STEPS];
  char text[MOST_CHOICES * 4] = "0";
  size_t at = 0, count;
  for (int i = 0; i < length; i++)
    at += (size_t)sprintf(text + at, "%s%u", i ? "," : "", given->choices[i]);
  useTape(text);
  s->program();
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), STEPS, &count));
  ASSERT_LT(count, STEPS);
  made->count = 0;
  for (size_t i = 0; i < count; i++) {
    if (steps[i].kind != orStepChooses) continue;
    ASSERT_LT(made->count, MOST_CHOICES);
    made->choices[made->count] = steps[i].flags;
    made->options[made->count] = (uint32_t)steps[i].a;
    made->free[made->count++] = (uint32_t)steps[i].b;
  }
}

static void search(Search *s, const Tape *given, int length, int spent) {
  Tape made;
  s->runs++;
  runTape(s, given, length, &made);
  seeOrder(notedInTheEnd());
  for (int i = 0; i < length; i++) ASSERT_EQ(made.choices[i], given->choices[i]);
  for (int at = length; at < made.count; at++)
    for (uint32_t option = 1; option < made.options[at]; option++) {
      int cost = spent + (option >= made.free[at]);
      Tape branch = made;
      branch.choices[at] = option;
      if (cost <= s->most) search(s, &branch, at + 1, cost);
    }
}

static int ordersWith(int most, void (*program)(void), int *runs) {
  int seen = 0;
  Search s = {.program = program, .most = most};
  memset(orders.seen, 0, sizeof orders.seen);
  search(&s, &(Tape){.count = 0}, 0, 0);
  for (int i = 0; i < orders.count; i++) seen += orders.seen[i] != 0;
  *runs = s.runs;
  return seen;
}

/* No more than the program allows, and all of it if enough is. */
TEST_WITH_LIMIT(schedule_tapes_are_all_orders_with_so_many_preemptions, 120) {
  char order[MOST_STEPS] = "";
  int runs;
  ASSERT_OK(orScheduleRecord(1));
  listOrders("aAbB", "aA,bB", order, 0);
  ASSERT_EQ(orders.count, 6);
  ASSERT_EQ(ordersWith(0, runTwoByTwo, &runs), 2);
  ASSERT_EQ(runs, 2);
  ASSERT_EQ(ordersWith(1, runTwoByTwo, &runs), 6);
  ASSERT_EQ(runs, 20);
}

TEST_WITH_LIMIT(schedule_tapes_come_to_every_order_of_tasks_and_the_host, 120) {
  char order[MOST_STEPS] = "";
  int runs;
  ASSERT_OK(orScheduleRecord(1));
  listOrders("aAb123", "12,23,aA,1b,2A", order, 0);
  ASSERT_EQ(ordersWith(6, runBesideHost, &runs), orders.count);
}

TEST(schedule_a_tape_repeats_its_order) {
  Tape made, again;
  ASSERT_OK(orScheduleRecord(1));
  Search s = {.program = runThreeStreams};
  Tape given = {.choices = {0, 1, 0, 2, 1, 0, 1, 1}, .count = 8};
  runTape(&s, &given, 8, &made);
  char first[MOST_LETTERS + 1];
  strcpy(first, notedInTheEnd());
  for (int i = 0; i < 20; i++) {
    runTape(&s, &made, made.count, &again);
    ASSERT_STR(notedInTheEnd(), first);
    ASSERT_EQ(again.count, made.count);
  }
}

/* Marks, and waits that are over, are nobody's choice; a stream that waits is no option. */
TEST(schedule_a_tape_chooses_among_tasks_alone) {
  orStream_t a = newStream(), b = newStream();
  useTape("0");
  ASSERT_OK(orStreamWaitEvent(b, markOn(a)));
  note(a, 'a');
  ASSERT_OK(orStreamWaitEvent(b, markOn(a)));
  note(b, 'b'); /* here the host or a */
  markOn(b);
  note(a, 'A');
  ASSERT_OK(orStreamSynchronize(b)); /* a; then A or b */
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_STR(notedInTheEnd(), "aAb");
}

TEST(schedule_the_record_says_what_happened) {
  static orScheduleStep steps[STEPS];
  static const uint32_t expected[] = {orStepTouches, orStepQueued, orStepPoint, orStepChooses,
                                      orStepRecords, orStepWaits,  orStepPoint, orStepQueued,
                                      orStepPoint,   orStepAsks,   orStepRuns,  orStepAwaits,
                                      orStepRuns,    orStepRuns};
  static const uint32_t halves[] = {1, 0, 0}; /* of the fill alone */
  void *memory;
  size_t count, more;
  ASSERT_OK(orMallocHost(&memory, 64));
  orStream_t a = newStream(), b = newStream();
  orEvent_t event = newEvent(0);
  ASSERT_OK(orScheduleRecord(1));
  useTape("0");
  ASSERT_OK(orMemsetAsync(memory, 1, 64, a));
  ASSERT_OK(orEventRecord(event, a));
  ASSERT_OK(orStreamWaitEvent(b, event));
  note(b, 'b');
  ASSERT_ERROR(orStreamQuery(b), orErrorNotReady);
  ASSERT_OK(orStreamSynchronize(b));
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), STEPS, &count));
  size_t at = 0, ran = 0;
  for (size_t i = 0; i < count; i++) {
    if (at < sizeof expected / sizeof *expected && steps[i].kind == expected[at]) at++;
    if (steps[i].kind == orStepAsks) ASSERT_EQ(steps[i].stream, b);
    if (steps[i].kind == orStepRuns) ASSERT_EQ(steps[i].flags, halves[ran++]);
  }
  ASSERT_EQ(ran, 3);
  ASSERT_EQ(steps[0].kind, orStepTouches);
  ASSERT_EQ(steps[0].a, (uintptr_t)memory);
  ASSERT_EQ(steps[0].b, (uintptr_t)memory + 64);
  ASSERT_EQ(steps[0].flags, orTouchWrites | orTouchPinned);
  ASSERT_EQ(at, sizeof expected / sizeof *expected);
  ASSERT_OK(orScheduleSteps(count, steps, sizeof(orScheduleStep), STEPS, &more));
  ASSERT_EQ(more, 0);
  steps[1].kind = 0;
  ASSERT_OK(orScheduleSteps(count - 1, steps, sizeof(orScheduleStep), 2, &more));
  ASSERT_EQ(more, 1);
  ASSERT_EQ(steps[0].kind, orStepRuns);
  ASSERT_EQ(steps[1].kind, 0); /* no more than there are */
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), 1, &more));
  ASSERT_EQ(more, 1);
  ASSERT_EQ(steps[1].kind, 0); /* nor than there is room for */
  ASSERT_REFUSED(orScheduleSteps(0, steps, 8, STEPS, &more), orErrorInvalidValue, "orScheduleStep");
  ASSERT_OK(orScheduleRecord(0));
  useTape("0");
  note(b, 'b');
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), STEPS, &count));
  ASSERT_EQ(count, 0);
}

static orStream_t asked;

static orError_t askKernel(void *args) {
  (void)args;
  ASSERT_ERROR(orStreamQuery(asked), orErrorNotReady); /* it is its own */
  return orSuccess;
}

static size_t stepsWith(orKernelFn fn, orStepKind kind) {
  static orScheduleStep steps[STEPS];
  size_t count, found = 0;
  useTape("0");
  ASSERT_OK(launchAs(asked, fn, &fn, 0));
  ASSERT_OK(orStreamSynchronize(asked));
  ASSERT_OK(orScheduleSteps(0, steps, sizeof(orScheduleStep), STEPS, &count));
  for (size_t i = 0; i < count; i++) found += steps[i].kind == kind;
  return found;
}

TEST(schedule_a_task_that_asks_is_at_no_point) {
  asked = newStream();
  ASSERT_OK(orScheduleRecord(1));
  ASSERT_EQ(stepsWith(askKernel, orStepPoint), stepsWith(noteKernel, orStepPoint));
  ASSERT_EQ(stepsWith(askKernel, orStepAsks), 0);
}

/* ---- late and early ---- */

TEST(schedule_late_runs_what_is_needed_and_no_more) {
  orStream_t a = newStream(), b = newStream(), c = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  note(c, 'c'); /* used first, so first wherever nothing else decides */
  for (int i = 0; i < 3; i++) note(a, 'a');
  orEvent_t mark = markOn(a);
  note(a, 'x');
  ASSERT_OK(orStreamWaitEvent(b, mark));
  note(b, 'b');
  note(b, 'B');
  ASSERT_STR(noted(), "");
  ASSERT_OK(orStreamSynchronize(b));
  ASSERT_STR(noted(), "aaabB");
  ASSERT_OK(orStreamSynchronize(c));
  ASSERT_STR(noted(), "c");
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_STR(noted(), "x");
}

TEST(schedule_late_events_run_what_is_before_them) {
  orStream_t a = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  note(a, 'a');
  orEvent_t mark = markOn(a);
  note(a, 'b');
  ASSERT_ERROR(orEventQuery(mark), orErrorNotReady);
  ASSERT_STR(noted(), "a");
  ASSERT_OK(orEventSynchronize(mark));
  ASSERT_STR(noted(), "");
  ASSERT_OK(orEventQuery(mark));
  ASSERT_ERROR(orStreamQuery(a), orErrorNotReady);
  ASSERT_OK(orStreamQuery(a));
  ASSERT_STR(noted(), "b");
}

TEST(schedule_early_runs_at_the_launch) {
  orStream_t a = newStream(), b = newStream();
  ASSERT_OK(orScheduleSet(orScheduleEarly, 0));
  note(a, 'a');
  ASSERT_STR(noted(), "a");
  orEvent_t gate = closeGate(a);
  note(a, 'c');
  note(b, 'b');
  ASSERT_STR(noted(), "b");
  openGate(gate);
  ASSERT_OK(orStreamQuery(b));
  ASSERT_STR(noted(), "c");
}

TEST(schedule_a_full_queue_runs) {
  orStream_t a = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  for (int i = 0; i < 3000; i++) note(a, 'a');
  ASSERT_GE(notes.count, 1900);
  ASSERT_LE(notes.count, 2300);
  ASSERT_EQ(strlen(notedInTheEnd()), 3000);
}

/* ---- polling ends ---- */

static void assertPollingEnds(void) {
  orStream_t a = newStream(), b = newStream();
  note(b, 'b');
  for (int i = 0; i < 10; i++) note(a, 'a');
  orEvent_t event = markOn(a);
  ASSERT_OK(orStreamWaitEvent(b, event));
  note(b, 'b');
  int queries = 0;
  while (orEventQuery(event) == orErrorNotReady) queries++;
  ASSERT_LE(queries, 14);
  while (orStreamQuery(b) == orErrorNotReady) queries++;
  ASSERT_LE(queries, 15);
  ASSERT_EQ(strlen(notedInTheEnd()), 12);
}

TEST(schedule_polling_ends) {
  for (uint64_t seed = 0; seed < 50; seed++) {
    useSeed(seed);
    assertPollingEnds();
  }
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  assertPollingEnds();
  ASSERT_OK(orScheduleSet(orScheduleEarly, 0));
  assertPollingEnds();
}

static orError_t askingKernel(void *args) {
  orStream_t *other = *(orStream_t **)args;
  return orStreamQuery(*other) == orErrorNotReady ? orSuccess : orErrorInvalidValue;
}

TEST(schedule_a_task_that_asks_runs_nothing) {
  orStream_t a = newStream(), b = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  note(b, 'b');
  launch(a, askingKernel, &b);
  ASSERT_OK(orStreamSynchronize(a));
  ASSERT_STR(noted(), "");
}

/* ---- what comes from outside ---- */

static void *openFromOutside(void *gate) {
  sleepMs(30);
  openGate(*(orEvent_t *)gate);
  return NULL;
}

static pthread_t later(orEvent_t *gate) {
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, openFromOutside, gate), 0);
  return thread;
}

TEST(schedule_a_host_waits_for_what_comes_from_outside) {
  orStream_t a = newStream();
  for (uint64_t seed = 0; seed < 6; seed++) {
    orEvent_t before = newGate(), again = newGate(), alone = newGate();
    useSeed(seed);
    ASSERT_OK(orStreamWaitEvent(a, before));
    note(a, 'a');
    pthread_t thread = later(&before);
    ASSERT_OK(orStreamSynchronize(a));
    ASSERT_STR(noted(), "a");
    pthread_join(thread, NULL);
    ASSERT_OK(orStreamWaitEvent(a, again));
    note(a, 'b');
    thread = later(&again);
    ASSERT_OK(orDeviceSynchronize());
    ASSERT_STR(noted(), "b");
    pthread_join(thread, NULL);
    thread = later(&alone);
    ASSERT_OK(orEventSynchronize(alone));
    pthread_join(thread, NULL);
  }
}

/* ---- resets, ends, changes ---- */

TEST(schedule_a_reset_drops_what_is_queued) {
  orStream_t a = newStream(), b = newStreamOn(1);
  for (uint64_t seed = 0; seed < 20; seed++) {
    useSeed(seed);
    orEvent_t gate = closeGate(a);
    note(a, 'a');
    orEvent_t event = markOn(a);
    ASSERT_OK(orStreamWaitEvent(b, event));
    note(b, 'b');
    ASSERT_OK(orDeviceReset());
    ASSERT_OK(orEventQuery(event));
    ASSERT_OK(orStreamSynchronize(b));
    openGate(gate);
    note(a, 'c');
    ASSERT_STR(notedInTheEnd(), "bc");
  }
}

TEST(schedule_a_destroyed_stream_ends_its_tasks) {
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  for (int i = 0; i < 5; i++) {
    orStream_t a = newStream();
    note(a, 'a');
    ASSERT_OK(orStreamDestroy(a));
  }
  ASSERT_STR(noted(), "");
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_STR(noted(), "aaaaa");
}

TEST(schedule_changes_over_when_all_has_run) {
  orStream_t a = newStream();
  orSchedulePolicy policy;
  uint64_t seed;
  for (int i = 0; i < 100; i++) {
    atomic_int count = 0;
    for (int k = 0; k < 10; k++) launch(a, countKernel, &count);
    ASSERT_OK(orScheduleSet(orScheduleLate, 3));
    ASSERT_EQ(atomic_load(&count), 10);
    launch(a, countKernel, &count);
    sleepMs(i < 3 ? 5 : 0);
    ASSERT_EQ(atomic_load(&count), 10);
    ASSERT_OK(orScheduleGet(&policy, &seed));
    ASSERT_EQ(policy, orScheduleLate);
    ASSERT_EQ(seed, 3);
    ASSERT_OK(orScheduleSet(orScheduleFair, 0));
    ASSERT_EQ(atomic_load(&count), 11);
    launch(a, countKernel, &count);
    awaitInt(&count, 12); /* by a lane of its own accord */
  }
}

TEST(schedule_switches_over_though_a_stream_waits) {
  orStream_t a = newStream(), b = newStream();
  atomic_int ran = 0;
  for (int policy = orScheduleSeeded; policy <= orScheduleEarly; policy++) {
    atomic_store(&ran, 0);
    ASSERT_OK(orScheduleSwitch((orSchedulePolicy)policy, 7));
    orEvent_t gate = closeGate(a);
    launch(a, countKernel, &ran);
    launch(b, countKernel, &ran);
    ASSERT_OK(orScheduleSwitch(orScheduleLate, 7));
    ASSERT_OK(orScheduleSwitch(orScheduleFair, 7));
    awaitInt(&ran, 1); /* by a lane of its own accord */
    openGate(gate);
    awaitInt(&ran, 2);
  }
  ASSERT_REFUSED(orScheduleSwitch((orSchedulePolicy)-1, 0), orErrorInvalidValue, "policy -1");
}

TEST(schedule_bad_policies_are_refused) {
  uint64_t seed;
  ASSERT_REFUSED(orScheduleSet((orSchedulePolicy)5, 0), orErrorInvalidValue,
                 "policy 5 is out of range: 0 to 4");
  ASSERT_REFUSED(orScheduleGet(NULL, &seed), orErrorInvalidValue, "null");
}

TEST(schedule_runs_what_a_launch_waits_for) {
  orStream_t s = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  note(s, 'a');
  ASSERT_OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = s,
                                         .fn = noteKernel,
                                         .args = "b",
                                         .args_size = 1,
                                         .name = "note",
                                         .flags = orLaunchWaits}));
  ASSERT_STR(noted(), "ab");
}

TEST(schedule_of_the_environment) {
  orSchedulePolicy policy;
  uint64_t seed;
  setenv("OPENREG_SCHEDULE_SEED", "late", 1);
  note(newStream(), 'a');
  sleepMs(5);
  ASSERT_STR(noted(), "");
  ASSERT_OK(orScheduleGet(&policy, &seed));
  ASSERT_EQ(policy, orScheduleLate);
}

TEST(schedule_seed_of_the_environment) {
  setenv("OPENREG_SCHEDULE_SEED", "6", 1);
  runProgram();
  ASSERT_STR(notedInTheEnd(), "abcglmoprdehfinjkqstuxGCDINvwyJSzABQREFHKLMTUOY0PV1WXZ234765");
}

/* ---- several threads: no order is promised, but an end ---- */

static void workOnThread(int thread, void *context) {
  orStream_t mine = newStreamOn(thread % 2);
  _Atomic orStream_t *all = context;
  all[thread] = mine;
  for (int i = 0; i < 40; i++) {
    note(mine, 'x');
    orEvent_t event = newEvent(0);
    if (orEventRecord(event, mine)) continue;
    orStream_t other = all[(thread + 1) % 4];
    if (other) ASSERT_OK(orStreamWaitEvent(other, event));
    if (i % 8 == 0) ASSERT_OK(orStreamSynchronize(mine));
    while (i % 8 == 4 && orEventQuery(event) == orErrorNotReady) sched_yield();
  }
}

TEST(schedule_several_threads_come_to_an_end) {
  for (uint64_t seed = 0; seed < 8; seed++) {
    static _Atomic orStream_t streams[4];
    useSeed(seed);
    runThreads(4, workOnThread, streams);
    ASSERT_EQ(strlen(notedInTheEnd()), 160);
  }
}

/* ---- a schedule begins and ends while another thread is at work: each of its calls comes to its
 * end ---- */

typedef struct Worker {
  atomic_int rounds;
  atomic_int stop;
} Worker;

static void *workOn(void *context) {
  Worker *w = context;
  orStream_t a = newStream(), b = newStream();
  atomic_int ran = 0;
  while (!atomic_load(&w->stop)) {
    orEvent_t event = newEvent(0);
    launch(a, countKernel, &ran);
    ASSERT_OK(orEventRecord(event, a));
    ASSERT_OK(orStreamWaitEvent(b, event));
    launch(b, countKernel, &ran);
    ASSERT_OK(orStreamSynchronize(b));
    launch(a, countKernel, &ran);
    ASSERT_OK(orEventRecord(event, a));
    ASSERT_OK(orEventSynchronize(event));
    ASSERT_OK(orEventDestroy(event));
    event = closeGate(a);
    sched_yield();
    openGate(event);
    ASSERT_OK(orStreamSynchronize(a));
    ASSERT_OK(orEventDestroy(event));
    atomic_fetch_add(&w->rounds, 1);
  }
  return NULL;
}

TEST_WITH_LIMIT(schedule_begins_while_another_thread_works, 20) {
  static const orSchedulePolicy policies[] = {orScheduleLate, orScheduleFair, orScheduleSeeded,
                                              orScheduleFair};
  Worker worker = {0};
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, workOn, &worker), 0);
  for (int i = 0; i < 400; i++) {
    ASSERT_OK(orScheduleSet(policies[i % 4], 7));
    int rounds = atomic_load(&worker.rounds);
    while (atomic_load(&worker.rounds) < rounds + 2) sched_yield();
  }
  atomic_store(&worker.stop, 1);
  pthread_join(thread, NULL);
}

static void *waitForEvent(void *event) {
  ASSERT_OK(orEventSynchronize(*(orEvent_t *)event));
  return NULL;
}

static orError_t signalKernel(void *args) { return orEventSignal(**(orEvent_t **)args, orSuccess); }

static int reportSays(const char *part) {
  char *text;
  ASSERT_OK(orHangReport(&text));
  int says = strstr(text, part) != NULL;
  free(text);
  return says;
}

/* It sleeps when the schedule begins, and what it waits for is a task that only it can make run. */
TEST(schedule_reaches_a_host_that_sleeps_already) {
  orEvent_t event = newGate();
  orStream_t s = newStream();
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, waitForEvent, &event), 0);
  while (!reportSays("  host thread ")) sched_yield();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  launch(s, signalKernel, &event);
  pthread_join(thread, NULL);
}

static Holder held;

static void *waitForStream(void *stream) {
  ASSERT_OK(orStreamSynchronize(*(orStream_t *)stream));
  return NULL;
}

/* A lane runs the task when the schedule begins; the host that comes to wait for it sleeps under
 * the schedule. */
TEST(schedule_notices_what_lanes_still_run) {
  orStream_t s = newStream();
  pthread_t thread;
  hold(s, &held);
  ASSERT_OK(orScheduleSwitch(orScheduleLate, 0));
  ASSERT_EQ(pthread_create(&thread, NULL, waitForStream, &s), 0);
  while (!reportSays("  host thread ")) sched_yield();
  letGo(&held);
  pthread_join(thread, NULL);
}
