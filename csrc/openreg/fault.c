/*
 * Fault injection: operations that fail because a test says so.
 *
 * An operation is chosen on the host, by the thread that asks for it, where operations have an
 * order. A task is marked in its record (orTask.fault) under its stream's lock, and the lane that
 * comes to it does as the mark says, so that what happens to it does not depend on when that is,
 * nor on the fault being there still.
 *
 * Off, none of this is looked for: the streams of a device on which a fault is armed say so in
 * `notice`, which allocations have to read anyway to see whether the device is lost; a launch reads
 * it once more, on the line it has just locked; a lane looks at one field of the record that it
 * runs. orMalloc, which is system calls, takes `lock`.
 *
 * faults[] is guarded by `lock`, a leaf in the order of locks. `changing` is held while a fault is
 * armed or removed and the streams are told, so that two threads do not undo each other; it comes
 * before the making of streams.
 */
#include <stdio.h>
#include <string.h>

#include "openreg_fault.h"

#include "core.h"

enum { KINDS = orFaultSlowStream + 1, STRIKE_BITS = 8, STRIKE_MASK = (1 << STRIKE_BITS) - 1 };
_Static_assert(KINDS <= STRIKE_MASK, "orTask.fault has room for every kind");
_Static_assert(OR_FAULT_MAX_DELAY_NS / 1000 <= UINT32_MAX >> STRIKE_BITS, "and for every delay");

static const char *const names[] = {"out_of_memory", "copy_error", "kernel_error", "device_lost",
                                    "slow_stream"};
OR_COVERS(names, KINDS);

typedef struct orFaultState {
  bool armed;
  bool again;     /* it strikes more than once */
  uint32_t delay; /* microseconds */
  uint64_t left;  /* still to be spared */
  orFaultOutcome outcome;
} orFaultState;

static orMutex changing = OR_MUTEX_INITIALIZER(OR_RANK_FAULTS);
static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orFaultState faults[OPENREG_MAX_DEVICES][KINDS];

/* ---- on the host ---- */

/* One more operation of those it counts: whether it is to be struck. Lock held. */
static bool isDue(orFaultState *f) {
  if (!f->armed || (f->outcome.fired && !f->again)) return false;
  if (!f->left) return true;
  f->left--;
  return false;
}

static void strike(orFaultState *f, const char *operation) {
  if (!f->outcome.fired++)
    snprintf(f->outcome.operation, sizeof f->outcome.operation, "%s", operation);
}

bool orFaultAllocation(int device, size_t bytes) {
  char operation[64];
  orFaultState *f = &faults[device][orFaultOutOfMemory];
  if (orProcessTask() != OR_TASK_NONE) return false;
  orMutexLock(&lock);
  bool due = isDue(f);
  if (due) {
    snprintf(operation, sizeof operation, "allocation of %zu bytes", bytes);
    strike(f, operation);
  }
  orMutexUnlock(&lock);
  return due;
}

/* A copy that is more than a move of bytes is a kernel. */
static bool isCopy(const orTask *t) {
  return t->kind != OR_KIND_KERNEL || !strcmp(t->name, "aten::copy_");
}

void orFaultMark(int device, orTask *t) {
  orFaultState *f = faults[device];
  orFaultKind own = isCopy(t) ? orFaultCopyError : orFaultKernelError;
  orMutexLock(&lock);
  bool fails = isDue(&f[own]), loses = isDue(&f[orFaultDeviceLost]);
  /* A task fails once: the other fault is for the next. */
  if (fails || loses) {
    t->fault = loses ? orFaultDeviceLost : own;
    strike(&f[t->fault], t->name);
  }
  if (isDue(&f[orFaultSlowStream])) {
    t->fault |= f[orFaultSlowStream].delay << STRIKE_BITS;
    strike(&f[orFaultSlowStream], t->name);
  }
  orMutexUnlock(&lock);
}

/* ---- on the lane ---- */

bool orFaultStrikes(const orTask *t, int device) {
  char detail[64];
  uint32_t kind = t->fault & STRIKE_MASK;
  orSleep((uint64_t)(t->fault >> STRIKE_BITS) * 1000);
  if (!kind) return false;
  snprintf(detail, sizeof detail, "injected fault \"%s\"", names[kind]);
  orDeviceNoteFailure(device, kind == orFaultDeviceLost ? orErrorDeviceLost : orErrorLaunchFailure,
                      t->name, detail);
  return true;
}

/* ---- public ---- */

const char *orFaultName(int kind) { return kind >= 0 && kind < KINDS ? names[kind] : NULL; }

static orError_t checkKind(orFaultKind kind, int device) {
  if (!orFaultName((int)kind))
    return orFail(orErrorInvalidValue, "fault kind %d: 0 to %d are known", (int)kind, KINDS - 1);
  return orDeviceCheck(device);
}

static orError_t checkFault(const orFault *fault) {
  OR_TRY(checkKind(fault->kind, fault->device));
  uint64_t most = fault->kind == orFaultSlowStream ? OR_FAULT_MAX_DELAY_NS : 0;
  if (fault->delay_ns > most)
    return orFail(orErrorInvalidValue, "fault \"%s\": a delay of %llu ns; at most %llu",
                  names[fault->kind], (unsigned long long)fault->delay_ns, (unsigned long long)most);
  return orSuccess;
}

bool orFaultArmed(int device) {
  bool armed = false;
  orMutexLock(&lock);
  for (int i = 0; i < KINDS; i++) armed |= faults[device][i].armed;
  orMutexUnlock(&lock);
  return armed;
}

static orError_t failMissing(orFaultKind kind, int device) {
  return orFail(orErrorNotFound, "no fault \"%s\" is armed on openreg:%d", names[kind], device);
}

orError_t orFaultInject(const orFault *given) {
  orFault room;
  OR_TRY(orEnter());
  const orFault *fault = OR_GIVEN(orFault, given, &room, device);
  if (!fault) return orErrorInvalidValue;
  OR_TRY(checkFault(fault));
  orFaultState *f = &faults[fault->device][fault->kind];
  orMutexLock(&changing);
  orMutexLock(&lock);
  bool there = f->armed;
  if (!there)
    *f = (orFaultState){.armed = true,
                        .again = fault->kind == orFaultSlowStream,
                        .delay = (uint32_t)((fault->delay_ns + 999) / 1000),
                        .left = fault->after};
  orMutexUnlock(&lock);
  if (!there) orStreamNotify(fault->device, OR_NOTICE_FAULT, true);
  orMutexUnlock(&changing);
  if (!there) return orSuccess;
  return orFail(orErrorAlreadyExists, "a fault \"%s\" is armed on openreg:%d already",
                names[fault->kind], fault->device);
}

orError_t orFaultGetOutcome(orFaultOutcome *outcome, orFaultKind kind, int device) {
  OR_TRY(orEnter());
  if (!outcome) return orFail(orErrorInvalidValue, "orFaultGetOutcome: null result");
  OR_TRY(checkKind(kind, device));
  orMutexLock(&lock);
  bool there = faults[device][kind].armed;
  *outcome = faults[device][kind].outcome;
  orMutexUnlock(&lock);
  return there ? orSuccess : failMissing(kind, device);
}

orError_t orFaultRemove(orFaultKind kind, int device) {
  OR_TRY(orEnter());
  OR_TRY(checkKind(kind, device));
  orMutexLock(&changing);
  orMutexLock(&lock);
  bool there = faults[device][kind].armed;
  faults[device][kind].armed = false;
  orMutexUnlock(&lock);
  if (!orFaultArmed(device)) orStreamNotify(device, OR_NOTICE_FAULT, false);
  orMutexUnlock(&changing);
  return there ? orSuccess : failMissing(kind, device);
}
