// The operations of block formats, MXFP8 and NVFP4 of training; see operations.h. What one refuses, it refuses in the words
// of kernels/mxfp8.py or kernels/nvfp4_training.py.
#include "bias.h"
#include "operations.h"

namespace fp8 {

namespace {

constexpr int64_t MX = 32;     // kernels/mxfp8.py: SIZE
constexpr int64_t NVFP4 = 16;  // kernels/nvfp4_training.py: SIZE

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// How many rows or columns share a scale.
int64_t shared_by(int64_t size, int64_t scales, int64_t block) { return size == scales ? 1 : block; }

int threads_of_product(int64_t m, int64_t n, int64_t k) { return threads_for(m * n * k, GEMM_LEAST_PARALLEL); }

using Pair = std::pair<int64_t, int64_t>;
void check_block(const char* op, const std::vector<int64_t>& block, std::initializer_list<Pair> allowed) {
  const auto text = [](int64_t rows, int64_t cols) { return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")"; };
  std::string all;
  for (const Pair& one : allowed) {
    if (block.size() == 2 && block[0] == one.first && block[1] == one.second) return;
    all += (all.empty() ? "" : ", ") + text(one.first, one.second);
  }
  refuse(op, "block", "one of " + all, block.size() == 2 ? text(block[0], block[1]) : std::to_string(block.size()) + " sizes");
}

}  // namespace

Owned mx_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
            const Optional& bias, int32_t out_dtype) {
  const char* op = "mx_mm";
  const Dtypes e4m3 = only(aoti_torch_dtype_float8_e4m3fn()), e8m0 = only(aoti_torch_dtype_uint8());
  check(op, "left", left, e4m3, {{ANY, ANY}});
  const int64_t m = left.sizes[0], k = left.sizes[1], deep = blocks_of(k, MX);
  check(op, "right", right, e4m3, {{k, ANY}});
  const int64_t n = right.sizes[1];
  check(op, "scale_left", scale_left, e8m0, {{m, deep}, {blocks_of(m, MX), deep}});
  check(op, "scale_right", scale_right, e8m0, {{deep, n}, {deep, blocks_of(n, MX)}});
  if (bias) check(op, "bias", *bias, floats(), {{n}});
  check_dtype(op, "out_dtype", out_dtype, halves());
  const Bias added(bias);
  Owned out = new_tensor({m, n}, out_dtype);
  kernels().fp8_mx_mm(m, n, k, left.data, left.strides[0], left.strides[1], scale_left.as<const uint8_t>(),
                      scale_left.strides[0], scale_left.strides[1], shared_by(m, scale_left.sizes[0], MX), right.data,
                      right.strides[1], right.strides[0], scale_right.as<const uint8_t>(), scale_right.strides[1],
                      scale_right.strides[0], shared_by(n, scale_right.sizes[1], MX), added.data(), out.data(),
                      dtype_named(out_dtype).code, n, threads_of_product(m, n, k));
  return out;
}

Two quantize_mx(const Tensor& x, const std::vector<int64_t>& block) {
  check("quantize_mx", "x", x, halves(), {{ANY, ANY}});
  check_block("quantize_mx", block, {{1, MX}, {MX, 1}, {MX, MX}});
  const Read read = with_contiguous_rows(x);
  const int64_t rows = x.sizes[0], cols = x.sizes[1];
  Owned codes = new_tensor({rows, cols}, aoti_torch_dtype_float8_e4m3fn());
  Owned scales = new_tensor({blocks_of(rows, block[0]), blocks_of(cols, block[1])}, aoti_torch_dtype_uint8());
  kernels().fp8_mx_quantize(read->data, x.code(), rows, cols, read->strides[0], block[0], block[1], codes.as<uint8_t>(),
                            scales.as<uint8_t>(), threads_for(x.count(), CAST_LEAST_PARALLEL));
  return {std::move(codes), std::move(scales)};
}

Owned nvfp4_train_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
                     const Tensor& dequant_left, const Tensor& dequant_right, const Optional& bias, int32_t out_dtype) {
  const char* op = "nvfp4_train_mm";
  const Dtypes pairs = only(aoti_torch_dtype_uint8()), e4m3 = only(aoti_torch_dtype_float8_e4m3fn());
  check(op, "left", left, pairs, {{ANY, ANY}});
  const int64_t m = left.sizes[0], half = left.sizes[1], deep = half / (NVFP4 / 2);
  if (half % (NVFP4 / 2)) refuse(op, "left", "a multiple of 8 bytes per row", std::to_string(half));
  check(op, "right", right, pairs, {{ANY, half}});
  const int64_t n = right.sizes[0];
  check(op, "scale_left", scale_left, e4m3, {{m, deep}, {blocks_of(m, NVFP4), deep}});
  check(op, "scale_right", scale_right, e4m3, {{n, deep}, {blocks_of(n, NVFP4), deep}});
  check(op, "dequant_left", dequant_left, fp32(), {{1, 1}});
  check(op, "dequant_right", dequant_right, fp32(), {{1, 1}});
  if (bias) check(op, "bias", *bias, floats(), {{n}});
  check_dtype(op, "out_dtype", out_dtype, halves());
  const Read a = with_contiguous_rows(left), b = with_contiguous_rows(right);
  const Bias added(bias);
  Owned out = new_tensor({m, n}, out_dtype);
  kernels().fp8_nvfp4_train_mm(m, n, 2 * half, a.as<const uint8_t>(), a->strides[0], scale_left.as<const uint8_t>(),
                               scale_left.strides[0], scale_left.strides[1], shared_by(m, scale_left.sizes[0], NVFP4),
                               b.as<const uint8_t>(), b->strides[0], scale_right.as<const uint8_t>(), scale_right.strides[0],
                               scale_right.strides[1], shared_by(n, scale_right.sizes[0], NVFP4), dequant_left.as<const float>(),
                               dequant_right.as<const float>(), added.data(), out.data(), dtype_named(out_dtype).code, n,
                               threads_of_product(m, n, 2 * half));
  return out;
}

Two quantize_nvfp4(const Tensor& x, const Tensor& enc, const std::vector<int64_t>& block, bool transpose, bool rotated,
                   const Optional& seed, int64_t stream, bool four_over_six) {
  const char* op = "quantize_nvfp4";
  check(op, "x", x, halves(), {{ANY, ANY}});
  check(op, "enc", enc, fp32(), {{1, 1}});
  check_block(op, block, {{1, NVFP4}, {NVFP4, NVFP4}});
  if (seed) check(op, "seed", *seed, only(aoti_torch_dtype_int64()), {{1}});
  // A transposed view of contiguous rows is read where it is, the other way round.
  const bool by_columns = x.size(1) > 1 && x.stride(1) != 1 && (x.size(0) <= 1 || x.stride(0) == 1);
  const Read read(x, by_columns || x.size(1) <= 1 || x.stride(1) == 1, x.dtype);
  const int64_t rows = x.sizes[transpose ? 1 : 0], k = x.sizes[transpose ? 0 : 1], deep = blocks_of(k, NVFP4);
  Owned codes = new_tensor({rows, deep * (NVFP4 / 2)}, aoti_torch_dtype_uint8());
  Owned scales = new_tensor({blocks_of(rows, block[0]), deep}, aoti_torch_dtype_float8_e4m3fn());
  kernels().fp8_nvfp4_quantize(read->data, x.code(), rows, k, read->strides[by_columns ? 1 : 0], transpose != by_columns,
                               *enc.as<const float>(), block[0] == NVFP4, rotated, seed ? seed->as<const int64_t>() : nullptr,
                               stream, four_over_six, codes.as<uint8_t>(), scales.as<uint8_t>(),
                               threads_for(x.count(), CAST_LEAST_PARALLEL));
  return {std::move(codes), std::move(scales)};
}

}  // namespace fp8
