/*
 * The hang report: what it says of each kind of wait; and when the watchdog prints it.
 */
#include "openreg_watchdog.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"
#include "later_device.h"
#include "openreg_schedule.h"

/* Good until the next but two. */
static const char *report(void) {
  static char texts[3][1 << 14];
  static int next;
  char *made = NULL, *text = texts[next++ % 3];
  ASSERT_OK(orHangReport(&made));
  snprintf(text, sizeof texts[0], "%s", made);
  free(made);
  return text;
}

static int countOf(const char *part, const char *text) {
  int count = 0;
  while ((text = strstr(text, part))) count++, text++;
  return count;
}

static int hostsIn(const char *text) { return countOf("  host thread ", text); }

static const char *named(orStream_t stream) {
  static char names[4][64];
  static int next;
  char *name = names[next++ % 4];
  int device;
  ASSERT_OK(orStreamGetDevice(stream, &device));
  snprintf(name, sizeof names[0], "stream 0x%llx of openreg:%d", (unsigned long long)stream,
           device);
  return name;
}

static char *format(const char *pattern, ...) __attribute__((format(printf, 1, 2)));
static char *format(const char *pattern, ...) {
  static char texts[4][512];
  static int next;
  char *text = texts[next++ % 4];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof texts[0], pattern, arguments);
  va_end(arguments);
  return text;
}

/* ---- what it says ---- */

TEST(hang_report_of_nothing) {
  ASSERT_CONTAINS(report(),
                  "openreg: hang report\n  no stream of this process has work\n  workers: 0 of ");
  orStream_t s = newStream();
  ASSERT_OK(orLaunchSleep(s, 0));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_CONTAINS(report(), "no stream of this process has work");
  ASSERT_REFUSED(orHangReport(NULL), orErrorInvalidValue, "null");
}

enum { MANY_LINES = 1000 };

static int lines_before;

static void sayMuch(orHangSay say, void *report) {
  for (int i = 0; i < lines_before; i++) say(report, "");
  for (int i = 0; i < MANY_LINES; i++) say(report, "line");
}

/* Also where one ends just where the room for the text did. */
TEST(hang_report_has_every_line_of_the_hook) {
  ASSERT_OK(orSetHangHook(sayMuch));
  ASSERT_ERROR(orSetHangHook(sayMuch), orErrorAlreadyExists);
  for (; lines_before < 7; lines_before++) {
    char *text = NULL;
    ASSERT_OK(orHangReport(&text));
    ASSERT_EQ(countOf("  line\n", text), MANY_LINES);
    free(text);
  }
}

TEST(hang_report_of_an_event_that_nobody_signals) {
  orStream_t s = newStreamOn(1);
  atomic_int ran = 0;
  launch(s, countKernel, &ran);
  orEvent_t gate = closeGate(s);
  launch(s, countKernel, &ran);
  awaitReport(
      format("  %s: waiting, priority 0, 1 tasks completed, 2 to go\n"
             "    task 2, orStreamWaitEvent: waits for external event 0x%llx of openreg:0, "
             "which has not been signalled\n",
             named(s), (unsigned long long)gate));
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_CONTAINS(report(), "no stream of this process has work");
}

TEST(hang_report_of_an_event_on_another_stream) {
  orStream_t a = newStream(), b = newStreamOfPriority(-2);
  orEvent_t gate = closeGate(a), e = newEvent(0);
  ASSERT_OK(orEventRecord(e, a));
  ASSERT_OK(orStreamWaitEvent(b, e));
  awaitReport(
      format("  %s: waiting, priority -2, 0 tasks completed, 1 to go\n"
             "    task 1, orStreamWaitEvent: waits for event 0x%llx, recorded as task 2 of "
             "%s\n",
             named(b), (unsigned long long)e, named(a)));
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(b));
}

TEST(hang_report_of_a_kernel_that_goes_on) {
  orStream_t standard;
  Holder holder = {0};
  ASSERT_OK(orStreamGetDefault(&standard, 0));
  hold(standard, &holder);
  ASSERT_CONTAINS(
      report(),
      "  the default stream of openreg:0: running, priority 0, 0 tasks completed, 1 to go\n"
      "    task 1, kernel test: on worker 0\n");
  letGo(&holder);
  ASSERT_OK(orDeviceSynchronize());
}

TEST(hang_report_where_all_lanes_are_taken) {
  Holder holders[LANE_MOST] = {{0}};
  holdAllLanes(holders);
  orStream_t s = newStream();
  void *p;
  ASSERT_OK(orMalloc(&p, 64));
  ASSERT_OK(orMemsetAsync(p, 0, 64, s));
  ASSERT_CONTAINS(report(), format("  %s: ready, priority 0, 0 tasks completed, 1 to go\n"
                                   "    task 1, fill Memset: ready for a worker\n",
                                   named(s)));
  ASSERT_CONTAINS(report(), format("workers: %d of %d started", laneLimit(), laneLimit()));
  letGoAllLanes(holders);
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(hang_report_of_a_vendors_copy_that_is_not_finished) {
  void *memory, *pinned;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 10, &later));
  ASSERT_OK(orMalloc(&memory, 4096));
  ASSERT_OK(orMallocHost(&pinned, 64));
  orStream_t s = newStream();
  ASSERT_OK(orMemcpyAsync(memory, pinned, 64, orMemcpyDefault, s));
  awaitReport(
      format("  %s: waiting, priority 0, 0 tasks completed, 1 to go\n"
             "    task 1, copy Memcpy HtoD: started, waits for the device to finish it\n",
             named(s)));
  ASSERT_OK(orEventSignal(atomic_load(&asked), orSuccess));
  ASSERT_OK(orStreamSynchronize(s));
}

/* ---- hosts that wait, and schedules ---- */

static void *waitForStream(void *stream) {
  ASSERT_OK(orStreamSynchronize(*(orStream_t *)stream));
  return NULL;
}

static void *waitForEvent(void *event) {
  ASSERT_OK(orEventSynchronize(*(orEvent_t *)event));
  return NULL;
}

static pthread_t start(void *(*body)(void *), void *context) {
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, body, context), 0);
  return thread;
}

/* A host for a stream, one for an event behind the same gate, one for an event that nobody
 * records. */
static void reportHosts(void) {
  atomic_int ran = 0;
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s), e = newEvent(0), lone = newGate();
  launch(s, countKernel, &ran);
  ASSERT_OK(orEventRecord(e, s));
  pthread_t threads[] = {start(waitForStream, &s), start(waitForEvent, &e),
                         start(waitForEvent, &lone)};
  awaitReport(format(": waits for external event 0x%llx, which has not been signalled, for ",
                     (unsigned long long)lone));
  awaitReport(format(": waits for task 3 of %s, for ", named(s)));
  while (hostsIn(report()) < 3) sched_yield();
  awaitReport(format("task 1, orStreamWaitEvent: waits for external event 0x%llx",
                     (unsigned long long)gate));
  openGate(gate);
  openGate(lone);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  ASSERT_EQ(hostsIn(report()), 0);
}

TEST(hang_report_of_hosts_without_a_watchdog) {
  reportHosts();
  ASSERT(!strstr(report(), "schedule"));
}

TEST(hang_report_of_hosts_under_a_schedule) {
  for (int policy = orScheduleSeeded; policy <= orScheduleEarly; policy++) {
    ASSERT_OK(orScheduleSet((orSchedulePolicy)policy, 7));
    reportHosts();
    ASSERT_CONTAINS(report(), policy == orScheduleSeeded ? "  schedule: seed 7; "
                              : policy == orScheduleLate ? "  schedule: late; "
                                                         : "  schedule: early; ");
  }
}

static Holder held;

static void *launchHolder(void *stream) {
  hold(*(orStream_t *)stream, &held);
  return NULL;
}

/* The call that queued it runs it. */
TEST(hang_report_of_a_host_in_a_call_that_is_a_point) {
  orStream_t a = newStream(), b = newStream();
  ASSERT_OK(orScheduleSet(orScheduleLate, 0));
  ASSERT_OK(orLaunchSleep(b, 0));
  awaitReport("task 1, kernel _sleep: ready for the schedule to choose it\n");
  ASSERT_OK(orScheduleSet(orScheduleEarly, 0));
  pthread_t thread = start(launchHolder, &a);
  awaitReport(": waits for what the schedule has chosen to run, for ");
  awaitReport("    task 1, kernel test: on worker 0\n");
  letGo(&held);
  pthread_join(thread, NULL);
}

/* Reports while streams of all kinds go on. */
static atomic_int done;

static void workOrReport(int thread, void *context) {
  (void)context;
  if (thread == 0) {
    while (atomic_load(&done) < 3) ASSERT_CONTAINS(report(), "workers: ");
    return;
  }
  orStream_t a = newStream(), b = newStream();
  orEvent_t e = newEvent(0), back = newEvent(0);
  atomic_int ran = 0;
  for (uint32_t i = 1; i <= 400; i++) {
    launch(a, countKernel, &ran);
    ASSERT_OK(orEventRecord(e, a));
    ASSERT_OK(orStreamWaitEvent(b, e));
    ASSERT_OK(orEventRecord(back, b));
    ASSERT_OK(orStreamWaitEvent(a, back));
    if (i % 100 == 0) ASSERT_OK(orStreamSynchronize(a));
  }
  ASSERT_OK(orStreamSynchronize(b));
  ASSERT_EQ(ran, 400);
  atomic_fetch_add(&done, 1);
}

TEST_WITH_LIMIT(hang_report_while_all_goes_on, 60) { runThreads(4, workOrReport, NULL); }

/* Each task takes a chunk of the queue: whenever one has run, the next is in another chunk. */
static void launchLargeOrReport(int thread, void *args) {
  if (thread == 0) {
    while (!atomic_load(&done)) awaitReport("workers: ");
    return;
  }
  orLaunch large = {.size = sizeof large, .fn = countKernel, .args = args, .name = "large"};
  large.args_size = OR_MAX_ARGS;
  large.stream = newStream();
  for (int i = 1; i <= 300; i++) {
    ASSERT_OK(orLaunchKernelEx(&large));
    if (i % 10 == 0) ASSERT_OK(orStreamSynchronize(large.stream));
  }
  atomic_store(&done, 1);
}

TEST(hang_report_while_a_schedule_goes_on) {
  static _Alignas(16) char args[OR_MAX_ARGS];
  atomic_int ran = 0;
  *(atomic_int **)args = &ran;
  ASSERT_OK(orScheduleSet(orScheduleSeeded, 2));
  runThreads(2, launchLargeOrReport, args);
  ASSERT_EQ(ran, 300);
}

/* ---- the watchdog ---- */

static int reportsIn(const char *text) { return countOf("openreg: hang report", text); }

/* A file for stderr that can be read while it is written. */
static FILE *said;
static char saidText[1 << 16];

static void listen(void) {
  said = tmpfile();
  setvbuf(said, NULL, _IONBF, 0);
  dup2(fileno(said), STDERR_FILENO);
}

static const char *heard(void) {
  ssize_t length = pread(fileno(said), saidText, sizeof saidText - 1, 0);
  saidText[length > 0 ? length : 0] = 0;
  return saidText;
}

/* Each is written at once. */
static void awaitReports(int count) {
  while (reportsIn(heard()) < count) sleepMs(2);
}

static void watch(const char *limit) {
  clearSettings();
  setenv("OPENREG_WATCHDOG_S", limit, 1);
  listen();
}

static _Atomic int printed;
static _Atomic bool prints;

static int print(const char *text) {
  printed += reportsIn(text);
  return prints;
}

TEST(watchdog_writes_what_the_callers_function_does_not_print) {
  ASSERT_ERROR(orSetHangPrint(NULL), orErrorInvalidValue);
  ASSERT_OK(orSetHangPrint(print));
  ASSERT_ERROR(orSetHangPrint(print), orErrorAlreadyExists);
  watch("0.1");
  orStream_t s = newStream();
  for (int i = 1; i <= 2; i++) {
    prints = i == 1;
    orEvent_t gate = closeGate(s);
    while (printed < i) sleepMs(2);
    if (!prints) awaitReports(1);
    openGate(gate);
    ASSERT_OK(orStreamSynchronize(s));
    ASSERT_EQ(reportsIn(heard()), i - 1);
  }
}

TEST(watchdog_prints_a_stall_once) {
  watch("0.2");
  orStream_t a = newStream(), b = newStream();
  orEvent_t gate = closeGate(a), e = newEvent(0);
  ASSERT_OK(orEventRecord(e, a));
  ASSERT_OK(orStreamWaitEvent(b, e));
  awaitReports(1);
  ASSERT_CONTAINS(heard(),
                  "openreg: hang report: a stream with work has finished no task for 0.2 s "
                  "(OPENREG_WATCHDOG_S)\n");
  ASSERT_CONTAINS(heard(), "which has not been signalled");
  ASSERT_CONTAINS(heard(), format("recorded as task 2 of %s", named(a)));
  sleepMs(600);
  ASSERT_EQ(reportsIn(heard()), 1);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(b));
  gate = closeGate(a); /* another stall */
  awaitReports(2);
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(a));
}

static double secondsIn(const char *text) {
  const char *told = strstr(text, "kernel test: on worker 0 for ");
  double seconds = -1;
  ASSERT(told && sscanf(told, "kernel test: on worker 0 for %lf s", &seconds) == 1);
  ASSERT(seconds >= 0);
  return seconds;
}

/* The report of the stall may come before the kernel begins, where the machine is busy. */
TEST(watchdog_tells_how_long_a_kernel_runs) {
  watch("0.2");
  Holder holder = {0};
  hold(newStream(), &holder);
  awaitReports(1);
  while (secondsIn(report()) < 0.2) sleepMs(10);
  letGo(&holder);
  ASSERT_OK(orDeviceSynchronize());
}

/* No stream has work, and no lane was ever started. */
TEST(watchdog_tells_of_a_host_that_waits) {
  watch("0.05");
  orEvent_t event = newGate();
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, waitForEvent, &event), 0);
  awaitReports(1);
  ASSERT_CONTAINS(heard(), "hang report: a host thread has waited for 0.05 s");
  ASSERT_CONTAINS(heard(),
                  format(": waits for external event 0x%llx, which has not been signalled, "
                         "for ",
                         (unsigned long long)event));
  ASSERT_CONTAINS(heard(), "  host thread ");
  sleepMs(200);
  ASSERT_EQ(reportsIn(heard()), 1);
  openGate(event);
  pthread_join(thread, NULL);
}

TEST(watchdog_tells_what_stream_a_host_waits_for) {
  watch("0.05");
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s), e = newEvent(0);
  ASSERT_OK(orEventRecord(e, s));
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, NULL, waitForEvent, &e), 0);
  awaitReports(1);
  while (!strstr(report(), "host thread")) sched_yield();
  ASSERT_CONTAINS(report(), format(": waits for event 0x%llx, recorded as task 2 of %s, for ",
                                   (unsigned long long)e, named(s)));
  openGate(gate);
  pthread_join(thread, NULL);
  ASSERT(!strstr(report(), "host thread"));
}

TEST(watchdog_is_silent_while_all_goes_on) {
  watch("10");
  orStream_t s = newStream();
  for (int i = 0; i < 20; i++) {
    ASSERT_OK(orLaunchSleep(s, 10000000));
    ASSERT_OK(orStreamSynchronize(s));
  }
  ASSERT_STR(heard(), "");
}

TEST(watchdog_tells_of_a_host_under_a_schedule) {
  watch("0.05");
  ASSERT_OK(orScheduleSet(orScheduleSeeded, 3));
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s);
  pthread_t thread = start(waitForStream, &s);
  awaitReports(1);
  ASSERT_CONTAINS(heard(), "hang report: a host thread has waited for 0.05 s");
  ASSERT_CONTAINS(heard(), format(": waits for task 1 of %s, for ", named(s)));
  ASSERT_CONTAINS(heard(), "which has not been signalled");
  openGate(gate);
  pthread_join(thread, NULL);
}

/* ---- the signal ---- */

static atomic_int handled;

static void countSignal(int number) { atomic_fetch_add(&handled, number == SIGUSR1); }
static void countSignalInfo(int number, siginfo_t *info, void *context) {
  atomic_fetch_add(&handled, number == SIGUSR1 && info->si_pid == getpid() && context);
}

static void askBySignal(void) {
  clearSettings();
  setenv("OPENREG_WATCHDOG_SIGNAL", "USR1", 1);
  listen();
  orStream_t s = newStream();
  orEvent_t gate = closeGate(s); /* starts the first lane */
  while (!strstr(report(), "waiting")) sched_yield();
  for (int i = 1; i <= 3; i++) {
    raise(SIGUSR1);
    awaitReports(i);
  }
  ASSERT_CONTAINS(
      heard(),
      "openreg: hang report: asked for by a signal (OPENREG_WATCHDOG_SIGNAL)\n  stream 0x");
  openGate(gate);
  ASSERT_OK(orStreamSynchronize(s));
}

TEST(watchdog_answers_a_signal) { askBySignal(); }

TEST(watchdog_calls_the_handler_that_was_there) {
  signal(SIGUSR1, countSignal);
  askBySignal();
  ASSERT_EQ(handled, 3);
}

TEST(watchdog_calls_the_handler_that_was_there_with_what_it_wants) {
  struct sigaction action = {.sa_flags = SA_SIGINFO};
  action.sa_sigaction = countSignalInfo;
  sigaction(SIGUSR1, &action, NULL);
  askBySignal();
  ASSERT_EQ(handled, 3);
}

/* A forked child has no watchdog: the signal does what it would have done. */
static void raiseInChild(void) {
  raise(SIGUSR1);
  _exit(3);
}

TEST(watchdog_leaves_the_signal_of_a_forked_child_alone) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer calls no handler in a forked child of several threads");
#endif
  askBySignal();
  int status = forkAndRun(raiseInChild);
  ASSERT(WIFSIGNALED(status));
  ASSERT_EQ(WTERMSIG(status), SIGUSR1);
  ASSERT_EQ(reportsIn(heard()), 3);
}

TEST(watchdog_takes_no_signal_unless_asked_to) {
  clearSettings();
  signal(SIGUSR1, countSignal);
  ASSERT_OK(orLaunchSleep(newStream(), 0));
  ASSERT_OK(orDeviceSynchronize());
  struct sigaction now;
  sigaction(SIGUSR1, NULL, &now);
  ASSERT(now.sa_handler == countSignal);
}

/* ---- leaving ---- */

HELPER(watchdog_leaver) {
  setenv("OPENREG_WATCHDOG_S", "0.001", 1);
  closeGate(newStream());
  sleepMs(3);
  exit(0);
}

TEST_WITH_LIMIT(watchdog_does_not_keep_a_process, 60) {
  char text[1 << 14];
  for (int i = 0; i < 20; i++) ASSERT_EQ(runHelper("watchdog_leaver", text, sizeof text), 0);
}
