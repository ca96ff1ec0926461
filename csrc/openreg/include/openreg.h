/*
 * libopenreg: an accelerator simulated on the CPU.
 *
 * The API has the shape of the CUDA runtime: every call returns an orError_t and returns results
 * through pointers. Handles are 64-bit numbers. A wrong, foreign or destroyed handle gives
 * orErrorInvalidResourceHandle, never a wild read. orGetLastErrorMessage() returns the details of
 * the calling thread's last error: what was given and what was allowed.
 *
 * Words used below:
 *   asynchronous   returns before the work has run; the work is ordered after everything
 *                  queued earlier on the same stream, and after nothing else.
 *   synchronises   blocks the calling thread; also the place where the error of a failed kernel
 *                  surfaces.
 *
 * Sizes are in bytes, unless a comment says otherwise. A call may be made from any thread, unless
 * its comment says otherwise.
 *
 * A structure that begins with its size may come from another version's header, as in Linux's
 * extensible system calls. If it is smaller, the missing members count as 0, their default, as long
 * as the required members are there. If it is larger, it is accepted only if the part that this
 * library does not define is 0; otherwise the call returns orErrorInvalidValue (for a device
 * factory's table, orErrorPluginVersion).
 *
 * A structure that this library fills also begins with its size, which the caller sets. The library
 * fills exactly that many bytes, and sets those that it does not define to 0. For an array that it
 * fills, the caller passes the size of an element; orTrace has the size of its records.
 *
 * The library starts no thread and maps no memory before the first stream, event, allocation or
 * copy.
 *
 * When the process exits, the library's exit handler stops the start of queued work. Exit handlers
 * and destructors that were registered before the first use of a device run after it. In them, a
 * call that waits for unfinished work, or queries it, returns orErrorNotPermitted and frees
 * nothing. A call that was already waiting returns the same; if its own task is running, it returns
 * when the task has ended. Waiting for finished work, and freeing memory that no unfinished work
 * may use, succeeds as before.
 *
 * If the system refuses a thread for queued work, each launch and each wait tries again. While
 * there is no thread at all, a call that waits runs what any thread may run, and returns
 * orErrorSystem if it needs a thread of the library. Work stays queued, except the work of such a
 * call itself, which is cancelled.
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

/* The version of this header. The build, the package and the library's file name take it from here.
 * A program that was built against an older header of the same major version runs with this
 * library. */
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
/* OPENREG_VERSION of the library that is loaded. */
OR_API int orGetVersion(void);
/* The version of the device factory table. A plugin that was built against another one is
 * refused. */
#define OPENREG_ABI_VERSION 2u
#define OPENREG_MAX_DEVICES 64

/* ---- Errors -------------------------------------------------------------------------------- */

/* orErrorDeviceLost is the only error that persists. A kernel, an operation of a device's factory
 * or orEventSignal reports it, and the work queued on the device is cancelled as by orDeviceReset.
 * Until that reset, every call that allocates on the device, queues work there or synchronises with
 * it returns the error at once, with the name of what failed. Queries, records, waits for events,
 * frees and other devices work as before. */

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
  X(orErrorCapturedEvent, "the event was last recorded in a capture")                  \
  X(orErrorCopyFailure, "a copy failed")

typedef enum orError_t {
#define OR_X(name, text) name,
  OR_ERROR_LIST(OR_X)
#undef OR_X
} orError_t;

OR_API const char *orGetErrorName(orError_t error);
OR_API const char *orGetErrorString(orError_t error);
/* The last error of the calling thread. orGetLastError clears it, orPeekAtLastError does not.
 * orErrorNotReady is not kept. */
OR_API orError_t orGetLastError(void);
OR_API orError_t orPeekAtLastError(void);
/* Details of the calling thread's last failed call. Valid until its next failed call. */
OR_API const char *orGetLastErrorMessage(void);

/* ---- Settings ------------------------------------------------------------------------------ */

/* An OPENREG_* environment variable. All are read once, at the first call that needs one. */
typedef struct orSetting {
  size_t size;             /* sizeof(orSetting) */
  const char *name;        /* "OPENREG_DEVICE_COUNT" */
  const char *value;       /* the value in force, as text */
  const char *origin;      /* "default", "environment", or "environment (rejected)" */
  const char *description; /* one line, with what is allowed */
} orSetting;

/* The setting at `index`, from 0. orErrorInvalidValue after the last. */
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
  /* from the factory's `properties`; otherwise "" and 0 */
  char model[64];   /* what the hardware is called */
  int major, minor; /* the generation of the hardware */
} orDeviceProperties;

/* The number of devices; 0 is a success. A bad OPENREG_DEVICE_COUNT gives 0 and one line on stderr.
 * A plugin that fails gives its error, and the count is 0. Starts no thread. */
OR_API orError_t orGetDeviceCount(int *count);
/* The current device of the calling thread, 0 at first. */
OR_API orError_t orGetDevice(int *device);
OR_API orError_t orSetDevice(int device);
OR_API orError_t orGetDeviceProperties(orDeviceProperties *properties, int device);
/* Bytes of the current device: those that orMalloc can still allocate, and the capacity. */
OR_API orError_t orMemGetInfo(size_t *free_bytes, size_t *total_bytes);
/* The range of priorities. Lower numbers are more urgent: least is 0, greatest is negative. */
OR_API orError_t orDeviceGetStreamPriorityRange(int *least, int *greatest);
/* Synchronises with every stream of the current device. */
OR_API orError_t orDeviceSynchronize(void);
/* Cancels the work queued on the current device and completes its events, so that no thread waits
 * for ever. Waits for the task that is running. Clears the device's error and gives unused cached
 * memory back. Afterwards the device works as before, also if it was lost. Allocations, streams and
 * events stay valid; the contents of memory are undefined. */
OR_API orError_t orDeviceReset(void);
/* 1 if kernels of `device` can reach memory of `peer` once that is enabled. Copies between devices
 * need no peer access. */
OR_API orError_t orDeviceCanAccessPeer(int *can, int device, int peer);
/* From now on orMapForKernel gives kernels of `device` addresses of `peer`'s memory. Applies to one
 * direction; enabling twice is not an error. orErrorNotSupported if orDeviceCanAccessPeer gives
 * 0. */
OR_API orError_t orDeviceEnablePeerAccess(int device, int peer);
/* 1 after the first use of the device: an allocation, stream, event or copy. Does not initialise
 * it. */
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

/* Allocates device memory on the current device. Any host access to it faults. Sizes are rounded up
 * to pages; 0 bytes gives a null pointer. Does not synchronise. orErrorMemoryAllocation if memory
 * is short; nothing has changed then. */
OR_API orError_t orMalloc(void **ptr, size_t bytes);
/* Frees the allocation that starts at `ptr`; null does nothing. Synchronises with every device that
 * can reach the memory. */
OR_API orError_t orFree(void *ptr);
/* Allocates pinned host memory: copies from and to it are asynchronous. A forked child has its own
 * copy. */
OR_API orError_t orMallocHost(void **ptr, size_t bytes);
/* Frees memory of orMallocHost. Synchronises with every device. */
OR_API orError_t orFreeHost(void *ptr);
/* Makes existing host memory count as pinned. orErrorAlreadyExists if the range overlaps a
 * registered one. The memory must stay mapped until orHostUnregister. */
OR_API orError_t orHostRegister(void *ptr, size_t bytes);
OR_API orError_t orHostUnregister(void *ptr);
/* Describes the allocation that `ptr` points into, at its start or inside. For host memory that is
 * not pinned the call succeeds with orMemoryTypeUnregistered. */
OR_API orError_t orPointerGetAttributes(orPointerAttributes *attributes, const void *ptr);

/* Copies check both ranges against their allocations: a range past an end gives
 * orErrorInvalidValue, and nothing is copied. The blocking forms use the current device's default
 * stream and return when the copy is done. The Async forms are asynchronous with device and pinned
 * memory. With pageable memory they return when the source has been read or the destination
 * written. */
OR_API orError_t orMemcpy(void *dst, const void *src, size_t bytes, orMemcpyKind kind);
typedef uint64_t orStream_t;
OR_API orError_t orMemcpyAsync(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                               orStream_t stream);
/* orMemcpyAsync, then orStreamSynchronize, in one call. The calling thread may run the copy
 * itself. */
OR_API orError_t orMemcpyWithStream(void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                                    orStream_t stream);
/* Copies between device memory of two devices, which must be the pointers' own. */
OR_API orError_t orMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                                   size_t bytes, orStream_t stream);
/* Sets each of `bytes` bytes of device or pinned memory to `value`. */
OR_API orError_t orMemset(void *dst, int value, size_t bytes);
OR_API orError_t orMemsetAsync(void *dst, int value, size_t bytes, orStream_t stream);

/* The address at which a task reads and writes the device range [ptr, ptr + bytes). Valid only
 * inside a task. orErrorNotSupported on a device whose factory has no `map`. */
OR_API orError_t orMapForKernel(void **address, const void *ptr, size_t bytes);

/* ---- Streams ------------------------------------------------------------------------------- */

/* A stream is a queue of tasks that run one after the other. 0 names the current device's default
 * stream. Streams are never ordered with each other implicitly. */
#define OR_STREAM_DEFAULT ((orStream_t)0)

/* On the current device. The priority is clamped to orDeviceGetStreamPriorityRange. */
OR_API orError_t orStreamCreate(orStream_t *stream);
OR_API orError_t orStreamCreateWithPriority(orStream_t *stream, int priority);
/* The handle of a device's default stream. It is never 0, and the stream cannot be destroyed. */
OR_API orError_t orStreamGetDefault(orStream_t *stream, int device);
/* The next of the device's OPENREG_STREAMS_PER_POOL shared streams of this priority (clamped), in
 * turn. A stream is created when its turn comes first. The library owns it. */
OR_API orError_t orStreamGetFromPool(orStream_t *stream, int priority, int device);
#define OPENREG_STREAMS_PER_POOL 32
/* The handle becomes invalid at once; queued work still runs. Never blocks. orErrorInvalidValue for
 * a stream that the library owns: a default one, one of a pool, a graph's own. */
OR_API orError_t orStreamDestroy(orStream_t stream);
OR_API orError_t orStreamGetDevice(orStream_t stream, int *device);
OR_API orError_t orStreamGetPriority(orStream_t stream, int *priority);
/* orSuccess if the last task has finished, otherwise orErrorNotReady. Never reports a kernel's
 * error. */
OR_API orError_t orStreamQuery(orStream_t stream);
/* Synchronises. */
OR_API orError_t orStreamSynchronize(orStream_t stream);

/* Asynchronous. Runs fn(user_data) on a worker, in stream order. The function may not call this API
 * (orErrorNotPermitted). */
OR_API orError_t orLaunchHostFunc(orStream_t stream, void (*fn)(void *), void *user_data);

/* ---- Kernels ------------------------------------------------------------------------------- */

typedef struct orAccess {
  const void *address; /* device memory */
  size_t bytes;
  int write;
} orAccess;

/* A kernel returns orSuccess, or an error that surfaces at the next call that synchronises with the
 * device (orErrorDeviceLost: at every call until a reset). It may call orMapForKernel and the
 * functions that neither block nor queue. */
typedef orError_t (*orKernelFn)(void *args);

/* orLaunchAnyThread: a host thread that waits may run the kernel, without the state that the worker
 * hook sets up. orLaunchAwaited: the caller waits for the stream next. If no worker has started on
 * the queued work and any thread may run all of it, the calling thread runs it inline, the kernel
 * included, because waking a worker costs more than a short kernel. */
/* orLaunchWaits: the call returns when the kernel has run. It does not report the kernel's failure,
 * which the next call that synchronises does. If the kernel was cancelled, by a reset or a lost
 * device, this call returns an error. orLaunchTold: the sanitizer gets the kernel's accesses from
 * orSanitizerAccess, not from `accesses`. */
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
  void (*drop)(void *args); /* optional; destroys the arguments, which a kernel must not do. Called
                               once, on any thread, whether or not the kernel ran; may not call
                               this API. */
  /* the kernel's accesses. Each range is checked against its allocation, and the sanitizer compares
   * it with other accesses */
  const orAccess *accesses;
  size_t access_count;
  const char *name; /* for errors and traces; interned (must outlive the process's use of it) */
  unsigned flags;   /* orLaunchFlags */
  int *queued;      /* optional; becomes 1 when the queue owns the arguments, else 0 */
} orLaunch;

#define OR_MAX_ARGS 65536u

/* Asynchronous. Sleeps while the stream's queue is full (see orSetBlockHooks). On failure nothing
 * is queued and `drop` is not called, with two exceptions: orLaunchWaits and
 * OPENREG_LAUNCH_BLOCKING. The call then waits for the kernel and may return its error, although
 * the queue owns the arguments: it has destroyed them, or, if the kernel cannot run because no
 * thread can be started or the process exits, destroys them later. A caller that frees the
 * arguments on failure checks `queued`. Set it to 0 before the call if the structure may be
 * refused. */
OR_API orError_t orLaunchKernelEx(const orLaunch *launch);
/* Asynchronous. Occupies a worker for `nanoseconds` without work. */
OR_API orError_t orLaunchSleep(orStream_t stream, uint64_t nanoseconds);
/* Inside a kernel: calls piece(context, i) once for every i below `count`, in any order, on this
 * thread and on idle threads (workers, and hosts that wait for the stream). Returns when all calls
 * have returned. A piece does not call this API, and should take about ten microseconds or more. */
typedef void (*orPieceFn)(void *context, size_t index);
OR_API orError_t orRunPieces(orPieceFn piece, void *context, size_t count);
/* Inside a task: the handle of its stream; otherwise 0. A factory chooses its queue by it. */
OR_API orStream_t orGetTaskStream(void);
/* Inside a task: adds a detail to the error that the task is about to return. */
OR_API void orSetTaskErrorMessage(const char *message);
/* Inside a task that is about to return an error, or right before orEventSignal with an error:
 * attaches an object to the failure, for the call that reports it. The library owns the object from
 * here on. It calls `drop(cause)` (optional) once, unless orTakeFailureCause has handed the object
 * out: when another failure is reported instead, when the device is reset, when the thread that
 * received the failure gets another one or ends, or when the task or the signal succeeds after all.
 * `drop` runs on any thread, with no lock held, and may not call this API. An event by which a
 * device factory completes a task carries no cause. */
OR_API void orSetFailureCause(void *cause, void (*drop)(void *cause));
/* The object attached to the failure that the calling thread's last error reported. The caller owns
 * it from here on. Null if there is none, it was taken already, or the last error is not a device's
 * failure. `others` (optional): the number of later failures. */
OR_API void *orTakeFailureCause(unsigned *others);

/* Called on the calling thread around every call that may put it to sleep, so that a program can
 * release a lock of its own (Python's GIL). `enter` returns a token for `leave`. Set once. */
typedef struct orBlockHooks {
  void *(*enter)(void);
  void (*leave)(void *token);
} orBlockHooks;
OR_API orError_t orSetBlockHooks(const orBlockHooks *hooks);

/* Called once on each new worker, before its first task. `wide` is 1 on the one worker whose
 * kernels may use several threads. Set before the first task. The hook may not call this API
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

/* Creates an event on the current device. */
OR_API orError_t orEventCreate(orEvent_t *event);
OR_API orError_t orEventCreateWithFlags(orEvent_t *event, unsigned flags);
/* Never blocks. Queued waits keep the record that they wait for. An external event that was not
 * signalled is completed, because nothing could complete it afterwards. */
OR_API orError_t orEventDestroy(orEvent_t event);
/* Asynchronous, never blocks. Each record is a new version. The stream must be of the event's
 * device. */
OR_API orError_t orEventRecord(orEvent_t event, orStream_t stream);
/* Asynchronous, never blocks. Waits for the newest record at the time of the call. Does nothing for
 * an event that was never recorded, and for the event's own stream. The stream may be of any
 * device. */
OR_API orError_t orStreamWaitEvent(orStream_t stream, orEvent_t event);
/* Queries the newest record; orSuccess for an event that was never recorded. Never reports a
 * kernel's error. */
OR_API orError_t orEventQuery(orEvent_t event);
/* Synchronises. */
OR_API orError_t orEventSynchronize(orEvent_t event);
/* Milliseconds between two finished, timed records of one device. */
OR_API orError_t orEventElapsedTime(float *milliseconds, orEvent_t start, orEvent_t end);
/* Completes an external event, once. A `status` other than orSuccess becomes the asynchronous error
 * of the event's device (orErrorNotReady is refused). Never blocks. */
OR_API orError_t orEventSignal(orEvent_t event, orError_t status);

/* orEventSignal with a text for the error, which the call that reports the error shows. */
OR_API orError_t orEventSignalError(orEvent_t event, orError_t status, const char *message);
/* Before an external event is signalled: when the hardware began and ended the work, on
 * CLOCK_MONOTONIC. Profilers show these times. orErrorInvalidValue if they are not in order. */
OR_API orError_t orEventSetTimes(orEvent_t event, uint64_t start_ns, uint64_t end_ns);

/* ---- Caching allocator --------------------------------------------------------------------- */

/* The allocator for frameworks. It keeps freed blocks and hands them out again on the stream that
 * they were allocated for. A freed block may be reused at once by work queued later on its own
 * stream. For streams named by orCacheRecordStream, the block waits until they are done; no thread
 * blocks for that. */

/* Allocates at least `bytes` of device memory for work on `stream`, aligned to 512 bytes; 0 bytes
 * gives a null pointer. Does not synchronise, except to give cached blocks back before it returns
 * orErrorMemoryAllocation. Inside a task: a block of the task's own stream that no later task can
 * be using. */
OR_API orError_t orCacheMalloc(void **ptr, size_t bytes, orStream_t stream);
/* The origin of a block, for the report of openreg_host_access.h. The texts are constant and never
 * freed. */
typedef struct orOrigin {
  size_t size;      /* sizeof(orOrigin) */
  const char *type; /* of the elements, or null */
  const char *file; /* where the program asked for it, or null */
  uint32_t line;
} orOrigin;
/* Sets the origin of the next block that the calling thread allocates; null: none. */
OR_API void orCacheSetOrigin(const orOrigin *origin);
/* Frees a pointer of orCacheMalloc; null does nothing. Never blocks; also inside a task. */
OR_API orError_t orCacheFree(void *ptr);
/* The memory of the live block that `ptr` points into is not reused before the work queued so far
 * on `stream` is done. */
OR_API orError_t orCacheRecordStream(const void *ptr, orStream_t stream);
/* orErrorInvalidValue if the block of `ptr`, a pointer of orCacheMalloc, is smaller than `bytes`.
 * Copies and launches check only the segment that blocks are cut from. Other pointers are not
 * checked. */
OR_API orError_t orCacheCheck(const void *ptr, size_t bytes);
/* The size of the block at `ptr`, a pointer of orCacheMalloc; 0 for any other pointer. */
OR_API orError_t orCacheBlockSize(size_t *bytes, const void *ptr);
/* Gives back every unused block of the device that no queued work can reach, except those of
 * private pools. */
OR_API orError_t orCacheEmpty(int device);

/* A private pool: memory of a device that serves only requests for the pool. Freed blocks return to
 * the pool and stay there, so that a graph's addresses stay valid: neither orCacheEmpty nor a
 * shortage takes them. After its release its memory becomes the device's own, blocks in use
 * included, as soon as all work queued on the device by then has finished. 0 is no pool: the
 * device's own memory. */
typedef uint64_t orMemPool_t;
OR_API orError_t orMemPoolCreate(orMemPool_t *pool, int device);
/* The handle is invalid from now on. Never blocks. */
OR_API orError_t orMemPoolRelease(orMemPool_t pool);
/* orCacheMalloc from a pool of the stream's device. */
OR_API orError_t orCacheMallocFromPool(void **ptr, size_t bytes, orStream_t stream,
                                       orMemPool_t pool);
/* orCacheEmpty for one pool. Must not be called while a graph uses the pool's memory, because the
 * allocator counts a block as free that only replays use. Waits for all work queued on the
 * device. */
OR_API orError_t orCacheEmptyPool(orMemPool_t pool);

/* The part of the device's capacity that the cache may hold, 1 at first. If it holds more, segments
 * in use are kept, and no new one is allocated. */
OR_API orError_t orCacheSetFraction(int device, double fraction);
OR_API orError_t orCacheGetFraction(double *fraction, int device);

/* Options of every device's cache; zeros are the defaults. */
typedef struct orCacheOptions {
  size_t size;                   /* sizeof(orCacheOptions) */
  size_t max_split_size;         /* blocks from here on are not split; 0: all may be */
  size_t max_non_split_rounding; /* how much too large such a block may be for a request */
  size_t large_segment_size; /* segment for requests of 1 to 10 MiB, 20 MiB or more; 0: 20 MiB */
  double garbage_collection_threshold; /* part of the allowed memory from which unused segments go
                                          back before a new one is made; 0: none */
  /* [i] is for sizes from 2^i MiB to below 2^(i+1) MiB; [0] also for smaller ones. A request is
   * rounded up to the next of this many steps between two powers of two; 0 and 1: to 512 bytes */
  uint32_t roundup_power2_divisions[16];
} orCacheOptions;
OR_API orError_t orCacheSetOptions(const orCacheOptions *options);

typedef struct orCacheStat {
  int64_t current, peak, allocated, freed;
} orCacheStat;
/* Each in three pools: 0 all, 1 small, 2 large (PyTorch's
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
  size_t size;                   /* sizeof(orMemPoolStats) */
  orCacheStat reserved_bytes[3]; /* as in orCacheStats, where they are counted too */
} orMemPoolStats;
OR_API orError_t orMemPoolGetStats(orMemPoolStats *stats, orMemPool_t pool);
/* Both also reset the figures of private pools. */
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
  orStream_t stream; /* the segment's stream; it may have been destroyed */
  orCacheBlockState state;
  int large;        /* 1: the segment is in the pool for requests above 1 MiB */
  orMemPool_t pool; /* the segment's pool, or 0 */
} orCacheBlock;
/* Lists every block of a device, segment after segment, each in order of address. On entry *count
 * is the room in `blocks`, of elements of `block_size` (sizeof(orCacheBlock)) bytes; on return it
 * is the number of blocks. Nothing is written if the room is too small. */
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
/* Sets a function that is called for each record, with no lock held, on the thread whose call of
 * this section caused it and before that call returns. With several threads, records may come out
 * of sequence. It may run wherever orCacheFree may. Null switches it off. */
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

/* Starts the trace. A process has one at a time: orErrorAlreadyExists while it is on. It has room
 * for `capacity` records (0: OPENREG_TRACE_RECORDS); later ones are only counted. A call that
 * launches is one record, and what it launched is another. */
OR_API orError_t orTraceStart(size_t capacity);
/* Ends the trace. It contains work that has finished; tasks that are still running are missing. The
 * caller frees it with orTraceFree. orErrorNotFound if tracing is off. */
OR_API orError_t orTraceStop(orTrace *trace);
OR_API void orTraceFree(orTrace *trace);
static inline const orTraceRecord *orTraceRecordAt(const orTrace *trace, size_t index) {
  return (const orTraceRecord *)((const char *)trace->records + index * trace->record_size);
}
/* Sets the tag of the calling thread's launches and synchronisations until the trace ends, 0 at
 * first. Returns the previous one. */
OR_API uint64_t orTraceTag(uint64_t tag);
OR_API uint64_t orGetLastCorrelation(void);

/* ---- Device factories ---------------------------------------------------------------------- */

/* Devices come from factories. Of several factories for one type, the one of highest priority makes
 * the devices. A plugin (a shared library named in OPENREG_PLUGIN) registers a factory for
 * "openreg" in its orPluginInit() and so replaces the simulated device. */

typedef struct orDeviceCount {
  const char *type;
  int count;
} orDeviceCount;

typedef struct orDeviceConfig {
  size_t size; /* sizeof(orDeviceConfig) */
  /* types that are not listed get the default: CPU 1, openreg OPENREG_DEVICE_COUNT, or where that
   * is not set what the factory counts, or 2 */
  const orDeviceCount *device_count;
  size_t type_count;
} orDeviceConfig;

/* Its size is fixed by OPENREG_ABI_VERSION. */
typedef struct orDeviceDesc {
  int index;           /* within its type; set by the caller before create_devices */
  size_t memory_limit; /* bytes; a larger number counts as 2^50 */
  int numa_node;
  void *self; /* handed back as `device` to every function of the table */
} orDeviceDesc;

typedef struct orKernel {
  orKernelFn fn;
  void *args;
  const char *name;
} orKernel;

/* `copy` and `compute` run inside a task. They either finish the work and return orSuccess, or
 * return orErrorNotReady and complete it later with orEventSignal(done, status) from any thread;
 * meanwhile the stream waits and holds no worker. `done` cannot be destroyed, and is invalid once
 * the task is over. Any other value is the task's failure. If `done` is 0 (a type other than
 * "openreg" has no streams) they finish before they return. orErrorDeviceLost, from `alloc` too,
 * means that the device can do nothing more; the factory still has to signal what it has
 * started. */
typedef struct orDeviceFactory {
  uint32_t size;        /* sizeof(orDeviceFactory) */
  uint32_t abi_version; /* OPENREG_ABI_VERSION */
  const char *name;     /* for messages */
  /* Fills `count` descriptions. orAddDevices stops at its error and returns it. Threads that it
   * starts may not use devices before it has returned (see orAddDevices). */
  orError_t (*create_devices)(const orDeviceConfig *config, int count, orDeviceDesc *devices);
  /* From here to `set`: for device types other than "CPU". Addresses are unique in the process. The
   * address of `alloc` is not null and a multiple of 16, and so is that of `alloc_host`. */
  orError_t (*alloc)(void *device, size_t bytes, void **ptr);
  orError_t (*free)(void *device, void *ptr, size_t bytes);
  /* At least one of dst and src is memory of this device. */
  orError_t (*copy)(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                    orEvent_t done);
  orError_t (*set)(void *device, void *dst, int value, size_t bytes, orEvent_t done);
  orError_t (*compute)(void *device, const orKernel *kernel, orEvent_t done);
  /* Optional, may be null: the kernel address of a range, with the same offset from a multiple of
   * 16 as `ptr`. */
  orError_t (*map)(void *device, const void *ptr, size_t bytes, void **address);
  /* Only for "CPU", optional: pinned host memory. Pageable memory is malloc's. */
  orError_t (*alloc_host)(void *device, size_t bytes, void **ptr);
  orError_t (*free_host)(void *device, void *ptr, size_t bytes);
  /* From here on optional. A table of an older header ends here, and counts as without them. They
   * are for the type "openreg", and are called with no lock held. */
  /* kernels of the device's own (openreg_operator.h) */
  const struct orOperatorKernel *operators;
  size_t operator_count;
  /* Fills `model`, `major` and `minor`. Called on any thread, inside a task too. */
  orError_t (*properties)(void *device, orDeviceProperties *properties);
  /* The device counts as lost, whoever reported it. The factory stops what it has started and
   * signals each `done`. Called once for each loss, on any thread. */
  void (*lost)(void *device);
  /* orDeviceReset, after the queued work was cancelled. The factory stops what it has started,
   * signals each `done`, and makes the device work again. An error is the call's, and the device
   * stays as it was. */
  orError_t (*reset)(void *device);
  /* The process exits. Nothing is started afterwards, but a thread may be inside another function
   * of the table. The factory ends threads of its own; it need not signal. */
  void (*shutdown)(void *device);
  /* The number of devices, 0 to OPENREG_MAX_DEVICES. Called before create_devices, on the same
   * thread, if neither orAddDevices nor OPENREG_DEVICE_COUNT gives a number. Its error is that of
   * orAddDevices. */
  orError_t (*count_devices)(int *count);
} orDeviceFactory;

/* Registers a factory, before the devices are made. Never waits: from the moment the first factory
 * is asked for devices it returns orErrorAlreadyInitialized, unless that fails. An equal priority
 * for one type is orErrorAlreadyExists; a wrong size or version is orErrorPluginVersion. The table
 * must stay valid. */
OR_API orError_t orRegisterDeviceFactory(const char *type, int priority,
                                         const orDeviceFactory *factory);
OR_API orError_t orUnregisterDeviceFactory(const char *type, const orDeviceFactory *factory);

/* At file scope of a program or a library, in C or C++: registers a factory when the program or
 * library is loaded. A plugin that uses it needs no orPluginInit. A failure prints one line on
 * stderr; if it is a plugin's, the plugin has no factory. */
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
/* The factory at `index`, from 0. orErrorInvalidValue after the last. */
OR_API orError_t orGetFactoryInfo(int index, orFactoryInfo *info);

/* Makes every device, once: first those of the host's factory ("CPU", required: orErrorNotFound if
 * it is missing or makes no device), then those of the other types. If one fails, its error is
 * returned and there is no device. The first call that needs a device calls this with the defaults.
 * A failure is returned to later calls too, until orAddDevices is called again; after
 * orErrorMemoryAllocation, orErrorSystem and a plugin that cannot be opened the next call tries
 * again.
 *
 * While one thread makes the devices, others that need them sleep (see orSetBlockHooks); no lock is
 * held. The plugin, count_devices, create_devices and threads that they start get
 * orErrorNotPermitted instead, because the devices may wait for them. These functions may not wait
 * for a thread that they have not started and that uses devices. A child that is forked meanwhile
 * gets orErrorForked.
 *
 * Names are prefix + "/cpu:0". A null config means the defaults. */
OR_API orError_t orAddDevices(const orDeviceConfig *config, const char *name_prefix);

typedef struct orDevice orDevice;
OR_API orError_t orGetDeviceByName(orDevice **device, const char *name);
/* The devices of all types, the host's first. */
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
 * While tracing is on, it is one record with the kernel's name. */
OR_API orError_t orDeviceCompute(orDevice *device, const orKernel *kernel, orStream_t stream);

enum { orAllocatorDevice = 0, orAllocatorOnHost = 1, orAllocatorPinned = 2 };
typedef struct orAllocator {
  orError_t (*alloc)(void *self, size_t bytes, void **ptr);
  orError_t (*free)(void *self, void *ptr);
  void *self;
  const char *name;
} orAllocator;
/* orAllocatorDevice: the device's memory. For the host device it is pageable. For a type other than
 * "CPU" and "openreg" it is the factory's, and orMemcpy does not accept its addresses.
 * orAllocatorOnHost: pageable host memory. orAllocatorOnHost | orAllocatorPinned: host memory for
 * asynchronous copies. The allocator is valid until the process ends. */
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
 * have arrived. If the bytes do not fit dtype and shape, returns orErrorInvalidValue with the two
 * sizes. */
OR_API orError_t orDeviceMakeTensor(orDevice *device, const orTensorProto *proto,
                                    unsigned attributes, orTensor *tensor);

/* The function that a plugin exports, unless it uses OR_REGISTER_DEVICE_FACTORY. It registers the
 * plugin's factories. */
typedef orError_t (*orPluginInitFn)(void);
#define OR_PLUGIN_INIT_SYMBOL "orPluginInit"

#ifdef __cplusplus
}
#endif

#endif
