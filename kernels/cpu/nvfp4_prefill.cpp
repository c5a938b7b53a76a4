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

// w: [k][COLS] or [k/2][COLS][2], groups side by side, or a part of one where a panel is narrower. TURNED: w as it is, where
// k of the gemm is n of the weight, and its columns are k of the weight.
template <class Micro, bool TURNED>
struct PackW {
  using Element = typename Micro::Element;
  static constexpr int64_t COLS = Micro::COLS, SIZE = NVFP4_BLOCK, PER_PIECE = COLS * SIZE;  // pieces of SIZE x SIZE
  static_assert(SIZE == LANES);
  const Nvfp4Groups& groups;

  void pack(int64_t col, int64_t cols, int64_t k, int64_t count, Element* to) const {
    for (int64_t at = 0; at < count; at += SIZE, to += PER_PIECE) pieces((k + at) / SIZE, col, cols, to);
    const int64_t filled = ceil_div(count, SIZE) * SIZE;
    if (filled % Micro::STEP) std::fill(to, to + COLS * (Micro::STEP - filled % Micro::STEP), Element(0));
  }

 private:
  void pieces(int64_t down, int64_t col, int64_t cols, Element* to) const {
    const int64_t across = col / SIZE;
    if constexpr (COLS < SIZE) {
      alignas(64) Element whole[SIZE * SIZE];
      piece<SIZE>(down, across, whole);
      for (int64_t k = 0; k < SIZE; ++k) std::memcpy(to + k * COLS, whole + k * SIZE + col % SIZE, COLS * sizeof *to);
    } else {
      if (cols <= COLS - SIZE) std::fill(to, to + PER_PIECE, Element(0));  // a piece is missing
      constexpr int64_t WIDTH = sizeof(Element) == 2 ? 2 * SIZE : SIZE;
      for (int64_t i = 0; i * SIZE < cols; ++i) piece<COLS>(down, across + i, to + i * WIDTH);
    }
  }
  template <int64_t WIDE> void piece(int64_t down, int64_t across, Element* to) const {
    const int64_t group = TURNED ? down : across, block = TURNED ? across : down;
    const uint8_t *codes = groups.codes(group, block), *scales = groups.scales(group, block);
    if constexpr (TURNED) decode_rows<WIDE>(codes, scales, to);
    else decode<WIDE>(codes, scales, to);
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
  const PackW<Micro, false> w{groups};
  const Finish<Micro> finish{call};
  Gemm<Micro, PackX<Micro>, PackW<Micro, false>, Finish<Micro>>(call.m, call.n, call.blocks * NVFP4_BLOCK, x, w, finish)
      .run(call.threads);
}

// `call` has the gradient for x and its result for y; `weight` has the codes.
template <class Micro>
void multiply_by_rows(const Nvfp4Call& call, const Nvfp4Call& weight) {
  const Nvfp4Groups groups(weight);
  const PackX<Micro> x{call};
  const PackW<Micro, true> w{groups};
  const Finish<Micro> finish{call};
  Gemm<Micro, PackX<Micro>, PackW<Micro, true>, Finish<Micro>>(call.m, call.n, call.k, x, w, finish).run(call.threads);
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
