/*
 * The hang report: what each stream is doing and what it waits for, in words.
 *
 * The only state is the hook for work outside the streams and the function that prints. The report
 * reads one stream after the other, each under its own lock for a few reads (the result is an
 * orSeen). Streams go on meanwhile, so it is accurate for what stands still. A running stream's
 * `head` is its task; the queue of any other does not change under the lock. The cell that a stream
 * waits for is kept by its waiting task, which does not finish under the lock either. Text is made
 * and written with no stream's lock held.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "openreg_package.h"
#include "tools/hang.h"
#include "openreg_schedule.h"
#include "openreg_watchdog.h"

/* ---- text ---- */

typedef struct orText {
  char *data;
  size_t length, room;
  bool incomplete; /* memory was short for some of it */
} orText;

static void grow(orText *t, size_t more) {
  if (t->length + more < t->room) return;
  size_t room = 2 * (t->length + more) + 1024;
  char *data = realloc(t->data, room);
  t->incomplete |= !data;
  if (!data) return;
  t->data = data;
  t->room = room;
}

__attribute__((format(printf, 2, 3))) static void say(orText *t, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  grow(t, (size_t)length);
  if (t->length + (size_t)length >= t->room) return;
  va_start(arguments, format);
  vsnprintf(t->data + t->length, t->room - t->length, format, arguments);
  va_end(arguments);
  t->length += (size_t)length;
}

const char *orStreamNameOf(orStreamName text, orStream_t stream) {
  orStream_t standard = 0;
  int device = orHandleDevice(stream);
  if (orDeviceIsActive(device)) orDeviceDefaultStream(device, &standard);
  if (stream == standard)
    snprintf(text, sizeof(orStreamName), "the default stream of %s:%d", orDevicesName(), device);
  else
    snprintf(text, sizeof(orStreamName), "stream 0x%" PRIx64 " of %s:%d", stream, orDevicesName(),
             device);
  return text;
}

static double seconds(uint64_t ns) { return (double)ns / 1e9; }

/* ---- what a stream is seen to do ---- */

typedef enum orWaitsFor {
  OR_WAITS_NOT,
  OR_WAITS_EVENT,    /* an event recorded on a stream */
  OR_WAITS_EXTERNAL, /* an external event */
  OR_WAITS_DEVICE    /* a vendor's device, for a task that it runs */
} orWaitsFor;

typedef struct orSeen {
  orStream_t handle;
  orStreamState state;
  int priority, worker;
  uint64_t queued, completed, began;
  bool has_task; /* the following describe its next task */
  orTaskKind kind;
  const char *name;
  orWaitsFor waits;
  orEvent_t event;
  orStream_t on; /* the stream of the event */
  uint64_t number;
} orSeen;

/* Lock of the stream held. */
static void seeWait(orSeen *to, const orStream *s, const orTask *task) {
  const orCell *cell = s->waits_for;
  to->waits = task->kind != OR_KIND_WAIT ? OR_WAITS_DEVICE
              : cell->stream             ? OR_WAITS_EVENT
                                         : OR_WAITS_EXTERNAL;
  to->event = cell->event;
  to->on = cell->stream;
  to->number = cell->number;
}

/* False if the stream has no work. */
static bool see(orSeen *to, orStream *s) {
  const orTask *task = NULL;
  orMutexLock(&s->lock);
  *to = (orSeen){.handle = s->last_handle,
                 .state = s->state,
                 .priority = s->priority,
                 .worker = s->worker,
                 .queued = atomic_load_explicit(&s->queued, memory_order_relaxed),
                 .completed = atomic_load_explicit(&s->completed, memory_order_acquire),
                 .began = atomic_load_explicit(&s->began, memory_order_relaxed)};
  uint64_t left = to->queued - to->completed;
  if (s->state == OR_STREAM_RUNNING)
    task = atomic_load_explicit(&s->head, memory_order_relaxed);
  else if (left)
    task = orQueuePeek(&s->out);
  if (task) {
    to->has_task = true;
    to->kind = task->kind;
    to->name = task->name;
    if (s->state == OR_STREAM_WAITING) seeWait(to, s, task);
  }
  orMutexUnlock(&s->lock);
  return left != 0;
}

/* ---- the report ---- */

static const char *kindOf(orTaskKind kind) {
  static const char *const kinds[] = {
      [OR_KIND_KERNEL] = "kernel ", [OR_KIND_HOST_FUNC] = "host function ",
      [OR_KIND_COPY] = "copy ",     [OR_KIND_SET] = "fill ",
      [OR_KIND_RECORD] = "",        [OR_KIND_WAIT] = ""};
  OR_COVERS(kinds, OR_KIND_WAIT + 1);
  return kinds[kind];
}

static void sayWait(orText *t, const orSeen *s) {
  orStreamName name;
  switch (s->waits) {
    case OR_WAITS_EVENT:
      say(t, ": waits for event 0x%" PRIx64 ", recorded as task %" PRIu64 " of %s\n", s->event,
          s->number, orStreamNameOf(name, s->on));
      break;
    case OR_WAITS_EXTERNAL:
      say(t, ": waits for external event 0x%" PRIx64 " of %s:%d, which has not been signalled\n",
          s->event, orDevicesName(), orHandleDevice(s->event));
      break;
    default:
      say(t, ": started, waits for the device to finish it\n");
  }
}

static void sayWhere(orText *t, const orSeen *s) {
  uint64_t now = orNow();
  if (s->worker == OR_HOST)
    say(t, ": on a host thread that waits for it");
  else
    say(t, ": on worker %d", s->worker);
  if (s->began && s->began < now) say(t, " for %.1f s", seconds(now - s->began));
  say(t, "\n");
}

static void sayStream(orText *t, const orSeen *s) {
  static const char *const states[] = {"idle", "ready", "running", "waiting"};
  OR_COVERS(states, OR_STREAM_WAITING + 1);
  orStreamName name;
  say(t, "  %s: %s, priority %d, %" PRIu64 " tasks completed, %" PRIu64 " to go\n",
      orStreamNameOf(name, s->handle), states[s->state], s->priority, s->completed,
      s->queued - s->completed);
  if (!s->has_task) return;
  say(t, "    task %" PRIu64 ", %s%s", s->completed + 1, kindOf(s->kind), s->name);
  if (s->waits != OR_WAITS_NOT)
    sayWait(t, s);
  else if (s->state != OR_STREAM_RUNNING)
    say(t, ": ready for %s\n", orDispatching() ? "the schedule to choose it" : "a worker");
  else
    sayWhere(t, s);
}

typedef struct orSurvey {
  orText *text;
  size_t count; /* streams with work */
} orSurvey;

static void surveyStream(orStream *s, uint64_t queued, void *context) {
  (void)queued;
  orSurvey *survey = context;
  orSeen seen;
  if (!see(&seen, s)) return;
  sayStream(survey->text, &seen);
  survey->count++;
}

static void sayHost(orSleeper *w, void *context) {
  orText *t = context;
  orStreamName name;
  const orCell *cell = w->goal.cell;
  say(t, "  host thread %d: waits for ", w->thread);
  if (cell && cell->stream)
    say(t, "event 0x%" PRIx64 ", recorded as task %" PRIu64 " of %s", cell->event, cell->number,
        orStreamNameOf(name, cell->stream));
  else if (cell)
    say(t, "external event 0x%" PRIx64 ", which has not been signalled", cell->event);
  else if (w->stream)
    say(t, "task %" PRIu64 " of %s", w->goal.count, orStreamNameOf(name, w->stream));
  else
    say(t, "what the schedule has chosen to run");
  say(t, ", for %.1f s\n", seconds(orNow() - w->since));
}

static void saySchedule(orText *t) {
  static const char *const names[] = {
      [orScheduleLate] = "late", [orScheduleEarly] = "early", [orScheduleTape] = "a tape"};
  orSchedulePolicy policy;
  uint64_t seed;
  if (!orDispatching() || orScheduleGet(&policy, &seed)) return;
  say(t, "  schedule: ");
  if (policy == orScheduleSeeded) say(t, "seed %" PRIu64, seed);
  if (names[policy]) say(t, "%s", names[policy]);
  say(t, "; tasks run only while a thread is inside a call\n");
}

static _Atomic(void (*)(orHangSay, void *)) hook;
static _Atomic(int (*)(const char *)) printer;

orError_t orSetHangHook(void (*tell)(orHangSay say, void *report)) {
  void (*none)(orHangSay, void *) = NULL;
  if (!tell) return orFail(orErrorInvalidValue, "orSetHangHook: null function");
  if (!atomic_compare_exchange_strong(&hook, &none, tell))
    return orFail(orErrorAlreadyExists, "orSetHangHook: a hook is set already");
  return orSuccess;
}

orError_t orSetHangPrint(int (*print)(const char *text)) {
  int (*none)(const char *) = NULL;
  if (!print) return orFail(orErrorInvalidValue, "orSetHangPrint: null function");
  if (!atomic_compare_exchange_strong(&printer, &none, print))
    return orFail(orErrorAlreadyExists, "orSetHangPrint: a function is set already");
  return orSuccess;
}

static void sayOutside(void *report, const char *line) { say(report, "  %s\n", line); }

static void sayAll(orText *t) {
  orSurvey survey = {.text = t};
  orWorkerInfo workers = {.size = sizeof workers};
  orStreamForEach(-1, surveyStream, &survey);
  if (!survey.count) say(t, "  no stream of this process has work\n");
  orSleepersEach(sayHost, t);
  void (*tell)(orHangSay, void *) = atomic_load(&hook);
  if (tell) tell(sayOutside, t);
  saySchedule(t);
  if (!orGetWorkerInfo(&workers))
    say(t, "  workers: %d of %d started\n", workers.started, workers.limit);
}

static void makeReport(orText *t, const char *why) {
  say(t, "openreg: hang report%s\n", why);
  sayAll(t);
}

static void writeText(const orText *t) {
  int (*print)(const char *) = atomic_load(&printer);
  if (!t->data || (print && print(t->data))) return;
  ssize_t written = write(STDERR_FILENO, t->data, t->length);
  (void)written; /* a closed stderr is no reason to fail */
}

void orHangPrint(const char *why) {
  orText t = {0};
  makeReport(&t, why);
  writeText(&t);
  if (t.incomplete) orWarn("the hang report is incomplete: no host memory");
  free(t.data);
}

orError_t orHangReport(char **text) {
  OR_TRY(orEnter());
  if (!text) return orFail(orErrorInvalidValue, "orHangReport: null result");
  *text = NULL;
  orText t = {0};
  makeReport(&t, "");
  if (t.incomplete) {
    free(t.data);
    return orFail(orErrorSystem, "no host memory for a hang report");
  }
  *text = t.data;
  return orSuccess;
}
