/* One value as bfloat16, float16 or int8, and back: one file for C++, CUDA and NVRTC.
 *
 * All rounding is to nearest, ties to even, and what comes out is a function of the bits that go in.
 * flwr_decentral.ops.codecs says the same in Python.
 */
#ifndef FDK_CODECS_H
#define FDK_CODECS_H

#include "partition.h"

/* Values that share a scale in int8. */
#define FDK_BLOCK 256

FDK_FN uint32_t fdk_bits(float value) {
  union {
    float value;
    uint32_t bits;
  } u;
  u.value = value;
  return u.bits;
}

FDK_FN float fdk_value(uint32_t bits) {
  union {
    float value;
    uint32_t bits;
  } u;
  u.bits = bits;
  return u.value;
}

FDK_FN uint16_t fdk_bfloat16(uint32_t bits) {
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40u;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

FDK_FN uint32_t fdk_from_bfloat16(uint16_t half) { return (uint32_t)half << 16; }

FDK_FN uint16_t fdk_float16(uint32_t bits) {
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  /* Adding one half leaves in the low bits a denormal half, rounded by the addition. */
  uint32_t denormal = fdk_bits(fdk_value(magnitude) + 0.5f) - 0x3f000000u;
  /* The exponent counts from 15 instead of 127; the wrap is meant. */
  uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return (uint16_t)(sign | half);
}

FDK_FN uint32_t fdk_from_float16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t wide = magnitude << 13;
  /* A denormal half is its mantissa times 2**-24, and both are exact. */
  uint32_t denormal = fdk_bits((float)(int32_t)magnitude * 0x1p-24f);
  uint32_t bits = magnitude < 0x400u ? denormal : wide + 0x38000000u;
  bits = magnitude >= 0x7c00u ? 0x7f800000u | wide : bits;
  bits = magnitude > 0x7c00u ? 0x7fc00000u | wide : bits;
  return sign | bits;
}

/* The scale of a block of int8, of which the largest magnitude has these bits: rounded up to 16
 * significant bits; zero for magnitudes below 2**-100, and NaN where they are not finite. */
FDK_FN float fdk_scale(uint32_t peak) {
  uint32_t bits = (fdk_bits(fdk_value(peak) / 127.0f) + 0xffu) & ~0xffu;
  bits = peak < 0x0d800000u ? 0u : bits;
  return fdk_value(peak >= 0x7f800000u ? 0x7fc00000u : bits);
}

/* The code of one value, given a scale above zero. */
FDK_FN int8_t fdk_int8(float value, float scale) {
  /* So large that its last bit is worth one: adding it rounds to an integer, ties to even. */
  return (int8_t)(int32_t)((value / scale + 12582912.0f) - 12582912.0f);
}

#endif
