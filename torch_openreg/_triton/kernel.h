/*
 * What the C++ of a compiled Triton kernel includes: moves and reductions of rows, atomics, prints
 * and products, beside the functions of numbers.h.
 */
#pragma once
#include <bits/functexcept.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "numbers.h"

#define COLD __attribute__((noinline, cold))

/* ---- rows of memory ---- */

/* `to` = `from`, in another type. */
template <class T>
static inline void widen(float *to, const T *from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
#ifdef __F16C__
static inline void widen(float *to, const f16 *from, int64_t count) {
  typedef short Halves __attribute__((vector_size(16), aligned(2)));
  typedef float Floats __attribute__((vector_size(32), aligned(4)));
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto halves = *reinterpret_cast<const Halves *>(from + i);
    *reinterpret_cast<Floats *>(to + i) = __builtin_ia32_vcvtph2ps256(halves);
  }
  for (; i < count; ++i) to[i] = from[i];
}
#endif

template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

/* `stride` is in elements; elements [from, to) of `length` are there, the others are `other`. */
template <class T, class M>
static inline void load_row(T *row, const M *memory, int64_t stride, int64_t from, int64_t to,
                            int64_t length, T other) {
  if (to < from) to = from;
  if (from > 0 || to < length) {
    for (int64_t i = 0; i < from; ++i) row[i] = other;
    for (int64_t i = to; i < length; ++i) row[i] = other;
  }
  if constexpr (!is_same<T, M>) {
    if (stride == 1 && from < to) return widen(row + from, memory + from, to - from);
    for (int64_t i = from; i < to; ++i) row[i] = memory[i * stride];
  } else if (stride == 1 && from == 0 && to == length) { /* of a size that the compiler sees */
    memcpy(static_cast<void *>(row), memory, length * sizeof(T));
  } else if (stride == 1) {
    memcpy(static_cast<void *>(row + from), memory + from, (to - from) * sizeof(T));
  } else {
    for (int64_t i = from; i < to; ++i) row[i] = memory[i * stride];
  }
}

/* The pointer, with nothing known of where it comes from: g++ 12 makes gathers of loops over a
 * pointer that is one of two. */
template <class T>
static inline T *opaque(T *pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

/* The row in memory if all of it is there; else a copy. */
template <class T>
static inline T *borrow_row(T *copy, T *memory, int64_t stride, int64_t from, int64_t to,
                            int64_t length, T other) {
  const bool all = from <= 0 && to >= length;
  if (!all) load_row(copy, memory, stride, from, to, length, other);
  return opaque(all ? memory : copy);
}
/* A borrowed row before something is written: in its copy, if it is not there already. */
template <class T>
static inline T *settled(T *row, T *copy, int64_t length) {
  if (row != copy) memcpy(static_cast<void *>(copy), row, length * sizeof(T));
  return copy;
}
/* The same before `count` elements from `begin` on are written: where it is, if it is elsewhere, or
 * begins there and may. */
template <class T, class M>
static inline T *settled(T *row, T *copy, int64_t length, const M *begin, int64_t count,
                         bool may_be_same) {
  const auto at = reinterpret_cast<uintptr_t>(row), to = reinterpret_cast<uintptr_t>(begin);
  const bool apart = at + length * sizeof(T) <= to || to + count * sizeof(M) <= at;
  const bool stays = apart || count <= 0 || (may_be_same && at == to);
  if (!stays) settled(row, copy, length);
  return opaque(stays ? row : copy);
}

static inline bool fits32(int64_t first, int64_t last) {
  return first == static_cast<int32_t>(first) && last == static_cast<int32_t>(last);
}
static inline bool fits62(int64_t first, int64_t last) {
  return first >> 62 == first >> 63 && last >> 62 == last >> 63;
}

/* ---- reductions of rows ---- */

#ifdef __AVX512F__
constexpr int VECTOR = 16, ROWS = 12; /* floats in a vector, and rows of a product at once */
#elif defined(__AVX2__)
constexpr int VECTOR = 8, ROWS = 6;
#else
constexpr int VECTOR = 4, ROWS = 4;
#endif

#define REDUCTION(Name, result) \
  struct Name {                 \
    template <class V>          \
    static V of(V a, V b) {     \
      return result;            \
    }                           \
  };
REDUCTION(Add, a + b);
REDUCTION(Multiply, (a * b));
REDUCTION(MaxNum, maxnum(a, b));
REDUCTION(MinNum, minnum(a, b));
REDUCTION(Maximum, maximum(a, b));
REDUCTION(Minimum, minimum(a, b));
REDUCTION(Larger, a > b ? a : b);
REDUCTION(Smaller, a < b ? a : b);
REDUCTION(And, (a & b));
REDUCTION(Or, a | b);
REDUCTION(Xor, a ^ b);
#undef REDUCTION

template <int N, class T>
constexpr int LENGTH = N < VECTOR * 4 / int(sizeof(T)) ? N : VECTOR * 4 / int(sizeof(T));
template <int N, class T>
constexpr int WAYS = N >= 4 * LENGTH<N, T> ? 4 : 1; /* sums at a time, which do not wait */

template <class Op, class T, int L>
static inline T reduce_vector(const T *x) {
  if constexpr (L == 1) {
    return *x;
  } else {
    typedef T Half __attribute__((vector_size(L / 2 * sizeof(T)), aligned(sizeof(T))));
    Half halves[2];
    memcpy(&halves, x, sizeof halves);
    const Half result = Op::of(halves[0], halves[1]);
    return reduce_vector<Op, T, L / 2>(reinterpret_cast<const T *>(&result));
  }
}

/* Of N elements, a power of two. `part` gives the address of a few that begin at an index. */
template <class Op, int N, class T, class F>
static inline __attribute__((always_inline)) T reduce_parts(F part) {
  constexpr int L = LENGTH<N, T>, COUNT = WAYS<N, T>;
  typedef T V __attribute__((vector_size(L * sizeof(T)), aligned(sizeof(T))));
  V sums[COUNT];
  memcpy(&sums, part(0), sizeof sums);
  for (int i = COUNT * L; i < N; i += COUNT * L) {
    const T *x = part(i);
    for (int w = 0; w < COUNT; ++w)
      sums[w] = Op::of(sums[w], *reinterpret_cast<const V *>(x + w * L));
  }
  for (int w = 1; w < COUNT; ++w) sums[0] = Op::of(sums[0], sums[w]);
  return reduce_vector<Op, T, L>(reinterpret_cast<const T *>(&sums[0]));
}

/* Of N elements that lie one behind the other. */
template <class Op, int N, class T>
static inline T reduce_row(const T *x) {
  return reduce_parts<Op, N, T>([&](int i) { return x + i; });
}

/* The same of the results of element(0) to element(N - 1). */
template <class Op, int N, class T, class F>
static inline __attribute__((always_inline)) T reduce_each(F element) {
  T part[WAYS<N, T> * LENGTH<N, T>];
  return reduce_parts<Op, N, T>([&](int i) {
    for (int k = 0; k < WAYS<N, T> * LENGTH<N, T>; ++k) part[k] = element(i + k);
    return part;
  });
}

/* ---- atomics ---- */

template <int SIZE>
struct Word {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint64_t;
};

/* Replaces *memory by change(*memory), and returns what was there. */
template <class T, class F>
static inline T update(T *memory, F change) {
  using Raw = typename Word<sizeof(T)>::type;
  Raw *raw = reinterpret_cast<Raw *>(memory);
  Raw old = __atomic_load_n(raw, __ATOMIC_RELAXED), next;
  do {
    next = bits<Raw>(change(bits<T>(old)));
  } while (!__atomic_compare_exchange_n(raw, &old, next, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return bits<T>(old);
}
#define ATOMIC(kind, result)                                            \
  template <class T>                                                    \
  static inline T atomic_##kind(T *memory, T x) {                       \
    return update(memory, [x](T a) { return static_cast<T>(result); }); \
  }
ATOMIC(add, a + x);
ATOMIC(fadd, a + x);
ATOMIC(max, larger(a, x));
ATOMIC(min, smaller(a, x));
ATOMIC(umax, larger_unsigned(a, x));
ATOMIC(umin, smaller_unsigned(a, x));
ATOMIC(and, (a & x));
ATOMIC(or, a | x);
ATOMIC(xor, a ^ x);
ATOMIC(exch, x);
#undef ATOMIC
template <class T>
static inline T atomic_cas(T *memory, T expected, T x) {
  using Raw = typename Word<sizeof(T)>::type;
  Raw old = bits<Raw>(expected);
  __atomic_compare_exchange_n(reinterpret_cast<Raw *>(memory), &old, bits<Raw>(x), false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return bits<T>(old);
}
template <class T>
static inline T atomic_load(const T *memory) {
  using Raw = typename Word<sizeof(T)>::type;
  return bits<T>(__atomic_load_n(reinterpret_cast<const Raw *>(memory), __ATOMIC_SEQ_CST));
}
template <class T>
static inline void atomic_store(T *memory, T x) {
  using Raw = typename Word<sizeof(T)>::type;
  __atomic_store_n(reinterpret_cast<Raw *>(memory), bits<Raw>(x), __ATOMIC_SEQ_CST);
}

/* Waits until *memory is `expected`, or until `timeout` nanoseconds have passed; below 0: without
 * an end. Returns whether it is. */
template <class T>
static inline bool atomic_poll(const T *memory, T expected, int64_t timeout) {
  struct timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  while (atomic_load(memory) != expected) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t seconds = now.tv_sec - begin.tv_sec, rest = now.tv_nsec - begin.tv_nsec;
    if (timeout >= 0 && seconds * 1000000000 + rest >= timeout) return false;
  }
  return true;
}

/* ---- the launch ---- */

/* The scratch memory of a thread, which keeps it for its next programs. */
static inline char *scratch(size_t size) {
  static thread_local struct Memory {
    char *begin = nullptr;
    size_t size = 0;
    ~Memory() { free(begin); }
  } memory;
  if (memory.size < size) {
    free(memory.begin);
    memory.size = (size + 63) / 64 * 64;
    memory.begin = static_cast<char *>(aligned_alloc(64, memory.size));
    if (memory.begin == nullptr) std::__throw_bad_alloc();
  }
  return memory.begin;
}

/* In which order programs run: that of their numbers, or without 0 another one, drawn by `key`. */
class Order {
 public:
  Order(int64_t programs, int64_t key) : count(programs) {
    if (key == 0 || count < 2) return;
    uint64_t drawn = mix(key);
    first = drawn % count;
    do step = (drawn = mix(drawn)) % count;
    while (divisor(step, count) != 1);
  }
  int64_t operator[](int64_t at) const {
    if (step == 1 && first == 0) return at;
    return static_cast<int64_t>((static_cast<unsigned __int128>(at) * step + first) % count);
  }

 private:
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }
  static uint64_t divisor(uint64_t a, uint64_t b) {
    while (b != 0) {
      const uint64_t rest = a % b;
      a = b, b = rest;
    }
    return a;
  }
  uint64_t count, step = 1, first = 0;
};

/* The address for kernels of a pointer that was read from memory (csrc/aten/compiled_kernel.h). */
using FollowPointer = void *(*)(void *pointer, const char *place);
template <class T>
static inline T *follow(void *function, T *pointer, const char *place) {
  return static_cast<T *>(reinterpret_cast<FollowPointer>(function)((void *)pointer, place));
}

/* The first failed assertion of the launch that runs. */
struct Failure {
  const char *text = nullptr;
  char words[300];
  COLD bool set(const char *reason) {
    const char *none = nullptr;
    return __atomic_compare_exchange_n(&text, &none, reason, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
  }
  COLD void set_index(const char *place, int64_t index, int size) {
    if (!set(words)) return;
    __builtin_snprintf(words, sizeof words, "%s: tl.gather has index %lld, allowed are 0 to %d",
                       place, static_cast<long long>(index), size - 1);
  }
};

/* ---- device_print, in the form that CUDA's has ---- */

static inline void print_program(const int32_t *program) {
  __builtin_printf("pid (%d, %d, %d)", program[0], program[1], program[2]);
}
template <class T>
static inline void print_value(bool hexadecimal, bool is_signed, T value) {
  if constexpr (is_pointer<T>) {
    __builtin_printf("%p\n", static_cast<const void *>(value));
  } else if (hexadecimal) {
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof value);
    __builtin_printf("0x%0*llx\n", static_cast<int>(2 * sizeof value),
                     static_cast<unsigned long long>(raw));
  } else if constexpr (is_floating<T>) {
    __builtin_printf("%f\n", static_cast<double>(value));
  } else if (is_signed) {
    __builtin_printf("%lld\n", static_cast<long long>(value));
  } else {
    __builtin_printf("%llu\n", static_cast<unsigned long long>(unsign(value)));
  }
}

/* ---- products of matrices, whose sums are fused, as on cards ---- */

#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

/* to [N, M] = from [M, N] transposed, by blocks of 8 x 8 in registers. */
template <int M, int N>
static inline void transpose(const float *from, float *to) {
  typedef float V __attribute__((vector_size(32), aligned(4)));
  typedef int32_t I __attribute__((vector_size(32)));
  for (int i = 0; i < M; i += 8) {
    for (int j = 0; j < N; j += 8) {
      V rows[8], mixed[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) rows[r] = *reinterpret_cast<const V *>(from + (i + r) * N + j);
#pragma GCC unroll 3
      for (int step = 0; step < 3; ++step) { /* each interleaves rows r and r + 4 */
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          mixed[2 * r] = __builtin_shuffle(rows[r], rows[r + 4], (I){0, 8, 1, 9, 2, 10, 3, 11});
          mixed[2 * r + 1] =
              __builtin_shuffle(rows[r], rows[r + 4], (I){4, 12, 5, 13, 6, 14, 7, 15});
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) rows[r] = mixed[r];
      }
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) *reinterpret_cast<V *>(to + (j + r) * M + i) = rows[r];
    }
  }
}

/* R rows of c += a b, W vectors wide, whose sums stay in registers. */
template <int R, int W, int N, int K, class T>
static inline __attribute__((always_inline)) void multiply_block(const T *a, int64_t step_row,
                                                                 int64_t step_depth, const T *b,
                                                                 T *c) {
  constexpr int L = VECTOR * 4 / sizeof(T);
  typedef T V __attribute__((vector_size(L * sizeof(T)), aligned(sizeof(T))));
  V sums[R][W];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sums[r][w] = *reinterpret_cast<const V *>(c + r * N + w * L);
#pragma GCC unroll 2
  for (int k = 0; k < K; ++k) {
    V row[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) row[w] = *reinterpret_cast<const V *>(b + k * N + w * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const T x = a[r * step_row + k * step_depth];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[r][w] += x * row[w];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) *reinterpret_cast<V *>(c + r * N + w * L) = sums[r][w];
}

template <int W, int M, int N, int K, class T>
static inline void multiply_columns(const T *a, int64_t step_row, int64_t step_depth, const T *b,
                                    T *c) {
  int i = 0;
  for (; i + ROWS <= M; i += ROWS) {
    multiply_block<ROWS, W, N, K>(a + i * step_row, step_row, step_depth, b, c + i * N);
  }
  constexpr int rest = M % ROWS;
  if constexpr (rest > 0) {
    multiply_block<rest, W, N, K>(a + i * step_row, step_row, step_depth, b, c + i * N);
  }
}

/* c += a b. b [K, N] and c [M, N] are row-major; a [M, K] may have any strides. */
template <int M, int N, int K, class T>
static inline void multiply(const T *a, int64_t step_row, int64_t step_depth, const T *b, T *c) {
  constexpr int L = VECTOR * 4 / sizeof(T), W = 2;
  if constexpr (N % L == 0) {
    int j = 0;
    for (; j + W * L <= N; j += W * L) {
      multiply_columns<W, M, N, K>(a, step_row, step_depth, b + j, c + j);
    }
    if constexpr (N % (W * L) != 0)
      multiply_columns<1, M, N, K>(a, step_row, step_depth, b + j, c + j);
  } else {
    for (int i = 0; i < M; ++i)
      for (int k = 0; k < K; ++k)
        for (int j = 0; j < N; ++j) c[i * N + j] += a[i * step_row + k * step_depth] * b[k * N + j];
  }
}
#pragma GCC pop_options
