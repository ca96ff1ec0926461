/*
 * Injected faults: operations that fail on purpose, to test how a program handles a failure.
 *
 * A fault is armed on a device for one of its next operations. Operations are counted on the host,
 * in the order of the calls, whatever runs when: the same program fails at the same place each
 * time.
 */
#ifndef OPENREG_FAULT_H
#define OPENREG_FAULT_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum orFaultKind {
  /* orCacheMalloc, orMalloc: orErrorMemoryAllocation, after everything that frees memory was
   * tried */
  orFaultOutOfMemory = 0,
  orFaultCopyError = 1, /* copies, fills and kernels named "aten::copy_": an asynchronous failure */
  orFaultKernelError = 2, /* all other kernels: the same */
  orFaultDeviceLost = 3,  /* kernels, copies and fills: orErrorDeviceLost */
  orFaultSlowStream = 4   /* kernels, copies and fills: each starts later, and is right */
} orFaultKind;

/* "out_of_memory", "copy_error", ... ; null past the last kind. */
OR_API const char *orFaultName(int kind);

typedef struct orFault {
  size_t size; /* sizeof(orFault) */
  orFaultKind kind;
  int device;        /* a task is its stream's; an allocation inside a task is not counted */
  uint64_t after;    /* operations that are spared first */
  uint64_t delay_ns; /* of orFaultSlowStream, at most OR_FAULT_MAX_DELAY_NS; 0 for the others */
} orFault;

#define OR_FAULT_MAX_DELAY_NS UINT64_C(10000000000)

typedef struct orFaultOutcome {
  size_t size;        /* sizeof(orFaultOutcome) */
  uint64_t fired;     /* operations that failed: at most one, but for orFaultSlowStream */
  char operation[96]; /* the first of them: "aten::add", "Memcpy HtoD", "allocation of 512 bytes" */
  int thread;         /* that called it, as gettid() returns it */
} orFaultOutcome;

/* Arms the fault. orErrorAlreadyExists if one of the same kind is armed on its device. Several
 * kinds can be armed at once. */
OR_API orError_t orFaultInject(const orFault *fault);
/* What the fault has done so far. orErrorNotFound if there is none. A fault that has fired stays
 * until it is removed. */
OR_API orError_t orFaultGetOutcome(orFaultOutcome *outcome, orFaultKind kind, int device);
/* Removes the fault. A queued operation that it was injected into still fails. */
OR_API orError_t orFaultRemove(orFaultKind kind, int device);

#ifdef __cplusplus
}
#endif

#endif
