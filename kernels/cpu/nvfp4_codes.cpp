// Codes under given scales by tabu search: kernels/nvfp4/code_search.py has the method and its reference. A thread has a
// row of the matrix to itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "sixteen.h"
#include "threads.h"

namespace {

constexpr float VALUES[15] = {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
constexpr float NEVER = 1e30f;  // what a move costs that is not to be made
constexpr float NOWHERE = std::numeric_limits<float>::infinity();  // how far the next value is at the ends of E2M1

using fp8::Floats16, fp8::all;
constexpr int64_t LANES = 16;
typedef int32_t Ints16 __attribute__((vector_size(64)));
template <class Vector> Vector load(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

struct Problem {
  const float* hessian;  // [K, stride]
  int64_t columns, stride, size, steps, tenure;  // stride: whole vectors; what is behind the columns can't move
};

class Search {
 public:
  explicit Search(const Problem& problem)
      : p(problem), slopes(p.stride), diagonal(p.stride), up(p.stride, NOWHERE), down(p.stride, -NOWHERE), until(p.stride) {
    for (int64_t j = 0; j < p.columns; j++) diagonal[j] = p.hessian[j * p.stride + j];
  }

  void run(int8_t* own_levels, const float* own_scales, const float* first) {
    float* gradient = slopes.data();
    std::copy_n(first, p.columns, gradient);
    levels = own_levels, scales = own_scales;
    for (int64_t j = 0; j < p.columns; j++) reach(j);
    std::fill(until.begin(), until.end(), 0);
    moves.clear();
    size_t best_moves = 0;
    double now = 0.0, best = 0.0;  // error, less the first one
    int64_t at = 0;
    float by = 0.0f;
    for (int64_t step = 0; step < p.steps; step++) {
      const Move move = change_all(gradient, p.hessian + at * p.stride, by, float(best - now), int32_t(step));
      if (!(move.change < NEVER)) break;
      at = move.at;
      const int direction = gradient[at] > 0 ? -1 : 1;
      by = direction > 0 ? up[at] : down[at];
      if (std::isinf(by)) break;  // beyond the ends of E2M1: a Hessian with a negative diagonal makes that look cheap
      levels[at] = int8_t(levels[at] + direction);
      reach(at);
      until[at] = int32_t(step + 1 + p.tenure + 7 * step % p.tenure);
      moves.push_back(direction > 0 ? int32_t(at) : ~int32_t(at));
      now += move.change;
      if (now < best) best = now, best_moves = moves.size();
    }
    for (size_t i = moves.size(); i > best_moves; i--) {
      const int32_t move = moves[i - 1];
      move >= 0 ? levels[move]-- : levels[~move]++;
    }
  }

 private:
  void reach(int64_t j) {
    const float scale = scales[j / p.size];
    const int level = levels[j];
    up[j] = scale > 0 && level < 14 ? (VALUES[level + 1] - VALUES[level]) * scale : NOWHERE;
    down[j] = scale > 0 && level > 0 ? (VALUES[level - 1] - VALUES[level]) * scale : -NOWHERE;
  }

  struct Move {
    float change;  // of the error
    int64_t at;
  };

  // The gradient after the last move, and the move that changes the error by the least, of several the first. Moves that
  // are barred count where they change it by less than ``record``.
  Move change_all(float* gradient, const float* row, float by, float record, int32_t step) {
    Floats16 least = all(NOWHERE);
    Ints16 where = {}, lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t j = 0; j < p.stride; j += LANES) {
      const Floats16 slope = load<Floats16>(gradient + j) + by * load<Floats16>(row + j);
      std::memcpy(gradient + j, &slope, sizeof slope);
      const Floats16 move = slope > 0 ? load<Floats16>(&down[j]) : load<Floats16>(&up[j]);
      Floats16 change = move * (2.0f * slope + move * load<Floats16>(&diagonal[j]));
      const Ints16 barred = (load<Ints16>(&until[j]) > step) & ~(change < record);
      change = barred ? all(NEVER) : change;
      const Ints16 better = change < least;
      least = better ? change : least;
      where = better ? lane + int32_t(j) : where;
    }
    Move found{NOWHERE, 0};
    for (int i = 0; i < LANES; i++)
      if (least[i] < found.change || (least[i] == found.change && where[i] < found.at)) found = {least[i], where[i]};
    return found;
  }

  const Problem& p;
  int8_t* levels = nullptr;
  const float* scales = nullptr;
  std::vector<float> slopes, diagonal, up, down;  // slopes: the gradient, as it is after the last move
  std::vector<int32_t> until;  // the step before which a weight is not moved again
  std::vector<int32_t> moves;  // weight, or its complement for a move down
};

}  // namespace

// levels: [N, K], places in VALUES; scales: [N, K/B], 0 where a block stays as it is; gradient: H (q - w), [N, K].
extern "C" void nvfp4_code_search(int8_t* levels, const float* scales, const float* gradient, const float* hessian,
                                  int64_t rows, int64_t columns, int64_t size, int64_t steps, int64_t tenure,
                                  int threads) {
  const int64_t stride = (columns + LANES - 1) / LANES * LANES;
  std::vector<float> wide(stride == columns ? 0 : columns * stride);
  for (int64_t j = 0; j < columns && !wide.empty(); j++) std::copy_n(hessian + j * columns, columns, wide.data() + j * stride);
  const Problem problem{wide.empty() ? hessian : wide.data(), columns, stride, size, steps, tenure};
#pragma omp parallel num_threads(fp8::usable_threads(threads, rows))
  {
    Search search(problem);
#pragma omp for schedule(dynamic, 4)
    for (int64_t row = 0; row < rows; row++)
      search.run(levels + row * columns, scales + row * (columns / size), gradient + row * columns);
  }
}
