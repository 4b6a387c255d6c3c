// Eight-lane arithmetic in the compiler's vector extensions: AVX2 where the build targets it, whatever the target has
// elsewhere, from one source. Storage may be float, double or bfloat16; arithmetic is float, or double for double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define TORCHGT_INLINE inline __attribute__((always_inline))
#define TORCHGT_NOINLINE __attribute__((noinline))

namespace torchgt {

struct BFloat16 {
  uint16_t bits;
};

template <class A>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
};
template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(64)));
  typedef int64_t I __attribute__((vector_size(64)));
};

template <class S>
struct ArithmeticOf {
  using type = S;
};
template <>
struct ArithmeticOf<BFloat16> {
  using type = float;
};

using F = Lanes<float>::V;
using G = Lanes<double>::V;
using FI = Lanes<float>::I;
using GI = Lanes<double>::I;
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint32_t UF __attribute__((vector_size(32)));

template <class V, class A>
TORCHGT_INLINE V splat(A a) {
  return V{a, a, a, a, a, a, a, a};
}

// Loads and stores of eight, and of fewer: the others read as 0 and are not touched.

TORCHGT_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TORCHGT_INLINE G load(const double* p) {
  G v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TORCHGT_INLINE F load(const BFloat16* p) {
  U16x8 half;
  std::memcpy(&half, p, sizeof half);
  const UF wide = __builtin_convertvector(half, UF) << 16;
  F v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}
TORCHGT_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
TORCHGT_INLINE void store(double* p, G v) { std::memcpy(p, &v, sizeof v); }
TORCHGT_INLINE void store(BFloat16* p, F v) {
  UF bits;
  std::memcpy(&bits, &v, sizeof v);
  UF rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const UF nan = splat<UF>(0x7FC0u);
  rounded = (v != v) ? nan : rounded;
  const U16x8 half = __builtin_convertvector(rounded, U16x8);
  std::memcpy(p, &half, sizeof half);
}

template <class S>
TORCHGT_INLINE auto load_some(const S* p, int n) -> decltype(load(p)) {
  S part[8];
  std::memset(part, 0, sizeof part);
  for (int i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}
template <class S, class V>
TORCHGT_INLINE void store_some(S* p, V v, int n) {
  S part[8];
  store(part, v);
  for (int i = 0; i < n; ++i) p[i] = part[i];
}
#ifdef __AVX2__
TORCHGT_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TORCHGT_INLINE F load_some(const float* p, int n) { return (F)_mm256_maskload_ps(p, first_lanes(n)); }
TORCHGT_INLINE void store_some(float* p, F v, int n) { _mm256_maskstore_ps(p, first_lanes(n), (__m256)v); }
#endif

// The first N lanes, N known to the compiler.
template <int N, class S>
TORCHGT_INLINE auto load_first(const S* p) -> decltype(load(p)) {
  if constexpr (N == 8) {
    return load(p);
  } else {
    S part[8];
    std::memset(part, 0, sizeof part);
    std::memcpy(part, p, N * sizeof(S));
    return load(part);
  }
}
template <int N, class S, class V>
TORCHGT_INLINE void store_first(S* p, V v) {
  if constexpr (N == 8) {
    store(p, v);
  } else {
    S part[8];
    store(part, v);
    std::memcpy(p, part, N * sizeof(S));
  }
}

template <class V>
TORCHGT_INLINE V maximum(V a, V b) {
  return a > b ? a : b;
}

TORCHGT_INLINE bool any(FI mask) {
#ifdef __AVX2__
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t all = 0;
  for (int i = 0; i < 8; ++i) all |= mask[i];
  return all != 0;
#endif
}
TORCHGT_INLINE bool any(GI mask) {
  int64_t all = 0;
  for (int i = 0; i < 8; ++i) all |= mask[i];
  return all != 0;
}

// exp to about 1 ulp for x <= 88; results below 1.7e-38 are 0 (Cephes' polynomial, round-to-nearest reduction).
TORCHGT_INLINE F exponential(F x) {
  const F magic = splat<F>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  const F lowest = splat<F>(-87.0f);
  const F c = x < lowest ? lowest : x;
  const F shifted = c * 1.44269504088896341f + magic;
  const F n = shifted - magic;
  F r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  F y = p * (r * r) + r + 1.0f;
  FI bits, exponent;
  std::memcpy(&bits, &y, sizeof y);
  std::memcpy(&exponent, &shifted, sizeof shifted);
  bits += exponent << 23;
  std::memcpy(&y, &bits, sizeof y);
  return x < lowest ? splat<F>(0.0f) : y;
}
TORCHGT_INLINE G exponential(G x) {
  G y;
  for (int i = 0; i < 8; ++i) y[i] = std::exp(x[i]);
  return y;
}

// Lane h of the result is the sum over the lanes of t[h]; lanes from N on are unspecified but finite if t is.
template <int N>
TORCHGT_INLINE F sum_each(const F* t) {
#define TORCHGT_PAIR(a, b)                                        \
  (__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +      \
   __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15))
#define TORCHGT_QUAD(a, b)                                        \
  (__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +      \
   __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
  const F a = TORCHGT_PAIR(t[0], t[N > 1 ? 1 : 0]);
  const F b = N > 2 ? TORCHGT_PAIR(t[N > 2 ? 2 : 0], t[N > 3 ? 3 : 0]) : a;
  const F ab = TORCHGT_QUAD(a, b);
  F cd = ab;
  if constexpr (N > 4) {
    const F c = TORCHGT_PAIR(t[4], t[5]);
    const F d = TORCHGT_PAIR(t[6], t[7]);
    cd = TORCHGT_QUAD(c, d);
  }
  return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15);
#undef TORCHGT_PAIR
#undef TORCHGT_QUAD
}
template <int N>
TORCHGT_INLINE G sum_each(const G* t) {
  G s = splat<G>(0.0);
  for (int h = 0; h < N; ++h) {
    s[h] = ((t[h][0] + t[h][4]) + (t[h][1] + t[h][5])) + ((t[h][2] + t[h][6]) + (t[h][3] + t[h][7]));
  }
  return s;
}

}  // namespace torchgt
