// Products with packed weights, of layers and of experts, and their gradients; see operations.h. What an operation
// refuses, it refuses in the words of its Python namesake in kernels/cpu.
#include "bias.h"
#include "operations.h"

namespace fp8 {

namespace {

constexpr int64_t BLOCK = 16;  // kernels/cpu/nvfp4.py: BLOCK

// Block scales of an interleaved weight, or of a stack of them.
void check_block_scales(const char* op, const Tensor& codes, const Tensor& block_scales, bool stack) {
  const int64_t half = codes.size(-1);
  const Shape shape = stack ? Shape{codes.sizes[0], codes.sizes[1], half / 8} : Shape{codes.sizes[0], half / 8};
  check(op, "block_scales", block_scales, only(aoti_torch_dtype_float8_e4m3fn()), {shape}, CONTIGUOUS);
}

// grad [M, N] by an interleaved weight of `columns` columns, or a stack of them.
void check_nvfp4_grad(const char* op, const Tensor& grad, const Tensor& codes, const Tensor& block_scales, int64_t columns, bool stack) {
  const int64_t n = grad.sizes[1];
  check(op, "codes", codes, only(aoti_torch_dtype_uint8()), {stack ? Shape{ANY, n, ANY} : Shape{n, ANY}}, CONTIGUOUS);
  const int64_t half = codes.size(-1), more = 2 * half - columns;
  if (half % 8 || more < 0 || more >= BLOCK)
    refuse(op, "columns", "the K of a weight whose codes are [..., K/2], K padded to a multiple of 16: codes are " + shape_of(codes),
           std::to_string(columns));
  check_block_scales(op, codes, block_scales, stack);
}

// x [M, K] by an interleaved weight, or a stack of them.
void check_nvfp4_weight(const char* op, const Tensor& x, const Tensor& codes, const Tensor& block_scales, bool stack) {
  check(op, "codes", codes, only(aoti_torch_dtype_uint8()), {stack ? Shape{ANY, ANY, ANY} : Shape{ANY, ANY}}, CONTIGUOUS);
  const int64_t half = codes.size(-1), more = 2 * half - x.sizes[1];
  if (half % 8 || more < 0 || more >= BLOCK)
    throw Refused(std::string("fp8_compile::") + op +
                  ": codes: x [M, K] times an NVFP4 weight of codes [..., K/2]: expected one K, in the weight padded to a "
                  "multiple of 16, got x " + shape_of(x) + " and codes " + shape_of(codes));
  check_block_scales(op, codes, block_scales, stack);
}

// kernels/experts.py: ROWS
bool check_grouped(const char* op, const std::string& rows) { return check_word(op, "rows", rows, {"grouped", "gathered"}) == 0; }

void check_which(const char* op, const Tensor& x, const Tensor& codes, const Tensor& which, bool grouped) {
  check(op, "which", which, indices(), {{grouped ? codes.sizes[0] : x.sizes[0]}});
}

[[noreturn]] void refuse_which(const char* op, int64_t experts, int64_t m, const int64_t* which, int64_t count, bool grouped) {
  std::string got = "[";
  for (int64_t i = 0; i < count; ++i) got += (i ? ", " : "") + std::to_string(which[i]);
  const std::string expected =
      grouped ? "ends of " + std::to_string(experts) + " groups, none before the one in front of it or behind row " + std::to_string(m)
              : "experts from 0 to " + std::to_string(experts - 1);
  throw Refused(std::string("fp8_compile::") + op + ": which: an index says which expert multiplies a row: expected " + expected +
                ", got " + got + "]");
}

// Rows of x by the experts that `which` names. run(x, which, y) is not 0 where it names some that are not there.
template <class Run>
Owned by_experts(const char* op, const Tensor& x, int64_t columns, const Tensor& which, int64_t experts, bool grouped, const Run& run) {
  const Read read = with_contiguous_rows(x), index = contiguous(which, aoti_torch_dtype_int64());
  Owned y = new_tensor({x.sizes[0], columns}, x.dtype);
  if (run(*read.operator->(), index.as<const int64_t>(), y.data()))
    refuse_which(op, experts, x.sizes[0], index.as<const int64_t>(), which.sizes[0], grouped);
  return y;
}

}  // namespace

Owned fp8_mm(const Tensor& x, const Tensor& codes, const Tensor& scales, const Optional& bias) {
  const char* op = "fp8_mm";
  check(op, "x", x, floats(), {{ANY, ANY}});
  const int64_t m = x.sizes[0], k = x.sizes[1];
  check(op, "codes", codes, all_formats(), {{ANY, k}});
  const int64_t n = codes.sizes[0];
  check(op, "scales", scales, fp32(), {{n}});
  if (bias) check(op, "bias", *bias, floats(), {{n}});
  if (x.code() < 0 || codes.dtype != aoti_torch_dtype_float8_e4m3fn()) throw NoKernel();
  const Read read = with_contiguous_rows(x), weight = contiguous(codes), by = contiguous(scales);
  const Bias added(bias);
  Owned y = new_tensor({m, n}, x.dtype);
  kernels().fp8_weight_mm(read->data, m, k, read->strides[0], x.code(), weight.as<const uint8_t>(), by.as<const float>(), n,
                          added.data(), y.data(), threads_for(m * n * k, FP8_WEIGHT_LEAST_PARALLEL));
  return y;
}

Owned nvfp4_mm(const Tensor& x, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
               const Optional& bias, const std::optional<std::string>& activations, const std::string& layout) {
  const char* op = "nvfp4_mm";
  const int kind = check_word(op, "layout", layout, {"standard", "interleaved", "swizzled"});
  if (kind != 1 || x.dtype == aoti_torch_dtype_float64()) throw NoKernel();
  check(op, "x", x, halves(), {{ANY, ANY}});
  check_nvfp4_weight(op, x, codes, block_scales, false);
  check(op, "global_scale", global_scale, floats(), {{}, {1}, {1, 1}});
  const int64_t m = x.sizes[0], k = x.sizes[1], n = codes.sizes[0];
  if (bias) check(op, "bias", *bias, halves(), {{n}}, CONTIGUOUS);
  if (activations && *activations != "int8")
    throw Refused("fp8_compile::nvfp4_mm: activations: expected None (exact) or 'int8' for weights that are interleaved, got "
                  "activations='" + *activations + "'");
  const Read read = with_contiguous_rows(x);
  Owned y = new_tensor({m, n}, x.dtype);
  const int64_t useful = 1 + m * n * k / NVFP4_LEAST_PARALLEL;
  kernels().nvfp4_matmul(read->data, m, k, read->strides[0], x.code(), codes.data, block_scales.data, n, 2 * codes.sizes[1],
                         float_at(global_scale, 0), bias ? bias->data : nullptr, bias ? bias->code() : 0, activations ? 1 : 0,
                         y.data(), int(std::min<int64_t>(useful, threads_for(useful, 2))));
  return y;
}

Owned nvfp4_experts_mm(const Tensor& x, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                       const Tensor& which, const std::string& rows, const std::string& layout) {
  const char* op = "nvfp4_experts_mm";
  const int kind = check_word(op, "layout", layout, {"standard", "interleaved", "swizzled"});
  const bool grouped = check_grouped(op, rows);
  if (kind != 1) throw NoKernel();
  check(op, "x", x, floats(), {{ANY, ANY}});
  check_nvfp4_weight(op, x, codes, block_scales, true);
  const int64_t m = x.sizes[0], k = x.sizes[1], experts = codes.sizes[0], n = codes.sizes[1];
  check(op, "global_scale", global_scale, floats(), {{experts}});
  check_which(op, x, codes, which, grouped);
  if (x.code() < 0) throw NoKernel();
  const Read global = contiguous(global_scale, aoti_torch_dtype_float32());
  return by_experts(op, x, n, which, experts, grouped, [&](const Tensor& read, const int64_t* index, void* y) {
    return kernels().nvfp4_experts(read.data, m, k, read.strides[0], x.code(), codes.as<const uint8_t>(),
                                   block_scales.as<const uint8_t>(), global.as<const float>(), experts, n, 2 * codes.sizes[2], index,
                                   grouped, y, threads_for(1, 0));
  });
}

Owned fp8_experts_mm(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& which, const std::string& rows) {
  const char* op = "fp8_experts_mm";
  const bool grouped = check_grouped(op, rows);
  check(op, "x", x, floats(), {{ANY, ANY}});
  const int64_t m = x.sizes[0], k = x.sizes[1];
  check(op, "codes", codes, all_formats(), {{ANY, ANY, k}});
  const int64_t experts = codes.sizes[0], n = codes.sizes[1];
  check(op, "scales", scales, fp32(), {{experts, n}});
  check_which(op, x, codes, which, grouped);
  if (x.code() < 0 || codes.dtype != aoti_torch_dtype_float8_e4m3fn()) throw NoKernel();
  const Read weights = contiguous(codes), by = contiguous(scales);
  return by_experts(op, x, n, which, experts, grouped, [&](const Tensor& read, const int64_t* index, void* y) {
    return kernels().fp8_experts(read.data, m, k, read.strides[0], x.code(), weights.as<const uint8_t>(), by.as<const float>(), experts,
                                 n, index, grouped, y, threads_for(1, 0));
  });
}

Owned fp8_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& scales) {
  const char* op = "fp8_mm_grad";
  check(op, "grad", grad, floats(), {{ANY, ANY}});
  const int64_t m = grad.sizes[0], n = grad.sizes[1];
  check(op, "codes", codes, all_formats(), {{n, ANY}});
  const int64_t k = codes.sizes[1];
  check(op, "scales", scales, fp32(), {{n}});
  if (grad.code() < 0 || codes.dtype != aoti_torch_dtype_float8_e4m3fn()) throw NoKernel();
  const Read read = with_contiguous_rows(grad), weight = contiguous(codes), by = contiguous(scales);
  Owned out = new_tensor({m, k}, grad.dtype);
  kernels().fp8_weight_grad_input(read->data, m, n, read->strides[0], grad.code(), weight.as<const uint8_t>(), by.as<const float>(), k,
                                  out.data(), threads_for(m * n * k, FP8_WEIGHT_LEAST_PARALLEL));
  return out;
}

Owned nvfp4_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                    int64_t columns, const std::string& layout) {
  const char* op = "nvfp4_mm_grad";
  const int kind = check_word(op, "layout", layout, {"standard", "interleaved", "swizzled"});
  if (kind != 1 || grad.dtype == aoti_torch_dtype_float64()) throw NoKernel();
  check(op, "grad", grad, halves(), {{ANY, ANY}});
  check_nvfp4_grad(op, grad, codes, block_scales, columns, false);
  check(op, "global_scale", global_scale, floats(), {{}, {1}, {1, 1}});
  const int64_t m = grad.sizes[0], n = grad.sizes[1];
  const Read read = with_contiguous_rows(grad);
  Owned out = new_tensor({m, columns}, grad.dtype);
  const int64_t useful = 1 + m * n * columns / NVFP4_LEAST_PARALLEL;
  kernels().nvfp4_grad_input(read->data, m, n, read->strides[0], grad.code(), codes.data, block_scales.data, columns,
                             2 * codes.sizes[1], float_at(global_scale, 0), out.data(),
                             int(std::min<int64_t>(useful, threads_for(useful, 2))));
  return out;
}

Owned nvfp4_experts_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                            const Tensor& which, const std::string& rows, int64_t columns, const std::string& layout) {
  const char* op = "nvfp4_experts_mm_grad";
  const int kind = check_word(op, "layout", layout, {"standard", "interleaved", "swizzled"});
  const bool grouped = check_grouped(op, rows);
  if (kind != 1) throw NoKernel();
  check(op, "grad", grad, floats(), {{ANY, ANY}});
  check_nvfp4_grad(op, grad, codes, block_scales, columns, true);
  const int64_t m = grad.sizes[0], n = grad.sizes[1], experts = codes.sizes[0];
  check(op, "global_scale", global_scale, floats(), {{experts}});
  check_which(op, grad, codes, which, grouped);
  if (grad.code() < 0) throw NoKernel();
  const Read global = contiguous(global_scale, aoti_torch_dtype_float32());
  return by_experts(op, grad, columns, which, experts, grouped, [&](const Tensor& read, const int64_t* index, void* out) {
    return kernels().nvfp4_experts_grad_input(read.data, m, n, read.strides[0], grad.code(), codes.as<const uint8_t>(),
                                              block_scales.as<const uint8_t>(), global.as<const float>(), experts, columns,
                                              2 * codes.sizes[2], index, grouped, out, threads_for(1, 0));
  });
}

Owned fp8_experts_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& scales, const Tensor& which,
                          const std::string& rows) {
  const char* op = "fp8_experts_mm_grad";
  const bool grouped = check_grouped(op, rows);
  check(op, "grad", grad, floats(), {{ANY, ANY}});
  const int64_t m = grad.sizes[0], n = grad.sizes[1];
  check(op, "codes", codes, all_formats(), {{ANY, n, ANY}});
  const int64_t experts = codes.sizes[0], k = codes.sizes[2];
  check(op, "scales", scales, fp32(), {{experts, n}});
  check_which(op, grad, codes, which, grouped);
  if (grad.code() < 0 || codes.dtype != aoti_torch_dtype_float8_e4m3fn()) throw NoKernel();
  const Read weights = contiguous(codes), by = contiguous(scales);
  return by_experts(op, grad, k, which, experts, grouped, [&](const Tensor& read, const int64_t* index, void* out) {
    return kernels().fp8_experts_grad_input(read.data, m, n, read.strides[0], grad.code(), weights.as<const uint8_t>(),
                                            by.as<const float>(), experts, k, index, grouped, out, threads_for(1, 0));
  });
}

}  // namespace fp8
