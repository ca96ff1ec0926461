/*
 * What each kind of task does when it is run, by a worker or by a host thread that waits for it, or
 * cancelled.
 *
 * Kernels, copies and fills go through the device's factory. The simulated device finishes them
 * before it returns. A vendor's may return orErrorNotReady and complete the event it was given: the
 * task then waits for the event's cell, as a stream waits for an event, and holds no worker.
 * `completion` marks a task that has started, which is not started again.
 *
 * The thread-locals describe the task that this thread runs, for orMapForKernel, the caching
 * allocator and the refusals.
 */
#include <stdio.h>
#include <string.h>

#include "device/pinned_alias.h"
#include "openreg_package.h"
#include "stream/stream.h"
#include "openreg_operator.h"
#include "openreg_schedule.h"

static _Thread_local struct {
  orStream *stream;
  orTask *task; /* may be run in two halves */
  uint64_t number;
  char message[256];
} running;

bool orTaskCurrent(orStream_t *stream, uint64_t *number) {
  if (!running.stream) return false;
  *stream = running.stream->last_handle;
  *number = running.number;
  return true;
}

orStream *orTaskStream(void) { return running.stream; }

orStream_t orGetTaskStream(void) {
  return running.stream && orProcessTask() == OR_TASK_KERNEL ? running.stream->last_handle : 0;
}

/* `head` is the task that runs. */
const char *orTaskName(void) {
  const orTask *t = running.stream && orProcessTask() != OR_TASK_NONE
                        ? atomic_load_explicit(&running.stream->head, memory_order_relaxed)
                        : NULL;
  return t ? t->name : NULL;
}

void orSetTaskErrorMessage(const char *message) {
  snprintf(running.message, sizeof running.message, "%s", message ? message : "");
}

/* A vendor's runtime may require its own threads. -1: host memory. */
bool orTaskAnyThread(int device) {
  return device < 0 || orDeviceAt(device)->factory == &orSimulatedFactory;
}

typedef struct orOperatorArgs {
  const orOperatorCall *call;
  void *owner;
  void (*drop)(void *owner);
} orOperatorArgs;

/* ---- halves ---- */

orPart orTaskPart(void) {
  orTask *t = running.task;
  const orDispatcher *d = orDispatching();
  if (OR_LIKELY(!t || (!t->split && !d))) return orPartWhole;
  if (t->split) return orPartSecond;
  if (t->internal || !d->splits()) return orPartWhole;
  t->split = true;
  return orPartFirst;
}

/* Sets `bytes` to the length of this part and returns its offset. */
static size_t cutBytes(size_t *bytes) {
  size_t first = *bytes / 2 & ~(size_t)7;
  orPart part = first ? orTaskPart() : orPartWhole;
  if (part == orPartFirst) *bytes = first;
  if (part == orPartSecond) *bytes -= first;
  return part == orPartSecond ? first : 0;
}

/* ---- the bodies ---- */

static orError_t runOperator(orTask *t, orDevice *d) {
  const orOperatorCall *call = ((const orOperatorArgs *)orTaskArgs(t))->call;
  return call->kernel->run(d->desc.self, call, t->done);
}

static orError_t runKernel(orTask *t, orDevice *d) {
  if (OR_LIKELY(!d || d->factory == &orSimulatedFactory)) return t->u.kernel(orTaskArgs(t));
  if (t->is_operator) return runOperator(t, d);
  orKernel k = {t->u.kernel, orTaskArgs(t), t->name};
  return d->factory->compute(d->desc.self, &k, t->done);
}

static orError_t runCopy(orTask *t, orDevice *d) {
  const orCopyArgs *c = &t->u.copy;
  const char *src = c->src ? orAliasOf(c->src) : orTaskArgs(t);
  char *dst = orAliasOf(c->dst);
  size_t bytes = c->bytes;
  /* If source and destination overlap, one half would overwrite what the other reads. */
  bool apart = (size_t)(dst - src) >= bytes && (size_t)(src - dst) >= bytes;
  size_t from = apart ? cutBytes(&bytes) : 0;
  src += from;
  dst += from;
  if (d) return d->factory->copy(d->desc.self, dst, src, bytes, c->kind, t->done);
  orCopyBytes(dst, src, bytes);
  return orSuccess;
}

static orError_t runSet(orTask *t, orDevice *d) {
  const orSetArgs *c = &t->u.set;
  size_t bytes = c->bytes;
  char *dst = (char *)c->dst + cutBytes(&bytes);
  if (d) return d->factory->set(d->desc.self, dst, c->value, bytes, t->done);
  memset(orAliasOf(dst), c->value, bytes);
  return orSuccess;
}

static orError_t runBody(orTask *t, orDevice *d) {
  switch (t->kind) {
    case OR_KIND_KERNEL:
      return runKernel(t, d);
    case OR_KIND_COPY:
      return runCopy(t, d);
    case OR_KIND_SET:
      return runSet(t, d);
    case OR_KIND_HOST_FUNC:
      t->u.host(t->user_data);
      return orSuccess;
    default:
      return orSuccess;
  }
}

/* The device whose factory does the work; null for host memory and host functions. */
static orDevice *workDevice(const orTask *t, const orStream *s) {
  switch (t->kind) {
    case OR_KIND_KERNEL:
      return orDeviceAt(s->device);
    case OR_KIND_COPY:
      return orDeviceAt(t->u.copy.device);
    case OR_KIND_SET:
      return orDeviceAt(t->u.set.device);
    default:
      return NULL;
  }
}

/* ---- run ---- */

static void letGo(orTask *t) {
  orMutexAssertNone();
  if (t->done) orEventEndTask(t->done);
  if (t->completion) orCellRelease(t->completion);
  if (t->destroy) orCallDestroy(t->destroy, orTaskArgs(t));
}

/* Without this, a waiting thread would use the task's results as written. */
static void noteNotRun(const orTask *t) {
  if (t->was_cancelled) *t->was_cancelled = true;
}

static __attribute__((cold)) bool isInjected(orTask *t, orStream *s) {
  orProbe probe = {.slot = s, .task = t};
  orProbeCall(OR_PROBE_INJECT, &probe);
  if (probe.fails) noteNotRun(t);
  return probe.fails != NULL;
}

static orError_t start(orTask *t, orStream *s) {
  orMutexAssertNone();
  orDevice *d = workDevice(t, s);
  if (d && d->factory != &orSimulatedFactory) {
    orError_t error = orEventMakeCompletion(s->device, t->name, &t->done, &t->completion);
    if (error) {
      noteNotRun(t);
      return error;
    }
  }
  orProcessSetTask(t->kind == OR_KIND_HOST_FUNC ? OR_TASK_HOST_FUNC : OR_TASK_KERNEL);
  running.task = t->done ? NULL : t;
  orError_t error = runBody(t, d);
  running.task = NULL;
  orProcessSetTask(OR_TASK_NONE);
  if (OR_UNLIKELY(t->done && error == orErrorNotReady))
    orFailureForgetCause(); /* its event completes it, and has no cause */
  return error;
}

/* If a device is lost, note it there: a copy may run on a stream of another device. */
static void noteFailure(const orTask *t, const orStream *s, orError_t error) {
  const orDevice *d = workDevice(t, s);
  if (!orErrorIsKnown(error)) {
    snprintf(running.message, sizeof running.message, "it returned %d, which is no orError_t",
             (int)error);
    error = orErrorLaunchFailure;
  }
  if (error == orErrorDeviceLost && d && d->desc.index != s->device) {
    orDeviceNoteFailure(d->desc.index, error, t->name, running.message);
    snprintf(running.message, sizeof running.message, "%s:%d is lost", orDevicesName(),
             d->desc.index);
    error = orErrorLaunchFailure;
  }
  orDeviceNoteFailure(s->device, error, t->name, running.message);
}

/* Runs kernels, copies, fills and host functions. False if the task runs again later, and the
 * stream is no longer the worker's: after its first half, or while a vendor's device runs it. */
static bool runWork(orTask *t, orStream *s, uint64_t number, int worker) {
  uint64_t began = t->completion || t->split ? t->began : orProbeOn(OR_PROBE_RAN) ? orNow() : 0;
  uint64_t ended = 0;
  orError_t error = orErrorNotReady;
  bool is_second = t->split;
  running.message[0] = 0;
  if (!t->completion) {
    bool injected = OR_UNLIKELY(t->fault && !is_second) && isInjected(t, s);
    error = injected ? orSuccess : start(t, s);
  }
  if (OR_UNLIKELY(t->split && !is_second && !error)) {
    t->began = began;
    orWorkerGiveBack(s);
    return false;
  }
  if (error == orErrorNotReady && t->completion) {
    t->began = began;
    if (!orCellWaitOrPark(t->completion, s)) return false;
    error = t->completion->status;
    ended = t->completion->time_ns;
    if (began && t->completion->began_ns) began = t->completion->began_ns;
    if (OR_UNLIKELY(t->completion->message != NULL)) orSetTaskErrorMessage(t->completion->message);
  }
  if (OR_UNLIKELY(error == orErrorNotReady))
    error = orErrorLaunchFailure; /* the other has a meaning for callers */
  if (OR_UNLIKELY(error)) noteFailure(t, s, error);
  orFailureForgetCause(); /* the task did not fail */
  if (OR_UNLIKELY(began))
    OR_PROBE(OR_PROBE_RAN, .slot = s, .task = t, .number = number, .worker = worker, .began = began,
             .ended = ended ? ended : orNow());
  return true;
}

bool orTaskRun(orStream *s, orTask *t, uint64_t number, int worker) {
  bool finished = true;
  running.stream = s;
  running.number = number;
  switch (t->kind) {
    case OR_KIND_RECORD:
      orCellComplete(t->u.cell, orSuccess);
      orCellRelease(t->u.cell);
      break;
    case OR_KIND_WAIT:
      finished = orCellWaitOrPark(t->u.cell, s);
      if (finished) orCellRelease(t->u.cell);
      break;
    default:
      finished = runWork(t, s, number, worker);
  }
  if (finished) letGo(t);
  running.stream = NULL;
  return finished;
}

void orTaskCancel(orTask *t) {
  noteNotRun(t);
  if (t->kind == OR_KIND_RECORD) orCellComplete(t->u.cell, orSuccess);
  if (t->kind == OR_KIND_RECORD || t->kind == OR_KIND_WAIT) orCellRelease(t->u.cell);
  letGo(t);
}

/* ---- public: launches ---- */

static orError_t checkAccess(const orLaunch *l, const orAccess *a) {
  orRegion r;
  if (!a->bytes) return orSuccess;
  if (!orRegionFind(a->address, &r))
    return orFail(orErrorInvalidValue, "kernel %s: %p is not allocated memory", l->name,
                  a->address);
  size_t offset = (size_t)((const char *)a->address - (const char *)r.base);
  if (a->bytes > r.size - offset)
    return orFail(orErrorInvalidValue,
                  "kernel %s: [%p, +%zu) ends %zu bytes past its allocation [%p, +%zu)", l->name,
                  a->address, a->bytes, a->bytes - (r.size - offset), r.base, r.size);
  return orSuccess;
}

enum { OR_LAUNCH_FLAGS = orLaunchAnyThread | orLaunchAwaited | orLaunchWaits | orLaunchTold };

static orError_t checkLaunch(const orLaunch *l) {
  if (!l->fn || !l->name)
    return orFail(orErrorInvalidValue, "orLaunch: a function and a name are required");
  if (l->flags & ~OR_LAUNCH_FLAGS)
    return orFail(orErrorInvalidValue, "kernel %s: flags 0x%x: allowed are 0x%x", l->name, l->flags,
                  OR_LAUNCH_FLAGS);
  if (l->args_size > OR_MAX_ARGS || (l->args_size && !l->args))
    return orFail(orErrorInvalidValue,
                  "kernel %s: %zu bytes of arguments at %p: allowed are at most %u, not at null",
                  l->name, l->args_size, l->args, OR_MAX_ARGS);
  if (l->access_count && !l->accesses)
    return orFail(orErrorInvalidValue, "kernel %s: %zu accesses at a null pointer", l->name,
                  l->access_count);
  for (size_t i = 0; i < l->access_count; i++) OR_TRY(checkAccess(l, &l->accesses[i]));
  return orSuccess;
}

/* A process that is exiting refuses launches that wait, until its end. */
static bool isRefused(const orLaunch *l, const orStream *s) {
  bool waits = l->flags & orLaunchWaits || orLaunchesBlock();
  return waits && !s->capturing && orProcessExiting();
}

orError_t orLaunchKernelEx(const orLaunch *given) {
  orStream *s;
  orTask *t;
  orLaunch room;
  const orLaunch *l = OR_VERSIONED(orLaunch, given, &room, name);
  if (OR_UNLIKELY(!l)) return orErrorInvalidValue;
  if (l->queued) *l->queued = 0;
  OR_TRY(orEnterBlocking());
  OR_TRY(checkLaunch(l));
  if (!(l->flags & orLaunchTold))
    OR_PROBE(OR_PROBE_ACCESS, .call = l->name, .stream = l->stream, .accesses = l->accesses,
             .count = l->access_count);
  OR_TRY(orStreamBegin(l->stream, true, l->args_size, &s, &t));
  if (OR_UNLIKELY(l->flags & orLaunchWaits) && s->capturing)
    return orCaptureRefuse(s, l->name, "it waits for its result");
  t->kind = OR_KIND_KERNEL;
  t->name = l->name;
  t->destroy = l->drop;
  t->u.kernel = l->fn;
  t->any_thread = l->flags & orLaunchAnyThread && orTaskAnyThread(s->device);
  t->awaited = l->flags & orLaunchAwaited;
  if (l->args_size) memcpy(orTaskArgs(t), l->args, l->args_size);
  if (l->queued) *l->queued = !isRefused(l, s);
  return orStreamSubmit(s, t, l->flags & orLaunchWaits ? OR_WAIT_RUN : OR_WAIT_NOT);
}

/* ---- public: a device's own kernels ---- */

static orError_t checkOperator(const orOperatorCall *call, int device) {
  const orDeviceFactory *f = orDeviceAt(device)->factory;
  const orOperatorKernel *k = call->kernel;
  if (k >= f->operators && k < f->operators + f->operator_count) return orSuccess;
  return orFail(orErrorInvalidValue,
                "the operator kernel at %p is not one of the %zu of device factory \"%s\"",
                (const void *)k, f->operator_count, f->name);
}

orError_t orAcceptsOperator(int *accepts, const orOperatorCall *call) {
  int device;
  if (!accepts || !call)
    return orFail(orErrorInvalidValue, "orAcceptsOperator: an argument is null");
  *accepts = 0;
  OR_TRY(orEnter());
  OR_TRY(orStreamGetDevice(call->stream, &device));
  OR_TRY(checkOperator(call, device));
  const orOperatorKernel *k = call->kernel;
  *accepts = !k->accepts || k->accepts(orDeviceAt(device)->desc.self, call) != 0;
  return orSuccess;
}

static void destroyOperator(void *args) {
  const orOperatorArgs *a = args;
  if (a->drop) a->drop(a->owner);
}

orError_t orLaunchOperator(const orOperatorCall *call, const char *name, void *owner,
                           void (*drop)(void *owner), int *queued) {
  orStream *s;
  orTask *t;
  int device;
  if (queued) *queued = 0;
  if (!call) return orFail(orErrorInvalidValue, "orLaunchOperator: call is null");
  OR_TRY(orEnterBlocking());
  OR_TRY(orStreamGetDevice(call->stream, &device));
  OR_TRY(checkOperator(call, device));
  OR_TRY(orStreamBegin(call->stream, true, sizeof(orOperatorArgs), &s, &t));
  t->kind = OR_KIND_KERNEL;
  t->name = name ? name : call->kernel->name;
  t->destroy = destroyOperator;
  t->is_operator = true;
  *(orOperatorArgs *)orTaskArgs(t) = (orOperatorArgs){call, owner, drop};
  if (queued) *queued = s->capturing || !(orLaunchesBlock() && orProcessExiting());
  return orStreamSubmit(s, t, OR_WAIT_NOT);
}

static orError_t sleepKernel(void *args) {
  orSleep(*(const uint64_t *)args);
  return orSuccess;
}

orError_t orLaunchSleep(orStream_t stream, uint64_t nanoseconds) {
  return orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                      .stream = stream,
                                      .fn = sleepKernel,
                                      .args = &nanoseconds,
                                      .args_size = sizeof nanoseconds,
                                      .name = "_sleep",
                                      .flags = orLaunchTold});
}

orError_t orLaunchHostFunc(orStream_t stream, void (*fn)(void *), void *user_data) {
  orStream *s;
  orTask *t;
  OR_TRY(orEnterBlocking());
  if (!fn) return orFail(orErrorInvalidValue, "orLaunchHostFunc: null function");
  OR_TRY(orStreamBegin(stream, true, 0, &s, &t));
  t->kind = OR_KIND_HOST_FUNC;
  t->name = "orLaunchHostFunc";
  t->u.host = fn;
  t->user_data = user_data;
  /* A host function may pass anything to the host, so all before it counts as acquired. */
  if (!s->capturing)
    OR_PROBE(OR_PROBE_HOST_ACQUIRES, .stream = s->last_handle, .kind = OR_KIND_HOST_FUNC,
             .everybody = true);
  orStreamCommit(s, t);
  orDispatchPoint();
  return orSuccess;
}

/* ---- public: addresses ---- */

orError_t orMapForKernel(void **address, const void *ptr, size_t bytes) {
  orRegion r;
  if (!address) return orFail(orErrorInvalidValue, "orMapForKernel: null result");
  if (orProcessTask() != OR_TASK_KERNEL)
    return orFail(orErrorNotPermitted, "orMapForKernel: only a kernel may call it");
  if (!orRegionFind(ptr, &r) || bytes > r.size - (size_t)((const char *)ptr - (const char *)r.base))
    return orFail(orErrorInvalidValue, "[%p, +%zu) is not within one allocation", ptr, bytes);
  if (r.type == orMemoryTypeHost) {
    *address = orAliasOf(ptr);
    return orSuccess;
  }
  int device = running.stream->device;
  if (OR_UNLIKELY(r.device != device && !orDeviceReachesPeer(device, r.device)))
    return orFail(orErrorNotSupported,
                  "a kernel of device %d cannot reach %p of device %d: peer access is not enabled",
                  device, ptr, r.device);
  orDevice *d = orDeviceAt(r.device);
  if (!d->can_map) return orFail(orErrorNotSupported, "device %d has no mapped memory", r.device);
  return orDeviceMap(d, ptr, bytes, address);
}
