// The FP8 gemm for CPUs; see kernels/scaled_mm.py for the formula and ops.py for who calls it.
//
//   out[m, n] (+)= sum_k left[m, k] * right[k, n] * scale_left[m, k] * scale_right[k, n] + bias[n]
//
// FP8 values are exact in bf16 and FP32, and so are their products: only FP32 sums round. Scales that do not vary along
// k are taken out of the sum; those of 128 k's multiply the sum of these.

#include <csetjmp>
#include <csignal>
#include <cstdint>

#include "fp8_formats.h"
#include "gemm.h"
#include "pack_fp8.h"

#if defined(FP8_EMULATE_AMX) || defined(__AMX_BF16__)
#include "micro_amx.h"
using Micro = fp8::MicroAmx;
template <class From> using Decode = fp8::DecodeToBf16<From>;
#elif defined(__AVX512BF16__)
#include "micro_bf16.h"
using Micro = fp8::MicroBf16;
template <class From> using Decode = fp8::DecodeToBf16<From>;
#else
#include "micro_fp32.h"
using Micro = fp8::MicroFp32;
template <class From> using Decode = fp8::DecodeToFp32<From>;
#endif

namespace {

using namespace fp8;

constexpr int64_t TILE = 128;

// Scale of line i (a row of the left operand, a column of the right one) in block b of k.
struct Scales {
  const float* data;
  int64_t line_stride, k_stride, lines;  // lines: how many share a scale
  float at(int64_t line, int64_t block) const { return data[line / lines * line_stride + block * k_stride]; }
};

template <class Out>
struct Finish {
  int64_t tile;
  Scales left, right;
  const float* bias;
  typename Out::type* out;
  int64_t out_stride;
  bool accumulate;

  void add(const float* sums, float* c, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t k) const {
    float across[Micro::COLS] = {};
    for (int64_t n = 0; n < cols; ++n) across[n] = right.at(col + n, k / TILE);
    for (int64_t r = 0; r < rows; ++r) {
      const float down = left.at(row + r, k / TILE);
      for (int64_t n = 0; n < Micro::COLS; ++n) c[r * Micro::COLS + n] += sums[r * Micro::COLS + n] * (down * across[n]);
    }
  }

  void store(const float* c, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    float across[Micro::COLS] = {}, added[Micro::COLS] = {};
    for (int64_t n = 0; n < cols; ++n) {
      across[n] = tile ? 1.0f : right.at(col + n, 0);
      added[n] = bias ? bias[col + n] : 0.0f;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float down = tile ? 1.0f : left.at(row + r, 0);
      float result[Micro::COLS];
      for (int64_t n = 0; n < Micro::COLS; ++n) result[n] = c[r * Micro::COLS + n] * (down * across[n]);
      if (bias)
        for (int64_t n = 0; n < Micro::COLS; ++n) result[n] += added[n];
      typename Out::type* to = out + (row + r) * out_stride + col;
      if (accumulate)
        for (int64_t n = 0; n < cols; ++n) result[n] += Out::load(to[n]);
      if (cols == Micro::COLS)
        for (int64_t n = 0; n < Micro::COLS; ++n) to[n] = Out::store(result[n]);
      else
        for (int64_t n = 0; n < cols; ++n) to[n] = Out::store(result[n]);
    }
  }
};

struct Operand {
  const void* data;
  int64_t stride, k_stride;  // from row to row of the left operand, from column to column of the right one; from k to k
  int e5m2;
  Scales scales;
};

template <class FromLeft, class FromRight, class Out>
void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, const Finish<Out>& finish, int threads) {
  PackLeft<Micro, Decode<FromLeft>> left{static_cast<const uint8_t*>(a.data), a.stride, a.k_stride, m};
  PackRight<Micro, Decode<FromRight>> right{static_cast<const uint8_t*>(b.data), b.k_stride, b.stride};
  Gemm<Micro, decltype(left), decltype(right), Finish<Out>>(m, n, k, left, right, finish).run(threads);
}

template <class Out>
void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, const float* bias, void* out,
              int64_t out_stride, bool accumulate, int threads) {
  const bool tiled = a.scales.k_stride || b.scales.k_stride;
  const Finish<Out> finish{tiled ? TILE : 0, a.scales, b.scales, bias, static_cast<typename Out::type*>(out), out_stride, accumulate};
  if (a.e5m2)
    b.e5m2 ? multiply<E5M2, E5M2>(m, n, k, a, b, finish, threads) : multiply<E5M2, E4M3>(m, n, k, a, b, finish, threads);
  else
    b.e5m2 ? multiply<E4M3, E5M2>(m, n, k, a, b, finish, threads) : multiply<E4M3, E4M3>(m, n, k, a, b, finish, threads);
}

sigjmp_buf escape;

}  // namespace

extern "C" {

void fp8_scaled_mm(int64_t m, int64_t n, int64_t k,
                   const void* left, int64_t left_stride, int64_t left_k_stride, int left_e5m2,
                   const float* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride, int64_t left_lines,
                   const void* right, int64_t right_stride, int64_t right_k_stride, int right_e5m2,
                   const float* right_scales, int64_t right_scale_stride, int64_t right_scale_k_stride, int64_t right_lines,
                   const float* bias, void* out, int dtype, int64_t out_stride, int accumulate, int threads) {
  const Operand a{left, left_stride, left_k_stride, left_e5m2, {left_scales, left_scale_stride, left_scale_k_stride, left_lines}};
  const Operand b{right, right_stride, right_k_stride, right_e5m2, {right_scales, right_scale_stride, right_scale_k_stride, right_lines}};
  if (dtype == FP32) multiply<Float32>(m, n, k, a, b, bias, out, out_stride, accumulate, threads);
  if (dtype == BF16) multiply<BFloat16>(m, n, k, a, b, bias, out, out_stride, accumulate, threads);
  if (dtype == FP16) multiply<Float16>(m, n, k, a, b, bias, out, out_stride, accumulate, threads);
}

// Whether this library's instructions can really be used here: a small product on a thread that survives SIGILL.
// A CPU's flag is not enough: the kernel must grant AMX's tiles, and a virtual machine may show what it does not have.
int fp8_probe() {
#if defined(FP8_EMULATE_AMX) || defined(__AMX_BF16__)
  if (!MicroAmx::permitted()) return 0;
#endif
  struct sigaction caught = {}, before;
  caught.sa_handler = [](int) { siglongjmp(escape, 1); };
  sigaction(SIGILL, &caught, &before);
  int right = 0;
  if (sigsetjmp(escape, 1) == 0) {
    uint8_t a[64], b[64];
    std::memset(a, 0x38, sizeof a);  // 1.0 in E4M3
    std::memset(b, 0x40, sizeof b);  // 2.0
    const float one = 1.0f;
    float out = 0.0f;
    fp8_scaled_mm(1, 1, 64, a, 64, 1, 0, &one, 0, 0, 1, b, 64, 1, 0, &one, 0, 0, 1, nullptr, &out, FP32, 1, 0, 1);
    right = out == 128.0f;
  }
  sigaction(SIGILL, &before, nullptr);
  return right;
}

}  // extern "C"
