// The FP8 gemm for CPUs; see kernels/scaled_mm.py for the formula and scaled_mm.py for who calls it.
//
//   out[m, n] (+)= sum_k left[m, k] * right[k, n] * scale_left[m, k] * scale_right[k, n] + bias[n]
//
// FP8 values are exact in bf16 and FP32, and so are their products: only FP32 sums round. Scales that do not vary along
// k are taken out of the sum; those of 128 k's multiply the sum of these.

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>

#include "best_micro.h"
#include "dot.h"
#include "finish.h"
#include "fp8_formats.h"
#include "gemm.h"
#include "kernels.h"
#include "pack_fp8.h"

#if defined(HAS_BF16_MICRO)
using Micro = Bf16Micro;
using Decode = fp8::DecodeToBf16;
#else
using Micro = fp8::MicroFp32;
using Decode = fp8::DecodeToFp32;
#endif

namespace {

using namespace fp8;

struct Operand {
  const void* data;
  int64_t stride, k_stride;  // from row to row of the left operand, from column to column of the right one; from k to k
  int e5m2;
  Scales scales;

  const uint8_t* codes() const { return static_cast<const uint8_t*>(data); }
  const Values& values() const { return Values::of(e5m2); }
};

void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, const Finish<Micro>& finish, int threads) {
  using Few = Dots<DotStep, Micro, Finish<Micro>>;
  if (m <= Few::ROWS && b.k_stride == 1 && !finish.tile) {
    const int64_t depth = Few::depth(k);
    const Scratch scratch(size_t(Few::ROWS * depth) * (1 + sizeof(DotStep::Element)));
    auto* rows = reinterpret_cast<DotStep::Element*>(scratch.memory());
    auto* codes = reinterpret_cast<uint8_t*>(rows + Few::ROWS * depth);
    std::memset(codes, 0, size_t(Few::ROWS * depth));
    for (int64_t r = 0; r < m; ++r)
      for (int64_t i = 0; i < k; ++i) codes[r * depth + i] = a.codes()[r * a.stride + i * a.k_stride];
    DotStep::Decode::decode(a.values(), codes, Few::ROWS * depth, rows);
    Few::run(m, n, k, rows, b.values(), b.codes(), b.stride, finish, threads);
    return;
  }
  const PackLeft<Micro, Decode> left{a.values(), a.codes(), a.stride, a.k_stride, m};
  const PackRight<Micro, Decode> right{b.values(), b.codes(), b.k_stride, b.stride};
  Gemm<Micro, PackLeft<Micro, Decode>, PackRight<Micro, Decode>, Finish<Micro>>(m, n, k, left, right, finish).run(threads);
}

// One gemm of a group of tokens.
struct Group { int64_t start, size, products; };

constexpr int ROWS = 0;  // what groups divide: rows of the left operand and of the result; else the contraction
// Products that are worth threads of their own: starting and joining them takes as long as some.
sigjmp_buf escape;

}  // namespace

extern "C" {

void fp8_scaled_mm(int64_t m, int64_t n, int64_t k,
                   const void* left, int64_t left_stride, int64_t left_k_stride, int left_e5m2,
                   const float* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride, int64_t left_lines,
                   const void* right, int64_t right_stride, int64_t right_k_stride, int right_e5m2,
                   const float* right_scales, int64_t right_scale_stride, int64_t right_scale_k_stride, int64_t right_lines,
                   const float* bias, void* out, int dtype, int64_t out_stride, int accumulate, int threads) {
  // Of no k's there are no blocks and no scales of them: the sum is empty, whatever would scale it.
  static const float one = 1.0f;
  if (!left_scales) left_scales = &one, left_scale_stride = left_scale_k_stride = 0;
  if (!right_scales) right_scales = &one, right_scale_stride = right_scale_k_stride = 0;
  const Operand a{left, left_stride, left_k_stride, left_e5m2, {left_scales, left_scale_stride, left_scale_k_stride, left_lines}};
  const Operand b{right, right_stride, right_k_stride, right_e5m2, {right_scales, right_scale_stride, right_scale_k_stride, right_lines}};
  const bool tiled = a.scales.k_stride || b.scales.k_stride;
  multiply(m, n, k, a, b, Finish<Micro>{tiled ? TILE : 0, a.scales, b.scales, bias, out, dtype, out_stride, bool(accumulate)}, threads);
}

// kernels/scaled_grouped_mm.py has the formulas. Groups of many products have all threads each, one after the other; those
// of few are shared out between threads, whole: an expert with a handful of tokens is no work to divide.
void fp8_scaled_grouped_mm(int along, int64_t groups, const int64_t* ends, int64_t m, int64_t n, int64_t k,
                           const void* left, int64_t left_stride, int64_t left_k_stride, int left_e5m2,
                           const float* left_scales, int64_t left_scale_stride,
                           const void* right, int64_t right_group_stride, int64_t right_stride, int64_t right_k_stride,
                           int right_e5m2, const float* right_scales, int64_t right_scale_group_stride,
                           int64_t right_scale_stride, void* out, int dtype, int64_t out_group_stride, int64_t out_stride,
                           int threads) {
  const auto bytes = [](const void* p) { return static_cast<const uint8_t*>(p); };
  const auto group = [&](int64_t g) {
    const int64_t start = g ? ends[g - 1] : 0, size = ends[g] - start;
    return Group{start, size, size * n * (along == ROWS ? k : m)};
  };
  const auto run = [&](int64_t g, const Group& here, int on) {
    const bool rows = along == ROWS;
    const int64_t rows_before = rows ? here.start : 0, k_before = rows ? 0 : here.start;
    const Operand a{bytes(left) + rows_before * left_stride + k_before * left_k_stride, left_stride, left_k_stride, left_e5m2,
                    {left_scales + rows_before * left_scale_stride, left_scale_stride, 0, 1}};
    const Operand b{bytes(right) + g * right_group_stride + k_before * right_k_stride, right_stride, right_k_stride, right_e5m2,
                    {right_scales + g * right_scale_group_stride, right_scale_stride, 0, 1}};
    void* to = static_cast<char*>(out) + (g * out_group_stride + rows_before * out_stride) * (dtype == FP32 ? 4 : 2);
    const Finish<Micro> finish{0, a.scales, b.scales, nullptr, to, dtype, out_stride, false};
    multiply(rows ? here.size : m, n, rows ? k : here.size, a, b, finish, on);
  };
  const auto is_large = [&](const Group& one) { return one.products >= GEMM_LEAST_PARALLEL * threads; };
  int64_t small = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const Group here = group(g);
    if (is_large(here)) run(g, here, threads);
    else small += here.products;
  }
  const int sharing = small >= GEMM_LEAST_PARALLEL ? usable_threads(threads, groups) : 1;
#pragma omp parallel for num_threads(sharing) schedule(dynamic)
  for (int64_t g = 0; g < groups; ++g) {
    const Group here = group(g);
    if (!is_large(here)) run(g, here, 1);
  }
}

// Whether this library's instructions can really be used here: small products on a thread that survives SIGILL, of one row
// (dot.h) and of more (gemm.h): they have instructions of their own.
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
    constexpr int64_t ROWS = 8, K = 64;
    uint8_t a[ROWS * K], b[K];
    std::memset(a, 0x38, sizeof a);  // 1.0 in E4M3
    std::memset(b, 0x40, sizeof b);  // 2.0
    const float one = 1.0f;
    float few[1] = {}, many[ROWS] = {};
    fp8_scaled_mm(1, 1, K, a, K, 1, 0, &one, 0, 0, 1, b, K, 1, 0, &one, 0, 0, 1, nullptr, few, FP32, 1, 0, 1);
    fp8_scaled_mm(ROWS, 1, K, a, K, 1, 0, &one, 0, 0, 1, b, K, 1, 0, &one, 0, 0, 1, nullptr, many, FP32, 1, 0, 1);
    right = few[0] == 128.0f && std::all_of(many, many + ROWS, [](float x) { return x == 128.0f; });
  }
  sigaction(SIGILL, &before, nullptr);
  return right;
}

}  // extern "C"
