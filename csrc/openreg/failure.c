/*
 * What has failed on a device after the call that asked for it: kept until a call that synchronises
 * hands it out.
 *
 * failures[] each under its own lock; `pending` and `lost` are read without it, to keep
 * synchronising calls cheap. A failure that is noted after `pending` was read surfaces at the next
 * call, as if it had come later. `lost` and the streams' own flags change together under the lock.
 */
#include <stdio.h>

#include "core.h"

typedef struct orFailure {
  orMutex lock;
  _Atomic bool pending;
  _Atomic bool lost; /* `error` is orErrorDeviceLost, and stays until a reset */
  orError_t error;
  char kernel[96];
  char detail[256];
  unsigned others;
} orFailure;

static orFailure failures[OPENREG_MAX_DEVICES] = {
    [0 ... OPENREG_MAX_DEVICES - 1] = {.lock = OR_MUTEX_INITIALIZER(OR_RANK_FAILURE)}};

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
  orMutexLock(&f->lock);
  bool loses = error == orErrorDeviceLost && f->error != orErrorDeviceLost;
  if (f->error && !loses)
    f->others++;
  else
    keepFailure(f, error, kernel, detail);
  if (loses) {
    atomic_store_explicit(&f->lost, true, memory_order_release);
    orStreamsSetLost(index, true);
  }
  orMutexUnlock(&f->lock);
  if (loses) orStreamsGiveUpWaits(index);
}

/* Lock held. */
static orError_t failLost(int index) {
  const orFailure *f = &failures[index];
  return orFail(orErrorDeviceLost,
                "openreg:%d is lost: %s failed%s%s; orDeviceReset (torch.openreg.reset(%d)) "
                "brings it back",
                index, f->kernel, *f->detail ? ": " : "", f->detail, index);
}

orError_t orDeviceTakeFailure(int index) {
  orFailure *f = &failures[index];
  if (OR_LIKELY(!atomic_load_explicit(&f->pending, memory_order_acquire))) return orSuccess;
  orMutexLock(&f->lock);
  orError_t error = f->error;
  if (error == orErrorDeviceLost) {
    failLost(index);
  } else if (error) {
    char more[48] = "";
    if (f->others) snprintf(more, sizeof more, " (and %u more failed after it)", f->others);
    orFail(error, "%s on openreg:%d failed: %s%s", f->kernel, index, f->detail, more);
    f->error = orSuccess;
    f->others = 0;
    atomic_store_explicit(&f->pending, false, memory_order_release);
  }
  orMutexUnlock(&f->lock);
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
  f->error = orSuccess;
  f->others = 0;
  atomic_store_explicit(&f->pending, false, memory_order_release);
  if (orDeviceIsLost(index)) {
    atomic_store_explicit(&f->lost, false, memory_order_release);
    orStreamsSetLost(index, false);
  }
  orMutexUnlock(&f->lock);
}
