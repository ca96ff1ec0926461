/*
 * Fault injection: operations that fail because a test has asked for it.
 *
 * The host thread that requests an operation chooses its fault, as requests have an order. A task's
 * fault is stored in its record, under its stream's lock, and the worker that runs it reads it
 * there. The outcome depends neither on when that is nor on whether the fault is still armed.
 *
 * faults[] is guarded by `lock`; the tool is on while one of them is armed.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "openreg_fault.h"

#include "openreg_package.h"
#include "stream/stream.h"

enum {
  OR_FAULTS = orFaultSlowStream + 1,
  OR_INJECT_BITS = 8,
  OR_INJECT_MASK = (1 << OR_INJECT_BITS) - 1
};
_Static_assert(OR_FAULTS <= OR_INJECT_MASK, "orTask.fault has room for every kind");
_Static_assert(OR_FAULT_MAX_DELAY_NS / 1000 <= UINT32_MAX >> OR_INJECT_BITS, "and for every delay");

static const char *const names[] = {"out_of_memory", "copy_error", "kernel_error", "device_lost",
                                    "slow_stream"};
OR_COVERS(names, OR_FAULTS);

typedef struct orFaultState {
  bool armed;
  bool again;     /* injected more than once */
  uint32_t delay; /* microseconds */
  uint64_t left;  /* operations still to be spared */
  orFaultOutcome outcome;
} orFaultState;

static orMutex lock = OR_MUTEX_INITIALIZER(OR_RANK_TOOLS);
static orFaultState faults[OPENREG_MAX_DEVICES][OR_FAULTS];

/* ---- on the host ---- */

/* Counts one more operation; returns whether to inject the fault. Lock held. */
static bool isDue(orFaultState *f) {
  if (!f->armed || (f->outcome.fired && !f->again)) return false;
  if (!f->left) return true;
  f->left--;
  return false;
}

static void inject(orFaultState *f, const char *operation) {
  if (f->outcome.fired++) return;
  f->outcome.thread = (int)gettid();
  snprintf(f->outcome.operation, sizeof f->outcome.operation, "%s", operation);
}

static void onAllocation(orProbe *p) {
  char operation[64];
  orFaultState *f = &faults[p->device][orFaultOutOfMemory];
  if (orProcessTask() != OR_TASK_NONE) return;
  orMutexLock(&lock);
  if (isDue(f)) {
    snprintf(operation, sizeof operation, "allocation of %zu bytes", p->bytes);
    inject(f, operation);
    p->fails = "injected fault \"out_of_memory\"";
  }
  orMutexUnlock(&lock);
}

/* A copy that does more than move bytes is a kernel. */
static bool isCopy(const orTask *t) {
  return t->kind != OR_KIND_KERNEL || !strcmp(t->name, "aten::copy_");
}

/* A graph's first node is no operation of the program; its failure would upset later replays'
 * order. */
static bool beginsReplay(const orTask *t) {
  return t->kind == OR_KIND_KERNEL && !strcmp(t->name, "openreg::graph_begin");
}

static void onCommit(orProbe *p) {
  orTask *t = p->task;
  if (beginsReplay(t)) return;
  orFaultState *f = faults[p->slot->device];
  orFaultKind own = isCopy(t) ? orFaultCopyError : orFaultKernelError;
  orMutexLock(&lock);
  bool fails = isDue(&f[own]), loses = isDue(&f[orFaultDeviceLost]);
  /* A task fails once; the other fault is for the next task. */
  if (fails || loses) {
    t->fault = loses ? orFaultDeviceLost : own;
    inject(&f[t->fault], t->name);
  }
  if (isDue(&f[orFaultSlowStream])) {
    t->fault |= f[orFaultSlowStream].delay << OR_INJECT_BITS;
    inject(&f[orFaultSlowStream], t->name);
  }
  orMutexUnlock(&lock);
}

/* ---- on the worker ---- */

static void onInject(orProbe *p) {
  char detail[64];
  uint32_t kind = p->task->fault & OR_INJECT_MASK;
  orSleep((uint64_t)(p->task->fault >> OR_INJECT_BITS) * 1000);
  if (!kind) return;
  p->fails = names[kind];
  snprintf(detail, sizeof detail, "injected fault \"%s\"", names[kind]);
  orDeviceNoteFailure(p->slot->device,
                      kind == orFaultDeviceLost ? orErrorDeviceLost : orErrorLaunchFailure,
                      p->task->name, detail);
}

static orTool tool = {.on = {[OR_PROBE_INJECT] = onInject,
                             [OR_PROBE_COMMIT] = onCommit,
                             [OR_PROBE_ALLOCATION] = onAllocation}};

__attribute__((constructor)) static void add(void) { orToolAdd(&tool); }

/* Lock held. */
static void setArmed(orFaultState *f, bool armed) {
  bool any = false;
  f->armed = armed;
  for (int i = 0; i < OPENREG_MAX_DEVICES * OR_FAULTS; i++)
    any |= faults[i / OR_FAULTS][i % OR_FAULTS].armed;
  orToolSwitch(&tool, any);
}

/* ---- public ---- */

const char *orFaultName(int kind) { return kind >= 0 && kind < OR_FAULTS ? names[kind] : NULL; }

static orError_t checkKind(orFaultKind kind, int device) {
  if (!orFaultName((int)kind))
    return orFail(orErrorInvalidValue, "fault kind %d is out of range: 0 to %d", (int)kind,
                  OR_FAULTS - 1);
  return orDeviceCheck(device);
}

static orError_t checkFault(const orFault *fault) {
  OR_TRY(checkKind(fault->kind, fault->device));
  uint64_t most = fault->kind == orFaultSlowStream ? OR_FAULT_MAX_DELAY_NS : 0;
  if (fault->delay_ns > most)
    return orFail(
        orErrorInvalidValue, "fault \"%s\": a delay of %llu ns is out of range: at most %llu",
        names[fault->kind], (unsigned long long)fault->delay_ns, (unsigned long long)most);
  return orSuccess;
}

static orError_t failMissing(orFaultKind kind, int device) {
  return orFail(orErrorNotFound, "no fault \"%s\" is armed on %s:%d", names[kind], orDevicesName(),
                device);
}

orError_t orFaultInject(const orFault *given) {
  orFault room;
  OR_TRY(orEnter());
  const orFault *fault = OR_VERSIONED(orFault, given, &room, device);
  if (!fault) return orErrorInvalidValue;
  OR_TRY(checkFault(fault));
  orFaultState *f = &faults[fault->device][fault->kind];
  orMutexLock(&lock);
  bool there = f->armed;
  if (!there) {
    *f = (orFaultState){.again = fault->kind == orFaultSlowStream,
                        .delay = (uint32_t)((fault->delay_ns + 999) / 1000),
                        .left = fault->after};
    setArmed(f, true);
  }
  orMutexUnlock(&lock);
  if (!there) return orSuccess;
  return orFail(orErrorAlreadyExists, "a fault \"%s\" is armed on %s:%d already",
                names[fault->kind], orDevicesName(), fault->device);
}

orError_t orFaultGetOutcome(orFaultOutcome *outcome, orFaultKind kind, int device) {
  OR_TRY(orEnter());
  if (!outcome) return orFail(orErrorInvalidValue, "orFaultGetOutcome: null result");
  OR_TRY(checkKind(kind, device));
  orMutexLock(&lock);
  bool there = faults[device][kind].armed;
  orFaultOutcome from = faults[device][kind].outcome;
  orMutexUnlock(&lock);
  if (!there) return failMissing(kind, device);
  return OR_FILL(orFaultOutcome, outcome, &from, operation);
}

orError_t orFaultRemove(orFaultKind kind, int device) {
  OR_TRY(orEnter());
  OR_TRY(checkKind(kind, device));
  orMutexLock(&lock);
  bool there = faults[device][kind].armed;
  setArmed(&faults[device][kind], false);
  orMutexUnlock(&lock);
  return there ? orSuccess : failMissing(kind, device);
}
