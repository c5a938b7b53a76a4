// What becomes of a gemm's sums: scales, a bias, a dtype.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8_formats.h"
#include "gemm.h"

namespace fp8 {

constexpr int64_t TILE = 128;

// Scales of lines (rows of the left operand, columns of the right one) in blocks of k.
struct Scales {
  const float* data;
  int64_t line_stride, k_stride, lines;  // lines: how many share a scale

  // Those of `count` lines from `line` on, without a division for each: 32 of them would be a sixth of a tile of 128 k's.
  void read(int64_t line, int64_t count, int64_t block, float* to) const {
    const float* here = data + block * k_stride;
    if (line_stride == 0) {
      std::fill(to, to + count, *here);
    } else if (lines == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = here[(line + i) * line_stride];
    } else {
      for (int64_t i = 0, group = line / lines; i < count; ++group) {
        const int64_t end = std::min(count, (group + 1) * lines - line);
        std::fill(to + i, to + end, here[group * line_stride]);
        i = end;
      }
    }
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
    alignas(64) float down[ROWS], across[COLS] = {};
    left.read(row, rows, k / TILE, down);
    right.read(col, cols, k / TILE, across);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < COLS; ++n) c[r * COLS + n] += sums[r * COLS + n] * (down[r] * across[n]);
  }

  void expect(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const int64_t size = dtype == FP32 ? 4 : 2;
    expect_rows(static_cast<const char*>(out) + (row * out_stride + col) * size, rows, out_stride * size, cols * size);
  }

  void store(const float* c, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    if (dtype == FP32) store_as<Float32>(c, row, rows, col, cols);
    if (dtype == BF16) store_as<BFloat16>(c, row, rows, col, cols);
    if (dtype == FP16) store_as<Float16>(c, row, rows, col, cols);
  }

 private:
  static constexpr int64_t ROWS = Micro::ROWS, COLS = Micro::COLS;

  template <class Out>
  void store_as(const float* c, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    alignas(64) float down[ROWS], across[COLS] = {}, added[COLS] = {};
    if (tile) std::fill(down, down + rows, 1.0f), std::fill(across, across + cols, 1.0f);
    else left.read(row, rows, 0, down), right.read(col, cols, 0, across);
    if (bias) std::copy(bias + col, bias + col + cols, added);
    auto* to = static_cast<typename Out::type*>(out) + row * out_stride + col;
    for (int64_t r = 0; r < rows; ++r, c += COLS, to += out_stride) {
      alignas(64) float result[COLS];
      for (int64_t n = 0; n < COLS; ++n) result[n] = c[n] * (down[r] * across[n]);
      if (bias)
        for (int64_t n = 0; n < COLS; ++n) result[n] += added[n];
      if (accumulate)
        for (int64_t n = 0; n < cols; ++n) result[n] += Out::load(to[n]);
      if (cols == COLS)  // a number that the compiler knows
        for (int64_t n = 0; n < COLS; ++n) to[n] = Out::store(result[n]);
      else
        for (int64_t n = 0; n < cols; ++n) to[n] = Out::store(result[n]);
    }
  }
};

}  // namespace fp8
