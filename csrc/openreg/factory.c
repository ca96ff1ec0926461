/*
 * Device factories: the registry, the plugin, and the devices that come from them.
 *
 * entries, entry_count          every registered factory; registry_lock
 * devices and what points into it, made, failure, failure_text
 *                               written under make_lock, before `made` says so; read-only once it
 *                               is OR_DEVICES_MADE, and then read without a lock
 * making, loading_plugin        of the thread that makes the devices
 *
 * make_lock is held while devices are made, around the functions of factories and plugins too, so
 * that no two threads make them; a call back from there into the making itself is refused.
 * registry_lock is taken inside it and never held around a call.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "core.h"

typedef struct orEntry {
  char type[32];
  int priority;
  const orDeviceFactory *given;   /* the caller's table */
  const orDeviceFactory *factory; /* the same, or a copy of the size that this library knows */
  const char *plugin;             /* path, or null */
} orEntry;

enum { OR_MAX_ENTRIES = 64, OR_BUILT_IN = 3 };
typedef enum orMade { OR_DEVICES_NOT_MADE, OR_DEVICES_MADE, OR_DEVICES_FAILED } orMade;

static orMutex make_lock = OR_MUTEX_INITIALIZER(OR_RANK_DEVICES);
static orMutex registry_lock = OR_MUTEX_INITIALIZER(OR_RANK_REGISTRY);

static orEntry entries[OR_MAX_ENTRIES] = {
    {"CPU", 0, &orPlainHostFactory, &orPlainHostFactory, NULL},
    {"CPU", 50, &orPinnedHostFactory, &orPinnedHostFactory, NULL},
    {"openreg", 0, &orSimulatedFactory, &orSimulatedFactory, NULL},
};
static int entry_count = OR_BUILT_IN;

static _Atomic orMade made;
static orDevice *devices;
static int device_count;
static orDevice *host_device;
static orDevice *openreg_devices;
static int openreg_count;
static orError_t failure;
static char failure_text[1024];

static _Thread_local bool making;
static _Thread_local const char *loading_plugin;

static bool isHostType(const char *type) { return !strcasecmp(type, "CPU"); }
static bool isOpenregType(const char *type) { return !strcasecmp(type, "openreg"); }

/* ---- Registry ---- */

/* Nothing past the version may be read of a table of another one, its name neither. */
static orError_t takeTable(const orDeviceFactory *given, orDeviceFactory *room,
                           const orDeviceFactory **factory) {
  if (given->abi_version != OPENREG_ABI_VERSION)
    return orFail(orErrorPluginVersion, "the device factory has ABI version %u, this library has %u",
                  given->abi_version, OPENREG_ABI_VERSION);
  *factory = OR_GIVEN(orDeviceFactory, given, room, compute);
  return *factory ? orSuccess : orFail(orErrorPluginVersion, "%s", orGetLastErrorMessage());
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
  if (!missing) return orSuccess;
  return orFail(orErrorInvalidValue, "device factory '%s' for type '%s' must have %s",
                factory->name, type, missing);
}

static orError_t checkType(const char *type) {
  if (!type || !*type) return orFail(orErrorInvalidValue, "a device factory needs a device type");
  if (strlen(type) >= sizeof(entries[0].type))
    return orFail(orErrorInvalidValue, "device type '%.40s...' is longer than %zu characters", type,
                  sizeof(entries[0].type) - 1);
  return orSuccess;
}

/* From a plugin that is being loaded the registry changes under the make_lock that its loader
 * holds; everybody else takes it, so that a registration is either before the devices or
 * refused. */
static orError_t beginChange(const char *what) {
  OR_TRY(orEnter());
  if (loading_plugin) return orSuccess;
  if (making)
    return orFail(orErrorNotPermitted, "a device factory may not be %s by create_devices", what);
  orMutexLock(&make_lock);
  if (made != OR_DEVICES_MADE) return orSuccess;
  orMutexUnlock(&make_lock);
  return orFail(orErrorAlreadyInitialized,
                "the devices have been made: no device factory can be %s now", what);
}

static void endChange(void) {
  if (!loading_plugin) orMutexUnlock(&make_lock);
}

/* registry_lock held. */
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
  OR_TRY(beginChange("registered"));
  orMutexLock(&registry_lock);
  orError_t error = addEntry(type, priority, given, factory);
  orMutexUnlock(&registry_lock);
  endChange();
  return error;
}

void orRegisterDeviceFactoryAtLoad(const char *type, int priority, const orDeviceFactory *factory) {
  if (orRegisterDeviceFactory(type, priority, factory))
    orWarn("no device factory was registered at load: %s", orGetLastErrorMessage());
}

/* Entries that match are taken out, the order of the others stays; the number of those that went. A
 * null argument matches all. */
static int removeEntries(const char *type, const orDeviceFactory *given, const char *plugin) {
  orMutexLock(&registry_lock);
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
  orMutexUnlock(&registry_lock);
  return count - kept;
}

orError_t orUnregisterDeviceFactory(const char *type, const orDeviceFactory *factory) {
  OR_TRY(checkType(type));
  OR_TRY(beginChange("unregistered"));
  int removed = removeEntries(type, factory, NULL);
  endChange();
  if (removed) return orSuccess;
  return orFail(orErrorNotFound, "no such device factory is registered for type '%s'", type);
}

/* The factory that serves a type. registry_lock held. */
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
  orMutexLock(&registry_lock);
  int count = entry_count;
  bool found = index >= 0 && index < count;
  if (found) describeEntry(&entries[index], info);
  orMutexUnlock(&registry_lock);
  if (found) return orSuccess;
  return orFail(orErrorInvalidValue, "factory index %d is out of range: there are %d", index, count);
}

/* ---- Plugin ---- */

static bool hasEntries(const char *plugin) {
  orMutexLock(&registry_lock);
  bool found = false;
  for (int i = 0; i < entry_count; i++) found |= entries[i].plugin == plugin;
  orMutexUnlock(&registry_lock);
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

static orError_t openPlugin(const char *path) {
  uint64_t noted = orNotedErrors();
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return orFail(orErrorPluginLoad, "plugin '%s' cannot be loaded: %s", path, dlerror());
  orPluginInitFn init;
  *(void **)&init = dlsym(library, OR_PLUGIN_INIT_SYMBOL);
  if (!init && hasEntries(path)) return orSuccess; /* by OR_REGISTER_DEVICE_FACTORY */
  if (!init) {
    dlclose(library);
    if (orNotedErrors() != noted)
      return orFail(orPeekAtLastError(), "plugin '%s': %s", path, orGetLastErrorMessage());
    return orFail(orErrorPluginSymbol, "plugin '%s' has no function %s", path,
                  OR_PLUGIN_INIT_SYMBOL);
  }
  /* From here on the library stays, whatever comes: it may have started threads. */
  orError_t error = initPlugin(path, init);
  if (error) removeEntries(NULL, NULL, path);
  return error;
}

static orError_t loadPlugin(void) {
  static bool loaded; /* make_lock */
  const char *path = orConfigGet()->plugin;
  if (loaded || !path) return orSuccess;
  loading_plugin = path;
  orError_t error = openPlugin(path);
  loading_plugin = NULL;
  loaded = !error;
  return error;
}

/* ---- Making ---- */

typedef struct orPlan {
  const orDeviceConfig *config;
  const char *prefix;
  orEntry serving[OR_MAX_ENTRIES]; /* one a type, the host's first */
  int counts[OR_MAX_ENTRIES];
  int types;
} orPlan;

/* How many of a type: what the configuration says, or the default. -1: it does not say. */
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
  /* "/" + type + ":63" and the end of the string must fit behind the prefix. */
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

/* Types come in the order in which they were first registered, the host's before all. */
static void planTypes(orPlan *plan) {
  orMutexLock(&registry_lock);
  const orEntry *host = servingEntry("CPU");
  if (host) planType(plan, host);
  for (int i = 0; i < entry_count; i++)
    if (!isPlanned(plan, entries[i].type)) planType(plan, servingEntry(entries[i].type));
  orMutexUnlock(&registry_lock);
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
  for (size_t i = 0; type[i]; i++) lower[i] = (char)tolower((unsigned char)type[i]);
  snprintf(device->type, sizeof(device->type), "%s", type);
  snprintf(device->name, sizeof(device->name), "%.27s/%s:%d", prefix ? prefix : "", lower,
           device->desc.index & 63);
}

/* The devices of one type, appended to `list`. */
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
  orError_t error = serving->factory->create_devices(plan->config, count, descs);
  if (error)
    return orFail(error, "device factory '%s' cannot make %d devices of type '%s': %s",
                  serving->factory->name, count, serving->type, orErrorDetail(error, noted));
  for (int i = 0; i < count; i++) {
    orDevice *device = &list[i];
    device->desc = descs[i];
    device->desc.index = i;
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

static orError_t planAndMake(const orDeviceConfig *config, const char *prefix) {
  orPlan plan = {.config = config, .prefix = prefix};
  OR_TRY(loadPlugin());
  planTypes(&plan);
  OR_TRY(checkPlan(&plan));
  return makeAll(&plan);
}

/* make_lock held. A failure is kept for those who come later; a later orAddDevices may try
 * again. */
static orError_t makeDevices(const orDeviceConfig *config, const char *prefix) {
  making = true;
  orError_t error = planAndMake(config, prefix);
  making = false;
  if (error) {
    openreg_devices = NULL;
    openreg_count = 0;
    failure = error;
    snprintf(failure_text, sizeof(failure_text), "%s", orGetLastErrorMessage());
  }
  atomic_store_explicit(&made, error ? OR_DEVICES_FAILED : OR_DEVICES_MADE, memory_order_release);
  return error;
}

static orError_t refuseWhileMaking(void) {
  if (!making) return orSuccess;
  return orFail(orErrorNotPermitted,
                "a plugin or create_devices may not use devices while they are made");
}

orError_t orAddDevices(const orDeviceConfig *given, const char *name_prefix) {
  orDeviceConfig room;
  OR_TRY(orEnterBlocking());
  OR_TRY(refuseWhileMaking());
  const orDeviceConfig *config = given ? OR_GIVEN(orDeviceConfig, given, &room, size) : NULL;
  if (given && !config) return orErrorInvalidValue;
  OR_TRY(checkConfig(config, name_prefix));
  orMutexLock(&make_lock);
  orError_t error = made == OR_DEVICES_MADE
                        ? orFail(orErrorAlreadyInitialized,
                                 "the devices have been made already: %d of them", device_count)
                        : makeDevices(config, name_prefix);
  orMutexUnlock(&make_lock);
  return error;
}

orError_t orDevicesInit(void) {
  if (OR_LIKELY(atomic_load_explicit(&made, memory_order_acquire) == OR_DEVICES_MADE))
    return orSuccess;
  OR_TRY(refuseWhileMaking());
  orMutexLock(&make_lock);
  orError_t error = orSuccess;
  if (made == OR_DEVICES_NOT_MADE)
    error = makeDevices(NULL, NULL);
  else if (made == OR_DEVICES_FAILED)
    error = orFail(failure, "%s", failure_text);
  orMutexUnlock(&make_lock);
  return error;
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
  memcpy(attributes->name, device->name, sizeof(device->name));
  memcpy(attributes->type, device->type, sizeof(device->type));
  snprintf(attributes->factory, sizeof(attributes->factory), "%.63s", device->factory->name);
  attributes->index = device->desc.index;
  attributes->numa_node = device->desc.numa_node;
  attributes->memory_limit = device->desc.memory_limit;
  return orSuccess;
}
