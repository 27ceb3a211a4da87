// SPDX-License-Identifier: Apache-2.0
//
// The number formats that tensors come in, and their way to fp32 and back.
//
// Conversions are done on bits: rounding is to the nearest, ties to even; an
// infinity stays one, NaN stays NaN. None depends on whether the thread flushes
// subnormal numbers, and all are plain selects, which compilers vectorize.
#ifndef VLLM_HOST_CHANNELS_NUMBERS_H
#define VLLM_HOST_CHANNELS_NUMBERS_H

#include <stdint.h>
#include <string.h>

#include "host_channels.h"

namespace host_channels {

inline uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

constexpr uint32_t kMagnitude = 0x7fff'ffff;
constexpr uint32_t kInfinity = 0x7f80'0000;

struct Float32 {
  using Stored = float;
  static float load(float stored) { return stored; }
  static float store(float number) { return number; }
};

struct Bfloat16 {
  using Stored = uint16_t;

  static float load(uint16_t stored) {
    return float_of(uint32_t{stored} << 16);
  }

  static uint16_t store(float number) {
    const uint32_t bits = bits_of(number);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    const uint32_t quiet = bits | 1 << 22;  // a payload cut off is no infinity
    const bool nan = (bits & kMagnitude) > kInfinity;
    return static_cast<uint16_t>((nan ? quiet : rounded) >> 16);
  }
};

// Half precision: a sign, 5 bits of exponent biased by 15, 10 of fraction.
struct Float16 {
  using Stored = uint16_t;
  static constexpr uint32_t kRebias = 127 - 15;

  static float load(uint16_t stored) {
    const uint32_t magnitude = stored & 0x7fff;
    const uint32_t exponents = magnitude < 0x7c00 ? kRebias : 2 * kRebias;
    const uint32_t normal = (magnitude << 13) + (exponents << 23);
    // below the least normal number, 2^-14, the steps are of 2^-24
    const float steps = static_cast<float>(static_cast<int32_t>(magnitude));
    const uint32_t subnormal = bits_of(steps * 0x1p-24f);
    const uint32_t sign = (stored & 0x8000u) << 16;
    return float_of(sign | (magnitude < 0x400 ? subnormal : normal));
  }

  static uint16_t store(float number) {
    const uint32_t magnitude = bits_of(number) & kMagnitude;
    const uint32_t even = magnitude + 0xfff + (magnitude >> 13 & 1);
    uint32_t half = (even - (kRebias << 23)) >> 13;
    // adding 0.5 leaves a multiple of 2^-24, rounded, in the lowest bits
    const uint32_t steps = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    half = magnitude < bits_of(0x1p-14f) ? steps : half;
    half = magnitude >= bits_of(0x1p16f) ? 0x7c00 : half;
    const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    half = magnitude > kInfinity ? nan : half;
    return static_cast<uint16_t>(half | (bits_of(number) >> 16 & 0x8000));
  }
};

// The bytes of one element; 0 for a dtype there is not.
inline uint64_t element_bytes(uint16_t dtype) {
  switch (dtype) {
    case HC_FLOAT32:
      return 4;
    case HC_BFLOAT16:
    case HC_FLOAT16:
      return 2;
    default:
      return 0;
  }
}

// Calls function with the format that a dtype stands for.
template <class Function>
void with_format(uint16_t dtype, Function function) {
  switch (dtype) {
    case HC_FLOAT32:
      return function(Float32());
    case HC_BFLOAT16:
      return function(Bfloat16());
    case HC_FLOAT16:
      return function(Float16());
  }
}

// The product of three extents and an element's bytes; the largest number there
// is, which no slot holds, if it does not fit.
inline uint64_t message_bytes(const hc_operation& operation) {
  uint64_t bytes = element_bytes(operation.dtype);
  bool too_large = false;
  for (uint64_t extent : operation.extents) {
    too_large |= __builtin_mul_overflow(bytes, extent, &bytes);
  }
  return too_large ? UINT64_MAX : bytes;
}

}  // namespace host_channels

#endif  // VLLM_HOST_CHANNELS_NUMBERS_H
