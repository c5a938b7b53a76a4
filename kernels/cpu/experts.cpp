// y[row] = x[row] w[expert of the row]^T for a stack of packed weights: rows of one expert go through the kernel for one
// matrix together, and what no row asks for is not read. No torch headers.
//
//   codes, scales   of expert e: its slice of the stack, laid out as for one matrix (nvfp4.cpp, fp8_weight.cpp)
//   which           grouped: int64 [experts], where the rows of each expert end, in order; rows after the last end are 0
//                   otherwise: int64 [m], the expert of each row
//
// The gradients of x are the same, grad[row] w[expert of the row]: rows of grad are grouped as those of x were.
//
// The result says whether `which` was sound: 0, or 1 where it names experts or rows that there are none of.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fp8_formats.h"
#include "kernels.h"

namespace {

// Rows of x and of y in bytes.
struct Rows {
  const char* x;
  int64_t m, x_bytes, used, y_bytes;  // x_bytes: from row to row; used: of a row
  char* y;
};

// multiply(x, rows, stride in bytes, expert, y)
template <class Multiply>
int grouped(const Rows& rows, int64_t experts, const int64_t* ends, const Multiply& multiply) {
  int64_t start = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t end = ends[expert];
    if (end < start || end > rows.m) return 1;
    if (end > start) multiply(rows.x + start * rows.x_bytes, end - start, rows.x_bytes, expert, rows.y + start * rows.y_bytes);
    start = end;
  }
  std::memset(rows.y + start * rows.y_bytes, 0, size_t((rows.m - start) * rows.y_bytes));
  return 0;
}

template <class Multiply>
int gathered(const Rows& rows, int64_t experts, const int64_t* which, const Multiply& multiply) {
  std::vector<int64_t> starts(experts + 1, 0), order(rows.m);
  for (int64_t row = 0; row < rows.m; ++row) {
    if (which[row] < -experts || which[row] >= experts) return 1;
    ++starts[(which[row] + experts) % experts + 1];  // negative ones count from the end, as an index does
  }
  for (int64_t expert = 0; expert < experts; ++expert) starts[expert + 1] += starts[expert];
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t row = 0; row < rows.m; ++row) order[next[(which[row] + experts) % experts]++] = row;
  std::vector<char> x, y;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t* mine = order.data() + starts[expert];
    const int64_t count = starts[expert + 1] - starts[expert];
    if (!count) continue;
    if (mine[count - 1] - mine[0] == count - 1) {  // they lie together
      multiply(rows.x + mine[0] * rows.x_bytes, count, rows.x_bytes, expert, rows.y + mine[0] * rows.y_bytes);
      continue;
    }
    x.resize(size_t(count * rows.used)), y.resize(size_t(count * rows.y_bytes));
    for (int64_t i = 0; i < count && rows.used; ++i) std::memcpy(x.data() + i * rows.used, rows.x + mine[i] * rows.x_bytes, size_t(rows.used));
    multiply(x.data(), count, rows.used, expert, y.data());
    for (int64_t i = 0; i < count; ++i) std::memcpy(rows.y + mine[i] * rows.y_bytes, y.data() + i * rows.y_bytes, size_t(rows.y_bytes));
  }
  return 0;
}

template <class Multiply>
int by_expert(const Rows& rows, int64_t experts, const int64_t* which, int in_groups, const Multiply& multiply) {
  if (!rows.m || !rows.y_bytes) return 0;
  return in_groups ? grouped(rows, experts, which, multiply) : gathered(rows, experts, which, multiply);
}

Rows rows_of(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, int64_t n, void* y) {
  const int64_t size = dtype == fp8::FP32 ? 4 : 2;
  return {static_cast<const char*>(x), m, stride * size, k * size, n * size, static_cast<char*>(y)};
}

}  // namespace

extern "C" int nvfp4_experts(
    const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes, const uint8_t* scales,
    const float* global_scales, int64_t experts, int64_t n, int64_t padded_k, const int64_t* which, int in_groups,
    void* y, int threads) {
  const int64_t size = dtype == fp8::FP32 ? 4 : 2;
  return by_expert(rows_of(x, m, k, stride, dtype, n, y), experts, which, in_groups,
                   [&](const char* from, int64_t count, int64_t bytes, int64_t expert, char* to) {
    const int64_t useful = std::min<int64_t>(threads, 1 + count * n * k / fp8::NVFP4_LEAST_PARALLEL);
    nvfp4_matmul(from, count, k, bytes / size, dtype, codes + expert * n * padded_k / 2, scales + expert * n * padded_k / 16,
                 n, padded_k, global_scales[expert], nullptr, 0, 0, to, int(useful));
  });
}

extern "C" int fp8_experts(
    const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes, const float* scales,
    int64_t experts, int64_t n, const int64_t* which, int in_groups, void* y, int threads) {
  const int64_t size = dtype == fp8::FP32 ? 4 : 2;
  return by_expert(rows_of(x, m, k, stride, dtype, n, y), experts, which, in_groups,
                   [&](const char* from, int64_t count, int64_t bytes, int64_t expert, char* to) {
    fp8_weight_mm(from, count, k, bytes / size, dtype, codes + expert * n * k, scales + expert * n, n, nullptr, to,
                  count * n * k >= fp8::FP8_WEIGHT_LEAST_PARALLEL ? threads : 1);
  });
}

extern "C" int nvfp4_experts_grad_input(
    const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes, const uint8_t* scales,
    const float* global_scales, int64_t experts, int64_t k, int64_t padded_k, const int64_t* which, int in_groups,
    void* out, int threads) {
  const int64_t size = dtype == fp8::FP32 ? 4 : 2;
  return by_expert(rows_of(grad, m, n, stride, dtype, k, out), experts, which, in_groups,
                   [&](const char* from, int64_t count, int64_t bytes, int64_t expert, char* to) {
    const int64_t useful = std::min<int64_t>(threads, 1 + count * n * k / fp8::NVFP4_LEAST_PARALLEL);
    nvfp4_grad_input(from, count, n, bytes / size, dtype, codes + expert * n * padded_k / 2,
                     scales + expert * n * padded_k / 16, k, padded_k, global_scales[expert], to, int(useful));
  });
}

extern "C" int fp8_experts_grad_input(
    const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes, const float* scales,
    int64_t experts, int64_t k, const int64_t* which, int in_groups, void* out, int threads) {
  const int64_t size = dtype == fp8::FP32 ? 4 : 2;
  return by_expert(rows_of(grad, m, n, stride, dtype, k, out), experts, which, in_groups,
                   [&](const char* from, int64_t count, int64_t bytes, int64_t expert, char* to) {
    fp8_weight_grad_input(from, count, n, bytes / size, dtype, codes + expert * n * k, scales + expert * n, k, to,
                          count * n * k >= fp8::FP8_WEIGHT_LEAST_PARALLEL ? threads : 1);
  });
}
