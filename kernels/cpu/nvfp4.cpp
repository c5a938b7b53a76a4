// y = x w^T + bias for NVFP4 weights on CPUs, straight from their packed form. No torch headers.
//
//   w[n, k] = e2m1[n, k] * e4m3[n, k / 16] * global_scale          laid out as kernels/cpu/nvfp4.py says
//   x[m, k]   fp32 / bf16 / fp16, rows `stride` apart, K may end up to 15 before the weight's (zeros are put there)
//   y[m, n]   x's dtype, contiguous
//
// Few rows of x: a group of 16 rows of w is decoded in registers, once, and used for all of them (few_rows below).
// Many: panels of w are decoded to FP32 or, exactly too, bf16, and multiplied by a gemm in cache (many_rows).
// A group is computed by one thread in an order of its own: results do not depend on the number of threads.
// Compile with -ffp-contract=off.

#include <omp.h>

#include <algorithm>
#include <memory>
#include <new>

#include "nvfp4_lanes.h"

namespace {

enum Dtype { FP32 = 0, BF16 = 1, FP16 = 2 };
enum Arithmetic { EXACT = 0, INT8 = 1 };

constexpr int BLOCK = 16;               // elements of K that share a scale
constexpr int BLOCK_BYTES = LANES * 8;  // codes of a block, of a group's rows
constexpr int64_t SUMMED = 16;          // blocks added up before their sum goes to the total: long sums stay exact
#if defined(__AVX512F__)
constexpr int MOST_FEW = 16;                   // rows of x whose sums fit in registers
constexpr int PANEL_GROUPS = 2, TILE_ROWS = 12;  // of the gemm: 24 of 32 registers are sums
#elif defined(__AVX2__)
constexpr int MOST_FEW = 4;
constexpr int PANEL_GROUPS = 1, TILE_ROWS = 6;
#else
constexpr int MOST_FEW = 4;
constexpr int PANEL_GROUPS = 1, TILE_ROWS = 4;
#endif
constexpr int PANEL = PANEL_GROUPS * LANES;
constexpr int64_t PANEL_BLOCKS = 32;  // a panel of 32 rows x 512 of K is 64 KB in FP32: half of a small L2
constexpr int64_t CHUNK_TILES = 16;   // 192 rows x 512 of x, 384 KB, stay in L2 while panels pass by

struct Call {
  const void* x;
  int64_t m, k, stride;
  int dtype;
  const uint8_t *codes, *scales;
  int64_t n, blocks;
  double global_scale;
  const void* bias;
  int bias_dtype;
  void* y;
  int threads;
};

struct Free { void operator()(void* p) const { ::operator delete[](p, std::align_val_t(64)); } };
template <typename T>
using Buffer = std::unique_ptr<T[], Free>;
template <typename T>
Buffer<T> buffer(int64_t size) { return Buffer<T>(static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64)))); }

inline uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float value(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

inline float from_fp16(uint16_t x) {  // rebased by a multiplication that is exact for subnormals too
  float magnitude = value(uint32_t(x & 0x7fff) << 13) * 0x1p112f;
  magnitude = (x & 0x7c00) == 0x7c00 ? value(bits(magnitude) | 0x7f800000u) : magnitude;
  return value(bits(magnitude) | (uint32_t(x & 0x8000) << 16));
}
inline uint16_t to_fp16(float x) {  // to nearest even
  const uint32_t sign = bits(x) >> 16 & 0x8000, u = bits(x) & 0x7fffffff;
  const uint32_t normal = ((u + 0xfff + (u >> 13 & 1)) >> 13) - (112u << 10);
  const uint32_t subnormal = bits(value(u) + 0.5f) - bits(0.5f);
  const uint32_t finite = u < 0x38800000u ? subnormal : normal;
  return uint16_t(sign | (u > 0x7f800000u ? 0x7e00u : u >= 0x47800000u ? 0x7c00u : finite));
}
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits(x);
  return uint16_t((u & 0x7fffffff) > 0x7f800000u ? 0x7fc0u : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline float element(const void* p, int dtype, int64_t i) {
  if (dtype == FP32) return static_cast<const float*>(p)[i];
  const uint16_t half = static_cast<const uint16_t*>(p)[i];
  return dtype == BF16 ? value(uint32_t(half) << 16) : from_fp16(half);
}

// A block of a row of x in FP32; zeros from its end on, and in rows that only fill a tile.
inline void read_block(const Call& call, int64_t row, int64_t block, float* out) {
  const int64_t first = block * BLOCK, size = row < call.m ? std::clamp<int64_t>(call.k - first, 0, BLOCK) : 0;
  const int64_t at = row * call.stride + first;
  if (size < BLOCK) std::fill(out, out + BLOCK, 0.f);
  if (size == BLOCK && call.dtype == FP32) {
    std::memcpy(out, static_cast<const float*>(call.x) + at, BLOCK * 4);
  } else if (size == BLOCK && call.dtype == BF16) {
    const uint16_t* p = static_cast<const uint16_t*>(call.x) + at;
    for (int i = 0; i < BLOCK; ++i) out[i] = value(uint32_t(p[i]) << 16);
  } else {
    for (int i = 0; i < size; ++i) out[i] = element(call.x, call.dtype, at + i);
  }
}

// sums[row][lane] -> y[first_row + row][first_lane + lane], scaled, biased and rounded once.
inline void write(const Call& call, int64_t row, int64_t lane, const Floats& sums) {
  alignas(64) float out[LANES];
  store(out, sums);
  const double scale = SCALE_UNIT * call.global_scale;
  const int count = int(std::min<int64_t>(LANES, call.n - lane));
  if (call.bias)
    for (int i = 0; i < count; ++i) out[i] = float(out[i] * scale + element(call.bias, call.bias_dtype, lane + i));
  else
    for (int i = 0; i < LANES; ++i) out[i] = float(out[i] * scale);
  const int64_t at = row * call.n + lane;
  uint16_t* half = static_cast<uint16_t*>(call.y) + at;
  if (call.dtype == FP32) std::memcpy(static_cast<float*>(call.y) + at, out, count * 4);
  else if (call.dtype == BF16) for (int i = 0; i < count; ++i) half[i] = to_bf16(out[i]);
  else for (int i = 0; i < count; ++i) half[i] = to_fp16(out[i]);
}

// Where a group's codes and scales lie. The last one, of fewer rows, is spread to 16 lanes first.
class Groups {
 public:
  explicit Groups(const Call& call) : call_(call), whole_(call.n / LANES), count_((call.n + LANES - 1) / LANES) {
    if (whole_ == count_) return;
    const int64_t rows = call.n % LANES, blocks = call.blocks;
    last_ = buffer<uint8_t>(blocks * (BLOCK_BYTES + LANES));
    std::memset(last_.get(), 0, blocks * (BLOCK_BYTES + LANES));
    const uint8_t *codes = call.codes + whole_ * blocks * BLOCK_BYTES, *scales = call.scales + whole_ * blocks * LANES;
    for (int64_t word = 0; word < 2 * blocks; ++word)
      std::memcpy(last_.get() + word * 4 * LANES, codes + word * 4 * rows, 4 * rows);
    uint8_t* last_scales = last_.get() + blocks * BLOCK_BYTES;
    for (int64_t block = 0; block < blocks; ++block)
      std::memcpy(last_scales + block * LANES, scales + block * rows, rows);
  }
  int64_t count() const { return count_; }
  const uint8_t* codes(int64_t group) const {
    return group < whole_ ? call_.codes + group * call_.blocks * BLOCK_BYTES : last_.get();
  }
  const uint8_t* scales(int64_t group) const {
    return group < whole_ ? call_.scales + group * call_.blocks * LANES : last_.get() + call_.blocks * BLOCK_BYTES;
  }

 private:
  const Call& call_;
  int64_t whole_, count_;
  Buffer<uint8_t> last_;
};

// ---- Arithmetics for few rows: how a block of x is stored, for ROWS rows at once, and multiplied by one of w.

// FP32: [16][ROWS] floats a block.
struct ExactFp32 {
  struct Stored { float x[BLOCK]; };
  static void pack(const float* x, int row, int rows, Stored* to) {
    float* out = to->x + row;
    for (int k = 0; k < BLOCK; ++k) out[k * rows] = x[k];
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    const float* x = stored->x;
    const Floats scale = e4m3(scales);
    Words low = load_words(codes), high = load_words(codes + 4 * LANES);
    if constexpr (ROWS * 2 <= MOST_FEW / 2) {  // two sums a row of x fit too: shorter chains, and scaled once
      Floats even[ROWS], odd[ROWS];
      for (int k = 0; k < 8; ++k, low = next(low), high = next(high)) {
        const Floats a = e2m1(low), b = e2m1(high);
        for (int row = 0; row < ROWS; ++row) {
          const Floats xa = splat(x[k * ROWS + row]), xb = splat(x[(k + 8) * ROWS + row]);
          even[row] = k ? fma(a, xa, even[row]) : a * xa;
          odd[row] = k ? fma(b, xb, odd[row]) : b * xb;
        }
      }
      for (int row = 0; row < ROWS; ++row) sums[row] = fma(even[row] + odd[row], scale, sums[row]);
    } else {  // e2m1 * e4m3 is exact in FP32
      for (int k = 0; k < BLOCK; ++k) {
        Words& w = k < 8 ? low : high;
        const Floats a = e2m1(w) * scale;
        w = next(w);
        for (int row = 0; row < ROWS; ++row) sums[row] = fma(a, splat(x[k * ROWS + row]), sums[row]);
      }
    }
  }
};

#if defined(HAS_PAIRS)
// bf16: [ROWS][8] pairs (k, k + 4) a block. Products are exact; the instruction takes subnormals for zeros.
struct ExactBf16 {
  struct Stored { uint32_t x[BLOCK / 2]; };
  static void pack(const float* x, int row, int, Stored* to) {
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
      const float* first = x + (pair < 4 ? pair : pair + 4);
      to[row].x[pair] = bits(first[0]) >> 16 | (bits(first[4]) & 0xffff0000u);
    }
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    const Floats scale = e4m3(scales);
    Words w[2] = {load_words(codes), load_words(codes + 4 * LANES)};
    Pairs pairs[BLOCK / 2];
    for (int k = 0; k < 4; ++k, w[0] = next(w[0]), w[1] = next(w[1]))
      pairs[k] = e2m1_pairs(w[0]), pairs[k + 4] = e2m1_pairs(w[1]);
    for (int row = 0; row < ROWS; ++row) {
      const uint32_t* x = stored[row].x;
      Floats a = zeros(), b = zeros();
      for (int k = 0; k < 4; ++k) a = dot(a, pairs[k], x[k]), b = dot(b, pairs[k + 4], x[k + 4]);
      sums[row] = fma(a + b, scale, sums[row]);
    }
  }
};
#endif

// int8: see quantize_activations in nvfp4.py. With u = 2 * e2m1 + 12, sum(2 * e2m1 * q) = sum(u * q) - 12 * sum(q).
struct Int8 {
  struct Stored { int32_t q[4]; int32_t start; float half_scale; };
  static void pack(const float* x, int row, int, Stored* to) {
    uint32_t amax_bits = 0;
    for (int k = 0; k < BLOCK; ++k) amax_bits = std::max(amax_bits, bits(x[k]) & 0x7fffffffu);
    const float scale = value(amax_bits) / 127.0f, inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
    const bool finite = amax_bits < 0x7f800000u;
    int8_t q[BLOCK];
    int32_t sum = 0;
    for (int k = 0; k < BLOCK; ++k) {  // adding 1.5 * 2**23 rounds to nearest even, the integer in the lowest bits
      const int8_t rounded = int8_t(bits(x[k] * inverse + 12582912.0f));
      q[k] = finite ? rounded : int8_t(0), sum += q[k];
    }
    int8_t sorted[BLOCK];  // as even_bytes, odd_bytes of both words
    for (int k = 0; k < BLOCK; ++k) sorted[k] = q[k / 8 * 8 + k % 4 * 2 + k / 4 % 2];
    Stored& out = to[row];
    std::memcpy(out.q, sorted, BLOCK);
    out.start = -OFFSET * sum;
    out.half_scale = finite ? 0.5f * scale : __builtin_nanf("");  // 0 * NaN: an overflow must not vanish
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    const Floats scale = e4m3(scales);
    const Words low = load_words(codes), high = load_words(codes + 4 * LANES);
    const Bytes w[4] = {even_bytes(low), odd_bytes(low), even_bytes(high), odd_bytes(high)};
    for (int row = 0; row < ROWS; ++row) {
      const Stored& x = stored[row];
      Ints a = splat(x.start);
      for (int part = 0; part < 4; ++part) a = dot(a, w[part], x.q[part]);
      sums[row] = fma(to_floats(a), scale * splat(x.half_scale), sums[row]);
    }
  }
};

// x as [tiles][blocks][rows of a tile], by all threads of the region.
template <typename A>
void pack_rows(const Call& call, int64_t tiles, int rows, typename A::Stored* out) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < tiles * call.blocks; ++at) {
    const int64_t tile = at / call.blocks, block = at % call.blocks;
    for (int row = 0; row < rows; ++row) {
      alignas(64) float x[BLOCK];
      read_block(call, tile * rows + row, block, x);
      A::pack(x, row, rows, out + at * rows);
    }
  }
}

template <typename A, int ROWS>
void few_rows(const Call& call) {
  const int64_t tiles = (call.m + ROWS - 1) / ROWS;
  const Buffer<typename A::Stored> packed = buffer<typename A::Stored>(tiles * call.blocks * ROWS);
  const Groups groups(call);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    pack_rows<A>(call, tiles, ROWS, packed.get());
#pragma omp for schedule(static)
    for (int64_t group = 0; group < groups.count(); ++group) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const typename A::Stored* x = packed.get() + tile * call.blocks * ROWS;
        const uint8_t *codes = groups.codes(group), *scales = groups.scales(group);
        Floats totals[ROWS];
        std::fill(totals, totals + ROWS, zeros());
        for (int64_t first = 0; first < call.blocks; first += SUMMED) {
          Floats sums[ROWS];
          std::fill(sums, sums + ROWS, zeros());
          for (int64_t block = first; block < std::min(first + SUMMED, call.blocks); ++block) {
            A::template add<ROWS>(sums, codes, scales, x);
            codes += BLOCK_BYTES, scales += LANES, x += ROWS;
          }
          for (int row = 0; row < ROWS; ++row) totals[row] = totals[row] + sums[row];
        }
        for (int row = 0; row < ROWS && tile * ROWS + row < call.m; ++row)
          write(call, tile * ROWS + row, group * LANES, totals[row]);
      }
    }
  }
}

template <typename A>
void few_rows(const Call& call) {
  if (call.m == 1) few_rows<A, 1>(call);
  else if (call.m == 2) few_rows<A, 2>(call);
  else if (call.m <= 4 || MOST_FEW == 4) few_rows<A, 4>(call);
  else if (call.m <= 8) few_rows<A, (MOST_FEW > 4 ? 8 : 4)>(call);
  else few_rows<A, MOST_FEW>(call);
}

}  // namespace

#include "nvfp4_gemm.h"

extern "C" void nvfp4_matmul(
    const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const void* codes, const void* scales, int64_t n,
    int64_t padded_k, float global_scale, const void* bias, int bias_dtype, int arithmetic, void* y, int threads) {
  const Call call = {x, m, k, stride, dtype, static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                     n, padded_k / BLOCK, global_scale, bias, bias_dtype, y, std::max(threads, 1)};
  if (m == 0 || n == 0) return;
  if (arithmetic == INT8) return few_rows<Int8>(call);
#if defined(HAS_PAIRS)
  if (dtype == BF16) return m <= MOST_FEW ? few_rows<ExactBf16>(call) : many_rows<PairPanel>(call);
#endif
  return m <= MOST_FEW ? few_rows<ExactFp32>(call) : many_rows<FloatPanel>(call);
}
