// A tile of C by FP32 multiply-adds, in the compiler's own vectors: AVX-512, AVX2, or whatever there is.
//
//   left panel   [k/32][ROWS rows][32 k]     FP32
//   right panel  [k][COLS columns]
#pragma once

#include <cstdint>
#include <cstring>

namespace fp8 {

struct MicroFp32 {
#if defined(__AVX512F__)
  static constexpr int WIDTH = 16, ROWS_ = 12;
#elif defined(__AVX2__)
  static constexpr int WIDTH = 8, ROWS_ = 6;
#else
  static constexpr int WIDTH = 4, ROWS_ = 4;
#endif
  using Element = float;
  static constexpr int64_t ROWS = ROWS_, COLS = 2 * WIDTH, STEP = 32;
  static constexpr int64_t CHUNK = 256, DEPTH = 1024;
  static constexpr int64_t MOST_ROWS = 1008, MOST_COLS = 512;
  static constexpr int64_t STRIP = 256 << 10;  // of an L2 that may have no more than 512 KB
  static constexpr bool SHARES_PANELS = false;
  struct Session {};

  static void run(int64_t steps, const Element* left, const Element* right, int rows, float* sums, bool add) {
    if (rows > ROWS / 2) sized<ROWS>(steps, left, right, sums, add);
    else if (rows > 1) sized<ROWS / 2>(steps, left, right, sums, add);
    else sized<1>(steps, left, right, sums, add);
  }

 private:
  typedef float Vector __attribute__((vector_size(4 * WIDTH)));

  static Vector load(const float* from) { Vector v; std::memcpy(&v, from, sizeof v); return v; }

  template <int R>
  static void sized(int64_t steps, const Element* left, const Element* right, float* sums, bool add) {
    Vector sum[R][2] = {};
    for (int64_t step = 0; step < steps; ++step, left += ROWS * STEP)
      for (int k = 0; k < STEP; ++k, right += COLS) {
        const Vector b0 = load(right), b1 = load(right + WIDTH);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const float a = left[r * STEP + k];
          sum[r][0] += a * b0;
          sum[r][1] += a * b1;
        }
      }
    if (add)
      for (int r = 0; r < R; ++r) sum[r][0] += load(sums + r * COLS), sum[r][1] += load(sums + r * COLS + WIDTH);
    for (int r = 0; r < R; ++r) std::memcpy(sums + r * COLS, sum[r], sizeof sum[r]);
  }
};

}  // namespace fp8
