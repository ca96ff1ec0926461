/*
 * Settings: every OPENREG_* environment variable, in one table.
 *
 * config, settings and texts are written once, under config_lock, and only read afterwards. Nothing
 * there can fail: a value that cannot be kept is refused as a bad one. To add a setting, add a
 * field to orConfig and a row to the table.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "openreg_package.h"
#include "openreg_schedule.h"

enum { OR_MOST_CORES = 1 << 20 }; /* far more than any kernel can be built for */

/* ---- Parsers: false leaves the field alone. ---- */

/* Accepts digits alone: no sign, no space, no suffix. `end` is the first other character. */
static bool parseNumber(const char *text, unsigned long long *number, const char **end) {
  unsigned long long value = 0;
  const char *at = text;
  for (; *at >= '0' && *at <= '9'; at++) {
    if (__builtin_mul_overflow(value, 10ull, &value)) return false;
    if (__builtin_add_overflow(value, (unsigned long long)(*at - '0'), &value)) return false;
  }
  *number = value;
  *end = at;
  return at != text;
}

static bool parseDeviceCount(const char *text, void *field) {
  unsigned long long number;
  const char *end;
  if (!parseNumber(text, &number, &end) || *end || number > OPENREG_MAX_DEVICES) return false;
  *(int *)field = (int)number;
  return true;
}

static bool parseMemory(const char *text, void *field) {
  static const char units[] = "KMGT";
  unsigned long long number;
  const char *end;
  if (!parseNumber(text, &number, &end)) return false;
  if (*end) {
    const char *unit = strchr(units, toupper((unsigned char)*end));
    if (!unit || end[1]) return false;
    unsigned long long scale = 1ull << (10 * (unit - units + 1));
    if (__builtin_mul_overflow(number, scale, &number)) return false;
  }
  if (number < orPageSize() || number > OR_MOST_MEMORY) return false;
  *(size_t *)field = (size_t)number;
  return true;
}

static bool parsePath(const char *text, void *field) {
  *(const char **)field = *text ? text : NULL;
  return true;
}

static bool parseSwitch(const char *text, void *field) {
  if ((text[0] != '0' && text[0] != '1') || text[1]) return false;
  *(bool *)field = text[0] == '1';
  return true;
}

/* "warn" and "1" differ only for callers that enable the sanitizer with options of their own. */
static bool parseSanitizer(const char *text, void *field) {
  if (!strcmp(text, "warn")) return *(bool *)field = true;
  return parseSwitch(text, field);
}

static bool parseRecords(const char *text, void *field) {
  unsigned long long number;
  const char *end;
  if (!parseNumber(text, &number, &end) || *end || !number || number > 1000000000) return false;
  *(size_t *)field = (size_t)number;
  return true;
}

static bool parseSeconds(const char *text, void *field) {
  unsigned long long number;
  const char *end;
  if (!parseNumber(text, &number, &end) || number > 1000000000) return false;
  uint64_t ns = number * 1000000000;
  if (*end == '.') {
    uint64_t unit = 100000000;
    for (++end; *end >= '0' && *end <= '9'; ++end, unit /= 10) ns += unit * (uint64_t)(*end - '0');
  }
  if (*end || !ns) return false;
  *(uint64_t *)field = ns;
  return true;
}

static bool parseSignal(const char *text, void *field) {
  static const struct {
    const char *name;
    int number;
  } known[] = {{"HUP", SIGHUP},
               {"QUIT", SIGQUIT},
               {"USR1", SIGUSR1},
               {"USR2", SIGUSR2},
               {"WINCH", SIGWINCH}};
  if (!strncmp(text, "SIG", 3)) text += 3;
  for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
    if (!strcmp(text, known[i].name)) {
      *(int *)field = known[i].number;
      return true;
    }
  return false;
}

static bool parseSchedule(const char *text, void *field) {
  static const char *const names[] = {
      [orScheduleFair] = "off", [orScheduleLate] = "late", [orScheduleEarly] = "early"};
  OR_COVERS(names, orScheduleEarly + 1);
  orConfig *c = (orConfig *)((char *)field - offsetof(orConfig, schedule));
  unsigned long long seed = 0;
  const char *end;
  int policy = orScheduleSeeded;
  if (!parseNumber(text, &seed, &end) || *end) {
    seed = 0;
    for (policy = orScheduleEarly; policy >= 0; policy--)
      if (names[policy] && !strcmp(text, names[policy])) break;
    if (policy < 0) return false;
  }
  c->schedule.seed = seed;
  c->schedule.policy = policy;
  return true;
}

bool orTapeRead(const char *text, bool (*add)(void *context, uint64_t firsts, uint64_t choice),
                void *context) {
  unsigned long long firsts, choice;
  for (;; text++) {
    firsts = 0;
    if (!parseNumber(text, &choice, &text)) return false;
    if (*text == ':') {
      firsts = choice;
      if (!parseNumber(text + 1, &choice, &text)) return false;
    }
    if (firsts > OR_MOST_CHOICES || choice > OR_MOST_CHOICES) return false;
    if (!add(context, firsts, choice)) return false;
    if (*text != ',') return !*text;
  }
}

static bool countChoices(void *count, uint64_t firsts, uint64_t choice) {
  (void)choice;
  *(uint64_t *)count += firsts + 1;
  return *(uint64_t *)count <= OR_MOST_CHOICES;
}

static bool parseTape(const char *text, void *field) {
  uint64_t count = 0;
  return (!*text || orTapeRead(text, countChoices, &count)) && parsePath(text, field);
}

/* ---- The table ---- */

typedef struct orSettingRow {
  const char *name;
  const char *fallback; /* what is in force when the variable is not set */
  const char *rejected; /* ... and when its value is refused */
  const char *noun;     /* ... of which there are then so many */
  bool (*parse)(const char *text, void *field);
  size_t field; /* offset in orConfig */
  const char *allowed;
  const char *description;
} orSettingRow;

#define STRINGIFY(x) #x
#define TEXT(x) STRINGIFY(x)
#define DEFAULT_MEMORY "half of the host's memory, shared by the devices"

static const orSettingRow rows[] = {
    {"OPENREG_DEVICE_COUNT", "2", "0", " devices", parseDeviceCount,
     offsetof(orConfig, device_count), "a whole number from 0 to " TEXT(OPENREG_MAX_DEVICES),
     "how many devices there are: 0 to " TEXT(
         OPENREG_MAX_DEVICES) "; a plugin may count them if this is not set"},
    {"OPENREG_DEVICE_MEMORY", DEFAULT_MEMORY, DEFAULT_MEMORY, "", parseMemory,
     offsetof(orConfig, device_memory),
     "a size from a page of memory (mostly 4096 bytes) to 1024T, such as 67108864, 64M or 2G",
     "capacity of each simulated device: bytes, or a number followed by K, M, G or T"},
    {"OPENREG_PLUGIN", "", "", "", parsePath, offsetof(orConfig, plugin), "a path",
     "path of a shared library whose device factory replaces the simulated device"},
    {"OPENREG_PEER_ACCESS", "1", "1", "", parseSwitch, offsetof(orConfig, peer_access), "0 or 1",
     "1: devices reach each other's memory directly; 0: copies between them are staged"},
    {"OPENREG_POISON", "0", "0", "", parseSwitch, offsetof(orConfig, poison), "0 or 1",
     "1: fresh and freed device memory is filled with NaN patterns; 0: it is not"},
    {"OPENREG_LAUNCH_BLOCKING", "0", "0", "", parseSwitch, offsetof(orConfig, launch_blocking),
     "0 or 1",
     "1: every launch synchronises and raises its own errors; 0: launches are asynchronous"},
    {"OPENREG_TRACE_RECORDS", "1048576", "1048576", "", parseRecords,
     offsetof(orConfig, trace_records), "a whole number from 1 to 1000000000",
     "most records in a trace, of about 100 bytes each: 1 to 1000000000"},
    {"OPENREG_WATCHDOG_S", "", "", "no watchdog", parseSeconds, offsetof(orConfig, watchdog_ns),
     "a number of seconds above 0, at most 1000000000",
     "seconds without progress after which the hang report is printed on stderr, such as 30 or "
     "0.5"},
    {"OPENREG_WATCHDOG_SIGNAL", "", "", "no signal", parseSignal,
     offsetof(orConfig, watchdog_signal), "HUP, QUIT, USR1, USR2 or WINCH",
     "signal at which the hang report is printed on stderr: HUP, QUIT, USR1, USR2 or WINCH"},
    {"OPENREG_SCHEDULE_SEED", "off", "off", "", parseSchedule, offsetof(orConfig, schedule),
     "a whole number below 2^64, late, early or off",
     "a number, late or early: tasks run one at a time, in an order that this decides; off: "
     "side by side"},
    {"OPENREG_SCHEDULE_TAPE", "", "", "no tape", parseTape, offsetof(orConfig, schedule.tape),
     "numbers separated by commas; 12:2 stands for 12 zeros and a 2, as in 1,12:2",
     "choices of a schedule, as torch.openreg.testing.explore prints them: tasks run one at a "
     "time, "
     "in the order of these"},
    {"OPENREG_SANITIZER", "0", "0", "", parseSanitizer, offsetof(orConfig, sanitizer),
     "0, 1 or warn",
     "1: accesses to the same memory that nothing orders are errors; warn: warnings; 0: neither"},
    {"OPENREG_INITCHECK", "0", "0", "", parseSwitch, offsetof(orConfig, initcheck), "0 or 1",
     "1: with OPENREG_SANITIZER, reads of device memory that nothing has written are reported too"},
};

enum { OR_SETTINGS = sizeof(rows) / sizeof(rows[0]) };

static orMutex config_lock = OR_MUTEX_INITIALIZER(OR_RANK_LEAF);
static atomic_bool was_read, launches_read;
static orConfig config;
static orSetting settings[OR_SETTINGS];
static char texts[1 << 17]; /* copies of the values, as the environment may change later */
static size_t texts_size;
static char package_name[24], package_plugin[PATH_MAX];

/* ---- The name of a package ---- */

static bool isName(const char *text) {
  size_t length = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_");
  return length && length < sizeof(package_name) && !text[length];
}

static orError_t checkPackage(const char *name, const char *plugin) {
  if (!name || !plugin) return orFail(orErrorInvalidValue, "orNameDevices: an argument is null");
  if (!isName(name))
    return orFail(orErrorInvalidValue,
                  "orNameDevices: the name '%.64s' must be 1 to %zu lower-case letters, digits and "
                  "underscores",
                  name, sizeof(package_name) - 1);
  if (strlen(plugin) < sizeof(package_plugin)) return orSuccess;
  return orFail(orErrorInvalidValue, "orNameDevices: the plugin's path has %zu characters",
                strlen(plugin));
}

orError_t orNameDevices(const char *name, const char *plugin) {
  OR_TRY(checkPackage(name, plugin));
  orMutexLock(&config_lock);
  bool late = was_read, again = *package_name;
  if (!late && !again) {
    strcpy(package_name, name);
    strcpy(package_plugin, plugin);
    orSetDevicesName(package_name);
  }
  orMutexUnlock(&config_lock);
  if (again)
    return orFail(orErrorAlreadyInitialized, "orNameDevices: the devices' name is '%s' already",
                  package_name);
  if (late)
    return orFail(orErrorAlreadyInitialized, "orNameDevices: the settings were read before");
  return orSuccess;
}

/* ---- Reading ---- */

/* Null if there is no room. */
static const char *keepText(const char *text) {
  size_t size = strlen(text) + 1;
  if (size > sizeof(texts) - texts_size) return NULL;
  texts_size += size;
  return memcpy(texts + texts_size - size, text, size);
}

static void warnRejected(const orSettingRow *row, const char *given, const char *text) {
  if (text)
    orWarn("%s='%.64s%s' is not %s; using %s%s", row->name, text, strlen(text) > 64 ? "..." : "",
           row->allowed, row->rejected, row->noun);
  else
    orWarn("%s has %zu characters; all settings together may have %zu; using %s%s", row->name,
           strlen(given), sizeof(texts), row->rejected, row->noun);
}

static const char *fallbackOf(const orSettingRow *row) {
  bool plugin = row->field == offsetof(orConfig, plugin);
  return plugin && *package_plugin ? package_plugin : row->fallback;
}

static void readSetting(const orSettingRow *row, orSetting *setting) {
  const char *given = getenv(row->name), *text = given ? keepText(given) : NULL;
  void *field = (char *)&config + row->field;
  setting->name = row->name;
  setting->description = row->description;
  setting->value = fallbackOf(row);
  setting->origin = "default";
  if (row->field == offsetof(orConfig, device_count)) config.device_count_is_set = given != NULL;
  if (text && row->parse(text, field)) {
    setting->value = text;
    setting->origin = "environment";
    return;
  }
  if (given) {
    setting->value = row->rejected;
    setting->origin = "environment (rejected)";
    warnRejected(row, given, text);
  }
  /* The memory's default is words, which do not parse: its field stays 0. */
  row->parse(setting->value, field);
}

__attribute__((constructor)) static void keepLock(void) { orForkKeep(&config_lock); }

/* Reads the setting of launches, or all others, once. */
static __attribute__((cold)) void readSettings(bool of_launches, atomic_bool *done) {
  orMutexLock(&config_lock);
  for (int i = 0; i < OR_SETTINGS && !*done; i++)
    if ((rows[i].field == offsetof(orConfig, launch_blocking)) == of_launches)
      readSetting(&rows[i], &settings[i]);
  atomic_store_explicit(done, true, memory_order_release);
  orMutexUnlock(&config_lock);
}

const orConfig *orConfigGet(void) {
  if (OR_UNLIKELY(!atomic_load_explicit(&was_read, memory_order_acquire)))
    readSettings(false, &was_read);
  return &config;
}

/* Read apart from the other settings: programs count devices before they set this one. */
bool orLaunchesBlock(void) {
  if (OR_UNLIKELY(!atomic_load_explicit(&launches_read, memory_order_acquire)))
    readSettings(true, &launches_read);
  return config.launch_blocking;
}

orError_t orGetSetting(int index, orSetting *setting) {
  if (!setting) return orFail(orErrorInvalidValue, "orGetSetting: setting is null");
  if (index < 0 || index >= OR_SETTINGS)
    return orFail(orErrorInvalidValue, "setting index %d is out of range: 0 to %d", index,
                  OR_SETTINGS - 1);
  orConfigGet();
  orLaunchesBlock();
  return OR_FILL(orSetting, setting, &settings[index], description);
}

/* ---- The host's memory ---- */

/* Reads a small file; false if there is none, or none for this process. Other failures to open it
 * are errors: without the file the limit would be wrong. */
static orError_t readLimitFile(const char *path, char *text, size_t size, bool *found) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t length = file >= 0 ? read(file, text, size - 1) : -1;
  int why = errno;
  if (file >= 0) close(file);
  *found = length >= 0;
  text[length > 0 ? length : 0] = 0;
  if (file >= 0 || (why != EMFILE && why != ENFILE && why != ENOMEM)) return orSuccess;
  return orFail(orErrorSystem, "cannot read the host's memory limit in %s: %s", path,
                strerror(why));
}

/* A limit file holds a number, or "max" for none. Lowers *limit to the number. */
static orError_t applyLimit(const char *path, size_t *limit) {
  char text[64];
  unsigned long long here;
  const char *end;
  bool found;
  OR_TRY(readLimitFile(path, text, sizeof(text), &found));
  if (found && parseNumber(text, &here, &end) && here > 0 && here < *limit) *limit = (size_t)here;
  return orSuccess;
}

/* A group's parents limit it too. Inside a container the group's path may not exist below the
 * mount; its parents, up to the mount itself, are read all the same. */
static orError_t applyGroup(const char *mount, const char *group, const char *file, size_t *limit) {
  char path[PATH_MAX], name[PATH_MAX + 64];
  if ((size_t)snprintf(path, sizeof(path), "%s%s", mount, group) >= sizeof(path)) return orSuccess;
  size_t root = strlen(mount);
  while (strlen(path) >= root) {
    snprintf(name, sizeof(name), "%s/%s", path, file);
    OR_TRY(applyLimit(name, limit));
    char *slash = strrchr(path, '/');
    if (!slash) break;
    *slash = 0;
  }
  return orSuccess;
}

static bool namesMemory(const char *controllers) {
  for (const char *at = controllers; *at; at += strcspn(at, ",")) {
    if (*at == ',') ++at;
    if (!strncmp(at, "memory", 6) && (at[6] == ',' || !at[6])) return true;
  }
  return false;
}

/* A line of /proc/self/cgroup is "hierarchy:controllers:group"; version 2 leaves out the second. */
static orError_t applyLine(char *line, size_t *limit) {
  char *controllers = strchr(line, ':');
  if (!controllers) return orSuccess;
  char *group = strchr(++controllers, ':');
  if (!group) return orSuccess;
  *group++ = 0;
  if (!*controllers) return applyGroup("/sys/fs/cgroup", group, "memory.max", limit);
  if (!namesMemory(controllers)) return orSuccess;
  return applyGroup("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes", limit);
}

orError_t orHostMemoryLimit(size_t *limit) {
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  *limit = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : (size_t)1 << 30;
  char groups[2 * PATH_MAX], *rest = groups;
  bool found;
  OR_TRY(readLimitFile("/proc/self/cgroup", groups, sizeof(groups), &found));
  for (char *line; (line = strsep(&rest, "\n"));) OR_TRY(applyLine(line, limit));
  return orSuccess;
}

/* The kernel refuses a set that is too small for every possible processor. */
cpu_set_t *orHostCoreSet(size_t *size) {
  for (int cores = CPU_SETSIZE; cores <= OR_MOST_CORES; cores *= 2) {
    cpu_set_t *set = CPU_ALLOC(cores);
    *size = CPU_ALLOC_SIZE(cores);
    if (!set || !sched_getaffinity(0, *size, set)) return set;
    CPU_FREE(set);
    if (errno != EINVAL) break;
  }
  return NULL;
}

int orHostCores(void) {
  size_t size;
  cpu_set_t *set = orHostCoreSet(&size);
  int cores = set ? CPU_COUNT_S(size, set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
  CPU_FREE(set);
  return cores > 0 ? cores : 1;
}

/* Two more than there are cores, so that sleeping tasks leave workers for those that compute. */
int orWorkerLimit(void) {
  static _Atomic int limit; /* the first answer holds */
  int n = atomic_load_explicit(&limit, memory_order_relaxed);
  if (OR_LIKELY(n)) return n;
  int cores = orHostCores(), none = 0;
  n = cores + 2 > OR_MAX_WORKERS ? OR_MAX_WORKERS : cores < 2 ? 4 : cores + 2;
  return atomic_compare_exchange_strong_explicit(&limit, &none, n, memory_order_relaxed,
                                                 memory_order_relaxed)
             ? n
             : none;
}
