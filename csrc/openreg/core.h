/*
 * libopenreg's private header: the map of its files, from the bottom up. A file uses those of its
 * own layer and of the layers before it alone (layers.txt, which `make lint` checks).
 *
 * Base.
 *   error.c      errors, the calling thread's last error
 *   given.c      the version; a caller's structures, from an older or newer header
 *   config.c     OPENREG_* settings, read once; the host's memory and cores
 *   process.c    what every entry point checks: fork, exit, calls from inside a task
 *   handle.c     64-bit handles into tables that are never unmapped
 *   wait.c       clock, futex, block hooks
 *   mutex.c      what a thread holds, asserted; mutex.h has the order of locks
 *   pages.c      the system's pages: their size, files in memory
 *   probe.c      what happens in all of these, for tools that want to know (probe.h)
 *   tree.c       a balanced tree of address intervals (tree.h)
 *   split.c      work in pieces: what idle lanes and waiting hosts take of a large task
 * Devices.
 *   factory.c    device factories, plugins, the table of devices
 *   host.c       the two factories of the host ("CPU")
 *   mirror.c     pinned memory that is mapped twice, and may be guarded (mirror.h)
 *   simulated.c  the factory of the simulated device: address range, shadow, pages
 *   region.c     which addresses are allocated, by whom
 *   device.c     the current device, properties, peers
 * Streams.
 *   queue.c      a stream's queue of tasks
 *   stream.c     streams: handles, enqueue, query, synchronise
 *   event.c      events and their completion cells
 *   task.c       what each kind of task does when it runs, or is dropped
 *   capture.c    streams whose work is kept instead of run
 *   graph.c      what was captured, queued again
 *   await.c      how a host thread waits
 *   lane.c       the threads that run tasks, and the choice of what runs next (dispatch.h)
 *   failure.c    what failed after the call that asked for it; lost devices
 *   context.c    a device in use: first use, default stream, synchronise, reset
 *   copy.c       memcpy and memset: checks, staging
 *   memory.c     memory for a caller: of devices, pinned, registered
 *   allocator.c  a device's allocators by attributes, tensors from bytes
 *   compute.c    a device's compute
 * The caching allocator.
 *   cache.c      order of reuse, allocation and free (cache.h)
 *   reserve.c    its memory: growth, what goes back, limits, out of memory
 *   history.c    what it tells: the hook of its actions, snapshots
 *   block.c      its blocks: table, segments, statistics (block.h)
 *   bins.c       its free blocks by size
 * Tools, which no file above names.
 *   tape.c       the choices of a schedule as text; the record of a run (tape.h)
 *   schedule.c   the choice of what runs next by a seed or a tape (dispatch.h): one task at a time,
 *                while a host thread is in a call
 *   trace.c      tracing: the buffer of what was launched and run
 *   fault.c      fault injection: operations that fail because a test says so
 *   hang.c       what each stream is doing and waits for, in words
 *   watchdog.c   when that is printed: at a stall, at a signal
 *   sanitizer.c  races of streams: what tells it what happens (sanitizer.h)
 *   clocks.c     its order of events
 *   shadow.c     its memory of accesses
 *   peek.c       what it knows to be there to be read
 *   a64.c        whether an access that faulted on Arm64 was a write (a64.h)
 *   guard.c      its guards of pinned memory
 *   host_access.c  the handler of SIGSEGV: guarded memory, device memory that the host touches
 *   sums.c       its checksums of host memory that cannot be guarded
 *   races.c      its reports
 *   names.c      its names of operations
 *   stacks.c     its stacks
 * gdb_openreg.py, for gdb, reads streams, tasks, cells and who sleeps, so it changes with them.
 *
 * No lock is held while waiting, while loading a library, while calling a hook, a kernel, a `drop`
 * or a vendor's function.
 */
#ifndef OPENREG_CORE_H
#define OPENREG_CORE_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "openreg.h"
#include "mutex.h"

#define OR_HIDDEN __attribute__((visibility("hidden")))
/* As many entries as there are of what indexes them. */
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

/* Notes the error and its detail for the calling thread, and returns it. orErrorNotReady is never
 * noted. */
orError_t orFail(orError_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The detail that a failed call noted, if it noted one since `before` = orNotedErrors(); else the
 * text of `error`. For errors that come back from a function of somebody else. */
uint64_t orNotedErrors(void);
const char *orErrorDetail(orError_t error, uint64_t before);
/* One line on stderr, "openreg: " before it, in a single write; for what no caller can be told. */
void orWarn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- given.c ---- */

#define OR_END(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))
/* A structure that begins with its size, as this library knows it: the caller's, or a copy in
 * `room`. Members behind `last` are optional. Null: refused, as orErrorInvalidValue. */
#define OR_GIVEN(type, given, room, last)                                                  \
  (OR_LIKELY((given) && (given)->size == sizeof(type))                                     \
       ? (given)                                                                           \
       : orGivenOther(#type, given, (given) ? (given)->size : 0, OR_END(type, last), room, \
                      sizeof(type)))
const void *orGivenOther(const char *type, const void *given, size_t has, size_t least, void *room,
                         size_t size);

/* Fills what a caller gives: as many bytes as it says there are, which begin with that size. `from`
 * has every member that this library knows; members up to `last` are required. */
#define OR_FILL(type, to, from, last) orFill(#type, to, from, OR_END(type, last), sizeof(type))
orError_t orFill(const char *type, void *to, const void *from, size_t least, size_t size);
/* Before a call that has an effect: whether orFill will do. */
#define OR_CHECK_FILL(type, to, last) orCheckSize(#type, *(const size_t *)(to), OR_END(type, last))
orError_t orCheckSize(const char *type, size_t has, size_t least);
/* An element of a caller's array, of `has` bytes. */
void orFillElement(void *to, size_t has, const void *from, size_t size);

/* ---- config.c ---- */

typedef struct orConfig {
  int device_count; /* OPENREG_DEVICE_COUNT */
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

/* Reads the environment at the first call; one line on stderr for each value that is refused. */
const orConfig *orConfigGet(void);
/* Whether OPENREG_LAUNCH_BLOCKING is set, which is read at the first launch. */
bool orLaunchesBlock(void);
/* The smaller of the machine's memory and the cgroup's limit, bytes. */
orError_t orHostMemoryLimit(size_t *limit);
int orHostCores(void); /* that this process may run on */
/* Those of the calling thread, for CPU_FREE, in a set of `size` bytes; null: not to be had. */
cpu_set_t *orHostCoreSet(size_t *size);
enum { OR_MAX_LANES = 8 };
int orLaneLimit(void);

/* ---- pages.c ---- */

/* What mmap, munmap, mprotect and madvise take addresses and lengths in. */
size_t orPageSize(void);
/* Most bytes that a device may have, so that no sum of sizes overflows. */
#define OR_MOST_MEMORY ((size_t)1 << 50)
/* Rounded up to whole pages. */
size_t orWholePages(size_t bytes);
/* Ends a mapping. A system that has no room to split what it has merged with its neighbours refuses
 * that: then the memory goes back, and the addresses stay. */
void orUnmap(void *at, size_t bytes);
/* A file of that size without a name, to be mapped and closed; -1 and errno if the system
 * refuses. */
int orMemoryFile(const char *name, size_t bytes);

/* ---- process.c ---- */

/* First line of every public function that touches the runtime: refuses in a forked child
 * of a process that used a device, and inside a host function. */
orError_t orEnter(void);
/* The same for functions that block or enqueue: refuses inside any task. */
orError_t orEnterBlocking(void);
/* Around the making of the devices: a child that is forked meanwhile is refused. Fails if there is
 * no handler to do so. */
orError_t orProcessBeginUse(void);
void orProcessEndUse(void);
/* Marks the runtime as used, before the caller takes a lock. orProcessBeginUse has succeeded. */
void orProcessActivate(void);
/* By a constructor: a lock that may be taken before the first use, for a short time and around no
 * other such lock. A forked child gets it unlocked, and what it guards whole. */
void orForkKeep(orMutex *m);
bool orProcessExiting(void);
orError_t orProcessRefuseExiting(void); /* orSuccess, or orErrorNotPermitted with its text */
/* By a constructor: `fn` is called when the process begins to exit, on the thread that does. */
void orProcessSetAtExit(void (*fn)(void));
/* A detached thread that takes no signals but those of its own faults; 0 or an errno. */
int orThreadStart(void *(*body)(void *), void *context);
bool orThreadIsOurs(void); /* the calling one has been started so */
/* Set by a lane around what it runs. */
enum { OR_TASK_NONE = 0, OR_TASK_KERNEL, OR_TASK_HOST_FUNC };
void orProcessSetTask(int kind);
int orProcessTask(void);
/* A caller's function that ends an object of his own: it is refused what a host function is. */
void orCallDestroy(void (*destroy)(void *), void *argument);

/* ---- factory.c ---- */

_Static_assert(OPENREG_MAX_DEVICES <= 64, "orDevice.peers has a bit for every device");
struct orDevice {
  char name[64];
  char type[32];
  const orDeviceFactory *factory;
  orDeviceDesc desc;
  bool can_map;
  _Atomic uint64_t peers;    /* bit i: kernels may reach memory of device i */
  orAllocator allocators[3]; /* device, pageable host, pinned host */
};

/* Makes the devices with the defaults if no thread has, or sleeps while another makes them. The
 * error of a failed attempt is repeated, unless the cause may have passed (memory, the system).
 * Holding no lock. */
orError_t orDevicesInit(void);
/* "openreg" devices; null past the end. orDevicesInit has succeeded. */
orDevice *orDeviceAt(int index);
/* The first host device. */
orDevice *orHostDevice(void);
/* Refuses what is no device. */
orError_t orDeviceIsValid(const orDevice *device);
extern const orDeviceFactory orSimulatedFactory; /* simulated.c */
/* An address of simulated device memory, allocated or not. */
bool orSimulatedHolds(const void *ptr);
/* What is at an address, for a signal handler: found without a lock, so a thread that changes it
 * meanwhile makes it wrong. */
typedef struct orTouched {
  int device;
  uintptr_t begin;
  size_t bytes; /* 0: nothing is allocated there */
  bool live;
  const orOrigin *origin; /* or null */
} orTouched;
/* False if it is no address of simulated memory. */
bool orSimulatedAt(const void *ptr, orTouched *place);
extern const orDeviceFactory orPlainHostFactory, orPinnedHostFactory; /* host.c */

/* ---- device.c ---- */

bool orDeviceReachesPeer(int device, int peer);
/* The error of the factory's function `call`, with a message if it has noted none since `before` =
 * orNotedErrors(). */
orError_t orDeviceFailed(const orDevice *device, const char *call, orError_t error,
                         uint64_t before);
/* Refuses what the factory's function has returned as new memory of `bytes`, or as the kernel
 * address of `ptr`: null, past the end of the address space, or aligned otherwise (to
 * OR_ALIGNMENT). */
enum { OR_ALIGNMENT = 16 };
orError_t orDeviceCheckAddress(const orDevice *device, const char *call, const void *address,
                               const void *ptr, size_t bytes);
/* The factory's `map`, which there is. */
orError_t orDeviceMap(const orDevice *device, const void *ptr, size_t bytes, void **address);

/* Index check alone: no side effect besides making the device table. */
orError_t orDeviceCheck(int index);
/* The calling thread's current device. */
int orCurrentDevice(void);

/* ---- region.c ---- */

typedef struct orRegion {
  void *base;
  size_t size;
  orMemoryType type; /* Host: pinned; Device */
  int device;        /* -1 for host memory */
  bool registered;   /* by orHostRegister: not ours to free */
  bool cached;       /* a segment of the caching allocator: not a caller's to free */
} orRegion;

/* The region that holds `ptr`; false if none does. */
bool orRegionFind(const void *ptr, orRegion *region);
/* Whether there is one, of this type. */
bool orRegionIs(const void *ptr, orMemoryType type);
/* Fails if it overlaps one that is there. */
orError_t orRegionEnter(orRegion region);
/* Memory that the factory's function `call` has returned: it is entered, or goes back. */
orError_t orRegionAdopt(const orDevice *device, const char *call, orRegion region);
/* The region of this kind that starts at `ptr`, or orErrorInvalidValue; the second takes it out. */
orError_t orRegionCheck(const void *ptr, orMemoryType type, bool registered, orRegion *region);
orError_t orRegionTake(const void *ptr, orMemoryType type, bool registered, orRegion *region);
/* Device memory, charged to the device's capacity. Touches no current device, does not
 * synchronise. */
orError_t orRegionAllocate(int device, size_t bytes, bool cached, void **ptr);
/* The caller guarantees that no queued work uses the region. */
orError_t orRegionRelease(void *ptr);
/* Bytes in use on a device. */
size_t orRegionUsed(int device);

/* ---- handle.c ---- */

typedef enum orHandleKind {
  OR_HANDLE_STREAM = 1,
  OR_HANDLE_EVENT = 2,
  OR_HANDLE_GRAPH = 3,
  OR_HANDLE_MEM_POOL = 4
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
  bool walked;    /* has a bitmap of reserved slots, for orHandleNext */
  orMutex lock;
  /* mapped at first use, never unmapped: a stale handle reads a slot, not the wild */
  _Atomic(char *) base;
  _Atomic uint32_t used; /* slots ever handed out */
  uint32_t free_head;    /* index + 1; lock */
} orHandleTable;

/* A slot to fill; orHandlePublish makes its handle valid. */
orError_t orHandleReserve(orHandleTable *table, int device, void **slot, uint64_t *handle);
void orHandlePublish(orSlot *slot, uint64_t handle);
/* The handle becomes invalid; the slot stays reserved until orHandleRecycle. */
void orHandleInvalidate(orSlot *slot);
void orHandleRecycle(orHandleTable *table, orSlot *slot);
/* The slot that the handle names if it is live now. Whoever locks the slot asks orHandleIs
 * again. */
void *orHandleFind(orHandleTable *table, uint64_t handle);
void *orHandleSlotAt(orHandleTable *table, uint32_t index);
/* The next reserved slot of a walked table, from *index on, which is set to the index after it;
 * null: there is none. A slot that is reserved or recycled meanwhile may be missed or returned. */
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
_Static_assert(OR_HANDLE_MEM_POOL < 1 << OR_KIND_BITS, "a handle has room for every kind");
static inline uint64_t orHandleBits(uint64_t handle, int at, int bits) {
  return handle >> at & ((UINT64_C(1) << bits) - 1);
}
static inline int orHandleDevice(uint64_t handle) {
  return (int)orHandleBits(handle, OR_DEVICE_AT, OR_DEVICE_BITS);
}
static inline uint32_t orHandleGeneration(uint64_t handle) {
  return (uint32_t)orHandleBits(handle, 0, OR_GENERATION_BITS);
}
static inline uint32_t orHandleIndex(uint64_t handle) {
  return (uint32_t)orHandleBits(handle, OR_INDEX_AT, OR_INDEX_BITS);
}

/* ---- queue.c ---- */

typedef enum orTaskKind {
  OR_KIND_KERNEL,
  OR_KIND_HOST_FUNC,
  OR_KIND_COPY,
  OR_KIND_SET, /* up to here: work */
  OR_KIND_MARK,
  OR_KIND_WAIT
} orTaskKind;

typedef struct orCell orCell;

typedef struct orCopyArgs {
  void *dst;
  const void *src; /* null: the bytes follow in the record (a staged source) */
  size_t bytes;
  orMemcpyKind kind;
  int device; /* whose factory copies; -1: host to host */
} orCopyArgs;

typedef struct orSetArgs {
  void *dst;
  size_t bytes;
  int value;
  int device; /* -1: pinned host memory */
} orSetArgs;

/* What a task is, besides its arguments, which follow it in the queue. */
typedef struct orTask {
  size_t size; /* of the record, header included; a multiple of 16 */
  const char *name;
  void (*drop)(void *args);
  union {
    orKernelFn kernel;
    void (*host)(void *);
    orCell *cell;  /* of a mark or wait; this task's reference */
    uint32_t slot; /* of a mark or wait in a graph: which of a replay's cells */
    orCopyArgs copy;
    orSetArgs set;
  } u;
  union {
    void *user_data; /* of a host function */
    /* of a vendor's operation that is awaited: when it started, if that is wanted */
    uint64_t began;
  };
  orCell *completion; /* a vendor's operation that has started and is awaited */
  bool *dropped;      /* of whoever waits for it: becomes true where it is not run */
  orEvent_t done;     /* its event */
  orTaskKind kind;
  uint32_t mark;   /* of the tool that is asked before it runs (OR_PROBE_STRIKE); 0 */
  bool any_thread; /* of a kernel, copy or fill: a host thread may run it */
  bool awaited;    /* the thread that queues it waits for it, and may run it */
  bool aside;      /* what the allocator does for itself: no choice of a schedule */
  bool half;       /* its first half has run, or is running */
  /* dropped when its turn comes; written under the stream's lock, while no thread runs the
   * stream */
  _Atomic bool cancelled;
} orTask;

#define OR_TASK_HEADER ((sizeof(orTask) + 15) & ~(size_t)15)
static inline void *orTaskArgs(orTask *task) { return (char *)task + OR_TASK_HEADER; }

typedef struct orChunk orChunk;
/* Two ends on two cache lines: producers and the lane do not slow each other down. */
typedef struct orQueueIn { /* under the stream's lock */
  orChunk *tail;
  orChunk *spare; /* in no list */
} orQueueIn;
typedef struct orQueueOut { /* the lane that runs the stream */
  orChunk *head;
  size_t offset;
} orQueueOut;

/* Room for a record with `args_size` bytes of arguments; null when memory is short. Whoever does
 * not commit it need do nothing: the next reservation takes its place. Stream lock held. */
orTask *orQueueReserve(orQueueIn *in, size_t args_size);
/* The latest reserved record becomes part of the queue; the caller then publishes the count of
 * tasks. Stream lock held. */
void orQueueCommit(orQueueIn *in, orQueueOut *out, const orTask *task);
/* The oldest record; the caller has seen a count of tasks that includes it. */
orTask *orQueueFront(orQueueOut *out, orChunk **emptied);
void orQueuePop(orQueueOut *out, size_t size);
/* The oldest record of a queue that is not empty and that no lane is at. Stream lock held. */
const orTask *orQueuePeek(const orQueueOut *out);
/* Gives the memory of an empty queue back, which no lane is at. Stream lock held. */
void orQueueClear(orQueueIn *in, orQueueOut *out);
/* Takes back a chunk that orQueueFront emptied. Stream lock held. */
void orQueueReuse(orQueueIn *in, orChunk *chunk);

/* ---- stream.c ---- */

typedef struct orBranch orBranch;
typedef struct orCapture orCapture;

typedef enum orStreamState {
  OR_STREAM_IDLE,    /* no task */
  OR_STREAM_READY,   /* in the scheduler's list */
  OR_STREAM_RUNNING, /* a lane has it, or a host thread that waits for a task of it */
  OR_STREAM_WAITING  /* its first task waits for a cell; no thread has it */
} orStreamState;

/* What may be no choice of a schedule; the allocator's poison never is. */
typedef enum orScheduleAside { OR_ASIDE_NOT, OR_ASIDE_MARK, OR_ASIDE_POISON } orScheduleAside;

enum { OR_PRIORITIES = 4 }; /* 0, -1, -2, -3 */

/* What a stream belongs to. Only a caller's is destroyed by orStreamDestroy. */
typedef enum orStreamOwner {
  OR_OWNER_CALLER,
  OR_OWNER_DEVICE, /* its default stream, never destroyed */
  OR_OWNER_POOL,   /* never destroyed */
  OR_OWNER_GRAPH
} orStreamOwner;

typedef struct orStream {
  /* Read often, written rarely. */
  orSlot slot;
  int device;
  int priority;
  orStreamOwner owner;
  orStream_t last_handle;      /* of the slot's present or latest owner */
  _Atomic uint64_t drop_until; /* tasks up to this number are dropped instead of run */
  _Atomic uint64_t wake_at;    /* sleepers: see await.c */
  _Atomic uint32_t wake_word;
  /* Under `lock`. Counters go on when the slot is used again. */
  _Alignas(OR_CACHE_LINE) orMutex lock;
  orStreamState state;
  bool dying;              /* destroyed, still draining */
  bool lost;               /* its device is: nothing more is queued */
  int lane;                /* while RUNNING, its lane, or OR_HOST */
  _Atomic uint64_t queued; /* tasks; read by all */
  uint64_t lane_until;     /* the number of the last task that only a lane may run */
  uint64_t room_until;     /* the queue is not full before this count, as last looked at */
  size_t bytes_in;         /* of all records ever queued */
  size_t bytes_until;
  orBranch *capturing; /* where its work goes instead; or null */
  orQueueIn in;
  orCell *waits_for; /* while WAITING */
  /* The thread that runs the stream. */
  _Alignas(OR_CACHE_LINE) _Atomic uint64_t completed; /* tasks; read by all */
  _Atomic size_t bytes_out;                           /* read by all */
  uint64_t seen;                                      /* `queued`, as last looked at */
  _Atomic(const orTask *) head; /* the task that runs, or ran last; valid under `lock`; null */
  _Atomic uint64_t began;       /* when it was started, if a tool wants to know */
  orQueueOut out;
  /* Under the scheduler's lock. */
  _Alignas(OR_CACHE_LINE) struct orStream *ready_next;
  uint64_t ready_since;
  /* Under the schedule's lock. */
  uint64_t schedule_epoch;
  uint32_t schedule_number;
  orScheduleAside schedule_aside; /* while it is held: of its first task */
  /* Under the lock of the cell it waits for. */
  struct orStream *waiter_next;
} orStream;

extern orHandleTable orStreamTable;

/* A record to fill, in a stream that is locked until orStreamCommit. May block while the queue is
 * full if `hold` says so (kernels and copies). */
orError_t orStreamBegin(orStream_t handle, bool hold, size_t args_size, orStream **stream,
                        orTask **task);
/* What the allocator does for itself: never held up, and run though the stream captures. */
orError_t orStreamBeginAside(orStream_t handle, orStream **stream, orTask **task);
/* Calls `fn` for each stream of the device with tasks that have not finished, destroyed ones too:
 * its handle, and the number of the last. No lock is held meanwhile. */
void orStreamsForEachBusy(int device, void (*fn)(orStream_t stream, uint64_t last, void *context),
                          void *context);
/* The stream, locked; 0 is the current device's default one. */
orError_t orStreamLock(orStream_t handle, orStream **stream);
/* Publishes the record, unlocks and schedules; returns the task's number on its stream: 0 in a
 * capture. */
uint64_t orStreamCommit(orStream *stream, orTask *task);
/* Who waits though the call does not promise it may rely on nothing. */
typedef enum orAwaits {
  OR_AWAITS_NOT,
  OR_AWAITS_RUN, /* unasked, and takes no failure of the device */
  OR_AWAITS_UNASKED,
  OR_AWAITS_AS_PROMISED
} orAwaits;
/* For kernels, copies and fills: commits; if it waits, or with OPENREG_LAUNCH_BLOCKING, returns
 * when the task is done and reports as every call that synchronises does, or that the task was
 * dropped. */
orError_t orStreamSubmit(orStream *stream, orTask *task, orAwaits waits);
/* Copies of records, marks and waits with cells by their slots. */
typedef struct orSequence {
  const orTask *const *tasks;
  size_t count, bytes; /* of the records together, or more */
  orCell *const *cells;
} orSequence;
/* All of them, with nothing between, or none. Never blocks. `asked`: somebody queues them on this
 * stream, which may refuse; else they follow what was queued elsewhere, and are dropped if the
 * device is lost. */
orError_t orStreamQueueAll(orStream_t handle, bool asked, const orSequence *records);
/* Reserves room for records of `bytes` together. The next orStreamQueueAll then lacks no memory,
 * unless another call queues on the stream first. */
orError_t orStreamReserve(orStream_t handle, size_t bytes);
/* Blocks while the queue is full. */
orError_t orStreamAwaitRoom(orStream_t handle);
/* A waiting stream becomes runnable; its wait is looked at again. Harmless when it does not
 * wait. */
void orStreamResume(orStream *stream);
/* By a lane: one more task has finished. */
void orStreamFinishTask(orStream *stream, const orTask *task);
/* By the lane that runs it: true if the stream was empty and is now idle (the lane lets go of
 * it). */
bool orStreamTryIdle(orStream *stream);
/* Every stream of a device (-1: of all) that has unfinished tasks, in turn, with its count of tasks
 * so far: that many were the device's. By the time `fn` runs, the slot may be another stream's. */
void orStreamForEach(int device, void (*fn)(orStream *stream, uint64_t queued, void *context),
                     void *context);
/* Waits until everything queued now on a device (-1: all) has finished, or fails as orAwait; `call`
 * promises it, or is null. */
orError_t orStreamSynchronizeDevice(const char *call, int device);
/* Tells every stream of a device, also those to come, that it is lost, and drops what is queued; or
 * that it is back. The caller has noted it where orStreamMake looks. */
void orStreamsSetLost(int device, bool lost);
/* Every waiting stream of a device looks at its wait again. */
void orStreamsGiveUpWaits(int device);
/* The stream whose mark it waits for, if it does. */
orStream *orStreamBlocker(orStream *stream);
/* Runs a stream that the calling host thread has taken until `count` of its tasks have finished: it
 * has nothing else to do. */
void orStreamRunHere(orStream *stream, uint64_t count);
/* Waits until every stream is idle, no lane having one. */
orError_t orStreamSettle(void);
orError_t orStreamMake(int device, int priority, orStreamOwner owner, orStream_t *handle);
/* Destroys a stream that the library owns. Any thread, also in a task. */
void orStreamUnmake(orStream_t handle);
/* "the default stream", "a stream of the pool" or "a stream of a graph"; null: a caller's. */
const char *orStreamOwnerName(orStreamOwner owner);
int orClampPriority(int priority);
/* Tasks queued so far, and finished so far. A destroyed stream that has drained: 0 and
 * UINT64_MAX. */
orError_t orStreamQueued(orStream_t stream, uint64_t *count);
orError_t orStreamCompleted(orStream_t stream, uint64_t *count);
/* The task that the calling thread is running: its stream, and its number there (from 1). */
bool orTaskCurrent(orStream_t *stream, uint64_t *number); /* task.c */
orStream *orTaskStream(void);                             /* task.c; null outside a task */
const char *orTaskName(void); /* task.c; that the thread is running, or null; for signal handlers */
const char *orLastQueued(void); /* stream.c; by the calling thread, or null; for signal handlers */

/* ---- event.c ---- */

typedef struct orGraphNode orGraphNode;

/* One completion. Pooled; freed when the last reference goes. */
struct orCell {
  _Atomic uint32_t refs;
  _Atomic uint32_t state; /* futex: OR_CELL_* */
  orMutex lock;           /* waiters, and the step to done as seen by them */
  orStream *waiters;
  uint64_t time_ns;   /* written before done */
  orError_t status;   /* written before done */
  orStream_t stream;  /* that it was recorded on; 0: external */
  uint64_t number;    /* of its mark there */
  orEvent_t event;    /* that it was made for */
  orCell *next;       /* pool */
  void *kept;         /* a tool's, under its lock; it is told when the cell is freed */
  orCapture *capture; /* that it was recorded in: nothing completes it; or null */
  orGraphNode *mark;  /* there, while the capture is active */
};
/* From LOOK on it counts how often sleepers should have looked around: none misses two of them. */
enum { OR_CELL_PENDING = 0, OR_CELL_DONE = 1, OR_CELL_SLEEPERS = 2, OR_CELL_LOOK = 4 };

/* With that many references; null if memory is short. */
orCell *orCellNew(uint32_t refs);
orCell *orCellRetain(orCell *cell);
void orCellRelease(orCell *cell);
static inline bool orCellDone(const orCell *cell) {
  return atomic_load_explicit(&cell->state, memory_order_acquire) & OR_CELL_DONE;
}
/* Once. Wakes everybody who waits. */
void orCellComplete(orCell *cell, orError_t status);
/* By a lane, of the stream it runs: true if the cell is done; false if the stream now waits and is
 * no longer the lane's. */
bool orCellWaitOrPark(orCell *cell, orStream *stream);
/* That it was recorded on; null: external. */
orStream *orCellStream(const orCell *cell);
/* Takes a waiting stream off the cell's list, if it is there. Stream lock held. */
void orCellForget(orCell *cell, orStream *stream);
/* A new external event and its cell (a reference for the caller). */
orError_t orEventMakeExternal(int device, orEvent_t *event, orCell **cell);
/* Destroys it, which no other thread may. */
void orEventEndTask(orEvent_t event);
/* The newest cell with a reference for the caller, or null, and the event's flags. */
orError_t orEventCell(orEvent_t event, orCell **cell, unsigned *flags);

/* ---- context.c ---- */

/* Makes device `index` ready for use (first use), or fails naming the index and the range. */
orError_t orDeviceUse(int index);
orError_t orDeviceDefaultStream(int device, orStream_t *stream);

/* ---- failure.c ---- */

/* Keeps the first asynchronous failure of a device, counts the others; orErrorDeviceLost comes
 * before any and loses the device. Its cause is what the thread has set. Any thread, no lock
 * held. */
void orDeviceNoteFailure(int index, orError_t error, const char *kernel, const char *detail);
/* Drops what the calling thread has set as the cause of a failure that it then did not note. No
 * lock held. */
void orFailureDropCause(void);
/* Called at the end of every call that synchronises: hands the failure out once, that of a lost
 * device each time. */
orError_t orDeviceTakeFailure(int index);
bool orDeviceIsLost(int index);
/* orSuccess, or orErrorDeviceLost with its text. */
orError_t orDeviceCheckLost(int index);
void orDeviceForgetFailure(int index);

/* ---- memory.c ---- */

/* A region of a device that is made ready for use; notes that it is lost. */
orError_t orMemoryAllocate(int device, size_t bytes, bool cached, void **ptr);

/* ---- await.c ---- */

enum { OR_SPIN_NS = 20000 }; /* a host that waits, before it sleeps */

/* What a host thread may wait for: `count` tasks of a stream have finished, or, where there is
 * none, an external event's cell is done. A recorded event has all three: it is over when its mark
 * is, which completes its cell just before. */
typedef struct orAwaited {
  orStream *stream;
  uint64_t count;
  orCell *cell;
} orAwaited;

bool orIsOver(const orAwaited *awaited);
/* Blocks until it is over, or fails because it will not be (the process exits); helps with the
 * pieces of large tasks meanwhile. */
orError_t orAwait(const orAwaited *awaited);
orError_t orAwaitTasks(orStream *stream, uint64_t count);
/* For a host that asks, and it was not over: orErrorNotReady, or why it will not be. Whoever asks
 * again gets another answer in the end. */
orError_t orAwaitStep(const orAwaited *awaited);
/* Blocks until the task `number` has finished (true), or no thread is at it and none will come to
 * it: it is dropped instead. After an error of orAwait, by the thread that queued it. */
bool orAwaitOrCancel(orStream *stream, orTask *task, uint64_t number);
/* Wakes whoever sleeps for the stream's progress, to help with a copy; false if nobody does. */
bool orStreamAskForHelp(orStream *stream);
void orStreamWakeSleepers(orStream *stream); /* whatever they wait for */

/* A host thread that sleeps, until orHostWaitEnd; for nothing that it named: for what a schedule
 * has chosen to run. */
typedef struct orHostWait {
  struct orHostWait *next, **at;
  orAwaited awaited;
  orStream_t stream;
  uint64_t since;
  int thread;
  bool reported;
} orHostWait;
void orHostWaitBegin(orHostWait *wait, const orAwaited *awaited);
void orHostWaitEnd(orHostWait *wait);
void orHostWaitsEach(void (*fn)(orHostWait *wait, void *context), void *context);
void orHostWaitsWake(void); /* all of them, to look around */

/* ---- lane.c ---- */

/* Puts a stream that has just become READY into the list and sees to it that a lane runs. No lock
 * held. */
void orLaneSchedule(orStream *stream);
/* Wakes up to `count` sleeping lanes to look for pieces of copies. */
void orLaneWakeIdle(int count);
void orLaneHostWaits(bool waits); /* the calling thread: for long already, or no more */

/* Of a dispatcher: hands a stream that can run to lane 0, which calls `serve` with it; `refuse`
 * takes it back if the system refuses lane 0 a thread. */
void orLaneServe(orStream *stream, void (*serve)(orStream *stream),
                 void (*refuse)(orStream *stream));

/* Not 0: the system has refused a thread, and no lane has been started since (lane.c). */
extern OR_HIDDEN _Atomic uint32_t orLanesRefused;
/* Tries again for the streams that are ready; true if any lane is alive, or about to be. */
bool orLaneStartRefused(void);
static inline void orLaneTryAgain(void) {
  if (OR_UNLIKELY(atomic_load_explicit(&orLanesRefused, memory_order_relaxed)))
    orLaneStartRefused();
}
/* orErrorSystem, for work that waits for a lane. */
orError_t orLaneRefuse(void);
/* By a host that waits: tries again, and while no lane is alive runs what it may run. An error:
 * what it waits for needs a lane. Else it may sleep while `orLanesRefused` is `*refused`. */
orError_t orLaneStandInSlow(const orAwaited *awaited, uint32_t *refused);
static inline orError_t orLaneStandIn(const orAwaited *awaited, uint32_t *refused) {
  *refused = atomic_load_explicit(&orLanesRefused, memory_order_relaxed);
  return OR_LIKELY(!*refused) ? orSuccess : orLaneStandInSlow(awaited, refused);
}

enum { OR_HOST = -1 }; /* in place of a lane's index: a host thread */
/* Runs a stream that the calling thread has taken, until `count` of its tasks have finished, and
 * gives it back; false if it waits before. */
bool orLaneRun(orStream *stream, uint64_t count, int lane);
/* By the thread that runs it, in the midst of its first task: somebody else may come first. */
void orLaneGiveBack(orStream *stream);
/* The first task of a stream that is ready and in nobody's list. */
const orTask *orLaneFirst(orStream *stream);
/* By a host thread: takes a stream that is ready; false if a lane has come before, or a task of it
 * is for lanes. */
bool orLaneTake(orStream *stream);

#include "dispatch.h"
#include "graph.h"

/* ---- split.c ---- */

/* Takes pieces of running tasks until none is left; false if there was none. */
bool orSplitHelp(void);
bool orSplitWantsHelp(void);
/* By a constructor: `fn` wakes up to `missing` who may help. */
void orSplitSetCall(void (*fn)(int missing));
/* memcpy between addresses that this thread can reach; a large one in pieces. Returns when done. In
 * a task. */
void orCopyBytes(void *dst, const void *src, size_t bytes);

/* ---- task.c ---- */

/* Not for events and waits, which are for whoever comes. */
static inline bool orTaskIsForLanes(const orTask *task) {
  return task->kind <= OR_KIND_SET && !task->any_thread;
}
/* Whether work of a device (-1: of none) may be run by a host thread that waits for it. */
bool orTaskAnyThread(int device);
/* Runs the first task of a stream, number `number` of it, and lets go of its arguments; false if
 * the stream waits and is no longer the lane's. */
bool orTaskRun(orStream *stream, orTask *task, uint64_t number, int lane);
/* Instead of running: completes its event, lets go of its arguments. */
void orTaskDrop(orTask *task);

/* Of a stream's task: unlike any other's, as a slot's counters never start again. */
enum { OR_NUMBER_BITS = 64 - OR_INDEX_BITS };
static inline uint64_t orCorrelation(orStream_t stream, uint64_t number) {
  return (uint64_t)orHandleIndex(stream) << OR_NUMBER_BITS |
         orHandleBits(number, 0, OR_NUMBER_BITS);
}

#include "probe.h"

/* ---- hang.c ---- */

/* "the default stream of openreg:0", also of one that is gone. */
typedef char orStreamName[64];
const char *orStreamNameOf(orStreamName text, orStream_t stream);
/* The hang report on stderr; `why` ends its first line. No lock held. */
void orHangPrint(const char *why);

/* ---- wait.c ---- */

uint64_t orNow(void); /* CLOCK_MONOTONIC, ns */
void orSleep(uint64_t ns);
void orFutexWait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns); /* 0: no time-out */
void orFutexWake(_Atomic uint32_t *word, int count);
static inline void orPause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}
/* Around a sleep: lets the caller of the library put down a lock of its own (orSetBlockHooks). */
void *orBlockEnter(void);
void orBlockLeave(void *token);

#endif
