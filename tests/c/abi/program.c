/*
 * A program of somebody who has not compiled it again: built against the headers of a release (tests/c/abi/VERSION), run
 * with the library of this tree. It uses a bit of everything. Ends with the line of the first thing that goes wrong.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openreg.h"
#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"
#include "openreg_watchdog.h"

#define EXPECT(condition)                                                                   \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, orGetLastErrorMessage()); \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)
#define OK(call) EXPECT((call) == orSuccess)

enum { COUNT = 1000 };

/* ---- a factory ---- */

static orError_t create(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  EXPECT(config->type_count == 2 && !strcmp(config->device_count[0].type, "npu"));
  for (int i = 0; i < count; i++) devices[i].memory_limit = 4096;
  return orSuccess;
}
static orError_t alloc(void *device, size_t bytes, void **ptr) {
  (void)device;
  *ptr = malloc(bytes);
  return *ptr ? orSuccess : orErrorMemoryAllocation;
}
static orError_t release(void *device, void *ptr, size_t bytes) {
  (void)device, (void)bytes;
  free(ptr);
  return orSuccess;
}
static orError_t copy(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                      orEvent_t done) {
  (void)device, (void)kind, (void)done;
  memcpy(dst, src, bytes);
  return orSuccess;
}
static orError_t set(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  (void)device, (void)done;
  memset(dst, value, bytes);
  return orSuccess;
}
static orError_t compute(void *device, const orKernel *kernel, orEvent_t done) {
  (void)device, (void)done;
  return kernel->fn(kernel->args);
}
static const orDeviceFactory factory = {.size = sizeof(orDeviceFactory),
                                        .abi_version = OPENREG_ABI_VERSION,
                                        .name = "an older program's",
                                        .create_devices = create,
                                        .alloc = alloc,
                                        .free = release,
                                        .copy = copy,
                                        .set = set,
                                        .compute = compute};
OR_REGISTER_DEVICE_FACTORY("npu", 7, &factory)

static void devices(void) {
  orDeviceCount counts[] = {{"npu", 2}, {"openreg", 3}};
  orDeviceConfig config = {.size = sizeof config, .device_count = counts, .type_count = 2};
  OK(orAddDevices(&config, "/old"));
  int count = 0, total = 0;
  OK(orGetDeviceCount(&count));
  OK(orGetTotalDeviceCount(&total));
  EXPECT(count == 3 && total == 6);
  orDevice *device;
  OK(orGetDeviceByName(&device, "/old/npu:1"));
  orDeviceAttributes attributes;
  OK(orDeviceGetAttributes(device, &attributes));
  EXPECT(attributes.index == 1 && attributes.memory_limit == 4096);
  static const float values[2] = {1, 2};
  static const int64_t shape[1] = {2};
  orTensorProto proto = {orFloat32, 1, shape, values, sizeof values};
  orTensor tensor;
  const orAllocator *allocator;
  OK(orDeviceMakeTensor(device, &proto, orAllocatorDevice, &tensor));
  EXPECT(tensor.ndim == 1 && tensor.shape[0] == 2 && !memcmp(tensor.data, values, sizeof values));
  OK(orDeviceGetAllocator(device, orAllocatorDevice, &allocator));
  OK(allocator->free(allocator->self, tensor.data));
  orDeviceProperties properties;
  OK(orGetDeviceProperties(&properties, 2));
  EXPECT(properties.index == 2 && !strcmp(properties.name, "/old/openreg:2"));
}

/* ---- kernels, copies, streams, events ---- */

typedef struct Doubled {
  int *memory;
  int *dropped;
} Doubled;

static orError_t doubleAll(void *args) {
  const Doubled *d = args;
  void *mapped;
  orError_t error = orMapForKernel(&mapped, d->memory, COUNT * sizeof(int));
  for (int i = 0; !error && i < COUNT; i++) ((int *)mapped)[i] *= 2;
  return error;
}
static void drop(void *args) { ++*((Doubled *)args)->dropped; }

static void launches(void) {
  int *memory, *pinned, dropped = 0, queued = 0;
  orStream_t stream, side;
  orEvent_t begun, done, gate;
  OK(orMalloc((void **)&memory, COUNT * sizeof(int)));
  OK(orMallocHost((void **)&pinned, COUNT * sizeof(int)));
  OK(orStreamCreate(&stream));
  OK(orStreamCreateWithPriority(&side, -1));
  OK(orEventCreate(&begun));
  OK(orEventCreateWithFlags(&done, orEventDefault));
  OK(orEventCreateWithFlags(&gate, orEventExternal));
  for (int i = 0; i < COUNT; i++) pinned[i] = i;
  OK(orStreamWaitEvent(stream, gate));
  OK(orEventRecord(begun, stream));
  OK(orMemcpyAsync(memory, pinned, COUNT * sizeof(int), orMemcpyHostToDevice, stream));
  Doubled doubled = {memory, &dropped};
  orAccess access = {memory, COUNT * sizeof(int), 1};
  OK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                  .stream = stream,
                                  .fn = doubleAll,
                                  .args = &doubled,
                                  .args_size = sizeof doubled,
                                  .drop = drop,
                                  .accesses = &access,
                                  .access_count = 1,
                                  .name = "double_all",
                                  .flags = orLaunchAnyThread,
                                  .queued = &queued}));
  EXPECT(queued == 1);
  OK(orEventRecord(done, stream));
  OK(orStreamWaitEvent(side, done));
  OK(orMemcpyAsync(pinned, memory, COUNT * sizeof(int), orMemcpyDeviceToHost, side));
  EXPECT(orStreamQuery(side) == orErrorNotReady);
  OK(orEventSignal(gate, orSuccess));
  OK(orStreamSynchronize(side));
  EXPECT(dropped == 1);
  for (int i = 0; i < COUNT; i++) EXPECT(pinned[i] == 2 * i);
  float milliseconds = -1;
  OK(orEventElapsedTime(&milliseconds, begun, done));
  EXPECT(milliseconds >= 0);
  EXPECT(orStreamSynchronize(stream + 1) == orErrorInvalidResourceHandle);
  orPointerAttributes attributes;
  OK(orPointerGetAttributes(&attributes, memory + 3));
  EXPECT(attributes.type == orMemoryTypeDevice && attributes.base == memory);
  OK(orEventDestroy(gate));
  OK(orStreamDestroy(side));
  OK(orFree(memory));
  OK(orFreeHost(pinned));
}

/* ---- the cache ---- */

static void caching(void) {
  orStream_t stream;
  void *block;
  orCacheStats stats;
  OK(orStreamGetDefault(&stream, 0));
  OK(orCacheSetOptions(&(orCacheOptions){.size = sizeof(orCacheOptions),
                                         .garbage_collection_threshold = 0.5,
                                         .roundup_power2_divisions = {8, 8, 8, 8}}));
  OK(orCacheMalloc(&block, 1 << 20, stream));
  OK(orCacheGetStats(&stats, 0));
  EXPECT(stats.allocation[0].current == 1 && stats.allocated_bytes[0].current >= 1 << 20);
  OK(orCacheFree(block));
  size_t count = 0;
  OK(orCacheSnapshot(NULL, &count, 0));
  EXPECT(count > 0);
  OK(orCacheEmpty(0));
}

/* ---- what watches ---- */

static void tracing(void) {
  orTrace trace;
  OK(orTraceStart(16));
  OK(orLaunchSleep(OR_STREAM_DEFAULT, 1000));
  OK(orStreamSynchronize(OR_STREAM_DEFAULT));
  OK(orTraceStop(&trace));
  int kernels = 0;
  for (size_t i = 0; i < trace.count; i++)
    if (trace.records[i].kind == orTraceKernel) {
      kernels++;
      EXPECT(!strcmp(trace.records[i].name, "_sleep"));
      EXPECT(trace.records[i].end_ns > trace.records[i].start_ns);
    }
  EXPECT(kernels == 1);
  orTraceFree(&trace);
}

static void watching(void) {
  orFault fault = {.size = sizeof fault, .kind = orFaultKernelError};
  OK(orFaultInject(&fault));
  OK(orLaunchSleep(OR_STREAM_DEFAULT, 1000));
  EXPECT(orStreamSynchronize(OR_STREAM_DEFAULT) == orErrorLaunchFailure);
  orFaultOutcome outcome;
  OK(orFaultGetOutcome(&outcome, orFaultKernelError, 0));
  EXPECT(outcome.fired == 1);
  OK(orFaultRemove(orFaultKernelError, 0));
  orSanitizerOptions options = {.size = sizeof options, .reports = 3};
  OK(orSanitizerEnable(&options));
  EXPECT(*orSanitizerActive() != 0);
  OK(orSanitizerDisable());
  orSchedulePolicy policy = orScheduleLate;
  uint64_t seed;
  OK(orScheduleGet(&policy, &seed));
  EXPECT(policy == orScheduleFair);
  char *report = NULL;
  OK(orHangReport(&report));
  free(report);
}

int main(void) {
  EXPECT(orGetVersion() >= OPENREG_VERSION);
  EXPECT(orGetVersion() / 10000 == OPENREG_VERSION_MAJOR);
  devices();
  launches();
  caching();
  tracing();
  watching();
  OK(orDeviceReset());
  printf("built with %s\n", OPENREG_VERSION_STRING);
  return 0;
}
