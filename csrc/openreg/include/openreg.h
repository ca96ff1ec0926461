/*
 * libopenreg: an accelerator simulated on the CPU.
 *
 * The API has the shape of the CUDA runtime: every call returns an orError_t and hands results
 * back through pointers. Handles are 64-bit numbers; a wrong, foreign or destroyed one is answered
 * with orErrorInvalidResourceHandle, never with a wild read. The text behind the last error of
 * the calling thread (what was given, what was allowed) is orGetLastErrorMessage().
 *
 * Words used below:
 *   asynchronous   returns before the work has run; the work is ordered after everything
 *                  queued earlier on the same stream, and after nothing else.
 *   synchronises   blocks the calling thread; also the place where the error of a failed kernel
 *                  surfaces.
 *
 * A structure that begins with its size may be of another version's header, as in Linux's
 * extensible system calls. A smaller one is taken as if the members that it lacks were 0, their
 * default, as long as it has those that are required. A larger one is taken if what this library
 * does not know is 0, and else refused (orErrorInvalidValue; a device factory's table:
 * orErrorPluginVersion).
 *
 * A structure that this library fills begins with its size, too, which the caller sets. The library
 * fills as many bytes and no more; what it does not know becomes 0. Elements of an array that it
 * fills are as far apart as the caller says in the call; orTrace says how far apart its records
 * are.
 *
 * Nothing is started or mapped before the first stream, event, allocation or copy is asked for.
 *
 * When the process exits, exit handlers and destructors that were registered before the first use
 * of a device run after the library's own, from which on no queued work is begun. A call that waits
 * then for unfinished work, asks about it, or has begun to wait for it before, returns
 * orErrorNotPermitted and frees nothing; one whose own task is running returns when that has ended.
 * Finished work is waited for, and memory that no unfinished work may use is freed, as before.
 *
 * Where the system refuses a thread for queued work, each launch and each wait tries again. While
 * there is none at all, a call that waits runs what any thread may run, and returns orErrorSystem
 * if what it waits for needs a thread of the library. Work stays queued, except that of such a call
 * itself, which is dropped.
 */
#ifndef OPENREG_H
#define OPENREG_H

#include <stddef.h>
#include <stdint.h>

#if UINTPTR_MAX < UINT64_MAX
#error \
    "openreg needs a platform with 64-bit addresses: devices take more addresses than 32 bits have"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define OR_API __attribute__((visibility("default")))
#else
#define OR_API
#endif

/* This header's version, which nothing else says: the build, the package and the library's file
 * name take it from here. A program that was built against an older header of the same major
 * version runs with this library. */
#define OPENREG_VERSION_MAJOR 0
#define OPENREG_VERSION_MINOR 1
#define OPENREG_VERSION_PATCH 0
#define OPENREG_VERSION \
  (OPENREG_VERSION_MAJOR * 10000 + OPENREG_VERSION_MINOR * 100 + OPENREG_VERSION_PATCH)
#define OR_QUOTED_(text) #text
#define OR_QUOTED(text) OR_QUOTED_(text)
#define OPENREG_VERSION_STRING     \
  OR_QUOTED(OPENREG_VERSION_MAJOR) \
  "." OR_QUOTED(OPENREG_VERSION_MINOR) "." OR_QUOTED(OPENREG_VERSION_PATCH)
/* OPENREG_VERSION of the library that runs. */
OR_API int orGetVersion(void);
/* The device factory table's version: a plugin built against another one is refused. */
#define OPENREG_ABI_VERSION 2u
#define OPENREG_MAX_DEVICES 64

/* ---- Errors -------------------------------------------------------------------------------- */

/* orErrorDeviceLost is the one error that stays: a kernel, an operation of a device's factory or
 * orEventSignal reports it, and what is queued on the device is dropped as by orDeviceReset. Until
 * that reset every call that allocates on the device, queues work there or synchronises with it
 * returns it at once, naming what failed. Queries, records, waits for events, frees and other
 * devices go on as before. */

/* X(enumerator, text) */
#define OR_ERROR_LIST(X)                                                               \
  X(orSuccess, "no error")                                                             \
  X(orErrorInvalidValue, "invalid argument")                                           \
  X(orErrorMemoryAllocation, "out of memory")                                          \
  X(orErrorNoDevice, "no openreg device is available")                                 \
  X(orErrorInvalidDevice, "invalid device ordinal")                                    \
  X(orErrorInvalidResourceHandle, "invalid resource handle")                           \
  X(orErrorInvalidMemcpyDirection, "copy kind does not match the pointers")            \
  X(orErrorNotReady, "work is not finished")                                           \
  X(orErrorNotFound, "not found")                                                      \
  X(orErrorAlreadyExists, "already exists")                                            \
  X(orErrorAlreadyInitialized, "the devices have been made already")                   \
  X(orErrorNotSupported, "not supported by this device")                               \
  X(orErrorNotPermitted, "not permitted inside a task or host function")               \
  X(orErrorForked,                                                                     \
    "cannot re-initialize openreg in forked subprocess; use the 'spawn' start method") \
  X(orErrorPluginLoad, "the plugin cannot be loaded")                                  \
  X(orErrorPluginSymbol, "the plugin has no orPluginInit function")                    \
  X(orErrorPluginVersion, "the plugin was built for another ABI version")              \
  X(orErrorEventNotRecorded, "the event has not been recorded")                        \
  X(orErrorEventNotTimed, "the event was created without timing")                      \
  X(orErrorLaunchFailure, "a kernel failed")                                           \
  X(orErrorSystem, "the operating system refused a request")                           \
  X(orErrorDeviceLost, "the device is lost")                                           \
  X(orErrorStreamCaptureUnsupported, "not permitted while a stream is capturing")      \
  X(orErrorStreamCaptureInvalidated, "the capture was invalidated by an earlier call") \
  X(orErrorStreamCaptureMerge, "two captures would become one")                        \
  X(orErrorStreamCaptureUnmatched, "no capture began on this stream")                  \
  X(orErrorStreamCaptureUnjoined, "a stream of the capture was not joined")            \
  X(orErrorStreamCaptureIsolation, "a capture cannot wait for what is outside of it")  \
  X(orErrorCapturedEvent, "the event was last recorded in a capture")

typedef enum orError_t {
#define OR_X(name, text) name,
  OR_ERROR_LIST(OR_X)
#undef OR_X
} orError_t;

OR_API const char *orGetErrorName(orError_t error);
OR_API const char *orGetErrorString(orError_t error);
/* Last error of the calling thread; Get clears it, Peek does not. orErrorNotReady is not kept. */
OR_API orError_t orGetLastError(void);
OR_API orError_t orPeekAtLastError(void);
/* Details of the calling thread's last failed call; valid until its next failed call. */
OR_API const char *orGetLastErrorMessage(void);

/* ---- Settings ------------------------------------------------------------------------------ */

/* Every OPENREG_* environment variable, read once, at the first call that needs one. */
typedef struct orSetting {
  size_t size;             /* sizeof(orSetting) */
  const char *name;        /* "OPENREG_DEVICE_COUNT" */
  const char *value;       /* the value in force, as text */
  const char *origin;      /* "default", "environment", or "environment (rejected)" */
  const char *description; /* one line, with what is allowed */
} orSetting;

/* orErrorInvalidValue past the last setting. */
OR_API orError_t orGetSetting(int index, orSetting *setting);

/* ---- Devices ------------------------------------------------------------------------------- */

typedef struct orDeviceProperties {
  size_t size;         /* sizeof(orDeviceProperties) */
  char name[64];       /* "/openreg:1" */
  char factory[64];    /* which factory made it */
  size_t total_memory; /* capacity, bytes */
  int index;
  int numa_node;  /* locality; -1: unknown */
  int lanes;      /* threads that may run tasks, over all devices */
  int host_cores; /* cores this process may run on */
  int can_map;    /* whether orMapForKernel works */
  int integrated; /* 0: device memory is not the host's */
} orDeviceProperties;

/* 0 devices is a success. A bad OPENREG_DEVICE_COUNT gives 0 and one line on stderr; a plugin that
 * fails is returned as its error (count is then 0). Starts nothing. */
OR_API orError_t orGetDeviceCount(int *count);
/* The current device belongs to the calling thread and starts as 0. */
OR_API orError_t orGetDevice(int *device);
OR_API orError_t orSetDevice(int device);
OR_API orError_t orGetDeviceProperties(orDeviceProperties *properties, int device);
/* Bytes of the current device: free for orMalloc, and the capacity. */
OR_API orError_t orMemGetInfo(size_t *free_bytes, size_t *total_bytes);
/* Lower numbers are more urgent: least is 0, greatest is negative. */
OR_API orError_t orDeviceGetStreamPriorityRange(int *least, int *greatest);
/* Synchronises with every stream of the current device. */
OR_API orError_t orDeviceSynchronize(void);
/* Drops the work queued on the current device, completes its events and writes its values, so that
 * nobody waits for ever; clears its error and gives unused cached memory back. Waits for the task
 * that is running. The device is as usable as ever, also if it was lost. Allocations, streams and
 * events stay valid; contents are undefined. */
OR_API orError_t orDeviceReset(void);
/* 1 if kernels of `device` could reach memory of `peer`, once that is enabled. Copies need
 * neither. */
OR_API orError_t orDeviceCanAccessPeer(int *can, int device, int peer);
/* From now on orMapForKernel gives kernels of `device` addresses of `peer`'s memory. One way;
 * enabling twice is not an error. orErrorNotSupported where orDeviceCanAccessPeer says 0. */
OR_API orError_t orDeviceEnablePeerAccess(int device, int peer);
/* 1 after the first use of the device: an allocation, stream, event or copy. Never initialises. */
OR_API int orDeviceIsActive(int device);
/* 1 in a forked child of a process that had used a device. */
OR_API int orInForkedChild(void);

/* ---- Memory -------------------------------------------------------------------------------- */

typedef enum orMemcpyKind {
  orMemcpyHostToHost = 0,
  orMemcpyHostToDevice = 1,
  orMemcpyDeviceToHost = 2,
  orMemcpyDeviceToDevice = 3,
  orMemcpyDefault = 4 /* taken from the pointers */
} orMemcpyKind;

typedef enum orMemoryType {
  orMemoryTypeUnregistered = 0, /* ordinary (pageable) host memory */
  orMemoryTypeHost = 1,         /* pinned or registered host memory */
  orMemoryTypeDevice = 2
} orMemoryType;

typedef struct orPointerAttributes {
  size_t struct_size; /* sizeof(orPointerAttributes) */
  orMemoryType type;
  int device;  /* owner; -1 for host memory */
  void *base;  /* start of the allocation */
  size_t size; /* bytes of the allocation */
} orPointerAttributes;

/* On the current device. The address faults on any host access. Sizes are rounded up to pages; 0
 * bytes is a null pointer. Does not synchronise. orErrorMemoryAllocation leaves everything as it
 * was. */
OR_API orError_t orMalloc(void **ptr, size_t bytes);
/* The start of a live allocation, or null. Synchronises with every device that can reach it. */
OR_API orError_t orFree(void *ptr);
/* Pinned host memory: copies from and to it are asynchronous. A forked child has its own copy. */
OR_API orError_t orMallocHost(void **ptr, size_t bytes);
/* Synchronises with every device. */
OR_API orError_t orFreeHost(void *ptr);
/* Makes existing host memory count as pinned. A range that overlaps another registered one is
 * orErrorAlreadyExists. The memory must stay until orHostUnregister. */
OR_API orError_t orHostRegister(void *ptr, size_t bytes);
OR_API orError_t orHostUnregister(void *ptr);
/* Any interior pointer. Host memory that is not pinned succeeds with orMemoryTypeUnregistered. */
OR_API orError_t orPointerGetAttributes(orPointerAttributes *attributes, const void *ptr);

/* Copies check both ranges against their allocations: past an end is orErrorInvalidValue, and
 * nothing moves. The blocking forms use the current device's default stream and return when done.
 * The Async forms are asynchronous with device and pinned memory; a pageable source has been
 * read, and a pageable destination written, when they return. */
OR_API orError_t orMemcpy(void *dst, const void *src, size_t bytes, orMemcpyKind kind);
typedef uint64_t orStream_t;
OR_API orError_t orMemcpyAsync(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                               orStream_t stream);
/* orMemcpyAsync, then orStreamSynchronize, in one call: the calling thread may run the copy
 * itself. */
OR_API orError_t orMemcpyWithStream(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                                    orStream_t stream);
/* Both pointers are device memory; the devices must be the pointers' own. */
OR_API orError_t orMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                                   size_t bytes, orStream_t stream);
/* Device or pinned memory. */
OR_API orError_t orMemset(void *dst, int value, size_t bytes);
OR_API orError_t orMemsetAsync(void *dst, int value, size_t bytes, orStream_t stream);

/* The address at which a task reads and writes the device range [ptr, ptr + bytes): valid inside a
 * task only. orErrorNotSupported on a device whose factory has no `map`. */
OR_API orError_t orMapForKernel(void **address, const void *ptr, size_t bytes);

/* ---- Streams ------------------------------------------------------------------------------- */

/* A stream is a queue of tasks that run one after the other. 0 names the current device's default
 * stream. Streams are never ordered with each other implicitly. */
#define OR_STREAM_DEFAULT ((orStream_t)0)

/* On the current device; the priority is clamped to orDeviceGetStreamPriorityRange. */
OR_API orError_t orStreamCreate(orStream_t *stream);
OR_API orError_t orStreamCreateWithPriority(orStream_t *stream, int priority);
/* The handle of a device's default stream, which is never 0 and cannot be destroyed. */
OR_API orError_t orStreamGetDefault(orStream_t *stream, int device);
/* One of the device's streams of this priority (clamped), which everybody shares, in turn. It is
 * made when its turn comes first, and is nobody's to destroy. */
OR_API orError_t orStreamGetFromPool(orStream_t *stream, int priority, int device);
#define OPENREG_STREAMS_PER_POOL 32
/* Work already queued still runs; the handle is invalid at once. Never blocks. orErrorInvalidValue
 * for a stream that the library owns: a default one, one of a pool, a graph's own. */
OR_API orError_t orStreamDestroy(orStream_t stream);
OR_API orError_t orStreamGetDevice(orStream_t stream, int *device);
OR_API orError_t orStreamGetPriority(orStream_t stream, int *priority);
/* orSuccess when the last task has finished, orErrorNotReady before. Never reports a kernel's
 * error. */
OR_API orError_t orStreamQuery(orStream_t stream);
/* Synchronises. */
OR_API orError_t orStreamSynchronize(orStream_t stream);

/* Runs on a worker, in stream order. The function may not call this API (orErrorNotPermitted). */
OR_API orError_t orLaunchHostFunc(orStream_t stream, void (*fn)(void *), void *user_data);

/* ---- Kernels ------------------------------------------------------------------------------- */

typedef struct orAccess {
  const void *address; /* device memory */
  size_t bytes;
  int write;
} orAccess;

/* A kernel returns orSuccess, or an error that surfaces at the next call that synchronises with the
 * device (orErrorDeviceLost: at every call until a reset). It may call orMapForKernel and the
 * functions that neither block nor enqueue. */
typedef orError_t (*orKernelFn)(void *args);

/* orLaunchAnyThread: a host thread that waits may run the kernel, without what the worker hook
 * sets up. orLaunchAwaited: the caller waits for the stream next. If no worker has begun with what
 * is queued there, and any thread may run all of it, the call itself does, the kernel included:
 * what is short is done sooner than a worker is woken. */
/* orLaunchWaits: the call does wait, returns when the kernel has run, and takes no failure: that
 * is for the next call that synchronises. A kernel that was dropped instead, by a reset or a
 * lost device, is an error of this call. orLaunchTold: the sanitizer knows by other calls what the
 * kernel touches (orSanitizerAccess), and not by `accesses`. */
typedef enum orLaunchFlags {
  orLaunchAnyThread = 1,
  orLaunchAwaited = 2,
  orLaunchWaits = 4,
  orLaunchTold = 8
} orLaunchFlags;

typedef struct orLaunch {
  size_t size; /* sizeof(orLaunch) */
  orStream_t stream;
  orKernelFn fn;
  const void *args; /* copied into the queue, 16-byte aligned there; at most OR_MAX_ARGS bytes */
  size_t args_size;
  void (*drop)(void *args); /* optional; called once when the queue lets go of the arguments,
                               whether or not the kernel ran: a kernel does not consume them.
                               Any thread; may not call this API. */
  /* what the kernel touches; each range is checked against its allocation, and the sanitizer
   * compares it with what others touch */
  const orAccess *accesses;
  size_t access_count;
  const char *name; /* for errors and traces; interned (must outlive the process's use of it) */
  unsigned flags;   /* orLaunchFlags */
  int *queued;      /* optional; becomes 1 when the queue owns the arguments, else 0 */
} orLaunch;

#define OR_MAX_ARGS 65536u

/* Asynchronous. Blocks, asleep, while the stream's queue is full (see orSetBlockHooks). On failure
 * nothing is queued and `drop` is not called, except with orLaunchWaits or OPENREG_LAUNCH_BLOCKING:
 * the call then waits for the kernel and may return an error of it, and the queue has dropped the
 * arguments, or, where the kernel cannot run for want of a thread or because the process exits,
 * will drop them when there is one. Whoever frees them on failure asks `queued`, which is 0 before
 * the call where the structure may be refused. */
OR_API orError_t orLaunchKernelEx(const orLaunch *launch);
/* Keeps a worker for `nanoseconds` doing nothing. Asynchronous. */
OR_API orError_t orLaunchSleep(orStream_t stream, uint64_t nanoseconds);
/* Inside a kernel: calls piece(context, i) once for every i below `count`, in any order, on this
 * thread and on threads that have nothing else to do (idle workers, hosts that wait for the
 * stream), and returns when all have returned. Pieces do not call this API. One should be worth
 * some ten microseconds. */
typedef void (*orPieceFn)(void *context, size_t index);
OR_API orError_t orRunPieces(orPieceFn piece, void *context, size_t count);
/* Inside a task: a detail added to the error that the task is about to return. */
OR_API void orSetTaskErrorMessage(const char *message);
/* Inside a task that is about to return an error, or right before orEventSignal with one: what
 * caused it, for the call that reports it. Owned from here on: `drop(cause)` (optional) is called
 * once, unless orTakeFailureCause gave it away: where another failure is reported in its place, the
 * device is reset, the thread it was reported to gets another or ends, or the task or the signal
 * fails nothing after all. The event by which a device factory completes a task carries none. Any
 * thread, holding no lock; it may not call this API. */
OR_API void orSetFailureCause(void *cause, void (*drop)(void *cause));
/* What caused the failure that the last error of the calling thread reported: the caller's from
 * here on. Null if it had none, was taken already, or the last error reported no failure of a
 * device. `others` (optional): how many more had failed after it. */
OR_API void *orTakeFailureCause(unsigned *others);

/* Called on the calling thread around anything that may put it to sleep, so that a caller can
 * let go of a lock of its own (Python's GIL). `enter` returns a token for `leave`. Set once. */
typedef struct orBlockHooks {
  void *(*enter)(void);
  void (*leave)(void *token);
} orBlockHooks;
OR_API orError_t orSetBlockHooks(const orBlockHooks *hooks);

/* Called once on each new worker before its first task. `wide` is 1 on the one worker whose kernels
 * may use several threads. Set before the first task. The hook may not call this API
 * (orErrorNotPermitted). */
OR_API orError_t orSetWorkerHook(void (*hook)(int worker, int wide));

typedef struct orWorkerInfo {
  size_t size; /* sizeof(orWorkerInfo) */
  int limit;   /* most workers there can be */
  int started;
  size_t queued; /* tasks queued or running, over all streams */
} orWorkerInfo;
OR_API orError_t orGetWorkerInfo(orWorkerInfo *info);

/* ---- Events -------------------------------------------------------------------------------- */

typedef uint64_t orEvent_t;

enum {
  orEventDefault = 0,
  orEventDisableTiming = 1,
  orEventExternal = 2 /* completed by orEventSignal, not by a stream; pending from its creation */
};

/* On the current device. */
OR_API orError_t orEventCreate(orEvent_t *event);
OR_API orError_t orEventCreateWithFlags(orEvent_t *event, unsigned flags);
/* Never blocks; waits that are queued keep what they bound to. An external event that was not
 * signalled is completed: nobody can do it afterwards. */
OR_API orError_t orEventDestroy(orEvent_t event);
OR_API orError_t orEventGetDevice(orEvent_t event, int *device);
/* Asynchronous, never blocks. Each record is a new version; the stream must be of the event's
 * device. */
OR_API orError_t orEventRecord(orEvent_t event, orStream_t stream);
/* Asynchronous, never blocks. Binds to the newest record at the time of the call; a no-op for an
 * event never recorded and for the event's own stream. Streams of any device. */
OR_API orError_t orStreamWaitEvent(orStream_t stream, orEvent_t event);
/* Of the newest record; orSuccess for an event never recorded. Query never reports a kernel's
 * error. */
OR_API orError_t orEventQuery(orEvent_t event);
/* Synchronises. */
OR_API orError_t orEventSynchronize(orEvent_t event);
/* Milliseconds between two finished, timed records of one device. */
OR_API orError_t orEventElapsedTime(float *milliseconds, orEvent_t start, orEvent_t end);
/* Completes an external event, from any thread, once; `status` other than orSuccess becomes the
 * asynchronous error of the event's device (orErrorNotReady is refused). Never blocks. */
OR_API orError_t orEventSignal(orEvent_t event, orError_t status);

/* ---- Caching allocator --------------------------------------------------------------------- */

/* What a framework allocates from: blocks are kept and handed out again on the stream that they
 * were asked for. A freed block may be reused at once by work queued later on its own stream;
 * streams named by orCacheRecordStream are waited for first, without blocking. */

/* Device memory for work on `stream`, at least `bytes`, 512-byte aligned. Does not synchronise,
 * except to give cached blocks back before orErrorMemoryAllocation. 0 bytes is a null pointer.
 * Inside a task: a block of the task's own stream that no task still to run can be using. */
OR_API orError_t orCacheMalloc(void **ptr, size_t bytes, orStream_t stream);
/* What a caller says of a block, for the report of openreg_host_access.h: constant, and never
 * freed. */
typedef struct orOrigin {
  size_t size;      /* sizeof(orOrigin) */
  const char *type; /* of the elements, or null */
  const char *file; /* where the program asked for it, or null */
  uint32_t line;
} orOrigin;
/* Of the next block that the calling thread gets; null: nothing is said. */
OR_API void orCacheSetOrigin(const orOrigin *origin);
/* The pointer that orCacheMalloc gave, or null. Never blocks; any thread, also inside a task. */
OR_API orError_t orCacheFree(void *ptr);
/* Any interior pointer of a live block: its memory is not reused before the work queued so far on
 * `stream` is done. */
OR_API orError_t orCacheRecordStream(const void *ptr, orStream_t stream);
/* Of a pointer that orCacheMalloc gave: orErrorInvalidValue if its block is smaller than this.
 * Copies and launches see only the segment that blocks are cut from. Other pointers are not
 * judged. */
OR_API orError_t orCacheCheck(const void *ptr, size_t bytes);
/* Of the block at a pointer that orCacheMalloc gave; 0 for any other pointer. */
OR_API orError_t orCacheBlockSize(size_t *bytes, const void *ptr);
/* Gives every unused block of the device back that no queued work can reach, those of private pools
 * excepted. */
OR_API orError_t orCacheEmpty(int device);

/* A private pool: memory of a device that only requests for the pool get. What is freed goes back
 * to it and stays there, so that a graph's addresses do: neither orCacheEmpty nor a shortage takes
 * it. A pool is counted by its holders. When the last one lets go, its memory is the device's own,
 * blocks that are in use included, as soon as all that is queued on the device by then has
 * finished. 0 is no pool: the device's own memory. */
typedef uint64_t orMemPool_t;
/* Held once. */
OR_API orError_t orMemPoolCreate(orMemPool_t *pool, int device);
OR_API orError_t orMemPoolRetain(orMemPool_t pool);
/* The last holder's makes the handle invalid. Never blocks. */
OR_API orError_t orMemPoolRelease(orMemPool_t pool);
/* orCacheMalloc from a pool of the stream's device. */
OR_API orError_t orCacheMallocFromPool(void **ptr, size_t bytes, orStream_t stream,
                                       orMemPool_t pool);
/* orCacheEmpty for one pool. What a graph uses there must not be freed: no block of a graph's pool
 * is known to be unused while there is the graph. Waits for all that is queued on the device. */
OR_API orError_t orCacheEmptyPool(orMemPool_t pool);

/* 1: the device's whole capacity, which is also where it starts. Segments held beyond a smaller
 * fraction are kept while they are in use; no new one is made. */
OR_API orError_t orCacheSetFraction(int device, double fraction);
OR_API orError_t orCacheGetFraction(double *fraction, int device);

/* Of every device's cache; zeros are the defaults. */
typedef struct orCacheOptions {
  size_t size;                   /* sizeof(orCacheOptions) */
  size_t max_split_size;         /* blocks from here on are not split; 0: all may be */
  size_t max_non_split_rounding; /* how much too large such a block may be for a request */
  size_t large_segment_size; /* segment for requests of 1 to 10 MiB, 20 MiB or more; 0: 20 MiB */
  double garbage_collection_threshold; /* part of the allowed memory from which unused segments go
                                          back before a new one is made; 0: none */
  /* [i] for sizes of 2^i MiB and more, below 2^(i+1); [0] for smaller ones too: a request is
   * rounded up to the next of so many steps between two powers of two; 0 and 1: to 512 bytes */
  uint32_t roundup_power2_divisions[16];
} orCacheOptions;
OR_API orError_t orCacheSetOptions(const orCacheOptions *options);

typedef struct orCacheStat {
  int64_t current, peak, allocated, freed;
} orCacheStat;
/* In three pools each: 0 all, 1 small, 2 large (PyTorch's
 * c10::CachingDeviceAllocator::DeviceStats). */
typedef struct orCacheStats {
  size_t size; /* sizeof(orCacheStats) */
  orCacheStat allocation[3], segment[3], active[3], inactive_split[3];
  orCacheStat allocated_bytes[3], reserved_bytes[3], active_bytes[3], inactive_split_bytes[3],
      requested_bytes[3];
  int64_t alloc_retries, ooms, device_alloc, device_free, sync_all_streams;
  /* of orCacheOptions.max_split_size or more */
  orCacheStat oversize_allocations, oversize_segments;
} orCacheStats;
OR_API orError_t orCacheGetStats(orCacheStats *stats, int device);
typedef struct orMemPoolStats {
  size_t size; /* sizeof(orMemPoolStats) */
  uint64_t holders;
  orCacheStat reserved_bytes[3]; /* as in orCacheStats, where they are counted too */
} orMemPoolStats;
OR_API orError_t orMemPoolGetStats(orMemPoolStats *stats, orMemPool_t pool);
/* These two: private pools' too. */
OR_API orError_t orCacheResetPeakStats(int device);
OR_API orError_t orCacheResetAccumulatedStats(int device);

typedef enum orCacheBlockState {
  orCacheBlockInactive = 0,
  orCacheBlockAllocated = 1,
  orCacheBlockPending = 2 /* freed, recorded streams are not done */
} orCacheBlockState;

typedef struct orCacheBlock {
  void *address;
  void *segment; /* start of the memory it is part of */
  size_t bytes;
  size_t requested;  /* 0 if inactive */
  orStream_t stream; /* that the segment belongs to; it may have been destroyed */
  orCacheBlockState state;
  int large;        /* 1: the segment is of the pool for requests above 1 MiB */
  orMemPool_t pool; /* that the segment belongs to, or 0 */
} orCacheBlock;
/* Every block of a device, segment after segment, each in order of address. *count is the room in
 * `blocks`, of elements of `block_size` (sizeof(orCacheBlock)) bytes, and becomes the number of
 * blocks; nothing is written if that is more than there is room. */
OR_API orError_t orCacheSnapshot(orCacheBlock *blocks, size_t block_size, size_t *count,
                                 int device);

typedef enum orCacheAction {
  orCacheActionAlloc,
  orCacheActionFreeRequested,
  orCacheActionFreeCompleted, /* reusable: at once, or when recorded streams were found done */
  orCacheActionSegmentAlloc,
  orCacheActionSegmentFree,
  orCacheActionSnapshot,
  orCacheActionOutOfMemory
} orCacheAction;

typedef struct orCacheRecord {
  orCacheAction action;
  int device;
  void *address;      /* null: snapshot, out of memory */
  size_t bytes;       /* as asked for; of a segment: its size */
  size_t device_free; /* out of memory only */
  orStream_t stream;  /* 0: snapshot */
  uint64_t sequence;  /* the order on the device, from 1 */
  uint64_t time_ns;   /* CLOCK_MONOTONIC */
  orMemPool_t pool;   /* 0: the device's own memory */
} orCacheRecord;
/* Called under no lock, on the thread whose call of this section made it happen and before that
 * call returns: with several threads, records may come out of sequence. It may run wherever
 * orCacheFree may. Null switches it off. */
OR_API orError_t orSetCacheHook(void (*hook)(const orCacheRecord *record));

/* ---- Tracing ------------------------------------------------------------------------------- */

typedef enum orTraceKind {
  orTraceLaunch, /* a call that queued something: the calling thread */
  orTraceKernel, /* this and the next three: what ran on the device */
  orTraceMemcpy,
  orTraceMemset,
  orTraceHostFunc,
  orTraceSynchronize /* a call that waited: the calling thread */
} orTraceKind;

typedef struct orTraceRecord {
  orTraceKind kind;
  int device;        /* -1: a kernel that orDeviceCompute has run on the host */
  int lane;          /* -1: a host thread */
  int thread;        /* the system's number of the thread */
  int stream_number; /* small; given again when the stream has been destroyed */
  orStream_t stream; /* 0 for a device-wide synchronisation */
  const char *name;  /* the kernel's name, what was done, or the call */
  /* of launches and of what they launched: orGetLastCorrelation() right after the call */
  uint64_t correlation;
  uint64_t tag;              /* of launches and synchronisations: the thread's (orTraceTag) */
  uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
  size_t bytes;              /* of copies and fills */
} orTraceRecord;

typedef struct orTrace {
  size_t size;            /* sizeof(orTrace) */
  size_t record_size;     /* of a record, from the library */
  orTraceRecord *records; /* in no particular order */
  size_t count;
  size_t capacity;
  uint64_t dropped;  /* records that there was no room for */
  uint64_t start_ns; /* nothing that began earlier is recorded */
} orTrace;

/* One trace at a time: orErrorAlreadyExists while one is on. Room for `capacity` records (0:
 * OPENREG_TRACE_RECORDS); later ones are counted and dropped. A call that launches is one
 * record, what it launched another. */
OR_API orError_t orTraceStart(size_t capacity);
/* The trace is the caller's to free. It holds what had finished: tasks still running are not in it.
 * orErrorNotFound if tracing is off. */
OR_API orError_t orTraceStop(orTrace *trace);
OR_API void orTraceFree(orTrace *trace);
static inline const orTraceRecord *orTraceRecordAt(const orTrace *trace, size_t index) {
  return (const orTraceRecord *)((const char *)trace->records + index * trace->record_size);
}
/* What launches and synchronisations of the calling thread are marked with from now on, until the
 * trace ends; returns the tag before. 0 at first. */
OR_API uint64_t orTraceTag(uint64_t tag);
OR_API uint64_t orGetLastCorrelation(void);

/* ---- Device factories ---------------------------------------------------------------------- */

/* Devices come from factories. Of several registered for one type the one of highest priority
 * serves. A plugin (a shared library named in OPENREG_PLUGIN) registers one for "openreg" from its
 * orPluginInit() and so replaces the simulated device. */

typedef struct orDeviceCount {
  const char *type;
  int count;
} orDeviceCount;

typedef struct orDeviceConfig {
  size_t size; /* sizeof(orDeviceConfig) */
  /* types not named get the default: CPU 1, openreg OPENREG_DEVICE_COUNT */
  const orDeviceCount *device_count;
  size_t type_count;
} orDeviceConfig;

/* Of the size that OPENREG_ABI_VERSION says. */
typedef struct orDeviceDesc {
  int index;           /* within its type; set by the caller before create_devices */
  size_t memory_limit; /* bytes; what is above 2^50 counts as 2^50 */
  int numa_node;
  void *self; /* handed back as `device` to every function of the table */
} orDeviceDesc;

typedef struct orKernel {
  orKernelFn fn;
  void *args;
  const char *name;
} orKernel;

/* `copy` and `compute` run inside a task. They finish the work and return orSuccess, or return
 * orErrorNotReady and later complete it with orEventSignal(done, status) from any thread; the
 * stream then waits without holding a worker. `done` cannot be destroyed, and is invalid once the
 * task is over. Any other value is the task's failure. Where `done`
 * is 0 (a type other than "openreg" has no streams) they finish before they return.
 * orErrorDeviceLost, from `alloc` too, is for a device that can do nothing more; what it has
 * started it still has to signal. */
typedef struct orDeviceFactory {
  uint32_t size;        /* sizeof(orDeviceFactory) */
  uint32_t abi_version; /* OPENREG_ABI_VERSION */
  const char *name;     /* who makes the devices; for messages */
  /* Fills `count` descriptions. Its error stops orAddDevices and is returned from it. Threads that
   * it starts may not use devices before it has returned (see orAddDevices). */
  orError_t (*create_devices)(const orDeviceConfig *config, int count, orDeviceDesc *devices);
  /* Device types other than "CPU", up to `set`: addresses that are unique in the process. That of
   * `alloc` is not null and a multiple of 16; likewise `alloc_host`. */
  orError_t (*alloc)(void *device, size_t bytes, void **ptr);
  orError_t (*free)(void *device, void *ptr, size_t bytes);
  /* At least one of dst and src is memory of this device. */
  orError_t (*copy)(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                    orEvent_t done);
  orError_t (*set)(void *device, void *dst, int value, size_t bytes, orEvent_t done);
  orError_t (*compute)(void *device, const orKernel *kernel, orEvent_t done);
  /* Optional: null, or the kernel address of a range, as far from a multiple of 16 as `ptr` is. */
  orError_t (*map)(void *device, const void *ptr, size_t bytes, void **address);
  /* "CPU" only, optional: pinned host memory; pageable memory is malloc's. */
  orError_t (*alloc_host)(void *device, size_t bytes, void **ptr);
  orError_t (*free_host)(void *device, void *ptr, size_t bytes);
} orDeviceFactory;

/* Before the devices are made, never waiting: from when the first factory is asked for devices it
 * is orErrorAlreadyInitialized, unless that fails. An equal priority for one type is
 * orErrorAlreadyExists; a wrong size or version orErrorPluginVersion. The table must stay. */
OR_API orError_t orRegisterDeviceFactory(const char *type, int priority,
                                         const orDeviceFactory *factory);
OR_API orError_t orUnregisterDeviceFactory(const char *type, const orDeviceFactory *factory);

/* At file scope of a program or a library, in C or C++: registers a factory when that is loaded. A
 * plugin that has one needs no orPluginInit. A failure is one line on stderr, and a plugin's that
 * leaves it without a factory. */
#define OR_REGISTER_DEVICE_FACTORY(type, priority, factory)                            \
  __attribute__((constructor)) static void OR_JOIN(orRegisterAtLoad, __LINE__)(void) { \
    orRegisterDeviceFactoryAtLoad(type, priority, factory);                            \
  }
#define OR_JOIN_(a, b) a##b
#define OR_JOIN(a, b) OR_JOIN_(a, b)
OR_API void orRegisterDeviceFactoryAtLoad(const char *type, int priority,
                                          const orDeviceFactory *factory);

typedef struct orFactoryInfo {
  size_t size; /* sizeof(orFactoryInfo) */
  char type[32];
  char name[64];
  char plugin[256]; /* path of the library, or "" */
  int priority;
  int serves; /* 1: this one makes the devices of its type */
} orFactoryInfo;
/* orErrorInvalidValue past the last. */
OR_API orError_t orGetFactoryInfo(int index, orFactoryInfo *info);

/* Makes every device: the host's factory first ("CPU", required: none registered or no device
 * made is orErrorNotFound), then the other types'; one that fails stops it with its own error
 * and no device is left. Once; the first call that needs a device does it with the defaults. Its
 * failure is the answer for later calls, too, until orAddDevices is called again;
 * orErrorMemoryAllocation, orErrorSystem and a plugin that cannot be opened are tried again by the
 * next call.
 *
 * While one thread makes the devices, others that need them sleep (see orSetBlockHooks); no lock is
 * held. The plugin, create_devices and threads that they start get orErrorNotPermitted instead, as
 * the devices may wait for them. create_devices may not wait for a thread that it has not started
 * and that uses devices. A child that is forked meanwhile is refused: orErrorForked.
 *
 * Names are prefix + "/cpu:0". A null config means the defaults. */
OR_API orError_t orAddDevices(const orDeviceConfig *config, const char *name_prefix);

typedef struct orDevice orDevice;
OR_API orError_t orGetDeviceByName(orDevice **device, const char *name);
/* Of all types, the host's first. */
OR_API orError_t orGetTotalDeviceCount(int *count);
OR_API orError_t orGetDeviceAt(orDevice **device, int index);
OR_API orError_t orGetDeviceByIndex(orDevice **device, const char *type, int index);

typedef struct orDeviceAttributes {
  size_t size; /* sizeof(orDeviceAttributes) */
  char name[64];
  char type[32];
  char factory[64];
  int index;
  int numa_node;
  size_t memory_limit;
} orDeviceAttributes;
OR_API orError_t orDeviceGetAttributes(const orDevice *device, orDeviceAttributes *attributes);

/* Runs a kernel: on a stream for openreg devices (asynchronous), at once for the host (stream 0).
 * With tracing on it is one record that carries the kernel's name. */
OR_API orError_t orDeviceCompute(orDevice *device, const orKernel *kernel, orStream_t stream);

enum { orAllocatorDevice = 0, orAllocatorOnHost = 1, orAllocatorPinned = 2 };
typedef struct orAllocator {
  orError_t (*alloc)(void *self, size_t bytes, void **ptr);
  orError_t (*free)(void *self, void *ptr);
  void *self;
  const char *name;
} orAllocator;
/* orAllocatorDevice: the device's memory (the host device's is pageable; that of a type other
 * than "CPU" and "openreg" is its factory's, which alone knows the address: orMemcpy does not).
 * OnHost: pageable host memory; OnHost|Pinned: host memory for asynchronous copies. Valid for
 * the life of the process. */
OR_API orError_t orDeviceGetAllocator(orDevice *device, unsigned attributes,
                                      const orAllocator **allocator);

/* X(enumerator, bytes of an element, name) */
/* clang-format off */
#define OR_DTYPE_LIST(X)                                                                     \
  X(orUint8, 1, "uint8") X(orInt8, 1, "int8") X(orInt16, 2, "int16") X(orInt32, 4, "int32")  \
  X(orInt64, 8, "int64") X(orFloat16, 2, "float16") X(orBfloat16, 2, "bfloat16")             \
  X(orFloat32, 4, "float32") X(orFloat64, 8, "float64") X(orComplex64, 8, "complex64")       \
  X(orComplex128, 16, "complex128") X(orBool, 1, "bool")
/* clang-format on */
typedef enum orDtype {
#define OR_X(name, size, text) name,
  OR_DTYPE_LIST(OR_X)
#undef OR_X
} orDtype;

typedef struct orTensorProto {
  orDtype dtype;
  int ndim;
  const int64_t *shape;
  const void *bytes; /* host memory, row-major, host byte order */
  size_t nbytes;
} orTensorProto;

typedef struct orTensor {
  size_t size; /* sizeof(orTensor) */
  void *data;
  size_t nbytes;
  orDtype dtype;
  int ndim;
  int64_t shape[8];
} orTensor;
/* Allocates with the device's allocator for `attributes` and copies the bytes; returns when they
 * are there. Bytes that do not fit dtype and shape are orErrorInvalidValue and say what did not
 * fit. */
OR_API orError_t orDeviceMakeTensor(orDevice *device, const orTensorProto *proto,
                                    unsigned attributes, orTensor *tensor);

/* The function a plugin exports, if it has no OR_REGISTER_DEVICE_FACTORY. It registers the plugin's
 * factories. */
typedef orError_t (*orPluginInitFn)(void);
#define OR_PLUGIN_INIT_SYMBOL "orPluginInit"

#ifdef __cplusplus
}
#endif

#endif
