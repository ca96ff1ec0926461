/* Settings: each read once, checked, reported. Every case is a child that has not used the library
 * yet. */
#include "harness.h"
#include "openreg_fault.h"
#include "openreg_package.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Case {
  const char *name, *given;
  const char *value; /* in force; null: the setting's default */
} Case;

static Case current;

static orSetting findSetting(const char *name) {
  orSetting setting = {.size = sizeof setting};
  for (int i = 0; !orGetSetting(i, &setting); ++i)
    if (!strcmp(setting.name, name)) return setting;
  FAIL("there is no setting %s", name);
}

static int deviceCount(void) {
  int count = -1;
  ASSERT_OK(orGetDeviceCount(&count));
  return count;
}

static size_t deviceMemory(void) {
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 0));
  return properties.total_memory;
}

static void bodyAccepted(void) {
  clearSettings();
  setenv(current.name, current.given, 1);
  beginCapture();
  orSetting setting = findSetting(current.name);
  ASSERT_STR(endCapture(), "");
  ASSERT_STR(setting.value, current.value);
  ASSERT_STR(setting.origin, "environment");
}

/* One line, which names the variable, the value and what is in force now. */
static void bodyRejected(void) {
  clearSettings();
  orSetting setting = {.size = sizeof setting};
  setenv(current.name, current.given, 1);
  beginCapture();
  for (int i = 0; i < 3; ++i) setting = findSetting(current.name);
  const char *text = endCapture();
  char quoted[128];
  snprintf(quoted, sizeof(quoted), "%s='%.64s'", current.name, current.given);
  ASSERT_EQ(countLines(text), 1);
  if (!strpbrk(current.given, "\n\t") && strlen(current.given) <= 64) ASSERT_CONTAINS(text, quoted);
  ASSERT_CONTAINS(unwrapped(text), setting.value);
  ASSERT_STR(setting.origin, "environment (rejected)");
  if (current.value) ASSERT_STR(setting.value, current.value);
}

static void forEach(const char *name, const Case *cases, int count, void (*body)(void)) {
  for (int i = 0; i < count; ++i) {
    current = cases[i];
    current.name = name;
    int status = forkAndRun(body);
    if (status) FAIL("%s='%s' failed with wait status %#x", name, current.given, (unsigned)status);
  }
}
#define FOR_EACH(name, cases, body) forEach(name, cases, sizeof(cases) / sizeof((cases)[0]), body)

TEST(config_defaults) {
  static const char *const defaults[][2] = {
      {"OPENREG_DEVICE_COUNT", "2"},    {"OPENREG_PLUGIN", ""},
      {"OPENREG_PEER_ACCESS", "1"},     {"OPENREG_POISON", "0"},
      {"OPENREG_LAUNCH_BLOCKING", "0"}, {"OPENREG_TRACE_RECORDS", "1048576"},
      {"OPENREG_WATCHDOG_S", ""},       {"OPENREG_WATCHDOG_SIGNAL", ""},
      {"OPENREG_SCHEDULE_SEED", "off"}, {"OPENREG_SANITIZER", "0"},
  };
  clearSettings();
  beginCapture();
  for (size_t i = 0; i < sizeof(defaults) / sizeof(defaults[0]); ++i) {
    orSetting setting = findSetting(defaults[i][0]);
    ASSERT_STR(setting.value, defaults[i][1]);
    ASSERT_STR(setting.origin, "default");
  }
  ASSERT_CONTAINS(findSetting("OPENREG_DEVICE_MEMORY").value, "half");
  ASSERT_STR(endCapture(), "");
  ASSERT_EQ(deviceCount(), 2);
}

TEST(config_launch_blocking_is_read_apart) {
  clearSettings();
  ASSERT_EQ(deviceCount(), 2);
  setenv("OPENREG_LAUNCH_BLOCKING", "1", 1);
  setenv("OPENREG_POISON", "1", 1);
  ASSERT_STR(findSetting("OPENREG_LAUNCH_BLOCKING").value, "1");
  ASSERT_STR(findSetting("OPENREG_POISON").value, "0");
  setenv("OPENREG_LAUNCH_BLOCKING", "0", 1);
  ASSERT_STR(findSetting("OPENREG_LAUNCH_BLOCKING").value, "1");
}

/* The package's plugin, unless the environment names another, or none. */
TEST(config_package_names_the_devices) {
  orDeviceProperties properties = {.size = sizeof properties};
  clearSettings();
  ASSERT_STR(orDevicesName(), "openreg");
  ASSERT_REFUSED(orNameDevices(NULL, ""), orErrorInvalidValue, "null");
  ASSERT_REFUSED(orNameDevices("", ""), orErrorInvalidValue, "lower-case");
  ASSERT_REFUSED(orNameDevices("Acme", ""), orErrorInvalidValue, "'Acme'");
  ASSERT_REFUSED(orNameDevices("twenty_four_characters__", ""), orErrorInvalidValue, "1 to 23");
  ASSERT_OK(orNameDevices("acme", "/no/such/libacme.so"));
  ASSERT_REFUSED(orNameDevices("beta", ""), orErrorAlreadyInitialized, "'acme'");
  setenv("OPENREG_PLUGIN", "", 1);
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.name, "/acme:1");
  ASSERT_REFUSED(orFaultRemove(orFaultOutOfMemory, 1), orErrorNotFound, "acme:1");
}

TEST(config_package_brings_its_plugin) {
  clearSettings();
  ASSERT_OK(orNameDevices("acme", "/no/such/libacme.so"));
  orSetting setting = findSetting("OPENREG_PLUGIN");
  ASSERT_STR(setting.value, "/no/such/libacme.so");
  ASSERT_STR(setting.origin, "default");
  int count;
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorPluginLoad, "libacme.so");
  ASSERT_REFUSED(orNameDevices("beta", ""), orErrorAlreadyInitialized, "'acme'");
}

TEST(config_package_is_refused_once_settings_were_read) {
  findSetting("OPENREG_PLUGIN");
  ASSERT_REFUSED(orNameDevices("acme", ""), orErrorAlreadyInitialized, "settings");
  ASSERT_STR(orDevicesName(), "openreg");
}

TEST(config_table) {
  orSetting setting = {.size = sizeof setting};
  int count = 0;
  for (; !orGetSetting(count, &setting); ++count) {
    ASSERT_EQ(strncmp(setting.name, "OPENREG_", 8), 0);
    ASSERT_GT(strlen(setting.description), 10);
    ASSERT(!strchr(setting.description, '\n'));
  }
  ASSERT_GE(count, 6);
  ASSERT_REFUSED(orGetSetting(count, &setting), orErrorInvalidValue, "out of range");
  ASSERT_REFUSED(orGetSetting(-1, &setting), orErrorInvalidValue, "-1");
  ASSERT_REFUSED(orGetSetting(0, NULL), orErrorInvalidValue, "null");
}

static void bodyCount(void) {
  bodyAccepted();
  ASSERT_EQ(deviceCount(), atoi(current.given));
  ASSERT_EQ(deviceCount(), atoi(current.given));
}

TEST(config_device_count) {
  static const Case cases[] = {
      {0, "0", "0"}, {0, "1", "1"}, {0, "4", "4"}, {0, "8", "8"}, {0, "64", "64"}};
  FOR_EACH("OPENREG_DEVICE_COUNT", cases, bodyCount);
}

static void bodyNoDevices(void) {
  size_t free_bytes, total_bytes;
  orStream_t stream;
  bodyRejected();
  ASSERT_EQ(deviceCount(), 0);
  ASSERT_ERROR(orSetDevice(0), orErrorNoDevice);
  ASSERT_ERROR(orDeviceSynchronize(), orErrorNoDevice);
  ASSERT_ERROR(orDeviceReset(), orErrorNoDevice);
  ASSERT_ERROR(orMemGetInfo(&free_bytes, &total_bytes), orErrorNoDevice);
  ASSERT_ERROR(orStreamCreate(&stream), orErrorNoDevice);
  void *p = NULL;
  ASSERT_NE(orMalloc(&p, 16), orSuccess);
}

TEST(config_device_count_rejected) {
  static const Case cases[] = {
      {0, "-3", "0"},
      {0, "abc", "0"},
      {0, "100000", "0"},
      {0, "65", "0"},
      {0, "", "0"},
      {0, " 4", "0"},
      {0, "4 ", "0"},
      {0, "0x4", "0"},
      {0, "+1", "0"},
      {0, "1.5", "0"},
      {0, "1\n2", "0"},
      {0, "18446744073709551618", "0"},
      {0, "9999999999999999999999999999999999999999999999999999999999999999999999999999999", "0"},
  };
  FOR_EACH("OPENREG_DEVICE_COUNT", cases, bodyNoDevices);
}

static void bodyCountText(void) {
  clearSettings();
  setenv("OPENREG_DEVICE_COUNT", "abc", 1);
  beginCapture();
  ASSERT_EQ(deviceCount(), 0);
  ASSERT_STR(
      endCapture(),
      "openreg: OPENREG_DEVICE_COUNT='abc' is not a whole number from 0 to 64; using 0 devices\n");
}

TEST(config_device_count_text) { ASSERT_FORK_OK(bodyCountText); }

static void bodyReadOnce(void) {
  clearSettings();
  char *value = strdup("OPENREG_DEVICE_COUNT=3");
  putenv(value);
  ASSERT_STR(findSetting("OPENREG_DEVICE_COUNT").value, "3");
  value[strlen(value) - 1] = '5';
  setenv("OPENREG_POISON", "1", 1);
  ASSERT_STR(findSetting("OPENREG_DEVICE_COUNT").value, "3");
  ASSERT_STR(findSetting("OPENREG_POISON").value, "0");
  ASSERT_EQ(deviceCount(), 3);
}

TEST(config_is_read_once) { ASSERT_FORK_OK(bodyReadOnce); }

static void readOnThread(int thread, void *context) {
  (void)thread, (void)context;
  ASSERT_STR(findSetting("OPENREG_DEVICE_COUNT").value, "0");
}

TEST(config_is_read_by_many_threads) {
  clearSettings();
  setenv("OPENREG_DEVICE_COUNT", "abc", 1);
  beginCapture();
  runThreads(8, readOnThread, NULL);
  ASSERT_EQ(countLines(endCapture()), 1);
}

static size_t expectedMemory;

static void bodyMemory(void) {
  bodyAccepted();
  ASSERT_EQ(deviceMemory(), expectedMemory);
}

TEST(config_device_memory) {
  static const struct {
    const char *given;
    size_t bytes;
  } sizes[] = {{"64M", 64ul << 20}, {"2G", 2ul << 30}, {"1T", 1ul << 40}, {"512K", 512ul << 10},
               {"3g", 3ul << 30},   {"65536", 65536},  {"64K", 65536},    {"1024T", 1ul << 50}};
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    Case c = {0, sizes[i].given, sizes[i].given};
    expectedMemory = sizes[i].bytes;
    forEach("OPENREG_DEVICE_MEMORY", &c, 1, bodyMemory);
  }
}

/* The machine's memory bounds the default from above whatever a group's limit says. */
static void bodyMemoryDefault(void) {
  bodyRejected();
  size_t host = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  ASSERT_GT(deviceMemory(), 0);
  ASSERT_LE(deviceMemory(), host / 2 / 2);
}

TEST(config_device_memory_is_at_least_a_page) {
  char page[32], less[32];
  snprintf(page, sizeof page, "%zu", expectedMemory = pageSize());
  snprintf(less, sizeof less, "%zu", pageSize() - 1);
  Case good = {0, page, page}, bad = {0, less, NULL};
  forEach("OPENREG_DEVICE_MEMORY", &good, 1, bodyMemory);
  forEach("OPENREG_DEVICE_MEMORY", &bad, 1, bodyMemoryDefault);
}

TEST(config_device_memory_rejected) {
  static const Case cases[] = {
      {0, "12Q", NULL}, {0, "M", NULL},    {0, "-1", NULL},    {0, "4095", NULL},
      {0, "0", NULL},   {0, "1.5G", NULL}, {0, "64MB", NULL},  {0, "64 M", NULL},
      {0, "", NULL},    {0, "3K", NULL},   {0, "1025T", NULL}, {0, "18446744073709551616", NULL},
  };
  FOR_EACH("OPENREG_DEVICE_MEMORY", cases, bodyMemoryDefault);
}

static const char *const switches[][2] = {{"OPENREG_PEER_ACCESS", "1"},
                                          {"OPENREG_POISON", "0"},
                                          {"OPENREG_LAUNCH_BLOCKING", "0"},
                                          {"OPENREG_SANITIZER", "0"}};

TEST(config_switches) {
  static const Case good[] = {{0, "0", "0"}, {0, "1", "1"}};
  for (int i = 0; i < 4; ++i) FOR_EACH(switches[i][0], good, bodyAccepted);
}

TEST(config_switches_rejected) {
  static const char *const bad[] = {"2", "yes", "", "-1", "01", "true", " 1"};
  for (int i = 0; i < 4; ++i)
    for (size_t j = 0; j < sizeof(bad) / sizeof(bad[0]); ++j) {
      Case c = {0, bad[j], switches[i][1]};
      forEach(switches[i][0], &c, 1, bodyRejected);
    }
}

static void bodyPeer(void) {
  bodyAccepted();
  int can = -1;
  ASSERT_OK(orDeviceCanAccessPeer(&can, 0, 1));
  ASSERT_EQ(can, atoi(current.given));
}

TEST(config_peer_access) {
  static const Case cases[] = {{0, "0", "0"}, {0, "1", "1"}};
  FOR_EACH("OPENREG_PEER_ACCESS", cases, bodyPeer);
}

TEST(config_schedule_seed) {
  static const Case good[] = {{0, "0", "0"},
                              {0, "18446744073709551615", "18446744073709551615"},
                              {0, "late", "late"},
                              {0, "early", "early"},
                              {0, "off", "off"}};
  static const Case bad[] = {{0, "18446744073709551616", "off"},
                             {0, "-1", "off"},
                             {0, "1x", "off"},
                             {0, "Late", "off"},
                             {0, "", "off"},
                             {0, "seed", "off"}};
  FOR_EACH("OPENREG_SCHEDULE_SEED", good, bodyAccepted);
  FOR_EACH("OPENREG_SCHEDULE_SEED", bad, bodyRejected);
}

TEST(config_trace_records) {
  static const Case good[] = {{0, "1", "1"}, {0, "1000000000", "1000000000"}};
  static const Case bad[] = {{0, "0", "1048576"},
                             {0, "1000000001", "1048576"},
                             {0, "-1", "1048576"},
                             {0, "1M", "1048576"},
                             {0, "", "1048576"}};
  FOR_EACH("OPENREG_TRACE_RECORDS", good, bodyAccepted);
  FOR_EACH("OPENREG_TRACE_RECORDS", bad, bodyRejected);
}

TEST(config_watchdog) {
  static const Case good[] = {{0, "30", "30"},
                              {0, "0.5", "0.5"},
                              {0, "0.000000001", "0.000000001"},
                              {0, "1000000000", "1000000000"}};
  static const Case bad[] = {{0, "0", ""},  {0, "0.0", ""}, {0, "-1", ""},
                             {0, "5s", ""}, {0, "1e3", ""}, {0, "1000000001", ""},
                             {0, "", ""},   {0, "inf", ""}, {0, "1.2.3", ""},
                             {0, " 1", ""}, {0, "nan", ""}, {0, "x", ""}};
  FOR_EACH("OPENREG_WATCHDOG_S", good, bodyAccepted);
  FOR_EACH("OPENREG_WATCHDOG_S", bad, bodyRejected);
}

TEST(config_watchdog_signal) {
  static const Case good[] = {{0, "USR1", "USR1"},
                              {0, "SIGUSR2", "SIGUSR2"},
                              {0, "QUIT", "QUIT"},
                              {0, "HUP", "HUP"},
                              {0, "WINCH", "WINCH"}};
  static const Case bad[] = {{0, "KILL", ""}, {0, "SEGV", ""}, {0, "usr1", ""}, {0, "10", ""},
                             {0, "SIG", ""},  {0, "", ""},     {0, "USR", ""},  {0, "USR1 ", ""}};
  FOR_EACH("OPENREG_WATCHDOG_SIGNAL", good, bodyAccepted);
  FOR_EACH("OPENREG_WATCHDOG_SIGNAL", bad, bodyRejected);
}

static void bodyAllRoom(void) {
  enum { ROOM = 1 << 17 }; /* with the zero at the end */
  static char tape[ROOM];
  for (int i = 0; i < ROOM - 1; i++) tape[i] = i % 2 ? ',' : '1';
  clearSettings();
  setenv("OPENREG_SCHEDULE_TAPE", tape, 1);
  ASSERT_STR(findSetting("OPENREG_SCHEDULE_TAPE").value, tape);
}

TEST(config_value_takes_all_the_room) { ASSERT_FORK_OK(bodyAllRoom); }

TEST(config_schedule_tape) {
  static const Case good[] = {{0, "1,12:2", "1,12:2"}, {0, "1048575:1", "1048575:1"}};
  static const Case bad[] = {{0, "1048576:1", ""},
                             {0, "600000:1,600000:1", ""},
                             {0, "1,", ""},
                             {0, "1:x", ""},
                             {0, "1:1048577", ""}};
  FOR_EACH("OPENREG_SCHEDULE_TAPE", good, bodyAccepted);
  FOR_EACH("OPENREG_SCHEDULE_TAPE", bad, bodyRejected);
}

/* Values are copied without an allocation, which could fail; one that does not fit is refused. */
TEST(config_value_without_end) {
  enum { LONG = 1 << 17 };
  char *tape = malloc(LONG + 1);
  for (int i = 0; i < LONG; i++) tape[i] = i % 2 ? ',' : '1';
  tape[LONG] = 0;
  tape[LONG - 1] = '1';
  clearSettings();
  setenv("OPENREG_SCHEDULE_TAPE", tape, 1);
  beginCapture();
  orSetting setting = findSetting("OPENREG_SCHEDULE_TAPE");
  ASSERT_CONTAINS(endCapture(), "OPENREG_SCHEDULE_TAPE has 131072 characters; all settings");
  ASSERT_STR(setting.value, "");
  ASSERT_STR(setting.origin, "environment (rejected)");
  free(tape);
}
