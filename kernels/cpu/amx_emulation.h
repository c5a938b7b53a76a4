// The AMX instructions that micro_amx.h uses, in plain C++, after the operation sections of Intel's manual.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace fp8::amx {

struct State {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
  uint8_t tile[8][16][64];
};
inline thread_local State state = {};

inline int rows(int tile) {  // using a tile that is not configured is an exception on the real thing
  if (state.palette != 1 || state.rows[tile] == 0 || state.rows[tile] > 16 || state.row_bytes[tile] > 64) std::abort();
  return state.rows[tile];
}

// Subnormals are zeros, on the way in and on the way out.
inline float flushed(uint32_t u) {
  if ((u & 0x7f800000u) == 0) u &= 0x80000000u;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float flushed(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return flushed(u);
}

inline void load_config(const void* config) { std::memcpy(&state, config, 64); }
inline void release() { std::memset(&state, 0, sizeof state); }
inline void zero(int tile) { rows(tile); std::memset(state.tile[tile], 0, sizeof state.tile[tile]); }

inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int row = 0; row < rows(tile); ++row)
    std::memcpy(state.tile[tile][row], static_cast<const char*>(from) + row * stride, state.row_bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < rows(tile); ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, state.tile[tile][row], state.row_bytes[tile]);
}

// Even products and odd ones are added up apart, by fused multiplications and additions, and then to c.
inline void dot_bf16(int c, int a, int b) {
  if (rows(b) != state.row_bytes[a] / 4) std::abort();
  for (int m = 0; m < rows(c); ++m)
    for (int n = 0; n < state.row_bytes[b] / 4; ++n) {
      float sums[2] = {}, sum;
      for (int k = 0; k < state.row_bytes[a] / 4; ++k) {
        uint16_t left[2], right[2];
        std::memcpy(left, state.tile[a][m] + 4 * k, 4);
        std::memcpy(right, state.tile[b][k] + 4 * n, 4);
        for (int i = 0; i < 2; ++i)
          sums[i] = flushed(std::fma(flushed(uint32_t(left[i]) << 16), flushed(uint32_t(right[i]) << 16), sums[i]));
      }
      std::memcpy(&sum, state.tile[c][m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
      std::memcpy(state.tile[c][m] + 4 * n, &sum, 4);
    }
}

}  // namespace fp8::amx

// <immintrin.h> has them as macros too.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) fp8::amx::load_config(config)
#define _tile_release() fp8::amx::release()
#define _tile_zero(tile) fp8::amx::zero(tile)
#define _tile_loadd(tile, from, stride) fp8::amx::load(tile, from, stride)
#define _tile_stored(tile, to, stride) fp8::amx::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) fp8::amx::dot_bf16(c, a, b)
