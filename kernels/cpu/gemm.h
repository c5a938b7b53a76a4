// A blocked gemm whose operands are decoded while they are packed.
//
//   C[m, n] = sum_k left[m, k] * right[k, n]        FP32 sums; what becomes of C is up to `Finish`
//
// Three levels. A block of C, MOST_ROWS x MOST_COLS, is computed for DEPTH k's after the other, in strips of left panels that
// stay in L2; panels are packed just before they are used first. A tile, ROWS x COLS, is one panel times another, computed
// in registers by `Micro`. Sums of CHUNK k's are added up one by one, which keeps the error of long sums small: it grows
// with the root of CHUNK, not of K. No element depends on how many threads there are.
//
// Threads have parts of C of their own, and pack what they need by themselves, though neighbours pack some of it too: a
// panel that another core has written comes from its cache, and where the two have no cache in common (two CCXs of an
// AMD processor, two sockets) waiting for it takes longer than packing. On such cores gemms of 1024 x 512 x 512 took
// 1.3 times as long with shared panels; on cores that share a cache 1.01 times as long without. Where a Micro multiplies
// so fast that packing is a large part of the time (AMX), threads share panels all the same, SHARES_PANELS: all pack, then
// all multiply.
//
//   Micro   ROWS, COLS, STEP (k's taken at once), CHUNK, DEPTH, MOST_ROWS, MOST_COLS, SHARES_PANELS, or else STRIP (bytes);
//           Element, what panels are made of; Session, made by each thread;
//           run(steps, left panel, right panel, rows, sums[ROWS][COLS], add): sums = or += the product of the panels
//   Left    pack(row, rows, k, count, to): a panel of ROWS rows, zeros behind `rows` and behind `count`
//   Right   pack(col, cols, k, count, to): a panel of COLS columns
//   Finish  tile: 0, or how many k's share a scale; add(sums, c, row, col, k): c += scaled sums of such a tile;
//           store(c, row, rows, col, cols); expect(row, rows, col, cols): the same place will be stored to, soon
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scratch.h"
#include "threads.h"

namespace fp8 {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that will be written: memory answers while they are computed. A store to a line that is in no cache takes as long as
// a read of it.
inline void expect_rows(const void* first, int64_t rows, int64_t stride, int64_t size) {  // in bytes
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(static_cast<const char*>(first) + row * stride + at, 1);
}

struct Range {
  int64_t first, last;
  int64_t size() const { return last - first; }
  Range share(int64_t part, int64_t parts) const {
    return {first + size() * part / parts, first + size() * (part + 1) / parts};
  }
  Range panel(int64_t i, int64_t wide) const { return {first + i * wide, std::min(first + (i + 1) * wide, last)}; }
};

// How threads divide C between them: `up` x `across` parts.
struct Grid {
  int64_t up, across;

  // Of tiles ROWS x COLS, the one whose largest part takes the least time: an element that is packed takes as long as 16
  // products.
  template <int64_t ROWS, int64_t COLS>
  static Grid of(int64_t threads, int64_t tiles_up, int64_t tiles_across) {
    Grid best{threads, 1};
    int64_t least = INT64_MAX;
    for (int64_t across = 1; across <= threads; ++across) {
      if (threads % across) continue;
      const int64_t rows = ROWS * ceil_div(tiles_up, threads / across), cols = COLS * ceil_div(tiles_across, across);
      const int64_t time = rows * cols + 16 * (rows + cols);
      if (time < least) best = {threads / across, across}, least = time;
    }
    return best;
  }
};

template <class Micro, class Left, class Right, class Finish>
class Gemm {
  using Element = typename Micro::Element;
  static constexpr int64_t ROWS = Micro::ROWS, COLS = Micro::COLS, STEP = Micro::STEP;
  static constexpr int64_t CHUNK = Micro::CHUNK, DEPTH = Micro::DEPTH;
  static_assert(DEPTH % CHUNK == 0 && CHUNK % STEP == 0);

 public:
  Gemm(int64_t m, int64_t n, int64_t k, const Left& left, const Right& right, const Finish& finish)
      : m_(m), n_(n), k_(k), depth_(std::min(DEPTH, ceil_div(std::max<int64_t>(k, 1), STEP) * STEP)),
        left_(left), right_(right), finish_(finish) {}

  void run(int wanted_threads) const {
    if (m_ == 0 || n_ == 0) return;
    const int64_t up = ceil_div(m_, ROWS), across = ceil_div(n_, COLS);
    const int threads = usable_threads(wanted_threads, up * across);
    if (threads == 1) return part({0, m_}, {0, n_}, blocks(m_, n_), {0, 1});
    if constexpr (Micro::SHARES_PANELS) {
      const Blocks shared = blocks(m_, n_);
#pragma omp parallel num_threads(threads)
      part({0, m_}, {0, n_}, shared, {omp_get_thread_num(), omp_get_num_threads()});
    } else {
#pragma omp parallel num_threads(threads)
      {
        const int64_t thread = omp_get_thread_num();
        const Grid grid = Grid::of<ROWS, COLS>(omp_get_num_threads(), up, across);
        const Range i = Range{0, up}.share(thread / grid.across, grid.up);
        const Range j = Range{0, across}.share(thread % grid.across, grid.across);
        const Range rows{i.first * ROWS, std::min(i.last * ROWS, m_)}, cols{j.first * COLS, std::min(j.last * COLS, n_)};
        if (rows.size() > 0 && cols.size() > 0) part(rows, cols, blocks(rows.size(), cols.size()), {0, 1});
      }
    }
  }

 private:
  struct Team { int64_t thread, threads; };  // that share panels
  struct Blocks {
    Blocks(int64_t rows, int64_t cols, int64_t for_left, int64_t for_right, int64_t for_sums)
        : rows(rows), cols(cols), scratch(size_t(for_left + for_right + for_sums)),
          left(reinterpret_cast<Element*>(scratch.memory())),
          right(reinterpret_cast<Element*>(scratch.memory() + for_left)),
          c(for_sums ? reinterpret_cast<float*>(scratch.memory() + for_left + for_right) : nullptr) {}
    int64_t rows, cols;  // at most
    Scratch scratch;
    Element *left, *right;
    float* c;  // sums that wait for the next DEPTH k's
  };

  // Sizes of blocks for a part of C, and memory for their panels.
  Blocks blocks(int64_t rows, int64_t cols) const {
    const bool once = k_ <= DEPTH;  // there are no sums to keep
    rows = block_size(rows, ROWS, Micro::MOST_ROWS), cols = block_size(cols, COLS, (once ? 2 : 1) * Micro::MOST_COLS);
    const int64_t for_left = lines(rows * depth_ * sizeof(Element)), for_right = lines(cols * depth_ * sizeof(Element));
    return Blocks(rows, cols, for_left, for_right, once ? 0 : rows * cols * int64_t(sizeof(float)));
  }
  static int64_t lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

  // Blocks of equal size, a quarter above `most` at the most: a few rows left over would cost the other operand's panels
  // once more.
  static int64_t block_size(int64_t size, int64_t unit, int64_t most) {
    const int64_t panels = ceil_div(size, unit), fitting = most / unit;
    const int64_t blocks = std::max<int64_t>(1, ceil_div(panels - fitting / 4, fitting));
    return ceil_div(panels, blocks) * unit;
  }

  void part(Range rows, Range cols, const Blocks& blocks, Team team) const {
    typename Micro::Session session;
    for (int64_t row = rows.first; row < rows.last; row += blocks.rows)
      for (int64_t col = cols.first; col < cols.last; col += blocks.cols)
        block({row, std::min(row + blocks.rows, rows.last)}, {col, std::min(col + blocks.cols, cols.last)}, blocks, team);
  }

  void block(Range rows, Range cols, const Blocks& blocks, Team team) const {
    const int64_t up = ceil_div(rows.size(), ROWS), across = ceil_div(cols.size(), COLS);
    int64_t k = 0;
    do {  // once at least: of an empty sum there is a result too
      const auto pack_left = [&](int64_t i) {
        const Range panel = rows.panel(i, ROWS);
        left_.pack(panel.first, panel.size(), k, std::min(DEPTH, k_ - k), blocks.left + i * ROWS * depth_);
      };
      const auto pack_right = [&](int64_t j) {
        const Range panel = cols.panel(j, COLS);
        right_.pack(panel.first, panel.size(), k, std::min(DEPTH, k_ - k), blocks.right + j * COLS * depth_);
      };
      const auto tile = [&](int64_t i, int64_t j) {
        float* c = blocks.c ? blocks.c + (i * across + j) * ROWS * COLS : nullptr;
        const Element *left = blocks.left + i * ROWS * depth_, *right = blocks.right + j * COLS * depth_;
        compute(left, right, rows.panel(i, ROWS), cols.panel(j, COLS), k, c);
      };
      if constexpr (Micro::SHARES_PANELS) {
        for (int64_t i = team.thread; i < up; i += team.threads) pack_left(i);
        for (int64_t j = team.thread; j < across; j += team.threads) pack_right(j);
        wait(team);
        const Range tiles = Range{0, up * across}.share(team.thread, team.threads);
        for (int64_t at = tiles.first; at < tiles.last; ++at) tile(at % up, at / up);
        wait(team);
      } else {  // what is packed is used before it leaves the cache
        const int64_t strip = std::max<int64_t>(1, Micro::STRIP / (ROWS * depth_ * int64_t(sizeof(Element))));
        for (int64_t top = 0; top < up; top += strip) {
          const int64_t bottom = std::min(top + strip, up);
          for (int64_t i = top; i < bottom; ++i) pack_left(i);
          for (int64_t j = 0; j < across; ++j) {
            if (top == 0) pack_right(j);
            for (int64_t i = top; i < bottom; ++i) tile(i, j);
          }
        }
      }
      k += DEPTH;
    } while (k < k_);
  }

  void compute(const Element* left, const Element* right, Range rows, Range cols, int64_t k, float* c) const {
    const int64_t count = std::min(DEPTH, k_ - k);
    alignas(64) float here[ROWS * COLS];
    c = c ? c : here;
    const bool is_first = k == 0, is_last = k + DEPTH >= k_;
    if (is_last) finish_.expect(rows.first, rows.size(), cols.first, cols.size());
    if (finish_.tile) {
      alignas(64) float sums[ROWS * COLS];
      if (is_first) std::memset(c, 0, sizeof here);
      for (int64_t at = 0; at < count; at += finish_.tile) {
        multiply(left, right, at, std::min<int64_t>(finish_.tile, count - at), rows, sums, false);
        finish_.add(sums, c, rows.first, rows.size(), cols.first, cols.size(), k + at);
      }
    } else {
      int64_t at = 0;
      do {
        multiply(left, right, at, std::min(CHUNK, count - at), rows, c, !is_first || at > 0);
        at += CHUNK;
      } while (at < count);
    }
    if (is_last) finish_.store(c, rows.first, rows.size(), cols.first, cols.size());
  }

  static void multiply(
      const Element* left, const Element* right, int64_t at, int64_t count, Range rows, float* sums, bool add) {
    Micro::run(ceil_div(count, STEP), left + at * ROWS, right + at * COLS, int(rows.size()), sums, add);
  }

  static void wait(Team team) {
    if (team.threads > 1) {
#pragma omp barrier
    }
  }

  const int64_t m_, n_, k_, depth_;
  const Left& left_;
  const Right& right_;
  const Finish& finish_;
};

}  // namespace fp8
