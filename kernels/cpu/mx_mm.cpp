// The MXFP8 gemm for CPUs; see kernels/mxfp8.py for the formula.
//
// A power of two times an E4M3 value is exact in bf16 and FP32: a panel is decoded as that of FP8 is (pack_fp8.h), and
// exponents are added to its numbers while they are in L1. A step of the packers is 32 k's, as is a block, so that a row of
// the left operand or a column of the right one has one scale in a step.
//
// bf16 has FP32's exponents, but the instructions that multiply it take subnormals for zero. So all exponents of an operand
// are moved by one number, which puts its smallest value at 2**-63, and the sums are moved back at the end. Operands
// whose values are too far apart for that are multiplied in FP32.

#include <algorithm>
#include <cstdint>

#include "best_micro.h"
#include "finish.h"
#include "fp8_formats.h"
#include "gemm.h"
#include "kernels.h"
#include "pack_fp8.h"

namespace {

using namespace fp8;

constexpr int64_t SIZE = 32;  // kernels/mxfp8.py: SIZE
constexpr int BIAS = 127, NOT_A_NUMBER = 255;
constexpr int LOWEST = -9, HIGHEST = 9;  // magnitudes of E4M3 are 2**-9 at least, below 2**9

// 2**exponent, from the smallest subnormal on.
float power(int exponent) { return exponent < -126 ? value(1u << (exponent + 149)) : value(uint32_t(exponent + BIAS) << 23); }

// E8M0 scales of lines (rows of the left operand, columns of the right one) in blocks of k.
struct BlockScales {
  const uint8_t* data;
  int64_t line_stride, k_stride, shared;  // shared: how many lines have a scale in common

  void read(int64_t line, int64_t count, int64_t k, uint8_t* to) const {
    const uint8_t* here = data + k / SIZE * k_stride;
    if (shared == 1)
      for (int64_t i = 0; i < count; ++i) to[i] = here[(line + i) * line_stride];
    else
      for (int64_t i = 0; i < count; ++i) to[i] = here[(line + i) / shared * line_stride];
  }
};

struct Operand {
  const uint8_t* codes;
  int64_t lines, k, line_stride, k_stride;
  BlockScales scales;
};

// Exponents of an operand's values: of the smallest that is not zero, at least, and of the largest.
struct Exponents {
  int lowest = 0, highest = 0;

  explicit Exponents(const Operand& of) {
    const int64_t groups = ceil_div(of.lines, of.scales.shared), blocks = ceil_div(of.k, SIZE);
    // Along the shorter stride, so that the compiler's vectors read what is contiguous.
    const bool by_k = of.scales.k_stride <= of.scales.line_stride;
    const int64_t outer = by_k ? groups : blocks, inner = by_k ? blocks : groups;
    const int64_t outer_stride = by_k ? of.scales.line_stride : of.scales.k_stride;
    const int64_t inner_stride = by_k ? of.scales.k_stride : of.scales.line_stride;
    uint8_t least = 255, most = 0, zero = 255;  // without 0, plus 1 and without NaN; whether there is 0
    const auto look = [&](const uint8_t* row, int64_t stride) {
      for (int64_t i = 0; i < inner; ++i) {
        const uint8_t byte = row[i * stride];
        least = std::min(least, uint8_t(byte - 1)), most = std::max(most, uint8_t(byte + 1)), zero = std::min(zero, byte);
      }
    };
    for (int64_t i = 0; i < outer; ++i) {
      const uint8_t* row = of.scales.data + i * outer_stride;
      inner_stride == 1 ? look(row, 1) : look(row, inner_stride);
    }
    if (zero == 0 && has_tiny(of, groups, blocks)) lowest = -BIAS + LOWEST;
    else if (least < NOT_A_NUMBER - 1) lowest = least + 1 - BIAS + LOWEST;
    else return;  // all zero or NaN
    highest = std::max(int(most) - 1, 0) - BIAS + HIGHEST;
  }

  // What is added to all of them; the sums are moved back by a number of FP32.
  int moved() const { return std::clamp(-lowest - 63, -63, 73); }
  int top() const { return highest + moved(); }

 private:
  // Whether a block with the scale 0 has codes that are not: one that is all zero has that scale too.
  static bool has_tiny(const Operand& of, int64_t groups, int64_t blocks) {
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t b = 0; b < blocks; ++b) {
        if (of.scales.data[g * of.scales.line_stride + b * of.scales.k_stride]) continue;
        const int64_t last = std::min((g + 1) * of.scales.shared, of.lines), end = std::min((b + 1) * SIZE, of.k);
        for (int64_t line = g * of.scales.shared; line < last; ++line)
          for (int64_t k = b * SIZE; k < end; ++k)
            if (of.codes[line * of.line_stride + k * of.k_stride] & 0x7f) return true;
      }
    return false;
  }
};

// Multiplication of what is in a panel by powers of two.

void multiply_row(float* numbers, uint8_t byte, int) {  // 32 k's
  const float factor = byte == NOT_A_NUMBER ? value(0x7fc00000u) : power(int(byte) - BIAS);
  for (int64_t i = 0; i < SIZE; ++i) numbers[i] *= factor;
}
template <int64_t COLS>
void multiply_columns(float* numbers, const uint8_t* bytes, int) {  // [32][COLS]
  alignas(64) float factors[COLS];
  for (int64_t n = 0; n < COLS; ++n) factors[n] = bytes[n] == NOT_A_NUMBER ? value(0x7fc00000u) : power(int(bytes[n]) - BIAS);
  for (int64_t k = 0; k < SIZE; ++k, numbers += COLS)
    for (int64_t n = 0; n < COLS; ++n) numbers[n] *= factors[n];
}

#if defined(HAS_BF16_MICRO)
// Exponents are added to all but zeros and NaNs.
inline void add_exponents(uint16_t* numbers, __m512i exponents) {
  const __m512i all = _mm512_load_si512(numbers), one = _mm512_set1_epi16(1);
  const __m512i magnitude = _mm512_and_si512(all, _mm512_set1_epi16(0x7fff));
  const __mmask32 finite = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), _mm512_set1_epi16(0x7f7f));
  _mm512_store_si512(numbers, _mm512_mask_add_epi16(all, finite, all, exponents));
}
void multiply_row(uint16_t* numbers, uint8_t byte, int moved) {
  if (byte == NOT_A_NUMBER) std::fill(numbers, numbers + SIZE, uint16_t(0x7fc0));
  else add_exponents(numbers, _mm512_set1_epi16(int16_t((int(byte) - BIAS + moved) * 128)));
}
// [16][COLS][2]: a column's pair of k's has 32 bits.
template <int64_t COLS>
void multiply_columns(uint16_t* numbers, const uint8_t* bytes, int moved) {
  static_assert(COLS == 32);
  for (int64_t half = 0; half < 2; ++half, bytes += 16, numbers += 32) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i words = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    const __m512i exponents = _mm512_slli_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(int16_t(moved - BIAS))), 7);
    for (int64_t pair = 0; pair < 16; ++pair) add_exponents(numbers + pair * 2 * COLS, exponents);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(wide, _mm512_set1_epi32(NOT_A_NUMBER));
    if (nan)
      for (int64_t pair = 0; pair < 16; ++pair) _mm512_mask_store_epi32(numbers + pair * 2 * COLS, nan, _mm512_set1_epi32(0x7fc07fc0));
  }
}
#endif

template <class Micro, class Decode>
struct PackScaledLeft {
  PackLeft<Micro, Decode> codes;
  BlockScales scales;
  int moved;

  void pack(int64_t row, int64_t rows, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t STEP = Micro::STEP;
    static_assert(STEP == SIZE);
    uint8_t bytes[Micro::ROWS];
    for (int64_t at = 0; at < count; at += STEP, to += Micro::ROWS * STEP) {
      codes.pack(row, rows, k + at, std::min(STEP, count - at), to);
      scales.read(row, rows, k + at, bytes);
      for (int64_t r = 0; r < rows; ++r) multiply_row(to + r * STEP, bytes[r], moved);
    }
  }
};

template <class Micro, class Decode>
struct PackScaledRight {
  PackRight<Micro, Decode> codes;
  BlockScales scales;
  int moved;

  void pack(int64_t col, int64_t cols, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t STEP = Micro::STEP, COLS = Micro::COLS;
    uint8_t bytes[COLS] = {};
    for (int64_t at = 0; at < count; at += STEP, to += COLS * STEP) {
      codes.pack(col, cols, k + at, std::min(STEP, count - at), to);
      scales.read(col, cols, k + at, bytes);
      multiply_columns<COLS>(to, bytes, moved);
    }
  }
};

struct Result {
  const float* bias;
  void* out;
  int dtype;
  int64_t stride;
};

template <class Micro, class Decode>
void multiply(const Operand& a, const Operand& b, int moved_left, int moved_right, const Result& to, int threads) {
  using Left = PackScaledLeft<Micro, Decode>;
  using Right = PackScaledRight<Micro, Decode>;
  const Values& values = Values::of(false);
  const Left left{{values, a.codes, a.line_stride, a.k_stride, a.lines}, a.scales, moved_left};
  const Right right{{values, b.codes, b.k_stride, b.line_stride}, b.scales, moved_right};
  const float back = power(-moved_left - moved_right), one = 1.0f;
  const Finish<Micro> finish{0, {&back, 0, 0, 1}, {&one, 0, 0, 1}, to.bias, to.out, to.dtype, to.stride, false};
  Gemm<Micro, Left, Right, Finish<Micro>>(a.lines, b.lines, a.k, left, right, finish).run(threads);
}

}  // namespace

extern "C" void fp8_mx_mm(int64_t m, int64_t n, int64_t k, const void* left, int64_t left_stride, int64_t left_k_stride,
                          const uint8_t* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride, int64_t left_lines,
                          const void* right, int64_t right_stride, int64_t right_k_stride,
                          const uint8_t* right_scales, int64_t right_scale_stride, int64_t right_scale_k_stride,
                          int64_t right_lines, const float* bias, void* out, int dtype, int64_t out_stride, int threads) {
  const auto codes = [](const void* of) { return static_cast<const uint8_t*>(of); };
  const Operand a{codes(left), m, k, left_stride, left_k_stride, {left_scales, left_scale_stride, left_scale_k_stride, left_lines}};
  const Operand b{codes(right), n, k, right_stride, right_k_stride, {right_scales, right_scale_stride, right_scale_k_stride, right_lines}};
  const Result to{bias, out, dtype, out_stride};
#if defined(HAS_BF16_MICRO)
  const Exponents of_a(a), of_b(b);
  int of_sum = 0;
  while ((int64_t(1) << of_sum) < k) ++of_sum;
  if (of_a.top() <= BIAS && of_b.top() <= BIAS && of_a.top() + of_b.top() + of_sum <= BIAS)
    return multiply<Bf16Micro, DecodeToBf16>(a, b, of_a.moved(), of_b.moved(), to, threads);
#endif
  multiply<MicroFp32, DecodeToFp32>(a, b, 0, 0, to, threads);
}
