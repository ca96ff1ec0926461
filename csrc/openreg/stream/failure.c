/*
 * Failures of a device after the call that asked for the work: kept until a call that synchronises
 * reports them.
 *
 * Each of failures[] is under its own lock; `pending` and `lost` are read without it, to keep
 * synchronising calls cheap. A failure that is noted after `pending` was read surfaces at the next
 * call, as if it had come later. `lost` and the streams' own flags change together under the lock.
 *
 * A cause has one owner at any time: the thread that set it, until it notes the failure; then
 * failures[], if it keeps that failure; then the thread that it is reported to. The owner destroys
 * it with no lock held.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "openreg_package.h"
#include "stream/stream.h"

typedef struct orCause {
  void *cause;
  void (*destroy)(void *cause);
} orCause;

typedef struct orFailure {
  orMutex lock;
  _Atomic bool pending;
  _Atomic bool lost; /* `error` is orErrorDeviceLost, until a reset */
  orError_t error;
  char kernel[96];
  char detail[256];
  unsigned others;
  orCause cause;
} orFailure;

static orFailure failures[OPENREG_MAX_DEVICES] = {
    [0 ... OPENREG_MAX_DEVICES - 1] = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_FAILURE)}};

static _Thread_local orCause next_cause; /* for the failure that this thread notes next */
static _Thread_local struct {
  orCause cause;
  unsigned others;
  /* orNotedErrors() at that time; if it has changed, the latest error is another */
  uint64_t errors;
} reported;

/* ---- causes ---- */

static orCause takeCause(orCause *from) {
  orCause cause = *from;
  *from = (orCause){0};
  return cause;
}

static void destroyCause(orCause cause) {
  if (OR_UNLIKELY(cause.cause && cause.destroy)) orCallDestroy(cause.destroy, cause.cause);
}

/* Destroys the causes of a thread that ends, if there is a key. Both are written before main. */
static pthread_key_t thread_end;
static bool has_key;

static void destroyAll(void *unused) {
  (void)unused;
  destroyCause(takeCause(&next_cause));
  destroyCause(takeCause(&reported.cause));
}

__attribute__((constructor)) static void makeKey(void) {
  has_key = !pthread_key_create(&thread_end, destroyAll);
  if (!has_key)
    orWarn("no key for threads: what caused a failure is not destroyed at a thread's end");
}

static void own(orCause *place, orCause cause) {
  destroyCause(takeCause(place));
  *place = cause;
  if (cause.cause && has_key) pthread_setspecific(thread_end, place);
}

void orSetFailureCause(void *cause, void (*destroy)(void *cause)) {
  own(&next_cause, (orCause){cause, destroy});
}

void orFailureForgetCause(void) { destroyCause(takeCause(&next_cause)); }

void orFailureKeepText(orCell *cell, const char *text) { cell->message = strdup(text); }

static void reportCause(orCause cause, unsigned others) {
  own(&reported.cause, cause);
  reported.others = others;
  reported.errors = orNotedErrors();
}

void *orTakeFailureCause(unsigned *others) {
  if (!reported.cause.cause || reported.errors != orNotedErrors()) return NULL;
  if (others) *others = reported.others;
  return takeCause(&reported.cause).cause;
}

/* ---- failures ---- */

/* Lock held. */
static void keepFailure(orFailure *f, orError_t error, const char *kernel, const char *detail) {
  f->error = error;
  snprintf(f->kernel, sizeof f->kernel, "%s", kernel);
  if (!detail || !*detail) detail = error == orErrorDeviceLost ? "" : orGetErrorString(error);
  snprintf(f->detail, sizeof f->detail, "%s", detail);
  atomic_store_explicit(&f->pending, true, memory_order_release);
}

void orDeviceNoteFailure(int index, orError_t error, const char *kernel, const char *detail) {
  orFailure *f = &failures[index];
  orCause cause = takeCause(&next_cause), old = cause;
  orMutexLock(&f->lock);
  bool loses = error == orErrorDeviceLost && f->error != orErrorDeviceLost;
  if (f->error && !loses) {
    f->others++;
  } else {
    old = f->cause;
    f->cause = cause;
    keepFailure(f, error, kernel, detail);
  }
  if (loses) {
    atomic_store_explicit(&f->lost, true, memory_order_release);
    orStreamsSetLost(index, true);
  }
  orMutexUnlock(&f->lock);
  destroyCause(old);
  if (!loses) return;
  orStreamsGiveUpWaits(index);
  const orDevice *d = orDeviceAt(index);
  if (d->factory->lost) d->factory->lost(d->desc.self);
}

/* Lock held. */
static orError_t failLost(int index) {
  const orFailure *f = &failures[index];
  const char *name = orDevicesName();
  return orFail(orErrorDeviceLost,
                "%s:%d is lost: %s failed%s%s; orDeviceReset (torch.%s.reset(%d)) brings it back",
                name, index, f->kernel, *f->detail ? ": " : "", f->detail, name, index);
}

orError_t orDeviceTakeFailure(int index) {
  orFailure *f = &failures[index];
  if (OR_LIKELY(!atomic_load_explicit(&f->pending, memory_order_acquire))) return orSuccess;
  orCause cause = {0};
  unsigned others = 0;
  orMutexLock(&f->lock);
  orError_t error = f->error;
  if (error == orErrorDeviceLost) {
    failLost(index);
  } else if (error) {
    cause = takeCause(&f->cause);
    others = f->others;
    char more[48] = "";
    if (others) snprintf(more, sizeof more, " (and %u more failed after it)", others);
    orFail(error, "%s on %s:%d failed: %s%s", f->kernel, orDevicesName(), index, f->detail, more);
    f->error = orSuccess;
    f->others = 0;
    atomic_store_explicit(&f->pending, false, memory_order_release);
  }
  orMutexUnlock(&f->lock);
  if (error) reportCause(cause, others);
  return error;
}

bool orDeviceIsLost(int index) {
  return atomic_load_explicit(&failures[index].lost, memory_order_acquire);
}

orError_t orDeviceCheckLost(int index) {
  if (OR_LIKELY(!orDeviceIsLost(index))) return orSuccess;
  orFailure *f = &failures[index];
  orMutexLock(&f->lock);
  orError_t error = orDeviceIsLost(index) ? failLost(index) : orSuccess;
  orMutexUnlock(&f->lock);
  return error;
}

void orDeviceForgetFailure(int index) {
  orFailure *f = &failures[index];
  orMutexLock(&f->lock);
  orCause cause = takeCause(&f->cause);
  f->error = orSuccess;
  f->others = 0;
  atomic_store_explicit(&f->pending, false, memory_order_release);
  if (orDeviceIsLost(index)) {
    atomic_store_explicit(&f->lost, false, memory_order_release);
    orStreamsSetLost(index, false);
  }
  orMutexUnlock(&f->lock);
  destroyCause(cause);
}
