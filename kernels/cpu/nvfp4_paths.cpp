// Block scales of GPTQ by a search over several ways at once: kernels/nvfp4/scale_paths.py has the method and its
// reference. A lane is a way to round a block, by its path and its scale. A thread takes a few rows of the matrix at once:
// each by itself, but what their errors do to later columns is computed strip by strip of U for all of them, because U is
// larger than a cache, and reading it takes longer than multiplying by it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "fp8_formats.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int64_t LANES = 16, JOINED = 4, STRIP = 64, TOGETHER = 4, ROWS = 4;
constexpr float TO_ZERO = 0x1p30f, SHIFT = 0x1.8p22f;
constexpr int FIRST = 1, LAST = 126;  // bytes of E4M3

struct Problem {
  const float* weights;      // [N, K]
  const uint8_t* kept_zero;  // [N, K/B]
  const float* factor;       // U, [K, K]
  int64_t columns, paths;
  int below, above;          // scales tried on either side
};

// A block's part of U: what an error does to the weights behind it, and what it costs.
template <int B>
struct Within {
  float feed[B][B], price[B], inverse[B];
  Within(const float* factor, int64_t columns) {
    for (int i = 0; i < B; i++) {
      const float* row = factor + i * columns;
      inverse[i] = 1.0f / row[i];
      price[i] = inverse[i] * inverse[i];
      for (int j = 0; j < B; j++) feed[i][j] = row[j] * inverse[i];
    }
  }
};

float scale_of(int byte) {  // of E4M3
  return byte < 8 ? float(byte) * 0x1p-9f : fp8::value((uint32_t(byte) + (120u << 3)) << 20);
}

int nearest_scale(float x) {  // the byte, ties to even
  x = std::min(std::max(x, 0x1p-9f), 448.0f);
  if (x < 0x1p-6f) return int(x * 512.0f + SHIFT * 2.0f - SHIFT * 2.0f);
  uint32_t u = fp8::bits(x);
  return int((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - (120 << 3);
}

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));

inline Lanes& lanes_at(float* x) { return *reinterpret_cast<Lanes*>(x); }
inline Lanes at_least(Lanes x, Lanes least) { return x < least ? least : x; }

// Round the weights of a block one after the other; y: [B, LANES] by their scale -> what was missed, and the cost;
// rounded, if not null: what they became.
template <int B>
inline Lanes round_lanes(const Within<B>& within, const float* y, int64_t stride, Lanes (&missed)[B], Lanes* rounded = nullptr) {
  const Lanes zero = {}, six = zero + 6.0f;
  for (int j = 0; j < B; j++) missed[j] = *reinterpret_cast<const Lanes*>(y + j * stride);
  Lanes cost = zero;
#pragma GCC unroll 32
  for (int j = 0; j < B; j++) {
    const Lanes now = missed[j], clipped = -at_least(-at_least(now, -six), -six);
    const Lanes step = at_least(Lanes(Bits(clipped) & 0x7f800000), zero + 1.0f) * SHIFT;
    const Lanes nearest = (clipped + step) - step, off = now - nearest;
    if (rounded) rounded[j] = nearest;
    missed[j] = off;
    cost += within.price[j] * off * off;
#pragma GCC unroll 32
    for (int k = j + 1; k < B; k++) missed[k] -= off * within.feed[j][k];
  }
  return cost;
}

int64_t rounded_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// One row. Paths are counted from 0; those of a block are told which path of the block before they continue.
template <int B>
class Search {
 public:
  Search(const Problem& problem, const std::vector<Within<B>>& within, const std::vector<float>& strips)
      : p(problem), within(within), strips(strips), stride((problem.columns + STRIP - 1) / STRIP * STRIP), count(problem.columns / B), choices(problem.below + problem.above + 1),
        wide(rounded_up(problem.paths)), most(rounded_up(problem.paths * choices)),
        rest(problem.paths * stride), next(rest.size()), near(JOINED * B * wide), before(near.size()),
        errors(JOINED * B * wide), together(problem.paths * JOINED * B), y(B * most), scales(most),
        total(most), cost(wide), keys(most + 1), tried(most), again(most), bytes(count * wide), from(count * wide), chosen(wide), origin(wide) {}

  // Some rows from `row` on, by a search each.
  static void run(std::vector<Search>& searches, int64_t row, int64_t rows, float* found) {
    const auto each = [&](const auto& what) {
      for (int64_t r = 0; r < rows; r++) what(searches[r], row + r);
    };
    const int64_t count = searches[0].count, columns = searches[0].p.columns;
    each([](Search& one, int64_t at) { one.begin(at); });
    for (int64_t first = 0; first < count; first += JOINED) {
      const int64_t stop = std::min(first + JOINED, count), end = stop * B;
      each([&](Search& one, int64_t at) { one.round(at, first, stop); });
      if (end == columns) break;
      each([&](Search& one, int64_t) { one.trace(first, stop); });
      for (int64_t c = end / STRIP * STRIP; c < columns; c += STRIP) each([&](Search& one, int64_t) { one.feed_forward(first, stop, c); });
      each([](Search& one, int64_t) { std::swap(one.rest, one.next); });
    }
    each([&](Search& one, int64_t at) { one.finish(found + at * count); });
  }

 private:
  void begin(int64_t row) {
    std::copy_n(p.weights + row * p.columns, p.columns, rest.data());
    alive = 1;
    cost[0] = 0.0f;
  }

  void round(int64_t row, int64_t first, int64_t stop) {
    const int64_t begin = first * B, end = stop * B;
    for (int64_t c = begin; c < end; c++)
      for (int64_t i = 0; i < alive; i++) near[(c - begin) * wide + i] = rest[i * stride + c];
    for (int64_t block = first; block < stop; block++) step(block, begin, end, p.kept_zero[row * count + block]);
  }

  void finish(float* found) {
    int64_t way = std::min_element(cost.begin(), cost.begin() + alive) - cost.begin();
    for (int64_t block = count - 1; block >= 0; block--) {
      found[block] = scale_of(bytes[block * wide + way]);
      way = from[block * wide + way];
    }
  }

  void step(int64_t block, int64_t begin, int64_t end, bool zero) {
    const int64_t done = block * B - begin;
    const float* now = near.data() + done * wide;  // [B, wide]
    const Within<B>& own = within[block];
    const int64_t lanes = alive * choices;
    for (int64_t i = 0; i < alive; i++) {
      float largest = 0.0f;
      for (int j = 0; j < B; j++) largest = std::max(largest, std::abs(now[j * wide + i]));
      int middle = nearest_scale(largest / 6.0f);
      for (int64_t c = 0; c < choices; c++) {
        int wanted = middle + int(c) - p.below, byte = std::min(std::max(wanted, FIRST), LAST);
        // Twice the same would leave less room for others: all scales of a block that stays zeros too.
        again[c * alive + i] = wanted != byte || (zero && c != p.below);
        tried[c * alive + i] = uint8_t(byte);
        scales[c * alive + i] = zero ? TO_ZERO : scale_of(byte);
      }
    }
    for (int64_t l = lanes; l < rounded_up(lanes); l++) scales[l] = TO_ZERO;
    for (int j = 0; j < B; j++) {
      for (int64_t c = 0; c < choices; c++)
        for (int64_t i = 0; i < alive; i++)
          y[j * most + c * alive + i] = now[j * wide + i] / scales[c * alive + i];
      for (int64_t l = lanes; l < rounded_up(lanes); l++) y[j * most + l] = 0.0f;
    }
    for (int64_t l = 0; l < lanes; l += LANES) {
      Lanes missed[B];
      const Lanes scale = lanes_at(scales.data() + l);
      lanes_at(total.data() + l) = round_lanes<B>(own, y.data() + l, most, missed) * scale * scale;
    }
    // A key: the cost, which as bits orders as it does as a number, and behind it the lane.
    int64_t allowed = 0;
    for (int64_t c = 0; c < choices; c++)
      for (int64_t i = 0; i < alive; i++) {
        const int64_t lane = c * alive + i;
        keys[allowed] = uint64_t(fp8::bits(total[lane] + cost[i])) << 32 | uint64_t(lane);
        allowed += !again[lane];
      }
    const int64_t kept = std::min(p.paths, allowed);
    if (kept < allowed) std::nth_element(keys.begin(), keys.begin() + kept, keys.begin() + allowed);
    for (int64_t i = 0; i < kept; i++) {
      int64_t lane = keys[i] & 0xffffffffu;
      chosen[i] = lane;
      cost[i] = fp8::value(uint32_t(keys[i] >> 32));
      from[block * wide + i] = int32_t(lane % alive);
      bytes[block * wide + i] = tried[lane];
    }
    take(block, done, end - begin, kept);
    alive = kept;
  }

  // The errors of the chosen lanes, and what is left of the weights of the blocks that are joined.
  void take(int64_t block, int64_t done, int64_t joined, int64_t kept) {
    const int64_t lanes = rounded_up(kept);
    for (int64_t l = 0; l < lanes; l += LANES) {
      float mine[B][LANES];
      Lanes missed[B];
      for (int j = 0; j < B; j++)
        for (int64_t i = 0; i < LANES; i++) mine[j][i] = l + i < kept ? y[j * most + chosen[l + i]] : 0.0f;
      round_lanes<B>(within[block], &mine[0][0], LANES, missed);
      for (int j = 0; j < B; j++)
        for (int64_t i = 0; i < LANES; i++) {
          float scale = l + i < kept ? scales[chosen[l + i]] : 0.0f;
          errors[(done + j) * wide + l + i] = missed[j][i] * within[block].inverse[j] * scale;
        }
    }
    const int32_t* came = from.data() + block * wide;
    std::swap(near, before);
    for (int64_t c = done + B; c < joined; c++) {
      const float* old = before.data() + c * wide;
      float* fresh = near.data() + c * wide;
      for (int64_t i = 0; i < kept; i++) fresh[i] = old[came[i]];
      for (int64_t i = kept; i < lanes; i++) fresh[i] = 0.0f;
      for (int j = 0; j < B; j++) {
        const float fed = p.factor[(block * B + j) * p.columns + block * B - done + c];
        const float* e = errors.data() + (done + j) * wide;
#pragma omp simd
        for (int64_t i = 0; i < lanes; i++) fresh[i] -= fed * e[i];
      }
    }
  }

  // The errors of the joined blocks by the paths that there are after them, and which path each of these comes from.
  void trace(int64_t first, int64_t stop) {
    const int64_t begin = first * B, depth = (stop - first) * B;
    std::iota(origin.begin(), origin.begin() + alive, 0);
    for (int64_t block = stop - 1; block >= first; block--) {
      for (int64_t i = 0; i < alive; i++)
        for (int j = 0; j < B; j++)
          together[i * depth + block * B - begin + j] = errors[(block * B - begin + j) * wide + origin[i]];
      for (int64_t i = 0; i < alive; i++) origin[i] = from[block * wide + origin[i]];
    }
  }

  // These errors reach the columns behind them, a strip of these at once.
  void feed_forward(int64_t first, int64_t stop, int64_t c) {
    const int64_t depth = (stop - first) * B;
    const float* u = strips.data() + c * p.columns + first * B * STRIP;
    int64_t i = 0;
    for (; i + TOGETHER <= alive; i += TOGETHER) feed_paths<TOGETHER>(i, c, u, depth);
    for (; i < alive; i++) feed_paths<1>(i, c, u, depth);
  }

  // next[i] = rest[origin[i]] - errors[i] @ U, a strip of columns of a few paths; u: [depth, STRIP]
  template <int COUNT>
  void feed_paths(int64_t i, int64_t c, const float* u, int64_t depth) {
    Lanes sum[COUNT][STRIP / LANES];
#pragma GCC unroll 4
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 4
      for (int k = 0; k < STRIP / LANES; k++) sum[n][k] = lanes_at(&rest[origin[i + n] * stride + c + k * LANES]);
    for (int64_t d = 0; d < depth; d++)
#pragma GCC unroll 4
      for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 4
        for (int k = 0; k < STRIP / LANES; k++)
          sum[n][k] -= together[(i + n) * depth + d] * *reinterpret_cast<const Lanes*>(u + d * STRIP + k * LANES);
#pragma GCC unroll 4
    for (int n = 0; n < COUNT; n++)
#pragma GCC unroll 4
      for (int k = 0; k < STRIP / LANES; k++) lanes_at(&next[(i + n) * stride + c + k * LANES]) = sum[n][k];
  }

  const Problem& p;
  const std::vector<Within<B>>& within;
  const std::vector<float>& strips;  // U by strips of columns, each [K, STRIP]
  const int64_t stride, count, choices, wide, most;
  int64_t alive = 1;
  std::vector<float> rest, next;             // [paths, K]: what is left of the weights
  std::vector<float> near, before;           // [joined columns, wide]: those of the blocks that are joined
  std::vector<float> errors, together;       // [joined columns, wide], [paths, joined columns]
  std::vector<float> y, scales, total, cost; // [B, most], [most], [most], [wide]
  std::vector<uint64_t> keys;
  std::vector<uint8_t> tried, again, bytes;  // [most], [most], [K/B, wide]
  std::vector<int32_t> from;                 // [K/B, wide]
  std::vector<int64_t> chosen, origin;
};

template <int B>
void search(const Problem& problem, int64_t rows, float* found, int threads) {
  std::vector<Within<B>> within;
  for (int64_t c = 0; c < problem.columns; c += B)
    within.emplace_back(problem.factor + c * problem.columns + c, problem.columns);
  std::vector<float> strips((problem.columns + STRIP - 1) / STRIP * STRIP * problem.columns);
  for (int64_t k = 0; k < problem.columns; k++)
    for (int64_t c = 0; c < problem.columns; c++)
      strips[(c / STRIP * problem.columns + k) * STRIP + c % STRIP] = problem.factor[k * problem.columns + c];
#pragma omp parallel num_threads(fp8::usable_threads(threads, rows))
  {
    std::vector<Search<B>> own;
    for (int64_t r = 0; r < ROWS; r++) own.emplace_back(problem, within, strips);
#pragma omp for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row += ROWS) Search<B>::run(own, row, std::min(ROWS, rows - row), found);
  }
}

template <int B>
void round_block(const float* y, const float* factor, int64_t n, float* missed, float* rounded, int threads) {
  const Within<B> within(factor, B);
  fp8::for_each(n, LANES, fp8::usable_threads(threads, n / LANES / 16), [&](int64_t first) {
    const int64_t lanes = std::min(LANES, n - first);
    alignas(64) float mine[B][LANES] = {};
    Lanes off[B], nearest[B];
    for (int j = 0; j < B; j++) std::memcpy(mine[j], y + j * n + first, lanes * sizeof(float));
    round_lanes<B>(within, &mine[0][0], LANES, off, nearest);
    for (int j = 0; j < B; j++) {
      std::memcpy(missed + j * n + first, &off[j], lanes * sizeof(float));
      std::memcpy(rounded + j * n + first, &nearest[j], lanes * sizeof(float));
    }
  });
}

}  // namespace

extern "C" void nvfp4_round_block(const float* y, const float* factor, int64_t n, int size, float* missed, float* rounded,
                                  int threads) {
  size == 32 ? round_block<32>(y, factor, n, missed, rounded, threads) : round_block<16>(y, factor, n, missed, rounded, threads);
}

extern "C" void nvfp4_scale_paths(const float* weights, const uint8_t* kept_zero, const float* factor, int64_t rows,
                                  int64_t columns, int size, int64_t paths, int below, int above, float* found,
                                  int threads) {
  Problem problem{weights, kept_zero, factor, columns, paths, below, above};
  size == 32 ? search<32>(problem, rows, found, threads) : search<16>(problem, rows, found, threads);
}
