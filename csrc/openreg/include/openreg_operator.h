/*
 * A device's own kernels for PyTorch's operators.
 *
 * The table of the device factory has a list of kernels, each with the name of an operator.
 * orLaunchOperator queues a call as one task of its stream, and nothing is copied to the host. For
 * an operator without a kernel of its own, or a call that the kernel does not accept, PyTorch's
 * kernel for the CPU works on the device's memory, or without `map` on copies in host memory.
 *
 * An operator has a name for each of its forms: "aten::add.Tensor" makes its result, "aten::add_.
 * Tensor" writes its first argument, "aten::add.out" writes its last one. `results` are what the
 * call writes in each of them, so that one function can serve all three.
 *
 * The sizes of the structures are fixed by OPENREG_ABI_VERSION.
 */
#ifndef OPENREG_OPERATOR_H
#define OPENREG_OPERATOR_H

#include "openreg.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A view of device memory, with sizes and strides in elements. */
typedef struct orOperatorTensor {
  void *data; /* the first element, an address of `alloc` plus an offset; null without elements */
  orDtype dtype;
  int ndim; /* -1: there is no tensor, as for a gradient that is not needed */
  int64_t numel;
  const int64_t *sizes;
  const int64_t *strides;
} orOperatorTensor;

typedef enum orArgumentKind {
  orArgumentNone,
  orArgumentTensor,
  orArgumentTensors, /* a list; a member may be no tensor (ndim -1) */
  orArgumentInt,     /* also of a dtype (orDtype; -1 for one without a name here) */
  orArgumentFloat,
  orArgumentBool,
  orArgumentInts,
  orArgumentFloats,
  orArgumentBools,
  orArgumentText,
  orArgumentSeed /* in place of a generator: another number for each call */
} orArgumentKind;

/* A tensor without dimensions in host memory is passed as its number. */
typedef struct orArgument {
  orArgumentKind kind;
  size_t count; /* of a list */
  union {
    const orOperatorTensor *tensors; /* the one tensor, or those of the list */
    int64_t integer;                 /* also of a bool */
    double number;
    const int64_t *integers; /* also of bools */
    const double *numbers;
    const char *text;
    uint64_t seed;
  } value;
} orArgument;

/* The call and all that it points to stay as they are until the kernel has finished: until `run`
 * returns or, after orErrorNotReady, until the kernel has signalled `done`. */
typedef struct orOperatorCall {
  const struct orOperatorKernel *kernel; /* the entry of the table */
  orStream_t stream;
  size_t argument_count;
  const orArgument *arguments; /* in the order of the operator's schema, defaults included */
  size_t result_count;
  const orOperatorTensor *results; /* allocated; memory of arguments in place and for out= */
} orOperatorCall;

typedef struct orOperatorKernel {
  const char *name; /* with namespace and overload, such as "aten::add.Tensor" */
  /* Optional; null accepts every call. Whether `run` can do this call: dtypes, strides, values of
   * numbers. Called on the thread that calls the operator, with the GIL. Must not wait; the tensors
   * have no contents yet. */
  int (*accepts)(void *device, const orOperatorCall *call);
  /* Runs inside a task, in the order of the stream, as `copy` of the factory does. */
  orError_t (*run)(void *device, const orOperatorCall *call, orEvent_t done);
  const void *data; /* the factory's own */
} orOperatorKernel;

/* The kernels of the factory that makes the devices of type "openreg"; none for the simulated
 * one. */
OR_API orError_t orGetOperatorKernels(const orOperatorKernel **kernels, size_t *count);

/* Whether the device of the call's stream has `call->kernel` in its table and the kernel accepts
 * the call. */
OR_API orError_t orAcceptsOperator(int *accepts, const orOperatorCall *call);

/* Queues the kernel of `call`, which must be an entry of the device's table, as a task with this
 * name, that of the operator that the program calls; null is the kernel's. `drop(owner)` is called
 * once, when the call is no longer used. On failure nothing is queued, unless `*queued` is 1, as
 * for orLaunchKernelEx. The sanitizer gets the accesses from orSanitizerAccess. */
OR_API orError_t orLaunchOperator(const orOperatorCall *call, const char *name, void *owner,
                                  void (*drop)(void *owner), int *queued);

#ifdef __cplusplus
}
#endif

#endif
