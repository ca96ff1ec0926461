/*
 * A driver for OpenCL devices as a plugin: memory, queues, copies, completion.
 *
 * An OpenCL 1.2 buffer has no address. Each allocation therefore reserves a range of addresses
 * without access, which stands for the buffer; `buffers` maps an address back to it. A stream has
 * an in-order queue of its own. A command completes through its event's callback, which signals
 * `done`.
 *
 * buffersLock guards the buffers, and a device's lock its queues. The rest is written before a
 * second thread can see it. No lock is held while OpenCL calls back.
 */
#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

cl_context theContext;
bool hasDoubles = true;
static Device devices[OPENREG_MAX_DEVICES];
static pid_t creator; /* the process that has made them */

/* ---- Errors ---- */

static orError_t codeOf(cl_int error) {
  switch (error) {
    case CL_SUCCESS:
      return orSuccess;
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
    case CL_INVALID_BUFFER_SIZE:
    case CL_OUT_OF_HOST_MEMORY:
      return orErrorMemoryAllocation;
    case CL_DEVICE_NOT_AVAILABLE:
      return orErrorDeviceLost;
    default:
      return orErrorLaunchFailure;
  }
}

orError_t failed(const char *call, cl_int error) {
  char text[96];
  snprintf(text, sizeof text, "%s returned OpenCL error %d", call, error);
  orSetTaskErrorMessage(text);
  return codeOf(error);
}

/* ---- Memory ---- */

typedef struct Buffer {
  uintptr_t begin;
  size_t bytes;
  cl_mem memory;
} Buffer;

static pthread_rwlock_t buffersLock = PTHREAD_RWLOCK_INITIALIZER;
static Buffer *buffers; /* in the order of addresses */
static size_t bufferCount, bufferRoom;

/* Lock held: the number of buffers that begin at `at` or before. */
static size_t buffersUpTo(uintptr_t at) {
  size_t low = 0, high = bufferCount;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (buffers[middle].begin <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

bool findPlace(const void *ptr, Place *place) {
  uintptr_t at = (uintptr_t)ptr;
  pthread_rwlock_rdlock(&buffersLock);
  size_t before = buffersUpTo(at);
  const Buffer *b = before ? &buffers[before - 1] : NULL;
  bool found = b && at - b->begin < b->bytes;
  if (found) *place = (Place){b->memory, at - b->begin};
  pthread_rwlock_unlock(&buffersLock);
  return found;
}

static bool addBuffer(Buffer buffer) {
  pthread_rwlock_wrlock(&buffersLock);
  bool fits = bufferCount < bufferRoom;
  if (!fits) {
    size_t room = bufferRoom ? 2 * bufferRoom : 64;
    Buffer *more = realloc(buffers, room * sizeof *more);
    fits = more != NULL;
    if (fits) buffers = more, bufferRoom = room;
  }
  if (fits) {
    size_t at = buffersUpTo(buffer.begin);
    memmove(buffers + at + 1, buffers + at, (bufferCount - at) * sizeof *buffers);
    buffers[at] = buffer;
    bufferCount++;
  }
  pthread_rwlock_unlock(&buffersLock);
  return fits;
}

static bool removeBuffer(uintptr_t begin, Buffer *buffer) {
  pthread_rwlock_wrlock(&buffersLock);
  size_t after = buffersUpTo(begin);
  bool found = after && buffers[after - 1].begin == begin;
  if (found) {
    *buffer = buffers[after - 1];
    memmove(buffers + after - 1, buffers + after, (bufferCount - after) * sizeof *buffers);
    bufferCount--;
  }
  pthread_rwlock_unlock(&buffersLock);
  return found;
}

static orError_t allocate(void *device, size_t bytes, void **ptr) {
  (void)device;
  cl_int error;
  *ptr = NULL;
  if (bytes == 0) return orSuccess;
  if (getpid() != creator) return orErrorForked; /* OpenCL's threads are the parent's */
  cl_mem memory = clCreateBuffer(theContext, CL_MEM_READ_WRITE, bytes, NULL, &error);
  if (error) return codeOf(error);
  void *range = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range != MAP_FAILED && addBuffer((Buffer){(uintptr_t)range, bytes, memory})) {
    *ptr = range;
    return orSuccess;
  }
  if (range != MAP_FAILED) munmap(range, bytes);
  clReleaseMemObject(memory);
  return orErrorMemoryAllocation;
}

/* Commands that are under way keep the buffer. */
static orError_t release(void *device, void *ptr, size_t bytes) {
  (void)device, (void)bytes;
  Buffer buffer;
  if (!ptr) return orSuccess;
  if (!removeBuffer((uintptr_t)ptr, &buffer)) return orErrorInvalidValue;
  munmap(ptr, buffer.bytes);
  clReleaseMemObject(buffer.memory);
  return orSuccess;
}

/* ---- Queues ---- */

/* Lock held. A stream beyond the room shares the queue of another, which only adds order. */
static Queue *queueOf(Device *device, orStream_t stream) {
  for (int i = 0; i < device->queue_count; i++)
    if (device->queues[i].stream == stream) return &device->queues[i];
  if (device->queue_count == MAX_QUEUES) return &device->queues[stream % MAX_QUEUES];
  Queue *q = &device->queues[device->queue_count++];
  *q = (Queue){.stream = stream};
  return q;
}

cl_int taskQueue(Device *device, cl_command_queue *queue) {
  cl_int error = CL_SUCCESS;
  orStream_t stream = orGetTaskStream();
  pthread_mutex_lock(&device->lock);
  Queue *q = queueOf(device, stream);
  if (!q->queue)
    q->queue = clCreateCommandQueue(theContext, device->id, CL_QUEUE_PROFILING_ENABLE, &error);
  *queue = q->queue;
  pthread_mutex_unlock(&device->lock);
  return error;
}

cl_int taskScratch(Device *device, size_t bytes, cl_mem *scratch) {
  cl_int error = CL_SUCCESS;
  orStream_t stream = orGetTaskStream();
  pthread_mutex_lock(&device->lock);
  Queue *q = queueOf(device, stream);
  if (q->scratch_bytes < bytes || !q->scratch) {
    if (q->scratch) clReleaseMemObject(q->scratch); /* commands that use it keep it */
    q->scratch_bytes = bytes ? bytes : 1;
    q->scratch = clCreateBuffer(theContext, CL_MEM_READ_WRITE, q->scratch_bytes, NULL, &error);
    if (error) q->scratch = NULL;
  }
  *scratch = q->scratch;
  pthread_mutex_unlock(&device->lock);
  return error;
}

/* ---- Completion ---- */

typedef struct Job {
  const char *call;
  orEvent_t done;
  cl_mem bad;
  int64_t flags[2];
  int64_t limit;
} Job;

static uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The device has a clock of its own: only the duration is taken from it. */
static void setTimes(cl_event event, orEvent_t done) {
  cl_ulong start = 0, end = 0;
  uint64_t now = nowNs();
  if (clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof start, &start, NULL) ||
      clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof end, &end, NULL) ||
      end < start || end - start >= now)
    return;
  orEventSetTimes(done, now - (end - start), now);
}

static void CL_CALLBACK onComplete(cl_event event, cl_int status, void *data) {
  Job *job = data;
  char text[128];
  if (status < 0) {
    snprintf(text, sizeof text, "%s ended with OpenCL error %d", job->call, status);
    orEventSignalError(job->done, codeOf(status), text);
  } else if (job->flags[0]) {
    snprintf(text, sizeof text, "index %lld is out of bounds: 0 to %lld are allowed",
             (long long)job->flags[1], (long long)job->limit - 1);
    orEventSignalError(job->done, orErrorLaunchFailure, text);
  } else {
    setTimes(event, job->done);
    orEventSignal(job->done, orSuccess);
  }
  if (job->bad) clReleaseMemObject(job->bad);
  clReleaseEvent(event);
  free(job);
}

/* Queues the read of the flags, whose event replaces that of the kernel. */
static cl_int readFlags(cl_command_queue queue, Job *job, cl_event *event) {
  cl_event kernel = *event;
  cl_int error = clEnqueueReadBuffer(queue, job->bad, CL_FALSE, 0, sizeof job->flags, job->flags, 0,
                                     NULL, event);
  if (error)
    *event = kernel;
  else
    clReleaseEvent(kernel);
  return error;
}

void giveUp(cl_event event) {
  clWaitForEvents(1, &event);
  clReleaseEvent(event);
}

static orError_t queueCallback(const Job *from, cl_command_queue queue, cl_event *event) {
  Job *job = malloc(sizeof *job);
  if (!job) return orErrorSystem;
  *job = *from;
  cl_int error = job->bad ? readFlags(queue, job, event) : CL_SUCCESS;
  if (!error) error = clSetEventCallback(*event, CL_COMPLETE, onComplete, job);
  if (!error) return orErrorNotReady;
  if (job->bad) clFinish(queue); /* the read may write into the job */
  free(job);
  return failed(from->call, error);
}

orError_t completeLater(const char *call, cl_command_queue queue, cl_event event, orEvent_t done,
                        cl_mem bad, int64_t limit) {
  Job job = {.call = call, .done = done, .bad = bad, .limit = limit};
  orError_t code = queueCallback(&job, queue, &event);
  if (code == orErrorNotReady) {
    clFlush(queue);
    return code;
  }
  giveUp(event);
  if (bad) clReleaseMemObject(bad);
  return code;
}

/* ---- Copies ---- */

static bool overlaps(Place a, Place b, size_t bytes) {
  size_t distance = a.offset > b.offset ? a.offset - b.offset : b.offset - a.offset;
  return a.buffer == b.buffer && distance < bytes;
}

/* A copy within a buffer whose ranges overlap goes through another one. */
static cl_int moveBytes(cl_command_queue queue, Place to, Place from, size_t bytes,
                        cl_event *event) {
  cl_int error;
  if (!overlaps(to, from, bytes))
    return clEnqueueCopyBuffer(queue, from.buffer, to.buffer, from.offset, to.offset, bytes, 0,
                               NULL, event);
  cl_mem between = clCreateBuffer(theContext, CL_MEM_READ_WRITE, bytes, NULL, &error);
  if (error) return error;
  error = clEnqueueCopyBuffer(queue, from.buffer, between, from.offset, 0, bytes, 0, NULL, NULL);
  if (!error)
    error = clEnqueueCopyBuffer(queue, between, to.buffer, 0, to.offset, bytes, 0, NULL, event);
  clReleaseMemObject(between);
  return error;
}

static orError_t notOurs(const char *what, const void *ptr) {
  char text[96];
  snprintf(text, sizeof text, "the %s %p is not memory of an OpenCL device", what, ptr);
  orSetTaskErrorMessage(text);
  return orErrorInvalidValue;
}

static orError_t copy(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                      orEvent_t done) {
  Place to = {0}, from = {0};
  cl_command_queue queue;
  cl_event event;
  if (kind != orMemcpyDeviceToHost && !findPlace(dst, &to)) return notOurs("destination", dst);
  if (kind != orMemcpyHostToDevice && !findPlace(src, &from)) return notOurs("source", src);
  cl_int error = taskQueue(device, &queue);
  if (error) return failed("clCreateCommandQueue", error);
  if (kind == orMemcpyHostToDevice)
    error =
        clEnqueueWriteBuffer(queue, to.buffer, CL_FALSE, to.offset, bytes, src, 0, NULL, &event);
  else if (kind == orMemcpyDeviceToHost)
    error =
        clEnqueueReadBuffer(queue, from.buffer, CL_FALSE, from.offset, bytes, dst, 0, NULL, &event);
  else
    error = moveBytes(queue, to, from, bytes, &event);
  if (error) {
    orError_t code = failed("a copy", error);
    return code == orErrorLaunchFailure ? orErrorCopyFailure : code;
  }
  return completeLater("a copy", queue, event, done, NULL, 0);
}

static orError_t set(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  Place to;
  cl_command_queue queue;
  cl_event event;
  cl_uchar byte = (cl_uchar)value;
  if (!findPlace(dst, &to)) return notOurs("destination", dst);
  cl_int error = taskQueue(device, &queue);
  if (!error)
    error = clEnqueueFillBuffer(queue, to.buffer, &byte, 1, to.offset, bytes, 0, NULL, &event);
  if (error) return failed("clEnqueueFillBuffer", error);
  return completeLater("clEnqueueFillBuffer", queue, event, done, NULL, 0);
}

/* Kernels that the CPU runs: host work in the order of the stream. */
static orError_t compute(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}

/* ---- Devices ---- */

/* A command that was started cannot be cancelled: it is waited for. The next task of a stream gets
 * a new queue. */
static void dropQueues(Device *device) {
  Queue old[MAX_QUEUES];
  pthread_mutex_lock(&device->lock);
  int count = device->queue_count;
  memcpy(old, device->queues, sizeof old);
  device->queue_count = 0;
  pthread_mutex_unlock(&device->lock);
  for (int i = 0; i < count; i++) {
    if (!old[i].queue) continue;
    clFinish(old[i].queue);
    clReleaseCommandQueue(old[i].queue);
    if (old[i].scratch) clReleaseMemObject(old[i].scratch);
  }
}

static orError_t reset(void *device) {
  dropQueues(device);
  return orSuccess;
}

static void shutdown(void *device) { dropQueues(device); }

static orError_t properties(void *device, orDeviceProperties *p) {
  char version[128] = "";
  cl_device_id id = ((Device *)device)->id;
  clGetDeviceInfo(id, CL_DEVICE_NAME, sizeof p->model, p->model, NULL);
  clGetDeviceInfo(id, CL_DEVICE_VERSION, sizeof version, version, NULL);
  sscanf(version, "OpenCL %d.%d", &p->major, &p->minor);
  return orSuccess;
}

/* The devices of the first platform that has any. */
static cl_uint findDevices(cl_device_id *found) {
  cl_platform_id platforms[16];
  cl_uint platformCount = 0, count = 0;
  if (clGetPlatformIDs(16, platforms, &platformCount)) return 0;
  if (platformCount > 16) platformCount = 16;
  for (cl_uint i = 0; i < platformCount && !count; i++)
    if (clGetDeviceIDs(platforms[i], CL_DEVICE_TYPE_ALL, OPENREG_MAX_DEVICES, found, &count))
      count = 0;
  return count > OPENREG_MAX_DEVICES ? OPENREG_MAX_DEVICES : count;
}

static orError_t countDevices(int *count) {
  cl_device_id found[OPENREG_MAX_DEVICES];
  *count = (int)findDevices(found);
  return orSuccess;
}

static size_t memoryOf(cl_device_id id) {
  cl_ulong bytes = 0;
  clGetDeviceInfo(id, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof bytes, &bytes, NULL);
  return bytes;
}

static bool computesDoubles(cl_device_id id) {
  cl_device_fp_config config = 0;
  return !clGetDeviceInfo(id, CL_DEVICE_DOUBLE_FP_CONFIG, sizeof config, &config, NULL) && config;
}

/* More devices than the hardware has share it in turn, with an equal part of its memory. */
static orError_t createDevices(const orDeviceConfig *config, int count, orDeviceDesc *descs) {
  (void)config;
  cl_int error;
  cl_device_id found[OPENREG_MAX_DEVICES];
  cl_uint hardware = findDevices(found);
  if (!hardware) return orErrorNoDevice;
  theContext = clCreateContext(NULL, hardware, found, NULL, NULL, &error);
  if (error) return orErrorNoDevice;
  creator = getpid();
  for (cl_uint i = 0; i < hardware; i++) hasDoubles &= computesDoubles(found[i]);
  size_t sharing = ((size_t)count + hardware - 1) / hardware;
  for (int i = 0; i < count; i++) {
    devices[i].id = found[(cl_uint)i % hardware];
    pthread_mutex_init(&devices[i].lock, NULL);
    descs[i].memory_limit = memoryOf(devices[i].id) / sharing;
    descs[i].self = &devices[i];
  }
  return buildProgram(found, hardware);
}

static orDeviceFactory factory = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "OpenCL",
    .create_devices = createDevices,
    .alloc = allocate,
    .free = release,
    .copy = copy,
    .set = set,
    .compute = compute,
    .operators = openclOperators,
    .properties = properties,
    .reset = reset,
    .shutdown = shutdown,
    .count_devices = countDevices,
};

OR_API orError_t orPluginInit(void) {
  factory.operator_count = openclOperatorCount;
  return orRegisterDeviceFactory("openreg", 100, &factory);
}
