/*
 * Structures that begin with their size, from an older or newer header than the library's: each ends where its page ends,
 * which nothing follows, so that what is read beyond its size ends the test.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "gate.h"
#include "openreg_fault.h"
#include "openreg_sanitizer.h"
#include "stub_factory.h"

enum { MOST = 4096 }; /* bytes of a structure */

TEST(given_version) {
  char text[32];
  int version = orGetVersion();
  ASSERT_EQ(version, OPENREG_VERSION);
  snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  ASSERT_STR(text, OPENREG_VERSION_STRING);
}

/* `has` bytes whose first are those of `known`, and the rest 0; then, to the next word, what nobody should read. */
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

TEST(given_older_structures_are_taken) {
  for (int i = 0; i < COUNT; i++)
    for (size_t has = all[i].least; has <= all[i].size; has++)
      ASSERT_OK(all[i].give(ofSize(&all[i], has)));
}

TEST(given_structures_without_what_is_required_are_refused) {
  for (int i = 0; i < COUNT; i++) {
    ASSERT_REFUSED(all[i].give(ofSize(&all[i], all[i].least - 1)), all[i].refusal, all[i].type);
    ASSERT_CONTAINS(orGetLastErrorMessage(), "size");
  }
}

TEST(given_newer_structures_are_taken_if_the_rest_is_zero) {
  for (int i = 0; i < COUNT; i++) {
    ASSERT_OK(all[i].give(ofSize(&all[i], all[i].size + 24)));
    char *asks = ofSize(&all[i], all[i].size + 24);
    asks[all[i].size + 23] = 1;
    ASSERT_REFUSED(all[i].give(asks), all[i].refusal, "byte 23 beyond");
    ASSERT_CONTAINS(orGetLastErrorMessage(), all[i].type);
    ASSERT_OK(all[i].give(ofSize(&all[i], MOST)));
    writeSize(&all[i], asks, MOST + 1); /* nobody looks for zeros there */
    ASSERT_REFUSED(all[i].give(asks), all[i].refusal, "4097");
  }
}

/* What is beyond an older structure's size is not looked at. */
TEST(given_older_structures_have_the_defaults) {
  orStream_t s = newStream();
  orLaunch l = {.size = offsetof(orLaunch, flags), .stream = s, .fn = nothing, .name = "none"};
  l.flags = ~0u;
  ASSERT_OK(orLaunchKernelEx(&l));
  orFault f = {.size = offsetof(orFault, after), .kind = orFaultKernelError, .after = 1};
  ASSERT_OK(orFaultInject(&f));
  ASSERT_OK(orLaunchKernelEx(&l));
  ASSERT_REFUSED(orStreamSynchronize(s), orErrorLaunchFailure, "injected");
}

TEST(given_a_configuration_of_another_size) {
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

TEST(given_an_older_configuration_means_the_defaults) {
  size_t alone = sizeof alone;
  ASSERT_OK(orAddDevices((const orDeviceConfig *)&alone, "/job"));
  orDevice *device;
  ASSERT_OK(orGetDeviceByName(&device, "/job/openreg:1"));
}

/* The library keeps a table of its own size; the caller's is what it is known by. */
TEST(given_an_older_factory_makes_devices) {
  orDeviceFactory older = newestFactory;
  older.size = offsetof(orDeviceFactory, map);
  older.map = (orError_t (*)(void *, const void *, size_t, void **))1;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &older));
  ASSERT_ERROR(orRegisterDeviceFactory("openreg", 10, &older), orErrorAlreadyExists);
  orDeviceProperties properties;
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.factory, "of another size");
  ASSERT_EQ(properties.can_map, 0);
}
