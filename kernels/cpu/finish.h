// What becomes of a gemm's sums: scales, a bias, a dtype.
#pragma once

#include <cstdint>

#include "fp8_formats.h"
#include "gemm.h"

namespace fp8 {

constexpr int64_t TILE = 128;

// Scale of line i (a row of the left operand, a column of the right one) in block b of k.
struct Scales {
  const float* data;
  int64_t line_stride, k_stride, lines;  // lines: how many share a scale
  float at(int64_t line, int64_t block) const {
    if (lines > 1) line /= lines;  // 32 divisions a tile would be a twentieth of the gemm
    return data[line * line_stride + block * k_stride];
  }
};

template <class Micro>
struct Finish {
  int64_t tile;
  Scales left, right;
  const float* bias;
  void* out;
  int dtype;
  int64_t out_stride;
  bool accumulate;

  void add(const float* sums, float* c, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t k) const {
    float across[COLS] = {};
    for (int64_t n = 0; n < cols; ++n) across[n] = right.at(col + n, k / TILE);
    for (int64_t r = 0; r < rows; ++r) {
      const float down = left.at(row + r, k / TILE);
      for (int64_t n = 0; n < COLS; ++n) c[r * COLS + n] += sums[r * COLS + n] * (down * across[n]);
    }
  }

  void expect(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const int64_t size = dtype == FP32 ? 4 : 2;
    expect_rows(static_cast<const char*>(out) + (row * out_stride + col) * size, rows, out_stride * size, cols * size);
  }

  void store(const float* c, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    float across[COLS] = {};
    for (int64_t n = 0; n < cols; ++n) across[n] = tile ? 1.0f : right.at(col + n, 0);
    for (int64_t r = 0; r < rows; ++r) {
      const float down = tile ? 1.0f : left.at(row + r, 0);
      float result[COLS];
      for (int64_t n = 0; n < COLS; ++n) result[n] = c[r * COLS + n] * (down * across[n]);
      if (bias)
        for (int64_t n = 0; n < cols; ++n) result[n] += bias[col + n];
      const int64_t at = (row + r) * out_stride + col;
      if (dtype == FP32) put<Float32>(result, at, cols);
      if (dtype == BF16) put<BFloat16>(result, at, cols);
      if (dtype == FP16) put<Float16>(result, at, cols);
    }
  }

 private:
  static constexpr int64_t COLS = Micro::COLS;

  template <class Out>
  void put(float* result, int64_t at, int64_t cols) const {
    typename Out::type* to = static_cast<typename Out::type*>(out) + at;
    if (accumulate)
      for (int64_t n = 0; n < cols; ++n) result[n] += Out::load(to[n]);
    if (cols == COLS)  // a number that the compiler knows
      for (int64_t n = 0; n < COLS; ++n) to[n] = Out::store(result[n]);
    else
      for (int64_t n = 0; n < cols; ++n) to[n] = Out::store(result[n]);
  }
};

}  // namespace fp8
