// FP8 numbers, and the FP32, BF16 and FP16 ones that they are made of and made into.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fp8 {

enum Dtype { FP32 = 0, BF16 = 1, FP16 = 2 };

constexpr uint32_t INFINITE = 0x7f800000u;  // bits of magnitudes from here on are Inf and NaN
inline uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float value(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

struct Float32 {
  using type = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};

struct BFloat16 {
  using type = uint16_t;
  static float load(uint16_t x) { return value(uint32_t(x) << 16); }
  static uint16_t store(float x) {  // to nearest even
    uint32_t u = bits(x), rounded = u + 0x7fffu + (u >> 16 & 1u);
    return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded >> 16);
  }
};

struct Float16 {
  using type = uint16_t;
  static float load(uint16_t x) {
    // Exponent and significand moved into place, rebased by a multiplication that is exact for subnormals too.
    float magnitude = value(uint32_t(x & 0x7fff) << 13) * 0x1p112f;
    magnitude = (x & 0x7c00) == 0x7c00 ? value(bits(magnitude) | 0x7f800000u) : magnitude;
    return value(bits(magnitude) | (uint32_t(x & 0x8000) << 16));
  }
  static uint16_t store(float x) {  // to nearest even; what is too large becomes Inf
    uint32_t u = bits(x), sign = u >> 16 & 0x8000u;
    float magnitude = value(u & 0x7fffffffu);
    uint32_t scaled = bits(magnitude * 0x1p-112f);                       // FP16's exponent in FP32's place
    uint32_t normal = (scaled + 0xfffu + (scaled >> 13 & 1u)) >> 13;
    uint32_t subnormal = bits(magnitude + 0.5f) - bits(0.5f);            // 0.5's last place is FP16's smallest number
    uint32_t code = magnitude < 0x1p-14f ? subnormal : normal;
    code = magnitude >= 65520.0f ? 0x7c00u : code;
    code = (u & 0x7fffffffu) > 0x7f800000u ? 0x7e00u : code;
    return uint16_t(code | sign);
  }
};

template <int SIGNIFICAND, int MIN_EXPONENT, int MAX>
struct Format {
  static constexpr float max = MAX;
  static constexpr int dropped = 24 - SIGNIFICAND;       // bits of an FP32 significand that FP8 has not
  static constexpr int stored = SIGNIFICAND - 1;         // bits of the significand in a code
  static constexpr float smallest_normal = MIN_EXPONENT == -6 ? 0x1p-6f : 0x1p-14f;
  static constexpr float spacing = smallest_normal / (1 << stored);  // of subnormals
  static constexpr float anchor = 8388608.0f * spacing;              // 2**23 spacings
  static constexpr uint32_t rebias = uint32_t(126 + MIN_EXPONENT) << stored;
  static constexpr uint32_t infinity = SIGNIFICAND == 3 ? 0x7c : 0x80;  // E4M3 has none
  static constexpr uint32_t nan = 0x7f;

  // The code of x * scale, to nearest even, with the sign of x. Inf becomes NaN, never the largest value: an overflow must
  // not vanish. FINITE: x and scale are.
  template <bool FINITE>
  static uint8_t quantize(float x, float scale) {
    float y = std::fabs(x * scale);
    y = y > max ? max : y;  // a comparison that leaves NaN alone
    const uint32_t u = bits(y);
    const uint32_t normal = ((u + ((1u << (dropped - 1)) - 1) + (u >> dropped & 1u)) >> dropped) - rebias;
    const uint32_t subnormal = bits(y + anchor) - bits(anchor);  // addition rounds: the last place of anchor is a spacing
    uint32_t code = y < smallest_normal ? subnormal : normal;
    if (!FINITE) {
      code = y <= max ? code : nan;
      code = (bits(x) & 0x7fffffffu) < INFINITE ? code : nan;
    }
    return uint8_t(code | (bits(x) >> 24 & 0x80u));
  }
  static float decode(uint8_t code) {
    uint32_t magnitude = code & 0x7fu;
    float normal = value((magnitude + rebias) << dropped), subnormal = float(int32_t(magnitude)) * spacing;
    float x = magnitude < (1u << stored) ? subnormal : normal;
    x = magnitude == infinity ? std::numeric_limits<float>::infinity() : x;
    x = (SIGNIFICAND == 3 ? magnitude > infinity : magnitude == nan) ? std::numeric_limits<float>::quiet_NaN() : x;
    return value(bits(x) | (uint32_t(code & 0x80u) << 24));
  }
};
using E4M3 = Format<4, -6, 448>;
using E5M2 = Format<3, -14, 57344>;

}  // namespace fp8
