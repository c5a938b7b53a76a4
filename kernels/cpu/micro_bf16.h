// A tile of C by AVX-512's dot products of bf16 pairs: 12 x 32 sums in 24 registers, exact products for FP8 values.
//
//   left panel   [k/32][12 rows][32 k]                     bf16
//   right panel  [k/32][16 pairs of k][32 columns][2]      the layout of micro_amx.h
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace fp8 {

struct MicroBf16 {
  using Element = uint16_t;
  static constexpr int64_t ROWS = 12, COLS = 32, STEP = 32;
  static constexpr int64_t CHUNK = 512, DEPTH = 2048;
  static constexpr int64_t MOST_ROWS = 1008, MOST_COLS = 1024;
  static constexpr int64_t STRIP = 600 << 10;  // of an L2 of 1 MB; a right panel passes by
  static constexpr bool SHARES_PANELS = false;
  struct Session {};

  static void run(int64_t steps, const Element* left, const Element* right, int rows, float* sums, bool add) {
    if (rows > 8) sized<12>(steps, left, right, sums, add);
    else if (rows > 4) sized<8>(steps, left, right, sums, add);
    else if (rows > 1) sized<4>(steps, left, right, sums, add);
    else sized<1>(steps, left, right, sums, add);
  }

 private:
  template <int R>
  static void sized(int64_t steps, const Element* left, const Element* right, float* sums, bool add) {
    __m512 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step, left += ROWS * STEP)
      for (int pair = 0; pair < 16; ++pair, right += COLS * 2) {
        const __m512bh b0 = (__m512bh)_mm512_load_si512(right), b1 = (__m512bh)_mm512_load_si512(right + 32);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          int32_t two;
          std::memcpy(&two, left + r * STEP + pair * 2, 4);
          const __m512bh a = (__m512bh)_mm512_set1_epi32(two);
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], a, b0);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], a, b1);
        }
      }
    if (add) {
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r][0] = _mm512_add_ps(sum[r][0], _mm512_load_ps(sums + r * COLS));
        sum[r][1] = _mm512_add_ps(sum[r][1], _mm512_load_ps(sums + r * COLS + 16));
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      _mm512_store_ps(sums + r * COLS, sum[r][0]);
      _mm512_store_ps(sums + r * COLS + 16, sum[r][1]);
    }
  }
};

}  // namespace fp8
