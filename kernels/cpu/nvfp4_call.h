// A product with an NVFP4 weight: what it is given, how x is read, where a group's codes lie, how y is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "fp8_formats.h"

namespace fp8 {

constexpr int NVFP4_BLOCK = 16;                       // elements of K that share a scale
constexpr int NVFP4_GROUP = 16;                       // rows of w that are interleaved
constexpr int NVFP4_BYTES = NVFP4_GROUP * 8;          // codes of a block of a group

struct Nvfp4Call {
  const void* x;
  int64_t m, k, stride;  // k: of x, from which on there are zeros
  int dtype;
  const uint8_t *codes, *scales;
  int64_t n, blocks;
  double scale;  // of sums: the global scale, and what the decoder left out
  const void* bias;
  int bias_dtype;
  void* y;
  int threads;
};

// Memory that begins at a cache line.
struct FreeLines { void operator()(void* p) const { ::operator delete[](p, std::align_val_t(64)); } };
template <class T> using Lines = std::unique_ptr<T[], FreeLines>;
template <class T> Lines<T> lines(int64_t size) {
  return Lines<T>(static_cast<T*>(::operator new[](size_t(size) * sizeof(T), std::align_val_t(64))));
}

template <class From>
inline void convert(const void* from, int64_t at, int64_t count, float* to) {
  const auto* p = static_cast<const typename From::type*>(from) + at;
  for (int64_t i = 0; i < count; ++i) to[i] = From::load(p[i]);
}
template <class To>
inline void convert(const float* from, int64_t count, void* to, int64_t at) {
  auto* p = static_cast<typename To::type*>(to) + at;
  for (int64_t i = 0; i < count; ++i) p[i] = To::store(from[i]);
}
[[gnu::noinline]] inline void to_fp32(const void* from, int dtype, int64_t at, int64_t count, float* to) {
  if (dtype == FP32) convert<Float32>(from, at, count, to);
  else if (dtype == BF16) convert<BFloat16>(from, at, count, to);
  else convert<Float16>(from, at, count, to);
}

// `count` elements of a row of x in FP32, zeros behind its end and in rows behind the last.
inline void read_x(const Nvfp4Call& call, int64_t row, int64_t k, int64_t count, float* to) {
  const int64_t there = row < call.m ? std::clamp<int64_t>(call.k - k, 0, count) : 0;
  to_fp32(call.x, call.dtype, row * call.stride + k, there, to);
  std::fill(to + there, to + count, 0.f);
}

// y[row, col...] = sums * scale + bias, rounded to y's dtype.
[[gnu::noinline]] inline void write_y(const Nvfp4Call& call, int64_t row, int64_t col, int64_t count, const float* sums) {
  constexpr int64_t MOST = 64;
  float out[MOST], bias[MOST];
  for (int64_t i = 0; i < count; ++i) out[i] = float(sums[i] * call.scale);
  if (call.bias) {
    to_fp32(call.bias, call.bias_dtype, col, count, bias);
    for (int64_t i = 0; i < count; ++i) out[i] += bias[i];
  }
  const int64_t at = row * call.n + col;
  if (call.dtype == FP32) convert<Float32>(out, count, call.y, at);
  else if (call.dtype == BF16) convert<BFloat16>(out, count, call.y, at);
  else convert<Float16>(out, count, call.y, at);
}

// Where a group's codes and scales lie. The last group, if it has fewer rows, is spread to 16 lanes first.
class Nvfp4Groups {
 public:
  [[gnu::noinline]] explicit Nvfp4Groups(const Nvfp4Call& call)
      : call_(call), whole_(call.n / NVFP4_GROUP), count_((call.n + NVFP4_GROUP - 1) / NVFP4_GROUP) {
    if (whole_ == count_) return;
    const int64_t rows = call.n % NVFP4_GROUP, blocks = call.blocks, size = blocks * (NVFP4_BYTES + NVFP4_GROUP);
    last_ = lines<uint8_t>(size);
    std::memset(last_.get(), 0, size);
    const uint8_t* codes = call.codes + whole_ * blocks * NVFP4_BYTES;
    const uint8_t* scales = call.scales + whole_ * blocks * NVFP4_GROUP;
    for (int64_t word = 0; word < 2 * blocks; ++word)
      std::memcpy(last_.get() + word * 4 * NVFP4_GROUP, codes + word * 4 * rows, 4 * rows);
    for (int64_t block = 0; block < blocks; ++block)
      std::memcpy(last_.get() + blocks * NVFP4_BYTES + block * NVFP4_GROUP, scales + block * rows, rows);
  }
  int64_t count() const { return count_; }
  const uint8_t* codes(int64_t group, int64_t block = 0) const {
    const uint8_t* first = group < whole_ ? call_.codes + group * call_.blocks * NVFP4_BYTES : last_.get();
    return first + block * NVFP4_BYTES;
  }
  const uint8_t* scales(int64_t group, int64_t block = 0) const {
    const uint8_t* spread = last_.get() + call_.blocks * NVFP4_BYTES;
    return (group < whole_ ? call_.scales + group * call_.blocks * NVFP4_GROUP : spread) + block * NVFP4_GROUP;
  }

 private:
  const Nvfp4Call& call_;
  int64_t whole_, count_;
  Lines<uint8_t> last_;
};

void nvfp4_prefill(const Nvfp4Call& call);  // nvfp4_prefill.cpp

}  // namespace fp8
