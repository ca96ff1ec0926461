/*
 * Events that processes share, and moments of their streams.
 *
 * A process that records has a file with slots (shared_file.h). A slot counts its records, and has
 * words with the latest finished ones: record r finishes in the word r % OR_SLOT_WORDS, so that one
 * of another process that finishes early ends no wait for an earlier one. A record is a task of the
 * stream; when it is over, also by a reset, the word is set and sleepers are woken.
 *
 * A stream that waits gets an external event. One thread of the process sleeps on the words of all
 * waits together and signals these events. It also finds that a recording process has ended: the
 * kernel has dropped that process's lock of byte 0.
 *
 * orSharedLock guards the slots' owners and the table of streams. `watching` guards the list of
 * waits; no lock is taken under it.
 */
#include "stream/ipc_event.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "device/shared_file.h"
#include "stream/stream.h"

enum { OR_SLOTS = 16384, OR_SLOT_WORDS = 8, OR_MOST_SLEEPS = 64, OR_ALIVE_MS = 100 };

typedef struct orEventSlot {
  _Atomic uint32_t generation; /* odd: in use */
  _Atomic uint32_t recorded;
  _Atomic uint32_t done[OR_SLOT_WORDS];
  uint32_t unused[6];
} orEventSlot;
_Static_assert(sizeof(orEventSlot) == 64, "a slot has the same place in every build");

/* Under orSharedLock. */
static orSharedFile *own;
static uint32_t next_slot, free_count;
static uint32_t free_slots[OR_SLOTS];
static struct {
  orStream_t stream;
  orIpcMoment moment;
} of_streams[4096]; /* by the index of the stream; a later stream of that index goes on counting */

/* ---- slots ---- */

static orEventSlot *slotAt(const orSharedFile *f, uint32_t slot) {
  return (orEventSlot *)(void *)f->shared + slot;
}

static orError_t makeOwn(void) {
  if (own) return orSuccess;
  orSharedFile *f;
  OR_TRY(orSharedFileCreate(orSharedEvents, OR_SLOTS * sizeof(orEventSlot), &f));
  orError_t error = orSharedFileMarkAlive(f);
  if (error)
    orSharedFileClose(f);
  else
    own = f;
  return error;
}

static orError_t takeSlot(orIpcMoment *m) {
  OR_TRY(makeOwn());
  if (next_slot == OR_SLOTS && !free_count)
    return orFail(orErrorSystem, "this process has %d events for other processes, the most it may",
                  OR_SLOTS);
  uint32_t slot = next_slot < OR_SLOTS ? next_slot++ : free_slots[--free_count];
  uint32_t generation = atomic_fetch_add(&slotAt(own, slot)->generation, 1) + 1;
  *m = (orIpcMoment){.file = own->id, .slot = slot, .generation = generation};
  return orSuccess;
}

/* The slot of a moment, with a hold of its file. */
static orError_t findSlot(const orIpcMoment *m, orEventSlot **slot, orSharedFile **file) {
  orSharedFile *f = orSharedFileFind(&m->file);
  if (!f) return orFail(orErrorNotFound, "a file of shared events is not open here");
  if (f->head->magic != orSharedEvents || m->slot >= OR_SLOTS)
    return orFail(orErrorInvalidValue, "the description of a shared event does not match its file");
  *slot = slotAt(f, m->slot);
  if (atomic_load(&(*slot)->generation) != m->generation)
    return orFail(orErrorInvalidResourceHandle,
                  "the shared event has been destroyed by the process that created it");
  f->holds++;
  *file = f;
  return orSuccess;
}

static orError_t holdSlot(const orIpcMoment *m, orEventSlot **slot, orSharedFile **file) {
  orSharedLock();
  orError_t error = findSlot(m, slot, file);
  orSharedUnlock();
  return error;
}

static void letGo(orSharedFile *file) {
  orSharedLock();
  file->holds--;
  orSharedUnlock();
}

void orIpcEventsForget(void) {
  for (orSharedFile *f = orSharedFileAt(0); (f = orSharedFileNext(orSharedFileNumber(f) + 1));)
    if (f != own && f->head && f->head->magic == orSharedEvents && !f->holds &&
        !orSharedByteHeld(f, 0))
      orSharedFileClose(f);
}

/* ---- records ---- */

typedef struct orPublish {
  orSharedFile *file;
  orEventSlot *slot;
  uint32_t record;
} orPublish;

static bool isBefore(uint32_t a, uint32_t b) { return (int32_t)(a - b) < 0; }

static _Atomic uint32_t *wordOf(orEventSlot *slot, uint32_t record) {
  return &slot->done[record % OR_SLOT_WORDS];
}

static bool isDone(orEventSlot *slot, uint32_t record) {
  return !isBefore(atomic_load_explicit(wordOf(slot, record), memory_order_acquire), record);
}

static void publish(void *argument) {
  orPublish *p = argument;
  _Atomic uint32_t *word = wordOf(p->slot, p->record);
  uint32_t before = atomic_load(word);
  while (isBefore(before, p->record) && !atomic_compare_exchange_weak(word, &before, p->record)) {
  }
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
  letGo(p->file);
}

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

static orError_t refuseCapture(orStream_t stream) {
  orCapture *capture = orStreamCapture(stream);
  if (OR_LIKELY(!capture)) return orSuccess;
  orCaptureRelease(capture);
  return orFail(orErrorStreamCaptureUnsupported,
                "a stream that captures cannot be ordered with another process");
}

/* Not as a query, which orders the host. */
static bool isIdle(orStream_t stream) {
  uint64_t queued, completed;
  return !orStreamQueued(stream, &queued) && !orStreamCompleted(stream, &completed) &&
         completed >= queued;
}

/* The slot's file is held; `publish` ends that. */
static orError_t record(orPublish *p, orStream_t stream) {
  orError_t error = refuseCapture(stream);
  if (error) {
    letGo(p->file);
    return error;
  }
  p->record = atomic_fetch_add(&p->slot->recorded, 1) + 1;
  if (!p->record) p->record = atomic_fetch_add(&p->slot->recorded, 1) + 1; /* 0 is no record */
  int queued = 0;
  if (!isIdle(stream))
    error = orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                         .stream = stream,
                                         .fn = nothing,
                                         .args = p,
                                         .args_size = sizeof *p,
                                         .drop = publish,
                                         .name = "interprocess event",
                                         .flags = orLaunchAnyThread,
                                         .queued = &queued});
  if (!queued) publish(p);
  return error;
}

static orError_t streamOrDefault(orStream_t *stream) {
  if (*stream != OR_STREAM_DEFAULT) return orSuccess;
  return orStreamGetDefault(stream, orCurrentDevice());
}

/* The slot of a stream, made at its first use. */
static orError_t slotOfStream(orStream_t stream, orIpcMoment *m) {
  size_t i = orHandleIndex(stream) % (sizeof of_streams / sizeof *of_streams);
  orSharedLock();
  orError_t error = orSuccess;
  if (orHandleIndex(of_streams[i].stream) != orHandleIndex(stream) || !of_streams[i].stream)
    error = takeSlot(&of_streams[i].moment);
  of_streams[i].stream = error ? 0 : stream;
  *m = of_streams[i].moment;
  orSharedUnlock();
  return error;
}

orError_t orIpcStreamMoment(orIpcMoment *m, orStream_t stream) {
  *m = (orIpcMoment){0};
  OR_TRY(streamOrDefault(&stream));
  OR_TRY(refuseCapture(stream));
  if (isIdle(stream)) return orSuccess;
  OR_TRY(slotOfStream(stream, m));
  return orIpcEventRecord(m, stream);
}

/* ---- waits ---- */

typedef struct orWatch {
  struct orWatch *next;
  orSharedFile *file; /* held */
  orEventSlot *slot;
  uint32_t record;
  orEvent_t event;
  bool owned; /* the event ends with the wait */
  bool lost;
} orWatch;

static orMutex watching = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static orWatch *watches;
static bool runs;               /* the thread */
static _Atomic uint32_t notice; /* futex: the list has grown */

static bool isLost(const orWatch *w) { return w->file != own && !orSharedByteHeld(w->file, 0); }

/* Takes finished waits off the list. */
static orWatch *takeFinished(bool look) {
  orWatch *finished = NULL;
  orMutexLock(&watching);
  for (orWatch **at = &watches, *w; (w = *at);) {
    /* The process may end between the two, with its work done. */
    w->lost = look && isLost(w) && !isDone(w->slot, w->record);
    if (!w->lost && !isDone(w->slot, w->record)) {
      at = &w->next;
      continue;
    }
    *at = w->next;
    w->next = finished;
    finished = w;
  }
  orMutexUnlock(&watching);
  return finished;
}

static void finish(orWatch *w) {
  if (w->lost)
    orDeviceNoteFailure(orHandleDevice(w->event), orErrorSystem, "interprocess event",
                        "the process that recorded it ended before its work was done");
  orEventSignal(w->event, orSuccess);
  if (w->owned) orEventDestroy(w->event);
  letGo(w->file);
  free(w);
}

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
typedef struct orWordSleep { /* the kernel's struct futex_waitv */
  uint64_t value, address;
  uint32_t flags, reserved;
} orWordSleep;
enum { OR_FUTEX_32 = 2, OR_FUTEX_PRIVATE = 128 };

/* Sleeps until a word changes, for a while; a kernel without futex_waitv is asked again soon. */
static void sleepOnWords(uint32_t seen) {
  orWordSleep sleeps[OR_MOST_SLEEPS] = {
      {.value = seen, .address = (uintptr_t)&notice, .flags = OR_FUTEX_32 | OR_FUTEX_PRIVATE}};
  unsigned count = 1;
  bool more = false, done = false;
  orMutexLock(&watching);
  for (const orWatch *w = watches; w && !done; w = w->next) {
    if ((more = count == OR_MOST_SLEEPS)) break;
    _Atomic uint32_t *word = wordOf(w->slot, w->record);
    sleeps[count++] =
        (orWordSleep){.value = atomic_load(word), .address = (uintptr_t)word, .flags = OR_FUTEX_32};
    done = isDone(w->slot, w->record);
  }
  orMutexUnlock(&watching);
  if (done) return;
  uint64_t until = orNow() + (more ? 1 : OR_ALIVE_MS) * UINT64_C(1000000);
  struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                       .tv_nsec = (long)(until % 1000000000u)};
  if (syscall(SYS_futex_waitv, sleeps, count, 0, count > 1 ? &t : NULL, CLOCK_MONOTONIC) < 0 &&
      errno == ENOSYS)
    orSleep(count > 1 ? 1000000 : OR_ALIVE_MS * UINT64_C(1000000));
}

static void *watch(void *unused) {
  uint64_t looked = orNow();
  for (;;) {
    uint32_t seen = atomic_load(&notice);
    bool look = orNow() - looked > OR_ALIVE_MS * UINT64_C(1000000);
    if (look) looked = orNow();
    orWatch *w = takeFinished(look);
    if (orProcessExiting()) return unused;
    for (orWatch *next; w; w = next) {
      next = w->next;
      finish(w);
    }
    sleepOnWords(seen);
  }
}

static orError_t startThread(void) {
  orMutexLock(&watching);
  int failed = runs ? 0 : orThreadStart(watch, NULL);
  runs |= !failed;
  orMutexUnlock(&watching);
  if (!failed) return orSuccess;
  return orFail(orErrorSystem, "the system starts no thread that waits for other processes");
}

static orError_t makeExternal(int device, orEvent_t *event) {
  int before = orCurrentDevice();
  OR_TRY(orSetDevice(device));
  orError_t error = orEventCreateWithFlags(event, orEventExternal | orEventDisableTiming);
  orSetDevice(before);
  return error;
}

static void addWatch(orWatch *w) {
  orMutexLock(&watching);
  w->next = watches;
  watches = w;
  orMutexUnlock(&watching);
  atomic_fetch_add(&notice, 1);
  orFutexWake(&notice, 1);
}

/* An external event that the thread signals. */
static orError_t local(const orIpcMoment *m, int device, bool owned, orEvent_t *event,
                       orWatch **made) {
  orEventSlot *slot;
  orSharedFile *file;
  OR_TRY(startThread());
  OR_TRY(holdSlot(m, &slot, &file));
  orWatch *w = malloc(sizeof *w);
  orError_t error = w ? makeExternal(device, event)
                      : orFail(orErrorMemoryAllocation, "no host memory for a wait");
  if (error || !w) {
    free(w);
    letGo(file);
    return error;
  }
  *w = (orWatch){.file = file, .slot = slot, .record = m->record, .event = *event, .owned = owned};
  *made = w;
  return orSuccess;
}

/* ---- Public ---- */

orError_t orIpcEventCreate(orIpcMoment *moment) {
  OR_TRY(orEnter());
  if (!moment) return orFail(orErrorInvalidValue, "orIpcEventCreate: null result");
  OR_TRY(orDeviceUse(orCurrentDevice()));
  orSharedLock();
  orError_t error = takeSlot(moment);
  orSharedUnlock();
  return error;
}

orError_t orIpcEventDestroy(const orIpcMoment *moment) {
  OR_TRY(orEnter());
  if (!moment) return orFail(orErrorInvalidValue, "orIpcEventDestroy: null event");
  orSharedLock();
  orEventSlot *slot;
  orSharedFile *f;
  orError_t error = findSlot(moment, &slot, &f);
  if (!error) f->holds--;
  if (!error && f != own)
    error =
        orFail(orErrorInvalidValue, "a shared event is destroyed by the process that created it");
  if (!error) {
    atomic_fetch_add(&slot->generation, 1);
    free_slots[free_count++] = moment->slot;
  }
  orSharedUnlock();
  return error;
}

/* Under a schedule, tasks run while this host is inside a call. Another process, which waits for
 * them, cannot make such a call. */
static orError_t finishUnderSchedule(orStream_t stream) {
  orStream *s;
  if (OR_LIKELY(!orDispatching())) return orSuccess;
  OR_TRY(orStreamLock(stream, &s));
  uint64_t queued = atomic_load_explicit(&s->queued, memory_order_relaxed);
  orMutexUnlock(&s->lock);
  return orHostAwaitTasks(s, queued);
}

orError_t orIpcEventRecord(orIpcMoment *moment, orStream_t stream) {
  orPublish p = {0};
  OR_TRY(orEnterBlocking());
  if (!moment) return orFail(orErrorInvalidValue, "orIpcEventRecord: null event");
  OR_TRY(streamOrDefault(&stream));
  OR_TRY(holdSlot(moment, &p.slot, &p.file));
  OR_TRY(record(&p, stream));
  moment->record = p.record;
  return finishUnderSchedule(stream);
}

orError_t orIpcEventNewest(orIpcMoment *moment) {
  orEventSlot *slot;
  orSharedFile *f;
  OR_TRY(orEnter());
  if (!moment) return orFail(orErrorInvalidValue, "orIpcEventNewest: null event");
  OR_TRY(holdSlot(moment, &slot, &f));
  moment->record = atomic_load(&slot->recorded);
  letGo(f);
  return orSuccess;
}

orError_t orIpcEventQuery(const orIpcMoment *moment) {
  orEventSlot *slot;
  orSharedFile *f;
  OR_TRY(orEnter());
  if (!moment) return orFail(orErrorInvalidValue, "orIpcEventQuery: null event");
  if (!moment->record) return orSuccess;
  OR_TRY(holdSlot(moment, &slot, &f));
  bool done = isDone(slot, moment->record);
  letGo(f);
  return done ? orSuccess : orErrorNotReady;
}

orError_t orIpcEventWait(const orIpcMoment *moment, orStream_t stream) {
  orEvent_t event;
  orWatch *w;
  int device;
  OR_TRY(orEnterBlocking());
  OR_TRY(streamOrDefault(&stream));
  OR_TRY(refuseCapture(stream));
  orError_t over = orIpcEventQuery(moment);
  if (over != orErrorNotReady) return over;
  OR_TRY(orStreamGetDevice(stream, &device));
  OR_TRY(local(moment, device, true, &event, &w));
  orError_t error = orStreamWaitEvent(stream, event);
  addWatch(w);
  return error;
}

orError_t orIpcEventLocal(orEvent_t *event, const orIpcMoment *moment, int device) {
  orWatch *w;
  OR_TRY(orEnterBlocking());
  if (!event || !moment) return orFail(orErrorInvalidValue, "orIpcEventLocal: an argument is null");
  OR_TRY(local(moment, device, false, event, &w));
  addWatch(w);
  return orSuccess;
}
