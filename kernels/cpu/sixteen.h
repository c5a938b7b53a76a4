// Sixteen numbers at a time, in the compiler's own vectors: one register of AVX-512, more of a narrower set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fp8 {

typedef float Floats16 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint64_t Longs8 __attribute__((vector_size(64)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

inline Words16 bits(Floats16 x) { return reinterpret_cast<Words16>(x); }
inline Floats16 value(Words16 x) { return reinterpret_cast<Floats16>(x); }
inline Floats16 all(float x) { return Floats16{} + x; }
inline Words16 all(uint32_t x) { return Words16{} + x; }
template <class Vector> Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Of numbers below 256. GCC 12 does it element by element.
inline Bytes16 to_bytes(Words16 x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bytes16>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  return __builtin_convertvector(x, Bytes16);
#endif
}

// Row i becomes column i: four rounds, each of which interleaves row i with row i + 8.
template <class Vector> void transpose(Vector (&a)[16]) {
  using Order = std::conditional_t<sizeof(Vector) == sizeof(Bytes16), Bytes16, Words16>;
  constexpr Order low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  constexpr Order high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Vector b[16];
#pragma GCC unroll 2
  for (int round = 0; round < 2; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) b[2 * i] = __builtin_shuffle(a[i], a[i + 8], low), b[2 * i + 1] = __builtin_shuffle(a[i], a[i + 8], high);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[2 * i] = __builtin_shuffle(b[i], b[i + 8], low), a[2 * i + 1] = __builtin_shuffle(b[i], b[i + 8], high);
  }
}

// Eight rows of sixteen bytes become sixteen rows of eight, two in a vector.
inline void transpose(Bytes16 (&a)[8]) {
  constexpr Bytes16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  constexpr Bytes16 high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
    Bytes16 b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) b[2 * i] = __builtin_shuffle(a[i], a[i + 4], low), b[2 * i + 1] = __builtin_shuffle(a[i], a[i + 4], high);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = b[i];
  }
}

}  // namespace fp8
