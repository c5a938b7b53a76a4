// Many rows of x times an NVFP4 weight: the gemm of gemm.h, whose panels of w are decoded as they are packed.
//
// bf16 activations go through AMX or AVX-512's bf16 dot products where there are any, with exact products: without its
// global scale a weight has six significant bits. Others are multiplied in FP32.
//
// And the gradient of x, g w: the same gemm, in which w is not transposed. Its panels hold rows of w side by side instead of
// columns, and its sums go along n.

#include "best_micro.h"
#include "gemm.h"
#include "kernels.h"
#include "nvfp4_call.h"
#include "nvfp4_lanes.h"

namespace {

using namespace fp8;

// x: [k/STEP][ROWS][STEP], in FP32 or, where x is that, bf16.
template <class Micro>
struct PackX {
  const Nvfp4Call& call;

  void pack(int64_t row, int64_t rows, int64_t k, int64_t count, typename Micro::Element* to) const {
    constexpr int64_t ROWS = Micro::ROWS, STEP = Micro::STEP;
    for (int64_t at = 0; at < count; at += STEP)
      for (int64_t r = 0; r < ROWS; ++r, to += STEP) read(r < rows ? row + r : call.m, k + at, to);
  }

 private:
  void read(int64_t row, int64_t k, float* to) const { read_x(call, row, k, Micro::STEP, to); }
  void read(int64_t row, int64_t k, uint16_t* to) const {
    const int64_t there = row < call.m ? std::clamp<int64_t>(call.k - k, 0, Micro::STEP) : 0;
    if (there) std::memcpy(to, static_cast<const uint16_t*>(call.x) + row * call.stride + k, there * 2);
    std::fill(to + there, to + Micro::STEP, 0);
  }
};

// A block of w, 16 columns of a panel: FP32 [k][COLS], or bf16 [k/2][COLS][2].
template <int64_t COLS>
void decode(const uint8_t* codes, const uint8_t* scales, float* to) {
  const Floats scale = e4m3(scales);
  for (int half = 0; half < 2; ++half) {
    Words w = load_words(codes + half * 4 * LANES);
    for (int k = 0; k < 8; ++k, w = next(w), to += COLS) store(to, e2m1(w) * scale);
  }
}

#if defined(HAS_BF16_MICRO)
template <int64_t COLS>
void decode(const uint8_t* codes, const uint8_t* scales, uint16_t* to) {
  const Floats scale = e4m3(scales);
  for (int half = 0; half < 2; ++half) {
    Words w = load_words(codes + half * 4 * LANES);
    for (int k = 0; k < 4; ++k, w = next(next(w)), to += 2 * COLS)
      store_pairs(to, e2m1(w) * scale, e2m1(next(w)) * scale);
  }
}
#endif

// w: [k][COLS] or [k/2][COLS][2], groups side by side, or a part of one where a panel is narrower.
template <class Micro>
struct PackW {
  using Element = typename Micro::Element;
  static constexpr int64_t COLS = Micro::COLS, PER_K = COLS * NVFP4_BLOCK;
  const Nvfp4Groups& groups;

  void pack(int64_t col, int64_t cols, int64_t k, int64_t count, Element* to) const {
    for (int64_t at = 0; at < count; at += NVFP4_BLOCK, to += PER_K) block(col, (k + at) / NVFP4_BLOCK, cols, to);
    if (count % Micro::STEP) std::fill(to, to + COLS * (Micro::STEP - count % Micro::STEP), Element(0));
  }

 private:
  void block(int64_t col, int64_t block, int64_t cols, Element* to) const {
    const int64_t group = col / LANES;
    if constexpr (COLS < LANES) {
      alignas(64) Element whole[NVFP4_BLOCK * LANES];
      decode<LANES>(groups.codes(group, block), groups.scales(group, block), whole);
      for (int k = 0; k < NVFP4_BLOCK; ++k) std::memcpy(to + k * COLS, whole + k * LANES + col % LANES, COLS * sizeof *to);
    } else {
      if (cols <= COLS - LANES) std::fill(to, to + PER_K, Element(0));  // a group is missing
      constexpr int64_t ACROSS = sizeof(Element) == 2 ? 2 * LANES : LANES;
      for (int64_t g = 0; g * LANES < cols; ++g)
        decode<COLS>(groups.codes(group + g, block), groups.scales(group + g, block), to + g * ACROSS);
    }
  }
};

// Rows of a block of w, from `row` of a group on: FP32 [n][COLS], or bf16 [n/2][COLS][2].
inline Floats row_of(const uint8_t* codes, const float* scales, int row) {
  uint32_t words[2];  // little-endian, as load_words reads them
  for (int half = 0; half < 2; ++half) {
    const uint8_t* at = codes + (half * LANES + row) * 4;
    words[half] = at[0] | at[1] << 8 | at[2] << 16 | uint32_t(at[3]) << 24;
  }
  return e2m1(row_words(words[0], words[1])) * splat(scales[row]);
}
template <int64_t COLS>
void decode_rows(const uint8_t* codes, const uint8_t* scales, float* to) {
  alignas(64) float by[LANES];
  store(by, e4m3(scales));
  for (int row = 0; row < LANES; ++row, to += COLS) store(to, row_of(codes, by, row));
}

#if defined(HAS_BF16_MICRO)
template <int64_t COLS>
void decode_rows(const uint8_t* codes, const uint8_t* scales, uint16_t* to) {
  alignas(64) float by[LANES];
  store(by, e4m3(scales));
  for (int row = 0; row < LANES; row += 2, to += 2 * COLS) store_pairs(to, row_of(codes, by, row), row_of(codes, by, row + 1));
}
#endif

// w as it is: k of the gemm is n of the weight, columns are k of the weight.
template <class Micro>
struct PackRowsOfW {
  using Element = typename Micro::Element;
  static constexpr int64_t COLS = Micro::COLS, PER_GROUP = COLS * LANES;
  const Nvfp4Groups& groups;

  void pack(int64_t col, int64_t cols, int64_t n, int64_t count, Element* to) const {
    for (int64_t at = 0; at < count; at += LANES, to += PER_GROUP) group((n + at) / LANES, col, cols, to);
    const int64_t filled = ceil_div(count, LANES) * LANES;
    if (filled % Micro::STEP) std::fill(to, to + COLS * (Micro::STEP - filled % Micro::STEP), Element(0));
  }

 private:
  void group(int64_t group, int64_t col, int64_t cols, Element* to) const {
    const int64_t block = col / NVFP4_BLOCK;
    if constexpr (COLS < NVFP4_BLOCK) {
      alignas(64) Element whole[LANES * NVFP4_BLOCK];
      decode_rows<NVFP4_BLOCK>(groups.codes(group, block), groups.scales(group, block), whole);
      for (int row = 0; row < LANES; ++row) std::memcpy(to + row * COLS, whole + row * NVFP4_BLOCK + col % NVFP4_BLOCK, COLS * sizeof *to);
    } else {
      if (cols <= COLS - NVFP4_BLOCK) std::fill(to, to + PER_GROUP, Element(0));  // a block is missing
      constexpr int64_t ACROSS = sizeof(Element) == 2 ? 2 * NVFP4_BLOCK : NVFP4_BLOCK;
      for (int64_t b = 0; b * NVFP4_BLOCK < cols; ++b)
        decode_rows<COLS>(groups.codes(group, block + b), groups.scales(group, block + b), to + b * ACROSS);
    }
  }
};

template <class Micro>
struct Finish {
  static constexpr int64_t tile = 0;
  const Nvfp4Call& call;
  void add(const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t) const {}
  void expect(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const int64_t size = call.dtype == FP32 ? 4 : 2;
    expect_rows(static_cast<const char*>(call.y) + (row * call.n + col) * size, rows, call.n * size, cols * size);
  }
  void store(const float* c, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    for (int64_t r = 0; r < rows; ++r) write_y(call, row + r, col, cols, c + r * Micro::COLS);
  }
};

template <class Micro>
void multiply(const Nvfp4Call& call) {
  const Nvfp4Groups groups(call);
  const PackX<Micro> x{call};
  const PackW<Micro> w{groups};
  const Finish<Micro> finish{call};
  Gemm<Micro, PackX<Micro>, PackW<Micro>, Finish<Micro>>(call.m, call.n, call.blocks * NVFP4_BLOCK, x, w, finish)
      .run(call.threads);
}

// `call` has the gradient for x and its result for y; `weight` has the codes.
template <class Micro>
void multiply_by_rows(const Nvfp4Call& call, const Nvfp4Call& weight) {
  const Nvfp4Groups groups(weight);
  const PackX<Micro> x{call};
  const PackRowsOfW<Micro> w{groups};
  const Finish<Micro> finish{call};
  Gemm<Micro, PackX<Micro>, PackRowsOfW<Micro>, Finish<Micro>>(call.m, call.n, call.k, x, w, finish).run(call.threads);
}

}  // namespace

extern "C" void nvfp4_grad_input(
    const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const void* codes, const void* scales, int64_t k,
    int64_t padded_k, float global_scale, void* out, int threads) {
  const auto* bytes = static_cast<const uint8_t*>(codes);
  const auto* by = static_cast<const uint8_t*>(scales);
  const int64_t blocks = padded_k / NVFP4_BLOCK;
  const double scale = SCALE_UNIT * double(global_scale);
  const Nvfp4Call call = {grad, m, n, stride, dtype, bytes, by, k, blocks, scale, nullptr, 0, out, threads};
  const Nvfp4Call weight = {grad, m, k, stride, dtype, bytes, by, n, blocks, scale, nullptr, 0, out, threads};
  if (m == 0 || k == 0) return;
#if defined(HAS_BF16_MICRO)
  if (dtype == BF16) return multiply_by_rows<Bf16Micro>(call, weight);
#endif
  multiply_by_rows<MicroFp32>(call, weight);
}

void fp8::nvfp4_prefill(const Nvfp4Call& call) {
#if defined(HAS_BF16_MICRO)
  if (call.dtype == BF16) return multiply<Bf16Micro>(call);
#endif
  multiply<MicroFp32>(call);
}
