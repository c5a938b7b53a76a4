// Casts to MXFP8 for CPUs; kernels/mxfp8.py has the formula. One read of x: a strip of one row or of 32 is in L1 when its
// scales are known.

#include <algorithm>
#include <cstdint>

#include "fp8_formats.h"
#include "kernels.h"
#include "threads.h"

namespace {

using namespace fp8;

constexpr int64_t SIZE = 32;    // kernels/mxfp8.py: SIZE
constexpr int64_t WIDTH = 256;  // columns at a time
constexpr int NOT_A_NUMBER = 255;

// The byte of the smallest power of two that is not below amax / 448.
inline uint32_t byte_of(uint32_t amax) {
  const uint32_t d = bits(value(amax) * float(1.0 / 448.0));
  const uint32_t exponent = d >> 23, mantissa = d & 0x7fffffu;
  const uint32_t up = exponent == 0 ? mantissa > 0x400000u : mantissa > 0;
  return std::min<uint32_t>(exponent + up, NOT_A_NUMBER);
}
// 2**(127 - byte); of bytes up to 254, whose power is normal but for the last, which no finite amax has.
inline float multiplier_of(uint32_t byte) { return value((254u - std::min(byte, 253u)) << 23); }

template <class In, int64_t ROWS, int64_t COLS>
void strip(const typename In::type* x, int64_t stride, int64_t rows, int64_t width, int64_t to_stride, uint8_t* codes, uint8_t* scales) {
  constexpr int64_t LINES = WIDTH / COLS;  // of scales
  alignas(64) uint32_t most[WIDTH] = {};
  alignas(64) float multiplier[WIDTH];
  alignas(64) uint8_t bytes[LINES];
  for (int64_t r = 0; r < rows; ++r) {
    const auto* row = x + r * stride;
    const auto look = [&](int64_t count) {
      for (int64_t j = 0; j < count; ++j) most[j] = std::max(most[j], bits(In::load(row[j])) & 0x7fffffffu);
    };
    width == WIDTH ? look(WIDTH) : look(width);
  }
  bool finite = true;
  if constexpr (COLS == 1) {
    uint32_t largest = 0;
    for (int64_t j = 0; j < WIDTH; ++j) {
      const uint32_t byte = byte_of(most[j]);
      largest = std::max(largest, byte), bytes[j] = uint8_t(byte), multiplier[j] = multiplier_of(byte);
    }
    finite = largest < NOT_A_NUMBER;
  } else {
    for (int64_t b = 0; b < LINES; ++b) {
      uint32_t largest = 0;
      for (int64_t j = 0; j < COLS; ++j) largest = std::max(largest, most[b * COLS + j]);
      const uint32_t byte = byte_of(largest);
      finite &= byte < NOT_A_NUMBER, bytes[b] = uint8_t(byte);
      const float same = multiplier_of(byte);
      for (int64_t j = 0; j < COLS; ++j) multiplier[b * COLS + j] = same;
    }
  }
  std::copy(bytes, bytes + (width + COLS - 1) / COLS, scales);
  for (int64_t r = 0; r < rows; ++r) {
    const auto* row = x + r * stride;
    uint8_t* to = codes + r * to_stride;
    const auto encode = [&](int64_t count) {
      for (int64_t j = 0; j < count; ++j) to[j] = E4M3::quantize<true>(In::load(row[j]), multiplier[j]);
    };
    width == WIDTH ? encode(WIDTH) : encode(width);
    if (!finite)  // which is rare
      for (int64_t j = 0; j < width; ++j) to[j] = bytes[j / COLS] == NOT_A_NUMBER ? 0x7f : to[j];
  }
}

template <class In, int64_t ROWS, int64_t COLS>
void quantize(const void* from, int64_t rows, int64_t cols, int64_t stride, uint8_t* codes, uint8_t* scales, int threads) {
  const auto* x = static_cast<const typename In::type*>(from);
  const int64_t across = (cols + COLS - 1) / COLS;
  for_each(rows, ROWS, threads, [=](int64_t row) {
    for (int64_t col = 0; col < cols; col += WIDTH)
      strip<In, ROWS, COLS>(x + row * stride + col, stride, std::min(ROWS, rows - row), std::min(WIDTH, cols - col), cols,
                            codes + row * cols + col, scales + row / ROWS * across + col / COLS);
  });
}

template <class In>
void dispatch(const void* x, int64_t rows, int64_t cols, int64_t stride, int64_t down, int64_t across, uint8_t* codes,
              uint8_t* scales, int threads) {
  if (down == 1) quantize<In, 1, SIZE>(x, rows, cols, stride, codes, scales, threads);
  else if (across == 1) quantize<In, SIZE, 1>(x, rows, cols, stride, codes, scales, threads);
  else quantize<In, SIZE, SIZE>(x, rows, cols, stride, codes, scales, threads);
}

}  // namespace

extern "C" void fp8_mx_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, int64_t block_rows,
                                int64_t block_cols, uint8_t* codes, uint8_t* scales, int threads) {
  threads = usable_threads(threads, rows);
  if (dtype == FP32) dispatch<Float32>(x, rows, cols, stride, block_rows, block_cols, codes, scales, threads);
  if (dtype == BF16) dispatch<BFloat16>(x, rows, cols, stride, block_rows, block_cols, codes, scales, threads);
  if (dtype == FP16) dispatch<Float16>(x, rows, cols, stride, block_rows, block_cols, codes, scales, threads);
}
