// Scalar conversions between float32 and the two 16-bit formats, in forms the compiler vectorises.
//
// Integer arithmetic throughout: XLA's threads may flush subnormals to zero, and a subnormal fp16
// is an ordinary number.

#ifndef JAX_MAGI_CPU_CONVERT_H_
#define JAX_MAGI_CPU_CONVERT_H_

#include <cstdint>
#include <cstring>

#include "cc/mask.h"

namespace jax_magi::cpu {
namespace {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

JAX_MAGI_INLINE float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

JAX_MAGI_INLINE uint32_t ToBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

JAX_MAGI_INLINE float ToFloat(float x) { return x; }

JAX_MAGI_INLINE float ToFloat(BF16 x) { return FromBits(uint32_t{x.bits} << 16); }

JAX_MAGI_INLINE float ToFloat(F16 x) {
  const uint32_t magnitude = uint32_t{x.bits} & 0x7fff;
  const uint32_t sign = (uint32_t{x.bits} & 0x8000) << 16;
  // Rebias the exponent by 127 - 15; inf and NaN need it twice to reach the top.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  // 2^-14 + m * 2^-24 is a normal float32; taking 2^-14 away leaves the subnormal's value.
  const uint32_t subnormal = ToBits(FromBits((113u << 23) | (magnitude << 13)) - 0x1p-14f);
  const uint32_t bits = magnitude >= 0x7c00 ? special : (magnitude < 0x0400 ? subnormal : normal);
  return FromBits(bits | sign);
}

template <typename T>
T FromFloat(float x);

template <>
JAX_MAGI_INLINE float FromFloat<float>(float x) {
  return x;
}

template <>
JAX_MAGI_INLINE BF16 FromFloat<BF16>(float x) {
  const uint32_t bits = ToBits(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);  // To nearest, ties to even.
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded >> 16)};
}

template <>
JAX_MAGI_INLINE F16 FromFloat<F16>(float x) {
  const uint32_t bits = ToBits(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t normal = (magnitude - (112u << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // The ulp of 0.5 is 2^-24, fp16's smallest subnormal: the addition does the rounding.
  const uint32_t subnormal = ToBits(FromBits(magnitude) + 0.5f) - ToBits(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // Rounds past the largest finite fp16.
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return {static_cast<uint16_t>(half | sign)};
}

}  // namespace
}  // namespace jax_magi::cpu

#endif  // JAX_MAGI_CPU_CONVERT_H_
