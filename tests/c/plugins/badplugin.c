/*
 * The example plugin with one thing wrong, which BAD_PLUGIN names: "FUNCTION WHAT", with WHAT
 * "error N" or "code N" for the Nth call of a function that returns an error, or a number that is
 * none.
 */
#include <assert.h>
#include <signal.h>
#include <stdio.h>

#define orPluginInit goodInit
#include "../../../docs/examples/vendor/vendor.c"
#undef orPluginInit

#include "openreg_operator.h"

static const char *mode;

static int is(const char *name) { return mode && !strcmp(mode, name); }

/* Whether this call of the function is the one that fails. */
static int fails(const char *function, orError_t *error) {
  static int calls;
  char name[32] = "", what[32] = "";
  int number = 0;
  if (!mode || sscanf(mode, "%31s %31s %d", name, what, &number) != 3 || strcmp(name, function))
    return 0;
  *error = !strcmp(what, "code") ? (orError_t)999 : orErrorInvalidValue;
  return __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == number;
}

static void *forEver(void *unused) {
  (void)unused;
  for (;;) pause();
  return NULL;
}

static void startThread(void *(*body)(void *), void *context) {
  pthread_t thread;
  if (!pthread_create(&thread, NULL, body, context)) pthread_detach(thread);
}

/* ---- Devices ---- */

/* A lock that `compute` holds around each kernel. */
static pthread_mutex_t serial = PTHREAD_MUTEX_INITIALIZER;

static int answers; /* 1 when a thread is there to answer */
static void *answer(void *unused) {
  __atomic_store_n(&answers, getpid(), __ATOMIC_SEQ_CST);
  return forEver(unused);
}

static void awaitAnswer(void) {
  while (__atomic_load_n(&answers, __ATOMIC_SEQ_CST) != getpid()) usleep(1000);
}

static int alone; /* there is one device */

static orError_t badCreate(const orDeviceConfig *config, int count, orDeviceDesc *devices) {
  orError_t error;
  if (fails("create", &error)) return error;
  if (is("create")) return orErrorNotSupported;
  createCards(config, count, devices);
  alone = count == 1;
  for (int i = 0; i < count && is("create forgets"); i++) devices[i].memory_limit = 0;
  for (int i = 0; i < count && is("alloc other"); i++) devices[i].memory_limit = 2 * CARD_MEMORY;
  for (int i = 0; i < count && is("create promises"); i++)
    devices[i].memory_limit = 16 * WINDOW_SIZE;
  if (is("create starts")) startThread(answer, NULL);
  return orSuccess;
}

static orError_t badCount(int *count) {
  orError_t error;
  if (fails("count", &error)) return error;
  *count = atoi(mode + strlen("count gives"));
  return orSuccess;
}

static orError_t badProperties(void *device, orDeviceProperties *p) {
  (void)device;
  orError_t error;
  if (fails("properties", &error)) return error;
  snprintf(p->model, sizeof p->model, is("properties text") ? "\x01\xff" : "bad");
  return orSuccess;
}

/* ---- Memory ---- */

static orError_t badAlloc(void *device, size_t bytes, void **ptr) {
  static void *before;
  static int inside;
  orError_t error;
  if (fails("alloc", &error)) return error;
  if (is("create alone") && alone) return orErrorInvalidValue;
  if (is("alloc races")) {
    int others = __atomic_fetch_add(&inside, 1, __ATOMIC_SEQ_CST);
    usleep(1000);
    __atomic_fetch_sub(&inside, 1, __ATOMIC_SEQ_CST);
    if (others) return orErrorInvalidValue;
  }
  if (is("alloc null")) return orSuccess;
  if (is("create starts")) awaitAnswer();
  if (is("alloc waits")) pthread_mutex_lock(&serial);
  if (is("alloc waits")) pthread_mutex_unlock(&serial);
  if (is("create promises") && bytes > CARD_MEMORY) { /* addresses, and no memory behind them */
    *ptr = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return orSuccess;
  }
  error = vendorAlloc(device, bytes, ptr);
  if (error && is("alloc other")) return orErrorSystem;
  if (error) return error;
  if (is("alloc unaligned")) *ptr = (char *)*ptr + 8;
  if (is("alloc same") && before) *ptr = before;
  before = *ptr;
  return orSuccess;
}

static orError_t badFree(void *device, void *ptr, size_t bytes) {
  orError_t error;
  if (fails("free", &error)) return error;
  if (is("free leaks") || is("create promises")) return orSuccess;
  return vendorFree(device, ptr, bytes);
}

static orError_t badAllocHost(void *device, size_t bytes, void **ptr) {
  (void)device;
  char *memory = is("alloc_host null") ? NULL : malloc(bytes + 16);
  *ptr = memory && is("alloc_host unaligned") ? memory + 8 : memory;
  return orSuccess;
}

static orError_t badFreeHost(void *device, void *ptr, size_t bytes) {
  (void)device, (void)ptr, (void)bytes; /* leaves the memory to the process */
  return orSuccess;
}

static orError_t badMap(void *device, const void *ptr, size_t bytes, void **address) {
  orError_t error;
  if (fails("map", &error)) return error;
  error = vendorMap(device, ptr, bytes, address);
  if (is("map null")) *address = NULL;
  if (is("map unaligned")) *address = (char *)*address + 4;
  if (is("map wrong")) *address = (char *)*address + 16;
  return error;
}

/* ---- Completion ---- */

static void *signalLater(void *context) {
  usleep(50000);
  orEventSignal((orEvent_t)(uintptr_t)context, orSuccess);
  return NULL;
}

static void *moveLater(void *context) {
  Job *job = context;
  usleep(5000);
  memmove(job->dst, job->src, job->bytes);
  return NULL;
}

static void *crash(void *unused) {
  (void)unused;
  raise(SIGSEGV);
  return NULL;
}

/* Work of `function` that is finished: how it is completed. */
static orError_t complete(const char *function, orEvent_t done) {
  char what[32] = "";
  size_t length = strlen(function);
  if (mode && !strncmp(mode, function, length)) snprintf(what, sizeof what, "%s", mode + length);
  if (!strcmp(what, " never")) return orErrorNotReady;
  if (!strcmp(what, " destroys")) orEventDestroy(done);
  if (!strcmp(what, " fails late")) {
    orEventSignalError(done, orErrorLaunchFailure, "the link is down");
    return orErrorNotReady;
  }
  if (!strcmp(what, " signals 999")) {
    orEventSignal(done, (orError_t)999);
    return orErrorNotReady;
  }
  if (!strcmp(what, " crashes")) startThread(crash, NULL);
  if (!strcmp(what, " crashes")) return orErrorNotReady;
  if (strcmp(what, " twice") && strcmp(what, " twice, late")) return orSuccess;
  orEventSignal(done, orSuccess);
  if (!strcmp(what, " twice"))
    orEventSignal(done, orSuccess);
  else
    startThread(signalLater, (void *)(uintptr_t)done);
  return orErrorNotReady;
}

/* ---- Work ---- */

static int onFirst(const char *storage) {
  return (size_t)(storage - cards[0].storage) < WINDOW_SIZE;
}

static int gone; /* the card has stopped, and does not signal what it has started */

static void moveBytes(char *to, const char *from, size_t bytes) {
  if (!is("copy forwards")) {
    memmove(to, from, bytes);
    return;
  }
  for (size_t i = 0; i < bytes; i++) to[i] = from[i];
}

static orError_t badCopy(void *device, void *dst, const void *src, size_t bytes, orMemcpyKind kind,
                         orEvent_t done) {
  char *to = storageOf(dst, bytes), *from = storageOf(src, bytes);
  orError_t error;
  if (fails("copy", &error)) return error;
  assert(!is("copy asserts"));
  if (is("copy serial")) pthread_mutex_lock(&serial);
  if (is("copy serial")) pthread_mutex_unlock(&serial);
  if (is("copy early")) {
    Job *job = malloc(sizeof *job);
    *job = (Job){to ? to : dst, from ? from : src, bytes, done, NULL};
    startThread(moveLater, job);
    return orSuccess;
  }
  int is_big = bytes >= 4 << 20;
  if ((is("lost forgets") || is("reset forgets")) && is_big) return orErrorNotReady;
  if (__atomic_load_n(&gone, __ATOMIC_SEQ_CST)) return orErrorLaunchFailure;
  if (mode && strncmp(mode, "copy", 4)) return vendorCopy(device, dst, src, bytes, kind, done);
  moveBytes(to ? to : dst, from ? from : (const char *)src, bytes);
  int lasts = bytes > 2;
  if (is("copy wrong") && lasts) (to ? to : (char *)dst)[bytes - 1] ^= 1;
  if (is("copy too much") && to) to[bytes] = 1;
  if (is("copy peers") && to && from && onFirst(to) != onFirst(from)) to[0] ^= 1;
  return complete("copy", done);
}

static orError_t badSet(void *device, void *dst, int value, size_t bytes, orEvent_t done) {
  orError_t error;
  if (fails("set", &error)) return error;
  if (is("set too much")) bytes++;
  error = vendorSet(device, dst, is("set wrong") ? value + 1 : value, bytes, done);
  return error ? error : complete("set", done);
}

static orError_t badCompute(void *device, const orKernel *kernel, orEvent_t done) {
  orError_t error;
  int locks = is("alloc waits") || is("copy serial");
  if (fails("compute", &error)) return error;
  if (is("compute skips")) return orSuccess;
  if (locks) pthread_mutex_lock(&serial);
  error = vendorCompute(device, kernel, done);
  if (locks) pthread_mutex_unlock(&serial);
  if (is("compute hides")) return orSuccess;
  return error ? error : complete("compute", done);
}

static void badLost(void *device) { (void)device; }

static orError_t badReset(void *device) {
  (void)device;
  orError_t error;
  if (fails("reset", &error)) return error;
  if (is("reset breaks")) __atomic_store_n(&gone, 1, __ATOMIC_SEQ_CST);
  return orSuccess;
}

/* ---- The end ---- */

static void badShutdown(void *device) {
  (void)device;
  if (is("shutdown hangs")) forEver(NULL);
}

static volatile char *page;
static void *reads(void *unused) {
  (void)unused;
  for (;;) (void)*page;
  return NULL;
}

/* Runs at exit, also in a forked child. */
__attribute__((destructor)) static void atEnd(void) {
  if (is("shutdown forgets")) munmap((void *)page, 1); /* a thread still reads it */
  if (is("shutdown forgets")) sleep(1);
  if (is("fork waits") && __atomic_load_n(&answers, __ATOMIC_SEQ_CST)) awaitAnswer();
}

/* ---- Operators ---- */

static orError_t relu(void *device, const orOperatorCall *call, orEvent_t done) {
  (void)device, (void)done;
  const orOperatorTensor *in = call->arguments[0].value.tensors, *out = call->results;
  const float *from = (const float *)storageOf(in->data, 1);
  float *to = (float *)storageOf(out->data, 1);
  if (is("run crashes")) crash(NULL);
  if (is("run never")) return orErrorNotReady;
  int least = is("run wrong") || is("run mapped wrong");
  for (int64_t i = 0; i < out->numel; i++) to[i] = from[i] > 0 ? from[i] : least;
  return orSuccess;
}

static int takesDense(void *device, const orOperatorCall *call) {
  (void)device;
  if (is("run refuses") || is("run mapped refuses")) return 0;
  const orOperatorTensor *in = call->arguments[0].value.tensors, *out = call->results;
  int64_t dense = 1, same = 1;
  for (int i = in->ndim - 1; i >= 0; dense *= in->sizes[i--])
    same &= in->strides[i] == dense && out->strides[i] == dense;
  return in->dtype == orFloat32 && out->dtype == orFloat32 && same && out->numel > 0;
}

static orOperatorKernel operators[] = {{"aten::relu", takesDense, relu, NULL}};

/* ---- The table ---- */

static orDeviceFactory bad = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "bad plugin",
    .create_devices = badCreate,
    .alloc = badAlloc,
    .free = badFree,
    .copy = badCopy,
    .set = badSet,
    .compute = badCompute,
    .map = badMap,
    .properties = badProperties,
    .lost = badLost,
    .reset = badReset,
    .shutdown = badShutdown,
};

static orDeviceFactory host = {
    .size = sizeof(orDeviceFactory),
    .abi_version = OPENREG_ABI_VERSION,
    .name = "bad host",
    .create_devices = badCreate,
    .compute = vendorCompute,
    .alloc_host = badAllocHost,
    .free_host = badFreeHost,
};

static void leaveOut(const char *function) {
  if (!strcmp(function, "alloc")) bad.alloc = NULL;
  if (!strcmp(function, "free")) bad.free = NULL;
  if (!strcmp(function, "copy")) bad.copy = NULL;
  if (!strcmp(function, "set")) bad.set = NULL;
  if (!strcmp(function, "compute")) bad.compute = NULL;
  if (!strcmp(function, "create_devices")) bad.create_devices = NULL;
  if (!strcmp(function, "name")) bad.name = NULL;
}

static void prepare(void) {
  if (is("version")) bad.abi_version = 999;
  if (is("size")) bad.size = 16;
  if (!strncmp(mode, "without ", 8)) leaveOut(mode + 8);
  if (!strncmp(mode, "count ", 6)) bad.count_devices = badCount;
  if (is("fork waits")) startThread(answer, NULL);
  if (!strncmp(mode, "run ", 4) || is("operators")) {
    if (is("operators")) operators[0].name = "aten::reluu";
    bad.operators = operators;
    bad.operator_count = 1;
    if (strncmp(mode, "run mapped", 10)) bad.map = NULL;
  }
  if (is("shutdown forgets")) {
    page = mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    startThread(reads, NULL);
  }
}

OR_API orError_t orPluginInit(void) {
  mode = getenv("BAD_PLUGIN");
  int priority = 100;
  if (!mode || is("nothing")) return orSuccess;
  if (is("error")) return orErrorNotPermitted;
  prepare();
  if (is("equal") || is("equal ignored")) priority = 0;
  if (!strncmp(mode, "alloc_host", 10)) orRegisterDeviceFactory("CPU", 100, &host);
  orError_t error = orRegisterDeviceFactory(is("type") ? "other" : "openreg", priority, &bad);
  if (is("equal ignored")) return orSuccess;
  if (is("late error")) return orErrorSystem;
  if (is("asks")) {
    int count;
    return orGetDeviceCount(&count);
  }
  return error;
}
