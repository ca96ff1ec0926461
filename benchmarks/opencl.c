/*
 * The OpenCL calls of plugins/opencl without PyTorch: benchmarks/opencl.py runs this program beside
 * the driver.
 *
 *     opencl FOLDER        that of the driver's parameters.h and kernels.cl
 *
 * A line of stdin is a name and a count. The answer is a line with the seconds that a command took
 * the host, and with those until all have finished, each divided by the count.
 */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "parameters.h"

#define CHECK(call)                                            \
  do {                                                         \
    cl_int check_ = (call);                                    \
    if (check_) {                                              \
      fprintf(stderr, "%s: OpenCL error %d\n", #call, check_); \
      exit(1);                                                 \
    }                                                          \
  } while (0)

enum { SIDE = 1024, FACTOR = SIDE * SIDE * sizeof(float), COPIED = 64 << 20, F32 = 7 };

static cl_device_id device;
static cl_context context;
static cl_command_queue queue;
static cl_kernel empty, packRows, packColumns, tiles;
static cl_mem memory, other;
static char *host;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- Commands ---- */

static void CL_CALLBACK onComplete(cl_event event, cl_int status, void *data) {
  (void)status, (void)data;
  clReleaseEvent(event);
}

static cl_event enqueueEmpty(void) {
  static const size_t one = 1;
  cl_event event;
  CHECK(clEnqueueNDRangeKernel(queue, empty, 1, NULL, &one, &one, 0, NULL, &event));
  return event;
}

static void launch(void) {
  CHECK(clSetEventCallback(enqueueEmpty(), CL_COMPLETE, onComplete, NULL));
  CHECK(clFlush(queue));
}

/* Each begins when the one before has finished, as the tasks of a stream do. */
static void launchInTurn(void) {
  cl_event event = enqueueEmpty();
  CHECK(clWaitForEvents(1, &event));
  CHECK(clReleaseEvent(event));
}

static void upload(void) {
  CHECK(clEnqueueWriteBuffer(queue, memory, CL_FALSE, 0, COPIED, host, 0, NULL, NULL));
}
static void download(void) {
  CHECK(clEnqueueReadBuffer(queue, memory, CL_FALSE, 0, COPIED, host, 0, NULL, NULL));
}
static void move(void) {
  CHECK(clEnqueueCopyBuffer(queue, memory, other, 0, 0, COPIED, 0, NULL, NULL));
}

static void run(cl_kernel kernel, size_t x, size_t y) {
  const size_t global[3] = {x, y, 1}, local[3] = {16, 4, 1};
  CHECK(clEnqueueNDRangeKernel(queue, kernel, 3, NULL, global, local, 0, NULL, NULL));
}

static void multiply(void) {
  run(packRows, SIDE, SIDE / TILE_ROWS);
  run(packColumns, SIDE, SIDE / TILE_COLUMNS);
  run(tiles, SIDE / TILE_ROWS, SIDE / TILE_COLUMNS);
}

static const struct {
  const char *name;
  void (*run)(void);
} commands[] = {{"launch", launch}, {"launch-in-turn", launchInTurn},
                {"upload", upload}, {"download", download},
                {"move", move},     {"multiply", multiply}};

/* ---- Kernels ---- */

static void readFile(const char *folder, const char *name, char *text, size_t room) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "r");
  if (!file) {
    perror(path);
    exit(1);
  }
  text[fread(text, 1, room - 1, file)] = 0;
  fclose(file);
}

static cl_program build(const char *text) {
  cl_int error;
  cl_program program = clCreateProgramWithSource(context, 1, &text, NULL, &error);
  CHECK(error);
  CHECK(clBuildProgram(program, 1, &device, "", NULL, NULL));
  return program;
}

static cl_kernel create(cl_program program, const char *name, cl_uint buffers,
                        const void *parameters, size_t bytes) {
  cl_int error;
  cl_kernel kernel = clCreateKernel(program, name, &error);
  CHECK(error);
  for (cl_uint i = 0; i < buffers; i++) CHECK(clSetKernelArg(kernel, i, sizeof memory, &memory));
  if (bytes) CHECK(clSetKernelArg(kernel, buffers, bytes, parameters));
  return kernel;
}

/* The factors are the first parts of the buffer. The packed ones and the result follow. */
static void createKernels(const char *folder) {
  static char text[1 << 18];
  empty = create(build("__kernel void empty() {}"), "empty", 0, NULL, 0);
  readFile(folder, "parameters.h", text, sizeof text);
  readFile(folder, "kernels.cl", text + strlen(text), sizeof text - strlen(text));
  cl_program program = build(text);
  Panels rows = {.to = 2 * FACTOR,
                 .dtype = F32,
                 .stride = {0, SIDE, 1},
                 .batch = 1,
                 .lines = SIDE,
                 .k = SIDE,
                 .width = TILE_ROWS};
  Panels columns = rows;
  columns.from = FACTOR;
  columns.to = 3 * FACTOR;
  columns.stride[1] = 1, columns.stride[2] = SIDE;
  columns.width = TILE_COLUMNS;
  Product product = {.a = 2 * FACTOR,
                     .b = 3 * FACTOR,
                     .c = 4 * FACTOR,
                     .dtype = F32,
                     .batch = 1,
                     .m = SIDE,
                     .n = SIDE,
                     .k = SIDE,
                     .c_stride = {0, SIDE, 1},
                     .alpha = 1};
  packRows = create(program, "pack", 2, &rows, sizeof rows);
  packColumns = create(program, "pack", 2, &columns, sizeof columns);
  tiles = create(program, "product_tiles", 4, &product, sizeof product);
}

static void prepare(const char *folder) {
  cl_platform_id platform;
  cl_int errors[4];
  CHECK(clGetPlatformIDs(1, &platform, NULL));
  CHECK(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
  context = clCreateContext(NULL, 1, &device, NULL, NULL, &errors[0]);
  queue = clCreateCommandQueue(context, device, CL_QUEUE_PROFILING_ENABLE, &errors[1]);
  memory = clCreateBuffer(context, CL_MEM_READ_WRITE, COPIED, NULL, &errors[2]);
  other = clCreateBuffer(context, CL_MEM_READ_WRITE, COPIED, NULL, &errors[3]);
  for (int i = 0; i < 4; i++) CHECK(errors[i]);
  host = malloc(COPIED);
  memset(host, 1, COPIED);
  createKernels(folder);
}

static void measure(size_t command, int count) {
  double begin = now();
  for (int i = 0; i < count; i++) commands[command].run();
  double queued = now();
  CHECK(clFinish(queue));
  printf("%.9f %.9f\n", (queued - begin) / count, (now() - begin) / count);
  fflush(stdout);
}

int main(int argc, char **argv) {
  char name[32];
  int count;
  if (argc != 2) return 2;
  prepare(argv[1]);
  while (scanf("%31s %d", name, &count) == 2)
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
      if (!strcmp(name, commands[i].name)) measure(i, count);
  return 0;
}
