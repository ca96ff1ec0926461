/*
 * The driver's kernels for PyTorch's operators: for each entry of the table whether it accepts a
 * call, and how its command is queued.
 *
 * Operators on each element are described by a text with a letter for each argument of the schema:
 * t is read as an operand, s is a number (the first is x, the second y), - is not read, g is the
 * generator, e the text that chooses between two forms.
 *
 * A cl_kernel has its arguments until the command is queued: each is used under its lock.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opencl.h"
#include "parameters.h"

/* ---- The program ---- */

__asm__(
    ".section .rodata\n"
    "programText:\n"
    ".incbin \"parameters.h\"\n"
    ".incbin \"kernels.cl\"\n"
    ".byte 0\n"
    ".previous\n");
extern const char programText[] __attribute__((visibility("hidden")));

typedef enum Kernel {
  POINTWISE_F,
  POINTWISE_D,
  POINTWISE_L,
  POINTWISE_F32,
  REDUCE_F,
  REDUCE_D,
  REDUCE_L,
  PRODUCT_D,
  PACK,
  PRODUCT_TILES,
  SOFTMAX,
  SOFTMAX_BACKWARD,
  LAYER_NORM,
  LAYER_NORM_INPUT,
  LAYER_NORM_WEIGHT,
  TAKE_ROWS,
  ADD_ROWS,
  NLL_LOSS,
  NLL_LOSS_BACKWARD,
  CONVOLVE,
  CONVOLVE_INPUT,
  CONVOLVE_WEIGHT,
  CONVOLVE_BIAS,
  MAX_POOL,
  MAX_POOL_INPUT,
  KERNELS
} Kernel;

static const char *const kernelNames[KERNELS] = {
    "pointwise_f",    "pointwise_d",      "pointwise_l",       "pointwise_f32",
    "reduce_f",       "reduce_d",         "reduce_l",          "product_d",
    "pack",           "product_tiles",    "softmax",           "softmax_backward",
    "layer_norm",     "layer_norm_input", "layer_norm_weight", "take_rows",
    "add_rows",       "nll_loss",         "nll_loss_backward", "convolve",
    "convolve_input", "convolve_weight",  "convolve_bias",     "max_pool",
    "max_pool_input"};

static struct {
  pthread_mutex_t lock;
  cl_kernel kernel;
} kernels[KERNELS];

static void printBuildLog(cl_program program, cl_device_id device) {
  static char log[16384];
  clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
  fprintf(stderr, "openreg: the OpenCL kernels do not compile: %s\n", log);
}

orError_t buildProgram(const cl_device_id *devices, cl_uint count) {
  cl_int error;
  const char *text = programText;
  cl_program program = clCreateProgramWithSource(theContext, 1, &text, NULL, &error);
  if (error) return orErrorSystem;
  if (clBuildProgram(program, count, devices, "", NULL, NULL)) {
    printBuildLog(program, devices[0]);
    return orErrorNotSupported;
  }
  for (int i = 0; i < KERNELS; i++) {
    if (!hasDoubles && (i == POINTWISE_D || i == REDUCE_D || i == PRODUCT_D)) continue;
    pthread_mutex_init(&kernels[i].lock, NULL);
    kernels[i].kernel = clCreateKernel(program, kernelNames[i], &error);
    if (error) return orErrorSystem;
  }
  clReleaseProgram(program);
  return orSuccess;
}

/* ---- Commands ---- */

enum { MOST_BUFFERS = 8 };

typedef struct Command {
  Kernel kernel;
  cl_mem buffers[MOST_BUFFERS];
  int buffer_count;
  const void *parameters; /* the last argument */
  size_t parameter_bytes;
  size_t global[3], local; /* of a dimension; 0: the usual one */
  int dims;
} Command;

static cl_int setArguments(cl_kernel kernel, const Command *c) {
  cl_int error = CL_SUCCESS;
  for (int i = 0; i < c->buffer_count && !error; i++)
    error = clSetKernelArg(kernel, (cl_uint)i, sizeof(cl_mem), &c->buffers[i]);
  if (!error)
    error = clSetKernelArg(kernel, (cl_uint)c->buffer_count, c->parameter_bytes, c->parameters);
  return error;
}

/* The work groups of a kernel have one size, because OpenCL may compile a kernel for each size. */
static void divide(const Command *c, size_t *global, size_t *local) {
  static const size_t usual[2][3] = {{64, 1, 1}, {16, 4, 1}};
  for (int d = 0; d < 3; d++) {
    local[d] = c->local ? c->local : usual[c->dims > 1][d];
    global[d] = (c->global[d] + local[d] - 1) / local[d] * local[d];
  }
}

static cl_int enqueue(cl_command_queue queue, const Command *c, cl_event *event) {
  cl_kernel kernel = kernels[c->kernel].kernel;
  size_t global[3], local[3];
  divide(c, global, local);
  pthread_mutex_lock(&kernels[c->kernel].lock);
  cl_int error = setArguments(kernel, c);
  if (!error)
    error = clEnqueueNDRangeKernel(queue, kernel, (cl_uint)c->dims, NULL, global, local, 0, NULL,
                                   event);
  pthread_mutex_unlock(&kernels[c->kernel].lock);
  return error;
}

static orError_t run(Device *device, const Command *c, orEvent_t done, cl_mem bad, int64_t limit) {
  cl_command_queue queue;
  cl_event event;
  const char *name = kernelNames[c->kernel];
  cl_int error = taskQueue(device, &queue);
  if (!error) error = enqueue(queue, c, &event);
  if (!error) return completeLater(name, queue, event, done, bad, limit);
  if (bad) clReleaseMemObject(bad);
  return failed(name, error);
}

/* Adds a tensor's buffer, and returns the offset of its first element. Without elements any buffer
 * will do, as for an operand that is a number: `instead`. */
static bool addBuffer(Command *c, const orOperatorTensor *t, cl_mem instead, uint64_t *offset) {
  Place place = {instead, 0};
  if (t && t->ndim >= 0 && t->data && !findPlace(t->data, &place)) return false;
  c->buffers[c->buffer_count++] = place.buffer;
  *offset = place.offset;
  return place.buffer != NULL;
}

static orError_t notFound(void) {
  orSetTaskErrorMessage("a tensor is not memory of an OpenCL device");
  return orErrorInvalidValue;
}

/* ---- Tensors ---- */

static bool isReal(orDtype dtype) { return dtype != orComplex64 && dtype != orComplex128; }
static bool isFloating(orDtype d) {
  return d == orFloat32 || d == orFloat64 || d == orFloat16 || d == orBfloat16;
}
static bool fits(const orOperatorTensor *t) {
  for (int d = 0; d < t->ndim; d++)
    if (t->strides[d] > INT32_MAX) return false;
  return isReal(t->dtype) && t->numel <= INT32_MAX && (hasDoubles || t->dtype != orFloat64);
}

static bool isContiguous(const orOperatorTensor *t) {
  int64_t expected = 1;
  for (int d = t->ndim - 1; d >= 0; d--) {
    if (t->sizes[d] != 1 && t->strides[d] != expected) return false;
    expected *= t->sizes[d];
  }
  return true;
}

static const orOperatorTensor *tensorAt(const orOperatorCall *call, size_t i) {
  const orArgument *a = &call->arguments[i];
  return a->kind == orArgumentTensor ? a->value.tensors : NULL;
}
static int64_t intAt(const orOperatorCall *call, size_t i) {
  return call->arguments[i].value.integer;
}
static bool isNumber(const orArgument *a) {
  return a->kind == orArgumentInt || a->kind == orArgumentFloat || a->kind == orArgumentBool;
}
static double numberOf(const orArgument *a) {
  return a->kind == orArgumentFloat ? a->value.number : (double)a->value.integer;
}
static int64_t integerOf(const orArgument *a) {
  return a->kind == orArgumentFloat ? (int64_t)a->value.number : a->value.integer;
}

/* ---- One work item for each element ---- */

/* exact: has a form for integers. */
typedef struct PointwiseEntry {
  enum PointwiseOp op;
  const char *arguments;
  bool exact;
} PointwiseEntry;

typedef struct Operands {
  const orArgument *read[OPERANDS];
  int count;
} Operands;

static void setNumber(Pointwise *p, int which, const orArgument *a) {
  *(which ? &p->y : &p->x) = numberOf(a);
  *(which ? &p->iy : &p->ix) = integerOf(a);
}

/* The bounds of clamp that are not given. */
static void setNoNumber(Pointwise *p, int which) {
  *(which ? &p->y : &p->x) = which ? INFINITY : -INFINITY;
}

/* Reads the arguments as the entry describes them; false for a kind that it does not expect. */
static bool readArguments(const orOperatorCall *call, const PointwiseEntry *entry, Pointwise *p,
                          Operands *operands) {
  int numbers = 0;
  *operands = (Operands){.count = 1};
  *p = (Pointwise){.op = (int32_t)entry->op, .x = 1, .ix = 1};
  for (size_t i = 0; entry->arguments[i]; i++) {
    const orArgument *a = &call->arguments[i];
    switch (entry->arguments[i]) {
      case 't':
        if (a->kind != orArgumentTensor && !isNumber(a)) return false;
        operands->read[operands->count++] = a;
        break;
      case 's':
        if (isNumber(a))
          setNumber(p, numbers++, a);
        else if (a->kind == orArgumentNone)
          setNoNumber(p, numbers++);
        else
          return false;
        break;
      case 'g':
        p->seed = a->value.seed;
        break;
      case 'e':
        if (a->kind == orArgumentText && !strcmp(a->value.text, "tanh")) p->op++;
        break;
      default:
        break;
    }
  }
  return true;
}

/* Strides of a tensor as if it had the sizes of the result; false if it does not broadcast. */
static bool broadcast(const orOperatorTensor *t, const orOperatorTensor *result, int64_t *strides) {
  int shift = result->ndim - t->ndim;
  if (shift < 0) return false;
  for (int d = 0; d < result->ndim; d++) {
    int64_t size = d < shift ? 1 : t->sizes[d - shift];
    if (size != 1 && size != result->sizes[d]) return false;
    strides[d] = size == 1 ? 0 : t->strides[d - shift];
  }
  return true;
}

enum { MOST_GIVEN = 16 };

/* Joins dimensions that follow each other without a gap in every operand; false if too many
 * stay. */
static bool collapse(Pointwise *p, const orOperatorTensor *result,
                     int64_t strides[OPERANDS][MOST_GIVEN], int operands) {
  int n = 0;
  for (int d = 0; d < result->ndim; d++) {
    if (result->sizes[d] == 1) continue;
    bool joins = n > 0;
    for (int o = 0; o < operands && joins; o++)
      joins = p->stride[o][n - 1] == strides[o][d] * result->sizes[d];
    if (!joins && n == MOST_DIMS) return false;
    if (!joins) p->size[n++] = 1;
    p->size[n - 1] *= (uint32_t)result->sizes[d];
    for (int o = 0; o < operands; o++) p->stride[o][n - 1] = (int32_t)strides[o][d];
  }
  if (n == 0) p->size[n++] = 1;
  p->ndim = n;
  return true;
}

/* The value that the dtype, float16 or bfloat16, has for a number. */
static double rounded(double value, orDtype dtype) {
  bool half = dtype == orFloat16;
  int exponent, least = half ? -13 : -125, digits = half ? 11 : 8;
  if (!isfinite(value)) return value;
  frexp(value, &exponent);
  if (exponent < least) exponent = least;
  double result = ldexp(nearbyint(ldexp(value, digits - exponent)), exponent - digits);
  double limit = half ? 65504 : 0x1.FEp127;
  return fabs(result) > limit ? copysign(INFINITY, result) : result;
}

static int64_t wrapped(int64_t value, orDtype dtype) {
  switch (dtype) {
    case orUint8:
      return (uint8_t)value;
    case orInt8:
      return (int8_t)value;
    case orInt16:
      return (int16_t)value;
    case orInt32:
      return (int32_t)value;
    default:
      return value;
  }
}

/* PyTorch casts a number to the dtype of the tensor that it is compared with, unless its kind is
 * higher. Elsewhere the result's dtype does that. */
static void castCompared(Pointwise *p, const Operands *operands) {
  if (p->op < EQ || p->op > GE) return;
  for (int o = 1; o <= 2; o++) {
    orDtype other = (orDtype)p->dtype[3 - o];
    if (!isNumber(operands->read[o]) || p->dtype[3 - o] < 0) continue;
    if (other == orFloat16 || other == orBfloat16)
      p->number[o] = rounded(p->number[o], other);
    else if (operands->read[o]->kind != orArgumentFloat)
      p->integer[o] = wrapped(p->integer[o], other);
  }
}

static bool describe(Pointwise *p, const Operands *operands, const orOperatorTensor *result) {
  int64_t strides[OPERANDS][MOST_GIVEN] = {{0}};
  if (!fits(result) || result->ndim > MOST_GIVEN) return false;
  p->dtype[0] = (int32_t)result->dtype;
  broadcast(result, result, strides[0]);
  for (int o = 1; o < OPERANDS; o++) {
    const orArgument *a = o < operands->count ? operands->read[o] : NULL;
    p->dtype[o] = -1;
    if (!a) continue;
    p->number[o] = isNumber(a) ? numberOf(a) : 0;
    p->integer[o] = isNumber(a) ? integerOf(a) : 0;
    if (isNumber(a)) continue;
    const orOperatorTensor *t = a->value.tensors;
    if (!fits(t) || !broadcast(t, result, strides[o])) return false;
    p->dtype[o] = (int32_t)t->dtype;
  }
  castCompared(p, operands);
  /* The CPU has `alpha` in the result's dtype. */
  bool half = result->dtype == orFloat16 || result->dtype == orBfloat16;
  if (half && (p->op == ADD || p->op == SUB || p->op == RSUB)) p->x = rounded(p->x, result->dtype);
  return collapse(p, result, strides, OPERANDS);
}

/* Which form computes: the widest kind among the operands and numbers decides. */
static Kernel formOf(const orOperatorCall *call, const PointwiseEntry *entry, const Pointwise *p,
                     const Operands *operands) {
  bool wide = p->dtype[0] == (int32_t)orFloat64, floating = isFloating((orDtype)p->dtype[0]);
  bool same = p->ndim == 1 && p->dtype[0] == (int32_t)orFloat32;
  bool tensors = false; /* of a floating dtype */
  for (int o = 1; o < operands->count; o++) {
    const orArgument *a = operands->read[o];
    wide |= p->dtype[o] == (int32_t)orFloat64;
    tensors |= p->dtype[o] >= 0 && isFloating((orDtype)p->dtype[o]);
    floating |= tensors || a->kind == orArgumentFloat;
    same &= p->dtype[o] < 0 || p->dtype[o] == (int32_t)orFloat32;
  }
  for (size_t i = 0; entry->arguments[i]; i++)
    floating |= entry->arguments[i] == 's' && call->arguments[i].kind == orArgumentFloat;
  /* An integer result takes no fraction from a number. */
  if (!tensors && !isFloating((orDtype)p->dtype[0]) && p->dtype[0] != (int32_t)orBool)
    floating = false;
  if (!floating && entry->exact) return POINTWISE_L;
  if (wide) return POINTWISE_D;
  return same ? POINTWISE_F32 : POINTWISE_F;
}

/* The CPU computes in the operands' dtype, and converts what it got to that of the result. The form
 * for integers has 64 bits, which differs where the operands have fewer. */
static bool convertsIntegers(const PointwiseEntry *entry, const Pointwise *p,
                             const Operands *operands) {
  bool tensors = false;
  for (int o = 1; o < operands->count; o++) {
    if (operands->read[o]->kind == orArgumentFloat) return false;
    if (p->dtype[o] >= 0 && isFloating((orDtype)p->dtype[o])) return false;
    tensors |= p->dtype[o] >= 0;
  }
  return tensors && entry->exact && entry->op != COPY && isFloating((orDtype)p->dtype[0]);
}

static int acceptsPointwise(void *device, const orOperatorCall *call) {
  (void)device;
  const PointwiseEntry *entry = call->kernel->data;
  Pointwise p;
  Operands operands;
  if (call->result_count != 1 || !readArguments(call, entry, &p, &operands)) return 0;
  if (!describe(&p, &operands, call->results)) return 0;
  if (convertsIntegers(entry, &p, &operands)) return 0;
  Kernel form = formOf(call, entry, &p, &operands);
  /* An integer result of an operator without a form for integers. */
  return form == POINTWISE_L || entry->exact || isFloating(call->results->dtype) ||
         call->results->dtype == orBool;
}

static orError_t runPointwise(void *device, const orOperatorCall *call, orEvent_t done) {
  const PointwiseEntry *entry = call->kernel->data;
  const orOperatorTensor *result = call->results;
  Pointwise p;
  Operands operands;
  if (result->numel == 0) return orSuccess;
  readArguments(call, entry, &p, &operands);
  describe(&p, &operands, result);
  Command c = {.kernel = formOf(call, entry, &p, &operands),
               .parameters = &p,
               .parameter_bytes = sizeof p,
               .global = {(size_t)result->numel},
               .dims = 1};
  p.count = (uint32_t)result->numel;
  if (!addBuffer(&c, result, NULL, &p.offset[0])) return notFound();
  for (int o = 1; o < OPERANDS; o++) {
    bool reads = o < operands.count && operands.read[o]->kind == orArgumentTensor;
    const orOperatorTensor *t = reads ? operands.read[o]->value.tensors : NULL;
    if (!addBuffer(&c, t, c.buffers[0], &p.offset[o])) return notFound();
  }
  return run(device, &c, done, NULL, 0);
}

/* ---- Reductions ---- */

/* dims: the argument with the dimensions, 0: all of them; keep: the argument that keeps them. */
typedef struct ReductionEntry {
  enum ReductionOp op;
  bool mean;
  size_t dims, keep;
} ReductionEntry;

/* Bit d: dimension d is reduced. */
static uint32_t reducedDims(const orOperatorCall *call, const ReductionEntry *entry, int ndim) {
  const orArgument *a = entry->dims ? &call->arguments[entry->dims] : NULL;
  uint32_t bits = 0;
  if (!a || a->kind == orArgumentNone || (a->kind == orArgumentInts && a->count == 0))
    return (1u << ndim) - 1;
  size_t count = a->kind == orArgumentInts ? a->count : 1;
  for (size_t i = 0; i < count; i++) {
    int64_t d = a->kind == orArgumentInts ? a->value.integers[i] : a->value.integer;
    bits |= 1u << (d < 0 ? d + ndim : d);
  }
  return bits;
}

static bool describeReduction(Reduction *r, const orOperatorCall *call) {
  const ReductionEntry *entry = call->kernel->data;
  const orOperatorTensor *from = tensorAt(call, 0), *to = call->results;
  if (!from || call->result_count != 1 || !fits(from) || !fits(to) || from->ndim > MOST_DIMS)
    return false;
  /* With an empty list of dimensions `all` and `any` reduce none, and other operators all. */
  const orArgument *dims = entry->dims ? &call->arguments[entry->dims] : NULL;
  bool none = dims && dims->kind == orArgumentInts && dims->count == 0;
  if (none && (entry->op == ALL || entry->op == ANY)) return false;
  uint32_t bits = reducedDims(call, entry, from->ndim);
  bool keeps = to->ndim == from->ndim;
  *r = (Reduction){.from_dtype = (int32_t)from->dtype,
                   .to_dtype = (int32_t)to->dtype,
                   .op = (int32_t)entry->op,
                   .count = 1,
                   .scale = 1};
  for (int d = 0, out = 0; d < from->ndim; d++) {
    if (bits >> d & 1) {
      r->in_size[r->in_dims] = (uint32_t)from->sizes[d];
      r->in_stride[r->in_dims++] = (int32_t)from->strides[d];
      r->count *= (uint32_t)from->sizes[d];
      out += keeps;
    } else {
      r->out_size[r->out_dims] = (uint32_t)from->sizes[d];
      r->kept_stride[r->out_dims] = (int32_t)from->strides[d];
      r->out_stride[r->out_dims++] = (int32_t)to->strides[out++];
    }
  }
  if (entry->mean) r->scale = 1.0 / r->count;
  return true;
}

static Kernel reductionForm(const Reduction *r) {
  if (r->from_dtype == orFloat64 || r->to_dtype == orFloat64) return REDUCE_D;
  bool sumsFloats = isFloating((orDtype)r->to_dtype) || isFloating((orDtype)r->from_dtype);
  return sumsFloats ? REDUCE_F : REDUCE_L;
}

static int acceptsReduction(void *device, const orOperatorCall *call) {
  (void)device;
  Reduction r;
  if (!describeReduction(&r, call)) return 0;
  /* Elements are cast to the result's dtype before they are added, which the kernels do not do. */
  bool adds = r.op == SUM || r.op == PROD || r.op == NORM;
  bool toFloating = isFloating((orDtype)r.to_dtype);
  bool casts = r.to_dtype == orBool || (isFloating((orDtype)r.from_dtype) && !toFloating);
  if (adds && casts) return 0;
  /* Without elements there is no first one. */
  return r.count > 0 || r.op == SUM;
}

/* linalg_vector_norm(self, ord, dim, keepdim, dtype) */
static int acceptsNorm(void *device, const orOperatorCall *call) {
  return isFloating(call->results->dtype) && isNumber(&call->arguments[1]) &&
         numberOf(&call->arguments[1]) == 2 && acceptsReduction(device, call);
}

static orError_t runReduction(void *device, const orOperatorCall *call, orEvent_t done) {
  enum { GROUP = 32 };
  Reduction r;
  if (call->results->numel == 0) return orSuccess;
  describeReduction(&r, call);
  Command c = {.kernel = reductionForm(&r),
               .parameters = &r,
               .parameter_bytes = sizeof r,
               .global = {(size_t)call->results->numel * GROUP},
               .local = GROUP,
               .dims = 1};
  if (!addBuffer(&c, call->results, NULL, &r.to)) return notFound();
  if (!addBuffer(&c, tensorAt(call, 0), c.buffers[0], &r.from)) return notFound();
  return run(device, &c, done, NULL, 0);
}

/* ---- Products ---- */

/* The strides of batch, rows and columns. */
static void strideOf(const orOperatorTensor *t, int32_t *strides) {
  int first = 3 - t->ndim;
  for (int d = 0; d < 3; d++) strides[d] = d < first ? 0 : (int32_t)t->strides[d - first];
}

static const orOperatorTensor *factor(const orOperatorCall *call, int which) {
  bool adds = call->kernel->data != NULL;
  return tensorAt(call, (size_t)which + (adds ? 1 : 0));
}

static bool describeProduct(Product *p, const orOperatorCall *call) {
  const orOperatorTensor *a = factor(call, 0), *b = factor(call, 1), *c = call->results;
  bool adds = call->kernel->data != NULL;
  const orOperatorTensor *bias = adds ? tensorAt(call, 0) : NULL;
  if (!a || !b || call->result_count != 1 || (adds && !bias)) return false;
  if (!fits(a) || !fits(b) || !fits(c) || !isFloating(c->dtype)) return false;
  if (a->dtype != c->dtype || b->dtype != c->dtype || a->ndim != c->ndim) return false;
  *p = (Product){.dtype = (int32_t)c->dtype,
                 .batch = c->ndim == 3 ? (uint32_t)c->sizes[0] : 1,
                 .m = (uint32_t)c->sizes[c->ndim - 2],
                 .n = (uint32_t)c->sizes[c->ndim - 1],
                 .k = (uint32_t)a->sizes[a->ndim - 1],
                 .alpha = 1};
  strideOf(a, p->a_stride);
  strideOf(b, p->b_stride);
  strideOf(c, p->c_stride);
  if (!adds) return true;
  int64_t strides[MOST_GIVEN];
  if (bias->dtype != c->dtype || !broadcast(bias, c, strides)) return false;
  for (int d = 0; d < c->ndim; d++) p->bias_stride[3 - c->ndim + d] = (int32_t)strides[d];
  p->has_bias = 1;
  p->beta = numberOf(&call->arguments[3]);
  p->alpha = numberOf(&call->arguments[4]);
  return true;
}

static int acceptsProduct(void *device, const orOperatorCall *call) {
  (void)device;
  Product p;
  return describeProduct(&p, call);
}

static size_t panelsOf(const Panels *p) { return (p->lines + p->width - 1) / p->width; }
static size_t bytesOf(const Panels *p) {
  return p->batch * panelsOf(p) * p->width * p->k * sizeof(float);
}

static cl_int pack(cl_command_queue queue, cl_mem from, cl_mem to, const Panels *p) {
  if (p->k == 0) return CL_SUCCESS;
  Command c = {.kernel = PACK,
               .buffers = {to, from},
               .buffer_count = 2,
               .parameters = p,
               .parameter_bytes = sizeof *p,
               .global = {p->k, panelsOf(p), p->batch},
               .dims = 3};
  return enqueue(queue, &c, NULL);
}

/* Queues a product of floats, with the buffers of c, a, b and the bias. */
static cl_int enqueueTiles(Device *device, cl_command_queue queue, Product *p, Command *command,
                           cl_event *event) {
  const int32_t *a = p->a_stride, *b = p->b_stride;
  Panels rows = {.from = p->a,
                 .dtype = p->dtype,
                 .stride = {a[0], a[1], a[2]},
                 .batch = p->batch,
                 .lines = p->m,
                 .k = p->k,
                 .width = TILE_ROWS};
  Panels columns = rows;
  columns.from = p->b;
  columns.stride[0] = b[0], columns.stride[1] = b[2], columns.stride[2] = b[1];
  columns.lines = p->n;
  columns.width = TILE_COLUMNS;
  columns.to = bytesOf(&rows);
  cl_mem packed;
  cl_int error = taskScratch(device, bytesOf(&rows) + bytesOf(&columns), &packed);
  if (!error) error = pack(queue, command->buffers[1], packed, &rows);
  if (!error) error = pack(queue, command->buffers[2], packed, &columns);
  if (error) return error;
  command->buffers[1] = command->buffers[2] = packed;
  p->a = rows.to;
  p->b = columns.to;
  command->kernel = PRODUCT_TILES;
  command->global[0] = panelsOf(&rows);
  command->global[1] = panelsOf(&columns);
  return enqueue(queue, command, event);
}

static orError_t runProduct(void *device, const orOperatorCall *call, orEvent_t done) {
  static pthread_mutex_t scratchLock = PTHREAD_MUTEX_INITIALIZER;
  Product p;
  cl_command_queue queue;
  cl_event event;
  if (call->results->numel == 0) return orSuccess;
  describeProduct(&p, call);
  Command c = {.kernel = PRODUCT_D,
               .parameters = &p,
               .parameter_bytes = sizeof p,
               .global = {p.n, p.m, p.batch},
               .dims = 3};
  if (!addBuffer(&c, call->results, NULL, &p.c) ||
      !addBuffer(&c, factor(call, 0), c.buffers[0], &p.a) ||
      !addBuffer(&c, factor(call, 1), c.buffers[0], &p.b) ||
      !addBuffer(&c, p.has_bias ? tensorAt(call, 0) : NULL, c.buffers[0], &p.bias))
    return notFound();
  if (p.dtype == orFloat64) return run(device, &c, done, NULL, 0);
  cl_int error = taskQueue(device, &queue);
  if (error) return failed("clCreateCommandQueue", error);
  pthread_mutex_lock(&scratchLock);
  error = enqueueTiles(device, queue, &p, &c, &event);
  pthread_mutex_unlock(&scratchLock);
  if (error) return failed("product", error);
  return completeLater("product", queue, event, done, NULL, 0);
}

/* ---- Rows ---- */

static bool isPlain(const orOperatorTensor *t, orDtype dtype) {
  return t && fits(t) && t->dtype == dtype && isContiguous(t);
}
static bool isOptional(const orOperatorTensor *t, orDtype dtype) { return !t || isPlain(t, dtype); }
/* The kernels of rows compute in float. */
static bool isFloat(const orOperatorTensor *t) {
  return isFloating(t->dtype) && t->dtype != orFloat64;
}
static bool isIndex(const orOperatorTensor *t) {
  return t && fits(t) && isContiguous(t) && (t->dtype == orInt64 || t->dtype == orInt32);
}

/* Sizes before, of, and after a dimension. */
static void splitAt(Rows *p, const orOperatorTensor *t, int64_t dim) {
  if (dim < 0) dim += t->ndim;
  p->outer = p->count = p->inner = 1;
  for (int d = 0; d < t->ndim; d++) {
    uint32_t *part = d < dim ? &p->outer : d == dim ? &p->count : &p->inner;
    *part *= (uint32_t)t->sizes[d];
  }
}

static Command rowsCommand(Kernel kernel, Rows *p, size_t items) {
  p->items = (uint32_t)items;
  return (Command){.kernel = kernel,
                   .parameters = p,
                   .parameter_bytes = sizeof *p,
                   .global = {items},
                   .dims = 1};
}

static int acceptsSoftmax(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *in = tensorAt(call, 0), *out = call->results;
  return call->result_count == 1 && isPlain(out, out->dtype) && isPlain(in, out->dtype) &&
         isFloat(out);
}

/* data: 1 for the logarithm. */
static orError_t runSoftmax(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results;
  Rows p = {.dtype = (int32_t)out->dtype, .op = call->kernel->data != NULL};
  if (out->numel == 0) return orSuccess;
  splitAt(&p, out, intAt(call, 1));
  Command c = rowsCommand(SOFTMAX, &p, (size_t)p.outer * p.inner);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

static int acceptsSoftmaxBackward(void *device, const orOperatorCall *call) {
  const orOperatorTensor *out = call->results;
  return acceptsSoftmax(device, call) && isPlain(tensorAt(call, 1), out->dtype);
}

static orError_t runSoftmaxBackward(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results;
  Rows p = {.dtype = (int32_t)out->dtype, .op = call->kernel->data != NULL};
  if (out->numel == 0) return orSuccess;
  splitAt(&p, out, intAt(call, 2));
  Command c = rowsCommand(SOFTMAX_BACKWARD, &p, (size_t)p.outer * p.inner);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]) ||
      !addBuffer(&c, tensorAt(call, 1), NULL, &p.offset[2]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

/* The elements of the last dimensions, which `shape` lists. */
static int64_t normalized(const orArgument *shape) {
  int64_t count = 1;
  for (size_t i = 0; i < shape->count; i++) count *= shape->value.integers[i];
  return count;
}

/* native_layer_norm(input, shape, weight, bias, eps) */
static int acceptsLayerNorm(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *in = tensorAt(call, 0), *out = call->results;
  return call->result_count == 3 && isFloat(out) && out->numel > 0 && isPlain(out, out->dtype) &&
         isPlain(in, out->dtype) && isPlain(&out[1], out->dtype) && isPlain(&out[2], out->dtype) &&
         isOptional(tensorAt(call, 2), out->dtype) && isOptional(tensorAt(call, 3), out->dtype);
}

static orError_t runLayerNorm(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results, *weight = tensorAt(call, 2);
  const orOperatorTensor *bias = tensorAt(call, 3);
  Rows p = {.dtype = (int32_t)out->dtype,
            .count = (uint32_t)normalized(&call->arguments[1]),
            .x = numberOf(&call->arguments[4]),
            .flag = {0, 0, weight != NULL, bias != NULL}};
  Command c = rowsCommand(LAYER_NORM, &p, (size_t)out->numel / p.count);
  bool found = addBuffer(&c, out, NULL, &p.offset[0]);
  for (int i = 1; i < 3 && found; i++) found = addBuffer(&c, &out[i], NULL, &p.offset[i]);
  found = found && addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[3]) &&
          addBuffer(&c, weight, c.buffers[0], &p.offset[4]) &&
          addBuffer(&c, bias, c.buffers[0], &p.offset[5]);
  return found ? run(device, &c, done, NULL, 0) : notFound();
}

/* native_layer_norm_backward(grad, input, shape, mean, rstd, weight, bias, mask) */
static int acceptsLayerNormBackward(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *grad = tensorAt(call, 0);
  if (call->result_count != 3 || !grad || !isFloat(grad) || grad->numel == 0) return 0;
  for (int i = 0; i < 3; i++)
    if (call->results[i].ndim >= 0 && !isPlain(&call->results[i], grad->dtype)) return 0;
  return isPlain(grad, grad->dtype) && isPlain(tensorAt(call, 1), grad->dtype) &&
         isPlain(tensorAt(call, 3), grad->dtype) && isPlain(tensorAt(call, 4), grad->dtype) &&
         isOptional(tensorAt(call, 5), grad->dtype);
}

static bool addStatistics(Command *c, Rows *p, const orOperatorCall *call,
                          const orOperatorTensor *result) {
  return addBuffer(c, result, NULL, &p->offset[0]) &&
         addBuffer(c, tensorAt(call, 0), NULL, &p->offset[1]) &&
         addBuffer(c, tensorAt(call, 1), NULL, &p->offset[2]) &&
         addBuffer(c, tensorAt(call, 3), NULL, &p->offset[3]) &&
         addBuffer(c, tensorAt(call, 4), NULL, &p->offset[4]);
}

/* Queues one of the three gradients, in place of the event of the one before. */
static cl_int enqueueGradient(Device *device, const Command *c, cl_command_queue *queue,
                              cl_event *event) {
  cl_event before = *event;
  cl_int error = taskQueue(device, queue);
  if (!error) error = enqueue(*queue, c, event);
  if (error && before)
    giveUp(before);
  else if (before)
    clReleaseEvent(before);
  return error;
}

static orError_t runLayerNormBackward(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *weight = tensorAt(call, 5);
  cl_command_queue queue = NULL;
  cl_event event = NULL;
  for (int i = 0; i < 3; i++) {
    const orOperatorTensor *result = &call->results[i];
    if (result->ndim < 0) continue;
    Rows p = {.dtype = (int32_t)tensorAt(call, 0)->dtype,
              .op = i == 2,
              .count = (uint32_t)normalized(&call->arguments[2]),
              .flag = {0, 0, weight != NULL}};
    p.outer = (uint32_t)(tensorAt(call, 0)->numel / p.count);
    Command c = rowsCommand(i ? LAYER_NORM_WEIGHT : LAYER_NORM_INPUT, &p, i ? p.count : p.outer);
    if (!addStatistics(&c, &p, call, result)) return notFound();
    if (!i && !addBuffer(&c, weight, c.buffers[0], &p.offset[5])) return notFound();
    cl_int error = enqueueGradient(device, &c, &queue, &event);
    if (error) return failed("native_layer_norm_backward", error);
  }
  return event ? completeLater("native_layer_norm_backward", queue, event, done, NULL, 0)
               : orSuccess;
}

/* ---- Indices ---- */

/* The buffer in which a kernel notes an index that is out of bounds. */
static cl_mem badBuffer(cl_int *error) {
  int64_t none[2] = {0, 0};
  return clCreateBuffer(theContext, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof none, none,
                        error);
}

static orError_t runChecked(Device *device, Command *c, orEvent_t done, int64_t limit) {
  cl_int error;
  cl_mem bad = badBuffer(&error);
  if (error) return failed("clCreateBuffer", error);
  c->buffers[c->buffer_count++] = bad;
  return run(device, c, done, bad, limit);
}

/* Where the arguments are; dim -1: 0. negative: indices count from the end too. */
typedef struct TakeEntry {
  int from, index, dim;
  bool negative;
} TakeEntry;
static const TakeEntry embeddingEntry = {0, 1, -1, false}, selectEntry = {0, 2, 1, false},
                       indexEntry = {0, 1, -1, true};

static const orOperatorTensor *indexOf(const orOperatorCall *call, const TakeEntry *entry) {
  const orArgument *a = &call->arguments[entry->index];
  bool one = a->kind == orArgumentTensor || (a->kind == orArgumentTensors && a->count == 1);
  return one && a->value.tensors->ndim >= 0 ? a->value.tensors : NULL;
}

static int acceptsTake(void *device, const orOperatorCall *call) {
  (void)device;
  const TakeEntry *entry = call->kernel->data;
  const orOperatorTensor *from = tensorAt(call, (size_t)entry->from), *out = call->results;
  bool known = out->dtype != orFloat64 && out->dtype != orInt8 && out->dtype != orInt16;
  return call->result_count == 1 && known && isPlain(out, out->dtype) &&
         isPlain(from, out->dtype) && from->ndim > 0 && isIndex(indexOf(call, entry));
}

static orError_t runTake(void *device, const orOperatorCall *call, orEvent_t done) {
  const TakeEntry *entry = call->kernel->data;
  const orOperatorTensor *from = tensorAt(call, (size_t)entry->from), *out = call->results;
  const orOperatorTensor *index = indexOf(call, entry);
  Rows p = {.dtype = (int32_t)out->dtype,
            .index_dtype = (int32_t)index->dtype,
            .flag = {entry->negative}};
  if (out->numel == 0) return orSuccess;
  splitAt(&p, from, entry->dim < 0 ? 0 : intAt(call, (size_t)entry->dim));
  p.limit = p.count;
  p.count = (uint32_t)index->numel;
  Command c = rowsCommand(TAKE_ROWS, &p, (size_t)out->numel);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) || !addBuffer(&c, from, c.buffers[0], &p.offset[1]) ||
      !addBuffer(&c, index, c.buffers[0], &p.offset[2]))
    return notFound();
  return runChecked(device, &c, done, p.limit);
}

/* embedding_dense_backward(grad, indices, rows, padding, scale by frequency) */
static int acceptsAddRows(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *out = call->results;
  return call->result_count == 1 && isPlain(out, out->dtype) && isFloat(out) &&
         out->dtype == orFloat32 && isPlain(tensorAt(call, 0), out->dtype) &&
         isIndex(tensorAt(call, 1)) && !intAt(call, 4);
}

static orError_t runAddRows(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results, *index = tensorAt(call, 1);
  cl_command_queue queue;
  cl_uchar zero = 0;
  Rows p = {.dtype = (int32_t)out->dtype,
            .index_dtype = (int32_t)index->dtype,
            .count = (uint32_t)index->numel,
            .limit = intAt(call, 2),
            .other = intAt(call, 3)};
  if (out->numel == 0) return orSuccess;
  p.inner = (uint32_t)(out->numel / p.limit);
  Command c = rowsCommand(ADD_ROWS, &p, p.inner);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), c.buffers[0], &p.offset[1]) ||
      !addBuffer(&c, index, c.buffers[0], &p.offset[2]))
    return notFound();
  cl_int error = taskQueue(device, &queue);
  if (!error)
    error = clEnqueueFillBuffer(queue, c.buffers[0], &zero, 1, p.offset[0],
                                (size_t)out->numel * sizeof(float), 0, NULL, NULL);
  if (error) return failed("clEnqueueFillBuffer", error);
  return runChecked(device, &c, done, p.limit);
}

/* nll_loss_forward(self, target, weight, reduction, ignored) */
static int acceptsLoss(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *in = tensorAt(call, 0), *out = call->results;
  return call->result_count == 2 && in && in->ndim == 2 && in->sizes[0] > 0 &&
         in->dtype == orFloat32 && isPlain(in, in->dtype) && isPlain(&out[0], in->dtype) &&
         isPlain(&out[1], in->dtype) && isIndex(tensorAt(call, 1)) &&
         isOptional(tensorAt(call, 2), in->dtype);
}

static orError_t runLoss(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *in = tensorAt(call, 0), *target = tensorAt(call, 1);
  const orOperatorTensor *weight = tensorAt(call, 2);
  Rows p = {.dtype = (int32_t)in->dtype,
            .index_dtype = (int32_t)target->dtype,
            .op = (int32_t)intAt(call, 3),
            .outer = (uint32_t)in->sizes[0],
            .limit = in->sizes[1],
            .other = intAt(call, 4),
            .flag = {0, 0, weight != NULL}};
  Command c = rowsCommand(NLL_LOSS, &p, p.op ? 1 : p.outer);
  if (!addBuffer(&c, &call->results[0], NULL, &p.offset[0]) ||
      !addBuffer(&c, &call->results[1], NULL, &p.offset[1]) ||
      !addBuffer(&c, in, NULL, &p.offset[2]) || !addBuffer(&c, target, NULL, &p.offset[3]) ||
      !addBuffer(&c, weight, c.buffers[0], &p.offset[4]))
    return notFound();
  return runChecked(device, &c, done, p.limit);
}

/* nll_loss_backward(grad, self, target, weight, reduction, ignored, total) */
static int acceptsLossBackward(void *device, const orOperatorCall *call) {
  (void)device;
  const orOperatorTensor *out = call->results, *grad = tensorAt(call, 0);
  return call->result_count == 1 && out->ndim == 2 && out->dtype == orFloat32 &&
         isPlain(out, out->dtype) && isPlain(grad, out->dtype) && isIndex(tensorAt(call, 2)) &&
         isOptional(tensorAt(call, 3), out->dtype) && isPlain(tensorAt(call, 6), out->dtype);
}

static orError_t runLossBackward(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results, *target = tensorAt(call, 2);
  const orOperatorTensor *weight = tensorAt(call, 3);
  Rows p = {.dtype = (int32_t)out->dtype,
            .index_dtype = (int32_t)target->dtype,
            .op = (int32_t)intAt(call, 4),
            .limit = out->sizes[1],
            .other = intAt(call, 5),
            .flag = {0, 0, weight != NULL}};
  if (out->numel == 0) return orSuccess;
  Command c = rowsCommand(NLL_LOSS_BACKWARD, &p, (size_t)out->numel);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]) ||
      !addBuffer(&c, target, NULL, &p.offset[2]) ||
      !addBuffer(&c, weight, c.buffers[0], &p.offset[3]) ||
      !addBuffer(&c, tensorAt(call, 6), NULL, &p.offset[4]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

/* ---- Windows ---- */

/* A list of one or two numbers for rows and columns; `otherwise` if it is empty. */
static void readPair(const orArgument *a, int32_t *pair, const int32_t *otherwise) {
  for (size_t d = 0; d < 2; d++)
    pair[d] = a->count ? (int32_t)a->value.integers[a->count == 1 ? 0 : d] : otherwise[d];
}

static bool isImage(const orOperatorTensor *t, orDtype dtype) {
  return isPlain(t, dtype) && t->ndim == 4 && t->numel > 0;
}

static void setImages(Window *p, const orOperatorTensor *in, const orOperatorTensor *out) {
  p->batch = (uint32_t)in->sizes[0];
  for (int d = 0; d < 2; d++) {
    p->in[d] = (uint32_t)in->sizes[d + 2];
    p->out[d] = (uint32_t)out->sizes[d + 2];
  }
}

/* `first`: the argument with the stride; padding, dilation, transposed, output padding and groups
 * follow. */
static bool describeConvolution(Window *p, const orOperatorCall *call, const orOperatorTensor *in,
                                const orOperatorTensor *weight, const orOperatorTensor *out,
                                size_t first) {
  static const int32_t one[2] = {1, 1};
  const orArgument *a = &call->arguments[first];
  if (!in || !isFloat(in) || !isImage(in, in->dtype) || !isImage(weight, in->dtype) ||
      !isImage(out, in->dtype) || a[3].value.integer)
    return false;
  *p = (Window){.dtype = (int32_t)in->dtype, .groups = (uint32_t)a[5].value.integer};
  readPair(&a[0], p->stride, one);
  readPair(&a[1], p->padding, one);
  readPair(&a[2], p->dilation, one);
  setImages(p, in, out);
  p->in_channels = (uint32_t)weight->sizes[1];
  p->out_channels = (uint32_t)weight->sizes[0] / p->groups;
  for (int d = 0; d < 2; d++) p->window[d] = (uint32_t)weight->sizes[d + 2];
  return true;
}

static Command windowCommand(Kernel kernel, Window *p, int64_t items) {
  p->items = (uint32_t)items;
  return (Command){.kernel = kernel,
                   .parameters = p,
                   .parameter_bytes = sizeof *p,
                   .global = {(size_t)items},
                   .dims = 1};
}

/* convolution(input, weight, bias, stride, padding, dilation, transposed, output padding,
 * groups) */
static int acceptsConvolution(void *device, const orOperatorCall *call) {
  (void)device;
  Window p;
  return call->result_count == 1 &&
         describeConvolution(&p, call, tensorAt(call, 0), tensorAt(call, 1), call->results, 3) &&
         isOptional(tensorAt(call, 2), call->results->dtype);
}

static orError_t runConvolution(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results, *bias = tensorAt(call, 2);
  Window p;
  describeConvolution(&p, call, tensorAt(call, 0), tensorAt(call, 1), out, 3);
  p.has_bias = bias != NULL;
  Command c = windowCommand(CONVOLVE, &p, out->numel);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]) ||
      !addBuffer(&c, tensorAt(call, 1), NULL, &p.offset[2]) ||
      !addBuffer(&c, bias, c.buffers[0], &p.offset[3]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

/* convolution_backward(grad, input, weight, bias sizes, stride and so on, mask) */
static int acceptsConvolutionBackward(void *device, const orOperatorCall *call) {
  (void)device;
  Window p;
  const orOperatorTensor *grad = tensorAt(call, 0), *in = tensorAt(call, 1);
  if (call->result_count != 3 || !describeConvolution(&p, call, in, tensorAt(call, 2), grad, 4))
    return 0;
  for (int i = 0; i < 3; i++)
    if (call->results[i].ndim >= 0 && !isPlain(&call->results[i], in->dtype)) return 0;
  return 1;
}

static orError_t runConvolutionBackward(void *device, const orOperatorCall *call, orEvent_t done) {
  cl_command_queue queue = NULL;
  cl_event event = NULL;
  for (int i = 0; i < 3; i++) {
    const orOperatorTensor *result = &call->results[i];
    Window p;
    if (result->ndim < 0) continue;
    describeConvolution(&p, call, tensorAt(call, 1), tensorAt(call, 2), tensorAt(call, 0), 4);
    Command c = windowCommand(CONVOLVE_INPUT + (Kernel)i, &p, result->numel);
    if (!addBuffer(&c, result, NULL, &p.offset[0]) ||
        !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]) ||
        (i < 2 && !addBuffer(&c, tensorAt(call, i ? 1 : 2), NULL, &p.offset[2])))
      return notFound();
    cl_int error = enqueueGradient(device, &c, &queue, &event);
    if (error) return failed("convolution_backward", error);
  }
  return event ? completeLater("convolution_backward", queue, event, done, NULL, 0) : orSuccess;
}

/* `first`: the argument with the window's sizes; stride, padding and dilation follow. */
static bool describePool(Window *p, const orOperatorCall *call, const orOperatorTensor *in,
                         const orOperatorTensor *out, const orOperatorTensor *places,
                         size_t first) {
  static const int32_t one[2] = {1, 1};
  const orArgument *a = &call->arguments[first];
  int32_t kernel[2];
  if (!in || !isFloat(in) || !isImage(in, in->dtype) || !isImage(out, in->dtype) ||
      !isImage(places, orInt64))
    return false;
  *p = (Window){.dtype = (int32_t)in->dtype};
  readPair(&a[0], kernel, one);
  readPair(&a[1], p->stride, kernel);
  readPair(&a[2], p->padding, one);
  readPair(&a[3], p->dilation, one);
  setImages(p, in, out);
  for (int d = 0; d < 2; d++) p->window[d] = (uint32_t)kernel[d];
  return true;
}

/* max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil mode) */
static int acceptsPool(void *device, const orOperatorCall *call) {
  (void)device;
  Window p;
  const orOperatorTensor *out = call->results;
  return call->result_count == 2 && describePool(&p, call, tensorAt(call, 0), out, &out[1], 1);
}

static orError_t runPool(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *out = call->results;
  Window p;
  describePool(&p, call, tensorAt(call, 0), out, &out[1], 1);
  Command c = windowCommand(MAX_POOL, &p, out->numel);
  if (!addBuffer(&c, out, NULL, &p.offset[0]) || !addBuffer(&c, &out[1], NULL, &p.offset[1]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[2]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

/* max_pool2d_with_indices_backward(grad, self, kernel and so on, ceil mode, indices) */
static int acceptsPoolBackward(void *device, const orOperatorCall *call) {
  (void)device;
  Window p;
  const orOperatorTensor *in = tensorAt(call, 1);
  return call->result_count == 1 && in && isPlain(call->results, in->dtype) &&
         describePool(&p, call, in, tensorAt(call, 0), tensorAt(call, 7), 2);
}

static orError_t runPoolBackward(void *device, const orOperatorCall *call, orEvent_t done) {
  const orOperatorTensor *in = tensorAt(call, 1);
  Window p;
  describePool(&p, call, in, tensorAt(call, 0), tensorAt(call, 7), 2);
  Command c = windowCommand(MAX_POOL_INPUT, &p, in->sizes[0] * in->sizes[1]);
  if (!addBuffer(&c, call->results, NULL, &p.offset[0]) ||
      !addBuffer(&c, tensorAt(call, 0), NULL, &p.offset[1]) ||
      !addBuffer(&c, tensorAt(call, 7), NULL, &p.offset[2]))
    return notFound();
  return run(device, &c, done, NULL, 0);
}

/* ---- Joining ---- */

/* cat(tensors, dim): a copy for each tensor, into its part of the result. data: stack, which has a
 * dimension more. */
static bool describePart(const orOperatorCall *call, const orOperatorTensor *t, int64_t at,
                         Pointwise *p) {
  const orOperatorTensor *out = call->results;
  int64_t dim = intAt(call, 1), sizes[MOST_GIVEN], strides[OPERANDS][MOST_GIVEN] = {{0}};
  bool stacks = call->kernel->data != NULL;
  if (dim < 0) dim += out->ndim;
  if (!fits(t) || out->ndim > MOST_GIVEN || t->ndim + stacks != out->ndim) return false;
  for (int d = 0; d < out->ndim; d++) {
    int from = stacks && d > dim ? d - 1 : d;
    bool added = stacks && d == dim;
    sizes[d] = added ? 1 : t->sizes[from];
    strides[0][d] = out->strides[d];
    strides[1][d] = added ? 0 : t->strides[from];
  }
  *p = (Pointwise){.op = COPY, .dtype = {(int32_t)out->dtype, (int32_t)t->dtype, -1, -1}};
  p->offset[0] = (uint64_t)(at * out->strides[dim]); /* in elements yet */
  orOperatorTensor part = *out;
  part.sizes = sizes;
  return collapse(p, &part, strides, OPERANDS);
}

/* The empty tensor of one dimension, which cat leaves out. */
static bool isLeftOut(const orOperatorTensor *t) { return t->numel == 0; }

static int64_t lengthOf(const orOperatorCall *call, const orOperatorTensor *t) {
  int64_t dim = intAt(call, 1);
  return call->kernel->data ? 1 : t->sizes[dim < 0 ? dim + t->ndim : dim];
}

static int acceptsJoin(void *device, const orOperatorCall *call) {
  (void)device;
  Pointwise p;
  const orArgument *list = &call->arguments[0];
  if (call->result_count != 1 || list->kind != orArgumentTensors || !fits(call->results)) return 0;
  for (size_t i = 0; i < list->count; i++) {
    const orOperatorTensor *t = &list->value.tensors[i];
    if (t->ndim < 0 || (!isLeftOut(t) && !describePart(call, t, 0, &p))) return 0;
  }
  return 1;
}

static orError_t runJoin(void *device, const orOperatorCall *call, orEvent_t done) {
  static const size_t bytes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1}; /* by orDtype */
  const orOperatorTensor *out = call->results;
  const orArgument *list = &call->arguments[0];
  cl_command_queue queue = NULL;
  cl_event event = NULL;
  int64_t at = 0;
  for (size_t i = 0; i < list->count; i++) {
    const orOperatorTensor *t = &list->value.tensors[i];
    Pointwise p;
    uint64_t offset;
    if (isLeftOut(t)) continue;
    describePart(call, t, at, &p);
    at += lengthOf(call, t);
    bool exact = !isFloating(out->dtype) && !isFloating(t->dtype);
    Command c = {.kernel = exact                     ? POINTWISE_L
                           : out->dtype == orFloat64 ? POINTWISE_D
                                                     : POINTWISE_F,
                 .parameters = &p,
                 .parameter_bytes = sizeof p,
                 .global = {(size_t)t->numel},
                 .dims = 1};
    if (!addBuffer(&c, out, NULL, &offset)) return notFound();
    p.count = (uint32_t)t->numel;
    p.offset[0] = offset + p.offset[0] * bytes[out->dtype];
    if (!addBuffer(&c, t, NULL, &p.offset[1])) return notFound();
    c.buffers[2] = c.buffers[3] = c.buffers[0];
    c.buffer_count = OPERANDS;
    cl_int error = enqueueGradient(device, &c, &queue, &event);
    if (error) return failed("cat", error);
  }
  return event ? completeLater("cat", queue, event, done, NULL, 0) : orSuccess;
}

/* ---- The table ---- */

#define POINT(name, ...)                                                                   \
  {                                                                                        \
    "aten::" name, acceptsPointwise, runPointwise, &(const PointwiseEntry) { __VA_ARGS__ } \
  }
/* A structured operator: its own form, in place, out=. */
#define POINT3(name, in_place, out, ...) \
  POINT(name, __VA_ARGS__), POINT(in_place, __VA_ARGS__), POINT(out, __VA_ARGS__)
#define UNARY(name, ...) POINT3(name, name "_", name ".out", __VA_ARGS__)
#define BINARY(name, ...) POINT3(name ".Tensor", name "_.Tensor", name ".out", __VA_ARGS__)
#define COMPARE(name, op)                                                      \
  POINT3(name ".Tensor", name "_.Tensor", name ".Tensor_out", op, "tt", true), \
      POINT3(name ".Scalar", name "_.Scalar", name ".Scalar_out", op, "tt", true)
#define REDUCE(name, ...)                                                                  \
  {                                                                                        \
    "aten::" name, acceptsReduction, runReduction, &(const ReductionEntry) { __VA_ARGS__ } \
  }
#define TRUTH(name, op)                                                           \
  REDUCE(name, op, false, 0, 0), REDUCE(name ".all_out", op, false, 0, 0),        \
      REDUCE(name ".dim", op, false, 1, 2), REDUCE(name ".out", op, false, 1, 2), \
      REDUCE(name ".dims", op, false, 1, 2), REDUCE(name ".dims_out", op, false, 1, 2)
static const ReductionEntry norm = {NORM, false, 2, 3};
static const bool yes = true;

const orOperatorKernel openclOperators[] = {
    POINT("copy_", COPY, "-t", true),
    POINT("zero_", SUB, "-", true), /* 0 - 1 * 0 */
    POINT("fill_.Scalar", FILL, "-s", true),
    POINT("fill_.Tensor", COPY, "-t", true),
    BINARY("add", ADD, "tts", true),
    BINARY("sub", SUB, "tts", true),
    BINARY("mul", MUL, "tt", true),
    BINARY("div", DIV, "tt", false),
    POINT("rsub.Tensor", RSUB, "tts", true),
    POINT("rsub.Scalar", RSUB, "tts", true),
    UNARY("neg", NEG, "t", true),
    UNARY("abs", ABS, "t", true),
    UNARY("exp", EXP, "t", false),
    UNARY("log", LOG, "t", false),
    UNARY("sqrt", SQRT, "t", false),
    UNARY("rsqrt", RSQRT, "t", false),
    UNARY("reciprocal", RECIPROCAL, "t", false),
    UNARY("tanh", TANH, "t", false),
    UNARY("sigmoid", SIGMOID, "t", false),
    UNARY("sin", SIN, "t", false),
    UNARY("cos", COS, "t", false),
    UNARY("erf", ERF, "t", false),
    POINT("relu", RELU, "t", true),
    POINT("relu_", RELU, "t", true),
    UNARY("gelu", GELU, "te", false),
    UNARY("silu", SILU, "t", false),
    POINT3("pow.Tensor_Scalar", "pow_.Scalar", "pow.Tensor_Scalar_out", POW, "ts", false),
    POINT3("pow.Tensor_Tensor", "pow_.Tensor", "pow.Tensor_Tensor_out", POW_TENSOR, "tt", false),
    POINT("maximum", MAXIMUM, "tt", true),
    POINT("maximum.out", MAXIMUM, "tt", true),
    POINT("minimum", MINIMUM, "tt", true),
    POINT("minimum.out", MINIMUM, "tt", true),
    COMPARE("eq", EQ),
    COMPARE("ne", NE),
    COMPARE("lt", LT),
    COMPARE("le", LE),
    COMPARE("gt", GT),
    COMPARE("ge", GE),
    POINT("where.self", WHERE, "ttt", true),
    POINT("where.self_out", WHERE, "ttt", true),
    POINT("masked_fill.Scalar", MASKED_FILL, "tts", true),
    POINT("masked_fill_.Scalar", MASKED_FILL, "tts", true),
    POINT("masked_fill.Tensor", MASKED_FILL, "tts", true),
    POINT("masked_fill_.Tensor", MASKED_FILL, "tts", true),
    UNARY("logical_not", LOGICAL_NOT, "t", true),
    UNARY("logical_and", LOGICAL_AND, "tt", true),
    UNARY("logical_or", LOGICAL_OR, "tt", true),
    POINT3("bitwise_and.Tensor", "bitwise_and_.Tensor", "bitwise_and.Tensor_out", AND, "tt", true),
    POINT3("bitwise_or.Tensor", "bitwise_or_.Tensor", "bitwise_or.Tensor_out", OR, "tt", true),
    POINT3("bitwise_xor.Tensor", "bitwise_xor_.Tensor", "bitwise_xor.Tensor_out", XOR, "tt", true),
    UNARY("clamp", CLAMP, "tss", false),
    UNARY("addcmul", ADDCMUL, "ttts", false),
    UNARY("addcdiv", ADDCDIV, "ttts", false),
    POINT3("lerp.Scalar", "lerp_.Scalar", "lerp.Scalar_out", LERP, "tts", false),
    POINT("threshold_backward", THRESHOLD_BACKWARD, "tts", false),
    POINT("threshold_backward.grad_input", THRESHOLD_BACKWARD, "tts", false),
    POINT("tanh_backward", TANH_BACKWARD, "tt", false),
    POINT("tanh_backward.grad_input", TANH_BACKWARD, "tt", false),
    POINT("sigmoid_backward", SIGMOID_BACKWARD, "tt", false),
    POINT("sigmoid_backward.grad_input", SIGMOID_BACKWARD, "tt", false),
    POINT("gelu_backward", GELU_BACKWARD, "tte", false),
    POINT("gelu_backward.grad_input", GELU_BACKWARD, "tte", false),
    POINT("silu_backward", SILU_BACKWARD, "tt", false),
    POINT("silu_backward.grad_input", SILU_BACKWARD, "tt", false),
    POINT("native_dropout_backward", DROPOUT_BACKWARD, "tts", false),
    POINT("isposinf", ISPOSINF, "t", false),
    POINT("isposinf.out", ISPOSINF, "t", false),
    POINT("isneginf", ISNEGINF, "t", false),
    POINT("isneginf.out", ISNEGINF, "t", false),
    POINT("uniform_", UNIFORM, "-ssg", false),
    POINT("normal_", NORMAL, "-ssg", false),
    POINT("bernoulli_.float", BERNOULLI, "-sg", true),
    REDUCE("sum", SUM, false, 0, 0),
    REDUCE("sum.dim_IntList", SUM, false, 1, 2),
    REDUCE("sum.IntList_out", SUM, false, 1, 2),
    REDUCE("mean", SUM, true, 0, 0),
    REDUCE("mean.dim", SUM, true, 1, 2),
    REDUCE("mean.out", SUM, true, 1, 2),
    REDUCE("amax", MAX, false, 1, 2),
    REDUCE("amax.out", MAX, false, 1, 2),
    REDUCE("amin", MIN, false, 1, 2),
    REDUCE("amin.out", MIN, false, 1, 2),
    REDUCE("max", MAX, false, 0, 0),
    REDUCE("min", MIN, false, 0, 0),
    REDUCE("argmax", ARGMAX, false, 1, 2),
    REDUCE("argmax.out", ARGMAX, false, 1, 2),
    REDUCE("argmin", ARGMIN, false, 1, 2),
    REDUCE("argmin.out", ARGMIN, false, 1, 2),
    REDUCE("prod", PROD, false, 0, 0),
    REDUCE("prod.dim_int", PROD, false, 1, 2),
    REDUCE("prod.int_out", PROD, false, 1, 2),
    TRUTH("any", ANY),
    TRUTH("all", ALL),
    {"aten::linalg_vector_norm", acceptsNorm, runReduction, &norm},
    {"aten::linalg_vector_norm.out", acceptsNorm, runReduction, &norm},
    {"aten::mm", acceptsProduct, runProduct, NULL},
    {"aten::mm.out", acceptsProduct, runProduct, NULL},
    {"aten::bmm", acceptsProduct, runProduct, NULL},
    {"aten::bmm.out", acceptsProduct, runProduct, NULL},
    {"aten::addmm", acceptsProduct, runProduct, &yes},
    {"aten::addmm_", acceptsProduct, runProduct, &yes},
    {"aten::addmm.out", acceptsProduct, runProduct, &yes},
    {"aten::baddbmm", acceptsProduct, runProduct, &yes},
    {"aten::baddbmm_", acceptsProduct, runProduct, &yes},
    {"aten::baddbmm.out", acceptsProduct, runProduct, &yes},
    {"aten::_softmax", acceptsSoftmax, runSoftmax, NULL},
    {"aten::_softmax.out", acceptsSoftmax, runSoftmax, NULL},
    {"aten::_log_softmax", acceptsSoftmax, runSoftmax, &yes},
    {"aten::_log_softmax.out", acceptsSoftmax, runSoftmax, &yes},
    {"aten::_softmax_backward_data", acceptsSoftmaxBackward, runSoftmaxBackward, NULL},
    {"aten::_softmax_backward_data.out", acceptsSoftmaxBackward, runSoftmaxBackward, NULL},
    {"aten::_log_softmax_backward_data", acceptsSoftmaxBackward, runSoftmaxBackward, &yes},
    {"aten::_log_softmax_backward_data.out", acceptsSoftmaxBackward, runSoftmaxBackward, &yes},
    {"aten::native_layer_norm", acceptsLayerNorm, runLayerNorm, NULL},
    {"aten::native_layer_norm_backward", acceptsLayerNormBackward, runLayerNormBackward, NULL},
    {"aten::embedding", acceptsTake, runTake, &embeddingEntry},
    {"aten::embedding_dense_backward", acceptsAddRows, runAddRows, NULL},
    {"aten::index_select", acceptsTake, runTake, &selectEntry},
    {"aten::index.Tensor", acceptsTake, runTake, &indexEntry},
    {"aten::index.Tensor_out", acceptsTake, runTake, &indexEntry},
    {"aten::nll_loss_forward", acceptsLoss, runLoss, NULL},
    {"aten::nll_loss_forward.output", acceptsLoss, runLoss, NULL},
    {"aten::nll_loss_backward", acceptsLossBackward, runLossBackward, NULL},
    {"aten::nll_loss_backward.grad_input", acceptsLossBackward, runLossBackward, NULL},
    {"aten::convolution", acceptsConvolution, runConvolution, NULL},
    {"aten::convolution_backward", acceptsConvolutionBackward, runConvolutionBackward, NULL},
    {"aten::max_pool2d_with_indices", acceptsPool, runPool, NULL},
    {"aten::max_pool2d_with_indices.out", acceptsPool, runPool, NULL},
    {"aten::max_pool2d_with_indices_backward", acceptsPoolBackward, runPoolBackward, NULL},
    {"aten::max_pool2d_with_indices_backward.grad_input", acceptsPoolBackward, runPoolBackward,
     NULL},
    {"aten::cat", acceptsJoin, runJoin, NULL},
    {"aten::cat.out", acceptsJoin, runJoin, NULL},
    {"aten::_stack", acceptsJoin, runJoin, &yes},
};
const size_t openclOperatorCount = sizeof openclOperators / sizeof openclOperators[0];
