// Scales and casts to FP8 for CPUs. No torch headers: it compiles in about two seconds.
//
// A matrix is [rows, cols], row-major. `axis` says what shares a scale: WHOLE the tensor, ROW a row, COL a column.
// Compile with -ffp-contract=off: rounding relies on each operation rounding by itself.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "fp8_formats.h"
#include "kernels.h"
#include "threads.h"

namespace {

using namespace fp8;

enum Axis { WHOLE = 0, ROW = 1, COL = 2 };

constexpr float AMAX_FLOOR = 1e-12f;  // kernels/quantize.py: AMAX_FLOOR
constexpr int64_t CHUNK = 4096;  // elements a thread takes at a time: a few pages, so that it stays in L1/L2

// Magnitudes are compared as integers: NaN is above Inf is above all numbers, so that it wins.
template <class In>
uint32_t largest_bits(const typename In::type* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, bits(In::load(x[i])) & 0x7fffffffu);
  return most;
}

template <class In>
void amax(const typename In::type* x, int64_t rows, int64_t cols, int axis, float* out, int threads) {
  if (axis == ROW) {
    for_each(rows, 1, threads, [=](int64_t i) { out[i] = value(largest_bits<In>(x + i * cols, cols)); });
  } else if (axis == COL) {
    for_each(cols, 256, threads, [=](int64_t first) {
      int64_t width = std::min<int64_t>(256, cols - first);
      uint32_t most[256] = {};
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < width; ++j)
          most[j] = std::max(most[j], bits(In::load(x[i * cols + first + j])) & 0x7fffffffu);
      for (int64_t j = 0; j < width; ++j) out[first + j] = value(most[j]);
    });
  } else {
    const int64_t count = rows * cols;
    const auto chunk = [=](int64_t first) { return largest_bits<In>(x + first, std::min(CHUNK, count - first)); };
    out[0] = value(largest_of(count, CHUNK, threads, chunk));
  }
}

// kernels/quantize.py: `scales`. The quantize scale of an amax, with the inverse beside it.
template <class To>
float own_scale(float amax, float* dequant_scale) {
  amax = amax < AMAX_FLOOR ? AMAX_FLOOR : amax;  // a comparison that leaves NaN alone
  // Two roundings, as a number over a tensor has them in PyTorch: reciprocal, then product.
  const float quant_scale = (1.0f / amax) * To::max;
  *dequant_scale = 1.0f / quant_scale + amax * 0.0f;
  return quant_scale;
}

template <class In, class To>
void scales(const void* from, int64_t rows, int64_t cols, int axis, float* quant_scale, float* dequant_scale, int threads) {
  amax<In>(static_cast<const typename In::type*>(from), rows, cols, axis, quant_scale, threads);
  const int64_t count = axis == ROW ? rows : axis == COL ? cols : 1;
  for (int64_t i = 0; i < count; ++i) quant_scale[i] = own_scale<To>(quant_scale[i], dequant_scale + i);
}

// Codes of a run of elements; returns the largest magnitude among them, as bits.
template <class In, class To, bool FINITE, class Scale>
uint32_t encode(const typename In::type* __restrict__ x, int64_t count, Scale scale, uint8_t* __restrict__ codes) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float one = In::load(x[i]);
    most = std::max(most, bits(one) & 0x7fffffffu);
    codes[i] = To::template quantize<FINITE>(one, scale(i));
  }
  return most;
}

// The same by one scale, a piece after the other: what is not finite is rare, and its piece is done again.
template <class In, class To>
uint32_t encode(const typename In::type* x, int64_t count, float scale, uint8_t* codes) {
  const auto same = [scale](int64_t) { return scale; };
  const bool finite = std::isfinite(scale);
  uint32_t most = 0;
  for (int64_t first = 0; first < count; first += CHUNK) {
    const int64_t width = std::min(CHUNK, count - first);
    uint32_t seen = finite ? encode<In, To, true>(x + first, width, same, codes + first) : INFINITE;
    if (seen >= INFINITE) seen = encode<In, To, false>(x + first, width, same, codes + first);
    most = std::max(most, seen);
  }
  return most;
}

template <class In, class To>
void quantize(const void* from, int64_t rows, int64_t cols, int axis, const float* scale, uint8_t* codes, int threads) {
  auto* x = static_cast<const typename In::type*>(from);
  if (axis == WHOLE) {  // a matrix of one row
    const int64_t count = rows * cols;
    const float s = scale[0];
    for_each(count, CHUNK, threads,
             [=](int64_t first) { encode<In, To>(x + first, std::min(CHUNK, count - first), s, codes + first); });
    return;
  }
  for_each(rows, 1, threads, [=](int64_t i) {
    if (axis == ROW)
      encode<In, To>(x + i * cols, cols, scale[i], codes + i * cols);
    else
      encode<In, To, false>(x + i * cols, cols, [scale](int64_t j) { return scale[j]; }, codes + i * cols);
  });
}

// Delayed scaling, one read of x: its codes by the scale given, unless `codes` is null, and its amax. A scale of 0 says
// that there is none yet; then x is read twice and gets the scale of its own amax.
template <class In, class To>
void delayed(const void* from, int64_t count, float* scale, uint8_t* codes, float* largest, int threads) {
  auto* x = static_cast<const typename In::type*>(from);
  constexpr float most = std::numeric_limits<float>::max();
  if (*scale == 0) {
    amax<In>(x, 1, count, WHOLE, largest, threads);
    bool usable = *largest > 0 && *largest <= most;
    // Two roundings, as a number over a tensor has them in PyTorch: reciprocal, then product.
    *scale = usable ? std::min((1.0f / *largest) * To::max, most) : 1.0f;
  }
  const float s = *scale;
  *largest = value(largest_of(count, CHUNK, threads, [=](int64_t first) {
    const int64_t width = std::min(CHUNK, count - first);
    return codes ? encode<In, To>(x + first, width, s, codes + first) : largest_bits<In>(x + first, width);
  }));
}

// Inputs of a product (kernels/fp8_inputs.py): all rows by the one scale that is known, or each by its own amax.
template <class In>
void inputs(const void* from, int64_t rows, int64_t cols, int64_t stride, const float* known, uint8_t* codes,
            float* scales, int threads) {
  auto* x = static_cast<const typename In::type*>(from);
  if (known) *scales = *known;
  for_each(rows, 1, threads, [=](int64_t i) {
    const auto* row = x + i * stride;
    float s = known ? 1.0f / *known : 0.0f;
    if (!known) s = own_scale<E4M3>(value(largest_bits<In>(row, cols)), scales + i);
    encode<In, E4M3>(row, cols, s, codes + i * cols);
  });
}

// Work on elements of any of the three dtypes, to either format.
template <template <class, class> class Work, class... Arguments>
void dispatch(int dtype, int e5m2, Arguments... arguments) {
  if (dtype == FP32) e5m2 ? Work<Float32, E5M2>::run(arguments...) : Work<Float32, E4M3>::run(arguments...);
  if (dtype == BF16) e5m2 ? Work<BFloat16, E5M2>::run(arguments...) : Work<BFloat16, E4M3>::run(arguments...);
  if (dtype == FP16) e5m2 ? Work<Float16, E5M2>::run(arguments...) : Work<Float16, E4M3>::run(arguments...);
}
template <class In, class To> struct OwnScales {
  template <class... A> static void run(A... a) { scales<In, To>(a...); }
};
template <class In, class To> struct Quantize {
  template <class... A> static void run(A... a) { quantize<In, To>(a...); }
};
template <class In, class To> struct Delayed {
  template <class... A> static void run(A... a) { delayed<In, To>(a...); }
};

}  // namespace

extern "C" {

void fp8_scales(const void* x, int dtype, int64_t rows, int64_t cols, int axis, int e5m2, float* quant_scale,
                float* dequant_scale, int threads) {
  dispatch<OwnScales>(dtype, e5m2, x, rows, cols, axis, quant_scale, dequant_scale, usable_threads(threads, rows * cols));
}

void fp8_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int axis, const float* scale, int e5m2,
                  uint8_t* codes, int threads) {
  dispatch<Quantize>(dtype, e5m2, x, rows, cols, axis, scale, codes, usable_threads(threads, rows * cols));
}

void fp8_inputs(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, const float* known,
                uint8_t* codes, float* scales, int threads) {
  threads = usable_threads(threads, rows * cols);
  if (dtype == FP32) inputs<Float32>(x, rows, cols, stride, known, codes, scales, threads);
  if (dtype == BF16) inputs<BFloat16>(x, rows, cols, stride, known, codes, scales, threads);
  if (dtype == FP16) inputs<Float16>(x, rows, cols, stride, known, codes, scales, threads);
}

void fp8_delayed(const void* x, int dtype, int64_t count, int e5m2, float* scale, uint8_t* codes,
                 float* largest, int threads) {
  dispatch<Delayed>(dtype, e5m2, x, count, scale, codes, largest, usable_threads(threads, count));
}

}  // extern "C"
