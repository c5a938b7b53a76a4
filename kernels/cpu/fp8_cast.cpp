// Scales, casts to FP8 and back, for CPUs. No torch headers: it compiles in about two seconds.
//
// A matrix is [rows, cols], row-major. `axis` says what shares a scale: WHOLE the tensor, ROW a row, COL a column.
// Compile with -ffp-contract=off: rounding (see kernels/round_to_fp8.py) relies on each operation rounding by itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

enum Axis { WHOLE = 0, ROW = 1, COL = 2 };
enum Dtype { FP32 = 0, BF16 = 1, FP16 = 2 };

constexpr int64_t CHUNK = 4096;  // elements a thread takes at a time: a few pages, so that it stays in L1/L2

inline uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float value(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

struct Float32 { using type = float; static float load(float x) { return x; } };
struct BFloat16 { using type = uint16_t; static float load(uint16_t x) { return value(uint32_t(x) << 16); } };
struct Float16 {
  using type = uint16_t;
  static float load(uint16_t x) {
    // Exponent and significand moved into place, rebased by a multiplication that is exact for subnormals too.
    float magnitude = value(uint32_t(x & 0x7fff) << 13) * 0x1p112f;
    magnitude = (x & 0x7c00) == 0x7c00 ? value(bits(magnitude) | 0x7f800000u) : magnitude;
    return value(bits(magnitude) | (uint32_t(x & 0x8000) << 16));
  }
};

template <int SIGNIFICAND, int MIN_EXPONENT, int MAX>
struct Format {
  static constexpr float max = MAX;
  static constexpr int dropped = 24 - SIGNIFICAND;       // bits of an FP32 significand that FP8 has not
  static constexpr int stored = SIGNIFICAND - 1;         // bits of the significand in a code
  static constexpr float split = float((1 << dropped) + 1);
  static constexpr float smallest_normal = MIN_EXPONENT == -6 ? 0x1p-6f : 0x1p-14f;
  static constexpr float spacing = smallest_normal / (1 << stored);  // of subnormals
  static constexpr float anchor = 12582912.0f * spacing;             // 1.5 * 2**23 spacings
  static constexpr uint32_t rebias = uint32_t(126 + MIN_EXPONENT) << stored;
  static constexpr uint32_t infinity = SIGNIFICAND == 3 ? 0x7c : 0x80;  // E4M3 has none
  static constexpr uint32_t nan = 0x7f;

  static float round(float x) {
    float c = x * split, normal = c - (c - x), subnormal = (x + anchor) - anchor;
    return std::fabs(x) < smallest_normal ? subnormal : normal;
  }
  static float quantized(float x, float scale) {  // -0 may become 0
    float scaled = x * scale;
    scaled = scaled < -max ? -max : scaled;  // comparisons that leave NaN alone
    scaled = scaled > max ? max : scaled;
    return round(scaled) + x * 0.0f;  // Inf becomes NaN, never the largest value: an overflow must not vanish
  }
  static uint8_t encode(float rounded, float x) {  // with the sign of x, which rounding to zero has lost
    uint32_t u = bits(x), magnitude = bits(rounded) & 0x7fffffffu;
    uint32_t normal = (magnitude >> dropped) - rebias;
    uint32_t subnormal = uint32_t(int32_t(value(magnitude) * (1.0f / spacing)));
    uint32_t code = value(magnitude) < smallest_normal ? subnormal : normal;
    code = magnitude > 0x7f800000u ? nan : code;
    return uint8_t(code | (u >> 24 & 0x80u));
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

// Magnitudes are compared as integers: NaN is above Inf is above all numbers, so that it wins.
template <class In>
void amax(const typename In::type* x, int64_t rows, int64_t cols, int axis, float* out, int threads) {
  if (axis == ROW) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; ++i) {
      uint32_t most = 0;
      for (int64_t j = 0; j < cols; ++j) most = std::max(most, bits(In::load(x[i * cols + j])) & 0x7fffffffu);
      out[i] = value(most);
    }
  } else if (axis == COL) {
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < cols; first += 256) {
      int64_t width = std::min<int64_t>(256, cols - first);
      uint32_t most[256] = {};
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < width; ++j)
          most[j] = std::max(most[j], bits(In::load(x[i * cols + first + j])) & 0x7fffffffu);
      for (int64_t j = 0; j < width; ++j) out[first + j] = value(most[j]);
    }
  } else {
    uint32_t most = 0;
    int64_t count = rows * cols;
#pragma omp parallel for num_threads(threads) reduction(max : most)
    for (int64_t first = 0; first < count; first += CHUNK) {
      int64_t last = std::min(count, first + CHUNK);
      uint32_t here = 0;
      for (int64_t i = first; i < last; ++i) here = std::max(here, bits(In::load(x[i])) & 0x7fffffffu);
      most = std::max(most, here);
    }
    out[0] = value(most);
  }
}

// out = store(quantized(x, scale), x) over a matrix, whichever way the scales lie.
template <class In, class To, class Out, class Store>
void map(const typename In::type* x, int64_t rows, int64_t cols, int axis, const float* __restrict__ scale, Out* __restrict__ out, int threads, Store store) {
  if (axis == WHOLE) {  // a matrix of one row
    int64_t count = rows * cols;
    float s = scale[0];
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < count; first += CHUNK) {
      int64_t last = std::min(count, first + CHUNK);
      for (int64_t i = first; i < last; ++i) {
        float value = In::load(x[i]);
        out[i] = store(To::quantized(value, s), value);
      }
    }
    return;
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < rows; ++i) {
    const typename In::type* __restrict__ from = x + i * cols;
    Out* __restrict__ to = out + i * cols;
    if (axis == ROW) {
      float s = scale[i];
      for (int64_t j = 0; j < cols; ++j) {
        float value = In::load(from[j]);
        to[j] = store(To::quantized(value, s), value);
      }
    } else {
      for (int64_t j = 0; j < cols; ++j) {
        float value = In::load(from[j]);
        to[j] = store(To::quantized(value, scale[j]), value);
      }
    }
  }
}

template <class In, class To>
void quantize(const void* x, int64_t rows, int64_t cols, int axis, const float* scale, void* out, int as_fp32, int threads) {
  auto* from = static_cast<const typename In::type*>(x);
  if (as_fp32)
    map<In, To>(from, rows, cols, axis, scale, static_cast<float*>(out), threads, [](float rounded, float) { return rounded; });
  else
    map<In, To>(from, rows, cols, axis, scale, static_cast<uint8_t*>(out), threads, [](float rounded, float x) { return To::encode(rounded, x); });
}

// Delayed scaling, one read of x: rounded (FP32) and codes (FP8), each where it is not null, by the scale given, and
// the amax of x. A scale of 0 says that there is none yet; then x is read twice and gets the scale of its own amax.
template <class In, class To>
void delayed(const void* x, int64_t count, float reach, float* scale, float* rounded, uint8_t* codes, float* largest, int threads) {
  auto* from = static_cast<const typename In::type*>(x);
  constexpr float most = std::numeric_limits<float>::max();
  if (*scale == 0) {
    amax<In>(from, 1, count, WHOLE, largest, threads);
    bool usable = *largest > 0 && *largest <= most;
    // Two roundings, as a number over a tensor has them in PyTorch: reciprocal, then product.
    *scale = usable ? std::min((1.0f / std::min(*largest * reach, most)) * To::max, most) : 1.0f;
  }
  float s = *scale;
  uint32_t seen = 0;
#pragma omp parallel for num_threads(threads) reduction(max : seen)
  for (int64_t first = 0; first < count; first += CHUNK) {
    int64_t last = std::min(count, first + CHUNK);
    uint32_t here = 0;  // loops by themselves, over a piece that is in the nearest cache: each vectorises well
    for (int64_t i = first; i < last; ++i) here = std::max(here, bits(In::load(from[i])) & 0x7fffffffu);
    if (rounded || codes) {
      float block[CHUNK];
      float* __restrict__ to = rounded ? rounded + first : block;
      for (int64_t i = first; i < last; ++i) to[i - first] = To::quantized(In::load(from[i]), s);
      if (codes)
        for (int64_t i = first; i < last; ++i) codes[i] = To::encode(to[i - first], In::load(from[i]));
    }
    seen = std::max(seen, here);
  }
  *largest = value(seen);
}

template <class From>
void decode(const uint8_t* __restrict__ q, int64_t count, float* __restrict__ out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t first = 0; first < count; first += CHUNK) {
    int64_t last = std::min(count, first + CHUNK);
    for (int64_t i = first; i < last; ++i) out[i] = From::decode(q[i]);
  }
}

}  // namespace

extern "C" {

void fp8_amax(const void* x, int dtype, int64_t rows, int64_t cols, int axis, float* out, int threads) {
  if (dtype == FP32) amax<Float32>(static_cast<const float*>(x), rows, cols, axis, out, threads);
  if (dtype == BF16) amax<BFloat16>(static_cast<const uint16_t*>(x), rows, cols, axis, out, threads);
  if (dtype == FP16) amax<Float16>(static_cast<const uint16_t*>(x), rows, cols, axis, out, threads);
}

void fp8_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int axis, const float* scale, int e5m2,
                  int as_fp32, void* out, int threads) {
  if (dtype == FP32) (e5m2 ? quantize<Float32, E5M2> : quantize<Float32, E4M3>)(x, rows, cols, axis, scale, out, as_fp32, threads);
  if (dtype == BF16) (e5m2 ? quantize<BFloat16, E5M2> : quantize<BFloat16, E4M3>)(x, rows, cols, axis, scale, out, as_fp32, threads);
  if (dtype == FP16) (e5m2 ? quantize<Float16, E5M2> : quantize<Float16, E4M3>)(x, rows, cols, axis, scale, out, as_fp32, threads);
}

void fp8_delayed(const void* x, int dtype, int64_t count, float reach, int e5m2, float* scale, float* rounded,
                 uint8_t* codes, float* largest, int threads) {
  if (dtype == FP32) (e5m2 ? delayed<Float32, E5M2> : delayed<Float32, E4M3>)(x, count, reach, scale, rounded, codes, largest, threads);
  if (dtype == BF16) (e5m2 ? delayed<BFloat16, E5M2> : delayed<BFloat16, E4M3>)(x, count, reach, scale, rounded, codes, largest, threads);
  if (dtype == FP16) (e5m2 ? delayed<Float16, E5M2> : delayed<Float16, E4M3>)(x, count, reach, scale, rounded, codes, largest, threads);
}

void fp8_decode(const uint8_t* q, int e5m2, int64_t count, float* out, int threads) {
  (e5m2 ? decode<E5M2> : decode<E4M3>)(q, count, out, threads);
}

}  // extern "C"
