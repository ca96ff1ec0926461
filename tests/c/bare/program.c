/*
 * The runtime linked without its tools: streams, events, memory, copies, reset. It leaves
 * nothing behind, which a leak checker sees.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "openreg.h"

enum { COUNT = 1000 };

#define CHECK(call)                                                \
  do {                                                             \
    orError_t error_ = (call);                                     \
    if (error_) {                                                  \
      fprintf(stderr, "%s: %s\n", #call, orGetLastErrorMessage()); \
      exit(1);                                                     \
    }                                                              \
  } while (0)

static orError_t increment(void *args) {
  void *address;
  orError_t error = orMapForKernel(&address, *(void **)args, COUNT);
  for (int i = 0; !error && i < COUNT; i++) ((char *)address)[i]++;
  return error;
}

int main(void) {
  char bytes[COUNT], back[COUNT] = {0};
  void *device;
  orStream_t first, second;
  orEvent_t event;
  memset(bytes, 7, sizeof bytes);
  CHECK(orStreamCreate(&first));
  CHECK(orStreamCreate(&second));
  CHECK(orEventCreate(&event));
  CHECK(orCacheMalloc(&device, COUNT, first));
  CHECK(orMemcpyAsync(device, bytes, COUNT, orMemcpyHostToDevice, first));
  CHECK(orLaunchKernelEx(&(orLaunch){.size = sizeof(orLaunch),
                                     .stream = first,
                                     .fn = increment,
                                     .args = &device,
                                     .args_size = sizeof device,
                                     .name = "increment"}));
  CHECK(orEventRecord(event, first));
  CHECK(orStreamWaitEvent(second, event));
  CHECK(orMemcpyAsync(back, device, COUNT, orMemcpyDeviceToHost, second));
  CHECK(orEventSynchronize(event));
  CHECK(orDeviceSynchronize());
  CHECK(orCacheFree(device));
  CHECK(orEventDestroy(event));
  CHECK(orStreamDestroy(first));
  CHECK(orStreamDestroy(second));
  CHECK(orDeviceReset());
  for (int i = 0; i < COUNT; i++)
    if (back[i] != 8) return 1;
  puts("8");
  return 0;
}
