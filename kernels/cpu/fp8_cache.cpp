// Rows of a cache in FP8, and back: kernels/fp8_cache.py has the formula. A row is one head's vector of one position.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fp8_formats.h"
#include "kernels.h"
#include "pack_fp8.h"
#include "threads.h"

namespace {

using namespace fp8;

constexpr int64_t SCALE_BYTES = 4, BLOCK = 64;

template <class Number>
void quantize_row(const typename Number::type* x, int64_t width, const float* known, uint8_t* to) {
  float scale = known ? *known : 0.0f;
  if (!known) {
    uint32_t largest = 0;  // magnitudes order as numbers do, NaN above all
    for (int64_t d = 0; d < width; ++d) largest = std::max(largest, bits(Number::load(x[d])) & 0x7fffffffu);
    const float amax = value(largest);
    scale = largest == 0 ? 1.0f : largest >= INFINITE ? amax : std::max(amax / 448.0f, std::numeric_limits<float>::min());
  }
  for (int64_t d = 0; d < width; ++d) {
    const float y = Number::load(x[d]) / scale;
    to[d] = E4M3::quantize<false>(y, 1.0f);
  }
  if (!known) std::memcpy(to + width, &scale, SCALE_BYTES);
}

template <class Number>
void dequantize_row(const uint8_t* from, int64_t width, const float* known, typename Number::type* to) {
  float scale;
  if (known) scale = *known; else std::memcpy(&scale, from + width, SCALE_BYTES);
  const float* table = Values::of(false).as_fp32;
  for (int64_t d = 0; d < width; ++d) to[d] = Number::store(table[from[d]] * scale);
}

// strides: of batch, group, position; the rows that are made follow one another.
template <class Work>
void each_row(int64_t batch, int64_t groups, int64_t length, int threads, const Work& work) {
  const int64_t rows = batch * groups * length;
  for_each((rows + BLOCK - 1) / BLOCK, 1, usable_threads(threads, (rows + BLOCK - 1) / BLOCK), [&](int64_t block) {
    for (int64_t row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); ++row)
      work(row, row / length / groups, row / length % groups, row % length);
  });
}

template <class Number>
void quantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const typename Number::type* x,
              const int64_t* strides, const float* scales, uint8_t* rows, int threads) {
  const int64_t bytes = width + (scales ? 0 : SCALE_BYTES);
  each_row(batch, groups, length, threads, [&](int64_t row, int64_t b, int64_t g, int64_t s) {
    quantize_row<Number>(x + b * strides[0] + g * strides[1] + s * strides[2], width, scales ? scales + g : nullptr, rows + row * bytes);
  });
}

template <class Number>
void dequantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const uint8_t* rows, const int64_t* strides,
                const float* scales, typename Number::type* x, int threads) {
  each_row(batch, groups, length, threads, [&](int64_t row, int64_t b, int64_t g, int64_t s) {
    dequantize_row<Number>(rows + b * strides[0] + g * strides[1] + s * strides[2], width, scales ? scales + g : nullptr, x + row * width);
  });
}

}  // namespace

extern "C" void fp8_cache_quantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const void* x, int dtype,
                                   const int64_t* strides, const float* scales, uint8_t* rows, int threads) {
  const auto run = [&](auto number) {
    using Number = decltype(number);
    quantize<Number>(batch, groups, length, width, static_cast<const typename Number::type*>(x), strides, scales, rows, threads);
  };
  dtype == FP32 ? run(Float32()) : dtype == BF16 ? run(BFloat16()) : run(Float16());
}

extern "C" void fp8_cache_dequantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const uint8_t* rows,
                                     const int64_t* strides, const float* scales, void* x, int dtype, int threads) {
  const auto run = [&](auto number) {
    using Number = decltype(number);
    dequantize<Number>(batch, groups, length, width, rows, strides, scales, static_cast<typename Number::type*>(x), threads);
  };
  dtype == FP32 ? run(Float32()) : dtype == BF16 ? run(BFloat16()) : run(Float16());
}
