/* Device factories: registry, priorities, making devices, look-up, allocators, compute, tensors. */
#include "harness.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "stub_factory.h"

/* ---- Factories of the tests: they record that they were asked, and fail if told to ---- */

static char asked[256];
static orError_t createError;
static atomic_int creations;

static void note(const char *who, int count) {
  char text[64];
  snprintf(text, sizeof(text), "%s:%d ", who, count);
  strncat(asked, text, sizeof(asked) - strlen(asked) - 1);
}

static orError_t createHost(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)devices;
  note("host", count);
  return orSuccess;
}

static orError_t createOther(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  note("other", count);
  atomic_fetch_add(&creations, 1);
  for (int i = 0; i < count; ++i) {
    devices[i].memory_limit = 1000u + (size_t)devices[i].index;
    devices[i].index = 77; /* not its to say */
  }
  return createError;
}

static const orDeviceFactory hostFactory = STUB_FACTORY("test host", createHost);
static const orDeviceFactory otherFactory = STUB_FACTORY("test other", createOther);

static orDeviceConfig configOf(const orDeviceCount *counts, size_t count) {
  return (orDeviceConfig){sizeof(orDeviceConfig), counts, count};
}

static orDevice *byName(const char *name) {
  orDevice *device = NULL;
  ASSERT_OK(orGetDeviceByName(&device, name));
  return device;
}

static int countDevices(void) {
  int count = -1;
  ASSERT_OK(orGetDeviceCount(&count));
  return count;
}

/* ---- Registry ---- */

static orFactoryInfo infoOf(const char *type, int priority) {
  orFactoryInfo info = {.size = sizeof info};
  for (int i = 0; !orGetFactoryInfo(i, &info); ++i)
    if (!strcmp(info.type, type) && info.priority == priority) return info;
  FAIL("no factory for %s at priority %d", type, priority);
}

TEST(factory_built_in) {
  orFactoryInfo info = {.size = sizeof info};
  ASSERT_EQ(infoOf("CPU", 0).serves, 0);
  ASSERT_EQ(infoOf("CPU", 50).serves, 1);
  ASSERT_EQ(infoOf("openreg", 0).serves, 1);
  ASSERT_STR(infoOf("openreg", 0).plugin, "");
  ASSERT_REFUSED(orGetFactoryInfo(3, &info), orErrorInvalidValue, "3");
  ASSERT_REFUSED(orGetFactoryInfo(-1, &info), orErrorInvalidValue, "-1");
  ASSERT_REFUSED(orGetFactoryInfo(0, NULL), orErrorInvalidValue, "null");
}

TEST(factory_highest_priority_serves) {
  ASSERT_OK(orRegisterDeviceFactory("openreg", -5, &hostFactory));
  ASSERT_EQ(infoOf("openreg", 0).serves, 1);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 7, &otherFactory));
  ASSERT_EQ(infoOf("openreg", 0).serves, 0);
  ASSERT_EQ(infoOf("openreg", 7).serves, 1);
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.factory, "test other");
  ASSERT_EQ(properties.total_memory, 1001);
  ASSERT_EQ(properties.can_map, 0);
}

TEST(factory_equal_priority) {
  ASSERT_REFUSED(orRegisterDeviceFactory("CPU", 50, &hostFactory), orErrorAlreadyExists,
                 "'test host'");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "50");
  ASSERT_ERROR(orRegisterDeviceFactory("OpenReg", 0, &otherFactory), orErrorAlreadyExists);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 1, &otherFactory));
  ASSERT_ERROR(orRegisterDeviceFactory("openreg", 2, &otherFactory), orErrorAlreadyExists);
  ASSERT_OK(orUnregisterDeviceFactory("openreg", &otherFactory));
  ASSERT_OK(orRegisterDeviceFactory("openreg", 2, &otherFactory));
}

TEST(factory_wrong_version) {
  orDeviceFactory f = otherFactory;
  f.abi_version = OPENREG_ABI_VERSION + 1;
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorPluginVersion, "ABI version 3");
  f = otherFactory;
  f.size = offsetof(orDeviceFactory, compute);
  f.name = (const char *)1; /* nothing behind the version is looked at */
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorPluginVersion, "bytes");
}

TEST(factory_incomplete_table) {
  orDeviceFactory f = otherFactory;
  f.copy = NULL;
  ASSERT_REFUSED(orRegisterDeviceFactory("openreg", 9, &f), orErrorInvalidValue, "copy");
  f = otherFactory;
  f.create_devices = NULL;
  ASSERT_REFUSED(orRegisterDeviceFactory("CPU", 9, &f), orErrorInvalidValue, "create_devices");
  f = hostFactory;
  f.alloc_host = stubAlloc;
  ASSERT_REFUSED(orRegisterDeviceFactory("CPU", 9, &f), orErrorInvalidValue, "free_host");
  f = hostFactory;
  f.name = NULL;
  ASSERT_REFUSED(orRegisterDeviceFactory("CPU", 9, &f), orErrorInvalidValue, "name");
  ASSERT_ERROR(orRegisterDeviceFactory("CPU", 9, NULL), orErrorInvalidValue);
  ASSERT_ERROR(orRegisterDeviceFactory(NULL, 9, &hostFactory), orErrorInvalidValue);
  ASSERT_ERROR(orRegisterDeviceFactory("", 9, &hostFactory), orErrorInvalidValue);
  ASSERT_REFUSED(orRegisterDeviceFactory("a type with far too many characters", 9, &hostFactory),
                 orErrorInvalidValue, "31");
}

TEST(factory_unregister_unknown) {
  ASSERT_REFUSED(orUnregisterDeviceFactory("openreg", &otherFactory), orErrorNotFound, "'openreg'");
  ASSERT_REFUSED(orUnregisterDeviceFactory("npu", NULL), orErrorNotFound, "'npu'");
}

/* ---- Making devices ---- */

TEST(factory_missing_host) {
  int count = -1;
  ASSERT_OK(orUnregisterDeviceFactory("CPU", NULL));
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorNotFound,
                 "no device factory is registered for type 'CPU'");
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorNotFound, "registered for type 'CPU'");
  ASSERT_EQ(count, 0);
  ASSERT_OK(orRegisterDeviceFactory("CPU", 0, &hostFactory)); /* it can be put right */
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_EQ(countDevices(), 2);
}

TEST(factory_no_host_device) {
  orDeviceCount none = {"CPU", 0};
  orDeviceConfig config = configOf(&none, 1);
  orDevice *device;
  ASSERT_REFUSED(orAddDevices(&config, NULL), orErrorNotFound, "no CPU device was made");
  ASSERT_REFUSED(orGetDeviceByName(&device, "/openreg:0"), orErrorNotFound,
                 "no CPU device was made");
}

TEST(factory_host_is_asked_first) {
  static const orDeviceFactory npu = STUB_FACTORY("test npu", createOther);
  ASSERT_OK(orRegisterDeviceFactory("npu", 0, &npu));
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &otherFactory));
  ASSERT_OK(orRegisterDeviceFactory("CPU", 99, &hostFactory));
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_STR(asked, "host:1 other:2 other:1 ");
  ASSERT_STR(byName("/npu:0") ? "found" : "", "found");
}

TEST(factory_failure_stops_with_its_own_error) {
  int count = -1;
  orDevice *device;
  createError = orErrorNotSupported;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &otherFactory));
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorNotSupported, "'test other'");
  ASSERT_CONTAINS(orGetLastErrorMessage(), orGetErrorString(orErrorNotSupported));
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorNotSupported, "'test other'");
  ASSERT_EQ(count, 0);
  ASSERT_ERROR(orGetDeviceByName(&device, "/cpu:0"), orErrorNotSupported); /* no device is left */
  ASSERT_EQ(atomic_load(&creations), 1); /* the failure is repeated, the factory is not */
  ASSERT_OK(orUnregisterDeviceFactory("openreg", &otherFactory));
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_EQ(countDevices(), 2);
}

/* What was short may be there the next time. */
TEST(factory_shortage_does_not_last) {
  static const orError_t shortages[] = {orErrorMemoryAllocation, orErrorSystem};
  int count = -1;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &otherFactory));
  for (int i = 0; i < 2; i++) {
    createError = shortages[i];
    ASSERT_REFUSED(orGetDeviceCount(&count), shortages[i], "'test other'");
  }
  createError = orSuccess;
  ASSERT_EQ(countDevices(), 2);
}

static orError_t createDetailed(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  orSetting setting = {.size = sizeof setting};
  return orGetSetting(-77, &setting);
}

TEST(factory_failure_keeps_its_detail) {
  static const orDeviceFactory detailed = STUB_FACTORY("detailed", createDetailed);
  ASSERT_OK(orRegisterDeviceFactory("CPU", 99, &detailed));
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &otherFactory));
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorInvalidValue, "-77");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "'detailed'");
  ASSERT_EQ(atomic_load(&creations), 0); /* the host failed: nobody else was asked */
}

TEST(factory_counts_by_configuration) {
  orDeviceCount counts[] = {{"CPU", 2}, {"openreg", 3}};
  orDeviceConfig config = configOf(counts, 2);
  setenv("OPENREG_DEVICE_COUNT", "7", 1);
  ASSERT_OK(orAddDevices(&config, "/job:test"));
  ASSERT_EQ(countDevices(), 3);
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 2));
  ASSERT_STR(properties.name, "/job:test/openreg:2");
  byName("/job:test/cpu:1");
}

static int counted;
static orError_t countError;

static orError_t countCards(int *count) {
  orSetting setting = {.size = sizeof setting};
  if (countError)
    return countError == orErrorInvalidValue ? orGetSetting(-77, &setting) : countError;
  *count = counted;
  return orSuccess;
}

static orDeviceFactory countingFactory(void) {
  orDeviceFactory f = otherFactory;
  f.count_devices = countCards;
  return f;
}

static void makeCounted(void) {
  orDeviceFactory f = countingFactory();
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &f));
  ASSERT_EQ(countDevices(), counted);
}

TEST(factory_counts_its_devices) {
  static const int counts[] = {0, 1, OPENREG_MAX_DEVICES};
  clearSettings();
  for (int i = 0; i < 3; i++) {
    counted = counts[i];
    ASSERT_FORK_OK(makeCounted);
  }
}

/* A call would fail. */
static void registerUncounted(orDeviceFactory *f) {
  *f = countingFactory();
  countError = orErrorNotSupported;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, f));
}

TEST(factory_does_not_count_what_is_configured) {
  orDeviceFactory f;
  orDeviceCount counts[] = {{"openreg", 3}};
  orDeviceConfig config = configOf(counts, 1);
  registerUncounted(&f);
  ASSERT_OK(orAddDevices(&config, NULL));
  ASSERT_EQ(countDevices(), 3);
}

TEST(factory_does_not_count_what_the_environment_sets) {
  orDeviceFactory f;
  setenv("OPENREG_DEVICE_COUNT", "2", 1);
  registerUncounted(&f);
  ASSERT_EQ(countDevices(), 2);
}

TEST(factory_of_another_type_or_a_lower_priority_does_not_count) {
  orDeviceFactory f = countingFactory(), g = f;
  clearSettings();
  counted = 5;
  ASSERT_OK(orRegisterDeviceFactory("npu", 9, &f));
  ASSERT_OK(orRegisterDeviceFactory("openreg", -9, &g));
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_EQ(countDevices(), 2);
  ASSERT_STR(asked, "other:1 ");
}

static orError_t leaveCount(int *count) {
  (void)count;
  return orSuccess;
}

TEST(factory_counts_wrongly) {
  int count = -1;
  orDeviceFactory f = countingFactory(), silent = f;
  clearSettings();
  silent.count_devices = leaveCount;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &f));
  counted = OPENREG_MAX_DEVICES + 1;
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorInvalidValue,
                 "'test other' counts 65 devices: 0 to 64 are allowed");
  ASSERT_EQ(count, 0);
  counted = -3;
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorInvalidValue, "counts -3 devices");
  countError = orErrorNotSupported;
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorNotSupported,
                 "'test other' cannot count its devices: not supported");
  countError = orErrorInvalidValue;
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorInvalidValue, "-77");
  countError = (orError_t)999;
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorSystem, "count_devices of the device factory");
  ASSERT_EQ(atomic_load(&creations), 0);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 10, &silent));
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorInvalidValue, "counts -1 devices");
  ASSERT_OK(orUnregisterDeviceFactory("openreg", &silent));
  countError = orSuccess, counted = 1; /* it can be put right */
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_EQ(countDevices(), 1);
}

/* A plugin that was built before the function existed has the default number. */
TEST(factory_of_an_older_header_counts_no_devices) {
  orDeviceFactory f = countingFactory();
  clearSettings();
  f.size = offsetof(orDeviceFactory, count_devices);
  counted = 5;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &f));
  ASSERT_EQ(countDevices(), 2);
}

TEST(factory_bad_configuration) {
  struct {
    orDeviceCount counts[2];
    size_t count;
    orError_t error;
    const char *part;
  } cases[] = {
      {{{"CPU", -1}}, 1, orErrorInvalidValue, "-1"},
      {{{"openreg", 65}}, 1, orErrorInvalidValue, "0 to 64"},
      {{{"openreg", 1}, {"OPENREG", 2}}, 2, orErrorInvalidValue, "two device counts"},
      {{{"tpu", 1}}, 1, orErrorNotFound, "'tpu'"},
      {{{NULL, 1}}, 1, orErrorInvalidValue, "type"},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) {
    orDeviceConfig config = configOf(cases[i].counts, cases[i].count);
    ASSERT_REFUSED(orAddDevices(&config, NULL), cases[i].error, cases[i].part);
  }
  orDeviceConfig wrong = {sizeof(wrong.size) - 1, NULL, 0}, empty = {sizeof(empty), NULL, 3};
  ASSERT_REFUSED(orAddDevices(&wrong, NULL), orErrorInvalidValue, "size");
  ASSERT_REFUSED(orAddDevices(&empty, NULL), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orAddDevices(NULL, "/a prefix that is too long to fit a name in"),
                 orErrorInvalidValue, "prefix");
  ASSERT_OK(orAddDevices(NULL, NULL));
}

TEST(factory_devices_are_made_once) {
  ASSERT_OK(orAddDevices(NULL, NULL));
  ASSERT_REFUSED(orAddDevices(NULL, NULL), orErrorAlreadyInitialized, "already");
  ASSERT_ERROR(orRegisterDeviceFactory("openreg", 9, &otherFactory), orErrorAlreadyInitialized);
  ASSERT_ERROR(orUnregisterDeviceFactory("openreg", NULL), orErrorAlreadyInitialized);
}

TEST(factory_first_call_makes_the_devices) {
  ASSERT_EQ(countDevices(), 2);
  ASSERT_ERROR(orAddDevices(NULL, NULL), orErrorAlreadyInitialized);
}

static orError_t inner[5];
static orError_t createReentrant(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  int n;
  inner[0] = orGetDeviceCount(&n);
  inner[1] = orAddDevices(NULL, NULL);
  inner[2] = orRegisterDeviceFactory("npu", 0, &otherFactory);
  return orSuccess;
}

TEST(factory_may_not_use_devices_while_they_are_made) {
  static const orDeviceFactory reentrant = STUB_FACTORY("reentrant", createReentrant);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &reentrant));
  ASSERT_OK(orAddDevices(NULL, NULL));
  for (int i = 0; i < 3; ++i) ASSERT_ERROR(inner[i], orErrorNotPermitted);
}

/* A call of each kind, from a thread that create_devices waits for. */
static void *useDevices(void *context) {
  orDevice *device;
  void *p;
  (void)context;
  int n;
  inner[0] = orGetDeviceCount(&n);
  inner[1] = orAddDevices(NULL, NULL);
  inner[2] = orMalloc(&p, 16);
  inner[3] = orGetDeviceByName(&device, "/cpu:0");
  inner[4] = orRegisterDeviceFactory("npu", 0, &otherFactory);
  return NULL;
}

static void *startUser(void *context) {
  pthread_t user;
  pthread_create(&user, NULL, useDevices, context);
  pthread_join(user, NULL);
  return NULL;
}

static orError_t createWithThreads(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  pthread_t starter;
  pthread_create(&starter, NULL, startUser, NULL);
  pthread_join(starter, NULL);
  return orSuccess;
}

TEST(factory_refuses_threads_that_create_devices_waits_for) {
  static const orDeviceFactory threads = STUB_FACTORY("threads", createWithThreads);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &threads));
  ASSERT_EQ(countDevices(), 2);
  for (int i = 0; i < 4; ++i) ASSERT_ERROR(inner[i], orErrorNotPermitted);
  ASSERT_ERROR(inner[4], orErrorAlreadyInitialized);
  startUser(NULL); /* a thread of the same one, later */
  ASSERT_OK(inner[0]);
}

/* ---- Other threads, while the devices are made ---- */

static atomic_int begun, mayEnd;

static orError_t createSlowly(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  atomic_store(&begun, 1);
  awaitInt(&mayEnd, 1);
  return createError;
}

static const orDeviceFactory slowFactory = STUB_FACTORY("slow", createSlowly);

static void *firstUse(void *wanted) {
  int count = -1;
  ASSERT_ERROR(orGetDeviceCount(&count), wanted ? *(orError_t *)wanted : orSuccess);
  return NULL;
}

/* Until create_devices has begun, on another thread. */
static pthread_t beginSlowly(orError_t *wanted) {
  pthread_t thread;
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &slowFactory));
  pthread_create(&thread, NULL, firstUse, wanted);
  awaitInt(&begun, 1);
  return thread;
}

static void endSlowly(pthread_t thread) {
  atomic_store(&mayEnd, 1);
  pthread_join(thread, NULL);
  ASSERT_EQ(countDevices(), 2);
}

static _Thread_local bool waits;
static atomic_int waiting;
static void *enterWait(void) {
  if (waits) atomic_fetch_add(&waiting, 1);
  return NULL;
}
static void leaveWait(void *token) { (void)token; }

static void *waitForDevices(void *error) {
  waits = true;
  return firstUse(error);
}

static void useWhileBeingMade(orError_t *error) {
  pthread_t users[2];
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){enterWait, leaveWait}));
  pthread_t maker = beginSlowly(error);
  for (int i = 0; i < 2; i++) pthread_create(&users[i], NULL, waitForDevices, error);
  awaitInt(&waiting, 2); /* they have put their locks down */
  atomic_store(&mayEnd, 1);
  for (int i = 0; i < 2; i++) pthread_join(users[i], NULL);
  pthread_join(maker, NULL);
}

TEST(factory_other_threads_wait_for_the_devices) {
  useWhileBeingMade(NULL);
  ASSERT_EQ(countDevices(), 2);
}

TEST(factory_other_threads_get_the_failure) {
  createError = orErrorNotSupported;
  useWhileBeingMade(&createError);
}

/* A thread that registers may hold a lock that create_devices wants. */
TEST(factory_registration_does_not_wait_for_the_devices) {
  pthread_t maker = beginSlowly(NULL);
  ASSERT_REFUSED(orRegisterDeviceFactory("npu", 0, &otherFactory), orErrorAlreadyInitialized,
                 "being made");
  ASSERT_REFUSED(orUnregisterDeviceFactory("openreg", NULL), orErrorAlreadyInitialized,
                 "being made");
  endSlowly(maker);
}

static void useInChild(void) {
  int count = -1;
  ASSERT_EQ(orInForkedChild(), 1);
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorForked, "about to");
  ASSERT_ERROR(orAddDevices(NULL, NULL), orErrorForked);
}

TEST(factory_fork_while_devices_are_made) {
  pthread_t maker = beginSlowly(NULL);
  ASSERT_FORK_OK(useInChild);
  endSlowly(maker);
  ASSERT_EQ(orInForkedChild(), 0);
}

static orError_t createForking(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)count, (void)devices;
  ASSERT_FORK_OK(useInChild);
  return orSuccess;
}

TEST(factory_fork_in_create_devices) {
  static const orDeviceFactory forking = STUB_FACTORY("forking", createForking);
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &forking));
  ASSERT_EQ(countDevices(), 2);
}

/* The registry's lock is free in a child, whatever other threads do. */
static atomic_int stopped;
static void *registerAgain(void *context) {
  (void)context;
  while (!atomic_load(&stopped)) {
    ASSERT_OK(orRegisterDeviceFactory("npu", 0, &otherFactory));
    ASSERT_OK(orUnregisterDeviceFactory("npu", NULL));
  }
  return NULL;
}

static void countInChild(void) { ASSERT_EQ(countDevices(), 2); }

TEST(factory_fork_while_another_thread_registers) {
  pthread_t thread;
  pthread_create(&thread, NULL, registerAgain, NULL);
  for (int i = 0; i < 50; i++) ASSERT_FORK_OK(countInChild);
  atomic_store(&stopped, 1);
  pthread_join(thread, NULL);
}

static void countOnThread(int thread, void *context) {
  (void)thread, (void)context;
  ASSERT_EQ(countDevices(), 2);
}

TEST(factory_many_threads_make_the_devices_once) {
  ASSERT_OK(orRegisterDeviceFactory("openreg", 9, &otherFactory));
  runThreads(8, countOnThread, NULL);
  ASSERT_EQ(atomic_load(&creations), 1);
}

TEST(factory_look_up) {
  orDevice *a = byName("/openreg:1"), *b = NULL, *wrong = NULL;
  ASSERT_OK(orGetDeviceByIndex(&b, "openreg", 1));
  ASSERT_PTR(a, b);
  ASSERT_OK(orGetDeviceByIndex(&b, "CPU", 0));
  ASSERT_PTR(b, byName("/cpu:0"));
  ASSERT_REFUSED(orGetDeviceByName(&wrong, "/openreg:2"), orErrorNotFound, "'/openreg:2'");
  ASSERT_CONTAINS(orGetLastErrorMessage(), "/cpu:0, /openreg:0, /openreg:1");
  ASSERT_REFUSED(orGetDeviceByIndex(&wrong, "openreg", 2), orErrorInvalidDevice, "0 to 1");
  ASSERT_REFUSED(orGetDeviceByIndex(&wrong, "openreg", -1), orErrorInvalidDevice, "-1");
  ASSERT_REFUSED(orGetDeviceByIndex(&wrong, "npu", 0), orErrorNotFound, "'npu'");
  ASSERT_ERROR(orGetDeviceByName(NULL, "/cpu:0"), orErrorInvalidValue);
  ASSERT_ERROR(orGetDeviceByName(&wrong, NULL), orErrorInvalidValue);
  ASSERT_PTR(wrong, NULL);
}

TEST(factory_attributes) {
  orDeviceAttributes attributes = {.size = sizeof attributes};
  setenv("OPENREG_DEVICE_MEMORY", "64M", 1);
  ASSERT_OK(orDeviceGetAttributes(byName("/openreg:1"), &attributes));
  ASSERT_STR(attributes.name, "/openreg:1");
  ASSERT_STR(attributes.type, "openreg");
  ASSERT_EQ(attributes.index, 1);
  ASSERT_EQ(attributes.memory_limit, 64 << 20);
  ASSERT_GE(attributes.numa_node, -1);
  ASSERT_OK(orDeviceGetAttributes(byName("/cpu:0"), &attributes));
  ASSERT_STR(attributes.type, "CPU");
  ASSERT_CONTAINS(attributes.factory, "pinned");
  ASSERT_GT(attributes.memory_limit, 64 << 20);
  ASSERT_ERROR(orDeviceGetAttributes(NULL, &attributes), orErrorInvalidResourceHandle);
  ASSERT_ERROR(orDeviceGetAttributes((orDevice *)&attributes, &attributes),
               orErrorInvalidResourceHandle);
  ASSERT_ERROR(orDeviceGetAttributes(byName("/cpu:0"), NULL), orErrorInvalidValue);
}

TEST(factory_devices_of_all_types) {
  static const char *const names[] = {"/cpu:0", "/openreg:0", "/openreg:1", "/npu:0"};
  int count = -1;
  orDevice *device = NULL;
  ASSERT_OK(orRegisterDeviceFactory("npu", 0, &otherFactory));
  ASSERT_OK(orGetTotalDeviceCount(&count));
  ASSERT_EQ(count, 4);
  ASSERT_EQ(countDevices(), 2);
  for (int i = 0; i < count; ++i) {
    ASSERT_OK(orGetDeviceAt(&device, i));
    ASSERT_PTR(device, byName(names[i]));
  }
  ASSERT_REFUSED(orGetDeviceAt(&device, 4), orErrorInvalidDevice, "0 to 3");
  ASSERT_REFUSED(orGetDeviceAt(&device, -1), orErrorInvalidDevice, "-1");
  ASSERT_PTR(device, byName("/npu:0"));
  ASSERT_ERROR(orGetDeviceAt(NULL, 0), orErrorInvalidValue);
  ASSERT_ERROR(orGetTotalDeviceCount(NULL), orErrorInvalidValue);
}

TEST(factory_devices_that_cannot_be_made_are_none) {
  int count = -1;
  orDevice *device;
  ASSERT_OK(orUnregisterDeviceFactory("CPU", NULL));
  ASSERT_ERROR(orGetTotalDeviceCount(&count), orErrorNotFound);
  ASSERT_EQ(count, 0);
  ASSERT_ERROR(orGetDeviceAt(&device, 0), orErrorNotFound);
}

/* ---- Compute ---- */

/* The one kernel of the trace. */
static orTraceRecord tracedKernel(void) {
  orTrace trace = {.size = sizeof trace};
  orTraceRecord found = {.kind = orTraceLaunch};
  ASSERT_OK(orTraceStop(&trace));
  for (size_t i = 0; i < trace.count; i++)
    if (trace.records[i].kind == orTraceKernel) {
      ASSERT_EQ(found.kind, orTraceLaunch);
      found = trace.records[i];
    }
  orTraceFree(&trace);
  ASSERT_EQ(found.kind, orTraceKernel);
  return found;
}

static orError_t addOne(void *args) {
  atomic_fetch_add((atomic_int *)args, 1);
  return orSuccess;
}
static orError_t failKernel(void *args) {
  (void)args;
  return orErrorInvalidValue;
}

TEST(factory_compute_on_the_host_runs_at_once) {
  atomic_int ran = 0;
  orKernel kernel = {addOne, &ran, "add_one"};
  orDevice *host = byName("/cpu:0");
  ASSERT_OK(orDeviceCompute(host, &kernel, 0));
  ASSERT_EQ(ran, 1);
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orDeviceCompute(host, &kernel, 0));
  ASSERT_EQ(ran, 2);
  orTraceRecord traced = tracedKernel();
  ASSERT_STR(traced.name, "add_one");
  ASSERT_EQ(traced.lane, -1);
  ASSERT_GE(traced.end_ns, traced.start_ns);
  ASSERT_GT(traced.start_ns, 0);
}

TEST(factory_compute_refuses) {
  orDevice *host = byName("/cpu:0"), *device = byName("/openreg:1");
  orKernel fails = {failKernel, NULL, "fails"}, nothing = {NULL, NULL, "nothing"};
  orStream_t stream;
  ASSERT_OK(orStreamCreate(&stream)); /* of device 0 */
  ASSERT_REFUSED(orDeviceCompute(host, &fails, 0), orErrorInvalidValue, "'fails'");
  ASSERT_ERROR(orDeviceCompute(host, &nothing, 0), orErrorInvalidValue);
  ASSERT_ERROR(orDeviceCompute(host, NULL, 0), orErrorInvalidValue);
  ASSERT_ERROR(orDeviceCompute(NULL, &fails, 0), orErrorInvalidResourceHandle);
  ASSERT_REFUSED(orDeviceCompute(host, &fails, stream), orErrorInvalidResourceHandle, "/cpu:0");
  ASSERT_REFUSED(orDeviceCompute(device, &fails, stream), orErrorInvalidResourceHandle,
                 "/openreg:0");
  ASSERT_ERROR(orDeviceCompute(device, &fails, 12345), orErrorInvalidResourceHandle);
}

TEST(factory_compute_on_a_device_is_asynchronous) {
  atomic_int ran = 0;
  orKernel kernel = {addOne, &ran, "add_one"};
  orDevice *device = byName("/openreg:1");
  orEvent_t gate;
  orStream_t stream;
  int current = -1;
  ASSERT_OK(orTraceStart(0));
  ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
  ASSERT_OK(orStreamGetDefault(&stream, 1));
  ASSERT_OK(orStreamWaitEvent(stream, gate));
  ASSERT_OK(orDeviceCompute(device, &kernel, OR_STREAM_DEFAULT));
  kernel.fn = NULL; /* the queue has its own copy */
  ASSERT_ERROR(orStreamQuery(stream), orErrorNotReady);
  ASSERT_EQ(ran, 0);
  ASSERT_OK(orEventSignal(gate, orSuccess));
  ASSERT_OK(orStreamSynchronize(stream));
  ASSERT_EQ(ran, 1);
  orTraceRecord traced = tracedKernel();
  ASSERT_STR(traced.name, "add_one");
  ASSERT_EQ(traced.device, 1);
  ASSERT_OK(orGetDevice(&current));
  ASSERT_EQ(current, 0);
}

/* ---- Allocators ---- */

static const orAllocator *allocatorOf(const char *name, unsigned attributes) {
  const orAllocator *allocator = NULL;
  ASSERT_OK(orDeviceGetAllocator(byName(name), attributes, &allocator));
  return allocator;
}

static orPointerAttributes attributesOf(const void *p) {
  orPointerAttributes attributes = {.struct_size = sizeof attributes};
  ASSERT_OK(orPointerGetAttributes(&attributes, p));
  return attributes;
}

TEST(factory_device_allocator) {
  void *p = NULL;
  int current = -1;
  size_t before, after, total;
  const orAllocator *allocator = allocatorOf("/openreg:1", orAllocatorDevice);
  ASSERT_OK(allocator->alloc(allocator->self, 2 * pageSize() + 1, &p));
  ASSERT_OK(orGetDevice(&current));
  ASSERT_EQ(current, 0);
  ASSERT_EQ(attributesOf(p).type, orMemoryTypeDevice);
  ASSERT_EQ(attributesOf(p).device, 1);
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orMemGetInfo(&before, &total));
  ASSERT_OK(orSetDevice(0));
  const orAllocator *other = allocatorOf("/openreg:0", orAllocatorDevice);
  ASSERT_REFUSED(other->free(other->self, p), orErrorInvalidValue, "/openreg:0");
  ASSERT_OK(allocator->free(allocator->self, p));
  ASSERT_ERROR(allocator->free(allocator->self, p), orErrorInvalidValue);
  ASSERT_OK(allocator->free(allocator->self, NULL));
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orMemGetInfo(&after, &total));
  ASSERT_EQ(after - before, 3 * pageSize());
}

TEST(factory_device_allocator_out_of_memory) {
  setenv("OPENREG_DEVICE_MEMORY", "1M", 1);
  void *p = &p;
  const orAllocator *allocator = allocatorOf("/openreg:1", orAllocatorDevice);
  ASSERT_ERROR(allocator->alloc(allocator->self, 2 << 20, &p), orErrorMemoryAllocation);
  ASSERT_PTR(p, NULL);
  ASSERT_OK(allocator->alloc(allocator->self, 1 << 20, &p));
  ASSERT_OK(allocator->free(allocator->self, p));
  static const unsigned char bytes[2 << 20];
  static const int64_t shape[1] = {sizeof bytes};
  const orTensorProto proto = {orUint8, 1, shape, bytes, sizeof bytes};
  orTensor tensor = {.size = sizeof tensor};
  ASSERT_ERROR(orDeviceMakeTensor(byName("/openreg:1"), &proto, 0, &tensor),
               orErrorMemoryAllocation);
}

static void checkHostMemory(const char *device, unsigned attributes, orMemoryType type) {
  void *p = NULL;
  const orAllocator *allocator = allocatorOf(device, attributes);
  ASSERT_OK(allocator->alloc(allocator->self, 10000, &p));
  memset(p, 1, 10000);
  ASSERT_EQ(attributesOf(p).type, type);
  ASSERT_EQ(attributesOf(p).device, -1);
  ASSERT_OK(allocator->free(allocator->self, p));
  ASSERT_OK(allocator->alloc(allocator->self, 0, &p));
  ASSERT_PTR(p, NULL);
}

TEST(factory_host_allocators) {
  checkHostMemory("/openreg:0", orAllocatorOnHost, orMemoryTypeUnregistered);
  checkHostMemory("/openreg:1", orAllocatorOnHost | orAllocatorPinned, orMemoryTypeHost);
  checkHostMemory("/cpu:0", orAllocatorDevice, orMemoryTypeUnregistered);
  checkHostMemory("/cpu:0", orAllocatorOnHost, orMemoryTypeUnregistered);
  checkHostMemory("/cpu:0", orAllocatorOnHost | orAllocatorPinned, orMemoryTypeHost);
}

TEST(factory_allocator_attributes) {
  const orAllocator *allocator = NULL;
  orDevice *device = byName("/openreg:0");
  ASSERT_REFUSED(orDeviceGetAllocator(device, orAllocatorPinned, &allocator), orErrorInvalidValue,
                 "0x2");
  ASSERT_REFUSED(orDeviceGetAllocator(device, 8, &allocator), orErrorInvalidValue, "0x8");
  ASSERT_ERROR(orDeviceGetAllocator(device, 0, NULL), orErrorInvalidValue);
  ASSERT_ERROR(orDeviceGetAllocator(NULL, 0, &allocator), orErrorInvalidResourceHandle);
  ASSERT_PTR(allocator, NULL);
}

TEST(factory_host_without_pinned_memory) {
  void *pinned = &pinned;
  const orAllocator *allocator = NULL;
  ASSERT_OK(orRegisterDeviceFactory("CPU", 99, &hostFactory));
  ASSERT_REFUSED(
      orDeviceGetAllocator(byName("/cpu:0"), orAllocatorOnHost | orAllocatorPinned, &allocator),
      orErrorNotSupported, "'test host'");
  ASSERT_REFUSED(orMallocHost(&pinned, 8), orErrorNotSupported, "\"test host\" has no pinned");
  ASSERT_PTR(pinned, NULL);
}

/* ---- Tensors from bytes ---- */

TEST(factory_make_tensor) {
  static const float values[6] = {1, 2, 3, 4, 5, 6};
  static const int64_t shape[2] = {2, 3};
  static const char *const places[] = {"/openreg:1", "/openreg:0", "/cpu:0"};
  float back[6];
  orTensorProto proto = {orFloat32, 2, shape, values, sizeof(values)};
  for (int i = 0; i < 3; ++i)
    for (unsigned attributes = 0; attributes < 4; ++attributes) {
      if (attributes == orAllocatorPinned) continue;
      orTensor tensor = {.size = sizeof tensor};
      const orAllocator *allocator = allocatorOf(places[i], attributes);
      ASSERT_OK(orDeviceMakeTensor(byName(places[i]), &proto, attributes, &tensor));
      ASSERT_EQ(tensor.nbytes, sizeof(values));
      ASSERT_EQ(tensor.dtype, orFloat32);
      ASSERT_EQ(tensor.ndim, 2);
      ASSERT_MEM(tensor.shape, shape, sizeof(shape));
      ASSERT_EQ(attributesOf(tensor.data).device, attributes || i == 2 ? -1 : 1 - i);
      memset(back, 0, sizeof(back));
      ASSERT_OK(orMemcpy(back, tensor.data, sizeof(back), orMemcpyDefault));
      ASSERT_MEM(back, values, sizeof(values));
      ASSERT_OK(allocator->free(allocator->self, tensor.data));
    }
  int current = -1;
  ASSERT_OK(orGetDevice(&current));
  ASSERT_EQ(current, 0);
}

TEST(factory_make_tensor_of_every_dtype) {
  static const struct {
    orDtype dtype;
    size_t size;
    const char *name;
  } all[] = {
#define OR_X(name, size, text) {name, size, text},
      OR_DTYPE_LIST(OR_X)
#undef OR_X
  };
  static const unsigned char bytes[64];
  static const int64_t shape[1] = {3};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) {
    orTensor tensor = {.size = sizeof tensor};
    orTensorProto proto = {all[i].dtype, 1, shape, bytes, 3 * all[i].size};
    ASSERT_OK(orDeviceMakeTensor(byName("/cpu:0"), &proto, 0, &tensor));
    free(tensor.data);
    proto.nbytes += 1;
    ASSERT_REFUSED(orDeviceMakeTensor(byName("/cpu:0"), &proto, 0, &tensor), orErrorInvalidValue,
                   all[i].name);
  }
}

TEST(factory_make_tensor_scalar_and_empty) {
  static const double value = 2.5;
  static const int64_t empty[3] = {INT64_MAX, 0, INT64_MAX};
  orTensor tensor = {.size = sizeof tensor};
  double back = 0;
  orTensorProto scalar = {orFloat64, 0, NULL, &value, sizeof(value)};
  ASSERT_OK(orDeviceMakeTensor(byName("/openreg:0"), &scalar, 0, &tensor));
  ASSERT_OK(orMemcpy(&back, tensor.data, sizeof(back), orMemcpyDeviceToHost));
  ASSERT_NEAR(back, 2.5, 0);
  ASSERT_OK(orFree(tensor.data));
  orTensorProto nothing = {orFloat64, 3, empty, NULL, 0};
  ASSERT_OK(orDeviceMakeTensor(byName("/openreg:0"), &nothing, 0, &tensor));
  ASSERT_PTR(tensor.data, NULL);
  ASSERT_EQ(tensor.nbytes, 0);
}

TEST(factory_make_tensor_refuses) {
  static const unsigned char bytes[64] = {1, 0, 1, 7};
  static const int64_t good[2] = {2, 3}, negative[2] = {2, -3}, huge[2] = {INT64_MAX, 4},
                       four[1] = {4}, three[1] = {3};
  const struct {
    orTensorProto proto;
    const char *part;
  } cases[] = {
      {{orFloat32, 2, good, bytes, 20}, "needs 24 bytes, 20 were given"},
      {{orFloat32, 2, good, bytes, 28}, "float32 with shape [2, 3]"},
      {{orFloat32, 2, negative, bytes, 24}, "dimension 1 of shape [2, -3] is negative"},
      {{orFloat32, 2, huge, bytes, 24}, "larger than any memory"},
      {{orFloat32, 9, good, bytes, 24}, "0 to 8"},
      {{orFloat32, -1, good, bytes, 24}, "-1"},
      {{orFloat32, 2, NULL, bytes, 24}, "null shape"},
      {{orFloat32, 2, good, NULL, 24}, "null pointer"},
      {{(orDtype)99, 2, good, bytes, 24}, "99"},
      {{orBool, 1, four, bytes, 4}, "element 3 of a bool tensor is 7"},
  };
  orTensor tensor = {.size = sizeof tensor};
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) {
    ASSERT_REFUSED(orDeviceMakeTensor(byName("/openreg:0"), &cases[i].proto, 0, &tensor),
                   orErrorInvalidValue, cases[i].part);
    ASSERT_PTR(tensor.data, NULL);
  }
  const orTensorProto scalar = {orFloat32, 0, NULL, bytes, 4}, bools = {orBool, 1, three, bytes, 3};
  /* What is behind is nobody's. */
  ASSERT_OK(orDeviceMakeTensor(byName("/cpu:0"), &bools, 0, &tensor));
  free(tensor.data);
  ASSERT_REFUSED(orDeviceMakeTensor(byName("/openreg:0"), &scalar, 77, &tensor),
                 orErrorInvalidValue, "attributes 0x4d");
  ASSERT_ERROR(orDeviceMakeTensor(byName("/openreg:0"), NULL, 0, &tensor), orErrorInvalidValue);
  ASSERT_ERROR(orDeviceMakeTensor(byName("/openreg:0"), &cases[0].proto, 0, NULL),
               orErrorInvalidValue);
}

/* ---- A third type: its memory is what its factory says ---- */

/* The host's memory, turned by one bit: only the factory's own copy puts it there. */
static size_t thirdBytes;
static orError_t thirdError;

static orError_t allocThird(void *device, size_t bytes, void **ptr) {
  ASSERT_STR(device, "self");
  if (thirdError) return thirdError;
  thirdBytes += bytes;
  *ptr = malloc(bytes);
  return orSuccess;
}
static orError_t freeThird(void *device, void *ptr, size_t bytes) {
  ASSERT_STR(device, "self");
  thirdBytes -= bytes;
  free(ptr);
  return orSuccess;
}
static orError_t copyThird(void *device, void *dst, const void *src, size_t bytes,
                           orMemcpyKind kind, orEvent_t done) {
  ASSERT_STR(device, "self");
  ASSERT_EQ(kind, orMemcpyHostToDevice);
  ASSERT_EQ(done, 0);
  for (size_t i = 0; i < bytes; ++i) ((char *)dst)[i] = ((const char *)src)[i] ^ 1;
  return thirdError;
}
static orError_t createThird(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config;
  for (int i = 0; i < count; ++i) devices[i].self = (void *)(uintptr_t)"self";
  return orSuccess;
}

static orDevice *thirdDevice(void) {
  static orDeviceFactory third = STUB_FACTORY("third", createThird);
  third.alloc = allocThird;
  third.free = freeThird;
  third.copy = copyThird;
  ASSERT_OK(orRegisterDeviceFactory("npu", 0, &third));
  return byName("/npu:0");
}

static const orAllocator *third_allocator;

static void allocateThirdInChild(void) {
  void *p = NULL;
  const orAllocator *allocator = third_allocator;
  ASSERT_ERROR(allocator->alloc(allocator->self, 8, &p), orErrorForked);
  ASSERT_ERROR(allocator->free(allocator->self, p), orErrorForked);
}

TEST(factory_third_type_allocates) {
  thirdDevice();
  const orAllocator *allocator = third_allocator = allocatorOf("/npu:0", orAllocatorDevice);
  char *p[3], *none = (char *)1;
  newStream(); /* a device is in use: children have none */
  ASSERT_FORK_OK(allocateThirdInChild);
  for (size_t i = 0; i < 3; ++i)
    ASSERT_OK(allocator->alloc(allocator->self, 100 + i, (void **)&p[i]));
  ASSERT_EQ(thirdBytes, 303);
  ASSERT_REFUSED(allocator->free(allocator->self, p[1] + 1), orErrorInvalidValue, "/npu:0");
  ASSERT_OK(allocator->free(allocator->self, p[1]));
  ASSERT_ERROR(allocator->free(allocator->self, p[1]), orErrorInvalidValue);
  ASSERT_OK(allocator->free(allocator->self, p[0]));
  ASSERT_EQ(thirdBytes, 102);
  ASSERT_OK(allocator->free(allocator->self, p[2]));
  ASSERT_OK(allocator->free(allocator->self, NULL));
  ASSERT_OK(allocator->alloc(allocator->self, 0, (void **)&none));
  ASSERT_PTR(none, NULL);
  ASSERT_ERROR(allocator->alloc(allocator->self, 1, NULL), orErrorInvalidValue);
  thirdError = orErrorMemoryAllocation;
  none = (char *)1;
  ASSERT_REFUSED(allocator->alloc(allocator->self, 7, (void **)&none), orErrorMemoryAllocation,
                 "7 bytes of /npu:0");
  ASSERT_PTR(none, NULL);
  ASSERT_EQ(thirdBytes, 0);
}

TEST(factory_third_type_makes_tensors) {
  static const unsigned char values[4] = {1, 2, 3, 4}, turned[4] = {0, 3, 2, 5};
  static const int64_t shape[1] = {4};
  orTensorProto proto = {orUint8, 1, shape, values, 4};
  orTensor tensor = {.size = sizeof tensor};
  orDevice *device = thirdDevice();
  const orAllocator *own = allocatorOf("/npu:0", orAllocatorDevice),
                    *host = allocatorOf("/npu:0", orAllocatorOnHost);
  ASSERT_OK(orDeviceMakeTensor(device, &proto, orAllocatorDevice, &tensor));
  ASSERT_MEM(tensor.data, turned, 4);
  ASSERT_OK(own->free(own->self, tensor.data));
  ASSERT_OK(orDeviceMakeTensor(device, &proto, orAllocatorOnHost, &tensor));
  ASSERT_MEM(tensor.data, values, 4);
  ASSERT_OK(host->free(host->self, tensor.data));
  ASSERT_EQ(thirdBytes, 0);
}

static orError_t allocFine(void *device, size_t bytes, void **ptr) {
  orError_t error = thirdError;
  thirdError = orSuccess;
  orError_t result = allocThird(device, bytes, ptr);
  thirdError = error;
  return result;
}

/* What was allocated for it goes back. */
TEST(factory_third_type_whose_copies_fail) {
  static const unsigned char value = 1;
  static orDeviceFactory third = STUB_FACTORY("third", createThird);
  third.alloc = allocFine;
  third.free = freeThird;
  third.copy = copyThird;
  orTensorProto proto = {orUint8, 0, NULL, &value, 1};
  orTensor tensor = {.size = sizeof tensor};
  ASSERT_OK(orRegisterDeviceFactory("npu", 0, &third));
  thirdError = orErrorSystem;
  ASSERT_REFUSED(orDeviceMakeTensor(byName("/npu:0"), &proto, 0, &tensor), orErrorSystem,
                 "copy of 1 bytes to /npu:0");
  thirdError = orErrorNotReady;
  ASSERT_REFUSED(orDeviceMakeTensor(byName("/npu:0"), &proto, 0, &tensor), orErrorNotSupported,
                 "cannot complete later");
  ASSERT_PTR(tensor.data, NULL);
  ASSERT_EQ(thirdBytes, 0);
}
