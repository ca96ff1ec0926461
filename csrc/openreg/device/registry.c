/*
 * Device factories: the registry, the plugin, and the devices that they make.
 *
 * made                          written under `registry`; read anywhere; a futex for threads that
 *                               wait until the devices are made
 * entries, entry_count, failure, failure_text
 *                               `registry`
 * devices and what points into it
 *                               the maker's (OR_DEVICES_LOADING, _MAKING); from OR_DEVICES_MADE
 *                               on read-only, and read without a lock
 * plugin_loaded                 the maker's making, loading_plugin        the calling thread's
 *
 * One thread, the maker, makes the devices. It holds no lock while it loads the plugin and calls
 * its functions and those of factories: these may take locks of their own (the loader's among
 * them), fork, or wait for other threads. Other threads that need the devices sleep until it has
 * finished.
 *
 * The registry is open until the maker has chosen the factories (OR_DEVICES_MAKING), and again if
 * that failed. A registration therefore never waits for the devices: it comes before the choice, or
 * is refused.
 *
 * Each thread opens the plugin's library before it checks which thread is the maker. A thread
 * inside another library's constructor holds the loader's lock: it can open the plugin and make the
 * devices, while a thread that came earlier waits inside dlopen.
 *
 * Note [Threads of a factory]: a thread that the plugin or a factory has started is refused the
 * devices while they are made, as the maker may wait for it. Such a thread is recognised by its
 * timer slack (prctl(2)), which is inherited from its creator: the maker's slack has a value that
 * no other thread has. The value depends on the process, as programs that a factory starts inherit
 * it too. A thread that existed before waits like any other: a factory may not wait for its use of
 * devices. After ten seconds one line on stderr names both threads.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "device/device.h"
#include "openreg_operator.h"
#include "openreg_package.h"

typedef struct orEntry {
  char type[32];
  int priority;
  const orDeviceFactory *given;   /* the caller's table */
  const orDeviceFactory *factory; /* the same, or a copy with this library's size */
  const char *plugin;             /* path, or null */
} orEntry;

enum { OR_MAX_ENTRIES = 64, OR_BUILT_IN = 3, OR_LONG_WAIT_S = 10 };
/* See Note [Threads of a factory]. Linux starts a thread with 50 us. */
enum { OR_USUAL_SLACK_NS = 50000, OR_MOST_SLACKS = 9973 };
enum {
  OR_DEVICES_NOT_MADE,
  OR_DEVICES_LOADING,
  OR_DEVICES_MAKING,
  OR_DEVICES_MADE,
  OR_DEVICES_FAILED
};

static orMutex registry = OR_MUTEX_INITIALIZER(OR_RANK_REGISTRY);

static orEntry entries[OR_MAX_ENTRIES] = {
    {"CPU", 0, &orPlainHostFactory, &orPlainHostFactory, NULL},
    {"CPU", 50, &orPinnedHostFactory, &orPinnedHostFactory, NULL},
    {"openreg", 0, &orSimulatedFactory, &orSimulatedFactory, NULL},
};
static int entry_count = OR_BUILT_IN;

static _Atomic uint32_t made;
static _Atomic int maker; /* the maker's thread id */
static orDevice *devices;
static int device_count;
static orDevice *host_device;
static orDevice *openreg_devices;
static int openreg_count;
static orError_t failure;
static char failure_text[1024];

static _Thread_local bool making;
static _Thread_local const char *loading_plugin;

__attribute__((constructor)) static void keepRegistry(void) { orForkKeep(&registry); }

static bool isHostType(const char *type) { return !strcasecmp(type, "CPU"); }
static bool isOpenregType(const char *type) { return !strcasecmp(type, "openreg"); }

/* ---- Registry ---- */

/* Reads nothing past the version, not even the name, of a table with another version. */
static orError_t takeTable(const orDeviceFactory *given, orDeviceFactory *room,
                           const orDeviceFactory **factory) {
  if (given->abi_version != OPENREG_ABI_VERSION)
    return orFail(orErrorPluginVersion,
                  "the device factory has ABI version %u, this library has %u", given->abi_version,
                  OPENREG_ABI_VERSION);
  *factory = OR_VERSIONED(orDeviceFactory, given, room, compute);
  return *factory ? orSuccess : orFail(orErrorPluginVersion, "%s", orGetLastErrorMessage());
}

static orError_t checkOperators(const orDeviceFactory *f) {
  if (f->operator_count && !f->operators)
    return orFail(orErrorInvalidValue, "device factory '%s' has %zu operators at a null pointer",
                  f->name, f->operator_count);
  for (size_t i = 0; i < f->operator_count; i++)
    if (!f->operators[i].name || !f->operators[i].run)
      return orFail(orErrorInvalidValue, "operator %zu of device factory '%s' must have %s", i,
                    f->name, f->operators[i].name ? "run" : "a name");
  return orSuccess;
}

static orError_t checkFunctions(const char *type, const orDeviceFactory *factory) {
  if (!factory->name || !*factory->name)
    return orFail(orErrorInvalidValue, "the device factory for type '%s' has no name", type);
  const char *missing = NULL;
  if (!factory->compute) missing = "compute";
  if (!factory->create_devices) missing = "create_devices";
  if (isHostType(type)) {
    if (!factory->alloc_host != !factory->free_host) missing = "alloc_host and free_host together";
  } else {
    if (!factory->set) missing = "set";
    if (!factory->copy) missing = "copy";
    if (!factory->free) missing = "free";
    if (!factory->alloc) missing = "alloc";
  }
  if (missing)
    return orFail(orErrorInvalidValue, "device factory '%s' for type '%s' must have %s",
                  factory->name, type, missing);
  return checkOperators(factory);
}

static orError_t checkType(const char *type) {
  if (!type || !*type) return orFail(orErrorInvalidValue, "a device factory needs a device type");
  if (strlen(type) >= sizeof(entries[0].type))
    return orFail(orErrorInvalidValue, "device type '%.40s...' is longer than %zu characters", type,
                  sizeof(entries[0].type) - 1);
  return orSuccess;
}

/* registry held. */
static orError_t checkOpen(const char *what) {
  uint32_t state = atomic_load_explicit(&made, memory_order_relaxed);
  if (state == OR_DEVICES_MADE)
    return orFail(orErrorAlreadyInitialized,
                  "the devices have been made: no device factory can be %s now", what);
  if (state == OR_DEVICES_MAKING && making)
    return orFail(orErrorNotPermitted, "a device factory may not be %s by create_devices", what);
  if (state == OR_DEVICES_MAKING)
    return orFail(orErrorAlreadyInitialized,
                  "the devices are being made: no device factory can be %s now", what);
  return orSuccess;
}

/* registry held. */
static orError_t addEntry(const char *type, int priority, const orDeviceFactory *given,
                          const orDeviceFactory *factory) {
  for (int i = 0; i < entry_count; i++) {
    const orEntry *e = &entries[i];
    if (strcasecmp(e->type, type)) continue;
    if (e->priority == priority || e->given == given)
      return orFail(
          orErrorAlreadyExists,
          "type '%s' has device factory '%s' at priority %d already: '%s' cannot have priority %d",
          e->type, e->factory->name, e->priority, factory->name, priority);
  }
  if (entry_count == OR_MAX_ENTRIES)
    return orFail(orErrorMemoryAllocation, "there is room for %d device factories, all taken",
                  OR_MAX_ENTRIES);
  orDeviceFactory *copy = factory == given ? NULL : malloc(sizeof(*copy));
  if (copy) factory = memcpy(copy, factory, sizeof(*copy));
  if (factory != given && !copy)
    return orFail(orErrorMemoryAllocation, "no memory for the table of a device factory");
  orEntry *e = &entries[entry_count++];
  snprintf(e->type, sizeof(e->type), "%s", type);
  e->priority = priority;
  e->given = given;
  e->factory = factory;
  e->plugin = loading_plugin;
  return orSuccess;
}

orError_t orRegisterDeviceFactory(const char *type, int priority, const orDeviceFactory *given) {
  orDeviceFactory room;
  const orDeviceFactory *factory;
  OR_TRY(checkType(type));
  if (!given) return orFail(orErrorInvalidValue, "the device factory for type '%s' is null", type);
  OR_TRY(takeTable(given, &room, &factory));
  OR_TRY(checkFunctions(type, factory));
  OR_TRY(orEnter());
  orMutexLock(&registry);
  orError_t error = checkOpen("registered");
  if (!error) error = addEntry(type, priority, given, factory);
  orMutexUnlock(&registry);
  return error;
}

void orRegisterDeviceFactoryAtLoad(const char *type, int priority, const orDeviceFactory *factory) {
  if (orRegisterDeviceFactory(type, priority, factory))
    orWarn("no device factory was registered at load: %s", orGetLastErrorMessage());
}

/* Removes the entries that match, keeping the order of the others; returns how many. A null
 * argument matches all. registry held. */
static int removeEntries(const char *type, const orDeviceFactory *given, const char *plugin) {
  int kept = 0, count = entry_count;
  for (int i = 0; i < count; i++) {
    const orEntry *e = &entries[i];
    bool matches = (!type || !strcasecmp(e->type, type)) && (!given || e->given == given) &&
                   (!plugin || e->plugin == plugin);
    if (!matches)
      entries[kept++] = *e;
    else if (e->factory != e->given)
      free((void *)e->factory);
  }
  entry_count = kept;
  return count - kept;
}

orError_t orUnregisterDeviceFactory(const char *type, const orDeviceFactory *factory) {
  OR_TRY(checkType(type));
  OR_TRY(orEnter());
  orMutexLock(&registry);
  orError_t error = checkOpen("unregistered");
  bool removed = !error && removeEntries(type, factory, NULL);
  orMutexUnlock(&registry);
  if (error || removed) return error;
  return orFail(orErrorNotFound, "no such device factory is registered for type '%s'", type);
}

/* The factory that serves a type. registry held. */
static const orEntry *servingEntry(const char *type) {
  const orEntry *best = NULL;
  for (int i = 0; i < entry_count; i++)
    if (!strcasecmp(entries[i].type, type) && (!best || entries[i].priority > best->priority))
      best = &entries[i];
  return best;
}

static void describeEntry(const orEntry *e, orFactoryInfo *info) {
  snprintf(info->type, sizeof(info->type), "%s", e->type);
  snprintf(info->name, sizeof(info->name), "%.63s", e->factory->name);
  snprintf(info->plugin, sizeof(info->plugin), "%.255s", e->plugin ? e->plugin : "");
  info->priority = e->priority;
  info->serves = servingEntry(e->type) == e;
}

orError_t orGetFactoryInfo(int index, orFactoryInfo *info) {
  if (!info) return orFail(orErrorInvalidValue, "orGetFactoryInfo: info is null");
  OR_TRY(orEnter());
  orMutexLock(&registry);
  int count = entry_count;
  bool found = index >= 0 && index < count;
  orFactoryInfo from = {0};
  if (found) describeEntry(&entries[index], &from);
  orMutexUnlock(&registry);
  if (found) return OR_FILL(orFactoryInfo, info, &from, serves);
  return orFail(orErrorInvalidValue, "factory index %d is out of range: there are %d", index,
                count);
}

/* ---- Plugin ---- */

static bool hasEntries(const char *plugin) {
  orMutexLock(&registry);
  bool found = false;
  for (int i = 0; i < entry_count; i++) found |= entries[i].plugin == plugin;
  orMutexUnlock(&registry);
  return found;
}

static orError_t initPlugin(const char *path, orPluginInitFn init) {
  uint64_t noted = orNotedErrors();
  orError_t error = init();
  if (error)
    return orFail(error, "plugin '%s': orPluginInit failed: %s", path, orErrorDetail(error, noted));
  if (hasEntries(path)) return orSuccess;
  if (orNotedErrors() != noted)
    return orFail(orPeekAtLastError(), "plugin '%s': %s", path, orGetLastErrorMessage());
  return orFail(orErrorPluginLoad, "plugin '%s': orPluginInit registered no device factory", path);
}

/* The plugin's library, as opened by the calling thread. */
typedef struct orPlugin {
  const char *path; /* null: there is none */
  void *library;
  uint64_t noted; /* orNotedErrors() before its constructors ran */
} orPlugin;

static orError_t openPlugin(orPlugin *p) {
  *p = (orPlugin){.path = orConfigGet()->plugin, .noted = orNotedErrors()};
  if (!p->path) return orSuccess;
  void *token = orBlockEnter();
  loading_plugin = p->path;
  p->library = dlopen(p->path, RTLD_NOW | RTLD_LOCAL);
  loading_plugin = NULL;
  orBlockLeave(token);
  if (p->library) return orSuccess;
  return orFail(orErrorPluginLoad, "plugin '%s' cannot be loaded: %s", p->path, dlerror());
}

static orError_t failSymbol(const orPlugin *p) {
  if (orNotedErrors() != p->noted)
    return orFail(orPeekAtLastError(), "plugin '%s': %s", p->path, orGetLastErrorMessage());
  return orFail(orErrorPluginSymbol, "plugin '%s' has no function %s", p->path,
                OR_PLUGIN_INIT_SYMBOL);
}

/* Once orPluginInit was called the library stays loaded, failed or not: it may have threads. */
static orError_t startPlugin(orPlugin *p) {
  orPluginInitFn init;
  *(void **)&init = dlsym(p->library, OR_PLUGIN_INIT_SYMBOL);
  if (!init && !hasEntries(p->path)) return failSymbol(p);
  p->library = NULL;           /* kept open */
  if (!init) return orSuccess; /* it has registered itself (OR_REGISTER_DEVICE_FACTORY) */
  void *token = orBlockEnter();
  loading_plugin = p->path;
  orError_t error = initPlugin(p->path, init);
  loading_plugin = NULL;
  orBlockLeave(token);
  if (!error) return orSuccess;
  orMutexLock(&registry);
  removeEntries(NULL, NULL, p->path);
  orMutexUnlock(&registry);
  return error;
}

static orError_t startPluginOnce(orPlugin *p) {
  static bool plugin_loaded;
  if (plugin_loaded || !p->path) return orSuccess;
  OR_TRY(startPlugin(p));
  plugin_loaded = true;
  return orSuccess;
}

/* ---- Making ---- */

typedef struct orPlan {
  const orDeviceConfig *config;
  const char *prefix;
  orEntry serving[OR_MAX_ENTRIES]; /* one a type, the host's first */
  int counts[OR_MAX_ENTRIES];
  int types;
} orPlan;

/* The configured or default number of devices of a type. -1: not configured. */
static int configuredCount(const orDeviceConfig *config, const char *type) {
  for (size_t i = 0; config && i < config->type_count; i++)
    if (!strcasecmp(config->device_count[i].type, type)) return config->device_count[i].count;
  return -1;
}

static int countOf(const orDeviceConfig *config, const char *type) {
  int count = configuredCount(config, type);
  if (count >= 0) return count;
  return isOpenregType(type) ? orConfigGet()->device_count : 1;
}

static orError_t checkCounts(const orDeviceConfig *config) {
  for (size_t i = 0; i < config->type_count; i++) {
    const orDeviceCount *c = &config->device_count[i];
    OR_TRY(checkType(c->type));
    if (c->count < 0 || c->count > OPENREG_MAX_DEVICES)
      return orFail(orErrorInvalidValue, "%d devices of type '%s' are out of range: 0 to %d",
                    c->count, c->type, OPENREG_MAX_DEVICES);
    for (size_t j = 0; j < i; j++)
      if (!strcasecmp(c->type, config->device_count[j].type))
        return orFail(orErrorInvalidValue, "type '%s' has two device counts, %d and %d", c->type,
                      config->device_count[j].count, c->count);
  }
  return orSuccess;
}

static orError_t checkConfig(const orDeviceConfig *config, const char *prefix) {
  /* "/" + type + ":63" and the terminator must fit behind the prefix. */
  size_t room = sizeof(devices->name) - sizeof(entries[0].type) - 5;
  if (prefix && strlen(prefix) > room)
    return orFail(orErrorInvalidValue, "the name prefix has %zu characters, allowed are %zu",
                  strlen(prefix), room);
  if (!config) return orSuccess;
  if (config->type_count && !config->device_count)
    return orFail(orErrorInvalidValue, "orDeviceConfig has %zu device counts at a null pointer",
                  config->type_count);
  return checkCounts(config);
}

static void planType(orPlan *plan, const orEntry *serving) {
  plan->serving[plan->types] = *serving;
  plan->counts[plan->types++] = countOf(plan->config, serving->type);
}

static bool isPlanned(const orPlan *plan, const char *type) {
  for (int t = 0; t < plan->types; t++)
    if (!strcasecmp(plan->serving[t].type, type)) return true;
  return false;
}

/* Orders types by first registration, the host's before all, and closes the registry. */
static void planTypes(orPlan *plan) {
  orMutexLock(&registry);
  const orEntry *host = servingEntry("CPU");
  if (host) planType(plan, host);
  for (int i = 0; i < entry_count; i++)
    if (!isPlanned(plan, entries[i].type)) planType(plan, servingEntry(entries[i].type));
  atomic_store_explicit(&made, OR_DEVICES_MAKING, memory_order_relaxed);
  orMutexUnlock(&registry);
}

static orError_t checkPlan(const orPlan *plan) {
  if (plan->types == 0 || !isHostType(plan->serving[0].type))
    return orFail(orErrorNotFound,
                  "no device factory is registered for type 'CPU', which is required");
  const orDeviceConfig *config = plan->config;
  for (size_t i = 0; config && i < config->type_count; i++) {
    const orDeviceCount *c = &config->device_count[i];
    if (c->count > 0 && !isPlanned(plan, c->type))
      return orFail(orErrorNotFound,
                    "%d devices of type '%s' are configured, but no device factory is "
                    "registered for it",
                    c->count, c->type);
  }
  if (plan->counts[0] == 0)
    return orFail(orErrorNotFound, "no CPU device was made: one is required, 0 are configured");
  return orSuccess;
}

static void nameDevice(orDevice *device, const char *prefix, const char *type) {
  char lower[sizeof(device->type)] = "";
  const char *name = isOpenregType(type) ? orDevicesName() : type;
  for (size_t i = 0; name[i]; i++) lower[i] = (char)tolower((unsigned char)name[i]);
  snprintf(device->type, sizeof(device->type), "%s", type);
  snprintf(device->name, sizeof(device->name), "%.27s/%s:%d", prefix ? prefix : "", lower,
           device->desc.index & 63);
}

/* A vendor's function may sleep, or wait for a thread that wants the caller's lock. */
static orError_t callFactory(const orDeviceFactory *f, const orDeviceConfig *config, int count,
                             orDeviceDesc *descs) {
  bool built_in = f == &orPlainHostFactory || f == &orPinnedHostFactory || f == &orSimulatedFactory;
  if (built_in) return f->create_devices(config, count, descs);
  void *token = orBlockEnter();
  orError_t error = f->create_devices(config, count, descs);
  orBlockLeave(token);
  return error;
}

orError_t orFactoryResult(const orDeviceFactory *f, const char *call, orError_t error) {
  if (OR_LIKELY(error != orErrorNotReady && orErrorIsKnown(error))) return error;
  return orFail(orErrorSystem,
                "%s of the device factory \"%s\" returned %d (%s), which is not among its results",
                call, f->name, (int)error, orGetErrorName(error));
}

static orError_t askCount(const orDeviceFactory *f, int *count) {
  int counted = -1;
  uint64_t noted = orNotedErrors();
  void *token = orBlockEnter();
  orError_t error = orFactoryResult(f, "count_devices", f->count_devices(&counted));
  orBlockLeave(token);
  if (error)
    return orFail(error, "device factory '%s' cannot count its devices: %s", f->name,
                  orErrorDetail(error, noted));
  if (counted < 0 || counted > OPENREG_MAX_DEVICES)
    return orFail(orErrorInvalidValue, "device factory '%s' counts %d devices: 0 to %d are allowed",
                  f->name, counted, OPENREG_MAX_DEVICES);
  *count = counted;
  return orSuccess;
}

/* Lets the factory of openreg devices count them where nothing else gives their number. */
static orError_t countDevices(orPlan *plan) {
  for (int t = 0; t < plan->types; t++) {
    const orEntry *serving = &plan->serving[t];
    if (!isOpenregType(serving->type) || !serving->factory->count_devices) continue;
    bool given =
        configuredCount(plan->config, serving->type) >= 0 || orConfigGet()->device_count_is_set;
    if (!given) OR_TRY(askCount(serving->factory, &plan->counts[t]));
  }
  return orSuccess;
}

/* Appends the devices of one type to `list`. */
static orError_t makeType(const orPlan *plan, int type, orDevice *list) {
  const orEntry *serving = &plan->serving[type];
  int count = plan->counts[type];
  if (count == 0) return orSuccess;
  orDeviceDesc descs[OPENREG_MAX_DEVICES] = {{0}};
  for (int i = 0; i < count; i++) {
    descs[i].index = i;
    descs[i].numa_node = -1;
  }
  uint64_t noted = orNotedErrors();
  orError_t error = callFactory(serving->factory, plan->config, count, descs);
  error = orFactoryResult(serving->factory, "create_devices", error);
  if (error)
    return orFail(error, "device factory '%s' cannot make %d devices of type '%s': %s%s",
                  serving->factory->name, count, serving->type, orErrorDetail(error, noted),
                  isOpenregType(serving->type) ? " (OPENREG_DEVICE_COUNT sets their number)" : "");
  for (int i = 0; i < count; i++) {
    orDevice *device = &list[i];
    device->desc = descs[i];
    device->desc.index = i;
    if (device->desc.memory_limit > OR_MOST_MEMORY) device->desc.memory_limit = OR_MOST_MEMORY;
    device->factory = serving->factory;
    device->can_map = serving->factory->map != NULL;
    nameDevice(device, plan->prefix, serving->type);
  }
  return orSuccess;
}

static orError_t makeAll(const orPlan *plan) {
  int total = 0;
  for (int t = 0; t < plan->types; t++) total += plan->counts[t];
  orDevice *list = calloc((size_t)total, sizeof(*list));
  if (!list) return orFail(orErrorMemoryAllocation, "no memory for the table of %d devices", total);
  orDevice *next = list;
  for (int t = 0; t < plan->types; t++) {
    orError_t error = makeType(plan, t, next);
    if (error) {
      free(list);
      return error;
    }
    if (isOpenregType(plan->serving[t].type)) {
      openreg_devices = next;
      openreg_count = plan->counts[t];
    }
    next += plan->counts[t];
  }
  devices = host_device = list;
  device_count = total;
  return orSuccess;
}

static orError_t planAndMake(orPlugin *plugin, const orDeviceConfig *config, const char *prefix) {
  orPlan plan = {.config = config, .prefix = prefix};
  OR_TRY(startPluginOnce(plugin));
  planTypes(&plan);
  OR_TRY(checkPlan(&plan));
  OR_TRY(countDevices(&plan));
  return makeAll(&plan);
}

/* Whether a cause may pass (memory, a file descriptor), so that the next call tries again. Other
 * failures are kept for later calls, so that nothing is asked of a plugin twice; orAddDevices tries
 * again. */
static bool mayPass(orError_t error) {
  return error == orErrorMemoryAllocation || error == orErrorSystem;
}

static void endMaking(orError_t error) {
  uint32_t state = !error           ? OR_DEVICES_MADE
                   : mayPass(error) ? OR_DEVICES_NOT_MADE
                                    : OR_DEVICES_FAILED;
  orMutexLock(&registry);
  failure = error;
  if (error) snprintf(failure_text, sizeof(failure_text), "%s", orGetLastErrorMessage());
  atomic_store_explicit(&made, state, memory_order_release);
  orMutexUnlock(&registry);
  orFutexWake(&made, INT32_MAX);
}

static orError_t makeDevices(orPlugin *plugin, const orDeviceConfig *config, const char *prefix) {
  atomic_store_explicit(&maker, (int)gettid(), memory_order_relaxed);
  orError_t error = planAndMake(plugin, config, prefix);
  if (error) {
    openreg_devices = NULL;
    openreg_count = 0;
  }
  endMaking(error);
  return error;
}

static bool isBeingMade(uint32_t state) {
  return state == OR_DEVICES_LOADING || state == OR_DEVICES_MAKING;
}

static void warnLongWait(void) {
  orWarn(
      "thread %d has waited %d s for the devices, which thread %d is making: a plugin or "
      "create_devices may not wait for a thread that uses devices",
      (int)gettid(), OR_LONG_WAIT_S, atomic_load_explicit(&maker, memory_order_relaxed));
}

static void awaitDevices(void) {
  uint64_t patience = OR_LONG_WAIT_S * UINT64_C(1000000000), since = orNow();
  void *token = orBlockEnter();
  for (uint32_t state; isBeingMade(state = atomic_load_explicit(&made, memory_order_acquire));) {
    orFutexWait(&made, state, patience);
    if (!patience || orNow() - since < patience) continue;
    warnLongWait();
    patience = 0;
  }
  orBlockLeave(token);
}

/* Whether the calling thread is now the maker. `again`: even after a failed attempt. */
static bool beginMaking(bool again) {
  orMutexLock(&registry);
  uint32_t state = atomic_load_explicit(&made, memory_order_relaxed);
  bool begins = state == OR_DEVICES_NOT_MADE || (again && state == OR_DEVICES_FAILED);
  if (begins) atomic_store_explicit(&made, OR_DEVICES_LOADING, memory_order_relaxed);
  orMutexUnlock(&registry);
  return begins;
}

/* Whether there is nothing to make, and what a call then returns. */
static bool isSettled(bool again, orError_t *error) {
  orMutexLock(&registry);
  uint32_t state = atomic_load_explicit(&made, memory_order_acquire);
  bool settled = state == OR_DEVICES_MADE || (state == OR_DEVICES_FAILED && !again);
  *error = orSuccess;
  if (settled && state == OR_DEVICES_FAILED)
    *error = orFail(failure, "%s", failure_text);
  else if (settled && again)
    *error = orFail(orErrorAlreadyInitialized, "the devices have been made already: %d of them",
                    device_count);
  orMutexUnlock(&registry);
  return settled;
}

static orError_t makeOrAwait(orPlugin *plugin, const orDeviceConfig *config, const char *prefix,
                             bool again) {
  for (orError_t error;; awaitDevices()) {
    if (beginMaking(again)) return makeDevices(plugin, config, prefix);
    if (isSettled(again, &error)) return error;
  }
}

/* See Note [Threads of a factory]. */
static int factorySlack(void) { return OR_USUAL_SLACK_NS + 1 + (int)(getpid() % OR_MOST_SLACKS); }

static orError_t refuseWhileMaking(void) {
  uint32_t state = atomic_load_explicit(&made, memory_order_relaxed);
  if (!making && !(isBeingMade(state) && prctl(PR_GET_TIMERSLACK) == factorySlack()))
    return orSuccess;
  return orFail(orErrorNotPermitted,
                "a plugin, create_devices or a thread that they start may not use devices while "
                "they are made");
}

static orError_t openAndMake(const orDeviceConfig *config, const char *prefix, bool again) {
  orPlugin plugin;
  int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, factorySlack());
  making = true;
  orError_t error = openPlugin(&plugin);
  if (!error) error = makeOrAwait(&plugin, config, prefix, again);
  if (plugin.library) dlclose(plugin.library);
  making = false;
  if (slack > 0) prctl(PR_SET_TIMERSLACK, slack);
  return error;
}

static orError_t needDevices(const orDeviceConfig *config, const char *prefix, bool again) {
  orError_t error;
  OR_TRY(refuseWhileMaking());
  if (isSettled(again, &error)) return error;
  OR_TRY(orProcessBeginUse());
  error = openAndMake(config, prefix, again);
  orProcessEndUse();
  return error;
}

orError_t orAddDevices(const orDeviceConfig *given, const char *name_prefix) {
  orDeviceConfig room;
  OR_TRY(orEnterBlocking());
  const orDeviceConfig *config = given ? OR_VERSIONED(orDeviceConfig, given, &room, size) : NULL;
  if (given && !config) return orErrorInvalidValue;
  OR_TRY(checkConfig(config, name_prefix));
  return needDevices(config, name_prefix, true);
}

orError_t orDevicesInit(void) {
  if (OR_LIKELY(atomic_load_explicit(&made, memory_order_acquire) == OR_DEVICES_MADE))
    return orSuccess;
  OR_TRY(orEnter());
  return needDevices(NULL, NULL, false);
}

/* ---- Devices ---- */

orDevice *orDeviceAt(int index) {
  return index >= 0 && index < openreg_count ? &openreg_devices[index] : NULL;
}

orDevice *orHostDevice(void) { return host_device; }

orError_t orDeviceIsValid(const orDevice *device) {
  OR_TRY(orDevicesInit());
  uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
  if (offset < (uintptr_t)device_count * sizeof(orDevice) && offset % sizeof(orDevice) == 0)
    return orSuccess;
  return orFail(orErrorInvalidResourceHandle, "%p is not a device", (const void *)device);
}

static orError_t failName(const char *name) {
  char known[512] = "";
  for (int i = 0; i < device_count; i++) {
    size_t length = strlen(known);
    snprintf(known + length, sizeof(known) - length, "%s%s", i ? ", " : "", devices[i].name);
  }
  return orFail(orErrorNotFound, "no device is named '%.64s'; there are %s", name, known);
}

orError_t orGetDeviceByName(orDevice **device, const char *name) {
  if (!device || !name)
    return orFail(orErrorInvalidValue, "orGetDeviceByName: an argument is null");
  OR_TRY(orEnter());
  OR_TRY(orDevicesInit());
  for (int i = 0; i < device_count; i++)
    if (!strcmp(devices[i].name, name)) {
      *device = &devices[i];
      return orSuccess;
    }
  return failName(name);
}

orError_t orGetTotalDeviceCount(int *count) {
  if (!count) return orFail(orErrorInvalidValue, "orGetTotalDeviceCount: count is null");
  *count = 0;
  OR_TRY(orEnter());
  OR_TRY(orDevicesInit());
  *count = device_count;
  return orSuccess;
}

orError_t orGetDeviceAt(orDevice **device, int index) {
  if (!device) return orFail(orErrorInvalidValue, "orGetDeviceAt: device is null");
  OR_TRY(orEnter());
  OR_TRY(orDevicesInit());
  if (index < 0 || index >= device_count)
    return orFail(orErrorInvalidDevice, "device %d of all types is out of range: 0 to %d", index,
                  device_count - 1);
  *device = &devices[index];
  return orSuccess;
}

orError_t orGetDeviceByIndex(orDevice **device, const char *type, int index) {
  if (!device || !type)
    return orFail(orErrorInvalidValue, "orGetDeviceByIndex: an argument is null");
  OR_TRY(orEnter());
  OR_TRY(orDevicesInit());
  int count = 0;
  for (int i = 0; i < device_count; i++) {
    if (strcasecmp(devices[i].type, type)) continue;
    if (count++ != index) continue;
    *device = &devices[i];
    return orSuccess;
  }
  if (!count) return orFail(orErrorNotFound, "there is no device of type '%.32s'", type);
  return orFail(orErrorInvalidDevice, "device index %d of type '%.32s' is out of range: 0 to %d",
                index, type, count - 1);
}

orError_t orDeviceGetAttributes(const orDevice *device, orDeviceAttributes *attributes) {
  if (!attributes) return orFail(orErrorInvalidValue, "orDeviceGetAttributes: attributes is null");
  OR_TRY(orEnter());
  OR_TRY(orDeviceIsValid(device));
  orDeviceAttributes from = {.index = device->desc.index,
                             .numa_node = device->desc.numa_node,
                             .memory_limit = device->desc.memory_limit};
  memcpy(from.name, device->name, sizeof(device->name));
  memcpy(from.type, device->type, sizeof(device->type));
  snprintf(from.factory, sizeof(from.factory), "%.63s", device->factory->name);
  return OR_FILL(orDeviceAttributes, attributes, &from, memory_limit);
}

orError_t orGetOperatorKernels(const orOperatorKernel **kernels, size_t *count) {
  if (!kernels || !count)
    return orFail(orErrorInvalidValue, "orGetOperatorKernels: an argument is null");
  *kernels = NULL;
  *count = 0;
  OR_TRY(orEnter());
  OR_TRY(orDevicesInit());
  if (!openreg_count) return orSuccess;
  *kernels = openreg_devices->factory->operators;
  *count = openreg_devices->factory->operator_count;
  return orSuccess;
}
