// y = x w^T + bias for NVFP4 weights on CPUs, straight from their packed form. No torch headers.
//
//   w[n, k] = e2m1[n, k] * e4m3[n, k / 16] * global_scale          laid out as kernels/cpu/nvfp4.py says
//   x[m, k]   fp32 / bf16 / fp16, rows `stride` apart, K may end up to 15 before the weight's (zeros are put there)
//   y[m, n]   x's dtype, contiguous
//
// Here few rows of x: a group of 16 rows of w is decoded in registers, once, and multiplied by all of them. Many rows
// are left to nvfp4_prefill.cpp. A group is computed by one thread, in an order of its own: results do not depend on
// the number of threads. Compile with -ffp-contract=off: rounding to int8 relies on each operation rounding by itself.

#include "kernels.h"
#include "nvfp4_call.h"
#include "nvfp4_lanes.h"
#include "threads.h"

#include <type_traits>

namespace {

using namespace fp8;

enum Arithmetic { EXACT = 0, INT8 = 1 };

constexpr int BLOCK = NVFP4_BLOCK;
constexpr int64_t SUMMED = 16;    // blocks added up before their sum goes to the total: the error of long sums stays small
constexpr int64_t AHEAD = 2048;   // bytes of codes fetched before they are needed: 4 KB pages end the CPU's own fetching
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 16;  // of x, whose sums fit in registers
constexpr bool WIDE = true;
#else
constexpr int MOST_ROWS = 4;
constexpr bool WIDE = false;
#endif
constexpr int64_t FEW = WIDE ? 16 : 8;  // rows of x up to which the gemm is not worth its panels

// How a block of x is stored, for ROWS rows at once, and multiplied by a block of w. AT_ONCE: groups of w taken together
// with one row of x, where loading x would take longer than multiplying by it.

// FP32: [16][ROWS] floats a block.
struct ExactFp32 {
  static constexpr int AT_ONCE = 1;
  struct Stored { float x[BLOCK]; };
  static void pack(const float* x, int row, int rows, Stored* to) {
    for (int k = 0; k < BLOCK; ++k) to->x[k * rows + row] = x[k];
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    const float* x = stored->x;
    const Floats scale = e4m3(scales);
    Words low = load_words(codes), high = load_words(codes + 4 * LANES);
    if constexpr (ROWS <= (WIDE ? 4 : 1)) {  // two sums a row of x fit too: shorter chains, and scaled once
      Floats a[ROWS], b[ROWS];
      for (int k = 0; k < 8; ++k, low = next(low), high = next(high)) {
        const Floats wa = e2m1(low), wb = e2m1(high);
        for (int row = 0; row < ROWS; ++row) {
          const Floats xa = splat(x[k * ROWS + row]), xb = splat(x[(k + 8) * ROWS + row]);
          a[row] = k ? fma(wa, xa, a[row]) : wa * xa;
          b[row] = k ? fma(wb, xb, b[row]) : wb * xb;
        }
      }
      for (int row = 0; row < ROWS; ++row) sums[row] = fma(a[row] + b[row], scale, sums[row]);
    } else {  // e2m1 * e4m3 is exact in FP32
      for (int k = 0; k < BLOCK; ++k) {
        Words& words = k < 8 ? low : high;
        const Floats w = e2m1(words) * scale;
        words = next(words);
        for (int row = 0; row < ROWS; ++row) sums[row] = fma(w, splat(x[k * ROWS + row]), sums[row]);
      }
    }
  }
};

#if defined(__AVX512BF16__)
// bf16: [ROWS][8] pairs (k, k + 4) a block. Products are exact; the instruction takes subnormals for zeros.
struct ExactBf16 {
  static constexpr int AT_ONCE = 2;
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

// int8: quantize_activations in nvfp4.py. With u = 2 * e2m1 + 12, sum(2 * e2m1 * q) = sum(u * q) - 12 * sum(q).
struct Int8 {
  static constexpr int AT_ONCE = 2;
  struct Stored { int32_t q[4]; int32_t start; float half_scale; };
  static void pack(const float* x, int row, int, Stored* to) {
    uint32_t amax = 0;
    for (int k = 0; k < BLOCK; ++k) amax = std::max(amax, bits(x[k]) & 0x7fffffffu);
    const float scale = value(amax) / 127.0f, inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
    const bool finite = amax < 0x7f800000u;
    int8_t q[BLOCK], sorted[BLOCK];
    int32_t sum = 0;
    for (int k = 0; k < BLOCK; ++k) {  // adding 1.5 * 2**23 rounds to nearest even, the integer in the lowest bits
      const float scaled = x[k] * inverse;
      q[k] = finite ? int8_t(bits(scaled + 12582912.0f)) : int8_t(0);
      sum += q[k];
    }
    for (int k = 0; k < BLOCK; ++k) sorted[k] = q[k / 8 * 8 + k % 4 * 2 + k / 4 % 2];  // even k, odd k of each word
    Stored& out = to[row];
    std::memcpy(out.q, sorted, BLOCK);
    out.start = -OFFSET * sum;
    out.half_scale = finite ? 0.5f * scale : std::numeric_limits<float>::quiet_NaN();  // an overflow must not vanish
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    add<ROWS>(sums, codes, e4m3(scales), stored);
  }
  template <int ROWS>
  static void add(Floats (&sums)[ROWS], const uint8_t* codes, Floats scale, const Stored* stored) {
    const Words low = load_words(codes), high = load_words(codes + 4 * LANES);
    const Bytes w[4] = {even_bytes(low), odd_bytes(low), even_bytes(high), odd_bytes(high)};
    for (int row = 0; row < ROWS; ++row) {
      const Stored& x = stored[row];
      Ints a = splat(x.start);
      for (int part = 0; part < 4; ++part) a = dot(a, w[part], x.q[part]);
      sums[row] = fma(to_floats(a), scale * splat(x.half_scale), sums[row]);
    }
  }
#if defined(__AVX512F__)
  // Four blocks at once, the same sums in the same order: one look tells that all their scales are ordinary, and two
  // blocks' are decoded together. Decoding scales is a third of the work of one row of x.
  static void add_four(Floats (&sums)[1], const uint8_t* codes, const uint8_t* scales, const Stored* stored) {
    if (__builtin_expect(!plain_e4m3(scales), 0)) {
      for (int block = 0; block < 4; ++block)
        add<1>(sums, codes + block * NVFP4_BYTES, scales + block * LANES, stored + block);
      return;
    }
    for (int block = 0; block < 4; block += 2) {
      Floats first, second;
      e4m3_pair(scales + block * LANES, first, second);
      add<1>(sums, codes + block * NVFP4_BYTES, first, stored + block);
      add<1>(sums, codes + (block + 1) * NVFP4_BYTES, second, stored + block + 1);
    }
  }
#endif
};

// x as [tiles][blocks][ROWS], by all threads of the region.
template <class A, int ROWS>
void pack_x(const Nvfp4Call& call, int64_t tiles, typename A::Stored* to) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < tiles * call.blocks; ++at)
    for (int row = 0; row < ROWS; ++row) {
      alignas(64) float x[BLOCK];
      read_x(call, at / call.blocks * ROWS + row, at % call.blocks * BLOCK, BLOCK, x);
      A::pack(x, row, ROWS, to + at * ROWS);
    }
}

// Groups from `group` on times ROWS rows of x.
template <class A, int ROWS, int AT_ONCE>
void multiply(const Nvfp4Call& call, const Nvfp4Groups& groups, int64_t group, int64_t row, const typename A::Stored* x) {
  const uint8_t *codes[AT_ONCE], *scales[AT_ONCE];
  Floats totals[AT_ONCE][ROWS];
  for (int g = 0; g < AT_ONCE; ++g) {
    const int64_t taken = std::min(group + g, groups.count() - 1);  // the last one twice, where it is alone
    codes[g] = groups.codes(taken), scales[g] = groups.scales(taken);
    std::fill(totals[g], totals[g] + ROWS, zeros());
  }
  for (int64_t first = 0; first < call.blocks; first += SUMMED) {
    Floats sums[AT_ONCE][ROWS];
    for (int g = 0; g < AT_ONCE; ++g) std::fill(sums[g], sums[g] + ROWS, zeros());
    const int64_t end = std::min(first + SUMMED, call.blocks);
    int64_t block = first;
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, Int8> && ROWS == 1) {
      for (; block + 4 <= end; block += 4)
        for (int g = 0; g < AT_ONCE; ++g) {
          const uint8_t *at = codes[g] + block * NVFP4_BYTES, *scale = scales[g] + block * LANES;
          for (int line = 0; line < 8; ++line) __builtin_prefetch(at + AHEAD + 64 * line);
          __builtin_prefetch(scale + AHEAD / 8);
          Int8::add_four(sums[g], at, scale, x + block);
        }
    }
#endif
    for (; block < end; ++block)
      for (int g = 0; g < AT_ONCE; ++g) {
        const uint8_t *at = codes[g] + block * NVFP4_BYTES, *scale = scales[g] + block * LANES;
        __builtin_prefetch(at + AHEAD);
        __builtin_prefetch(at + AHEAD + 64);
        __builtin_prefetch(scale + AHEAD / 8);
        A::template add<ROWS>(sums[g], at, scale, x + block * ROWS);
      }
    for (int g = 0; g < AT_ONCE; ++g)
      for (int r = 0; r < ROWS; ++r) totals[g][r] = totals[g][r] + sums[g][r];
  }
  for (int g = 0; g < AT_ONCE && group + g < groups.count(); ++g)
    for (int r = 0; r < ROWS && row + r < call.m; ++r) {
      alignas(64) float out[LANES];
      store(out, totals[g][r]);
      const int64_t col = (group + g) * LANES;
      write_y(call, row + r, col, std::min<int64_t>(LANES, call.n - col), out);
    }
}

template <class A, int ROWS>
void few_rows(const Nvfp4Call& call) {
  constexpr int AT_ONCE = WIDE && ROWS <= 2 ? A::AT_ONCE : 1;
  const int64_t tiles = (call.m + ROWS - 1) / ROWS;
  const Lines<typename A::Stored> packed = lines<typename A::Stored>(tiles * call.blocks * ROWS);
  const Nvfp4Groups groups(call);
  const int threads = usable_threads(call.threads, groups.count());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    pack_x<A, ROWS>(call, tiles, packed.get());
    for (int64_t tile = 0; tile < tiles; ++tile) {  // outermost: x's tile stays in L2 while w passes by
#pragma omp for schedule(static) nowait
      for (int64_t group = 0; group < groups.count(); group += AT_ONCE)
        multiply<A, ROWS, AT_ONCE>(call, groups, group, tile * ROWS, packed.get() + tile * call.blocks * ROWS);
    }
  }
}

template <class A>
void few_rows(const Nvfp4Call& call) {
  if (call.m == 1) few_rows<A, 1>(call);
  else if (call.m == 2) few_rows<A, 2>(call);
  else if (call.m <= 4 || !WIDE) few_rows<A, 4>(call);
  else if (call.m <= 8) few_rows<A, (WIDE ? 8 : 4)>(call);
  else few_rows<A, MOST_ROWS>(call);
}

}  // namespace

extern "C" void nvfp4_matmul(
    const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const void* codes, const void* scales, int64_t n,
    int64_t padded_k, float global_scale, const void* bias, int bias_dtype, int arithmetic, void* y, int threads) {
  const Nvfp4Call call = {
      x, m, k, stride, dtype, static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales), n,
      padded_k / BLOCK, SCALE_UNIT * double(global_scale), bias, bias_dtype, y, threads};
  if (m == 0 || n == 0) return;
  if (arithmetic == INT8) return few_rows<Int8>(call);
  if (m > FEW) return nvfp4_prefill(call);
#if defined(__AVX512BF16__)
  if (dtype == BF16) return few_rows<ExactBf16>(call);
#endif
  few_rows<ExactFp32>(call);
}
