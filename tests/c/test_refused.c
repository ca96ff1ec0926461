/*
 * What no call accepts: a null result, a device or a stream that there is not, a call from a host
 * function or in a forked child. Each table has every call of one kind.
 */
#include <limits.h>
#include <stdlib.h>

#include "gate.h"
#include "openreg_fault.h"
#include "openreg_graph.h"
#include "openreg_sanitizer.h"
#include "openreg_schedule.h"

TEST(refused_null_results) {
  int number = 0;
  size_t size = 0;
  uint64_t seed = 0;
  orSchedulePolicy policy;
  orStream_t s = newStream();
  orEvent_t e = newEvent(0);
  const orError_t seen[] = {
      orGetSetting(0, NULL),
      orGetDeviceCount(NULL),
      orGetDevice(NULL),
      orGetDeviceProperties(NULL, 0),
      orMemGetInfo(NULL, &size),
      orMemGetInfo(&size, NULL),
      orDeviceGetStreamPriorityRange(NULL, &number),
      orDeviceGetStreamPriorityRange(&number, NULL),
      orDeviceCanAccessPeer(NULL, 0, 1),
      orMalloc(NULL, 8),
      orMallocHost(NULL, 8),
      orPointerGetAttributes(NULL, &size),
      orStreamCreate(NULL),
      orStreamGetDefault(NULL, 0),
      orStreamGetFromPool(NULL, 0, 0),
      orStreamGetDevice(s, NULL),
      orStreamGetPriority(s, NULL),
      orStreamEndCapture(s, NULL),
      orStreamGetCaptureInfo(s, NULL, &seed),
      orLaunchHostFunc(s, NULL, NULL),
      orGetWorkerInfo(NULL),
      orEventCreate(NULL),
      orEventElapsedTime(NULL, e, e),
      orCacheMalloc(NULL, 8, s),
      orCacheBlockSize(NULL, &size),
      orCacheGetFraction(NULL, 0),
      orCacheGetStats(NULL, 0),
      orCacheSnapshot(NULL, sizeof(orCacheBlock), NULL, 0),
      orMemPoolCreate(NULL, 0),
      orTraceStop(NULL),
      orGetTotalDeviceCount(NULL),
      orGetFactoryInfo(0, NULL),
      orUnregisterDeviceFactory(NULL, NULL),
      orStreamRefuseCapture(s, NULL, ""),
      orStreamRefuseCapture(s, "", NULL),
      orHangReport(NULL),
      orScheduleGet(NULL, &seed),
      orScheduleGet(&policy, NULL),
      orScheduleGetTape(NULL),
      orFaultGetOutcome(NULL, 0, 0),
      orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, NULL, NULL),
      orSanitizerReports(1, NULL, sizeof(orRaceReport), 1, &size, NULL),
      orSanitizerOrder(1, NULL),
      orScheduleSteps(0, NULL, sizeof(orScheduleStep), 0, NULL),
      orSetHangHook(NULL),
  };
  for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
    if (seen[i] != orErrorInvalidValue) FAIL("call %zu: %s", i, orGetErrorName(seen[i]));
}

static void refuseDevice(int device) {
  int can, other;
  size_t count = 0;
  double fraction;
  orStream_t stream;
  orMemPool_t pool;
  orCacheStats stats = {.size = sizeof stats};
  orDeviceProperties properties = {.size = sizeof properties};
  orFaultOutcome outcome = {.size = sizeof outcome};
  const orFault fault = {.size = sizeof fault, .device = device};
  const orError_t seen[] = {
      orSetDevice(device),
      orGetDeviceProperties(&properties, device),
      orDeviceCanAccessPeer(&can, 0, device),
      orDeviceCanAccessPeer(&can, device, 0),
      orDeviceEnablePeerAccess(0, device),
      orDeviceEnablePeerAccess(device, 0),
      orStreamGetDefault(&stream, device),
      orStreamGetFromPool(&stream, 0, device),
      orCacheEmpty(device),
      orCacheSetFraction(device, 0.5),
      orCacheGetFraction(&fraction, device),
      orCacheGetStats(&stats, device),
      orCacheResetPeakStats(device),
      orCacheResetAccumulatedStats(device),
      orCacheSnapshot(NULL, sizeof(orCacheBlock), &count, device),
      orMemPoolCreate(&pool, device),
      orFaultInject(&fault),
      orFaultGetOutcome(&outcome, 0, device),
      orFaultRemove(0, device),
  };
  for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
    if (seen[i] != orErrorInvalidDevice)
      FAIL("call %zu with device %d: %s", i, device, orGetErrorName(seen[i]));
  ASSERT(!orDeviceIsActive(device));
  ASSERT_OK(orGetDevice(&other));
  ASSERT_EQ(other, 0);
}

TEST(refused_devices) {
  const int devices[] = {-1, INT_MIN, 2, OPENREG_MAX_DEVICES, INT_MAX};
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) refuseDevice(devices[i]);
}

static orGraph_t graphOf(atomic_int *ran) {
  orGraph_t graph;
  orStream_t s = newStream();
  ASSERT_OK(orStreamBeginCapture(s));
  launch(s, countKernel, ran);
  ASSERT_OK(orStreamEndCapture(s, &graph));
  return graph;
}

static void refuseStream(orStream_t s, orGraph_t graph, char *device) {
  int number;
  void *ptr;
  orCaptureStatus status;
  uint64_t id;
  orGraph_t other;
  orEvent_t e = newEvent(0);
  ASSERT_OK(orCacheMalloc(&ptr, 8, OR_STREAM_DEFAULT));
  const orError_t seen[] = {
      orStreamDestroy(s),
      orStreamGetDevice(s, &number),
      orStreamGetPriority(s, &number),
      orStreamQuery(s),
      orStreamSynchronize(s),
      orStreamWaitEvent(s, e),
      orStreamBeginCapture(s),
      orStreamEndCapture(s, &other),
      orStreamGetCaptureInfo(s, &status, &id),
      orStreamRefuseCapture(s, "a", "b"),
      orEventRecord(e, s),
      orLaunchSleep(s, 1),
      orLaunchHostFunc(s, free, NULL),
      launchAs(s, countKernel, NULL, 0),
      orMemcpyAsync(device, device + 8, 8, orMemcpyDefault, s),
      orMemcpyWithStream(device, device + 8, 8, orMemcpyDefault, s),
      orMemcpyPeerAsync(device, 0, device + 8, 0, 8, s),
      orMemsetAsync(device, 0, 8, s),
      orCacheMalloc(&(void *){NULL}, 8, s),
      orCacheRecordStream(ptr, s),
      orGraphReplay(graph, s),
  };
  for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
    if (seen[i] != orErrorInvalidResourceHandle)
      FAIL("call %zu with stream %#llx: %s", i, (unsigned long long)s, orGetErrorName(seen[i]));
  ASSERT_OK(orCacheFree(ptr));
  ASSERT_OK(orEventDestroy(e));
}

TEST(refused_streams) {
  atomic_int ran = 0;
  char *device;
  orGraph_t graph = graphOf(&ran);
  orStream_t gone = newStream(), s = newStream();
  ASSERT_OK(orMalloc((void **)&device, 16));
  ASSERT_OK(orStreamDestroy(gone));
  const orStream_t streams[] = {gone, s + 1, s ^ UINT64_C(1) << 40, UINT64_MAX};
  for (size_t i = 0; i < sizeof streams / sizeof *streams; i++)
    refuseStream(streams[i], graph, device);
  ASSERT_OK(orGraphReplay(graph, s));
  ASSERT_OK(orStreamSynchronize(s));
  ASSERT_EQ(ran, 1);
}

/* ---- calls from where none is allowed ---- */

typedef struct Valid {
  orStream_t stream;
  orEvent_t event;
  orGraph_t graph;
  orMemPool_t pool;
  orDevice *own;
  const orAllocator *allocator;
  void *device, *pinned, *block;
} Valid;

static Valid makeValid(void) {
  static atomic_int ran;
  ASSERT_OK(orSanitizerEnable(NULL)); /* some of its calls do nothing while it is off */
  Valid v = {.stream = newStream(), .event = newEvent(0), .graph = graphOf(&ran)};
  ASSERT_OK(orMalloc(&v.device, 64));
  ASSERT_OK(orMallocHost(&v.pinned, 64));
  ASSERT_OK(orCacheMalloc(&v.block, 64, v.stream));
  ASSERT_OK(orMemPoolCreate(&v.pool, 0));
  ASSERT_OK(orGetDeviceByIndex(&v.own, "openreg", 0));
  ASSERT_OK(orDeviceGetAllocator(v.own, orAllocatorDevice, &v.allocator));
  return v;
}

/* With arguments that any other thread may give. */
static void refuseAll(const Valid *v, orError_t wanted) {
  static char page[4096];
  int number, other;
  size_t size, count = 0;
  uint64_t id;
  double fraction;
  float ms;
  void *ptr;
  orStream_t stream;
  orEvent_t event;
  orMemPool_t pool;
  orGraph_t graph;
  orDevice *device;
  orFactoryInfo factory = {.size = sizeof factory};
  orDeviceProperties properties = {.size = sizeof properties};
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  orCacheStats stats = {.size = sizeof stats};
  orMemPoolStats pool_stats = {.size = sizeof pool_stats};
  orWorkerInfo info = {.size = sizeof info};
  orCaptureStatus status;
  orSchedulePolicy policy;
  const orCacheOptions options = {.size = sizeof options};
  char *text;
  const orAllocator *allocator;
  const orKernel kernel = {.fn = countKernel, .name = "count"};
  orDeviceAttributes device_attributes = {.size = sizeof device_attributes};
  orTrace trace = {.size = sizeof trace};
  orRaceOrder order = {.size = sizeof order};
  orFaultOutcome outcome = {.size = sizeof outcome};
  const orFault fault = {.size = sizeof fault};
  const orError_t seen[] = {
      orGetDevice(&number),
      orSetDevice(0),
      orGetDeviceProperties(&properties, 0),
      orMemGetInfo(&size, &count),
      orDeviceSynchronize(),
      orDeviceReset(),
      orDeviceCanAccessPeer(&number, 0, 1),
      orDeviceEnablePeerAccess(0, 1),
      orMalloc(&ptr, 8),
      orFree(v->device),
      orMallocHost(&ptr, 8),
      orFreeHost(v->pinned),
      orHostRegister(page, sizeof page),
      orHostUnregister(page),
      orPointerGetAttributes(&attributes, v->device),
      orMemcpy(v->pinned, v->device, 8, orMemcpyDefault),
      orMemcpyAsync(v->pinned, v->device, 8, orMemcpyDefault, v->stream),
      orMemcpyWithStream(v->pinned, v->device, 8, orMemcpyDefault, v->stream),
      orMemcpyPeerAsync(v->device, 0, v->device, 0, 8, v->stream),
      orMemset(v->device, 0, 8),
      orMemsetAsync(v->device, 0, 8, v->stream),
      orStreamCreate(&stream),
      orStreamCreateWithPriority(&stream, 0),
      orStreamGetDefault(&stream, 0),
      orStreamGetFromPool(&stream, 0, 0),
      orStreamGetDevice(v->stream, &number),
      orStreamGetPriority(v->stream, &number),
      orStreamQuery(v->stream),
      orStreamSynchronize(v->stream),
      orStreamWaitEvent(v->stream, v->event),
      orLaunchHostFunc(v->stream, free, NULL),
      launchAs(v->stream, countKernel, NULL, 0),
      orLaunchSleep(v->stream, 1),
      orGetWorkerInfo(&info),
      orEventCreate(&event),
      orEventRecord(v->event, v->stream),
      orEventQuery(v->event),
      orEventSynchronize(v->event),
      orEventElapsedTime(&ms, v->event, v->event),
      orEventSignal(v->event, orSuccess),
      orCacheMalloc(&ptr, 8, v->stream),
      orCacheMallocFromPool(&ptr, 8, v->stream, v->pool),
      orCacheRecordStream(v->block, v->stream),
      orCacheFree(v->block),
      orCacheCheck(v->block, 8),
      orCacheBlockSize(&size, v->block),
      orCacheEmpty(0),
      orCacheEmptyPool(v->pool),
      orCacheSetFraction(0, 1),
      orCacheGetFraction(&fraction, 0),
      orCacheSetOptions(&options),
      orCacheGetStats(&stats, 0),
      orCacheResetPeakStats(0),
      orCacheResetAccumulatedStats(0),
      orCacheSnapshot(NULL, sizeof(orCacheBlock), &count, 0),
      orMemPoolCreate(&pool, 0),
      orMemPoolRelease(v->pool),
      orMemPoolGetStats(&pool_stats, v->pool),
      orTraceStart(1),
      orGetFactoryInfo(0, &factory),
      orGetTotalDeviceCount(&other),
      orGetDeviceByName(&device, "/cpu:0"),
      orGetDeviceAt(&device, 0),
      orGetDeviceByIndex(&device, "openreg", 0),
      orDeviceGetAttributes(v->own, &device_attributes),
      orDeviceGetAllocator(v->own, orAllocatorDevice, &allocator),
      orDeviceCompute(v->own, &kernel, v->stream),
      v->allocator->alloc(v->allocator->self, 8, &ptr),
      v->allocator->free(v->allocator->self, v->device),
      orStreamBeginCapture(v->stream),
      orStreamEndCapture(v->stream, &graph),
      orStreamGetCaptureInfo(v->stream, &status, &id),
      orStreamRefuseCapture(v->stream, "a", "b"),
      orGraphReplay(v->graph, v->stream),
      orGraphGetNodeCount(v->graph, &size),
      orGraphDebugDotPrint(v->graph, "/no such place/a.dot"),
      orScheduleSet(orScheduleFair, 0),
      orScheduleSwitch(orScheduleFair, 0),
      orScheduleGet(&policy, &id),
      orScheduleRecord(0),
      orScheduleSetTape("0"),
      orScheduleGetTape(&text),
      orScheduleSteps(0, NULL, sizeof(orScheduleStep), 0, &count),
      orHangReport(&text),
      orTraceStop(&trace),
      orFaultInject(&fault),
      orFaultGetOutcome(&outcome, 0, 0),
      orFaultRemove(0, 0),
      orSanitizerReports(1, NULL, sizeof(orRaceReport), 0, &count, NULL),
      orSanitizerOrder(1, &order),
      orSanitizerClearReports(),
      orSanitizerEventOver(v->event),
      orSanitizerMarkExternal(v->stream),
      orSanitizerUsed(v->pinned, 8, v->stream),
      orSanitizerHostBlock(v->pinned),
      orStreamDestroy(v->stream),
      orEventDestroy(v->event),
      orGraphDestroy(v->graph),
      orSanitizerEnable(NULL),
      orSanitizerDisable(),
  };
  for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
    if (seen[i] != wanted) FAIL("call %zu: %s", i, orGetErrorName(seen[i]));
}

static void refuseInHostFunction(void *context) { refuseAll(context, orErrorNotPermitted); }

TEST(refused_in_host_functions) {
  Valid v = makeValid();
  ASSERT_OK(orLaunchHostFunc(v.stream, refuseInHostFunction, &v));
  ASSERT_OK(orStreamSynchronize(v.stream));
  ASSERT_OK(orStreamDestroy(v.stream));
}

static Valid before_fork;

static void refuseInChild(void) { refuseAll(&before_fork, orErrorForked); }

TEST(refused_in_a_forked_child) {
  before_fork = makeValid();
  ASSERT_FORK_OK(refuseInChild);
}
