// A few rows times a matrix whose columns are contiguous: nothing is packed, each column is read and decoded once.
//
//   C[m, n] = sum_k left[m, k] * right[k, n]      m <= ROWS; the sums of a column in vectors, added up at its end
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "pack_fp8.h"
#include "threads.h"

namespace fp8 {

#if defined(__AVX512BF16__)
struct DotBf16 {  // 64 products of a column with each row, in bf16 pairs
  using Element = uint16_t;
  using Vector = __m512;
  using Decode = DecodeToBf16;
  struct Column { __m512i half[2]; };
  static constexpr int64_t STEP = 64;

  // What decodes: tables that stay in registers from column to column.
#if defined(__AVX512VBMI__)
  const ByteTables tables;
  explicit DotBf16(const Values& values) : tables(values) {}
  Column column(const uint8_t* codes) const {
    Column decoded;
    tables.decode(_mm512_loadu_si512(codes), decoded.half[0], decoded.half[1]);
    return decoded;
  }
#else
  const Values& values;
  explicit DotBf16(const Values& values) : values(values) {}
  Column column(const uint8_t* codes) const { return {to_bf16(values, load32(codes)), to_bf16(values, load32(codes + 32))}; }
#endif

  static void add(Vector& sum, const Element* row, const Column& column) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row), (__m512bh)column.half[0]);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row + 32), (__m512bh)column.half[1]);
  }
  static float total(const Vector& sum) { return _mm512_reduce_add_ps(sum); }
};
#endif

struct DotFp32 {  // 32 products in FP32, in vectors of the compiler's
  using Element = float;
  using Decode = DecodeToFp32;
  typedef float Vector __attribute__((vector_size(64)));
  struct Column { Vector half[2]; };
  static constexpr int64_t STEP = 32;

  const Values& values;
  explicit DotFp32(const Values& values) : values(values) {}
  Column column(const uint8_t* codes) const {
    Column decoded;
    DecodeToFp32::decode(values, codes, STEP, reinterpret_cast<float*>(&decoded));
    return decoded;
  }
  static void add(Vector& sum, const Element* row, const Column& column) {
    Vector half[2];
    std::memcpy(half, row, sizeof half);
    sum += half[0] * column.half[0];
    sum += half[1] * column.half[1];
  }
  static float total(const Vector& sum) {
    float all = 0;
    for (int i = 0; i < 16; ++i) all += sum[i];
    return all;
  }
};

#if defined(__AVX512BF16__)
using DotStep = DotBf16;
#else
using DotStep = DotFp32;
#endif

template <class Step, class Micro, class Finish>
class Dots {
  using Element = typename Step::Element;
  static constexpr int64_t STEP = Step::STEP, COLS = Micro::COLS;

 public:
  static constexpr int64_t ROWS = 4;
  static constexpr int64_t AHEAD = 2048;  // bytes of columns fetched before they are needed
  static int64_t depth(int64_t k) { return ceil_div(k, STEP) * STEP; }

  // rows: [ROWS][depth(k)], zeros behind m and k. right: column n begins at right + n * stride.
  static void run(int64_t m, int64_t n, int64_t k, const Element* rows, const Values& values, const uint8_t* right,
                  int64_t stride, const Finish& finish, int threads) {
    if (m == 0 || n == 0) return;  // scales of no rows are nowhere
    const int64_t blocks = ceil_div(n, COLS), depth = Dots::depth(k);
    for_each(blocks, 1, usable_threads(threads, blocks), [&](int64_t block) {
      const int64_t col = block * COLS, cols = std::min(COLS, n - col);
      alignas(64) float sums[ROWS * COLS] = {};
      const Step step(values);
      for (int64_t c = 0; c < cols; ++c) {
        const uint8_t* column = right + (col + c) * stride;
        if (m == 1)
          one_column<1>(step, column, k, depth, rows, sums + c);
        else
          one_column<ROWS>(step, column, k, depth, rows, sums + c);
      }
      finish.store(sums, 0, m, col, cols);
    });
  }

 private:
  template <int R>
  static void one_column(
      const Step& step, const uint8_t* column, int64_t k, int64_t depth, const Element* rows, float* sums) {
    // Sums in turn, so that an addition need not wait for the one before.
    constexpr int TURNS = R == 1 ? 4 : 2;
    typename Step::Vector sum[R][TURNS] = {};
    int64_t at = 0;
    for (; at + TURNS * STEP <= k; at += TURNS * STEP)
#pragma GCC unroll 4
      for (int turn = 0; turn < TURNS; ++turn) {
        __builtin_prefetch(column + at + turn * STEP + AHEAD);
        const typename Step::Column decoded = step.column(column + at + turn * STEP);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) Step::add(sum[r][turn], rows + r * depth + at + turn * STEP, decoded);
      }
#pragma GCC unroll 4
    for (int turn = 0; turn < TURNS; ++turn, at += STEP) {
      if (at >= k) break;
      uint8_t rest[STEP] = {};
      std::memcpy(rest, column + at, std::min(STEP, k - at));
      const typename Step::Column decoded = step.column(rest);
      for (int r = 0; r < R; ++r) Step::add(sum[r][turn], rows + r * depth + at, decoded);
    }
    for (int r = 0; r < R; ++r) {
      typename Step::Vector all = sum[r][0];
      for (int turn = 1; turn < TURNS; ++turn) all += sum[r][turn];
      sums[r * COLS] = Step::total(all);
    }
  }
};

}  // namespace fp8
