// A tile of C by AMX: 32 x 32 sums in four tile registers, bf16 products, exact for FP8 values.
//
//   left panel   [k/32][32 rows][32 k]      bf16: two tiles of 16 rows of 64 bytes, one below the other
//   right panel  [k/32][16 pairs of k][32 columns][2]      two tiles side by side
//
// With FP8_EMULATE_AMX the instructions are functions that do what Intel's manual says, so that this code is tested on
// machines that have none.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef FP8_EMULATE_AMX
#include "amx_emulation.h"
#endif

namespace fp8 {

struct MicroAmx {
  using Element = uint16_t;
  static constexpr int64_t ROWS = 32, COLS = 32, STEP = 32;
  static constexpr int64_t CHUNK = 512, DEPTH = CHUNK;  // a right panel is 32 KB: it stays in L1 while left panels pass by
  static constexpr int64_t MOST_ROWS = 1024, MOST_COLS = 1024;
  static constexpr bool SHARES_PANELS = true;

  // Tile registers belong to a thread: each configures its own, and gives them back.
  struct Session {
    Session() {
      static constexpr Config config;  // in memory as it is: GCC 12 believes that its first eight bytes alone are read
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
  };

  // Linux hands out the tiles' state to processes that ask for it; 0 is success.
  static bool permitted() {
#ifdef FP8_EMULATE_AMX
    return true;
#else
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#endif
  }

  static void run(int64_t steps, const Element* left, const Element* right, int rows, float* sums, bool add) {
    alignas(64) float fresh[ROWS * COLS];
    multiply(steps, left, right, rows > 16, add ? fresh : sums);
    if (add)
      for (int64_t x = 0; x < rows * COLS; ++x) sums[x] += fresh[x];
  }

 private:
  struct Config {  // as the instruction wants it: eight tiles of 16 rows of 64 bytes
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(Config) == 64);

  static void multiply(int64_t steps, const Element* left, const Element* right, bool both, float* sums) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory: panels must be written by now
    _tile_zero(0);
    _tile_zero(1);
    if (!both) {
      for (int64_t step = 0; step < steps; ++step, left += ROWS * STEP, right += COLS * STEP) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 128);
        _tile_loadd(7, right + 32, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, sums, 128);
      _tile_stored(1, sums + 16, 128);
      return;
    }
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step, left += ROWS * STEP, right += COLS * STEP) {
      _tile_loadd(4, left, 64);
      _tile_loadd(6, right, 128);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + 32, 128);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, left + 16 * STEP, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * COLS, 128);
    _tile_stored(3, sums + 16 * COLS + 16, 128);
  }
};

}  // namespace fp8
