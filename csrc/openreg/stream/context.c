/*
 * A device in use: its default stream, its pools of streams, synchronise and reset.
 *
 * The default stream is made at first use, after which ready[] is release-stored. `first_use`
 * serialises that and guards the pools.
 */
#include "stream/stream.h"

static orMutex first_use = OR_MUTEX_INITIALIZER(OR_RANK_FIRST_USE);
static _Atomic bool ready[OPENREG_MAX_DEVICES];
static orStream_t default_streams[OPENREG_MAX_DEVICES]; /* written before ready */

typedef struct orPool {
  uint32_t turn;
  orStream_t streams[OPENREG_STREAMS_PER_POOL];
} orPool;
static orPool pools[OPENREG_MAX_DEVICES][OR_PRIORITIES];

static orError_t makeReady(int index) {
  orProcessActivate(); /* a fork from here on may find the lock held */
  orMutexLock(&first_use);
  orError_t error = orSuccess;
  if (!atomic_load_explicit(&ready[index], memory_order_relaxed)) {
    orProbe probe = {.device = index};
    orProbeCall(OR_PROBE_FIRST_USE, &probe);
    error = probe.error ? probe.error
                        : orStreamMake(index, 0, OR_OWNER_DEVICE, &default_streams[index]);
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

/* ---- public ---- */

orError_t orStreamGetDefault(orStream_t *stream, int device) {
  OR_TRY(orEnter());
  if (!stream) return orFail(orErrorInvalidValue, "orStreamGetDefault: null result");
  return orDeviceDefaultStream(device, stream);
}

orError_t orStreamGetFromPool(orStream_t *stream, int priority, int device) {
  OR_TRY(orEnter());
  if (!stream) return orFail(orErrorInvalidValue, "orStreamGetFromPool: null result");
  OR_TRY(orDeviceUse(device));
  priority = orClampPriority(priority);
  orMutexLock(&first_use);
  orPool *pool = &pools[device][-priority];
  orStream_t *slot = &pool->streams[pool->turn++ % OPENREG_STREAMS_PER_POOL];
  orError_t error = *slot ? orSuccess : orStreamMake(device, priority, OR_OWNER_POOL, slot);
  *stream = *slot;
  orMutexUnlock(&first_use);
  return error;
}

orError_t orDeviceSynchronize(void) {
  int device = orCurrentDevice();
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  if (!orDeviceIsActive(device)) return orSuccess;
  OR_TRY(orCapturesRefuse(device, "orDeviceSynchronize"));
  OR_TRY(orDeviceCheckLost(device));
  OR_TRY(orStreamSynchronizeDevice("orDeviceSynchronize", device));
  return orDeviceTakeFailure(device);
}

static void cancelQueued(orStream *s, uint64_t queued, void *context) {
  (void)context;
  orMutexLock(&s->lock); /* excludes a loss, which cancels more */
  if (queued > atomic_load_explicit(&s->cancel_until, memory_order_relaxed))
    atomic_store_explicit(&s->cancel_until, queued, memory_order_release);
  orMutexUnlock(&s->lock);
}

/* Before the wait for what is running, as only the factory can end it. */
static orError_t resetHardware(int device) {
  const orDevice *d = orDeviceAt(device);
  if (!d->factory->reset) return orSuccess;
  uint64_t noted = orNotedErrors();
  void *token = orBlockEnter();
  orError_t error = d->factory->reset(d->desc.self);
  orBlockLeave(token);
  return orDeviceFailed(d, "reset", error, noted);
}

orError_t orDeviceReset(void) {
  int device = orCurrentDevice();
  OR_TRY(orEnterBlocking());
  OR_TRY(orDeviceCheck(device));
  if (!orDeviceIsActive(device)) return orSuccess;
  orCapturesInvalidate(device, "orDeviceReset");
  /* All streams are marked before any is resumed, as a cancelled record may let others run. */
  orStreamForEach(device, cancelQueued, NULL);
  orStreamsGiveUpWaits(device);
  OR_TRY(resetHardware(device));
  OR_TRY(orStreamSynchronizeDevice(NULL, device));
  OR_PROBE(OR_PROBE_RESET, .device = device);
  orDeviceForgetFailure(device);
  orProbeCall(OR_PROBE_IS_RESET, &(orProbe){.device = device});
  return orSuccess;
}
