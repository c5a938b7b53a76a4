// Attention over keys and values in FP8, which are decoded as they are read: kernels/fp8_cache.py has the formula.
//
//   s[r, j] = (q[r] . k[j]) * key_scale[j] * scale + mask[r, j]     r: the queries of the heads that share a key
//   out[r]  = sum_j exp(s[r, j] - max_j s) * value_scale[j] * v[j]  /  sum_j exp(s[r, j] - max_j s)
//
// A piece of keys is scored, then its values are added up; pieces are merged at the end by their largest scores. Their
// size is fixed, so that results do not depend on the number of threads. Sixteen keys that the mask leaves out for all rows
// are not read: of a cache that is not full, only what is filled.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "fp8_formats.h"
#include "kernels.h"
#include "sixteen.h"
#include "threads.h"

namespace {

using namespace fp8;

constexpr int64_t LANES = 16, PIECE = 512, STRIP = 64, MOST_ROWS = 4;
constexpr float LEAST = -std::numeric_limits<float>::infinity();
typedef int32_t Ints16 __attribute__((vector_size(64)));

inline Floats16 load(const float* from) {
  Floats16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Floats16 x) { std::memcpy(to, &x, sizeof x); }

// Sixteen codes times 2**-8 where the instructions of AVX-512 are there (FP16's exponent ends 8 above E4M3's), and as they
// are otherwise: UNIT is what to multiply by at the end.
#if defined(__AVX512BW__)
constexpr float UNIT = 256.0f;
inline void decode(const uint8_t* codes, Floats16 (&to)[2]) {
  const __m512i wide = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))), 7);
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x3f80));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x4000)), 1);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
  const __m512i half = _mm512_mask_mov_epi16(_mm512_or_si512(magnitude, sign), nan, _mm512_set1_epi16(0x7e00));
  to[0] = reinterpret_cast<Floats16>(_mm512_cvtph_ps(_mm512_castsi512_si256(half)));
  to[1] = reinterpret_cast<Floats16>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)));
}
#else
constexpr float UNIT = 1.0f;
inline void decode(const uint8_t* codes, Floats16 (&to)[2]) {
  for (int half = 0; half < 2; ++half) {
    Bytes16 bytes;
    std::memcpy(&bytes, codes + half * LANES, sizeof bytes);
    const Words16 code = __builtin_convertvector(bytes, Words16), magnitude = code & 0x7fu;
    const Floats16 normal = value((magnitude + (120u << 3)) << 20);
    const Floats16 subnormal = __builtin_convertvector(reinterpret_cast<Ints16>(magnitude), Floats16) * 0x1p-9f;
    Words16 found = magnitude < 8u ? bits(subnormal) : bits(normal);
    found = magnitude == 0x7fu ? all(0x7fc00000u) : found;
    to[half] = value(found | (code & 0x80u) << 24);
  }
}
#endif

// Lane i: the sum of vector i. Four rounds, each of which halves the vectors and what they hold of each.
inline Floats16 totals(Floats16 (&x)[LANES]) {
  constexpr Words16 first[4] = {{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
                                {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
                                {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
                                {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}};
  constexpr uint32_t apart[4] = {8, 4, 2, 1};
#pragma GCC unroll 4
  for (int round = 0, count = 8; round < 4; ++round, count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], first[round]) + __builtin_shuffle(x[2 * i], x[2 * i + 1], first[round] + apart[round]);
  return x[0];
}

// e**x of numbers up to 0, to about 1e-7 of it; 0 below -87, NaN of NaN.
inline Floats16 exponential(Floats16 x) {
  const Floats16 bounded = x < all(-87.0f) ? all(-87.0f) : x;
  const Floats16 shifted = bounded * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // rounded to a whole number
  const Floats16 r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats16 sum = r * 1.9875691e-4f + 1.3981999e-3f;
  sum = sum * r + 8.3334519e-3f;
  sum = sum * r + 4.1665796e-2f;
  sum = sum * r + 1.6666665e-1f;
  sum = sum * r + 0.5f;
  sum = sum * r * r + r + 1.0f;
  const Floats16 scaled = sum * value((bits(shifted) - 0x4b400000u + 127u) << 23);
  return x < all(-87.0f) ? all(0.0f) : scaled;
}

struct Problem {
  int64_t batch, groups, repeats, queries, length, width, value_width;
  const void* query;
  const int64_t* query_strides;  // of batch, head, position
  int dtype;
  const uint8_t* keys;
  const int64_t* key_strides;  // of batch, group, position
  const float* key_scales;     // of the groups; null: behind the codes of each row
  const uint8_t* values;
  const int64_t* value_strides;
  const float* value_scales;
  const void* mask;
  int mask_kind;                // 0: none, 1: bool, 2: added, in FP32, 3: in bf16, 4: in FP16
  const int64_t* mask_strides;  // of batch, head, query, key
  float scale;
  int causal;

  int64_t rows() const { return repeats * queries; }
  int64_t pieces() const { return std::max<int64_t>(1, (length + PIECE - 1) / PIECE); }
  int64_t padded() const { return (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
  int64_t value_padded() const { return (value_width + STRIP - 1) / STRIP * STRIP; }
};

float number(const void* from, int64_t at, int dtype) {
  if (dtype == BF16) return BFloat16::load(static_cast<const uint16_t*>(from)[at]);
  if (dtype == FP16) return Float16::load(static_cast<const uint16_t*>(from)[at]);
  return static_cast<const float*>(from)[at];
}
void put(float x, void* to, int64_t at, int dtype) {
  if (dtype == BF16) static_cast<uint16_t*>(to)[at] = BFloat16::store(x);
  else if (dtype == FP16) static_cast<uint16_t*>(to)[at] = Float16::store(x);
  else static_cast<float*>(to)[at] = x;
}

// What a piece of keys comes to: for each row the largest score, the sum of exponentials and [value_padded] of values.
struct Partial {
  float *largest, *total, *mixed;
};

// Working memory of a thread.
class Piece {
 public:
  explicit Piece(const Problem& p)
      : p(p), depth(p.padded()), wide(p.value_padded()), rows_(p.rows() * depth), scores(p.rows() * PIECE) {}

  void run(int64_t b, int64_t g, int64_t piece, const Partial& to) {
    begin = piece * PIECE, count = std::min(PIECE, p.length - begin);
    read_queries(b, g);
    read_mask(b, g);
    const int64_t rows = p.rows();
    for (int64_t r = 0; r < rows;) r += rows - r >= MOST_ROWS ? score<MOST_ROWS>(b, g, r) : rows - r >= 2 ? score<2>(b, g, r) : score<1>(b, g, r);
    for (int64_t r = 0; r < rows; ++r) weigh(r, to);
    for (int64_t r = 0; r < rows;) r += rows - r >= MOST_ROWS ? mix<MOST_ROWS>(b, g, r, to) : rows - r >= 2 ? mix<2>(b, g, r, to) : mix<1>(b, g, r, to);
  }

 private:
  void read_queries(int64_t b, int64_t g) {
    for (int64_t r = 0; r < p.rows(); ++r) {
      const int64_t head = g * p.repeats + r / p.queries, at = b * p.query_strides[0] + head * p.query_strides[1] + r % p.queries * p.query_strides[2];
      for (int64_t d = 0; d < p.width; ++d) rows_[r * depth + d] = number(p.query, at + d, p.dtype) * (p.scale * UNIT);
      std::fill(rows_.data() + r * depth + p.width, rows_.data() + r * depth + depth, 0.0f);
    }
  }

  // scores: 0 or what is added, -Inf where a row does not see a key; used: whether sixteen keys have a row that sees one.
  void read_mask(int64_t b, int64_t g) {
    const int64_t blocks = (count + LANES - 1) / LANES;
    const bool one_for_all = !p.causal && (!p.mask_kind || (p.mask_strides[1] == 0 && p.mask_strides[2] == 0));
    std::fill(used, used + blocks, false);
    for (int64_t r = 0; r < p.rows(); ++r) {
      float* row = scores.data() + r * PIECE;
      if (r && one_for_all) {
        std::memcpy(row, scores.data(), blocks * LANES * sizeof(float));
        continue;
      }
      read_mask_of(b, g * p.repeats + r / p.queries, r % p.queries, row);
      std::fill(row + count, row + blocks * LANES, LEAST);
      for (int64_t block = 0; block < blocks; ++block) {
        const Words16 seen = bits(load(row + block * LANES)) ^ bits(LEAST);  // NaN is seen
        uint32_t any = 0;
        for (int i = 0; i < LANES; ++i) any |= seen[i];
        used[block] |= any != 0;
      }
    }
  }

  void read_mask_of(int64_t b, int64_t head, int64_t query, float* row) const {
    if (p.mask_kind == 0) {
      std::fill(row, row + count, 0.0f);
    } else {
      const int64_t step = p.mask_strides[3];
      const int64_t at = b * p.mask_strides[0] + head * p.mask_strides[1] + query * p.mask_strides[2] + begin * step;
      const uint8_t* seen = static_cast<const uint8_t*>(p.mask) + at;
      if (p.mask_kind > 1)
        for (int64_t j = 0; j < count; ++j) row[j] = number(p.mask, at + j * step, p.mask_kind - 2);
      else if (step == 1)
        for (int64_t j = 0; j < count; ++j) row[j] = seen[j] ? 0.0f : LEAST;
      else
        for (int64_t j = 0; j < count; ++j) row[j] = seen[j * step] ? 0.0f : LEAST;
    }
    if (p.causal) std::fill(row + std::min(count, std::max<int64_t>(0, query + 1 - begin)), row + count, LEAST);
  }

  const uint8_t* key(int64_t b, int64_t g, int64_t j) const {
    return p.keys + b * p.key_strides[0] + g * p.key_strides[1] + (begin + j) * p.key_strides[2];
  }
  const uint8_t* value_of(int64_t b, int64_t g, int64_t j) const {
    return p.values + b * p.value_strides[0] + g * p.value_strides[1] + (begin + j) * p.value_strides[2];
  }
  static float scale_behind(const uint8_t* row, int64_t width) {
    float scale;
    std::memcpy(&scale, row + width, sizeof scale);
    return scale;
  }

  template <int COUNT>
  int64_t score(int64_t b, int64_t g, int64_t first) {
    const float* rows = rows_.data() + first * depth;
    for (int64_t block = 0; block * LANES < count; ++block) {
      if (!used[block]) continue;
      Floats16 sums[COUNT][LANES];
      alignas(64) float scales[LANES];
      const int64_t here = std::min(LANES, count - block * LANES);
      for (int64_t i = 0; i < here; ++i) {
        const uint8_t* codes = key(b, g, block * LANES + i);
        scales[i] = p.key_scales ? p.key_scales[g] : scale_behind(codes, p.width);
        Floats16 sum[COUNT] = {};
        for (int64_t d = 0; d < p.width; d += 2 * LANES) {
          Floats16 decoded[2];
          if (d + 2 * LANES <= p.width) {
            decode(codes + d, decoded);
          } else {
            uint8_t rest[2 * LANES] = {};
            std::memcpy(rest, codes + d, p.width - d);
            decode(rest, decoded);
          }
#pragma GCC unroll 4
          for (int r = 0; r < COUNT; ++r) {
            sum[r] += load(rows + r * depth + d) * decoded[0];
            sum[r] += load(rows + r * depth + d + LANES) * decoded[1];
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < COUNT; ++r) sums[r][i] = sum[r];
      }
      for (int64_t i = here; i < LANES; ++i) {
        scales[i] = 0.0f;
        for (int r = 0; r < COUNT; ++r) sums[r][i] = Floats16{};
      }
      for (int r = 0; r < COUNT; ++r) {
        float* to = scores.data() + (first + r) * PIECE + block * LANES;
        const Floats16 added = load(to), found = totals(sums[r]) * load(scales) + added;
        store(to, added == all(LEAST) ? added : found);
      }
    }
    return COUNT;
  }

  // Scores become exponentials.
  void weigh(int64_t r, const Partial& to) {
    float* row = scores.data() + r * PIECE;
    Floats16 most = all(LEAST);
    for (int64_t block = 0; block * LANES < count; ++block)
      if (used[block]) most = larger(load(row + block * LANES), most);
    float largest = LEAST;
    for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]);
    const float base = largest == LEAST ? 0.0f : largest;
    Floats16 sum = {};
    for (int64_t block = 0; block * LANES < count; ++block) {
      if (!used[block]) continue;
      const Floats16 weights = exponential(load(row + block * LANES) - base);
      store(row + block * LANES, weights);
      sum += weights;
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += sum[i];
    to.largest[r] = largest, to.total[r] = total;
  }

  template <int COUNT>
  int64_t mix(int64_t b, int64_t g, int64_t first, const Partial& to) {
    const float* weights = scores.data() + first * PIECE;
    for (int64_t d = 0; d < wide; d += STRIP) {
      Floats16 sums[COUNT][STRIP / LANES] = {};
      const int64_t there = std::min(STRIP, p.value_width - d);
      for (int64_t block = 0; block * LANES < count; ++block) {
        if (!used[block]) continue;
        const int64_t stop = std::min(count, (block + 1) * LANES);
        for (int64_t j = block * LANES; j < stop; ++j) {
          bool any = false;
#pragma GCC unroll 4
          for (int r = 0; r < COUNT; ++r) any |= weights[r * PIECE + j] != 0.0f;
          if (!any) continue;  // what no row sees is not read, whatever it is
          const uint8_t* codes = value_of(b, g, j);
          const float scale = (p.value_scales ? p.value_scales[g] : scale_behind(codes, p.value_width)) * UNIT;
          Floats16 decoded[STRIP / LANES / 2][2];
          if (there == STRIP) {
#pragma GCC unroll 2
            for (int part = 0; part < STRIP / LANES / 2; ++part) decode(codes + d + part * 2 * LANES, decoded[part]);
          } else {
            uint8_t rest[STRIP] = {};
            std::memcpy(rest, codes + d, there);
            for (int part = 0; part < STRIP / LANES / 2; ++part) decode(rest + part * 2 * LANES, decoded[part]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < COUNT; ++r) {
            const Floats16 weight = all(weights[r * PIECE + j] * scale);
#pragma GCC unroll 4
            for (int i = 0; i < STRIP / LANES; ++i) sums[r][i] += weight * decoded[i / 2][i % 2];
          }
        }
      }
      for (int r = 0; r < COUNT; ++r)
        for (int i = 0; i < STRIP / LANES; ++i) store(to.mixed + (first + r) * wide + d + i * LANES, sums[r][i]);
    }
    return COUNT;
  }

  const Problem& p;
  const int64_t depth, wide;
  int64_t begin = 0, count = 0;
  std::vector<float> rows_, scores;
  bool used[PIECE / LANES];
};

}  // namespace

extern "C" void fp8_attention(int64_t batch, int64_t groups, int64_t repeats, int64_t queries, int64_t length, int64_t width,
                              int64_t value_width, const void* query, const int64_t* query_strides, int dtype,
                              const uint8_t* keys, const int64_t* key_strides, const float* key_scales,
                              const uint8_t* values, const int64_t* value_strides, const float* value_scales,
                              const void* mask, int mask_kind, const int64_t* mask_strides, float scale, int causal,
                              void* out, int threads) {
  const Problem p{batch,  groups, repeats,       queries,      length, width,     value_width,  query, query_strides, dtype, keys, key_strides,
                  key_scales, values, value_strides, value_scales, mask,   mask_kind, mask_strides, scale, causal};
  const int64_t rows = p.rows(), pieces = p.pieces(), wide = p.value_padded(), tasks = batch * groups * pieces;
  std::vector<float> largest(tasks * rows), total(tasks * rows), mixed(tasks * rows * wide);
  const int team = usable_threads(threads, tasks);
  const auto work = [&](Piece& own, int64_t task) {
    const int64_t piece = task % pieces, g = task / pieces % groups, b = task / pieces / groups;
    own.run(b, g, piece, {largest.data() + task * rows, total.data() + task * rows, mixed.data() + task * rows * wide});
  };
  if (team == 1) {
    Piece own(p);
    for (int64_t task = 0; task < tasks; ++task) work(own, task);
  } else {
#pragma omp parallel num_threads(team)
    {
      Piece own(p);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < tasks; ++task) work(own, task);
    }
  }
  std::vector<float> sum(value_width);
  for (int64_t head = 0; head < batch * groups; ++head)
    for (int64_t r = 0; r < rows; ++r) {
      float most = LEAST, all_weights = 0.0f;
      for (int64_t piece = 0; piece < pieces; ++piece) most = std::max(most, largest[(head * pieces + piece) * rows + r]);
      if (most == LEAST) most = 0.0f;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t at = (head * pieces + piece) * rows + r;
        const float weight = std::exp(largest[at] - most);
        all_weights += weight * total[at];
        const float* part = mixed.data() + at * wide;
        for (int64_t d = 0; d < value_width; ++d) sum[d] += weight * part[d];
      }
      // rows of one group: heads, and for each its queries, as [heads, queries] of the result.
      const float by = all_weights == 0.0f ? 0.0f : 1.0f / all_weights;  // of NaN NaN
      for (int64_t d = 0; d < value_width; ++d) put(sum[d] * by, out, (head * rows + r) * value_width + d, dtype);
    }
}
