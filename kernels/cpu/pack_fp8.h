// Panels of a gemm from FP8 matrices of any strides: bytes are brought into the panel's order, then decoded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fp8_formats.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace fp8 {

// Bytes of a matrix in another order.
struct Bytes {
  typedef uint8_t Sixteen __attribute__((vector_size(16)));

  // to[o][i] = from[o * outer_stride + i * inner_stride]. Of what lies behind `outer` in a line, up to `readable`
  // elements may be read.
  static void fetch(const uint8_t* from, int64_t outer_stride, int64_t inner_stride, int64_t outer, int64_t inner,
                    int64_t readable, uint8_t* to, int64_t to_stride) {
    if (inner_stride == 1) {
      for (int64_t o = 0; o < outer; ++o) std::memcpy(to + o * to_stride, from + o * outer_stride, inner);
    } else if (outer_stride == 1) {
      for (int64_t o = 0; o < outer; o += 16)
        for (int64_t i = 0; i < inner; i += 16)
          transpose(from + o + i * inner_stride, inner_stride, std::min<int64_t>(16, inner - i),
                    std::min<int64_t>(16, readable - o), std::min<int64_t>(16, outer - o), to + o * to_stride + i, to_stride);
    } else {
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; ++i) to[o * to_stride + i] = from[o * outer_stride + i * inner_stride];
    }
  }

 private:
  // `lines` lines of `width` bytes, 16 x 16 at the most, become the first `written` columns. Four rounds, each of which
  // interleaves line i with line i + 8.
  static void transpose(const uint8_t* from, int64_t stride, int64_t lines, int64_t width, int64_t written, uint8_t* to, int64_t to_stride) {
    constexpr Sixteen low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    constexpr Sixteen high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    Sixteen a[16] = {}, b[16];
    if (lines == 16 && width == 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from + i * stride, 16);
    } else {
      for (int i = 0; i < lines; ++i) std::memcpy(&a[i], from + i * stride, width);
    }
#pragma GCC unroll 2
    for (int round = 0; round < 2; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) b[2 * i] = __builtin_shuffle(a[i], a[i + 8], low), b[2 * i + 1] = __builtin_shuffle(a[i], a[i + 8], high);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) a[2 * i] = __builtin_shuffle(b[i], b[i + 8], low), a[2 * i + 1] = __builtin_shuffle(b[i], b[i + 8], high);
    }
    if (lines == 16)
      for (int i = 0; i < written; ++i) std::memcpy(to + i * to_stride, &a[i], 16);
    else
      for (int i = 0; i < written; ++i) std::memcpy(to + i * to_stride, &a[i], lines);
  }
};

// The values of a format's codes. Which format it is, is data and not a type: the code is compiled once.
struct Values {
  alignas(64) float as_fp32[256];
  alignas(64) uint16_t as_bf16[128];  // of the magnitudes; exact

  static const Values& of(bool e5m2) {
    static const Values e4m3_values(E4M3::decode), e5m2_values(E5M2::decode);
    return e5m2 ? e5m2_values : e4m3_values;
  }

 private:
  explicit Values(float (*decode)(uint8_t)) {
    for (int code = 0; code < 256; ++code) as_fp32[code] = decode(uint8_t(code));
    for (int code = 0; code < 128; ++code) as_bf16[code] = uint16_t(bits(as_fp32[code]) >> 16);
  }
};

#if defined(__AVX512BW__)
// 32 codes to bf16, by a table of the 128 magnitudes in four registers.
inline __m512i to_bf16(const Values& values, __m256i codes) {
  const uint16_t* table = values.as_bf16;
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), wide, _mm512_load_si512(table + 32));
  const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), wide, _mm512_load_si512(table + 96));
  const __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40)), high);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(int16_t(0x8000)));
  return _mm512_or_si512(magnitude, sign);
}
inline __m256i load32(const uint8_t* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }

struct DecodeToBf16 {
  static void decode(const Values& values, const uint8_t* codes, int64_t count, uint16_t* to) {  // count: a multiple of 32
    for (int64_t i = 0; i < count; i += 32) _mm512_storeu_si512(to + i, to_bf16(values, load32(codes + i)));
  }
  template <int64_t COLS>  // two lines of k at a time, interleaved: [k/2][COLS][2]
  static void decode_lines(const Values& values, const uint8_t* const* lines, int64_t count, uint16_t* to) {
    static_assert(COLS == 32);
    for (int64_t k = 0; k < count; k += 2, to += 64) {
      const __m256i first = load32(lines[k]), second = load32(lines[k + 1]);
      const __m256i low = _mm256_unpacklo_epi8(first, second), high = _mm256_unpackhi_epi8(first, second);
      _mm512_store_si512(to, to_bf16(values, _mm256_permute2x128_si256(low, high, 0x20)));
      _mm512_store_si512(to + 32, to_bf16(values, _mm256_permute2x128_si256(low, high, 0x31)));
    }
  }
};
#endif

struct DecodeToFp32 {
  static void decode(const Values& values, const uint8_t* codes, int64_t count, float* to) {  // count: a multiple of 8
    int64_t i = 0;
#if defined(__AVX512BW__)
    for (; i + 32 <= count; i += 32) {
      const __m512i narrow = to_bf16(values, load32(codes + i));
      const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(narrow));
      const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(narrow, 1));
      _mm512_storeu_si512(to + i, _mm512_slli_epi32(low, 16));
      _mm512_storeu_si512(to + i + 16, _mm512_slli_epi32(high, 16));
    }
#endif
    const float* table = values.as_fp32;
    for (; i < count; ++i) to[i] = table[codes[i]];
  }
  template <int64_t COLS>  // lines of k as they are: [k][COLS]
  static void decode_lines(const Values& values, const uint8_t* const* lines, int64_t count, float* to) {
    for (int64_t k = 0; k < count; ++k) decode(values, lines[k], COLS, to + k * COLS);
  }
};

// The left operand [M, K]: element (m, k) at data[m * row_stride + k * k_stride].
template <class Micro, class Decode>
struct PackLeft {
  const Values& values;
  const uint8_t* data;
  int64_t row_stride, k_stride, rows_in_all;

  void pack(int64_t row, int64_t rows, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t ROWS = Micro::ROWS, STEP = Micro::STEP;
    for (int64_t at = 0; at < count; at += STEP, to += ROWS * STEP) {
      const uint8_t* from = data + row * row_stride + (k + at) * k_stride;
      const int64_t taken = std::min(STEP, count - at);
      if (k_stride == 1 && taken == STEP) {
        for (int64_t r = 0; r < rows; ++r) Decode::decode(values, from + r * row_stride, STEP, to + r * STEP);
      } else {
        alignas(64) uint8_t codes[ROWS * STEP] = {};
        Bytes::fetch(from, row_stride, k_stride, rows, taken, rows_in_all - row, codes, STEP);
        Decode::decode(values, codes, rows * STEP, to);
      }
      if (rows < ROWS) std::memset(to + rows * STEP, 0, (ROWS - rows) * STEP * sizeof *to);
    }
  }
};

// The right operand [K, N]: element (k, n) at data[k * k_stride + n * col_stride].
template <class Micro, class Decode>
struct PackRight {
  const Values& values;
  const uint8_t* data;
  int64_t k_stride, col_stride;

  void pack(int64_t col, int64_t cols, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t COLS = Micro::COLS, STEP = Micro::STEP;
    for (int64_t at = 0; at < count; at += STEP, to += COLS * STEP) {
      const uint8_t* from = data + (k + at) * k_stride + col * col_stride;
      const int64_t taken = std::min(STEP, count - at);
      const uint8_t* lines[STEP];
      alignas(64) uint8_t codes[STEP * COLS];
      if (col_stride == 1 && cols == COLS && taken == STEP) {
        for (int64_t i = 0; i < STEP; ++i) lines[i] = from + i * k_stride;
      } else {
        if (cols < COLS || taken < STEP) std::memset(codes, 0, sizeof codes);
        Bytes::fetch(from, k_stride, col_stride, taken, cols, taken, codes, COLS);
        for (int64_t i = 0; i < STEP; ++i) lines[i] = codes + i * COLS;
      }
      Decode::template decode_lines<COLS>(values, lines, STEP, to);
    }
  }
};

}  // namespace fp8
