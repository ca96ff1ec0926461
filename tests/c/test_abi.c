/*
 * Structures that begin with their size, from an older or newer header than the library's. Each
 * structure ends at the end of a page without another page behind it, so that a read beyond its
 * size ends the test.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "gate.h"
#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "stub_factory.h"

enum { MOST = 4096 }; /* bytes of a structure */

TEST(abi_version) {
  char text[32];
  int version = orGetVersion();
  ASSERT_EQ(version, OPENREG_VERSION);
  snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  ASSERT_STR(text, OPENREG_VERSION_STRING);
}

/* `has` bytes whose first are those of `known`, and the rest 0; then, to the next word, what nobody
 * should read. */
static void *placed(const void *known, size_t size, size_t has) {
  size_t words = has < 8 ? 8 : (has + 7) / 8 * 8;
  size_t page = pageSize();
  char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT(pages != MAP_FAILED);
  ASSERT_EQ(mprotect(pages + page, page, PROT_NONE), 0);
  char *structure = pages + page - words;
  memset(structure + has, 0xff, words - has);
  return memcpy(structure, known, has < size ? has : size);
}

typedef struct Given {
  const char *type;
  orError_t (*give)(const void *structure);
  const void *known;
  size_t size, least;
  orError_t refusal;
} Given;

static orError_t giveLaunch(const void *l) { return orLaunchKernelEx(l); }
static orError_t giveOptions(const void *o) { return orCacheSetOptions(o); }
static orError_t giveFault(const void *f) {
  orError_t error = orFaultInject(f);
  return error ? error : orFaultRemove(orFaultOutOfMemory, 1);
}
static orError_t giveSanitizer(const void *o) {
  orError_t error = orSanitizerEnable(o);
  return error ? error : orSanitizerDisable();
}
static orError_t giveFactory(const void *f) {
  orError_t error = orRegisterDeviceFactory("npu", 3, f);
  return error ? error : orUnregisterDeviceFactory("npu", f);
}

static orError_t nothing(void *args) {
  (void)args;
  return orSuccess;
}

static const orLaunch newestLaunch = {.size = sizeof newestLaunch, .fn = nothing, .name = "none"};
static const orCacheOptions newestOptions = {.size = sizeof newestOptions};
static const orFault newestFault = {.size = sizeof newestFault, .device = 1};
static const orSanitizerOptions newestSanitizer = {.size = sizeof newestSanitizer};
static const orDeviceFactory newestFactory = STUB_FACTORY("of another size", stubCreate);

#define GIVEN(type, give, known, last, refusal) \
  {#type, give, &(known), sizeof(type), offsetof(type, last) + sizeof(((type *)0)->last), refusal}
static const Given all[] = {
    GIVEN(orDeviceFactory, giveFactory, newestFactory, compute, orErrorPluginVersion),
    GIVEN(orLaunch, giveLaunch, newestLaunch, name, orErrorInvalidValue),
    GIVEN(orCacheOptions, giveOptions, newestOptions, size, orErrorInvalidValue),
    GIVEN(orFault, giveFault, newestFault, device, orErrorInvalidValue),
    GIVEN(orSanitizerOptions, giveSanitizer, newestSanitizer, size, orErrorInvalidValue),
};
enum { COUNT = sizeof all / sizeof all[0] };

/* The size is a size_t, or the factory's uint32_t. */
static void writeSize(const Given *g, char *structure, size_t has) {
  uint32_t low = (uint32_t)has;
  if (g->give == giveFactory)
    memcpy(structure, &low, sizeof low);
  else
    memcpy(structure, &has, sizeof has);
}

static char *ofSize(const Given *g, size_t has) {
  char *structure = placed(g->known, g->size, has);
  writeSize(g, structure, has);
  return structure;
}

TEST(abi_older_structures_are_taken) {
  for (int i = 0; i < COUNT; i++)
    for (size_t has = all[i].least; has <= all[i].size; has++)
      ASSERT_OK(all[i].give(ofSize(&all[i], has)));
}

TEST(abi_structures_without_what_is_required_are_refused) {
  for (int i = 0; i < COUNT; i++) {
    ASSERT_REFUSED(all[i].give(ofSize(&all[i], all[i].least - 1)), all[i].refusal, all[i].type);
    ASSERT_CONTAINS(orGetLastErrorMessage(), "size");
  }
}

TEST(abi_newer_structures_are_taken_if_the_rest_is_zero) {
  for (int i = 0; i < COUNT; i++) {
    ASSERT_OK(all[i].give(ofSize(&all[i], all[i].size + 24)));
    char *asks = ofSize(&all[i], all[i].size + 24);
    asks[all[i].size + 23] = 1;
    ASSERT_REFUSED(all[i].give(asks), all[i].refusal, "byte 23 after");
    ASSERT_CONTAINS(orGetLastErrorMessage(), all[i].type);
    ASSERT_OK(all[i].give(ofSize(&all[i], MOST)));
    writeSize(&all[i], asks, MOST + 1); /* nobody looks for zeros there */
    ASSERT_REFUSED(all[i].give(asks), all[i].refusal, "4097");
  }
}

/* ---- Structures that the library fills ---- */

static size_t memory[2 * MOST / sizeof(size_t)];
static orError_t fillSetting(void *p) { return orGetSetting(0, p); }
static orError_t fillProperties(void *p) { return orGetDeviceProperties(p, 1); }
static orError_t fillPointer(void *p) { return orPointerGetAttributes(p, memory); }
static orError_t fillLanes(void *p) { return orGetWorkerInfo(p); }
static orError_t fillStats(void *p) { return orCacheGetStats(p, 0); }
static orError_t fillPool(void *p) {
  orMemPool_t pool;
  ASSERT_OK(orMemPoolCreate(&pool, 0));
  orError_t error = orMemPoolGetStats(p, pool);
  return error ? error : orMemPoolRelease(pool);
}
/* A trace that cannot be given goes on. */
static orError_t fillTrace(void *p) {
  orError_t error = orTraceStart(16);
  ASSERT(!error || error == orErrorAlreadyExists);
  error = orTraceStop(p);
  if (!error) orTraceFree(p);
  return error;
}
static orError_t fillFactory(void *p) { return orGetFactoryInfo(0, p); }
static orError_t fillAttributes(void *p) {
  orDevice *device;
  ASSERT_OK(orGetDeviceByIndex(&device, "openreg", 1));
  return orDeviceGetAttributes(device, p);
}
static orError_t fillTensor(void *p) {
  static const int64_t none = 0;
  static const orTensorProto empty = {.dtype = orFloat32, .ndim = 1, .shape = &none};
  orDevice *device;
  ASSERT_OK(orGetDeviceByIndex(&device, "CPU", 0));
  return orDeviceMakeTensor(device, &empty, 0, p);
}
static orError_t fillOutcome(void *p) {
  orError_t error = orFaultInject(&newestFault);
  ASSERT(!error || error == orErrorAlreadyExists);
  return orFaultGetOutcome(p, orFaultOutOfMemory, 1);
}

static const struct {
  const char *type;
  orError_t (*fill)(void *structure);
  size_t size;
} filled[] = {
    {"orSetting", fillSetting, sizeof(orSetting)},
    {"orDeviceProperties", fillProperties, sizeof(orDeviceProperties)},
    {"orPointerAttributes", fillPointer, sizeof(orPointerAttributes)},
    {"orWorkerInfo", fillLanes, sizeof(orWorkerInfo)},
    {"orCacheStats", fillStats, sizeof(orCacheStats)},
    {"orMemPoolStats", fillPool, sizeof(orMemPoolStats)},
    {"orTrace", fillTrace, sizeof(orTrace)},
    {"orFactoryInfo", fillFactory, sizeof(orFactoryInfo)},
    {"orDeviceAttributes", fillAttributes, sizeof(orDeviceAttributes)},
    {"orTensor", fillTensor, sizeof(orTensor)},
    {"orFaultOutcome", fillOutcome, sizeof(orFaultOutcome)},
};
enum { FILLED = sizeof filled / sizeof filled[0] };

/* To the end of a page, behind which there is nothing. */
static char *toFill(size_t has) {
  size_t zero = 0;
  char *structure = placed(&zero, sizeof zero, has);
  memset(structure, 0xaa, has);
  return memcpy(structure, &has, sizeof has);
}

static bool allZero(const char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (bytes[i]) return false;
  return true;
}

TEST(abi_structures_to_fill_are_filled_to_their_size) {
  for (int i = 0; i < FILLED; i++) {
    char *same = toFill(filled[i].size), *newer = toFill(filled[i].size + 24);
    ASSERT_OK(filled[i].fill(same));
    ASSERT_OK(filled[i].fill(newer));
    ASSERT_EQ(*(size_t *)same, filled[i].size);
    ASSERT_EQ(*(size_t *)newer, filled[i].size + 24);
    ASSERT(allZero(newer + filled[i].size, 24));
  }
}

TEST(abi_structures_to_fill_that_are_too_small_are_refused) {
  for (int i = 0; i < FILLED; i++) {
    ASSERT_REFUSED(filled[i].fill(toFill(sizeof(size_t))), orErrorInvalidValue, filled[i].type);
    ASSERT_CONTAINS(orGetLastErrorMessage(), "size is 8 bytes");
    memory[0] = MOST + 1;
    ASSERT_REFUSED(filled[i].fill(memory), orErrorInvalidValue, "4097");
  }
}

/* As far apart as the caller says. */
TEST(abi_arrays_to_fill) {
  struct {
    orCacheBlock block;
    uint64_t more;
  } blocks[4];
  size_t count = 4;
  void *first, *second;
  memset(blocks, 0xaa, sizeof blocks);
  ASSERT_OK(orCacheMalloc(&first, 512, 0));
  ASSERT_OK(orCacheMalloc(&second, 1024, 0));
  ASSERT_OK(orCacheSnapshot(&blocks[0].block, sizeof blocks[0], &count, 0));
  ASSERT_EQ(count, 3);
  ASSERT_PTR(blocks[0].block.address, first);
  ASSERT_PTR(blocks[1].block.address, second);
  for (int i = 0; i < 3; i++) ASSERT_EQ(blocks[i].more, 0);
  ASSERT_EQ(blocks[2].block.bytes, (2 << 20) - 1536);
}

/* What is beyond an older structure's size is not looked at. */
TEST(abi_older_structures_have_the_defaults) {
  orStream_t s = newStream();
  orLaunch l = {.size = offsetof(orLaunch, flags), .stream = s, .fn = nothing, .name = "none"};
  l.flags = ~0u;
  ASSERT_OK(orLaunchKernelEx(&l));
  orFault f = {.size = offsetof(orFault, after), .kind = orFaultKernelError, .after = 1};
  ASSERT_OK(orFaultInject(&f));
  ASSERT_OK(orLaunchKernelEx(&l));
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure, "injected");
}

TEST(abi_a_configuration_of_another_size) {
  orDeviceCount three = {"openreg", 3};
  struct {
    orDeviceConfig known;
    uint64_t more;
  } newer = {{sizeof newer, &three, 1}, 1};
  ASSERT_REFUSED(orAddDevices(&newer.known, NULL), orErrorInvalidValue, "orDeviceConfig");
  newer.more = 0;
  ASSERT_OK(orAddDevices(&newer.known, NULL));
  int count = 0;
  ASSERT_OK(orGetDeviceCount(&count));
  ASSERT_EQ(count, 3);
}

TEST(abi_an_older_configuration_means_the_defaults) {
  size_t alone = sizeof alone;
  ASSERT_OK(orAddDevices((const orDeviceConfig *)&alone, "/job"));
  orDevice *device;
  ASSERT_OK(orGetDeviceByName(&device, "/job/openreg:1"));
}

/* The library keeps a table of its own size; the caller's is what it is known by. */
TEST(abi_an_older_factory_makes_devices) {
  orDeviceFactory older = newestFactory;
  older.size = offsetof(orDeviceFactory, map);
  older.map = (orError_t (*)(void *, const void *, size_t, void **))1;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &older));
  ASSERT_ERROR(orRegisterDeviceFactory("openreg", 10, &older), orErrorAlreadyExists);
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.factory, "of another size");
  ASSERT_EQ(properties.can_map, 0);
}
