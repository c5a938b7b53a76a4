// Rows in FP32, bf16 or FP16 times an FP8 weight; see kernels/fp8_weight.py for the formula.
//
//   y[m, n] = (sum_k x[m, k] * w[n, k]) * scale[n] + bias[n]      w: E4M3 [N, K], row-major
//
//   out[m, k] = sum_n (grad[m, n] * scale[n]) * w[n, k]           the gradient of x
//
// In the gradient scales vary along the sum: they multiply grad while it is packed, which rounds once where panels are bf16.
// A bf16 number times an FP8 one is exact in FP32: bf16 rows go through the bf16 instructions where there are any.

#include <algorithm>
#include <cstdint>

#include "best_micro.h"
#include "dot.h"
#include "finish.h"
#include "fp8_formats.h"
#include "gemm.h"
#include "kernels.h"
#include "pack_fp8.h"

namespace {

using namespace fp8;

struct Rows {
  const void* data;
  int dtype;
  int64_t stride;

  // Elements k to k + count of a row.
  void read(int64_t row, int64_t k, int64_t count, float* to) const {
    const int64_t at = row * stride + k;
    for (int64_t i = 0; i < count; ++i) {
      if (dtype == FP32) to[i] = static_cast<const float*>(data)[at + i];
      if (dtype == BF16) to[i] = BFloat16::load(static_cast<const uint16_t*>(data)[at + i]);
      if (dtype == FP16) to[i] = Float16::load(static_cast<const uint16_t*>(data)[at + i]);
    }
  }
  void read(int64_t row, int64_t k, int64_t count, uint16_t* to) const {  // of bf16
    if (count) std::memcpy(to, static_cast<const uint16_t*>(data) + row * stride + k, count * 2);
  }
};

template <class Micro>
struct PackRows {
  const Rows& rows;

  void pack(int64_t row, int64_t count_rows, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t ROWS = Micro::ROWS, STEP = Micro::STEP;
    for (int64_t at = 0; at < count; at += STEP)
      for (int64_t r = 0; r < ROWS; ++r, to += STEP) {
        const int64_t there = r < count_rows ? std::min(STEP, count - at) : 0;
        if (there) rows.read(row + r, k + at, there, to);
        std::fill(to + there, to + STEP, typename Micro::Element(0));
      }
  }
};

// Rows whose columns have a scale each.
template <class Micro>
struct PackScaledRows {
  const Rows& rows;
  const float* scales;

  void pack(int64_t row, int64_t count_rows, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t ROWS = Micro::ROWS, STEP = Micro::STEP;
    for (int64_t at = 0; at < count; at += STEP)
      for (int64_t r = 0; r < ROWS; ++r, to += STEP) {
        const int64_t there = r < count_rows ? std::min(STEP, count - at) : 0;
        float scaled[STEP];
        if (there) rows.read(row + r, k + at, there, scaled);
        for (int64_t i = 0; i < there; ++i) put(scaled[i] * scales[k + at + i], to + i);
        std::fill(to + there, to + STEP, typename Micro::Element(0));
      }
  }

 private:
  static void put(float value, float* to) { *to = value; }
  static void put(float value, uint16_t* to) { *to = BFloat16::store(value); }
};

template <class Micro, class Decode>
void multiply_by_rows(int64_t m, int64_t k, int64_t n, const PackScaledRows<Micro>& left, const uint8_t* codes,
                      const Finish<Micro>& finish, int threads) {
  const PackRight<Micro, Decode> right{Values::of(false), codes, k, 1};
  Gemm<Micro, PackScaledRows<Micro>, PackRight<Micro, Decode>, Finish<Micro>>(m, k, n, left, right, finish).run(threads);
}

template <class Micro, class Step>
void multiply(int64_t m, int64_t n, int64_t k, const Rows& x, const uint8_t* codes, const Finish<Micro>& finish, int threads) {
  using Few = Dots<Step, Micro, Finish<Micro>>;
  const Values& values = Values::of(false);
  if (m <= Few::ROWS) {
    const int64_t depth = Few::depth(k);
    const Scratch scratch(size_t(Few::ROWS * depth) * sizeof(typename Step::Element));
    auto* rows = reinterpret_cast<typename Step::Element*>(scratch.memory());
    std::fill(rows, rows + Few::ROWS * depth, typename Step::Element(0));
    for (int64_t r = 0; r < m; ++r) x.read(r, 0, k, rows + r * depth);
    Few::run(m, n, k, rows, values, codes, k, finish, threads);
    return;
  }
  const PackRows<Micro> left{x};
  const PackRight<Micro, typename Step::Decode> right{values, codes, 1, k};
  Gemm<Micro, PackRows<Micro>, PackRight<Micro, typename Step::Decode>, Finish<Micro>>(m, n, k, left, right, finish).run(threads);
}

}  // namespace

extern "C" void fp8_weight_mm(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes,
                              const float* scales, int64_t n, const float* bias, void* y, int threads) {
  static const float one = 1.0f;
  const Rows rows{x, dtype, stride};
  const Scales left{&one, 0, 0, 1}, right{scales, 1, 0, 1};
#if defined(HAS_BF16_MICRO) && defined(__AVX512BF16__)
  if (dtype == BF16) {
    multiply<Bf16Micro, DotBf16>(m, n, k, rows, codes, {0, left, right, bias, y, dtype, n, false}, threads);
    return;
  }
#endif
  multiply<MicroFp32, DotFp32>(m, n, k, rows, codes, {0, left, right, bias, y, dtype, n, false}, threads);
}

extern "C" void fp8_weight_grad_input(const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes,
                                      const float* scales, int64_t k, void* out, int threads) {
  static const float one = 1.0f;
  const Rows rows{grad, dtype, stride};
  const Scales plain{&one, 0, 0, 1};
#if defined(HAS_BF16_MICRO) && defined(__AVX512BF16__)
  if (dtype == BF16) {
    multiply_by_rows<Bf16Micro, DecodeToBf16>(m, k, n, {rows, scales}, codes, {0, plain, plain, nullptr, out, dtype, k, false}, threads);
    return;
  }
#endif
  multiply_by_rows<MicroFp32, DecodeToFp32>(m, k, n, {rows, scales}, codes, {0, plain, plain, nullptr, out, dtype, k, false}, threads);
}
