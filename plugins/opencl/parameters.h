/*
 * The last argument of each kernel, and the codes in it. The driver and its kernels include this
 * file. The text of the OpenCL program begins with this file.
 */
#ifdef __OPENCL_VERSION__
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
#else
#include <stdint.h>
#endif

enum { MOST_DIMS = 6, OPERANDS = 4 }; /* operands: the result, then what is read */

typedef struct Pointwise {
  uint64_t offset[OPERANDS];
  int32_t dtype[OPERANDS]; /* orDtype; -1: the number in `number` or `integer` */
  int32_t op, ndim;
  uint32_t count, size[MOST_DIMS];
  int32_t stride[OPERANDS][MOST_DIMS];
  double number[OPERANDS];
  int64_t integer[OPERANDS];
  double x, y;
  int64_t ix, iy;
  uint64_t seed;
} Pointwise;

enum PointwiseOp {
  FILL,
  COPY,
  ADD,
  SUB,
  MUL,
  DIV,
  RSUB,
  NEG,
  ABS,
  EXP,
  LOG,
  SQRT,
  RSQRT,
  RECIPROCAL,
  TANH,
  SIGMOID,
  RELU,
  GELU,
  GELU_TANH,
  SILU,
  POW,
  MAXIMUM,
  MINIMUM,
  EQ,
  NE,
  LT,
  LE,
  GT,
  GE,
  WHERE,
  MASKED_FILL,
  THRESHOLD_BACKWARD,
  TANH_BACKWARD,
  SIGMOID_BACKWARD,
  GELU_BACKWARD,
  GELU_TANH_BACKWARD,
  SILU_BACKWARD,
  ADDCMUL,
  ADDCDIV,
  LERP,
  CLAMP,
  LOGICAL_NOT,
  LOGICAL_AND,
  LOGICAL_OR,
  AND,
  OR,
  XOR,
  SIN,
  COS,
  ERF,
  UNIFORM,
  NORMAL,
  BERNOULLI,
  POW_TENSOR,
  DROPOUT_BACKWARD,
  ISPOSINF,
  ISNEGINF
};

typedef struct Reduction {
  uint64_t from, to;
  int32_t from_dtype, to_dtype, op, out_dims, in_dims;
  uint32_t out_size[MOST_DIMS], in_size[MOST_DIMS], count;
  int32_t out_stride[MOST_DIMS], kept_stride[MOST_DIMS], in_stride[MOST_DIMS];
  double scale;
} Reduction;

enum ReductionOp { SUM, MAX, MIN, PROD, ANY, ALL, ARGMAX, ARGMIN, NORM };

/* c = alpha a b + beta bias. `a` and `b`: offsets of the panels, in the double form of tensors. */
typedef struct Product {
  uint64_t a, b, c, bias;
  int32_t dtype, has_bias;
  uint32_t batch, m, n, k;
  int32_t a_stride[3], b_stride[3], c_stride[3], bias_stride[3];
  double alpha, beta;
} Product;

/* The part of a product that one work item computes. With 8 rows it takes 8 % less time on PoCL,
 * but it needs more registers than GPUs have. */
enum { TILE_ROWS = 4, TILE_COLUMNS = 32 };

/* A factor of a product, in panels of `width` lines: rows of a, or columns of b. */
typedef struct Panels {
  uint64_t to, from;
  int32_t dtype, stride[3]; /* of the batch, the lines, and along a line */
  uint32_t batch, lines, k, width;
} Panels;

typedef struct Rows {
  uint64_t offset[8];
  int32_t dtype, op, index_dtype;
  uint32_t items, outer, count, inner;
  int64_t limit, other;
  double x;
  int32_t flag[4];
} Rows;

/* Convolutions and pools of two dimensions: rows, then columns. Channels of a group. */
typedef struct Window {
  uint64_t offset[4];
  int32_t dtype;
  uint32_t items, batch, groups, in_channels, out_channels, in[2], out[2], window[2];
  int32_t stride[2], padding[2], dilation[2], has_bias;
} Window;
