// Codes under given scales by tabu search: kernels/nvfp4/code_search.py has the method and its reference. A thread has a
// row of the matrix to itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace {

constexpr float VALUES[15] = {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
constexpr float NEVER = 1e30f;  // what a move costs that is not to be made
constexpr float NOWHERE = std::numeric_limits<float>::infinity();  // how far the next value is at the ends of E2M1

struct Problem {
  const float* hessian;  // [K, K]
  int64_t columns, size, steps, tenure;
};

class Search {
 public:
  explicit Search(const Problem& problem)
      : p(problem), diagonal(p.columns), up(p.columns), down(p.columns), changes(p.columns), until(p.columns) {
    for (int64_t j = 0; j < p.columns; j++) diagonal[j] = p.hessian[j * p.columns + j];
  }

  void run(int8_t* own_levels, const float* own_scales, float* gradient) {
    levels = own_levels, scales = own_scales;
    for (int64_t j = 0; j < p.columns; j++) reach(j);
    std::fill(until.begin(), until.end(), 0);
    moves.clear();
    size_t best_moves = 0;
    double now = 0.0, best = 0.0;  // error, less the first one
    int64_t at = 0;
    float by = 0.0f;
    for (int64_t step = 0; step < p.steps; step++) {
      const float least = change_all(gradient, p.hessian + at * p.columns, by, float(best - now), int32_t(step));
      if (!(least < NEVER)) break;
      for (at = 0; changes[at] != least;) at++;
      const int direction = gradient[at] > 0 ? -1 : 1;
      by = direction > 0 ? up[at] : down[at];
      if (std::isinf(by)) break;  // beyond the ends of E2M1: a Hessian with a negative diagonal makes that look cheap
      levels[at] = int8_t(levels[at] + direction);
      reach(at);
      until[at] = int32_t(step + 1 + p.tenure + 7 * step % p.tenure);
      moves.push_back(direction > 0 ? int32_t(at) : ~int32_t(at));
      now += least;
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

  // The gradient after the last move, what every move would change the error by, and the least of that. Moves that are
  // barred count where they change it by less than ``record``.
  float change_all(float* gradient, const float* row, float by, float record, int32_t step) {
    const float *diagonal = this->diagonal.data(), *up = this->up.data(), *down = this->down.data();
    const int32_t* until = this->until.data();
    float* changes = this->changes.data();
    float least = std::numeric_limits<float>::infinity();
#pragma omp simd reduction(min : least)
    for (int64_t j = 0; j < p.columns; j++) {
      const float slope = gradient[j] + by * row[j];
      gradient[j] = slope;
      const float move = slope > 0 ? down[j] : up[j];
      float change = move * (2.0f * slope + move * diagonal[j]);
      change = (until[j] > step) & !(change < record) ? NEVER : change;
      changes[j] = change;
      least = change < least ? change : least;
    }
    return least;
  }

  const Problem& p;
  int8_t* levels = nullptr;
  const float* scales = nullptr;
  std::vector<float> diagonal, up, down, changes;
  std::vector<int32_t> until;  // the step before which a weight is not moved again
  std::vector<int32_t> moves;  // weight, or its complement for a move down
};

}  // namespace

// levels: [N, K], places in VALUES; scales: [N, K/B], 0 where a block stays as it is; gradient: H (q - w), [N, K].
extern "C" void nvfp4_code_search(int8_t* levels, const float* scales, float* gradient, const float* hessian,
                                  int64_t rows, int64_t columns, int64_t size, int64_t steps, int64_t tenure,
                                  int threads) {
  const Problem problem{hessian, columns, size, steps, tenure};
#pragma omp parallel num_threads(fp8::usable_threads(threads, rows))
  {
    Search search(problem);
#pragma omp for schedule(dynamic, 4)
    for (int64_t row = 0; row < rows; row++)
      search.run(levels + row * columns, scales + row * (columns / size), gradient + row * columns);
  }
}
