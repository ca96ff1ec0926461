/*
 * libopenreg: faults on order, so that a program's way out of a failure can be tested.
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
  /* orCacheMalloc, orMalloc: orErrorMemoryAllocation, after all was tried */
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
  uint64_t after;    /* so many are spared first; 0: the very next */
  uint64_t delay_ns; /* of orFaultSlowStream, at most OR_FAULT_MAX_DELAY_NS; 0 for the others */
} orFault;

#define OR_FAULT_MAX_DELAY_NS UINT64_C(10000000000)

typedef struct orFaultOutcome {
  size_t size;        /* sizeof(orFaultOutcome) */
  uint64_t fired;     /* operations that it struck: at most one, but for orFaultSlowStream */
  char operation[96]; /* the first of them: "aten::add", "Memcpy HtoD", "allocation of 512 bytes" */
} orFaultOutcome;

/* Arms it. orErrorAlreadyExists while one of its kind is there on its device. Several kinds may
 * be. */
OR_API orError_t orFaultInject(const orFault *fault);
/* orErrorNotFound where there is none; a fault that has struck is there until it is removed. */
OR_API orError_t orFaultGetOutcome(orFaultOutcome *outcome, orFaultKind kind, int device);
/* What has been struck and is still queued fails all the same. */
OR_API orError_t orFaultRemove(orFaultKind kind, int device);

#ifdef __cplusplus
}
#endif

#endif
