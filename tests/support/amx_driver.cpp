// The gemms of kernels/cpu against sums in FP64, in a program that needs neither Python nor torch: for machines that
// are hard to come by. Linked with the kernels; a line for each product with a hash of its bits; exit code 1 if any
// is wrong, 2 if the instructions do not work.
//
//   amx_driver THREADS      each product by one thread and by so many, which must agree to the bit
//
// Statically linked and compiled for AMX, it ran in a Linux of its own (Debian's 6.1; no5lvl acpi=off
// clearcpuid=fsrm) in Bochs 3.0 (--enable-amx --enable-smp; model sapphire_rapids), whose AMX had to be completed
// with what Linux relies on: XFD (the registers IA32_XFD and IA32_XFD_ERR, their bits of CPUID, #NM at tile
// instructions), and saving and restoring tiles with all rows, their shapes, and their place behind states that are
// not asked for.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fp8_formats.h"
#include "kernels.h"

namespace {

using namespace fp8;
using Bytes = std::vector<uint8_t>;

uint64_t seed = 1;
uint32_t random_bits() { return uint32_t((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 33); }
double uniform() { return random_bits() / 2147483648.0; }

int64_t wrong_products = 0;
const char *const DTYPES[] = {"fp32", "bf16", "fp16"}, *const FORMATS[] = {"e4m3", "e5m2"};
int64_t size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

double element(const Bytes& data, int dtype, int64_t at) {
  float f;
  uint16_t h;
  if (dtype == FP32) return std::memcpy(&f, &data[at * 4], 4), f;
  std::memcpy(&h, &data[at * 2], 2);
  return dtype == BF16 ? BFloat16::load(h) : Float16::load(h);
}

Bytes random_matrix(int64_t size, int dtype) {
  Bytes data(size * size_of(dtype));
  for (int64_t i = 0; i < size; ++i) {
    const float x = float(4 * uniform() - 2);
    const uint16_t h = dtype == BF16 ? BFloat16::store(x) : Float16::store(x);
    std::memcpy(&data[i * size_of(dtype)], dtype == FP32 ? static_cast<const void*>(&x) : &h, size_of(dtype));
  }
  return data;
}

std::vector<float> random_scales(int64_t size) {
  std::vector<float> scales(size);
  for (float& scale : scales) scale = float(0.01 + uniform());
  return scales;
}

// Finite codes of every size; now and then a NaN.
Bytes random_codes(int64_t size, bool e5m2, bool with_nan) {
  Bytes codes(size);
  for (uint8_t& code : codes)
    do code = uint8_t(random_bits() >> 3); while ((code & 0x7f) >= (e5m2 ? 0x7c : 0x7f));
  if (with_nan && size) codes[random_bits() % size] = 0x7f;
  return codes;
}
double decoded(uint8_t code, bool e5m2) { return e5m2 ? E5M2::decode(code) : E4M3::decode(code); }

struct Sum { double value = 0, magnitude = 0; };  // of what is added up

// `run(y, threads)` writes [m, n]; `expected(i, j)` is an element's sum. Of large results some elements are looked at.
template <class Run, class Expected>
void check(const char* name, int64_t m, int64_t n, int dtype, const Bytes& before, int threads, Run run,
           Expected expected) {
  Bytes one = before, many = before;
  run(one.data(), 1);
  run(many.data(), threads);
  int64_t wrong = 0, nans = 0;
  double worst = 0;
  const double most = dtype == FP16 ? 65504 : HUGE_VAL;  // and overflows to Inf
  const int64_t step = m * n > 30000 ? m * n / 4000 : 1;
  for (int64_t at = 0; at < m * n; at += 1 + random_bits() % step) {
    const Sum sum = expected(at / n, at % n);
    const double got = element(one, dtype, at), places[] = {0, 0x1p-8, 0x1p-11}, smallest[] = {0, 0, 0x1p-25};
    const double allowed = 0x1p-20 * sum.magnitude + places[dtype] * std::fabs(sum.value) + smallest[dtype];
    if (std::isnan(sum.value)) {
      ++nans, wrong += !std::isnan(got);
    } else {
      const double error = std::fabs(std::clamp(sum.value, -most, most) - std::clamp(got, -most, most));
      wrong += !(error <= allowed);
      if (allowed > 0) worst = std::fmax(worst, error / allowed);
    }
  }
  const bool same = one == many;
  uint64_t hash = 14695981039346656037u;
  for (uint8_t byte : one) hash = (hash ^ byte) * 1099511628211u;
  wrong_products += wrong || !same;
  std::printf("%s %s %ldx%ld %s: %ld wrong, %ld nan, worst error %.3f of what is allowed%s, hash %016lx\n",
              wrong || !same ? "FAIL" : "ok", name, m, n, DTYPES[dtype], wrong, nans, worst,
              same ? "" : ", THREADS DIFFER", hash);
  std::fflush(stdout);
}

enum Scaling { TENSOR, ROWS, TILES, BLOCKS };
const char* const SCALINGS[] = {"tensor", "rows", "1x128", "128x128"};

struct Scaled {
  std::vector<float> data;
  int64_t line_stride = 0, k_stride = 0, lines = 1;
  Scaled(Scaling kind, int64_t size, int64_t k, bool right) {
    const int64_t deep = (k + 127) / 128;
    if (kind == TENSOR) data = random_scales(1);
    if (kind == ROWS) data = random_scales(size), line_stride = 1;
    if (kind >= TILES) {
      lines = kind == BLOCKS && right ? 128 : 1;
      const int64_t groups = (size + lines - 1) / lines;
      data = random_scales(groups * deep);
      line_stride = groups > 1 ? deep : 0, k_stride = deep > 1 ? 1 : 0;
    }
  }
  double at(int64_t line, int64_t k) const { return data[line / lines * line_stride + k / 128 * k_stride]; }
};

void scaled_mm(int64_t m, int64_t n, int64_t k, int variant, int threads) {
  const bool left_e5m2 = variant & 1, right_e5m2 = variant & 2;
  const bool left_by_column = variant & 4, right_by_row = variant & 8;
  const Scaling scaling = Scaling((variant ^ variant >> 2) & 3);
  const int dtype = variant % 3;
  const bool has_bias = variant % 5 < 2, accumulate = variant % 7 == 3, with_nan = variant % 4 == 2;
  const Bytes a = random_codes(m * k, left_e5m2, with_nan), b = random_codes(k * n, right_e5m2, false);
  const Scaled down(scaling, m, k, false), across(scaling, n, k, true);
  const std::vector<float> bias = random_scales(n);
  const Bytes before = random_matrix(m * n, dtype);
  const int64_t a_row = left_by_column ? 1 : k, a_k = left_by_column ? m : 1;
  const int64_t b_col = right_by_row ? 1 : k, b_k = right_by_row ? n : 1;
  char name[80];
  std::snprintf(name, sizeof name, "scaled_mm k=%ld %s*%s %s%s %s%s%s", k, FORMATS[left_e5m2], FORMATS[right_e5m2],
                left_by_column ? "T" : "N", right_by_row ? "N" : "T", SCALINGS[scaling], has_bias ? " bias" : "",
                accumulate ? " add" : "");
  check(name, m, n, dtype, before, threads,
        [&](void* y, int threads) {
          fp8_scaled_mm(m, n, k, a.data(), a_row, a_k, left_e5m2,
                        down.data.data(), down.line_stride, down.k_stride, down.lines,
                        b.data(), b_col, b_k, right_e5m2,
                        across.data.data(), across.line_stride, across.k_stride, across.lines,
                        has_bias ? bias.data() : nullptr, y, dtype, n, accumulate, threads);
        },
        [&](int64_t i, int64_t j) {
          Sum sum;
          for (int64_t at = 0; at < k; ++at) {
            const double left = decoded(a[i * a_row + at * a_k], left_e5m2) * down.at(i, at);
            const double product = left * decoded(b[at * b_k + j * b_col], right_e5m2) * across.at(j, at);
            sum.value += product, sum.magnitude += std::fabs(product);
          }
          const double added = (has_bias ? bias[j] : 0) + (accumulate ? element(before, dtype, i * n + j) : 0);
          return Sum{sum.value + added, sum.magnitude + 8 * std::fabs(added)};
        });
}

void weight_mm(int64_t m, int64_t n, int64_t k, int dtype, bool has_bias, int threads) {
  const Bytes x = random_matrix(m * k, dtype), w = random_codes(n * k, false, m % 2);
  const std::vector<float> scales = random_scales(n), bias = random_scales(n);
  char name[80];
  std::snprintf(name, sizeof name, "fp8_weight_mm k=%ld%s", k, has_bias ? " bias" : "");
  check(name, m, n, dtype, Bytes(m * n * size_of(dtype)), threads,
        [&](void* y, int threads) {
          fp8_weight_mm(x.data(), m, k, k, dtype, w.data(), scales.data(), n, has_bias ? bias.data() : nullptr, y,
                        threads);
        },
        [&](int64_t i, int64_t j) {
          Sum sum;
          for (int64_t at = 0; at < k; ++at) {
            const double product = element(x, dtype, i * k + at) * decoded(w[j * k + at], false) * scales[j];
            sum.value += product, sum.magnitude += std::fabs(product);
          }
          return Sum{sum.value + (has_bias ? bias[j] : 0), sum.magnitude + 8};
        });
}

void nvfp4(int64_t m, int64_t n, int64_t k, int dtype, bool has_bias, int threads) {
  const int64_t padded = (k + 15) / 16 * 16;
  const Bytes x = random_matrix(m * k, dtype), codes = random_matrix(n * padded / 4, BF16);
  const Bytes bias = random_matrix(n, dtype);
  Bytes scales = random_codes(n * padded / 16, false, false);
  for (uint8_t& scale : scales) scale &= 0x7f;
  const float global_scale = 0.03f;
  const auto weight = [&](int64_t row, int64_t at) {  // nvfp4.py: words of 8 codes of up to 16 rows side by side
    const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int64_t group = row / 16, rows = std::min<int64_t>(16, n - 16 * group), first = 16 * group;
    const uint8_t two = codes[first * padded / 2 + (at / 8 * rows + row % 16) * 4 + at % 8 / 2];
    const int code = at % 2 ? two >> 4 : two & 15;
    const double scale = E4M3::decode(scales[first * padded / 16 + at / 16 * rows + row % 16]);
    return (code & 8 ? -1 : 1) * magnitudes[code & 7] * scale * global_scale;
  };
  char name[80];
  std::snprintf(name, sizeof name, "nvfp4_matmul k=%ld%s", k, has_bias ? " bias" : "");
  check(name, m, n, dtype, Bytes(m * n * size_of(dtype)), threads,
        [&](void* y, int threads) {
          nvfp4_matmul(x.data(), m, k, k, dtype, codes.data(), scales.data(), n, padded, global_scale,
                       has_bias ? bias.data() : nullptr, dtype, 0, y, threads);
        },
        [&](int64_t i, int64_t j) {
          Sum sum;
          for (int64_t at = 0; at < k; ++at) {
            const double product = element(x, dtype, i * k + at) * weight(j, at);
            sum.value += product, sum.magnitude += std::fabs(product);
          }
          const double added = has_bias ? element(bias, dtype, j) : 0;
          return Sum{sum.value + added, sum.magnitude + 8};
        });
}

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  const bool works = fp8_probe();
  std::printf("fp8_probe %d\n", works);
  if (!works) return 2;
  const int64_t shapes[][3] = {{33, 31, 29},   {5, 1, 1},     {16, 32, 96},  {17, 33, 65},
                               {64, 64, 128}, {40, 70, 513}, {100, 129, 300}};
  for (const auto& [m, n, k] : shapes)
    for (int variant = 0; variant < 16; ++variant) scaled_mm(m, n, k, variant, threads);
  scaled_mm(7, 9, 0, 0, threads);
  scaled_mm(3, 70, 200, 0, threads);     // too few rows for tiles
  scaled_mm(70, 40, 1100, 13, threads);  // several DEPTHs
  scaled_mm(1300, 40, 33, 5, threads);   // several blocks of C, up, across, and both with sums that wait
  scaled_mm(40, 2700, 33, 8, threads);
  scaled_mm(1300, 1300, 520, 1, threads);
  for (int dtype = 0; dtype < 3; ++dtype)
    for (int has_bias = 0; has_bias < 2; ++has_bias) {
      weight_mm(33, 45, 70, dtype, has_bias, threads);
      weight_mm(50, 64, 600, dtype, has_bias, threads);
      nvfp4(33, 45, 70, dtype, has_bias, threads);
      nvfp4(50, 64, 600, dtype, has_bias, threads);
    }
  std::printf("%ld products wrong\n", wrong_products);
  return wrong_products != 0;
}
