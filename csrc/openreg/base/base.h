/*
 * The interface of base/, which depends on no other layer: errors, settings, the process, handles,
 * locks, sleeping and waking, events for tools (probe.h), and work in pieces.
 *
 * No lock is held while waiting, loading a library, or calling a hook, a kernel, a `drop` or a
 * vendor's function.
 */
#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/mutex.h"
#include "openreg.h"

#define OR_HIDDEN __attribute__((visibility("hidden")))
/* Asserts that an array has an entry for each of `count` values that index it. */
#define OR_COVERS(array, count) \
  _Static_assert(sizeof(array) / sizeof((array)[0]) == (count), #array " has an entry for each")
#define OR_LIKELY(x) __builtin_expect(!!(x), 1)
#define OR_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define OR_CACHE_LINE 64

/* An invariant of integers or pointers, checked in the builds with OR_DEBUG: a false one prints
 * both operands and aborts. */
#ifdef OR_DEBUG
#define OR_ASSERT(a, op, b)                                                \
  do {                                                                     \
    unsigned long long or_a_ = (unsigned long long)(a);                    \
    unsigned long long or_b_ = (unsigned long long)(b);                    \
    if (OR_UNLIKELY(!(or_a_ op or_b_)))                                    \
      orAssertFailed(__FILE__, __LINE__, #a " " #op " " #b, or_a_, or_b_); \
  } while (0)
#else
#define OR_ASSERT(a, op, b) ((void)sizeof((a)op(b)))
#endif
_Noreturn void orAssertFailed(const char *file, int line, const char *text, unsigned long long a,
                              unsigned long long b);

/* Returns the error from the function that uses it. */
#define OR_TRY(call)                                      \
  do {                                                    \
    orError_t or_try_error_ = (call);                     \
    if (OR_UNLIKELY(or_try_error_)) return or_try_error_; \
  } while (0)

/* ---- error.c ---- */

/* Records the error and its detail for the calling thread, and returns it; never
 * orErrorNotReady. */
orError_t orFail(orError_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The detail that a failed call recorded since `before` = orNotedErrors(), or the text of `error`.
 * For errors from a vendor's or a caller's function. */
uint64_t orNotedErrors(void);
const char *orErrorDetail(orError_t error, uint64_t before);
/* Sets what orDevicesName returns; the text stays. */
void orSetDevicesName(const char *name);
/* Whether the number is one of the enumeration: a plugin may return any. */
bool orErrorIsKnown(orError_t error);
/* Writes "openreg: " and one line to stderr in a single write, where no caller can get an error. */
void orWarn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- abi.c ---- */

#define OR_END(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))
/* A caller's structure that begins with its size, in the layout of this library: itself, or a copy
 * in `room`. Members after `last` are optional. Null: refused, as orErrorInvalidValue. */
#define OR_VERSIONED(type, given, room, last)                                                 \
  (OR_LIKELY((given) && (given)->size == sizeof(type))                                        \
       ? (given)                                                                              \
       : orCopyVersioned(#type, given, (given) ? (given)->size : 0, OR_END(type, last), room, \
                         sizeof(type)))
const void *orCopyVersioned(const char *type, const void *given, size_t has, size_t least,
                            void *room, size_t size);

/* Fills a caller's structure, which begins with its size, with that many bytes. `from` has every
 * member of this library's layout; members up to `last` are required. */
#define OR_FILL(type, to, from, last) orFill(#type, to, from, OR_END(type, last), sizeof(type))
orError_t orFill(const char *type, void *to, const void *from, size_t least, size_t size);
/* Whether orFill will succeed; called before an effect that cannot be undone. */
#define OR_CHECK_FILL(type, to, last) orCheckSize(#type, *(const size_t *)(to), OR_END(type, last))
orError_t orCheckSize(const char *type, size_t has, size_t least);
/* An element of a caller's array, of `has` bytes. */
void orFillElement(void *to, size_t has, const void *from, size_t size);

/* ---- config.c ---- */

typedef struct orConfig {
  int device_count; /* OPENREG_DEVICE_COUNT */
  bool device_count_is_set;
  /* OPENREG_DEVICE_MEMORY, bytes; 0: default, half of the host's memory over the devices */
  size_t device_memory;
  const char *plugin;   /* OPENREG_PLUGIN, or null */
  bool peer_access;     /* OPENREG_PEER_ACCESS */
  bool poison;          /* OPENREG_POISON */
  bool launch_blocking; /* OPENREG_LAUNCH_BLOCKING: see orLaunchesBlock */
  struct {
    uint64_t seed;
    int policy;         /* an orSchedulePolicy */
    const char *tape;   /* OPENREG_SCHEDULE_TAPE, or null */
  } schedule;           /* OPENREG_SCHEDULE_SEED */
  size_t trace_records; /* OPENREG_TRACE_RECORDS */
  uint64_t watchdog_ns; /* OPENREG_WATCHDOG_S; 0: none */
  int watchdog_signal;  /* OPENREG_WATCHDOG_SIGNAL; 0: none */
  bool sanitizer;       /* OPENREG_SANITIZER */
  bool initcheck;       /* OPENREG_INITCHECK */
} orConfig;

/* Reads the environment at the first call, and writes a line to stderr for each refused value. */
const orConfig *orConfigGet(void);
/* Reads the text of orScheduleSetTape: calls `add` for each item, a choice and how many first
 * options come before it. False if the text is no tape, or where `add` returns false. */
enum { OR_MOST_CHOICES = 1 << 20 };
bool orTapeRead(const char *text, bool (*add)(void *context, uint64_t firsts, uint64_t choice),
                void *context);
/* Whether OPENREG_LAUNCH_BLOCKING is set, which is read at the first launch. */
bool orLaunchesBlock(void);
/* The smaller of the machine's memory and the cgroup's limit, bytes. */
orError_t orHostMemoryLimit(size_t *limit);
int orHostCores(void); /* the cores that this process may run on */
/* The calling thread's cores, in a set of `size` bytes, for CPU_FREE; null if unavailable. */
cpu_set_t *orHostCoreSet(size_t *size);
enum { OR_MAX_WORKERS = 8 };
int orWorkerLimit(void);

/* ---- pages.c ---- */

/* The unit of addresses and lengths for mmap, munmap, mprotect and madvise. */
size_t orPageSize(void);
/* The most bytes that a device may have, so that no sum of sizes overflows. */
#define OR_MOST_MEMORY ((size_t)1 << 50)
/* Rounded up to whole pages. */
size_t orWholePages(size_t bytes);
/* Ends a mapping. If the system cannot split it from merged neighbours, the memory is returned and
 * the addresses stay. */
void orUnmap(void *at, size_t bytes);
/* An anonymous file of that size, which can be sealed; -1 and errno if the system refuses. */
int orMemoryFile(const char *name, size_t bytes);

/* ---- process.c ---- */

/* The first line of every public function that uses the runtime: fails in a forked child of a
 * process that used a device, and inside a host function. */
orError_t orEnter(void);
/* The same for functions that block or enqueue: fails inside any task. */
orError_t orEnterBlocking(void);
/* Around the creation of the devices: a child that is forked meanwhile may not use them. Fails if
 * no fork handler can be installed. */
orError_t orProcessBeginUse(void);
void orProcessEndUse(void);
/* Marks the runtime as used, after orProcessBeginUse and before the caller takes a lock. */
void orProcessActivate(void);
/* Called by a constructor, for a lock that may be taken before the first use of a device. The lock
 * is held briefly, and no other such lock is taken under it. In a forked child it is free and its
 * data is consistent. */
void orForkKeep(orMutex *m);
bool orProcessExiting(void);
orError_t orProcessRefuseExiting(void); /* orSuccess, or orErrorNotPermitted with its text */
/* Called by a constructor: registers `fn`, which the exiting thread calls when the process begins
 * to exit. */
void orProcessSetAtExit(void (*fn)(void));
/* Starts a detached thread that handles only signals of its own faults; 0 or an errno. */
int orThreadStart(void *(*body)(void *), void *context);
bool orThreadIsOurs(void); /* whether orThreadStart started the calling thread */
/* Set by a worker around what it runs. */
enum { OR_TASK_NONE = 0, OR_TASK_KERNEL, OR_TASK_HOST_FUNC };
void orProcessSetTask(int kind);
int orProcessTask(void);
/* Calls a caller's function that destroys an object. It may do what a host function may. */
void orCallDestroy(void (*destroy)(void *), void *argument);

/* ---- handle.c ---- */

typedef enum orHandleKind {
  OR_HANDLE_STREAM = 1,
  OR_HANDLE_EVENT = 2,
  OR_HANDLE_GRAPH = 3,
  OR_HANDLE_MEM_POOL = 4,
  OR_HANDLE_COMPLETION = 5 /* an event by which a factory completes a task */
} orHandleKind;

/* First member of every slot. */
typedef struct orSlot {
  _Atomic uint64_t handle; /* the live handle, or 0 */
  uint32_t generation;     /* table lock */
  uint32_t next_free;      /* table lock; index + 1 */
} orSlot;

typedef struct orHandleTable {
  orHandleKind kind;
  const char *what; /* for messages */
  size_t slot_size;
  uint32_t limit; /* most slots */
  size_t lock_at; /* each slot's own mutex, for orHandleLock; 0: none */
  orRank rank;    /* its rank */
  bool walked;    /* has a bitmap of reserved slots, for orHandleNext */
  orMutex lock;
  /* mapped at first use, never unmapped: a stale handle reads a slot, not the wild */
  _Atomic(char *) base;
  _Atomic uint32_t used; /* slots ever handed out */
  uint32_t free_head;    /* index + 1; under the lock */
} orHandleTable;

/* A slot to fill; orHandlePublish makes its handle valid. */
orError_t orHandleReserve(orHandleTable *table, int device, void **slot, uint64_t *handle);
void orHandlePublish(orSlot *slot, uint64_t handle);
/* Makes the handle invalid. The slot stays reserved until orHandleRecycle. */
void orHandleInvalidate(orSlot *slot);
void orHandleRecycle(orHandleTable *table, orSlot *slot);
/* The slot of a handle that is live now; after locking it otherwise, call orHandleIs again. */
void *orHandleFind(orHandleTable *table, uint64_t handle);
/* The slot of a live handle, with its mutex locked. */
void *orHandleLock(orHandleTable *table, uint64_t handle);
/* Fails: the handle is not live. */
orError_t orHandleRefuse(const orHandleTable *table, uint64_t handle);
void *orHandleSlotAt(orHandleTable *table, uint32_t index);
/* The next reserved slot of a walked table from *index on, or null; *index becomes the index after
 * it. A slot that is reserved or recycled meanwhile may be missed or returned. */
void *orHandleNext(orHandleTable *table, uint32_t *index);
static inline bool orHandleIs(const orSlot *slot, uint64_t handle) {
  return atomic_load_explicit(&slot->handle, memory_order_relaxed) == handle;
}
/* From the lowest bit on: generation, index, device, kind, and a 0. */
enum {
  OR_GENERATION_BITS = 30,
  OR_INDEX_BITS = 24,
  OR_DEVICE_BITS = 6,
  OR_KIND_BITS = 3,
  OR_INDEX_AT = OR_GENERATION_BITS,
  OR_DEVICE_AT = OR_INDEX_AT + OR_INDEX_BITS,
  OR_KIND_AT = OR_DEVICE_AT + OR_DEVICE_BITS,
  OR_LAST_GENERATION = (1 << OR_GENERATION_BITS) - 1,
  OR_MOST_SLOTS = 1 << OR_INDEX_BITS
};
_Static_assert(OR_KIND_AT + OR_KIND_BITS == 63,
               "a handle is a positive int64_t, as PyTorch's ids are");
_Static_assert(OPENREG_MAX_DEVICES <= 1 << OR_DEVICE_BITS, "a handle has room for every device");
_Static_assert(OR_HANDLE_COMPLETION < 1 << OR_KIND_BITS, "a handle has room for every kind");
static inline uint64_t orHandleBits(uint64_t handle, int at, int bits) {
  return handle >> at & ((UINT64_C(1) << bits) - 1);
}
static inline int orHandleDevice(uint64_t handle) {
  return (int)orHandleBits(handle, OR_DEVICE_AT, OR_DEVICE_BITS);
}
static inline int orHandleKindOf(uint64_t handle) {
  return (int)orHandleBits(handle, OR_KIND_AT, OR_KIND_BITS);
}
/* The same slot and generation under another kind, before it is published. */
static inline uint64_t orHandleOfKind(uint64_t handle, orHandleKind kind) {
  return handle ^ (uint64_t)(orHandleKindOf(handle) ^ (int)kind) << OR_KIND_AT;
}
static inline uint32_t orHandleGeneration(uint64_t handle) {
  return (uint32_t)orHandleBits(handle, 0, OR_GENERATION_BITS);
}
static inline uint32_t orHandleIndex(uint64_t handle) {
  return (uint32_t)orHandleBits(handle, OR_INDEX_AT, OR_INDEX_BITS);
}

/* ---- futex.c ---- */

uint64_t orNow(void); /* CLOCK_MONOTONIC, ns */
void orSleep(uint64_t ns);
void orFutexWait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns); /* 0: no timeout */
void orFutexWake(_Atomic uint32_t *word, int count);
static inline void orPause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}
/* Around a sleep: lets the user of the library release a lock of its own (orSetBlockHooks). */
void *orBlockEnter(void);
void orBlockLeave(void *token);

/* ---- parallel_for.c ---- */

/* Takes pieces of running tasks until none is left; false if there was none. */
bool orSplitHelp(void);
bool orSplitWantsHelp(void);
/* Called by a constructor: registers `fn`, which wakes up to `missing` threads that may help. */
void orSplitSetCall(void (*fn)(int missing));
/* memcpy between addresses that this thread can reach, in a task; large ones run in pieces. */
void orCopyBytes(void *dst, const void *src, size_t bytes);

#include "base/probe.h"
