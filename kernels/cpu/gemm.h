// A blocked gemm whose operands are decoded while they are packed.
//
//   C[m, n] = sum_k left[m, k] * right[k, n]        FP32 sums; what becomes of C is up to `Finish`
//
// Three levels. A block of C, MOST_ROWS x MOST_COLS, is computed for a chunk of K after the other: all threads pack the
// chunk of both operands into panels, then share the tiles of the block. A tile, ROWS x COLS, is one panel times
// another, computed in registers by `Micro`. Sums of a chunk are added to C one by one, which keeps the error of long
// sums small: it grows with the root of CHUNK, not of K. No element depends on how many threads there are.
//
//   Micro   ROWS, COLS, STEP (k's taken at once), CHUNK, MOST_ROWS, MOST_COLS; Element, what panels are made of;
//           Session, made by each thread; run(steps, left panel, right panel, rows, sums[ROWS][COLS])
//   Left    pack(row, rows, k, count, to): a panel of ROWS rows, zeros behind `rows` and behind `count`
//   Right   pack(col, cols, k, count, to): a panel of COLS columns
//   Finish  tile: 0, or how many k's share a scale; add(sums, c, row, col, k): c += scaled sums of such a tile;
//           store(c, row, rows, col, cols); expect(row, rows, col, cols): the same place will be stored to, soon
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "threads.h"

namespace fp8 {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that will be written: memory answers while they are computed. A store to a line that is in no cache takes as long as
// a read of it.
inline void expect_rows(const void* first, int64_t rows, int64_t stride, int64_t size) {  // in bytes
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(static_cast<const char*>(first) + row * stride + at, 1);
}

// Memory for packed panels, kept by each calling thread: asking the system for megabytes anew costs a page fault each 4 KB.
class Scratch {
 public:
  char* at_least(size_t size) {
    if (size > size_) {
      memory_.reset();
      size_ = 0;
      void* fresh = std::aligned_alloc(64, (size + 63) / 64 * 64);
      if (!fresh) throw std::bad_alloc();
      memory_.reset(static_cast<char*>(fresh));
      size_ = size;
    }
    return memory_.get();
  }

 private:
  struct Free { void operator()(char* p) const { std::free(p); } };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

template <class Micro, class Left, class Right, class Finish>
class Gemm {
  using Element = typename Micro::Element;
  static constexpr int64_t ROWS = Micro::ROWS, COLS = Micro::COLS, STEP = Micro::STEP, CHUNK = Micro::CHUNK;

 public:
  Gemm(int64_t m, int64_t n, int64_t k, const Left& left, const Right& right, const Finish& finish)
      : m_(m), n_(n), k_(k), left_(left), right_(right), finish_(finish) {}

  void run(int wanted_threads) {
    if (m_ == 0 || n_ == 0) return;
    const int64_t most_cols = k_ > CHUNK ? Micro::MOST_COLS : 2 * Micro::MOST_COLS;  // there are no sums to keep
    const int64_t rows = block_size(m_, ROWS, Micro::MOST_ROWS), cols = block_size(n_, COLS, most_cols);
    const int64_t depth = std::min<int64_t>(CHUNK, ceil_div(k_, STEP) * STEP);
    depth_ = depth;
    const size_t for_left = size_t(rows * depth) * sizeof(Element), for_right = size_t(cols * depth) * sizeof(Element);
    const size_t for_c = k_ > CHUNK ? size_t(rows * cols) * sizeof(float) : 0;
    static thread_local Scratch scratch;
    char* memory = scratch.at_least(for_left + for_right + for_c + 192);
    panels_left_ = reinterpret_cast<Element*>(memory);
    panels_right_ = reinterpret_cast<Element*>(memory + (for_left + 63) / 64 * 64);
    c_ = for_c ? reinterpret_cast<float*>(memory + (for_left + 63) / 64 * 64 + (for_right + 63) / 64 * 64) : nullptr;

    const int threads = usable_threads(wanted_threads, ceil_div(rows, ROWS) * ceil_div(cols, COLS));
    if (threads == 1) {
      work(0, 1, rows, cols);
      return;
    }
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads(), rows, cols);
  }

 private:
  // Blocks of equal size, a quarter above `most` at the most: a few rows left over would cost the other operand's panels
  // once more.
  static int64_t block_size(int64_t size, int64_t unit, int64_t most) {
    const int64_t panels = ceil_div(size, unit), fitting = most / unit;
    const int64_t blocks = std::max<int64_t>(1, ceil_div(panels - fitting / 4, fitting));
    return ceil_div(panels, blocks) * unit;
  }

  void work(int thread, int threads, int64_t most_rows, int64_t most_cols) {
    typename Micro::Session session;
    for (int64_t row = 0; row < m_; row += most_rows)
      for (int64_t col = 0; col < n_; col += most_cols)
        block(row, std::min(most_rows, m_ - row), col, std::min(most_cols, n_ - col), thread, threads);
  }

  void block(int64_t row, int64_t rows, int64_t col, int64_t cols, int thread, int threads) {
    const int64_t up = ceil_div(rows, ROWS), across = ceil_div(cols, COLS);
    const int64_t first = up * across * thread / threads, last = up * across * (thread + 1) / threads;
    int64_t k = 0;
    do {  // once at least: of an empty sum there is a result too
      const int64_t count = std::min(CHUNK, k_ - k);
      for (int64_t panel = thread; panel < up; panel += threads)
        left_.pack(row + panel * ROWS, std::min(ROWS, rows - panel * ROWS), k, count, left_panel(panel));
      for (int64_t panel = thread; panel < across; panel += threads)
        right_.pack(col + panel * COLS, std::min(COLS, cols - panel * COLS), k, count, right_panel(panel));
      wait(threads);
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t i = tile % up, j = tile / up;  // down the columns: the right panel stays in the nearest cache
        compute(i, j, tile, row, std::min(ROWS, rows - i * ROWS), col, std::min(COLS, cols - j * COLS), k, count);
      }
      wait(threads);
      k += CHUNK;
    } while (k < k_);
  }

  void compute(int64_t i, int64_t j, int64_t tile, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t k, int64_t count) {
    alignas(64) float sums[ROWS * COLS];
    alignas(64) float scaled[ROWS * COLS];
    const Element *left = left_panel(i), *right = right_panel(j);
    const bool is_first = k == 0, is_last = k + CHUNK >= k_;
    if (is_last) finish_.expect(row + i * ROWS, rows, col + j * COLS, cols);
    float* c = c_ ? c_ + tile * ROWS * COLS : nullptr;
    const float* sum = sums;
    if (finish_.tile) {
      c = c ? c : scaled;
      if (is_first) std::memset(c, 0, sizeof(float) * ROWS * COLS);
      for (int64_t at = 0; at < count; at += finish_.tile) {
        Micro::run(ceil_div(std::min<int64_t>(finish_.tile, count - at), STEP), left + at * ROWS, right + at * COLS, int(rows), sums);
        finish_.add(sums, c, row + i * ROWS, rows, col + j * COLS, cols, k + at);
      }
      sum = c;
    } else {
      Micro::run(ceil_div(count, STEP), left, right, int(rows), sums);
      if (c && !is_first) for (int64_t x = 0; x < rows * COLS; ++x) sums[x] += c[x];
      if (c && !is_last) std::memcpy(c, sums, sizeof(float) * rows * COLS);
    }
    if (is_last) finish_.store(sum, row + i * ROWS, rows, col + j * COLS, cols);
  }

  Element* left_panel(int64_t i) const { return panels_left_ + i * ROWS * depth_; }
  Element* right_panel(int64_t j) const { return panels_right_ + j * COLS * depth_; }

  static void wait(int threads) {
    if (threads > 1) {
#pragma omp barrier
    }
  }

  const int64_t m_, n_, k_;
  const Left& left_;
  const Right& right_;
  const Finish& finish_;
  int64_t depth_ = 0;
  Element *panels_left_ = nullptr, *panels_right_ = nullptr;
  float* c_ = nullptr;
};

}  // namespace fp8
