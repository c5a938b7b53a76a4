// Fingerprints of many matrices in one call; kernels/fingerprint.py says what they are and is the reference.

#include <cstdint>

#include "fp8_formats.h"
#include "kernels.h"

namespace {

constexpr int64_t PLACES = 16, WIDTH = 16;

uint64_t mix(uint64_t z) {  // SplitMix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Where the samples of a place begin.
int64_t begin(int64_t place, int64_t numel) {
  const int64_t fraction = (place << 24) + (static_cast<uint32_t>(place * 0x9e3779b1u) >> 8);
  return (fraction * ((numel + WIDTH - 1) / WIDTH) >> 28) * WIDTH;
}

template <class Bits>
uint64_t fingerprint(const Bits* x, int64_t numel) {
  // Each place is in a page of its own, so that a miss costs a page walk too: all of them start before one is needed.
  for (int64_t place = 0; place < PLACES; ++place) __builtin_prefetch(x + begin(place, numel));
  uint64_t sum = 0, key = 0;
  for (int64_t place = 0; place < PLACES; ++place) {
    const int64_t first = begin(place, numel);
    for (int64_t at = first; at < first + WIDTH; ++at)
      sum += mix((at < numel ? x[at] : 0) + (key += 0x9e3779b97f4a7c15u));
  }
  return sum;
}

}  // namespace

extern "C" void fp8_fingerprints(int64_t count, const void* const* x, const int64_t* numel, const int* dtype,
                                 int64_t* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<int64_t>(dtype[i] == fp8::FP32
                                      ? fingerprint(static_cast<const uint32_t*>(x[i]), numel[i])
                                      : fingerprint(static_cast<const uint16_t*>(x[i]), numel[i]));
}
