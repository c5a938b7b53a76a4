// The product of two NVFP4 operands for CPUs; kernels/nvfp4_training.py has the formula.
//
// A code times the scale of its block is exact in bf16: the packers look it up, in the table of that scale. Both operands
// have contiguous k's, two in a byte.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "best_micro.h"
#include "finish.h"
#include "fp8_formats.h"
#include "gemm.h"
#include "kernels.h"
#include "sixteen.h"

namespace {

using namespace fp8;

constexpr int64_t SIZE = 16;  // kernels/nvfp4_training.py: SIZE

// Each code times each E4M3 scale.
struct Products {
  alignas(64) float as_fp32[256][16];
  alignas(64) uint16_t as_bf16[256][16];

  static const Products& get() {
    static const Products products;
    return products;
  }

 private:
  Products() {
    constexpr float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int scale = 0; scale < 256; ++scale)
      for (int code = 0; code < 16; ++code) {
        const float magnitude = magnitudes[code & 7], product = (code & 8 ? -magnitude : magnitude) * E4M3::decode(uint8_t(scale));
        as_fp32[scale][code] = product, as_bf16[scale][code] = uint16_t(bits(product) >> 16);
      }
  }
};

struct Operand {
  const uint8_t* codes;
  int64_t stride;
  const uint8_t* scales;
  int64_t scale_stride, scale_k_stride, shared;  // shared: how many lines have a scale in common
  const Products& products;

  const uint8_t* codes_at(int64_t line, int64_t k) const { return codes + line * stride + k / 2; }
  uint8_t scale_at(int64_t line, int64_t k) const {
    return scales[(shared == 1 ? line : line / shared) * scale_stride + k / SIZE * scale_k_stride];
  }

  // `count` k's of a line, 16 or 32; those behind are zeros.
  void decode(int64_t line, int64_t k, int64_t count, float* to) const {
    for (int64_t at = 0; at < count; at += SIZE) {
      const float* table = products.as_fp32[scale_at(line, k + at)];
      const uint8_t* bytes = codes_at(line, k + at);
      for (int64_t i = 0; i < SIZE / 2; ++i) to[at + 2 * i] = table[bytes[i] & 15], to[at + 2 * i + 1] = table[bytes[i] >> 4];
    }
    if (count < 2 * SIZE) std::fill(to + count, to + 2 * SIZE, 0.0f);
  }
#if defined(HAS_BF16_MICRO)
  __m512i decode(int64_t line, int64_t k, int64_t count) const {
    const auto load = [](const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); };
    const uint8_t* bytes = codes_at(line, k);
    const __m256i first = load(products.as_bf16[scale_at(line, k)]);
    if (count == SIZE) return looked_up(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)), first, _mm256_setzero_si256());
    return looked_up(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), first, load(products.as_bf16[scale_at(line, k + SIZE)]));
  }
  // Sixteen bytes by the tables of their halves.
  static __m512i looked_up(__m128i bytes, __m256i first, __m256i second) {
    const __m512i wide = _mm512_cvtepu8_epi32(bytes);
    const __m512i codes = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi32(wide, 12)), _mm512_set1_epi32(0x000f000f));
    const __m512i in_second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    return _mm512_permutexvar_epi16(_mm512_or_si512(codes, in_second), _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
  }
#endif
};

// Rows: [k/32][ROWS][32].
template <class Micro>
struct PackLeft {
  using Element = typename Micro::Element;
  const Operand& of;

  void pack(int64_t row, int64_t rows, int64_t k, int64_t count, Element* to) const {
    constexpr int64_t ROWS = Micro::ROWS, STEP = Micro::STEP;
    static_assert(STEP == 2 * SIZE);
    for (int64_t at = 0; at < count; at += STEP, to += ROWS * STEP) {
      const int64_t taken = std::min(STEP, count - at);
      for (int64_t r = 0; r < rows; ++r) {
        if constexpr (sizeof(Element) == 4) of.decode(row + r, k + at, taken, to + r * STEP);
#if defined(HAS_BF16_MICRO)
        else _mm512_store_si512(to + r * STEP, of.decode(row + r, k + at, taken));
#endif
      }
      if (rows < ROWS) std::memset(to + rows * STEP, 0, (ROWS - rows) * STEP * sizeof *to);
    }
  }
};

// Columns: FP32 [k][COLS], bf16 [k/2][COLS][2], where a pair of k's is a word.
template <class Micro>
struct PackRight {
  using Element = typename Micro::Element;
  static constexpr int64_t COLS = Micro::COLS, STEP = Micro::STEP;
  const Operand& of;

  void pack(int64_t col, int64_t cols, int64_t k, int64_t count, Element* to) const {
    for (int64_t at = 0; at < count; at += STEP, to += COLS * STEP)
      for (int64_t first = 0; first < COLS; first += 16)
        sixteen(col + first, cols - first, k + at, std::min(STEP, count - at), to + first * int64_t(4 / sizeof(Element)));
  }

 private:
  void sixteen(int64_t col, int64_t cols, int64_t k, int64_t count, Element* to) const {
    constexpr int64_t MOST = COLS < 16 ? COLS : 16;
    cols = std::min(cols, MOST);
    if constexpr (sizeof(Element) == 4) {
      alignas(64) float line[STEP];
      for (int64_t c = 0; c < MOST; ++c) {
        if (c < cols) of.decode(col + c, k, count, line);
        else std::fill(line, line + STEP, 0.0f);
        for (int64_t i = 0; i < STEP; ++i) to[i * COLS + c] = line[i];
      }
    } else {
#if defined(HAS_BF16_MICRO)
      Words16 lines[16] = {};
      if (cols == 16)
#pragma GCC unroll 16
        for (int c = 0; c < 16; ++c) lines[c] = reinterpret_cast<Words16>(of.decode(col + c, k, count));
      else
        for (int64_t c = 0; c < cols; ++c) lines[c] = reinterpret_cast<Words16>(of.decode(col + c, k, count));
      transpose(lines);
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; ++pair) std::memcpy(to + pair * 2 * COLS, &lines[pair], sizeof lines[pair]);
#endif
    }
  }
};

#if defined(HAS_BF16_MICRO)
using Micro = Bf16Micro;
#else
using Micro = MicroFp32;
#endif

}  // namespace

extern "C" void fp8_nvfp4_train_mm(int64_t m, int64_t n, int64_t k, const uint8_t* left, int64_t left_stride,
                                   const uint8_t* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride,
                                   int64_t left_lines, const uint8_t* right, int64_t right_stride, const uint8_t* right_scales,
                                   int64_t right_scale_stride, int64_t right_scale_k_stride, int64_t right_lines,
                                   const float* left_dequant, const float* right_dequant, const float* bias, void* out,
                                   int dtype, int64_t out_stride, int threads) {
  const Products& products = Products::get();
  const Operand a{left, left_stride, left_scales, left_scale_stride, left_scale_k_stride, left_lines, products};
  const Operand b{right, right_stride, right_scales, right_scale_stride, right_scale_k_stride, right_lines, products};
  const PackLeft<Micro> rows{a};
  const PackRight<Micro> cols{b};
  const Finish<Micro> finish{0, {left_dequant, 0, 0, 1}, {right_dequant, 0, 0, 1}, bias, out, dtype, out_stride, false};
  Gemm<Micro, PackLeft<Micro>, PackRight<Micro>, Finish<Micro>>(m, n, k, rows, cols, finish).run(threads);
}
