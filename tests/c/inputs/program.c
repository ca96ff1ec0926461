/*
 * What enters the core as text or bytes: settings, tapes, structures of other sizes, tables of
 * device factories.
 *
 * An input's first byte names what reads it, as in `readers`; the rest is the input. libFuzzer
 * makes inputs (`make fuzz`); without it, this program takes a folder of them, and a C test gives
 * it the kept ones, `corpus`.
 *
 * Each text and structure is malloc'd with its own size, so AddressSanitizer reports a read behind
 * its end. A structure's pointers point to something or are null, as a wild one is the caller's
 * fault.
 */
#include "base/config.c"

#include <stdint.h>

#include "openreg_fault.h"
#include "openreg_operator.h"
#include "openreg_sanitizer.h"
#include "tools/choices.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct Input {
  const uint8_t *at;
  size_t left;
} Input;

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      abort();                                                                 \
    }                                                                          \
  } while (0)

static unsigned takeByte(Input *in) { return in->left ? (in->left--, *in->at++) : 0; }

/* What is left, to be freed. */
static char *takeText(Input *in) {
  char *text = malloc(in->left + 1);
  CHECK(text);
  memcpy(text, in->at, in->left);
  text[in->left] = 0;
  in->left = 0;
  return text;
}

/* ---- settings ---- */

static bool isAllowed(const orConfig *c, size_t field) {
  switch (field) {
    case offsetof(orConfig, device_count):
      return c->device_count >= 0 && c->device_count <= OPENREG_MAX_DEVICES;
    case offsetof(orConfig, device_memory):
      return c->device_memory >= 4096 && c->device_memory <= SIZE_MAX / 2;
    case offsetof(orConfig, trace_records):
      return c->trace_records >= 1 && c->trace_records <= 1000000000;
    case offsetof(orConfig, watchdog_ns):
      return c->watchdog_ns >= 1 && c->watchdog_ns <= UINT64_C(1000000001) * 1000000000;
    case offsetof(orConfig, watchdog_signal):
      return c->watchdog_signal > 0 && c->watchdog_signal < 65;
    case offsetof(orConfig, schedule):
      return c->schedule.policy >= orScheduleFair && c->schedule.policy <= orScheduleEarly;
    default:
      return true;
  }
}

/* A schedule can read each tape that is taken as a setting. */
static void checkTapeSetting(const char *text) {
  orTape tape = {0};
  CHECK(!*text || orTapeParse(&tape, text));
  free(tape.choices);
}

static void readSettingText(Input *in) {
  const orSettingRow *row = &rows[takeByte(in) % OR_SETTINGS];
  char *text = takeText(in);
  orConfig before, c;
  memset(&before, 0, sizeof before);
  c = before;
  if (!row->parse(text, (char *)&c + row->field))
    CHECK(!memcmp(&c, &before, sizeof c));
  else
    CHECK(isAllowed(&c, row->field));
  if (c.schedule.tape) checkTapeSetting(text);
  free(text);
}

/* A line of /proc/self/cgroup. */
static void readGroupLine(Input *in) {
  char *text = takeText(in);
  size_t limit = SIZE_MAX;
  if (!strstr(text, "..")) CHECK(!applyLine(text, &limit) && limit > 0);
  free(text);
}

/* ---- tapes ---- */

static size_t usedChoices(const orTape *t) {
  size_t count = t->count;
  while (count && !t->choices[count - 1]) count--;
  return count;
}

/* The text of a tape is read as the same tape, but for first options at its end. */
static void readTape(Input *in) {
  char *text = takeText(in);
  orTape tape = {0}, again = {0};
  if (orTapeParse(&tape, text)) {
    char *written = orTapeText(&tape);
    size_t used = usedChoices(&tape);
    CHECK(written && orTapeParse(&again, written));
    CHECK(usedChoices(&again) == used &&
          !memcmp(tape.choices, again.choices, used * sizeof *tape.choices));
    free(written);
  } else {
    CHECK(!tape.count);
  }
  free(tape.choices);
  free(again.choices);
  free(text);
}

/* ---- structures ---- */

static orError_t doNothing(void *args) { return args ? orSuccess : orErrorInvalidValue; }
static void dropNothing(void *args) { (void)args; }
static void *noStack(void *context) { return context; }
static void releaseNothing(void *stack, void *context) { (void)stack, (void)context; }
static uint64_t noThread(void) { return 0; }

static char arguments[OR_MAX_ARGS];
static int queued;
static const orAccess accesses[4];

/* A structure of as many bytes as are left, with that size in its first member. */
static void *takeStructure(Input *in, size_t *has) {
  *has = in->left;
  char *structure = malloc(*has < sizeof(size_t) ? sizeof(size_t) : *has);
  CHECK(structure);
  memset(structure, 0, sizeof(size_t));
  memcpy(structure, in->at, in->left);
  memcpy(structure, has, sizeof *has);
  in->left = 0;
  return structure;
}

/* Sets a pointer in a structure to this value or to null. One that the end cuts through is null. */
static void setPointer(void *structure, size_t has, size_t field, bool null, const void *value) {
  size_t room = has > field ? has - field : 0;
  if (null || room < sizeof value) value = NULL;
  memcpy((char *)structure + field, &value, room < sizeof value ? room : sizeof value);
}

#define POINTER(type, field, bit, value)                             \
  setPointer(structure, has, offsetof(type, field), mask >> bit & 1, \
             (const void *)(uintptr_t)(value))

static void giveLaunch(Input *in) {
  size_t has, count;
  unsigned mask = takeByte(in);
  void *structure = takeStructure(in, &has);
  POINTER(orLaunch, fn, 0, doNothing);
  POINTER(orLaunch, args, 1, arguments);
  POINTER(orLaunch, drop, 2, dropNothing);
  POINTER(orLaunch, accesses, 3, accesses);
  POINTER(orLaunch, name, 4, "input");
  POINTER(orLaunch, queued, 5, &queued);
  if (offsetof(orLaunch, access_count) + sizeof count <= has) {
    memcpy(&count, (char *)structure + offsetof(orLaunch, access_count), sizeof count);
    count %= 5;
    memcpy((char *)structure + offsetof(orLaunch, access_count), &count, sizeof count);
  }
  orLaunchKernelEx(structure);
  free(structure);
}

static void giveCacheOptions(Input *in) {
  size_t has;
  void *structure = takeStructure(in, &has);
  orCacheSetOptions(structure);
  free(structure);
}

static void giveFault(Input *in) {
  size_t has;
  orFault *structure = takeStructure(in, &has);
  if (!orFaultInject(structure)) CHECK(!orFaultRemove(structure->kind, structure->device));
  free(structure);
}

static void giveSanitizerOptions(Input *in) {
  size_t has;
  unsigned mask = takeByte(in);
  void *structure = takeStructure(in, &has);
  POINTER(orSanitizerOptions, capture, 0, noStack);
  POINTER(orSanitizerOptions, release, 1, releaseNothing);
  POINTER(orSanitizerOptions, touched, 2, dropNothing);
  POINTER(orSanitizerOptions, thread, 3, noThread);
  POINTER(orSanitizerOptions, pinned, 4, dropNothing);
  if (!orSanitizerEnable(structure)) CHECK(!orSanitizerDisable());
  free(structure);
}

/* Structures that the library fills: as far as they go. */
static void fillStructure(Input *in) {
  size_t has;
  unsigned which = takeByte(in);
  void *structure = takeStructure(in, &has);
  if (which % 3 == 0)
    orGetSetting((int)which % 16, structure);
  else if (which % 3 == 1)
    orGetFactoryInfo((int)which % 4, structure);
  else
    orGetWorkerInfo(structure);
  free(structure);
}

/* ---- tables of device factories ---- */

static orError_t failToCreate(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  (void)config, (void)devices;
  CHECK(count >= 0 && count <= OPENREG_MAX_DEVICES);
  return orErrorNotSupported;
}
static orError_t allocNothing(void *device, size_t bytes, void **ptr) {
  (void)device, (void)bytes, (void)ptr;
  return orErrorMemoryAllocation;
}

static orError_t runNothing(void *device, const orOperatorCall *call, orEvent_t done) {
  (void)device, (void)call, (void)done;
  return orErrorNotSupported;
}

static orDeviceFactory *takeTableBytes(Input *in) {
  static const orOperatorKernel kernels[] = {{.name = "aten::add.Tensor", .run = runNothing},
                                             {.name = "aten::mul.Tensor"},
                                             {.run = runNothing}};
  uint32_t version = OPENREG_ABI_VERSION;
  size_t has;
  unsigned mask = takeByte(in) | takeByte(in) << 8;
  void *structure = takeStructure(in, &has);
  uint32_t size = (uint32_t)has;
  memcpy(structure, &size, sizeof size);
  if (has >= 8 && !(mask >> 15 & 1)) memcpy((char *)structure + 4, &version, sizeof version);
  POINTER(orDeviceFactory, name, 0, mask >> 14 & 1 ? "" : "a table");
  POINTER(orDeviceFactory, create_devices, 1, failToCreate);
  POINTER(orDeviceFactory, alloc, 2, allocNothing);
  POINTER(orDeviceFactory, free, 3, allocNothing);
  POINTER(orDeviceFactory, copy, 4, allocNothing);
  POINTER(orDeviceFactory, set, 5, allocNothing);
  POINTER(orDeviceFactory, compute, 6, allocNothing);
  POINTER(orDeviceFactory, map, 7, allocNothing);
  POINTER(orDeviceFactory, alloc_host, 8, allocNothing);
  POINTER(orDeviceFactory, free_host, 9, allocNothing);
  POINTER(orDeviceFactory, operators, 10, kernels);
  setPointer(structure, has, offsetof(orDeviceFactory, operator_count), 0,
             (const void *)(uintptr_t)(mask >> 11 & 3));
  return structure;
}

static int countFactories(void) {
  orFactoryInfo info = {.size = sizeof info};
  int count = 0;
  while (!orGetFactoryInfo(count, &info)) {
    CHECK(memchr(info.type, 0, sizeof info.type) && memchr(info.name, 0, sizeof info.name));
    count++;
  }
  return count;
}

static void registerTable(Input *in) {
  char type[40] = "";
  unsigned length = takeByte(in) % sizeof type;
  int priority = (int)takeByte(in) - 100, before = countFactories();
  for (unsigned i = 0; i < length; i++) type[i] = (char)takeByte(in);
  type[sizeof type - 1] = 0;
  orDeviceFactory *table = takeTableBytes(in);
  if (!orRegisterDeviceFactory(type, priority, table)) {
    CHECK(countFactories() == before + 1);
    CHECK(!orUnregisterDeviceFactory(type, table));
  }
  CHECK(countFactories() == before);
  free(table);
}

/* Asks for devices as a program does. The host's factory fails, so none is ever made. */
static void addDevices(Input *in) {
  static const orDeviceFactory failing = {
      .size = sizeof failing,
      .abi_version = OPENREG_ABI_VERSION,
      .name = "failing",
      .create_devices = failToCreate,
      .compute = (orError_t (*)(void *, const orKernel *, orEvent_t))(void *)allocNothing};
  char types[8][33];
  orDeviceCount counts[8];
  unsigned count = takeByte(in) % 9;
  for (unsigned i = 0; i < count; i++) {
    unsigned length = takeByte(in) % sizeof types[i];
    memset(types[i], 0, sizeof types[i]);
    counts[i] = (orDeviceCount){types[i], (int)(int8_t)takeByte(in)};
    for (unsigned k = 0; k < length; k++) types[i][k] = (char)takeByte(in);
    types[i][32] = 0;
  }
  orDeviceConfig config = {.size = sizeof config, .device_count = counts, .type_count = count};
  char *prefix = takeText(in);
  CHECK(!orRegisterDeviceFactory("CPU", 1000, &failing));
  CHECK(orAddDevices(&config, prefix));
  CHECK(!orUnregisterDeviceFactory("CPU", &failing));
  free(prefix);
}

/* ---- the inputs ---- */

static const struct {
  char name;
  void (*read)(Input *in);
} readers[] = {{'s', readSettingText},  {'g', readGroupLine},        {'t', readTape},
               {'c', giveCacheOptions}, {'z', giveSanitizerOptions}, {'r', registerTable},
               {'a', addDevices},       {'o', fillStructure},        {'f', giveFault},
               {'l', giveLaunch}};
/* The last two make the devices, after which nothing can be registered. */
enum { READERS = sizeof readers / sizeof *readers, WITHOUT_DEVICES = READERS - 2 };

static bool mayMakeDevices(void) { return getenv("OPENREG_INPUTS_WITH_DEVICES"); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Input in = {data, size};
  char name = (char)takeByte(&in);
  bool devices = mayMakeDevices();
  for (int i = devices ? WITHOUT_DEVICES : 0; i < (devices ? READERS : WITHOUT_DEVICES); i++)
    if (readers[i].name == name) readers[i].read(&in);
  return 0;
}

#ifndef OR_LIBFUZZER
#include <dirent.h>

static void readFile(const char *folder, const char *name) {
  static uint8_t data[1 << 12];
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "r");
  CHECK(file);
  size_t size = fread(data, 1, sizeof data, file);
  fclose(file);
  fprintf(stderr, "%s\n", name); /* the last one is the one that failed */
  LLVMFuzzerTestOneInput(data, size);
}

int main(int count, char **folders) {
  CHECK(count == 2);
  DIR *folder = opendir(folders[1]);
  CHECK(folder);
  for (struct dirent *entry; (entry = readdir(folder));)
    if (entry->d_name[0] != '.') readFile(folders[1], entry->d_name);
  closedir(folder);
  return 0;
}
#endif
