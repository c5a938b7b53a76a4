// See operations.h. What an operation refuses, it refuses in the words of its Python namesake in kernels/cpu.
#include "operations.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "bias.h"
#include "fp8_formats.h"

namespace fp8 {

namespace {

constexpr int64_t SCALE_TILE = 128;  // kernels/scaled_mm.py: SCALE_TILE
constexpr int64_t WHOLE = -1;        // kernels/quantize.py: WHOLE
constexpr int64_t COUNTS = 10;       // rows of the counts in kernels/delayed_scaling.py
constexpr float ABSENT = -1.0f;      // kernels/delayed_scaling.py: ABSENT

int64_t tiles(int64_t size) { return (size + SCALE_TILE - 1) / SCALE_TILE; }

// How many rows or columns share a scale.
int64_t lines(int64_t scales, int64_t size) { return scales == 1 || scales == size ? 1 : SCALE_TILE; }

enum Axis { TENSOR, ROW, COLUMN };  // fp8_cast.cpp: what shares a scale

int check_block(const char* op, const std::vector<int64_t>& block) {
  const int64_t allowed[][2] = {{WHOLE, WHOLE}, {1, WHOLE}, {WHOLE, 1}};
  for (int axis : {TENSOR, ROW, COLUMN})
    if (block.size() == 2 && block[0] == allowed[axis][0] && block[1] == allowed[axis][1]) return axis;
  // -1 is no size of any here.
  std::string got = "(";
  for (size_t i = 0; i < block.size(); ++i) got += (i ? ", " : "") + std::to_string(block[i]);
  refuse(op, "block", "one of (-1, -1), (1, -1), (-1, 1)", got + ")");
}

struct Blocks {
  int axis;
  int64_t rows, cols;  // of scales
};
Blocks check_quantize(const char* op, const Tensor& x, int32_t dtype, const std::vector<int64_t>& block) {
  check(op, "x", x, halves(), {{ANY, ANY}});
  check_dtype(op, "dtype", dtype, formats());
  const int axis = check_block(op, block);
  return {axis, block[0] == WHOLE ? 1 : x.sizes[0], block[1] == WHOLE ? 1 : x.sizes[1]};
}

bool is_e5m2(int32_t dtype) { return dtype == aoti_torch_dtype_float8_e5m2(); }
int32_t float32() { return aoti_torch_dtype_float32(); }

// Codes of a contiguous matrix, and the scales of its own that they are made with; quantize scales stay here.
void quantize_own(const Tensor& x, int axis, bool e5m2, uint8_t* codes, float* dequant_scale) {
  const int64_t lines = axis == TENSOR ? 1 : axis == ROW ? x.sizes[0] : x.sizes[1];
  const int threads = threads_for(x.count(), CAST_LEAST_PARALLEL);
  float one;
  std::vector<float> more;
  if (lines > 1) more.resize(size_t(lines));
  float* quant_scale = lines > 1 ? more.data() : &one;
  kernels().fp8_scales(x.data, x.code(), x.sizes[0], x.sizes[1], axis, e5m2, quant_scale, dequant_scale, threads);
  kernels().fp8_quantize(x.data, x.code(), x.sizes[0], x.sizes[1], axis, quant_scale, e5m2, codes, threads);
}

// Memory for the codes and scales of a tensor that no one else sees.
class Codes {
 public:
  Codes(int64_t codes, int64_t scales) : scales_(size_t(scales)), codes_(new uint8_t[size_t(codes)]) {}
  uint8_t* codes() { return codes_.get(); }
  float* scales() { return scales_.data(); }

 private:
  std::vector<float> scales_;
  std::unique_ptr<uint8_t[]> codes_;
};

// One operand of a product, its scales one for all or one for each line.
struct Side {
  const void* codes;
  int64_t stride, k_stride;
  int e5m2;
  const float* scales;
  int64_t scale_stride;
};

// A weight [N, K] that is quantized on the way in, or FP8 already where it has a scale.
void check_weight(const char* op, const Tensor& x, const Tensor& weight, const Optional& scale, const Optional& bias) {
  check(op, "weight", weight, scale ? formats() : halves(), {{ANY, x.sizes[1]}});
  const int64_t n = weight.sizes[0];
  if (scale) check(op, "weight_scale", *scale, fp32(), {{1, 1}, {1, n}});
  if (bias) check(op, "bias", *bias, floats(), {{n}});
}

// In the dtype of x. A weight that is quantized here gets the format and the kind of scales that x has.
Owned times_weight(const Tensor& x, const Side& left, const Tensor& weight, const Optional& scale, const Optional& bias, bool rows) {
  const int64_t m = x.sizes[0], k = x.sizes[1], n = weight.sizes[0];
  Codes codes(scale ? 0 : n * k, rows ? n : 1);
  if (!scale) quantize_own(*contiguous(weight).operator->(), rows ? ROW : TENSOR, left.e5m2, codes.codes(), codes.scales());
  const Side right = scale ? Side{weight.data, weight.strides[0], weight.strides[1], weight.is_e5m2(), scale->as<const float>(), scale->step(1)}
                           : Side{codes.codes(), k, 1, left.e5m2, codes.scales(), rows && n > 1 ? 1 : 0};
  const Bias added(bias);
  Owned out = new_tensor({m, n}, x.dtype);
  kernels().fp8_scaled_mm(m, n, k, left.codes, left.stride, left.k_stride, left.e5m2, left.scales, left.scale_stride, 0, 1, right.codes,
                          right.stride, right.k_stride, right.e5m2, right.scales, right.scale_stride, 0, 1, added.data(), out.data(),
                          x.code(), n, 0, threads_for(m * n * k, GEMM_LEAST_PARALLEL));
  return out;
}

// kernels/delayed_scaling.py: Limits
struct Limits { float saturated_above, small_below; int most_room; };
Limits limits_of(double largest) {
  if (largest == 2688.0) return {float(largest * (1.0 + 0x1p-4 / 1.75)), float(largest * 0x1p-12), 6};  // blocks of E2M1
  const bool wide = largest == 57344.0;
  const double significand = largest / std::exp2(std::floor(std::log2(largest)));
  const double half_step = (wide ? 0.125 : 0.0625) / significand;
  return {float(largest * (1.0 + half_step)), float(largest * (wide ? 0x1p-20 : 0x1p-8)), wide ? 12 : 6};
}

}  // namespace

Owned scaled_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
                const Optional& bias, int32_t out_dtype) {
  const char* op = "scaled_mm";
  check(op, "left", left, formats(), {{ANY, ANY}});
  const int64_t m = left.sizes[0], k = left.sizes[1], deep = tiles(k);
  check(op, "right", right, formats(), {{k, ANY}});
  const int64_t n = right.sizes[1];
  check(op, "scale_left", scale_left, fp32(), {{1, 1}, {m, 1}, {m, deep}, {tiles(m), deep}});
  check(op, "scale_right", scale_right, fp32(), {{1, 1}, {1, n}, {deep, n}, {deep, tiles(n)}});
  if (bias) check(op, "bias", *bias, floats(), {{n}});
  check_dtype(op, "out_dtype", out_dtype, halves());
  const Bias added(bias);
  Owned out = new_tensor({m, n}, out_dtype);
  kernels().fp8_scaled_mm(
      m, n, k, left.data, left.strides[0], left.strides[1], left.is_e5m2(), scale_left.as<const float>(), scale_left.step(0),
      scale_left.step(1), lines(scale_left.sizes[0], m), right.data, right.strides[1], right.strides[0], right.is_e5m2(),
      scale_right.as<const float>(), scale_right.step(1), scale_right.step(0), lines(scale_right.sizes[1], n), added.data(),
      out.data(), dtype_named(out_dtype).code, n, 0, threads_for(m * n * k, GEMM_LEAST_PARALLEL));
  return out;
}

Owned scaled_grouped_mm(const Tensor& left, const Tensor& right, const Tensor& offsets, const Tensor& scale_left,
                        const Tensor& scale_right, int32_t out_dtype) {
  const char* op = "scaled_grouped_mm";
  check(op, "left", left, formats(), {{ANY, ANY}});
  const int64_t m = left.sizes[0], k = left.sizes[1];
  check(op, "right", right, formats(), {{ANY, k, ANY}, {k, ANY}});
  const int64_t n = right.size(-1);
  check(op, "scale_left", scale_left, fp32(), {{1, 1}, {m, 1}});
  const bool by_rows = right.dims == 3;  // otherwise groups divide the contraction
  if (by_rows) {
    const int64_t stacked = right.sizes[0];
    check(op, "offsets", offsets, indices(), {{stacked}});
    check(op, "scale_right", scale_right, fp32(), {{1, 1}, {stacked, 1, n}, {stacked, 1, 1}});
  } else {
    check(op, "offsets", offsets, indices(), {{ANY}});
    check(op, "scale_right", scale_right, fp32(), {{1, 1}, {1, n}});
  }
  check_dtype(op, "out_dtype", out_dtype, halves());
  const Read read = contiguous(offsets, aoti_torch_dtype_int64());
  const int64_t groups = offsets.sizes[0], tokens = by_rows ? m : k, *ends = read.as<const int64_t>();
  for (int64_t g = 0, start = 0; g < groups; start = ends[g++])
    if (ends[g] < start || ends[g] > tokens) {
      std::string got = "[";
      for (int64_t i = 0; i < groups; ++i) got += (i ? ", " : "") + std::to_string(ends[i]);
      throw Refused("fp8_compile::scaled_grouped_mm: offsets of groups must not fall, and not exceed the number of tokens, " +
                    std::to_string(tokens) + "; got " + got +
                    "]. Expected where each group ends: torch.cumsum of the groups' sizes");
    }
  Owned out = by_rows ? new_tensor({m, n}, out_dtype) : new_tensor({groups, m, n}, out_dtype);
  char* results = out.as<char>();
  const int64_t bytes = dtype_named(out_dtype).code == FP32 ? 4 : 2, filled = groups && by_rows ? ends[groups - 1] : 0;
  if (by_rows && filled < m && n) std::memset(results + filled * n * bytes, 0, size_t((m - filled) * n * bytes));
  kernels().fp8_scaled_grouped_mm(
      by_rows ? 0 : 1, groups, ends, m, n, k, left.data, left.strides[0], left.strides[1], left.is_e5m2(),
      scale_left.as<const float>(), scale_left.step(0), right.data, right.step(-3), right.stride(-1), right.stride(-2),
      right.is_e5m2(), scale_right.as<const float>(), scale_right.step(-3), scale_right.step(-1), results,
      dtype_named(out_dtype).code, by_rows || groups <= 1 ? 0 : m * n, n, threads_for(1, 0));
  return out;
}

Two scales(const Tensor& x, int32_t dtype, const std::vector<int64_t>& block) {
  const Blocks blocks = check_quantize("scales", x, dtype, block);
  const Read read = contiguous(x);
  Owned quant_scale = new_tensor({blocks.rows, blocks.cols}, float32()), dequant_scale = new_tensor({blocks.rows, blocks.cols}, float32());
  kernels().fp8_scales(read->data, x.code(), x.sizes[0], x.sizes[1], blocks.axis, is_e5m2(dtype), quant_scale.as<float>(),
                       dequant_scale.as<float>(), threads_for(x.count(), CAST_LEAST_PARALLEL));
  return {std::move(quant_scale), std::move(dequant_scale)};
}

Owned cast(const Tensor& x, const Tensor& quant_scale, int32_t dtype, const std::vector<int64_t>& block) {
  const Blocks blocks = check_quantize("cast", x, dtype, block);
  check("cast", "quant_scale", quant_scale, fp32(), {{blocks.rows, blocks.cols}});
  const Read read = contiguous(x), scale = contiguous(quant_scale);
  Owned codes = new_tensor({x.sizes[0], x.sizes[1]}, dtype);
  kernels().fp8_quantize(read->data, x.code(), x.sizes[0], x.sizes[1], blocks.axis, scale.as<const float>(), is_e5m2(dtype),
                         codes.as<uint8_t>(), threads_for(x.count(), CAST_LEAST_PARALLEL));
  return codes;
}

Two quantize(const Tensor& x, int32_t dtype, const std::vector<int64_t>& block) {
  check("quantize", "x", x, halves(), {{ANY, ANY}});
  if (!formats().have(dtype) || block.size() != 2 || (block[0] != WHOLE && block[1] != WHOLE)) throw NoKernel();  // tiles
  const Blocks blocks = check_quantize("quantize", x, dtype, block);
  const Read read = contiguous(x);
  Owned codes = new_tensor({x.sizes[0], x.sizes[1]}, dtype), dequant_scale = new_tensor({blocks.rows, blocks.cols}, float32());
  quantize_own(*read.operator->(), blocks.axis, is_e5m2(dtype), codes.as<uint8_t>(), dequant_scale.as<float>());
  return {std::move(codes), std::move(dequant_scale)};
}

Owned quantize_mm(const Tensor& x, const Optional& scale, const Tensor& weight, const Optional& weight_scale,
                  const Optional& bias, bool e5m2, bool rows) {
  const char* op = "quantize_mm";
  check(op, "x", x, halves(), {{ANY, ANY}});
  if (scale) check(op, "scale", *scale, fp32(), {{}, {1}, {1, 1}});
  if (scale && e5m2) refuse(op, "e5m2", "False where scale is known", "True");
  check_weight(op, x, weight, weight_scale, bias);
  const int64_t m = x.sizes[0], k = x.sizes[1];
  const bool by_row = rows && !scale;
  Codes codes(m * k, by_row ? m : 1);
  if (scale) {
    const Read read = with_contiguous_rows(x);
    kernels().fp8_inputs(read->data, x.code(), m, k, read->strides[0], scale->as<const float>(), codes.codes(), codes.scales(),
                         threads_for(m * k, CAST_LEAST_PARALLEL));
  } else {
    quantize_own(*contiguous(x).operator->(), rows ? ROW : TENSOR, e5m2, codes.codes(), codes.scales());
  }
  const Side left{codes.codes(), k, 1, e5m2, codes.scales(), by_row && m > 1 ? 1 : 0};
  return times_weight(x, left, weight, weight_scale, bias, rows);
}

Two quantize_delayed_mm(const Tensor& x, const Tensor& quant_scale, const Tensor& weight, const Optional& weight_scale,
                        const Optional& bias, bool e5m2) {
  const char* op = "quantize_delayed_mm";
  check(op, "x", x, halves(), {{ANY, ANY}});
  check(op, "quant_scale", quant_scale, fp32(), {{}, {1}, {1, 1}});
  check_weight(op, x, weight, weight_scale, bias);
  const int64_t count = x.count();
  Codes codes(count, 1);
  Owned amax = new_tensor({1, 1}, float32());
  *codes.scales() = *quant_scale.as<const float>();
  kernels().fp8_delayed(contiguous(x)->data, x.code(), count, e5m2, codes.scales(), codes.codes(), amax.as<float>(),
                        threads_for(count, CAST_LEAST_PARALLEL));
  *codes.scales() = 1.0f / *codes.scales();
  const Side left{codes.codes(), x.sizes[1], 1, e5m2, codes.scales(), 0};
  return {times_weight(x, left, weight, weight_scale, bias, false), std::move(amax)};
}

Delayed quantize_delayed(const Tensor& x, const Tensor& quant_scale, int32_t dtype, bool wanted) {
  const char* op = "quantize_delayed";
  check(op, "x", x, halves(), {});
  check(op, "quant_scale", quant_scale, fp32(), {{}, {1}, {1, 1}});
  check_dtype(op, "dtype", dtype, formats());
  const Read read = contiguous(x);
  const auto one = [] { return new_tensor({1, 1}, float32()); };
  Delayed made{wanted ? new_tensor(x.sizes, x.dims, dtype) : new_tensor({0}, dtype), one(), one(), one()};
  float* used = made.used_scale.as<float>();
  *used = *quant_scale.as<const float>();
  const int64_t count = x.count();
  kernels().fp8_delayed(read->data, x.code(), count, is_e5m2(dtype), used, wanted ? made.codes.as<uint8_t>() : nullptr,
                        made.amax.as<float>(), threads_for(count, CAST_LEAST_PARALLEL));
  *made.dequant_scale.as<float>() = 1.0f / *used;
  return made;
}

// kernels/cpu/quantize.py: `whole_scale`
WholeScale whole_scale(const Tensor& x, const Optional& known, double largest) {
  const char* op = "whole_scale";
  check(op, "x", x, halves(), {});
  if (known) check(op, "known", *known, fp32(), {{}, {1}, {1, 1}});
  const Read read = contiguous(x);
  const auto one = [] { return new_tensor({1, 1}, float32()); };
  WholeScale made{one(), one(), one()};
  const int64_t count = x.count();
  float unused = 1.0f;  // any scale but 0, which asks for one
  kernels().fp8_delayed(read->data, x.code(), count, 0, &unused, nullptr, made.amax.as<float>(), threads_for(count, CAST_LEAST_PARALLEL));
  const float amax = *made.amax.as<const float>(), before = known ? *known->as<const float>() : 0.0f;
  constexpr float most = std::numeric_limits<float>::max();
  const bool usable = amax > 0 && amax <= most;
  // Two roundings, as a number over a tensor has them in PyTorch: reciprocal, then product.
  const float own = usable ? std::min((1.0f / amax) * float(largest), most) : 1.0f;
  const float scale = before > 0 ? before : own;
  *made.scale.as<float>() = scale;
  *made.inverse.as<float>() = 1.0f / scale;
  return made;
}

void update_scales(const Tensor& amaxes, const Tensor& history, const Tensor& scales, const Tensor& counts,
                   const Tensor& room, const Tensor& known, double largest, const std::string& algorithm, int64_t interval) {
  const char* op = "update_scales_";
  check(op, "history", history, fp32(), {{ANY, ANY}}, CONTIGUOUS);
  const int64_t slots = history.sizes[0], length = history.sizes[1];
  check_at_least(op, "history.shape[1]", length, 1);
  check(op, "amaxes", amaxes, fp32(), {{slots}}, CONTIGUOUS);
  check(op, "scales", scales, fp32(), {{2, slots}}, CONTIGUOUS);
  check(op, "counts", counts, only(aoti_torch_dtype_int32()), {{COUNTS, slots}}, CONTIGUOUS);
  check(op, "room", room, only(aoti_torch_dtype_int32()), {{1}}, CONTIGUOUS);
  check(op, "known", known, fp32(), {{2, slots}}, CONTIGUOUS);
  if (largest != 448.0 && largest != 57344.0 && largest != 240.0 && largest != 2688.0) {
    std::string got = std::to_string(largest);
    got.erase(std::min(got.find_last_not_of('0') + 1, got.size()));
    refuse(op, "largest", "one of 448.0, 57344.0, 240.0, 2688.0", got.back() == '.' ? got + "0" : got);
  }
  const int which = check_word(op, "algorithm", algorithm, {"max", "most_recent", "p99", "frozen"});
  check_at_least(op, "interval", interval, 1);
  const Limits limits = limits_of(largest);
  kernels().fp8_update_scales(slots, length, amaxes.as<float>(), history.as<float>(), scales.as<float>(), counts.as<int32_t>(),
                              room.as<int32_t>(), known.as<float>(), float(largest), limits.saturated_above,
                              limits.small_below, limits.most_room, which, int(std::min<int64_t>(interval, INT32_MAX)));
}

void record_amaxes(const char* op, const Tensor& amaxes, const std::vector<Tensor>& recorded,
                   const std::vector<int64_t>& rows, bool accumulate) {
  check(op, "amaxes", amaxes, fp32(), {{ANY}}, CONTIGUOUS);
  const int64_t slots = amaxes.sizes[0];
  if (recorded.size() != rows.size())
    refuse(op, "rows", "a row for each of the " + std::to_string(recorded.size()) + " tensors in recorded", std::to_string(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    check(op, "recorded", recorded[i], fp32(), {{}, {1}, {1, 1}});
    if (rows[i] < 0 || rows[i] >= slots)
      refuse(op, "rows", "rows from 0 to " + std::to_string(slots - 1), std::to_string(rows[i]));
  }
  float* table = amaxes.as<float>();
  if (!accumulate) std::fill(table, table + slots, ABSENT);
  for (size_t i = 0; i < rows.size(); ++i) {
    // As integers a NaN is above all numbers; |x| is never negative, the mark for an absent slot is.
    int32_t before, now;
    std::memcpy(&before, table + rows[i], sizeof before);
    std::memcpy(&now, recorded[i].data, sizeof now);
    now = std::max(before, now);
    std::memcpy(table + rows[i], &now, sizeof now);
  }
}

Two quantize_inputs(const Tensor& x, const Optional& scale) {
  const char* op = "quantize_inputs";
  check(op, "x", x, floats(), {{ANY, ANY}});
  if (scale) check(op, "scale", *scale, fp32(), {{}, {1}, {1, 1}});
  if (x.code() < 0) throw NoKernel();
  const int64_t rows = x.sizes[0], cols = x.sizes[1];
  const Read read = with_contiguous_rows(x);
  Owned codes = new_tensor({rows, cols}, aoti_torch_dtype_float8_e4m3fn()), dequant_scale = new_tensor({scale ? 1 : rows, 1}, float32());
  kernels().fp8_inputs(read->data, x.code(), rows, cols, read->strides[0], scale ? scale->as<const float>() : nullptr,
                       codes.as<uint8_t>(), dequant_scale.as<float>(), threads_for(rows * cols, CAST_LEAST_PARALLEL));
  return {std::move(codes), std::move(dequant_scale)};
}

}  // namespace fp8
