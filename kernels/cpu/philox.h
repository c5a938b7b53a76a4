// Philox4x32-10, sixteen counters at a time.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "sixteen.h"

namespace fp8 {

class Philox {
 public:
  Philox(uint64_t seed, uint32_t stream) : seed_(seed), stream_(stream) {}

  // The four words of each of sixteen counters, of which there are those of even numbers and those of odd ones.
  void words(Longs8 even, Longs8 odd, Words16 (&to)[4]) const {
    Longs8 of_even[4], of_odd[4];
    rounds(even, of_even), rounds(odd, of_odd);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) to[i] = interleaved(of_even[i], of_odd[i]);
  }

 private:
  // A word is the lower half of a number; what is above it is ignored, so that a product is two words without a mask.
  void rounds(Longs8 counter, Longs8 (&c)[4]) const {
    c[0] = counter, c[1] = counter >> 32, c[2] = Longs8{} + stream_, c[3] = Longs8{};
    uint32_t k0 = uint32_t(seed_), k1 = uint32_t(seed_ >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const Longs8 first = product(c[0], 0xD2511F53u), second = product(c[2], 0xCD9E8D57u);
      c[0] = second >> 32 ^ c[1] ^ k0, c[1] = second, c[2] = first >> 32 ^ c[3] ^ k1, c[3] = first;
    }
  }
#if defined(__AVX512F__)
  static Longs8 product(Longs8 word, uint32_t factor) {
    return reinterpret_cast<Longs8>(_mm512_mul_epu32(reinterpret_cast<__m512i>(word), _mm512_set1_epi64(factor)));
  }
#else
  static Longs8 product(Longs8 word, uint32_t factor) { return (word & 0xffffffffu) * uint64_t(factor); }
#endif
  static Words16 interleaved(Longs8 even, Longs8 odd) { return reinterpret_cast<Words16>((even & 0xffffffffu) | odd << 32); }

  uint64_t seed_;
  uint32_t stream_;
};

}  // namespace fp8
