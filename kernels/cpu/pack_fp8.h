// Panels of a gemm from FP8 matrices of any strides: bytes are brought into the panel's order, then decoded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fp8_formats.h"
#include "sixteen.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace fp8 {

// Bytes of a matrix in another order.
struct Bytes {

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
  // `lines` lines of `width` bytes, 16 x 16 at the most, become the first `written` columns.
  static void transpose(const uint8_t* from, int64_t stride, int64_t lines, int64_t width, int64_t written, uint8_t* to, int64_t to_stride) {
    Bytes16 a[16] = {};
    if (lines == 16 && width == 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from + i * stride, 16);
    } else {
      for (int i = 0; i < lines; ++i) std::memcpy(&a[i], from + i * stride, width);
    }
    fp8::transpose(a);
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
  alignas(64) uint8_t bf16_bytes[2][128];  // the same, lower bytes and higher ones

  static const Values& of(bool e5m2) {
    static const Values e4m3_values(E4M3::decode), e5m2_values(E5M2::decode);
    return e5m2 ? e5m2_values : e4m3_values;
  }

 private:
  explicit Values(float (*decode)(uint8_t)) {
    for (int code = 0; code < 256; ++code) as_fp32[code] = decode(uint8_t(code));
    for (int code = 0; code < 128; ++code) {
      as_bf16[code] = uint16_t(bits(as_fp32[code]) >> 16);
      bf16_bytes[0][code] = uint8_t(as_bf16[code]), bf16_bytes[1][code] = uint8_t(as_bf16[code] >> 8);
    }
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

#if defined(__AVX512VBMI__)
// Where ByteTables finds the codes of two lines of 32 that it puts side by side.
struct Interleaved {
  alignas(64) uint8_t at[64] = {};
  constexpr Interleaved() {
    for (int i = 0; i < 64; ++i) {
      const int number = i / 16 * 8 + i % 8 + (i % 16 < 8 ? 0 : 32);
      at[i] = uint8_t(number % 2 * 32 + number / 2);
    }
  }
};
constexpr Interleaved INTERLEAVED;

// 64 codes to bf16: each number's two bytes by a table of bytes: products of one row from cache are 1.8 times as fast as by a
// table of words.
class ByteTables {
 public:
  explicit ByteTables(const Values& values) {
    for (int byte = 0; byte < 2; ++byte)
      for (int half = 0; half < 2; ++half) table_[byte][half] = _mm512_load_si512(values.bf16_bytes[byte] + 64 * half);
  }

  // Codes in order, in two halves.
  void decode(__m256i first, __m256i second, uint16_t* to) const {
    decode(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), to);
  }
  void decode(__m512i codes, uint16_t* to) const {
    __m512i numbers[2];
    decode(codes, numbers[0], numbers[1]);
    store(numbers, to);
  }
  void decode(__m512i codes, __m512i& first, __m512i& second) const {
    decode_arranged(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes), first, second);
  }
  // Two lines of codes, interleaved.
  void interleave(__m256i first, __m256i second, uint16_t* to) const {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    __m512i numbers[2];
    decode_arranged(_mm512_permutexvar_epi8(_mm512_load_si512(INTERLEAVED.at), both), numbers[0], numbers[1]);
    store(numbers, to);
  }

 private:
  // Codes 0-7, 32-39, 8-15, 40-47 and so on: what the instructions that put bytes side by side bring into order.
  void decode_arranged(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i low = _mm512_permutex2var_epi8(table_[0][0], codes, table_[0][1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(table_[1][0], codes, table_[1][1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(int8_t(0x80)), 0xf8);  // | sign
    first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  }
  static void store(const __m512i (&numbers)[2], uint16_t* to) {
    _mm512_storeu_si512(to, numbers[0]);
    _mm512_storeu_si512(to + 32, numbers[1]);
  }

  __m512i table_[2][2];
};

// Pairs of bytes of 32 columns, each of 16 pairs: one pair of all columns after the other.
inline void transpose_pairs(const uint8_t* from, int64_t stride, __m512i (&to)[16]) {
  __m512i lanes[2][8];  // of eight columns each: pairs w and w + 8 of columns 0-7, then of columns 8-15
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const uint8_t* first = from + 16 * half * stride;
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load32(first + i * stride)), load32(first + (i + 8) * stride), 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      b[i] = _mm512_unpacklo_epi16(a[2 * i], a[2 * i + 1]), b[i + 4] = _mm512_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      a[2 * i] = _mm512_unpacklo_epi32(b[2 * i], b[2 * i + 1]), a[2 * i + 1] = _mm512_unpackhi_epi32(b[2 * i], b[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)  // a: pairs 4i, 4i + 1 and 4i + 2, 4i + 3 of columns 0-3, the same of columns 4-7
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        lanes[half][4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + j + 2]);
        lanes[half][4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + j + 2]);
      }
  }
#pragma GCC unroll 8
  for (int w = 0; w < 8; ++w) {
    to[w] = _mm512_shuffle_i64x2(lanes[0][w], lanes[1][w], 0x88);
    to[w + 8] = _mm512_shuffle_i64x2(lanes[0][w], lanes[1][w], 0xdd);
  }
}
#endif

struct DecodeToBf16 {
#if defined(__AVX512VBMI__)
  static constexpr bool TAKES_COLUMNS = true;
#else
  static constexpr bool TAKES_COLUMNS = false;
#endif

  static void decode(const Values& values, const uint8_t* codes, int64_t count, uint16_t* to) {  // count: a multiple of 32
    for (int64_t i = 0; i < count; i += 32) _mm512_storeu_si512(to + i, to_bf16(values, load32(codes + i)));
  }
  static void decode_rows(const Values& values, const uint8_t* codes, int64_t stride, int64_t rows, uint16_t* to) {  // of 32
    int64_t row = 0;
#if defined(__AVX512VBMI__)
    const ByteTables tables(values);
    for (; row + 2 <= rows; row += 2, codes += 2 * stride, to += 64)
      tables.decode(load32(codes), load32(codes + stride), to);
#endif
    for (; row < rows; ++row, codes += stride, to += 32) decode(values, codes, 32, to);
  }
  template <int64_t COLS>  // two lines of k at a time, interleaved: [k/2][COLS][2]
  static void decode_lines(const Values& values, const uint8_t* const* lines, int64_t count, uint16_t* to) {
    static_assert(COLS == 32);
#if defined(__AVX512VBMI__)
    const ByteTables tables(values);
    for (int64_t k = 0; k < count; k += 2) tables.interleave(load32(lines[k]), load32(lines[k + 1]), to + k * COLS);
#else
    for (int64_t k = 0; k < count; k += 2, to += 64) {
      const __m256i first = load32(lines[k]), second = load32(lines[k + 1]);
      const __m256i low = _mm256_unpacklo_epi8(first, second), high = _mm256_unpackhi_epi8(first, second);
      _mm512_store_si512(to, to_bf16(values, _mm256_permute2x128_si256(low, high, 0x20)));
      _mm512_store_si512(to + 32, to_bf16(values, _mm256_permute2x128_si256(low, high, 0x31)));
    }
#endif
  }
#if defined(__AVX512VBMI__)
  // The same from 32 columns of 32 contiguous k's.
  static void decode_columns(const Values& values, const uint8_t* columns, int64_t stride, uint16_t* to) {
    const ByteTables tables(values);
    __m512i pairs[16];
    transpose_pairs(columns, stride, pairs);
    for (int pair = 0; pair < 16; ++pair) tables.decode(pairs[pair], to + pair * 64);
  }
#endif
};
#endif

struct DecodeToFp32 {
  static constexpr bool TAKES_COLUMNS = false;

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
  static void decode_rows(const Values& values, const uint8_t* codes, int64_t stride, int64_t rows, float* to) {  // of 32
    for (int64_t row = 0; row < rows; ++row) decode(values, codes + row * stride, 32, to + row * 32);
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
    static_assert(STEP == 32);
    for (int64_t at = 0; at < count; at += STEP, to += ROWS * STEP) {
      const uint8_t* from = data + row * row_stride + (k + at) * k_stride;
      const int64_t taken = std::min(STEP, count - at);
      if (k_stride == 1 && taken == STEP) {
        Decode::decode_rows(values, from, row_stride, rows, to);
      } else {
        alignas(64) uint8_t codes[ROWS * STEP] = {};
        Bytes::fetch(from, row_stride, k_stride, rows, taken, rows_in_all - row, codes, STEP);
        Decode::decode_rows(values, codes, STEP, rows, to);
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
      const bool whole = cols == COLS && taken == STEP;
      if constexpr (Decode::TAKES_COLUMNS)
        if (k_stride == 1 && whole) {
          Decode::decode_columns(values, from, col_stride, to);
          continue;
        }
      const uint8_t* lines[STEP];
      alignas(64) uint8_t codes[STEP * COLS];
      if (col_stride == 1 && whole) {
        for (int64_t i = 0; i < STEP; ++i) lines[i] = from + i * k_stride;
      } else {
        if (!whole) std::memset(codes, 0, sizeof codes);
        Bytes::fetch(from, k_stride, col_stride, taken, cols, taken, codes, COLS);
        for (int64_t i = 0; i < STEP; ++i) lines[i] = codes + i * COLS;
      }
      Decode::template decode_lines<COLS>(values, lines, STEP, to);
    }
  }
};

}  // namespace fp8
