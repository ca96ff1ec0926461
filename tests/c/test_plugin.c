/* Plugins: what goes wrong when one is loaded, and the vendor's example in both variants. */
#include "gate.h"
#include "harness.h"
#include "openreg_operator.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Plugins that do not work ---- */

/* Every call that needs a device says the same, and no device is left. */
static void expectFailure(const char *path, orError_t error, const char *part) {
  int count = -1;
  orDevice *device;
  void *p = NULL;
  setenv("OPENREG_PLUGIN", path, 1);
  ASSERT_REFUSED(orGetDeviceCount(&count), error, part);
  ASSERT_EQ(count, 0);
  ASSERT_CONTAINS(orGetLastErrorMessage(), path);
  ASSERT_REFUSED(orGetDeviceByName(&device, "/cpu:0"), error, part);
  ASSERT_REFUSED(orMalloc(&p, 16), error, part);
}

static void expectBad(const char *mode, orError_t error, const char *part) {
  setenv("BAD_PLUGIN", mode, 1);
  expectFailure(pluginPath("libbadplugin.so"), error, part);
}

TEST(plugin_missing_file) {
  expectFailure("/no/such/libvendor.so", orErrorPluginLoad, "No such file");
}

TEST(plugin_not_a_library) {
  char path[] = "/tmp/openreg_test_XXXXXX";
  int file = mkstemp(path);
  ASSERT_GE(file, 0);
  ASSERT_EQ(write(file, "not a library", 13), 13);
  close(file);
  expectFailure(path, orErrorPluginLoad, "cannot be loaded");
  unlink(path);
}

TEST(plugin_without_symbol) { expectFailure("libm.so.6", orErrorPluginSymbol, "orPluginInit"); }
TEST(plugin_wrong_version) {
  expectBad("version", orErrorPluginVersion, "ABI version 999, this library has 2");
}
TEST(plugin_wrong_size) { expectBad("size", orErrorPluginVersion, "16 bytes"); }
TEST(plugin_init_fails) { expectBad("error", orErrorNotPermitted, "orPluginInit failed"); }
TEST(plugin_registers_nothing) {
  expectBad("nothing", orErrorPluginLoad, "registered no device factory");
}
TEST(plugin_equal_priority) { expectBad("equal", orErrorAlreadyExists, "priority 0"); }
TEST(plugin_equal_priority_ignored) {
  expectBad("equal ignored", orErrorAlreadyExists, "priority 0");
}
TEST(plugin_asks_for_devices) { expectBad("asks", orErrorNotPermitted, "while they are made"); }

TEST(plugin_factory_fails) {
  setenv("BAD_PLUGIN", "create", 1);
  setenv("OPENREG_PLUGIN", pluginPath("libbadplugin.so"), 1);
  int count = -1;
  ASSERT_REFUSED(orGetDeviceCount(&count), orErrorNotSupported, "'bad plugin'");
  ASSERT_EQ(count, 0);
}

/* What it had registered before it failed is gone. */
TEST(plugin_init_fails_late) {
  orFactoryInfo info = {.size = sizeof info};
  expectBad("late error", orErrorSystem, "orPluginInit failed");
  for (int i = 0; !orGetFactoryInfo(i, &info); ++i) ASSERT_STR(info.plugin, "");
}

TEST(plugin_failure_can_be_put_right) {
  int count = -1;
  setenv("BAD_PLUGIN", "error", 1);
  setenv("OPENREG_PLUGIN", pluginPath("libbadplugin.so"), 1);
  ASSERT_ERROR(orAddDevices(NULL, NULL), orErrorNotPermitted);
  setenv("BAD_PLUGIN", "create", 1);
  ASSERT_ERROR(orAddDevices(NULL, NULL), orErrorNotSupported);
  ASSERT_ERROR(orGetDeviceCount(&count), orErrorNotSupported);
}

/* ---- A plugin that registers itself ---- */

static const char *selfRegistered(const char *priority) {
  setenv("OPENREG_TEST_PRIORITY", priority, 1);
  return pluginPath("libregistered.so");
}

TEST(plugin_registers_itself) {
  orDeviceProperties properties = {.size = sizeof properties};
  setenv("OPENREG_PLUGIN", selfRegistered("60"), 1);
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.factory, "registered at load");
  orFactoryInfo info = {.size = sizeof info};
  ASSERT_OK(orGetFactoryInfo(3, &info));
  ASSERT_CONTAINS(info.plugin, "libregistered.so");
  ASSERT_EQ(info.priority, 60);
}

TEST(plugin_fails_to_register_itself) {
  const char *path = selfRegistered("0");
  beginCapture();
  expectFailure(path, orErrorAlreadyExists, "priority 0");
  ASSERT_CONTAINS(endCapture(), "openreg: no device factory was registered at load");
#ifndef __GLIBC__
  SKIP("dlclose unloads nothing: the library's constructor does not run again");
#endif
  selfRegistered("1"); /* and may try again */
  ASSERT_OK(orAddDevices(NULL, NULL));
}

TEST(plugin_registers_itself_where_a_program_loads_it) {
  ASSERT(dlopen(selfRegistered("60"), RTLD_NOW | RTLD_LOCAL));
  orDeviceProperties properties = {.size = sizeof properties};
  ASSERT_OK(orGetDeviceProperties(&properties, 0));
  ASSERT_STR(properties.factory, "registered at load");
}

TEST(plugin_registers_itself_too_late) {
  ASSERT_OK(orAddDevices(NULL, NULL));
  beginCapture();
  ASSERT(dlopen(selfRegistered("60"), RTLD_NOW | RTLD_LOCAL));
  const char *text = endCapture();
  ASSERT_EQ(countLines(text), 1);
  ASSERT_CONTAINS(text, "the devices have been made");
}

/* One thread loads a library, whose constructors register a factory and use devices; the other is
 * in the first use, which loads the plugin. The loader has one lock. */
static atomic_int gate;
static void *openGateOnEnter(void) {
  int loads = 1;
  atomic_compare_exchange_strong(&gate, &loads, 2);
  return NULL;
}
static void leave(void *token) { (void)token; }

static void *useWhileLoading(void *context) {
  int count = 0;
  awaitInt(&gate, 1);
  ASSERT_OK(orGetDeviceCount(&count));
  ASSERT_EQ(count, 2);
  return context;
}

TEST(plugin_is_loaded_while_another_library_is) {
#ifndef __GLIBC__
  SKIP("the loader has no lock while a library's constructors run");
#endif
  char address[32];
  orFactoryInfo info = {.size = sizeof info};
  pthread_t user;
  snprintf(address, sizeof(address), "%p", (void *)&gate);
  setenv("OPENREG_TEST_GATE", address, 1);
  setenv("OPENREG_PLUGIN", pluginPath("libvendor.so"), 1);
  ASSERT_OK(orSetBlockHooks(&(orBlockHooks){openGateOnEnter, leave}));
  pthread_create(&user, NULL, useWhileLoading, NULL);
  ASSERT(dlopen(selfRegistered("60"), RTLD_NOW | RTLD_LOCAL));
  pthread_join(user, NULL);
  for (int priority = 60, i = 3; i < 5; i++, priority += 40) {
    ASSERT_OK(orGetFactoryInfo(i, &info));
    ASSERT_EQ(info.priority, priority);
  }
}

/* ---- The example, with `map` and without: each test is two ---- */

enum { BIG = 3 << 20 };

static void useVendor(const char *file) {
  int count = 0;
  setenv("OPENREG_PLUGIN", pluginPath(file), 1);
  ASSERT_OK(orGetDeviceCount(&count));
  ASSERT_EQ(count, 2);
}

#define VENDOR_TEST(name)              \
  static void vendor_##name(int maps); \
  TEST(plugin_vendor_##name) {         \
    useVendor("libvendor.so");         \
    vendor_##name(1);                  \
  }                                    \
  TEST(plugin_vendor_nomap_##name) {   \
    useVendor("libvendor_nomap.so");   \
    vendor_##name(0);                  \
  }                                    \
  static void vendor_##name(int maps)

static void fill(unsigned char *bytes, size_t size, unsigned seed) {
  for (size_t i = 0; i < size; ++i) {
    seed = seed * 1103515245u + 12345u;
    bytes[i] = (unsigned char)(seed >> 16);
  }
}

static void *allocOn(int device, size_t bytes) {
  void *p = NULL;
  ASSERT_OK(orSetDevice(device));
  ASSERT_OK(orMalloc(&p, bytes));
  ASSERT_OK(orSetDevice(0));
  return p;
}

VENDOR_TEST(serves) {
  orFactoryInfo info = {.size = sizeof info};
  orDeviceProperties properties = {.size = sizeof properties};
  int serving = 0;
  for (int i = 0; !orGetFactoryInfo(i, &info); ++i) {
    if (!info.plugin[0]) continue;
    ASSERT_EQ(info.priority, 100);
    ASSERT_EQ(info.serves, 1);
    ASSERT_STR(info.type, "openreg");
    ASSERT_STR(info.plugin, getenv("OPENREG_PLUGIN"));
    serving += 1;
  }
  ASSERT_EQ(serving, 1);
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_CONTAINS(properties.factory, "example vendor");
  ASSERT_EQ(properties.total_memory, 1 << 30);
  ASSERT_EQ(properties.can_map, maps);
}

VENDOR_TEST(copies) {
  (void)maps;
  unsigned char *sent = malloc(BIG), *got = malloc(BIG);
  void *a = allocOn(0, BIG), *b = allocOn(1, BIG), *c = allocOn(1, BIG);
  fill(sent, BIG, 1);
  ASSERT_OK(orMemcpy(a, sent, BIG, orMemcpyHostToDevice));
  ASSERT_OK(orMemcpy(b, a, BIG, orMemcpyDeviceToDevice)); /* between cards */
  ASSERT_OK(orMemcpy(c, b, BIG, orMemcpyDefault));        /* within one */
  ASSERT_OK(orMemcpy(got, c, BIG, orMemcpyDeviceToHost));
  ASSERT_MEM(got, sent, BIG);
  ASSERT_OK(orMemcpy((char *)c + 1001, sent, 10, orMemcpyHostToDevice));
  ASSERT_OK(orMemcpy(got, (char *)c + 1000, 12, orMemcpyDeviceToHost));
  ASSERT_MEM(got + 1, sent, 10);
  ASSERT_EQ(got[0], sent[1000]);
  ASSERT_EQ(got[11], sent[1011]);
  ASSERT_OK(orFree(a));
  ASSERT_OK(orFree(b));
  ASSERT_OK(orFree(c));
  free(sent);
  free(got);
}

VENDOR_TEST(set) {
  (void)maps;
  unsigned char got[100];
  char *p = allocOn(1, 4096);
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orMemset(p, 0x11, 4096));
  ASSERT_OK(orMemset(p + 10, 0x22, 5));
  ASSERT_OK(orMemcpy(got, p, 100, orMemcpyDeviceToHost));
  for (int i = 0; i < 100; ++i) ASSERT_EQ(got[i], i >= 10 && i < 15 ? 0x22 : 0x11);
  ASSERT_OK(orFree(p));
}

/* Copies complete on the card's own thread; the stream's order holds all the same. */
VENDOR_TEST(order_on_a_stream) {
  (void)maps;
  enum { STEPS = 200, SIZE = 1000 };
  unsigned char *pinned = NULL, *result = NULL;
  void *p = allocOn(0, SIZE);
  orStream_t stream;
  ASSERT_OK(orMallocHost((void **)&pinned, STEPS * SIZE));
  ASSERT_OK(orMallocHost((void **)&result, STEPS * SIZE));
  ASSERT_OK(orStreamCreate(&stream));
  fill(pinned, STEPS * SIZE, 2);
  for (int i = 0; i < STEPS; ++i) {
    ASSERT_OK(orMemcpyAsync(p, pinned + i * SIZE, SIZE, orMemcpyHostToDevice, stream));
    if (i % 3 == 0) ASSERT_OK(orMemsetAsync(p, i, 7, stream));
    ASSERT_OK(orMemcpyAsync(result + i * SIZE, p, SIZE, orMemcpyDeviceToHost, stream));
  }
  ASSERT_OK(orStreamSynchronize(stream));
  for (int i = 0; i < STEPS; ++i) {
    if (i % 3 == 0) memset(pinned + i * SIZE, i, 7);
    ASSERT_MEM(result + i * SIZE, pinned + i * SIZE, SIZE);
  }
  ASSERT_OK(orFreeHost(pinned));
  ASSERT_OK(orFreeHost(result));
  ASSERT_OK(orFree(p));
}

VENDOR_TEST(events_order_streams) {
  (void)maps;
  enum { STEPS = 100, SIZE = 5000 };
  unsigned char *sent = NULL, *got = NULL;
  void *p = allocOn(0, SIZE);
  orStream_t in, out;
  orEvent_t filled, read, gate;
  ASSERT_OK(orMallocHost((void **)&sent, STEPS * SIZE));
  ASSERT_OK(orMallocHost((void **)&got, STEPS * SIZE));
  ASSERT_OK(orStreamCreate(&in));
  ASSERT_OK(orStreamCreate(&out));
  ASSERT_OK(orEventCreate(&filled));
  ASSERT_OK(orEventCreate(&read));
  ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
  fill(sent, STEPS * SIZE, 3);
  ASSERT_OK(orStreamWaitEvent(in, gate));
  for (int i = 0; i < STEPS; ++i) {
    ASSERT_OK(orMemcpyAsync(p, sent + i * SIZE, SIZE, orMemcpyHostToDevice, in));
    ASSERT_OK(orEventRecord(filled, in));
    ASSERT_OK(orStreamWaitEvent(out, filled));
    ASSERT_OK(orMemcpyAsync(got + i * SIZE, p, SIZE, orMemcpyDeviceToHost, out));
    ASSERT_OK(orEventRecord(read, out));
    ASSERT_OK(orStreamWaitEvent(in, read));
  }
  ASSERT_ERROR(orStreamQuery(out), orErrorNotReady);
  ASSERT_OK(orEventSignal(gate, orSuccess));
  ASSERT_OK(orEventSynchronize(read));
  ASSERT_MEM(got, sent, STEPS * SIZE);
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_OK(orFree(p));
}

typedef struct Scale {
  float *values;
  int count;
  orError_t mapped;
} Scale;

static orError_t doubleThem(void *args) {
  Scale **scale = args;
  void *address = NULL;
  (*scale)->mapped =
      orMapForKernel(&address, (*scale)->values, (size_t)(*scale)->count * sizeof(float));
  if ((*scale)->mapped) return orSuccess;
  for (int i = 0; i < (*scale)->count; ++i) ((float *)address)[i] *= 2;
  return orSuccess;
}

VENDOR_TEST(kernels_map_memory) {
  float values[4] = {1, 2, 3, 4};
  Scale scale = {allocOn(1, sizeof(values)), 4, orSuccess}, *args = &scale;
  orStream_t stream;
  ASSERT_OK(orStreamGetDefault(&stream, 1));
  ASSERT_OK(orMemcpy(scale.values, values, sizeof(values), orMemcpyHostToDevice));
  orAccess access = {scale.values, sizeof(values), 1};
  orLaunch launch = {.size = sizeof(launch),
                     .stream = stream,
                     .fn = doubleThem,
                     .args = &args,
                     .args_size = sizeof(args),
                     .accesses = &access,
                     .access_count = 1,
                     .name = "double"};
  ASSERT_OK(orLaunchKernelEx(&launch));
  ASSERT_OK(orStreamSynchronize(stream));
  ASSERT_ERROR(scale.mapped, maps ? orSuccess : orErrorNotSupported);
  ASSERT_OK(orMemcpy(values, scale.values, sizeof(values), orMemcpyDeviceToHost));
  for (int i = 0; i < 4; ++i) ASSERT_NEAR(values[i], (i + 1) * (maps ? 2 : 1), 0);
  ASSERT_OK(orFree(scale.values));
}

static orError_t countUp(void *args) {
  atomic_fetch_add((atomic_int *)args, 1);
  return orSuccess;
}

VENDOR_TEST(compute) {
  (void)maps;
  atomic_int ran = 0;
  orDevice *device = NULL;
  orKernel kernel = {countUp, &ran, "count_up"};
  ASSERT_OK(orGetDeviceByName(&device, "/openreg:1"));
  for (int i = 0; i < 10; ++i) ASSERT_OK(orDeviceCompute(device, &kernel, OR_STREAM_DEFAULT));
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orDeviceSynchronize());
  ASSERT_EQ(ran, 10);
}

static orError_t failWithCause(void *cause) {
  orSetFailureCause(cause, free);
  return orErrorLaunchFailure;
}

VENDOR_TEST(kernel_that_fails_at_once_keeps_its_cause) {
  (void)maps;
  void *cause = malloc(1);
  orDevice *device = NULL;
  orKernel kernel = {failWithCause, cause, "fails"};
  ASSERT_OK(orGetDeviceByName(&device, "/openreg:0"));
  ASSERT_OK(orDeviceCompute(device, &kernel, OR_STREAM_DEFAULT));
  ASSERT_ERROR(orDeviceSynchronize(), orErrorLaunchFailure);
  ASSERT(orTakeFailureCause(NULL) == cause);
  free(cause);
}

VENDOR_TEST(capacity) {
  (void)maps;
  enum { PIECE = 128 << 20 };
  void *pieces[8], *extra = NULL;
  size_t unused, total;
  for (int i = 0; i < 8; ++i) pieces[i] = allocOn(0, PIECE);
  ASSERT_ERROR(orMalloc(&extra, 4096), orErrorMemoryAllocation);
  ASSERT_OK(orMemGetInfo(&unused, &total));
  ASSERT_EQ(unused, 0);
  for (int i = 0; i < 8; i += 2) ASSERT_OK(orFree(pieces[i]));
  extra = allocOn(0, 4ul * PIECE); /* holes in the addresses cost no memory */
  ASSERT_OK(orMemset((char *)extra + 4ul * PIECE - 10, 1, 10));
  ASSERT_OK(orFree(extra));
  for (int i = 1; i < 8; i += 2) ASSERT_OK(orFree(pieces[i]));
}

static volatile char *forbidden;
static void touch(void) {
  signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would print */
  (void)forbidden[0];
}

VENDOR_TEST(memory_is_not_the_hosts) {
  (void)maps;
  forbidden = allocOn(0, 4096);
  ASSERT_OK(orMemset((void *)forbidden, 1, 4096));
  int status = forkAndRun(touch);
  ASSERT(WIFSIGNALED(status));
  ASSERT_EQ(WTERMSIG(status), SIGSEGV);
}

VENDOR_TEST(make_tensor) {
  (void)maps;
  static const int64_t shape[1] = {3};
  static const int32_t values[3] = {1, -2, 3};
  int32_t back[3];
  orTensorProto proto = {orInt32, 1, shape, values, sizeof(values)};
  orTensor tensor = {.size = sizeof tensor};
  orDevice *device = NULL;
  ASSERT_OK(orGetDeviceByName(&device, "/openreg:1"));
  ASSERT_OK(orDeviceMakeTensor(device, &proto, 0, &tensor));
  ASSERT_OK(orMemcpy(back, tensor.data, sizeof(back), orMemcpyDeviceToHost));
  ASSERT_MEM(back, values, sizeof(values));
  ASSERT_OK(orFree(tensor.data));
}

/* libvendor_abi.so was compiled with tests/c/abi/openreg.h, the first header that has to stay
 * compatible. */
TEST(plugin_of_the_first_header) {
  useVendor("libvendor_abi.so");
  vendor_copies(1);
  vendor_order_on_a_stream(1);
  vendor_kernels_map_memory(1);
  vendor_compute(1);
}

/* ---- The OpenCL driver. The first run compiles its kernels, which PoCL then keeps. ---- */

enum { OPENCL_LIMIT = 300 };

static void useOpencl(void) {
  if (!hasPlugin("libopencl.so")) SKIP("the driver is built where OpenCL is, for two builds");
  setenv("OPENREG_DEVICE_COUNT", "2", 1); /* which share the hardware */
  useVendor("libopencl.so");
}

TEST_WITH_LIMIT(plugin_opencl_memory_and_order, OPENCL_LIMIT) {
  orDeviceProperties properties = {.size = sizeof properties};
  useOpencl();
  ASSERT_OK(orGetDeviceProperties(&properties, 1));
  ASSERT_STR(properties.factory, "OpenCL");
  ASSERT_EQ(properties.can_map, 0);
  ASSERT_GE(properties.major, 1);
  ASSERT_NE(properties.model[0], 0);
  vendor_copies(0);
  vendor_set(0);
  vendor_order_on_a_stream(0);
  vendor_events_order_streams(0);
  vendor_kernels_map_memory(0);
  vendor_compute(0);
  vendor_make_tensor(0);
}

static const orOperatorKernel *operatorNamed(const char *name) {
  const orOperatorKernel *kernels;
  size_t count;
  ASSERT_OK(orGetOperatorKernels(&kernels, &count));
  for (size_t i = 0; i < count; i++)
    if (!strcmp(kernels[i].name, name)) return &kernels[i];
  ASSERT_STR(name, "an operator of the driver");
  return NULL;
}

/* Runs a call on a stream of device 1 and returns what the next synchronisation returns. */
static orError_t runOperator(const char *name, const orArgument *arguments, size_t count,
                             const orOperatorTensor *result) {
  orOperatorCall call = {.kernel = operatorNamed(name),
                         .stream = newStreamOn(1),
                         .argument_count = count,
                         .arguments = arguments,
                         .result_count = 1,
                         .results = result};
  int accepts;
  ASSERT_OK(orAcceptsOperator(&accepts, &call));
  ASSERT_EQ(accepts, 1);
  ASSERT_OK(orLaunchOperator(&call, NULL, NULL, NULL, NULL));
  return orStreamSynchronize(call.stream);
}

static void *sendTo(int device, const void *bytes, size_t size) {
  void *p = allocOn(device, size);
  ASSERT_OK(orMemcpy(p, bytes, size, orMemcpyHostToDevice));
  return p;
}

/* By whole tiles, by tiles of a packed factor, and by single elements. */
TEST_WITH_LIMIT(plugin_opencl_product, OPENCL_LIMIT) {
  enum { M = 36, N = 64, K = 20 };
  static float a[M * K], b[K * N], c[M * N];
  useOpencl();
  for (int i = 0; i < M * K; i++) a[i] = (float)(i % 7 - 3);
  for (int i = 0; i < K * N; i++) b[i] = (float)(i % 5 - 2);
  void *there[3] = {sendTo(1, a, sizeof a), sendTo(1, b, sizeof b), sendTo(1, c, sizeof c)};
  for (int way = 0; way < 3; way++) {
    int64_t rows = way == 2 ? M - 1 : M, columns = way == 2 ? N - 1 : N;
    int64_t result[2] = {rows, columns}, from[2] = {rows, K}, by[2] = {K, columns};
    int64_t strides[3][2] = {{K, 1}, {way ? 1 : N, way ? K : 1}, {columns, 1}};
    orOperatorTensor t[3] = {{there[0], orFloat32, 2, rows * K, from, strides[0]},
                             {there[1], orFloat32, 2, K * columns, by, strides[1]},
                             {there[2], orFloat32, 2, rows * columns, result, strides[2]}};
    orArgument arguments[2] = {{.kind = orArgumentTensor, .count = 1, .value.tensors = &t[0]},
                               {.kind = orArgumentTensor, .count = 1, .value.tensors = &t[1]}};
    ASSERT_OK(runOperator("aten::mm", arguments, 2, &t[2]));
    ASSERT_OK(orMemcpy(c, there[2], sizeof c, orMemcpyDeviceToHost));
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        float sum = 0;
        for (int64_t k = 0; k < K; k++)
          sum += a[i * K + k] * b[k * strides[1][0] + j * strides[1][1]];
        ASSERT_NEAR(c[i * columns + j], sum, 0);
      }
  }
}

/* A row is added to each row of a transposed matrix, of other dtypes; integers stay exact. */
TEST_WITH_LIMIT(plugin_opencl_pointwise, OPENCL_LIMIT) {
  enum { ROWS = 3, COLUMNS = 5 };
  static const int64_t size[] = {ROWS, COLUMNS}, across[] = {1, ROWS}, row[] = {COLUMNS},
                       one[] = {1}, dense[] = {COLUMNS, 1};
  int64_t matrix[ROWS * COLUMNS], added[COLUMNS], sums[ROWS * COLUMNS];
  useOpencl();
  for (int i = 0; i < ROWS * COLUMNS; i++) matrix[i] = (INT64_C(1) << 60) + i;
  for (int i = 0; i < COLUMNS; i++) added[i] = -i;
  orOperatorTensor t[3] = {
      {sendTo(1, matrix, sizeof matrix), orInt64, 2, ROWS * COLUMNS, size, across},
      {sendTo(1, added, sizeof added), orInt64, 1, COLUMNS, row, one},
      {allocOn(1, sizeof sums), orInt64, 2, ROWS * COLUMNS, size, dense}};
  orArgument arguments[3] = {{.kind = orArgumentTensor, .count = 1, .value.tensors = &t[0]},
                             {.kind = orArgumentTensor, .count = 1, .value.tensors = &t[1]},
                             {.kind = orArgumentInt, .value.integer = 2}};
  ASSERT_OK(runOperator("aten::add.Tensor", arguments, 3, &t[2]));
  ASSERT_OK(orMemcpy(sums, t[2].data, sizeof sums, orMemcpyDeviceToHost));
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++)
      ASSERT_EQ(sums[i * COLUMNS + j], matrix[j * ROWS + i] + 2 * added[j]);
}

TEST_WITH_LIMIT(plugin_opencl_index_out_of_bounds, OPENCL_LIMIT) {
  static const int64_t rows[] = {3, 2}, dense[] = {2, 1}, one[] = {1}, result[] = {1, 2};
  static const float table[6] = {1, 2, 3, 4, 5, 6};
  useOpencl();
  void *from = sendTo(1, table, sizeof table), *to = allocOn(1, 2 * sizeof(float));
  for (int64_t index = 2; index < 4; index++) {
    orOperatorTensor t[3] = {{from, orFloat32, 2, 6, rows, dense},
                             {sendTo(1, &index, sizeof index), orInt64, 1, 1, one, one},
                             {to, orFloat32, 2, 2, result, dense}};
    orArgument arguments[5] = {{.kind = orArgumentTensor, .count = 1, .value.tensors = &t[0]},
                               {.kind = orArgumentTensor, .count = 1, .value.tensors = &t[1]}};
    float got[2];
    orError_t error = runOperator("aten::embedding", arguments, 5, &t[2]);
    if (index == 3) {
      ASSERT_REFUSED(error, orErrorLaunchFailure, "index 3 is out of bounds: 0 to 2");
      continue;
    }
    ASSERT_OK(error);
    ASSERT_OK(orMemcpy(got, to, sizeof got, orMemcpyDeviceToHost));
    ASSERT_MEM(got, table + 4, sizeof got);
  }
}

/* Copies wait behind a gate that never opens, and one is running: leaving is quiet all the same. */
HELPER(plugin_leave_with_queued_copies) {
  useVendor("libvendor.so");
  void *p = allocOn(1, BIG), *pinned = NULL;
  orStream_t stream, gated;
  orEvent_t gate;
  ASSERT_OK(orMallocHost(&pinned, BIG));
  ASSERT_OK(orSetDevice(1));
  ASSERT_OK(orStreamCreate(&stream));
  ASSERT_OK(orStreamCreate(&gated));
  ASSERT_OK(orEventCreateWithFlags(&gate, orEventExternal));
  ASSERT_OK(orStreamWaitEvent(gated, gate));
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK(orMemcpyAsync(p, pinned, BIG, orMemcpyHostToDevice, stream));
    ASSERT_OK(orMemcpyAsync(p, pinned, BIG, orMemcpyHostToDevice, gated));
  }
}

TEST_WITH_LIMIT(plugin_vendor_exit_with_queued_work, 60) {
  char text[TEST_MAX_TEXT];
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(runHelper("plugin_leave_with_queued_copies", text, sizeof(text)), 0);
    ASSERT_STR(text, "");
  }
}
