// Many rows of x: a gemm whose panels of w are decoded as they are needed. Part of nvfp4.cpp.
//
// A panel is PANEL rows x PANEL_BLOCKS blocks of w, in FP32 or in pairs of bf16; a tile is TILE_ROWS rows of x. For
// CHUNK_TILES tiles at a time, whose part of x stays in L2, each thread goes through its panels: decode one, multiply
// it by every tile, keep the sums in memory of its own until K is through.

#pragma once

namespace {

// FP32 panels, [k][PANEL]; x as [tiles][k][TILE_ROWS].
struct FloatPanel {
  using Element = float;
  static constexpr int STEPS = BLOCK;  // of the innermost loop, a block
  static void pack_x(const float* x, int row, Element* to) {
    for (int k = 0; k < BLOCK; ++k) to[k * TILE_ROWS + row] = x[k];
  }
  static void decode(const uint8_t* codes, const uint8_t* scales, Element* to) {
    const Floats scale = e4m3(scales);
    Words low = load_words(codes), high = load_words(codes + 4 * LANES);
    for (int k = 0; k < 8; ++k, low = next(low), high = next(high)) {
      store(to + k * PANEL, e2m1(low) * scale);
      store(to + (k + 8) * PANEL, e2m1(high) * scale);
    }
  }
  static Floats multiply(Floats sum, const Element* w, Element x) { return fma(load(w), splat(x), sum); }
};

#if defined(HAS_PAIRS)
// The same with two k a step, k and k + 4, in bf16: FP32 sums of exact products at twice the rate.
struct PairPanel {
  using Element = uint32_t;
  static constexpr int STEPS = BLOCK / 2;
  static void pack_x(const float* x, int row, Element* to) {
    for (int pair = 0; pair < STEPS; ++pair) {
      const float* first = x + (pair < 4 ? pair : pair + 4);
      to[pair * TILE_ROWS + row] = bits(first[0]) >> 16 | (bits(first[4]) & 0xffff0000u);
    }
  }
  static void decode(const uint8_t* codes, const uint8_t* scales, Element* to) {
    const Floats scale = e4m3(scales);
    for (int half = 0; half < 2; ++half) {
      Words low = load_words(codes + half * 4 * LANES), high = {_mm512_srli_epi32(low.v, 16)};
      for (int k = 0; k < 4; ++k, low = next(low), high = next(high))
        store_pairs(to + (half * 4 + k) * PANEL, e2m1(low) * scale, e2m1(high) * scale);
    }
  }
  static Floats multiply(Floats sum, const Element* w, Element x) { return dot(sum, load_pairs(w), x); }
};
#endif

// sums[TILE_ROWS][GROUPS * LANES] += x tile times panel.
template <typename P, int GROUPS>
void multiply_tile(const typename P::Element* w, const typename P::Element* x, int64_t steps, bool first, float* sums) {
  Floats acc[TILE_ROWS][GROUPS];
  for (int row = 0; row < TILE_ROWS; ++row)
    for (int g = 0; g < GROUPS; ++g) acc[row][g] = zeros();
  for (int64_t step = 0; step < steps; ++step, w += PANEL, x += TILE_ROWS)
    for (int row = 0; row < TILE_ROWS; ++row)
      for (int g = 0; g < GROUPS; ++g) acc[row][g] = P::multiply(acc[row][g], w + g * LANES, x[row]);
  for (int row = 0; row < TILE_ROWS; ++row)
    for (int g = 0; g < GROUPS; ++g) {
      float* to = sums + row * PANEL + g * LANES;
      store(to, first ? acc[row][g] : acc[row][g] + load(to));
    }
}

template <typename P>
void pack_tiles(const Call& call, int64_t tiles, typename P::Element* out) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < tiles * call.blocks; ++at)
    for (int row = 0; row < TILE_ROWS; ++row) {
      alignas(64) float x[BLOCK];
      read_block(call, at / call.blocks * TILE_ROWS + row, at % call.blocks, x);
      P::pack_x(x, row, out + at * P::STEPS * TILE_ROWS);
    }
}

template <typename P>
void many_rows(const Call& call) {
  using Element = typename P::Element;
  const int64_t tiles = (call.m + TILE_ROWS - 1) / TILE_ROWS, tile_size = call.blocks * P::STEPS * TILE_ROWS;
  const Buffer<Element> packed = buffer<Element>(tiles * tile_size);
  const Groups groups(call);
  const int64_t panels = (groups.count() + PANEL_GROUPS - 1) / PANEL_GROUPS;
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    pack_tiles<P>(call, tiles, packed.get());
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t from = panels * thread / threads, to = panels * (thread + 1) / threads;
    const Buffer<Element> panel = buffer<Element>(PANEL_BLOCKS * P::STEPS * PANEL);
    const Buffer<float> sums = buffer<float>((to - from) * CHUNK_TILES * TILE_ROWS * PANEL);
    for (int64_t tile = 0; tile < tiles; tile += CHUNK_TILES) {
      const int64_t count = std::min(CHUNK_TILES, tiles - tile);
      for (int64_t block = 0; block < call.blocks; block += PANEL_BLOCKS) {
        const int64_t blocks = std::min(PANEL_BLOCKS, call.blocks - block);
        for (int64_t at = from; at < to; ++at) {
          const int64_t group = at * PANEL_GROUPS;
          const bool whole = group + PANEL_GROUPS <= groups.count();
          for (int g = 0; g < (whole ? PANEL_GROUPS : 1); ++g)
            for (int64_t b = 0; b < blocks; ++b)
              P::decode(groups.codes(group + g) + (block + b) * BLOCK_BYTES,
                        groups.scales(group + g) + (block + b) * LANES, panel.get() + b * P::STEPS * PANEL + g * LANES);
          for (int64_t t = 0; t < count; ++t) {
            const Element* x = packed.get() + (tile + t) * tile_size + block * P::STEPS * TILE_ROWS;
            float* out = sums.get() + ((at - from) * CHUNK_TILES + t) * TILE_ROWS * PANEL;
            if (whole) multiply_tile<P, PANEL_GROUPS>(panel.get(), x, blocks * P::STEPS, block == 0, out);
            else multiply_tile<P, 1>(panel.get(), x, blocks * P::STEPS, block == 0, out);
          }
        }
      }
      for (int64_t at = from; at < to; ++at)
        for (int64_t t = 0; t < count; ++t)
          for (int row = 0; row < TILE_ROWS && (tile + t) * TILE_ROWS + row < call.m; ++row)
            for (int g = 0; g < PANEL_GROUPS && at * PANEL_GROUPS + g < groups.count(); ++g) {
              const float* out = sums.get() + (((at - from) * CHUNK_TILES + t) * TILE_ROWS + row) * PANEL + g * LANES;
              write(call, (tile + t) * TILE_ROWS + row, (at * PANEL_GROUPS + g) * LANES, load(out));
            }
    }
  }
}

}  // namespace
