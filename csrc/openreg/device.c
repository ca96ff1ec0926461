/*
 * Devices as a caller sees them: the current one, their properties, first use, failures,
 * synchronise, reset.
 *
 * current      thread-local.
 * ready[]      release-stored when a device's default stream exists; `first_use` serialises the making.
 * failures[]   each under its own lock; `pending` and `lost` are read without it, to keep synchronising calls cheap. A
 *              failure that is noted after `pending` was read surfaces at the next call, as if it had come later.
 *              `lost` and the streams' own flags change together under the lock.
 */
#include <stdio.h>
#include <string.h>

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

enum { OR_MOST_LISTENERS = 8 };

static void (*listeners[OR_MOST_LISTENERS])(void); /* before main; likewise its count */
static int listener_count;
static _Thread_local int current;
static orMutex first_use = OR_MUTEX_INITIALIZER(OR_RANK_FIRST_USE);
static _Atomic bool ready[OPENREG_MAX_DEVICES];
static orStream_t default_streams[OPENREG_MAX_DEVICES]; /* written before ready */
static orFailure failures[OPENREG_MAX_DEVICES];

int orCurrentDevice(void) { return current; }

static int deviceCount(void) {
  int n = 0;
  while (orDeviceAt(n)) n++;
  return n;
}

orError_t orDeviceCheck(int index) {
  OR_TRY(orDevicesInit());
  if (index >= 0 && orDeviceAt(index)) return orSuccess;
  int n = deviceCount();
  if (!n) return orFail(orErrorNoDevice, "device index %d: there is no openreg device", index);
  return orFail(orErrorInvalidDevice, "device index %d is out of range: it must be 0 to %d", index,
                n - 1);
}

void orAtFirstUse(void (*fn)(void)) {
  OR_ASSERT(listener_count, <, OR_MOST_LISTENERS);
  listeners[listener_count++] = fn;
}

static orError_t makeReady(int index) {
  orMutexLock(&first_use);
  orError_t error = orSuccess;
  if (!atomic_load_explicit(&ready[index], memory_order_relaxed)) {
    orProcessActivate();
    orMutexInit(&failures[index].lock, OR_RANK_FAILURE);
    for (int i = 0; i < listener_count; i++) listeners[i]();
    error = orStreamMake(index, 0, &default_streams[index]);
    if (!error) atomic_store_explicit(&ready[index], true, memory_order_release);
  }
  orMutexUnlock(&first_use);
  return error;
}

orError_t orDeviceUse(int index) {
  if (OR_LIKELY(index >= 0 && index < OPENREG_MAX_DEVICES &&
                atomic_load_explicit(&ready[index], memory_order_acquire)))
    return orSuccess;
  OR_TRY(orDeviceCheck(index));
  return makeReady(index);
}

orError_t orDeviceDefaultStream(int device, orStream_t *stream) {
  OR_TRY(orDeviceUse(device));
  *stream = default_streams[device];
  return orSuccess;
}

int orDeviceIsActive(int index) {
  return index >= 0 && index < OPENREG_MAX_DEVICES &&
         atomic_load_explicit(&ready[index], memory_order_acquire);
}

/* ---- failures ---- */

static void giveUpWait(orStream *s, uint64_t queued, void *context) {
  (void)queued, (void)context;
  orStreamResume(s);
}

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
    orStreamNotify(index, OR_NOTICE_LOST, true);
  }
  orMutexUnlock(&f->lock);
  if (loses) orStreamForEach(index, giveUpWait, NULL);
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

static void forgetFailure(int index) {
  orFailure *f = &failures[index];
  orMutexLock(&f->lock);
  f->error = orSuccess;
  f->others = 0;
  atomic_store_explicit(&f->pending, false, memory_order_release);
  if (orDeviceIsLost(index)) {
    atomic_store_explicit(&f->lost, false, memory_order_release);
    orStreamNotify(index, OR_NOTICE_LOST, false);
  }
  orMutexUnlock(&f->lock);
}

/* ---- public ---- */

orError_t orGetDeviceCount(int *count) {
  if (!count) return orFail(orErrorInvalidValue, "orGetDeviceCount: null result");
  *count = 0;
  OR_TRY(orDevicesInit());
  *count = deviceCount();
  return orSuccess;
}

orError_t orGetDevice(int *device) {
  OR_TRY(orEnter());
  if (!device) return orFail(orErrorInvalidValue, "orGetDevice: null result");
  *device = current;
  return orSuccess;
}

orError_t orSetDevice(int device) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  current = device;
  return orSuccess;
}

orError_t orGetDeviceProperties(orDeviceProperties *p, int device) {
  if (!p) return orFail(orErrorInvalidValue, "orGetDeviceProperties: null result");
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  const orDevice *d = orDeviceAt(device);
  *p = (orDeviceProperties){.total_memory = d->desc.memory_limit,
                            .index = device,
                            .numa_node = d->desc.numa_node,
                            .lanes = orLaneLimit(),
                            .host_cores = orHostCores(),
                            .can_map = d->can_map};
  snprintf(p->name, sizeof p->name, "%s", d->name);
  snprintf(p->factory, sizeof p->factory, "%s", d->factory->name);
  return orSuccess;
}

static bool couldReach(int device, int peer) {
  return device != peer && orConfigGet()->peer_access &&
         orDeviceAt(device)->factory == orDeviceAt(peer)->factory;
}

orError_t orDeviceCanAccessPeer(int *can, int device, int peer) {
  if (!can) return orFail(orErrorInvalidValue, "orDeviceCanAccessPeer: null result");
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  OR_TRY(orDeviceCheck(peer));
  *can = couldReach(device, peer);
  return orSuccess;
}

orError_t orDeviceEnablePeerAccess(int device, int peer) {
  OR_TRY(orEnter());
  OR_TRY(orDeviceCheck(device));
  OR_TRY(orDeviceCheck(peer));
  if (!couldReach(device, peer))
    return orFail(orErrorNotSupported, "device %d has no peer access to device %d", device, peer);
  atomic_fetch_or_explicit(&orDeviceAt(device)->peers, UINT64_C(1) << peer, memory_order_relaxed);
  return orSuccess;
}

bool orDeviceReachesPeer(int device, int peer) {
  return atomic_load_explicit(&orDeviceAt(device)->peers, memory_order_relaxed) >> peer & 1;
}

orError_t orStreamGetDefault(orStream_t *stream, int device) {
  OR_TRY(orEnter());
  if (!stream) return orFail(orErrorInvalidValue, "orStreamGetDefault: null result");
  return orDeviceDefaultStream(device, stream);
}

orError_t orDeviceSynchronize(void) {
  int device = current;
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  if (!orDeviceIsActive(device)) return orSuccess;
  OR_TRY(orDeviceCheckLost(device));
  uint64_t began = orTraceNow();
  orStreamSynchronizeDevice(device);
  if (began) orTraceWaited("orDeviceSynchronize", device, 0, began);
  return orDeviceTakeFailure(device);
}

static void dropQueued(orStream *s, uint64_t queued, void *context) {
  (void)context;
  orMutexLock(&s->lock); /* against a loss, which drops more */
  if (queued > atomic_load_explicit(&s->drop_until, memory_order_relaxed))
    atomic_store_explicit(&s->drop_until, queued, memory_order_release);
  orMutexUnlock(&s->lock);
}

orError_t orDeviceReset(void) {
  int device = current;
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  if (!orDeviceIsActive(device)) return orSuccess;
  /* All streams are told before any moves: what one drops completes events that let others run. */
  orStreamForEach(device, dropQueued, NULL);
  orStreamForEach(device, giveUpWait, NULL);
  orStreamSynchronizeDevice(device);
  if (orSanitizerOn()) orSanitizerNoteReset(device);
  forgetFailure(device);
  orCacheTrim(device);
  return orSuccess;
}
