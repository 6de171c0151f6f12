// Vectors of floats, as wide as the instruction set this file is compiled for.
//
// Everything has internal linkage: the file is compiled several times into one library.

#ifndef JAX_MAGI_CPU_VECTOR_H_
#define JAX_MAGI_CPU_VECTOR_H_

#include <cstdint>

#include "cc/mask.h"

namespace jax_magi::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

// An unaligned vector in memory. With memcpy instead, gcc would store through scalar registers.
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

JAX_MAGI_INLINE Vec Load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
JAX_MAGI_INLINE void Store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

JAX_MAGI_INLINE Vec Broadcast(float x) { return Vec{} + x; }

JAX_MAGI_INLINE Vec Select(IntVec mask, Vec yes, Vec no) {
  return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no));
}

using jax_magi::Max;
using jax_magi::Min;

// NaN in `a` is dropped, NaN in `b` is kept.
JAX_MAGI_INLINE Vec Max(Vec a, Vec b) { return Select(a > b, a, b); }
JAX_MAGI_INLINE Vec Min(Vec a, Vec b) { return Select(a < b, a, b); }
JAX_MAGI_INLINE Vec Abs(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

// exp(x) to about one ulp for x <= 88; 0 below -87, where float32 runs out of normal numbers.
JAX_MAGI_INLINE Vec Exp(Vec x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
  const Vec magic = Broadcast(12582912.0f);
  const Vec shifted = x * 1.44269504f + magic;
  const Vec n = shifted - magic;
  // ln 2 in two parts, the first exact in few bits, so that n * part loses nothing.
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // Minimax polynomial for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes).
  Vec p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec scaled = (Vec)((IntVec)p + ((IntVec)shifted << 23));
  // Otherwise the NaN's own bits would take part in the addition above.
  return Select(x != x, x, Select(x < -87.0f, Vec{}, scaled));
}

JAX_MAGI_INLINE Vec Tanh(Vec x) {
  const Vec y = Abs(x);
  // Past 9, tanh is 1 in float32.
  const Vec e = Exp(2.0f * Min(Broadcast(9.0f), y));
  const Vec large = 1.0f - 2.0f / (e + 1.0f);
  // Near zero the difference above would cancel (Cephes).
  const Vec z = y * y;
  Vec p = Broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Vec small = p * z * y + y;
  const IntVec sign = (IntVec)x & (int32_t)0x80000000;
  return (Vec)((IntVec)Select(y < 0.625f, small, large) | sign);
}

}  // namespace
}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_VECTOR_H_
