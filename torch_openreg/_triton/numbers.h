/*
 * The number types of compiled Triton kernels, and functions of single elements.
 *
 * It includes next to nothing, because each kernel is compiled on its own and headers of the
 * standard library take longer than most kernels. Integers wrap (-fwrapv).
 */
#pragma once
#include <stdint.h>
#include <string.h>

template <class To, class From>
static inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void *>(&to), &from, sizeof to);
  return to;
}

/* ---- types ---- */

/* Rounds to nearest even, as PyTorch does. Without branches, so that loops are vectorized. */
struct bf16 {
  uint16_t value;
  bf16() = default;
  template <class T>
  bf16(T from) {
    const float number = static_cast<float>(from);
    const uint32_t raw = bits<uint32_t>(number);
    value = number != number ? 0x7fc0 : (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
  }
  operator float() const { return bits<float>(static_cast<uint32_t>(value) << 16); }
};

struct f16 {
  uint16_t value;
  f16() = default;
  template <class T>
  f16(T from) {
    const uint32_t raw = bits<uint32_t>(static_cast<float>(from)), twice = raw + raw;
    float base = bits<float>(raw & 0x7fffffff) * 0x1p+112f * 0x1p-110f;
    const uint32_t exponent = twice & 0xff000000,
                   bias = exponent < 0x71000000 ? 0x71000000 : exponent;
    base = bits<float>((bias >> 1) + 0x07800000) + base;
    const uint32_t sum = bits<uint32_t>(base), rounded = (sum >> 13 & 0x7c00) + (sum & 0x0fff);
    value = (raw >> 16 & 0x8000) | (twice > 0xff000000 ? 0x7e00 : rounded);
  }
  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, rest = value & 0x7fff;
    const float number = bits<float>(rest << 13) * 0x1p+112f;
    const uint32_t raw = bits<uint32_t>(number) | (rest >= 0x7c00 ? 0x7f800000 : 0);
    return bits<float>(raw | sign);
  }
};

/* Float8 with E bits of exponent and M of mantissa. FINITE has no infinity; UNSIGNED_ZERO has one
 * zero and NaN in the place of the other. */
template <int E, int M, int BIAS, bool FINITE, bool UNSIGNED_ZERO>
struct f8 {
  uint8_t value;
  static constexpr uint32_t nan = UNSIGNED_ZERO ? 0x80 : 0x7f;
  static constexpr uint32_t last = UNSIGNED_ZERO ? 0x7f : FINITE ? 0x7e : 0x7b;
  static constexpr uint32_t beyond = UNSIGNED_ZERO ? nan : FINITE ? last : 0x7c;
  f8() = default;
  template <class T>
  f8(T from) {
    const float number = static_cast<float>(from), size = __builtin_fabsf(number);
    const uint32_t raw = bits<uint32_t>(size), sign = bits<uint32_t>(number) >> 24 & 0x80;
    constexpr uint32_t drop = 23 - M, least = 127 - BIAS + 1;
    const uint32_t even = (raw + ((1u << (drop - 1)) - 1) + (raw >> drop & 1)) >> drop;
    const float grid = bits<float>((least + drop) << 23); /* one unit of what is denormal here */
    const uint32_t small = bits<uint32_t>(size + grid) - bits<uint32_t>(grid);
    const uint32_t normal = even - ((127 - BIAS) << M);
    uint32_t result = raw < least << 23 ? small : normal;
    result = result > last ? beyond : result;
    result = number != number ? nan : result;
    value = UNSIGNED_ZERO && (result == 0 || result == nan) ? result : result | sign;
  }
  operator float() const {
    const uint32_t rest = value & 0x7f;
    const float scale = bits<float>((127u + 127 - BIAS) << 23);
    float number = bits<float>(rest << (23 - M)) * scale;
    if (UNSIGNED_ZERO) {
      if (value == 0x80) number = __builtin_nanf("");
    } else if (FINITE) {
      if (rest == 0x7f) number = __builtin_nanf("");
    } else if (rest >= 0x7c) {
      number = rest == 0x7c ? __builtin_inff() : __builtin_nanf("");
    }
    return value & 0x80 ? -number : number;
  }
};

using f8e4m3fn = f8<4, 3, 7, true, false>;
using f8e5m2 = f8<5, 2, 15, false, false>;
using f8e4m3fnuz = f8<4, 3, 8, true, true>;
using f8e5m2fnuz = f8<5, 2, 16, true, true>;

/* The nearest number, or the one before it. */
template <class To>
static inline To towards_zero(float from) {
  To to(from);
  to.value -= __builtin_fabsf(static_cast<float>(to)) > __builtin_fabsf(from);
  return to;
}

template <class T>
struct Traits {
  using Wide = float; /* in which functions are computed */
  using Bits = uint32_t;
};
template <>
struct Traits<double> {
  using Wide = double;
  using Bits = uint64_t;
};
template <class T>
using Wide = typename Traits<T>::Wide;

template <class T>
constexpr bool is_pointer = false;
template <class T>
constexpr bool is_pointer<T *> = true;
template <class T>
constexpr bool is_floating = true;
template <>
constexpr bool is_floating<bool> = false;
template <>
constexpr bool is_floating<int8_t> = false;
template <>
constexpr bool is_floating<int16_t> = false;
template <>
constexpr bool is_floating<int32_t> = false;
template <>
constexpr bool is_floating<int64_t> = false;

template <class T>
struct Unsigned {
  using type = T;
};
template <>
struct Unsigned<bool> {
  using type = uint8_t;
};
template <>
struct Unsigned<int8_t> {
  using type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using type = uint16_t;
};
template <>
struct Unsigned<int32_t> {
  using type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using type = uint64_t;
};
template <class T>
static inline auto unsign(T x) {
  return static_cast<typename Unsigned<T>::type>(x);
}
template <class T>
constexpr int width = 8 * sizeof(T);

/* ---- element-wise functions ---- */

/* Without branches; of numbers and of vectors of them. maxnum and minnum leave NaN out. */
template <class T>
static inline T maxnum(T a, T b) {
  return (a > b) | (b != b) ? a : b;
}
template <class T>
static inline T minnum(T a, T b) {
  return (a < b) | (b != b) ? a : b;
}
template <class T>
static inline T maximum(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}
template <class T>
static inline T minimum(T a, T b) {
  return (a < b) | (a != a) ? a : b;
}
template <class T>
static inline T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
static inline T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
static inline T larger_unsigned(T a, T b) {
  return unsign(a) > unsign(b) ? a : b;
}
template <class T>
static inline T smaller_unsigned(T a, T b) {
  return unsign(a) < unsign(b) ? a : b;
}

/* A division by zero gives what a card gives, all bits set, and no signal. */
template <class T>
static inline T divide(T a, T b) {
  return b == 0 ? T(-1) : b == -1 ? T(-unsign(a)) : T(a / b);
}
template <class T>
static inline T remainder(T a, T b) {
  return b == 0 || b == -1 ? T(0) : T(a % b);
}
template <class T>
static inline T divide_unsigned(T a, T b) {
  return b == 0 ? T(-1) : T(unsign(a) / unsign(b));
}
template <class T>
static inline T remainder_unsigned(T a, T b) {
  return b == 0 ? a : T(unsign(a) % unsign(b));
}
template <class T>
static inline T divide_up(T a, T b) {
  const T down = divide(a, b);
  return T(down + (down * b != a && (a < 0) == (b < 0)));
}
template <class T>
static inline T divide_down(T a, T b) {
  const T near = divide(a, b);
  return T(near - (near * b != a && (a < 0) != (b < 0)));
}
template <class T>
static inline T high_unsigned(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    return T(static_cast<unsigned __int128>(unsign(a)) * unsign(b) >> 64);
  } else {
    return T(static_cast<uint64_t>(unsign(a)) * unsign(b) >> width<T>);
  }
}
template <class T>
static inline T high_signed(T a, T b) {
  return T(static_cast<__int128>(a) * b >> width<T>);
}
template <class T>
static inline T shift_left(T a, T b) {
  return unsign(b) >= width<T> ? T(0) : T(unsign(a) << unsign(b));
}
template <class T>
static inline T shift_right_unsigned(T a, T b) {
  return unsign(b) >= width<T> ? T(0) : T(unsign(a) >> unsign(b));
}
template <class T>
static inline T shift_right(T a, T b) {
  return T(a >> (unsign(b) >= width<T> ? width<T> - 1 : b));
}
template <class T>
static inline T reversed(T a) {
  auto rest = unsign(a), result = unsign(T(0));
  for (int i = 0; i < width<T>; ++i, rest >>= 1) result = result << 1 | (rest & 1);
  return T(result);
}
template <class T>
static inline T absolute(T a) {
  return a < 0 ? T(-a) : a;
}
template <class T>
static inline bool ordered(T a, T b) {
  return a == a && b == b;
}

/* Saturates, as a card does; NaN gives 0. */
template <class T, class F>
static inline T to_integer(F from) {
  const Wide<F> x = from;
  const Wide<F> least = -static_cast<Wide<F>>(1ull << (width<T> - 1));
  const T most = static_cast<T>(~(1ull << (width<T> - 1)));
  if constexpr (sizeof(T) == 8) {
    return x != x ? T(0) : x < least ? T(1ull << 63) : x >= -least ? most : T(x);
  } else if constexpr (sizeof(T) == 4) {
    return x != x ? 0 : x < least ? INT32_MIN : x >= -least ? most : T(x);
  } else {
    return T(to_integer<int32_t>(x));
  }
}
template <class T, class F>
static inline T to_unsigned(F from) {
  const Wide<F> x = from;
  if constexpr (sizeof(T) == 8) {
    return x != x || x <= 0 ? T(0) : x >= 0x1p64f ? T(-1) : T(static_cast<uint64_t>(x));
  } else {
    const int64_t whole = to_integer<int64_t>(x), most = UINT32_MAX;
    return T(whole < 0 ? 0 : whole > most ? most : whole);
  }
}

/* x y + z, rounded once where that is one instruction. */
static inline float fused(float x, float y, float z) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}
/* p 2^n, where `shifted` is n + 1.5 * 2^23, so that n is in its last bits. Small results are first
 * made 2^64 times as large, because they may be denormal. */
static inline float scale_by_power(float p, float shifted, bool small) {
  const uint32_t exponent = bits<uint32_t>(shifted) + (small ? 126 + 64 : 126);
  return p * (small ? 0x1p-63f : 2.f) * bits<float>(exponent << 23);
}
/* Within 1.01 ulp. Polynomials, because calls of the C library are not vectorized. */
static inline float exponential(float x) {
  const float clamped = x < -104.f ? -104.f : x;
  const float shifted = fused(clamped, 0x1.715476p+0f, 0x1.8p23f), n = shifted - 0x1.8p23f;
  const float r = fused(n, -0x1.7f7d1cp-20f, fused(n, -0x1.62e4p-1f, clamped));
  float p = 1.9875691500e-4f;
  p = fused(p, r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = scale_by_power(fused(p, r * r, r) + 1.f, shifted, clamped < -86.f);
  return x > 88.7228394f ? __builtin_inff() : p;
}
static inline float exponential2(float x) {
  const float clamped = x < -151.f ? -151.f : x;
  const float shifted = clamped + 0x1.8p23f, r = clamped - (shifted - 0x1.8p23f);
  float p = 1.535336188319500e-4f;
  p = fused(p, r, 1.339887440266574e-3f);
  p = fused(p, r, 9.618437357674640e-3f);
  p = fused(p, r, 5.550332471162809e-2f);
  p = fused(p, r, 2.402264791363012e-1f);
  p = fused(p, r, 6.931472028550421e-1f);
  p = scale_by_power(fused(p, r, 1.f), shifted, clamped < -124.f);
  return x >= 128.f ? __builtin_inff() : p;
}
static inline double exponential(double x) { return __builtin_exp(x); }
static inline double exponential2(double x) { return __builtin_exp2(x); }

#define FUNCTION(name)                                                     \
  static inline float f_##name(float x) { return __builtin_##name##f(x); } \
  static inline double f_##name(double x) { return __builtin_##name(x); }
FUNCTION(log);
FUNCTION(log2);
FUNCTION(log10);
FUNCTION(log1p);
FUNCTION(expm1);
FUNCTION(sqrt);
FUNCTION(cbrt);
FUNCTION(sin);
FUNCTION(cos);
FUNCTION(tan);
FUNCTION(asin);
FUNCTION(acos);
FUNCTION(atan);
FUNCTION(sinh);
FUNCTION(cosh);
FUNCTION(asinh);
FUNCTION(acosh);
FUNCTION(atanh);
FUNCTION(tanh);
FUNCTION(erf);
FUNCTION(erfc);
FUNCTION(floor);
FUNCTION(ceil);
FUNCTION(trunc);
FUNCTION(round);
FUNCTION(rint);
FUNCTION(fabs);
FUNCTION(lgamma);
FUNCTION(tgamma);
FUNCTION(exp10);
FUNCTION(j0);
FUNCTION(j1);
FUNCTION(y0);
FUNCTION(y1);
FUNCTION(logb);
#undef FUNCTION
static inline float f_exp(float x) { return exponential(x); }
static inline double f_exp(double x) { return exponential(x); }
static inline float f_exp2(float x) { return exponential2(x); }
static inline double f_exp2(double x) { return exponential2(x); }
#define FUNCTION(name)                                                                 \
  static inline float f_##name(float x, float y) { return __builtin_##name##f(x, y); } \
  static inline double f_##name(double x, double y) { return __builtin_##name(x, y); }
FUNCTION(pow);
FUNCTION(atan2);
FUNCTION(fmod);
FUNCTION(copysign);
FUNCTION(nextafter);
FUNCTION(fdim);
FUNCTION(hypot);
FUNCTION(remainder);
#undef FUNCTION
/* sin(pi x + quarters pi / 2), exact where it is 0 or 1. */
template <class T>
static inline T turned(T x, int quarters) {
  const T rest = f_fmod(x, T(2)), nearest = f_rint(2 * rest);
  const T angle = (rest - nearest / 2) * T(3.14159265358979323846);
  quarters += to_integer<int32_t>(nearest);
  const T value = quarters & 1 ? f_cos(angle) : f_sin(angle);
  return quarters & 2 ? -value : value;
}
template <class T>
static inline T f_sinpi(T x) {
  const T value = turned(x, 0);
  return value == 0 ? f_copysign(value, x) : value;
}
template <class T>
static inline T f_cospi(T x) {
  return turned(x, 1) + 0; /* -0 becomes 0 */
}
template <class T>
static inline T f_rsqrt(T x) {
  return 1 / f_sqrt(x);
}
static inline float f_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double f_fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
