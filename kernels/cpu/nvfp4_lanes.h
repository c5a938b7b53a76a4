// Sixteen rows of a weight at once: a lane is a row. AVX-512, AVX2 or plain C++, by what the file is compiled for.
//
//   Floats   16 x float
//   Words    16 x 8 codes of E2M1: codes k .. k+7 of each row, the first in the lowest four bits
//   Pairs    16 x 2 x bf16                    only with AVX512_BF16
//   Bytes    16 x 4 x uint8, 2 * e2m1 + 12    so that they are unsigned, as the instructions for int8 want one side
//   Ints     16 x int32
//
// row_words: the other way round, 16 codes of one row, a lane is a k. Only the lowest four bits of a lane count.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr float E2M1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
constexpr uint8_t OFFSET_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int OFFSET = 12;
// What e4m3() returns is too small by this: E4M3 bits moved into FP16 are, and FP16 subnormals convert at full speed.
constexpr double SCALE_UNIT = 256.0;

#if defined(__AVX512F__)

struct Floats { __m512 v; };
struct Words { __m512i v; };
struct Bytes { __m512i v; };
struct Ints { __m512i v; };

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words next(Words w) { return {_mm512_srli_epi32(w.v, 4)}; }
inline Words row_words(uint32_t first, uint32_t second) {
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(int32_t(first)), 0xff00, int32_t(second));
  return {_mm512_srlv_epi32(both, shifts)};
}
inline Floats e2m1(Words w) { return {_mm512_permutexvar_ps(w.v, _mm512_loadu_ps(E2M1))}; }

inline Floats e4m3(const uint8_t* p) {
  const __m256i magnitude = _mm256_set1_epi16(0x3f80);
  __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(h, magnitude), magnitude);
  h = _mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbf80)));
  return {_mm512_cvtph_ps(_mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(0x7e00)))};
}

// Scales of two blocks, 32 bytes that are neither negative nor NaN: plain_e4m3 tells of four blocks.
inline bool plain_e4m3(const uint8_t* p) {
  return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7f)) == 0;
}
inline void e4m3_pair(const uint8_t* p, Floats& first, Floats& second) {
  const __m512i h = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)), 7);
  first.v = _mm512_cvtph_ps(_mm512_castsi512_si256(h)), second.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
}

inline Bytes bytes_of(__m512i nibbles) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)OFFSET_E2M1));
#if defined(__AVX512VBMI__)
  return {_mm512_permutexvar_epi8(nibbles, table)};  // looks at six bits; the table is there four times
#else
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(nibbles, _mm512_set1_epi8(15)))};
#endif
}
inline Bytes even_bytes(Words w) { return bytes_of(w.v); }
inline Bytes odd_bytes(Words w) { return bytes_of(_mm512_srli_epi32(w.v, 4)); }
inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints dot(Ints sum, Bytes w, int32_t x) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
#else
  __m512i pairs = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(x));  // at most 2 * 24 * 127: no saturation
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }

// a and b of each row side by side, cut to bf16: exact where they are products of E2M1 and E4M3, of six significant bits.
inline void store_pairs(uint16_t* p, Floats a, Floats b) {
  const __m512i first = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  _mm512_storeu_si512(p, _mm512_mask_mov_epi16(first, 0xaaaaaaaau, _mm512_castps_si512(b.v)));
}

#if defined(__AVX512BF16__)
struct Pairs { __m512i v; };
alignas(64) constexpr uint16_t BF16_E2M1[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040,
    0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
    0xc000, 0xc040, 0xc080, 0xc0c0};  // twice: the instruction looks at five bits
// Codes k and k + 4 of each row, k the first of the word.
inline Pairs e2m1_pairs(Words w) { return {_mm512_permutexvar_epi16(w.v, _mm512_load_si512(BF16_E2M1))}; }
inline Floats dot(Floats sum, Pairs w, uint32_t x) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(int32_t(x)))};
}
#endif

#elif defined(__AVX2__)

struct Floats { __m256 v[2]; };
struct Words { __m256i v[2]; };
struct Bytes { __m256i v[2]; };
struct Ints { __m256i v[2]; };

inline Floats zeros() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
inline Floats splat(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
inline Floats load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v[0]), _mm256_storeu_ps(p + 8, a.v[1]); }
inline Floats operator+(Floats a, Floats b) {
  return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}};
}
inline Floats operator*(Floats a, Floats b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}

inline Words load_words(const uint8_t* p) {
  return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}};
}
inline Words next(Words w) { return {{_mm256_srli_epi32(w.v[0], 4), _mm256_srli_epi32(w.v[1], 4)}}; }
inline Words row_words(uint32_t first, uint32_t second) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  return {{_mm256_srlv_epi32(_mm256_set1_epi32(int32_t(first)), shifts),
           _mm256_srlv_epi32(_mm256_set1_epi32(int32_t(second)), shifts)}};
}
inline __m256 e2m1(__m256i w) {  // the instruction looks at three bits, the fourth is the sign
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1), w);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(w, 28), _mm256_set1_epi32(int32_t(0x80000000)));
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}
inline Floats e2m1(Words w) { return {{e2m1(w.v[0]), e2m1(w.v[1])}}; }

inline Floats e4m3(const uint8_t* p) {
  const __m256i magnitude = _mm256_set1_epi16(0x3f80);
  __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(h, magnitude), magnitude);
  h = _mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbf80)));
  h = _mm256_or_si256(h, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}};
}

inline __m256i bytes_of(__m256i nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)OFFSET_E2M1));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}
inline Bytes even_bytes(Words w) { return {{bytes_of(w.v[0]), bytes_of(w.v[1])}}; }
inline Bytes odd_bytes(Words w) { return even_bytes(next(w)); }
inline Ints splat(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
inline __m256i dot(__m256i sum, __m256i w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(w, x);  // at most 2 * 24 * 127: no saturation
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints dot(Ints sum, Bytes w, int32_t x) {
  const __m256i all = _mm256_set1_epi32(x);
  return {{dot(sum.v[0], w.v[0], all), dot(sum.v[1], w.v[1], all)}};
}
inline Floats to_floats(Ints a) { return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}}; }

#else

struct Floats { float v[LANES]; };
struct Words { uint32_t v[LANES]; };
struct Bytes { uint8_t v[4 * LANES]; };
struct Ints { int32_t v[LANES]; };

#define EACH_LANE(expression) \
  for (int i = 0; i < LANES; ++i) out.v[i] = (expression); \
  return out

inline Floats splat(float x) { Floats out; EACH_LANE(x); }
inline Floats zeros() { return splat(0.f); }
inline Floats load(const float* p) { Floats out; EACH_LANE(p[i]); }
inline void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats operator+(Floats a, Floats b) { Floats out; EACH_LANE(a.v[i] + b.v[i]); }
inline Floats operator*(Floats a, Floats b) { Floats out; EACH_LANE(a.v[i] * b.v[i]); }
inline Floats fma(Floats a, Floats b, Floats c) { Floats out; EACH_LANE(a.v[i] * b.v[i] + c.v[i]); }

inline Words load_words(const uint8_t* p) {  // little-endian, whatever the machine
  Words out;
  EACH_LANE(p[4 * i] | p[4 * i + 1] << 8 | p[4 * i + 2] << 16 | uint32_t(p[4 * i + 3]) << 24);
}
inline Words next(Words w) { Words out; EACH_LANE(w.v[i] >> 4); }
inline Words row_words(uint32_t first, uint32_t second) { Words out; EACH_LANE((i < 8 ? first : second) >> 4 * (i % 8)); }
inline Floats e2m1(Words w) { Floats out; EACH_LANE(E2M1[w.v[i] & 15]); }
inline float e4m3(uint8_t b) {
  if ((b & 0x7f) == 0x7f) return __builtin_nanf("");
  const int exponent = b >> 3 & 15, significand = (b & 7) + (exponent ? 8 : 0);
  const float power = float(1 << (exponent ? exponent - 1 : 0));
  return (b & 0x80 ? -1.f : 1.f) * significand * power * 0x1p-17f;
}
inline Floats e4m3(const uint8_t* p) { Floats out; EACH_LANE(e4m3(p[i])); }
inline Bytes bytes_of(Words w, int shift) {
  Bytes out;
  for (int i = 0; i < 4 * LANES; ++i) out.v[i] = OFFSET_E2M1[w.v[i / 4] >> (8 * (i % 4) + shift) & 15];
  return out;
}
inline Bytes even_bytes(Words w) { return bytes_of(w, 0); }
inline Bytes odd_bytes(Words w) { return bytes_of(w, 4); }
inline Ints splat(int32_t x) { Ints out; EACH_LANE(x); }
inline Ints dot(Ints sum, Bytes w, int32_t x) {
  int8_t q[4];
  std::memcpy(q, &x, 4);
  Ints out;
  EACH_LANE(sum.v[i] + w.v[4 * i] * q[0] + w.v[4 * i + 1] * q[1] + w.v[4 * i + 2] * q[2] + w.v[4 * i + 3] * q[3]);
}
inline Floats to_floats(Ints a) { Floats out; EACH_LANE(float(a.v[i])); }

#endif

}  // namespace
