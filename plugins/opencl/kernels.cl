/*
 * The kernels of the OpenCL driver. Each element of a tensor has one work item, unless a kernel
 * says otherwise; those that only fill the last work group return. A tensor is a buffer, an offset
 * in bytes, and strides in elements.
 *
 * Elements are read and written by their dtype (codes of orDtype) and computed as float, as double
 * or as long. The bodies below are included once for each: REAL is float or double; the long form
 * has the operators that keep integers exact.
 */
enum { U8, I8, I16, I32, I64, F16, BF16, F32, F64, C64, C128, BOOL };

float loadBfloat(__global const ushort *p) { return as_float((uint)*p << 16); }
void storeBfloat(float v, __global ushort *p) {
  uint bits = as_uint(v);
  if (isnan(v))
    *p = 0x7fc0;
  else
    *p = (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define LOAD(name, T, READ_DOUBLE)                                       \
  T name(__global const char *base, ulong offset, int dtype, long i) {   \
    __global const char *p = base + offset;                              \
    switch (dtype) {                                                     \
      case F32: return (T)((__global const float *)p)[i];                \
      case I64: return (T)((__global const long *)p)[i];                 \
      case BOOL: return (T)(((__global const uchar *)p)[i] != 0);        \
      case U8: return (T)((__global const uchar *)p)[i];                 \
      case I8: return (T)((__global const char *)p)[i];                  \
      case I16: return (T)((__global const short *)p)[i];                \
      case I32: return (T)((__global const int *)p)[i];                  \
      case F16: return (T)vload_half(i, (__global const half *)p);       \
      case BF16: return (T)loadBfloat((__global const ushort *)p + i);   \
      READ_DOUBLE                                                        \
    }                                                                    \
    return (T)0;                                                         \
  }
#define STORE(name, T, WRITE_DOUBLE)                                     \
  void name(__global char *base, ulong offset, int dtype, long i, T v) { \
    __global char *p = base + offset;                                    \
    switch (dtype) {                                                     \
      case F32: ((__global float *)p)[i] = (float)v; break;              \
      case I64: ((__global long *)p)[i] = (long)v; break;                \
      case BOOL: ((__global uchar *)p)[i] = v != 0; break;               \
      case U8: ((__global uchar *)p)[i] = (uchar)(long)v; break;         \
      case I8: ((__global char *)p)[i] = (char)(long)v; break;           \
      case I16: ((__global short *)p)[i] = (short)(long)v; break;        \
      case I32: ((__global int *)p)[i] = (int)(long)v; break;            \
      case F16: vstore_half((float)v, i, (__global half *)p); break;     \
      case BF16: storeBfloat((float)v, (__global ushort *)p + i); break; \
      WRITE_DOUBLE                                                       \
    }                                                                    \
  }
#ifdef cl_khr_fp64
#define READ_F64(T) case F64: return (T)((__global const double *)p)[i];
#define WRITE_F64 case F64: ((__global double *)p)[i] = (double)v; break;
#else
#define READ_F64(T)
#define WRITE_F64
#endif
LOAD(load_f, float, READ_F64(float))
STORE(store_f, float, WRITE_F64)
LOAD(load_l, long, READ_F64(long))
STORE(store_l, long, WRITE_F64)
#ifdef cl_khr_fp64
LOAD(load_d, double, READ_F64(double))
STORE(store_d, double, WRITE_F64)
#endif

/* The same with a short way for float32. */
#define LOAD_FLOAT(base, offset, dtype, i)                                       \
  ((dtype) == F32 ? ((__global const float *)((base) + (offset)))[i]             \
                  : load_f(base, offset, dtype, i))
#define STORE_FLOAT(base, offset, dtype, i, v)                                   \
  {                                                                              \
    if ((dtype) == F32)                                                          \
      ((__global float *)((base) + (offset)))[i] = (v);                          \
    else                                                                         \
      store_f(base, offset, dtype, i, v);                                        \
  }

/* A number for each element of each call: three rounds of a mixing function. */
uint randomBits(ulong seed, ulong i) {
  ulong z = seed + (i + 1) * 0x9E3779B97F4A7C15UL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9UL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBUL;
  return (uint)((z ^ (z >> 31)) >> 32);
}
/* From 0 to below 1, in steps of 2^-digits: what the dtype holds without rounding up to 1. */
float randomUnit(ulong seed, ulong i, int digits) {
  return ldexp((float)(randomBits(seed, i) >> (32 - digits)), -digits);
}
int digitsOf(int dtype) { return dtype == F16 ? 11 : dtype == BF16 ? 8 : 24; }
float randomNormal(ulong seed, ulong i) {
  float r = sqrt(-2.0f * log(1.0f - randomUnit(seed, 2 * i, 24)));
  return r * cos(6.2831853f * randomUnit(seed, 2 * i + 1, 24));
}

/* The place of element i in an operand. */
long placeOf(const Pointwise *p, int operand, uint i) {
  if (p->ndim == 1) return (long)i * p->stride[operand][0];
  long place = 0;
  for (int d = p->ndim - 1; d >= 0; d--) {
    place += (long)(i % p->size[d]) * p->stride[operand][d];
    i /= p->size[d];
  }
  return place;
}

long placeIn(int ndim, const uint *size, const int *stride, uint i) {
  long place = 0;
  for (int d = ndim - 1; d >= 0; d--) {
    place += (long)(i % size[d]) * stride[d];
    i /= size[d];
  }
  return place;
}

#define TWO_PI_ROOT 0.3989422804014327
#define HALF_ROOT 0.7071067811865476
#define TANH_GELU 0.7978845608028654

#define POINTWISE(name, REAL, load, store)                                                        \
  REAL name##_value(const Pointwise *p, REAL a, REAL b, REAL c, uint i) {                          \
    const REAL x = (REAL)p->x, y = (REAL)p->y;                                                     \
    switch (p->op) {                                                                               \
      case FILL: return x;                                                                         \
      case COPY: return a;                                                                         \
      case ADD: return a + x * b;                                                                  \
      case SUB: return a - x * b;                                                                  \
      case MUL: return a * b;                                                                      \
      case DIV: return a / b;                                                                      \
      case RSUB: return b - x * a;                                                                 \
      case NEG: return -a;                                                                         \
      case ABS: return fabs(a);                                                                    \
      case EXP: return exp(a);                                                                     \
      case LOG: return log(a);                                                                     \
      case SQRT: return sqrt(a);                                                                   \
      case RSQRT: return 1 / sqrt(a);                                                              \
      case RECIPROCAL: return 1 / a;                                                               \
      case TANH: return tanh(a);                                                                   \
      case SIGMOID: return 1 / (1 + exp(-a));                                                      \
      case RELU: return a > 0 || isnan(a) ? a : (REAL)0;                                           \
      case GELU: return a * (REAL)0.5 * (1 + erf(a * (REAL)HALF_ROOT));                            \
      case GELU_TANH:                                                                              \
        return (REAL)0.5 * a * (1 + tanh((REAL)TANH_GELU * (a + (REAL)0.044715 * a * a * a)));     \
      case SILU: return a / (1 + exp(-a));                                                         \
      case POW: return x == 2 ? a * a : x == 1 ? a : x == (REAL)0.5 ? sqrt(a) : pow(a, x);         \
      case POW_TENSOR: return pow(a, b);                                                           \
      case MAXIMUM: return isnan(a) || a > b ? a : b;                                              \
      case MINIMUM: return isnan(a) || a < b ? a : b;                                              \
      case EQ: return a == b;                                                                      \
      case NE: return a != b;                                                                      \
      case LT: return a < b;                                                                       \
      case LE: return a <= b;                                                                      \
      case GT: return a > b;                                                                       \
      case GE: return a >= b;                                                                      \
      case WHERE: return a != 0 ? b : c;                                                           \
      case MASKED_FILL: return b != 0 ? x : a;                                                     \
      case THRESHOLD_BACKWARD: return b <= x ? (REAL)0 : a;                                        \
      case TANH_BACKWARD: return a * (1 - b * b);                                                  \
      case SIGMOID_BACKWARD: return a * (1 - b) * b;                                               \
      case GELU_BACKWARD:                                                                          \
        return a * ((REAL)0.5 * (1 + erf(b * (REAL)HALF_ROOT)) +                                   \
                    b * exp((REAL)-0.5 * b * b) * (REAL)TWO_PI_ROOT);                              \
      case GELU_TANH_BACKWARD: {                                                                   \
        REAL t = tanh((REAL)TANH_GELU * (b + (REAL)0.044715 * b * b * b));                         \
        REAL d = (REAL)TANH_GELU * (1 + 3 * (REAL)0.044715 * b * b);                               \
        return a * ((REAL)0.5 * (1 + t) + (REAL)0.5 * b * (1 - t * t) * d);                        \
      }                                                                                            \
      case SILU_BACKWARD: {                                                                        \
        REAL s = 1 / (1 + exp(-b));                                                                \
        return a * s * (1 + b * (1 - s));                                                          \
      }                                                                                            \
      case ADDCMUL: return a + x * b * c;                                                          \
      case ADDCDIV: return a + x * b / c;                                                          \
      case LERP: return fabs(x) < (REAL)0.5 ? a + x * (b - a) : b - (b - a) * (1 - x);             \
      case CLAMP: return isnan(a) ? a : fmin(fmax(a, x), y);                                       \
      case LOGICAL_NOT: return a == 0;                                                             \
      case LOGICAL_AND: return a != 0 && b != 0;                                                   \
      case LOGICAL_OR: return a != 0 || b != 0;                                                    \
      case SIN: return sin(a);                                                                     \
      case COS: return cos(a);                                                                     \
      case ERF: return erf(a);                                                                     \
      case DROPOUT_BACKWARD: return a * b * x;                                                     \
      case ISPOSINF: return a == (REAL)INFINITY;                                                   \
      case ISNEGINF: return a == (REAL)-INFINITY;                                                  \
      case UNIFORM: return x + (y - x) * (REAL)randomUnit(p->seed, i, digitsOf(p->dtype[0]));      \
      case NORMAL: return x + y * (REAL)randomNormal(p->seed, i);                                  \
      case BERNOULLI: return (REAL)randomUnit(p->seed, i, 24) < x;                                 \
    }                                                                                              \
    return 0;                                                                                      \
  }                                                                                                \
  POINTWISE_KERNEL(name, REAL, load, store, number)

#define POINTWISE_KERNEL(name, T, load, store, constants)                                          \
  __kernel void name(__global char *r, __global const char *m1, __global const char *m2,           \
                     __global const char *m3, Pointwise p) {                                       \
    uint i = get_global_id(0);                                                                     \
    if (i >= p.count) return;                                                                      \
    T a = p.dtype[1] < 0 ? (T)p.constants[1]                                                       \
                         : load(m1, p.offset[1], p.dtype[1], placeOf(&p, 1, i));                   \
    T b = p.dtype[2] < 0 ? (T)p.constants[2]                                                       \
                         : load(m2, p.offset[2], p.dtype[2], placeOf(&p, 2, i));                   \
    T c = p.dtype[3] < 0 ? (T)p.constants[3]                                                       \
                         : load(m3, p.offset[3], p.dtype[3], placeOf(&p, 3, i));                   \
    store(r, p.offset[0], p.dtype[0], placeOf(&p, 0, i), name##_value(&p, a, b, c, i));            \
  }

POINTWISE(pointwise_f, float, load_f, store_f)
#ifdef cl_khr_fp64
POINTWISE(pointwise_d, double, load_d, store_d)
#endif

long pointwise_l_value(const Pointwise *p, long a, long b, long c, uint i) {
  const long x = p->ix, y = p->iy;
  switch (p->op) {
    case FILL: return x;
    case COPY: return a;
    case ADD: return a + x * b;
    case SUB: return a - x * b;
    case MUL: return a * b;
    case RSUB: return b - x * a;
    case NEG: return -a;
    case ABS: return a < 0 ? -a : a;
    case RELU: return a > 0 ? a : 0;
    case MAXIMUM: return max(a, b);
    case MINIMUM: return min(a, b);
    case EQ: return a == b;
    case NE: return a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case WHERE: return a != 0 ? b : c;
    case MASKED_FILL: return b != 0 ? x : a;
    case LOGICAL_NOT: return a == 0;
    case LOGICAL_AND: return a != 0 && b != 0;
    case LOGICAL_OR: return a != 0 || b != 0;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    case BERNOULLI: return randomUnit(p->seed, i, 24) < (float)p->x;
  }
  return 0;
}
POINTWISE_KERNEL(pointwise_l, long, load_l, store_l, integer)

/* float32 alone, in one dimension. */
__kernel void pointwise_f32(__global char *r, __global const char *m1, __global const char *m2,
                            __global const char *m3, Pointwise p) {
  uint i = get_global_id(0);
  if (i >= p.count) return;
  __global const float *fa = (__global const float *)(m1 + p.offset[1]);
  __global const float *fb = (__global const float *)(m2 + p.offset[2]);
  __global const float *fc = (__global const float *)(m3 + p.offset[3]);
  float a = p.dtype[1] < 0 ? (float)p.number[1] : fa[(long)i * p.stride[1][0]];
  float b = p.dtype[2] < 0 ? (float)p.number[2] : fb[(long)i * p.stride[2][0]];
  float c = p.dtype[3] < 0 ? (float)p.number[3] : fc[(long)i * p.stride[3][0]];
  ((__global float *)(r + p.offset[0]))[(long)i * p.stride[0][0]] =
      pointwise_f_value(&p, a, b, c, i);
}

/* ---- reductions: one work group for each element of the result ---- */

#define GROUP 32
#define PART 64 /* Sums are made of sums of so many elements, which keeps rounding errors small. */
#define REDUCE(name, T, load, store, lowest, highest)                                              \
  T name##_begin(int op) {                                                                         \
    return op == MAX || op == ARGMAX ? lowest : op == MIN || op == ARGMIN ? highest                \
         : op == PROD || op == ALL ? (T)1 : (T)0;                                                  \
  }                                                                                                \
  /* Whether b replaces a. A NaN wins over numbers, the first of equals over later ones. */        \
  bool name##_wins(int op, T a, T b) {                                                             \
    if (a != a) return false;                                                                      \
    return b != b || (op == MAX || op == ARGMAX ? b > a : b < a);                                  \
  }                                                                                                \
  T name##_join(int op, T a, T b) {                                                                \
    switch (op) {                                                                                  \
      case SUM: case NORM: return a + b;                                                           \
      case PROD: return a * b;                                                                     \
      case ANY: return a != 0 || b != 0;                                                           \
      case ALL: return a != 0 && b != 0;                                                           \
    }                                                                                              \
    return name##_wins(op, a, b) ? b : a;                                                          \
  }                                                                                                \
  __kernel void name(__global char *r, __global const char *m, Reduction p) {                      \
    __local T values[GROUP];                                                                       \
    __local uint places[GROUP];                                                                    \
    uint out = get_group_id(0), lane = get_local_id(0);                                            \
    long base = placeIn(p.out_dims, p.out_size, p.kept_stride, out);                               \
    T value = name##_begin(p.op), part = 0;                                                        \
    uint place = UINT_MAX;                                                                         \
    for (uint i = lane; i < p.count; i += GROUP) {                                                 \
      long at = base + placeIn(p.in_dims, p.in_size, p.in_stride, i);                              \
      T next = load(m, p.from, p.from_dtype, at);                                                  \
      if (p.op == NORM) next = next * next;                                                        \
      if (p.op == SUM || p.op == NORM) {                                                           \
        part += next;                                                                              \
        if (i / GROUP % PART == PART - 1) value += part, part = 0;                                 \
        continue;                                                                                  \
      }                                                                                            \
      if (place == UINT_MAX || name##_wins(p.op, value, next)) place = i;                          \
      value = name##_join(p.op, value, next);                                                      \
    }                                                                                              \
    values[lane] = value + part;                                                                   \
    places[lane] = place;                                                                          \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                  \
    if (lane != 0) return;                                                                         \
    value = values[0];                                                                             \
    for (uint i = 1; i < GROUP; i++) {                                                             \
      bool equal = values[i] == value || (values[i] != values[i] && value != value);               \
      bool wins = places[i] != UINT_MAX &&                                                         \
                  (place == UINT_MAX || (equal ? places[i] < place                                 \
                                               : name##_wins(p.op, value, values[i])));            \
      if (wins) place = places[i];                                                                 \
      value = name##_join(p.op, value, values[i]);                                                 \
    }                                                                                              \
    long at = placeIn(p.out_dims, p.out_size, p.out_stride, out);                                  \
    if (p.op == ARGMAX || p.op == ARGMIN)                                                          \
      store_l(r, p.to, p.to_dtype, at, (long)place);                                               \
    else                                                                                           \
      store(r, p.to, p.to_dtype, at, SCALED(name, value));                                         \
  }
#define SCALED(name, value) name##_scaled(value, &p)
float reduce_f_scaled(float v, const Reduction *p) {
  return p->op == NORM ? sqrt(v) : v * (float)p->scale;
}
long reduce_l_scaled(long v, const Reduction *p) { return v; }
REDUCE(reduce_f, float, load_f, store_f, -INFINITY, INFINITY)
REDUCE(reduce_l, long, load_l, store_l, LONG_MIN, LONG_MAX)
#ifdef cl_khr_fp64
double reduce_d_scaled(double v, const Reduction *p) {
  return p->op == NORM ? sqrt(v) : v * p->scale;
}
REDUCE(reduce_d, double, load_d, store_d, (double)-INFINITY, (double)INFINITY)
#endif

/* ---- products ---- */

#define PRODUCT_END(T, load, store, sum, row, column)                                              \
  {                                                                                                \
    T result = (T)p.alpha * (sum);                                                                 \
    if (p.has_bias && p.beta != 0)                                                                 \
      result += (T)p.beta * load(bias, p.bias, p.dtype,                                            \
                                 (long)z * p.bias_stride[0] + (long)(row)*p.bias_stride[1] +       \
                                     (long)(column)*p.bias_stride[2]);                             \
    store(c, p.c, p.dtype,                                                                         \
          (long)z * p.c_stride[0] + (long)(row)*p.c_stride[1] + (long)(column)*p.c_stride[2],      \
          result);                                                                                 \
  }

#ifdef cl_khr_fp64
/* double: an element for each work item. */
__kernel void product_d(__global char *c, __global const char *a, __global const char *b,
                        __global const char *bias, Product p) {
  uint column = get_global_id(0), row = get_global_id(1), z = get_global_id(2);
  if (column >= p.n || row >= p.m) return;
  long at = (long)z * p.a_stride[0] + (long)row * p.a_stride[1];
  long bt = (long)z * p.b_stride[0] + (long)column * p.b_stride[2];
  double sum = 0;
  for (uint k = 0; k < p.k; k++)
    sum += load_d(a, p.a, p.dtype, at + (long)k * p.a_stride[2]) *
           load_d(b, p.b, p.dtype, bt + (long)k * p.b_stride[1]);
  PRODUCT_END(double, load_d, store_d, sum, row, column)
}
#endif

/* Writes a factor as float in the order in which product_tiles reads it, whatever its strides are.
 * Lines beyond the last one are 0. A work item has an element of each line of a panel. */
__kernel void pack(__global char *r, __global const char *m, Panels p) {
  uint k = get_global_id(0), panel = get_global_id(1), z = get_global_id(2);
  uint first = panel * p.width, panels = (p.lines + p.width - 1) / p.width;
  if (k >= p.k || panel >= panels) return;
  __global float *to = (__global float *)(r + p.to) +
                       (((long)z * panels + panel) * p.k + k) * p.width;
  long from = (long)z * p.stride[0] + (long)first * p.stride[1] + (long)k * p.stride[2];
  for (uint i = 0; i < p.width; i++)
    to[i] = first + i < p.lines ? LOAD_FLOAT(m, p.from, p.dtype, from + (long)i * p.stride[1]) : 0;
}

/* a, b: packed. A work item has a tile. */
__kernel void product_tiles(__global char *c, __global const char *a, __global const char *b,
                            __global const char *bias, Product p) {
  uint tile = get_global_id(0), panel = get_global_id(1), z = get_global_id(2);
  uint tiles = (p.m + TILE_ROWS - 1) / TILE_ROWS;
  uint panels = (p.n + TILE_COLUMNS - 1) / TILE_COLUMNS;
  if (tile >= tiles || panel >= panels) return;
  __global const float *fa = (__global const float *)(a + p.a) +
                             ((long)z * tiles + tile) * p.k * TILE_ROWS;
  __global const float *fb = (__global const float *)(b + p.b) +
                             ((long)z * panels + panel) * p.k * TILE_COLUMNS;
  float16 left[TILE_ROWS] = {0}, right[TILE_ROWS] = {0};
  for (uint k = 0; k < p.k; k++, fa += TILE_ROWS, fb += TILE_COLUMNS) {
    float16 b0 = vload16(0, fb), b1 = vload16(1, fb);
#pragma unroll
    for (uint i = 0; i < TILE_ROWS; i++) {
      left[i] = fma((float16)fa[i], b0, left[i]);
      right[i] = fma((float16)fa[i], b1, right[i]);
    }
  }
  uint row = tile * TILE_ROWS, column = panel * TILE_COLUMNS;
  for (uint i = 0; i < TILE_ROWS && row + i < p.m; i++) {
    float sums[TILE_COLUMNS];
    vstore16(left[i], 0, sums);
    vstore16(right[i], 1, sums);
    for (uint j = 0; j < TILE_COLUMNS && column + j < p.n; j++)
      PRODUCT_END(float, LOAD_FLOAT, STORE_FLOAT, sums[j], row + i, column + j)
  }
}

/* ---- rows: softmax, layer norm, losses, indices ---- */

#define ROW_AT(k) ((long)o * p.count * p.inner + (long)(k)*p.inner + n)

/* m1: input. op 1: the logarithm. */
__kernel void softmax(__global char *r, __global const char *m1, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint n = get_global_id(0) % p.inner, o = get_global_id(0) / p.inner;
  float most = -INFINITY, sum = 0;
  for (uint k = 0; k < p.count; k++) most = fmax(most, load_f(m1, p.offset[1], p.dtype, ROW_AT(k)));
  for (uint k = 0; k < p.count; k++)
    sum += exp(load_f(m1, p.offset[1], p.dtype, ROW_AT(k)) - most);
  for (uint k = 0; k < p.count; k++) {
    float v = load_f(m1, p.offset[1], p.dtype, ROW_AT(k)) - most;
    store_f(r, p.offset[0], p.dtype, ROW_AT(k), p.op ? v - log(sum) : exp(v) / sum);
  }
}

/* m1: gradient, m2: output. op 1: of the logarithm. */
__kernel void softmax_backward(__global char *r, __global const char *m1, __global const char *m2,
                               Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint n = get_global_id(0) % p.inner, o = get_global_id(0) / p.inner;
  float sum = 0;
  for (uint k = 0; k < p.count; k++) {
    float g = load_f(m1, p.offset[1], p.dtype, ROW_AT(k));
    sum += p.op ? g : g * load_f(m2, p.offset[2], p.dtype, ROW_AT(k));
  }
  for (uint k = 0; k < p.count; k++) {
    float g = load_f(m1, p.offset[1], p.dtype, ROW_AT(k));
    float y = load_f(m2, p.offset[2], p.dtype, ROW_AT(k));
    store_f(r, p.offset[0], p.dtype, ROW_AT(k), p.op ? g - exp(y) * sum : (g - sum) * y);
  }
}

/* m1: input, m2: weight, m3: bias (flag 2 and 3: whether there are any); mean and rstd after the
 * output, in buffers of their own. */
__kernel void layer_norm(__global char *r, __global char *mean, __global char *rstd,
                         __global const char *m1, __global const char *m2,
                         __global const char *m3, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint o = get_global_id(0);
  long base = (long)o * p.count;
  float sum = 0, square = 0;
  for (uint k = 0; k < p.count; k++) sum += load_f(m1, p.offset[3], p.dtype, base + k);
  float m = sum / p.count;
  for (uint k = 0; k < p.count; k++) {
    float d = load_f(m1, p.offset[3], p.dtype, base + k) - m;
    square += d * d;
  }
  float s = 1 / sqrt(square / p.count + (float)p.x);
  for (uint k = 0; k < p.count; k++) {
    float v = (load_f(m1, p.offset[3], p.dtype, base + k) - m) * s;
    if (p.flag[2]) v *= load_f(m2, p.offset[4], p.dtype, k);
    if (p.flag[3]) v += load_f(m3, p.offset[5], p.dtype, k);
    store_f(r, p.offset[0], p.dtype, base + k, v);
  }
  store_f(mean, p.offset[1], p.dtype, o, m);
  store_f(rstd, p.offset[2], p.dtype, o, s);
}

/* m1: gradient, m2: input, m3: mean, m4: rstd, m5: weight. */
__kernel void layer_norm_input(__global char *r, __global const char *m1, __global const char *m2,
                               __global const char *m3, __global const char *m4,
                               __global const char *m5, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint o = get_global_id(0);
  long base = (long)o * p.count;
  float m = load_f(m3, p.offset[3], p.dtype, o), s = load_f(m4, p.offset[4], p.dtype, o);
  float sum = 0, dot = 0;
  for (uint k = 0; k < p.count; k++) {
    float g = load_f(m1, p.offset[1], p.dtype, base + k);
    if (p.flag[2]) g *= load_f(m5, p.offset[5], p.dtype, k);
    sum += g;
    dot += g * (load_f(m2, p.offset[2], p.dtype, base + k) - m) * s;
  }
  for (uint k = 0; k < p.count; k++) {
    float g = load_f(m1, p.offset[1], p.dtype, base + k);
    if (p.flag[2]) g *= load_f(m5, p.offset[5], p.dtype, k);
    float x = (load_f(m2, p.offset[2], p.dtype, base + k) - m) * s;
    store_f(r, p.offset[0], p.dtype, base + k, s * (g - (sum + x * dot) / p.count));
  }
}

/* A column for each work item. op 0: the weight's gradient, 1: the bias's. */
__kernel void layer_norm_weight(__global char *r, __global const char *m1, __global const char *m2,
                                __global const char *m3, __global const char *m4, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint k = get_global_id(0);
  float sum = 0;
  for (uint o = 0; o < p.outer; o++) {
    long at = (long)o * p.count + k;
    float g = load_f(m1, p.offset[1], p.dtype, at);
    if (p.op == 0)
      g *= (load_f(m2, p.offset[2], p.dtype, at) - load_f(m3, p.offset[3], p.dtype, o)) *
           load_f(m4, p.offset[4], p.dtype, o);
    sum += g;
  }
  store_f(r, p.offset[0], p.dtype, k, sum);
}

/* The first index out of bounds, for the driver's message. */
bool outOfBounds(__global long *bad, long index, long limit) {
  if (index >= 0 && index < limit) return false;
  bad[0] = 1;
  bad[1] = index;
  return true;
}

/* r[o, k, n] = m1[o, index[k], n]; m2: indices. flag 0: negative ones count from the end. */
__kernel void take_rows(__global char *r, __global const char *m1, __global const char *m2,
                        __global long *bad, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint i = get_global_id(0);
  uint n = i % p.inner, k = i / p.inner % p.count, o = i / p.inner / p.count;
  long index = load_l(m2, p.offset[2], p.index_dtype, k);
  if (p.flag[0] && index < 0) index += p.limit;
  if (outOfBounds(bad, index, p.limit)) return;
  long from = ((long)o * p.limit + index) * p.inner + n;
  if (p.dtype == I64 || p.dtype == I32 || p.dtype == BOOL || p.dtype == U8)
    store_l(r, p.offset[0], p.dtype, i, load_l(m1, p.offset[1], p.dtype, from));
  else
    store_f(r, p.offset[0], p.dtype, i, load_f(m1, p.offset[1], p.dtype, from));
}

/* A column for each work item, so that rows that occur twice are added one after the other. The
 * result is zero. m1: gradient, m2: indices; `other`: an index that gets none. */
__kernel void add_rows(__global char *r, __global const char *m1, __global const char *m2,
                       __global long *bad, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint n = get_global_id(0);
  for (uint k = 0; k < p.count; k++) {
    long index = load_l(m2, p.offset[2], p.index_dtype, k);
    if (index == p.other) continue;
    if (outOfBounds(bad, index, p.limit)) return;
    long at = index * p.inner + n;
    store_f(r, p.offset[0], p.dtype, at,
            load_f(r, p.offset[0], p.dtype, at) +
                load_f(m1, p.offset[1], p.dtype, (long)k * p.inner + n));
  }
}

/* m1: log probabilities, m2: target, m3: weight (flag 2). op 0: each, 1: mean, 2: sum; for the
 * last two one work item sums. `r`: the loss, `total`: the sum of weights. */
__kernel void nll_loss(__global char *r, __global char *total, __global const char *m1,
                       __global const char *m2, __global const char *m3, __global long *bad,
                       Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint first = get_global_id(0), last = p.op ? p.outer : first + 1;
  float sum = 0, weights = 0;
  for (uint o = first; o < last; o++) {
    long t = load_l(m2, p.offset[3], p.index_dtype, o);
    if (t == p.other) continue;
    if (outOfBounds(bad, t, p.limit)) return;
    float w = p.flag[2] ? load_f(m3, p.offset[4], p.dtype, t) : 1;
    sum -= w * load_f(m1, p.offset[2], p.dtype, (long)o * p.limit + t);
    weights += w;
  }
  store_f(r, p.offset[0], p.dtype, first, p.op == 1 ? sum / weights : sum);
  if (first == 0) store_f(total, p.offset[1], p.dtype, 0, p.op ? weights : 0);
}

/* m1: the loss's gradient, m2: target, m3: weight, m4: sum of weights. */
__kernel void nll_loss_backward(__global char *r, __global const char *m1, __global const char *m2,
                                __global const char *m3, __global const char *m4, Rows p) {
  if (get_global_id(0) >= p.items) return;
  uint i = get_global_id(0), o = i / (uint)p.limit;
  long t = load_l(m2, p.offset[2], p.index_dtype, o);
  float g = 0;
  if (t != p.other && t == (long)(i % (uint)p.limit)) {
    g = -load_f(m1, p.offset[1], p.dtype, p.op ? 0 : o);
    if (p.flag[2]) g *= load_f(m3, p.offset[3], p.dtype, t);
    if (p.op == 1) g /= load_f(m4, p.offset[4], p.dtype, 0);
  }
  store_f(r, p.offset[0], p.dtype, i, g);
}

/* ---- windows: convolutions and pools ---- */

/* Where the window at `out` has its element `k` in the input; false if that is in the padding. */
bool windowAt(const Window *p, int d, uint out, uint k, uint *in) {
  int at = (int)out * p->stride[d] - p->padding[d] + (int)k * p->dilation[d];
  *in = (uint)at;
  return at >= 0 && at < (int)p->in[d];
}
/* The window whose element `k` is `in`; false if there is none. */
bool windowOf(const Window *p, int d, uint in, uint k, uint *out) {
  int at = (int)in + p->padding[d] - (int)k * p->dilation[d];
  *out = (uint)(at / p->stride[d]);
  return at >= 0 && at % p->stride[d] == 0 && *out < p->out[d];
}
#define AT(plane, sizes, y, x) (((long)(plane) * sizes[0] + (y)) * sizes[1] + (x))
#define OUT_AT(n, c, y, x) AT((n) * p.groups * p.out_channels + (c), p.out, y, x)
#define IN_AT(n, c, y, x) AT((n) * p.groups * p.in_channels + (c), p.in, y, x)
#define WEIGHT_AT(o, c, y, x) AT((o) * p.in_channels + (c), p.window, y, x)

/* m1: input, m2: weight, m3: bias. */
__kernel void convolve(__global char *r, __global const char *m1, __global const char *m2,
                       __global const char *m3, Window p) {
  uint i = get_global_id(0), h, w;
  if (i >= p.items) return;
  uint ow = i % p.out[1], oh = i / p.out[1] % p.out[0];
  uint plane = i / p.out[1] / p.out[0], all = p.groups * p.out_channels;
  uint o = plane % all, n = plane / all, first = o / p.out_channels * p.in_channels;
  float sum = p.has_bias ? load_f(m3, p.offset[3], p.dtype, o) : 0;
  for (uint c = 0; c < p.in_channels; c++)
    for (uint y = 0; y < p.window[0]; y++) {
      if (!windowAt(&p, 0, oh, y, &h)) continue;
      for (uint x = 0; x < p.window[1]; x++)
        if (windowAt(&p, 1, ow, x, &w))
          sum += load_f(m1, p.offset[1], p.dtype, IN_AT(n, first + c, h, w)) *
                 load_f(m2, p.offset[2], p.dtype, WEIGHT_AT(o, c, y, x));
    }
  store_f(r, p.offset[0], p.dtype, i, sum);
}

/* m1: gradient, m2: weight. */
__kernel void convolve_input(__global char *r, __global const char *m1, __global const char *m2,
                             Window p) {
  uint i = get_global_id(0), oh, ow;
  if (i >= p.items) return;
  uint w = i % p.in[1], h = i / p.in[1] % p.in[0];
  uint plane = i / p.in[1] / p.in[0], all = p.groups * p.in_channels;
  uint c = plane % all, n = plane / all, first = c / p.in_channels * p.out_channels;
  float sum = 0;
  for (uint o = first; o < first + p.out_channels; o++)
    for (uint y = 0; y < p.window[0]; y++) {
      if (!windowOf(&p, 0, h, y, &oh)) continue;
      for (uint x = 0; x < p.window[1]; x++)
        if (windowOf(&p, 1, w, x, &ow))
          sum += load_f(m1, p.offset[1], p.dtype, OUT_AT(n, o, oh, ow)) *
                 load_f(m2, p.offset[2], p.dtype, WEIGHT_AT(o, c % p.in_channels, y, x));
    }
  store_f(r, p.offset[0], p.dtype, i, sum);
}

/* m1: gradient, m2: input. */
__kernel void convolve_weight(__global char *r, __global const char *m1, __global const char *m2,
                              Window p) {
  uint i = get_global_id(0), h, w;
  if (i >= p.items) return;
  uint x = i % p.window[1], y = i / p.window[1] % p.window[0];
  uint c = i / p.window[1] / p.window[0] % p.in_channels;
  uint o = i / p.window[1] / p.window[0] / p.in_channels;
  uint first = o / p.out_channels * p.in_channels;
  float sum = 0;
  for (uint n = 0; n < p.batch; n++)
    for (uint oh = 0; oh < p.out[0]; oh++) {
      if (!windowAt(&p, 0, oh, y, &h)) continue;
      for (uint ow = 0; ow < p.out[1]; ow++)
        if (windowAt(&p, 1, ow, x, &w))
          sum += load_f(m1, p.offset[1], p.dtype, OUT_AT(n, o, oh, ow)) *
                 load_f(m2, p.offset[2], p.dtype, IN_AT(n, first + c, h, w));
    }
  store_f(r, p.offset[0], p.dtype, i, sum);
}

/* m1: gradient. */
__kernel void convolve_bias(__global char *r, __global const char *m1, Window p) {
  uint o = get_global_id(0), area = p.out[0] * p.out[1];
  if (o >= p.items) return;
  float sum = 0;
  for (uint n = 0; n < p.batch; n++)
    for (uint i = 0; i < area; i++)
      sum += load_f(m1, p.offset[1], p.dtype, OUT_AT(n, o, 0, 0) + i);
  store_f(r, p.offset[0], p.dtype, o, sum);
}

/* m1: input. `places`: where in its plane each maximum is. */
__kernel void max_pool(__global char *r, __global char *places, __global const char *m1, Window p) {
  uint i = get_global_id(0), h, w;
  if (i >= p.items) return;
  uint ow = i % p.out[1], oh = i / p.out[1] % p.out[0];
  long plane = (long)(i / p.out[1] / p.out[0]) * p.in[0] * p.in[1], place = -1;
  float most = 0;
  for (uint y = 0; y < p.window[0]; y++) {
    if (!windowAt(&p, 0, oh, y, &h)) continue;
    for (uint x = 0; x < p.window[1]; x++) {
      if (!windowAt(&p, 1, ow, x, &w)) continue;
      float v = load_f(m1, p.offset[2], p.dtype, plane + h * p.in[1] + w);
      if (place >= 0 && !(v > most || isnan(v))) continue;
      most = v;
      place = h * p.in[1] + w;
    }
  }
  store_f(r, p.offset[0], p.dtype, i, most);
  store_l(places, p.offset[1], I64, i, place);
}

/* A plane for each work item, as windows overlap. m1: gradient, m2: places. */
__kernel void max_pool_input(__global char *r, __global const char *m1, __global const char *m2,
                             Window p) {
  uint plane = get_global_id(0), in = p.in[0] * p.in[1], out = p.out[0] * p.out[1];
  if (plane >= p.items) return;
  long base = (long)plane * in;
  for (uint i = 0; i < in; i++) store_f(r, p.offset[0], p.dtype, base + i, 0);
  for (uint i = 0; i < out; i++) {
    long from = (long)plane * out + i, at = base + load_l(m2, p.offset[2], I64, from);
    store_f(r, p.offset[0], p.dtype, at, load_f(r, p.offset[0], p.dtype, at) +
                                             load_f(m1, p.offset[1], p.dtype, from));
  }
}
