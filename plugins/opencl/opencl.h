/*
 * Devices, memory and jobs on queues, for both files of the driver.
 */
#pragma once

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "openreg_operator.h"

enum { MAX_QUEUES = 64 };

typedef struct Queue {
  orStream_t stream;
  cl_command_queue queue;
  cl_mem scratch;
  size_t scratch_bytes;
} Queue;

typedef struct Device {
  cl_device_id id;
  pthread_mutex_t lock; /* guards `queues` and `queue_count` */
  Queue queues[MAX_QUEUES];
  int queue_count;
} Device;

/* All devices share the context, so that a copy between two of them is one command. */
extern cl_context theContext;
extern bool hasDoubles; /* on all devices */

/* Where an address is: its buffer and the offset there. */
typedef struct Place {
  cl_mem buffer;
  size_t offset;
} Place;
bool findPlace(const void *ptr, Place *place);

/* The in-order queue of the running task's stream. */
cl_int taskQueue(Device *device, cl_command_queue *queue);

/* Memory of that queue, of `bytes` bytes at least: commands write it and read it again in the order
 * of the queue. One thread at a time may ask for it and queue such commands. */
cl_int taskScratch(Device *device, size_t bytes, cl_mem *scratch);

/* Maps an error of OpenCL, with a text that names the call. */
orError_t failed(const char *call, cl_int error);

/* For a command that is not followed further: waits for it and releases its event. */
void giveUp(cl_event event);

/* Completes `done` when the event has, and releases the event. `bad`: a buffer of the call with two
 * longs, of which the first is not 0 if an index was out of bounds and the second is that index;
 * null: there is none. `limit` is for the message. Returns what the function of the table
 * returns. */
orError_t completeLater(const char *call, cl_command_queue queue, cl_event event, orEvent_t done,
                        cl_mem bad, int64_t limit);

extern const orOperatorKernel openclOperators[];
extern const size_t openclOperatorCount;
/* The program of the kernels, built at the first use. */
orError_t buildProgram(const cl_device_id *devices, cl_uint count);
