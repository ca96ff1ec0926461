/*
 * Device factories whose functions return what is no memory, or say that a device has more than
 * there can be.
 */
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "stub_factory.h"

static struct {
  size_t limit;
  char *address;
  void *mapped;
  orError_t alloc, free;
  int freed, host_freed;
} answer = {.limit = 1 << 20};

static orError_t createAnswering(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; i++) devices[i].memory_limit = answer.limit;
  return orSuccess;
}
static orError_t allocAnswering(void *device, size_t bytes, void **ptr) {
  (void)device, (void)bytes;
  *ptr = answer.address;
  return answer.alloc;
}
static orError_t freeAnswering(void *device, void *ptr, size_t bytes) {
  (void)device, (void)bytes;
  ASSERT(ptr);
  answer.freed++;
  return answer.free;
}
static orError_t freeHostAnswering(void *device, void *ptr, size_t bytes) {
  (void)device, (void)ptr, (void)bytes;
  answer.host_freed++;
  return orSuccess;
}
static orError_t mapAnswering(void *device, const void *ptr, size_t bytes, void **address) {
  (void)device, (void)ptr, (void)bytes;
  *address = answer.mapped;
  return orSuccess;
}

static void registerAs(const char *type) {
  static orDeviceFactory factory = STUB_FACTORY("answering", createAnswering);
  factory.alloc = allocAnswering;
  factory.free = freeAnswering;
  factory.map = mapAnswering;
  if (!strcmp(type, "CPU")) {
    factory.alloc_host = allocAnswering;
    factory.free_host = freeHostAnswering;
  }
  ASSERT_OK(orRegisterDeviceFactory(type, 99, &factory));
}

/* No memory of the process is there, and none is touched. */
static char *const somewhere = (char *)((uintptr_t)1 << 46);

static const struct {
  uintptr_t address;
  int freed;
} wrong[] = {{0, 0}, {((uintptr_t)1 << 46) + 8, 1}, {UINTPTR_MAX - 15, 1}};

static void assertNone(orError_t (*allocate)(void **ptr, size_t bytes)) {
  for (int i = 0; i < 3; i++) {
    void *p = &p;
    answer.address = (char *)wrong[i].address;
    answer.freed = answer.host_freed = 0;
    ASSERT_REFUSED(allocate(&p, 4096), orErrorSystem, "\"answering\" returned");
    ASSERT_PTR(p, NULL);
    ASSERT_EQ(answer.freed, allocate == orMallocHost ? 0 : wrong[i].freed);
    ASSERT_EQ(answer.host_freed, wrong[i].freed - answer.freed);
  }
  answer.address = somewhere;
}

static orError_t allocateCached(void **ptr, size_t bytes) {
  return orCacheMalloc(ptr, bytes, OR_STREAM_DEFAULT);
}

static orError_t allocateForeign(void **ptr, size_t bytes) {
  orDevice *device;
  const orAllocator *allocator;
  ASSERT_OK(orGetDeviceByName(&device, "/npu:0"));
  ASSERT_OK(orDeviceGetAllocator(device, orAllocatorDevice, &allocator));
  return allocator->alloc(allocator->self, bytes, ptr);
}

static void assertAllFree(void) {
  size_t now, total;
  ASSERT_OK(orMemGetInfo(&now, &total));
  ASSERT_EQ(now, total);
}

TEST(factory_memory_that_is_none) {
  registerAs("openreg");
  registerAs("CPU");
  registerAs("npu");
  assertNone(orMalloc);
  assertNone(allocateCached);
  assertNone(orMallocHost);
  assertNone(allocateForeign);
  assertAllFree();
  void *p;
  ASSERT_OK(orMalloc(&p, 4096));
  ASSERT_OK(orFree(p));
  ASSERT_EQ(answer.freed, 2);
}

/* It is the first one's, so it does not go back. */
TEST(factory_memory_that_is_somebodys) {
  registerAs("openreg");
  void *p, *other;
  answer.address = somewhere;
  ASSERT_OK(orMalloc(&p, 4096));
  ASSERT_REFUSED(orMalloc(&other, 4096), orErrorAlreadyExists, "\"answering\" returned");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "overlaps");
  ASSERT_PTR(other, NULL);
  ASSERT_EQ(answer.freed, 0);
  ASSERT_OK(orFree(p));
  ASSERT_EQ(answer.freed, 1);
  assertAllFree();
}

/* The capacity is given back, whatever `free` returns. */
TEST(factory_memory_functions_that_fail) {
  static const orError_t none[] = {orErrorNotReady, (orError_t)999};
  registerAs("openreg");
  void *p;
  answer.address = somewhere;
  for (int i = 0; i < 2; i++) {
    answer.alloc = none[i];
    ASSERT_REFUSED(orMalloc(&p, 4096), orErrorSystem, i ? "returned 999" : "returned 7");
    ASSERT_CONTAINS(orGetLastErrorMessage(), "alloc of the device factory \"answering\"");
  }
  answer.alloc = orSuccess;
  ASSERT_OK(orMalloc(&p, 4096));
  answer.free = orErrorInvalidValue;
  ASSERT_REFUSED(orFree(p), orErrorInvalidValue, "free of the device factory \"answering\"");
  assertAllFree();
}

static orError_t mapEach(void *args) {
  char *p = *(char **)args;
  void *address = &address;
  ASSERT_REFUSED(orMapForKernel(&address, p, 16), orErrorSystem, "\"answering\" returned");
  ASSERT_PTR(address, NULL);
  answer.mapped = p + 4;
  ASSERT_REFUSED(orMapForKernel(&address, p, 16), orErrorSystem, "0 past a multiple of 16");
  ASSERT_OK(orMapForKernel(&address, p + 20, 16));
  ASSERT_PTR(address, p + 4);
  return orSuccess;
}

TEST(factory_memory_that_is_mapped_nowhere) {
  registerAs("openreg");
  void *p;
  answer.address = somewhere;
  ASSERT_OK(orMalloc(&p, 4096));
  launch(OR_STREAM_DEFAULT, mapEach, p);
  ASSERT_OK(orDeviceSynchronize());
}

/* A device without a limit has the most that there can be: no size comes out of a sum that
 * overflows. */
TEST(factory_memory_without_a_limit) {
  static const size_t more[] = {SIZE_MAX,        SIZE_MAX - 511,       SIZE_MAX - 512,
                                SIZE_MAX - 4095, SIZE_MAX - (1 << 20), SIZE_MAX - (2 << 20),
                                (size_t)1 << 63, (size_t)1 << 62,      ((size_t)1 << 50) + 1};
  const size_t most = (size_t)1 << 50;
  size_t now, total;
  void *p;
  answer.limit = SIZE_MAX;
  answer.address = somewhere;
  registerAs("openreg");
  ASSERT_OK(orMemGetInfo(&now, &total));
  ASSERT_EQ(total, most);
  for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
    ASSERT_ERROR(orMalloc(&p, more[i]), orErrorMemoryAllocation);
    ASSERT_PTR(p, NULL);
    ASSERT_ERROR(allocateCached(&p, more[i]), orErrorMemoryAllocation);
    ASSERT_PTR(p, NULL);
  }
  orCacheOptions options = {.size = sizeof options, .large_segment_size = -(size_t)65536};
  ASSERT_OK(orCacheSetOptions(&options));
  ASSERT_OK(allocateCached(&p, 2 << 20));
  ASSERT_OK(orCacheFree(p));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(allocateCached(&p, most - 1));
  ASSERT_OK(orCacheFree(p));
  ASSERT_OK(orCacheEmpty(0));
  ASSERT_OK(orMalloc(&p, most));
  ASSERT_OK(orFree(p));
  assertAllFree();
}
