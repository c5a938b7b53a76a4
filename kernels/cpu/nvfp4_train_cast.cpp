// Casts to NVFP4 of training for CPUs; kernels/nvfp4_training.py has the formulas.
//
// v is taken in tiles of 16 k's by 16 rows, [k][row]: a vector has one k of all rows, so that a rotation, the largest
// magnitude of a block and the four words of Philox are plain operations on vectors. A transposed x is stored like that; of
// another one tiles are transposed in registers. Compile with -ffp-contract=off.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "fp8_formats.h"
#include "kernels.h"
#include "philox.h"
#include "threads.h"

namespace {

using namespace fp8;

constexpr int64_t SIZE = 16;  // kernels/nvfp4_training.py: SIZE
constexpr bool NEGATIVE[SIZE] = {0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1};  // kernels/nvfp4_training.py: SIGNS
constexpr int64_t STRIP = 32;  // rows of v that a thread takes of a transposed x: whole lines of cache

struct Tile { Floats16 v[SIZE]; };  // v[k][row]

// What becomes of v in a tile: codes, one k of all rows in a vector, and the scales of the rows.
struct Coded {
  Words16 codes[SIZE];
  Floats16 scale;
  alignas(16) uint8_t scales[SIZE];  // the same in E4M3
};

struct Call {
  float enc, one_over_enc;
  bool tiles, rotated;
  const Philox* philox;
  bool four_over_six;
  int64_t padded_k;
};

template <class In> Floats16 load(const typename In::type* from) {
  Floats16 v;
  if constexpr (std::is_same_v<In, Float32>) {
    std::memcpy(&v, from, sizeof v);
    return v;
  } else {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<In, Float16>)
      return reinterpret_cast<Floats16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#endif
    alignas(64) float wide[16];
    for (int i = 0; i < 16; ++i) wide[i] = In::load(from[i]);
    std::memcpy(&v, wide, sizeof v);
    return v;
  }
}
template <class In> Floats16 load(const typename In::type* from, int64_t count) {
  if (count >= 16) return load<In>(from);
  alignas(64) float wide[16] = {};
  for (int64_t i = 0; i < count; ++i) wide[i] = In::load(from[i]);
  Floats16 v;
  std::memcpy(&v, wide, sizeof v);
  return v;
}

// diag(SIGNS) H16 / 4, summed in the order of the fast transform.
void rotate(Tile& tile) {
#pragma GCC unroll 16
  for (int k = 0; k < SIZE; ++k)
    if (NEGATIVE[k]) tile.v[k] = -tile.v[k];
#pragma GCC unroll 4
  for (int half = 1; half < SIZE; half *= 2)
#pragma GCC unroll 16
    for (int k = 0; k < SIZE; ++k)
      if (!(k & half)) {
        const Floats16 first = tile.v[k], second = tile.v[k + half];
        tile.v[k] = first + second, tile.v[k + half] = first - second;
      }
#pragma GCC unroll 16
  for (int k = 0; k < SIZE; ++k) tile.v[k] *= 0.25f;
}

// Words of the elements of a tile, 24 bits each, as numbers: u times 2**24.
void draw(const Philox& philox, int64_t row, int64_t k, int64_t padded_k, Floats16 (&drawn)[SIZE]) {
  constexpr Longs8 EVEN = {0, 2, 4, 6, 8, 10, 12, 14};
  const uint64_t per_row = uint64_t(padded_k) / 4, first = uint64_t(row) * per_row + uint64_t(k) / 4;
  const Longs8 even = EVEN * per_row + first, odd = even + per_row;
#pragma GCC unroll 4
  for (int group = 0; group < 4; ++group) {
    Words16 words[4];
    philox.words(even + uint64_t(group), odd + uint64_t(group), words);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      typedef int32_t Integers16 __attribute__((vector_size(64)));  // which have an instruction
      drawn[4 * group + i] = __builtin_convertvector(reinterpret_cast<Integers16>(words[i] >> 8), Floats16);
    }
  }
}

// E4M3 of numbers from 0 to 448, to nearest even, and back; what is not such a number is NaN.
inline Words16 e4m3_of(Floats16 x) {
  const Words16 u = bits(x), normal = ((u + ((1u << (E4M3::dropped - 1)) - 1) + (u >> E4M3::dropped & 1u)) >> E4M3::dropped) - E4M3::rebias;
  const Words16 subnormal = bits(x + E4M3::anchor) - fp8::bits(E4M3::anchor);
  const Words16 code = x < E4M3::smallest_normal ? subnormal : normal;
  return x <= E4M3::max ? code : all(E4M3::nan);
}
inline Floats16 from_e4m3(Words16 code) {
  typedef int32_t Integers16 __attribute__((vector_size(64)));
  const Floats16 subnormal = __builtin_convertvector(reinterpret_cast<Integers16>(code), Floats16) * E4M3::spacing;
  const Floats16 x = code < (1u << E4M3::stored) ? subnormal : value((code + E4M3::rebias) << E4M3::dropped);
  return code == E4M3::nan ? all(std::numeric_limits<float>::quiet_NaN()) : x;
}

// The scales that map the largest magnitudes of blocks to that value of E2M1, and what multiplies v by them.
Floats16 scales_of(const Call& call, Floats16 amax, float largest, Coded& coded) {
  const float by = call.enc * float(1.0 / double(largest)), most = std::numeric_limits<float>::max();
  Floats16 wide = amax * by;
  wide = (wide > 448.0f ? all(448.0f) : wide) + amax * 0.0f;  // comparisons that leave NaN alone
  const Words16 scales = e4m3_of(wide);
  const Bytes16 narrow = to_bytes(scales);
  std::memcpy(coded.scales, &narrow, sizeof narrow);
  coded.scale = from_e4m3(scales);
  const Floats16 inverse = 1.0f / (coded.scale * call.one_over_enc);
  return inverse > most ? all(most) : inverse;
}

// E2M1 has steps of 0.5 below 2, of 1 below 4, of 2 above. Codes of magnitudes up to 6, to nearest even: the sum with 2**23
// steps rounds, and its last bits are the number of steps, to which the codes below are added.
inline Words16 code_of(Floats16 magnitude) {
  const Floats16 anchor = magnitude < 2.0f ? all(0x1p22f) : (magnitude < 4.0f ? all(0x1p23f + 2.0f) : all(0x1p24f + 8.0f));
  return bits(magnitude + anchor) & 15u;
}
// At random: the code of t, cut off, is its exponent and the first bit of its significand.
inline Words16 code_of(Floats16 magnitude, Floats16 drawn) {
  const Words16 power = larger(bits(magnitude) & 0x7f800000u, all(0x3f800000u));  // 1, 2 or 4: two steps
  const Floats16 t = magnitude + drawn * value(power - (25u << 23));
  const Words16 subnormal = t >= 0.5f ? all(1u) : all(0u);
  return t < 1.0f ? subnormal : (bits(t) >> 22) - 252u;
}

template <bool AT_RANDOM>
void encode(const Tile& tile, Floats16 mult, const Floats16* drawn, Words16 (&codes)[SIZE]) {
#pragma GCC unroll 16
  for (int k = 0; k < SIZE; ++k) {
    const Floats16 scaled = tile.v[k] * mult;
    Floats16 magnitude = value(bits(scaled) & 0x7fffffffu);
    magnitude = magnitude < 6.0f ? magnitude : all(6.0f);
    const Words16 sign = bits(scaled) >> 28 & 8u;
    if constexpr (AT_RANDOM) codes[k] = code_of(magnitude, drawn[k]) | sign;
    else codes[k] = code_of(magnitude) | sign;
  }
}

// Squared errors of blocks, summed in the order of kernels/nvfp4_training.py: first k's, then rows, halves of what is left.
void errors_of(const Call& call, const Tile& tile, const Coded& coded, float (&errors)[SIZE]) {
  constexpr Floats16 VALUES = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  Floats16 e[SIZE];
  for (int k = 0; k < SIZE; ++k) {
    const Floats16 off = __builtin_shuffle(VALUES, coded.codes[k]) * coded.scale * call.one_over_enc - tile.v[k];
    e[k] = off * off;
  }
  for (int half = SIZE / 2; half; half /= 2)
    for (int k = 0; k < half; ++k) e[k] += e[k + half];
  std::memcpy(errors, &e[0], sizeof errors);
  if (!call.tiles) return;
  for (int half = SIZE / 2; half; half /= 2)
    for (int r = 0; r < half; ++r) errors[r] += errors[r + half];
  std::fill(errors + 1, errors + SIZE, errors[0]);
}

void quantize(const Call& call, Tile& tile, int64_t row, int64_t k, Coded& coded) {
  if (call.rotated) rotate(tile);
  Words16 most = {};
#pragma GCC unroll 16
  for (int i = 0; i < SIZE; ++i) most = larger(most, bits(tile.v[i]) & 0x7fffffffu);
  if (call.tiles) {
    alignas(64) uint32_t each[SIZE];
    std::memcpy(each, &most, sizeof most);
    most = all(*std::max_element(each, each + SIZE));
  }
  const Floats16 amax = value(most);
  Floats16 drawn[SIZE];
  if (call.philox) draw(*call.philox, row, k, call.padded_k, drawn);
  const auto by_largest = [&](float largest, Coded& to) {
    const Floats16 mult = scales_of(call, amax, largest, to);
    call.philox ? encode<true>(tile, mult, drawn, to.codes) : encode<false>(tile, mult, nullptr, to.codes);
  };
  by_largest(6.0f, coded);
  if (!call.four_over_six) return;
  Coded other;
  by_largest(4.0f, other);
  float errors[2][SIZE];
  errors_of(call, tile, coded, errors[0]), errors_of(call, tile, other, errors[1]);
  Words16 better;
  for (int r = 0; r < SIZE; ++r) {
    better[r] = errors[1][r] < errors[0][r] ? ~0u : 0u;
    if (better[r]) coded.scales[r] = other.scales[r];
  }
  for (int i = 0; i < SIZE; ++i) coded.codes[i] = (other.codes[i] & better) | (coded.codes[i] & ~better);
}

// Two k's in a byte, eight bytes of each row.
void store(const Words16 (&codes)[SIZE], int64_t rows, uint8_t* to, int64_t stride) {
  Bytes16 pairs[SIZE / 2];
#pragma GCC unroll 8
  for (int i = 0; i < SIZE / 2; ++i) pairs[i] = to_bytes(codes[2 * i] | codes[2 * i + 1] << 4);
  transpose(pairs);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * stride, reinterpret_cast<const uint8_t*>(pairs) + r * 8, 8);
}

template <class In>
void quantize_all(const Call& call, const void* from, int64_t rows, int64_t k_size, int64_t stride, bool transposed,
                  uint8_t* codes, uint8_t* scales, int threads) {
  const auto* x = static_cast<const typename In::type*>(from);
  const int64_t blocks = call.padded_k / SIZE, code_stride = call.padded_k / 2;
  for_each(rows, transposed ? STRIP : SIZE, threads, [=](int64_t first) {
    const int64_t last = std::min(first + (transposed ? STRIP : SIZE), rows);
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t row = first; row < last; row += SIZE) {
        const int64_t k = block * SIZE, there = std::min(SIZE, rows - row), deep = std::min(SIZE, k_size - k);
        Tile tile;
        if (transposed) {
          const auto* here = x + k * stride + row;
          for (int64_t i = 0; i < SIZE; ++i) {
            tile.v[i] = i < deep ? load<In>(here + i * stride, there) : Floats16{};
            if (k + SIZE + i < k_size) __builtin_prefetch(here + (SIZE + i) * stride);
          }
        } else {
          const auto* here = x + row * stride + k;
          for (int64_t i = 0; i < SIZE; ++i) {
            tile.v[i] = i < there ? load<In>(here + i * stride, deep) : Floats16{};
            if (i < there && k + 4 * SIZE < k_size) __builtin_prefetch(here + i * stride + 4 * SIZE);
          }
          transpose(tile.v);
        }
        Coded coded;
        quantize(call, tile, row, k, coded);
        store(coded.codes, there, codes + row * code_stride + k / 2, code_stride);
        if (call.tiles) scales[row / SIZE * blocks + block] = coded.scales[0];
        else
          for (int64_t r = 0; r < there; ++r) scales[(row + r) * blocks + block] = coded.scales[r];
      }
  });
}

}  // namespace

extern "C" void fp8_nvfp4_quantize(const void* x, int dtype, int64_t rows, int64_t k, int64_t stride, int transposed, float enc,
                                   int tiles, int rotated, const int64_t* seed, int64_t stream, int four_over_six,
                                   uint8_t* codes, uint8_t* scales, int threads) {
  threads = usable_threads(threads, (rows + SIZE - 1) / SIZE);
  const Philox philox(seed ? uint64_t(*seed) : 0, uint32_t(stream));
  const Call call{enc, 1.0f / enc, bool(tiles), bool(rotated), seed ? &philox : nullptr, bool(four_over_six), (k + SIZE - 1) / SIZE * SIZE};
  if (dtype == FP32) quantize_all<Float32>(call, x, rows, k, stride, transposed, codes, scales, threads);
  if (dtype == BF16) quantize_all<BFloat16>(call, x, rows, k, stride, transposed, codes, scales, threads);
  if (dtype == FP16) quantize_all<Float16>(call, x, rows, k, stride, transposed, codes, scales, threads);
}
