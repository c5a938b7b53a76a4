// The C interface of the kernels: what operations.cpp calls for torch's dispatcher and for AOTInductor's code, Python by
// ctypes (library.py, nvfp4_search.py), and tests by a program of their own. Each source that defines one of these includes
// this file, so that the compiler compares definition and declaration. No torch headers.
//
//   dtype         of floats: fp8::Dtype
//   e5m2          1 for E5M2, 0 for E4M3
//   stride        from row to row, in elements; rows are contiguous where no other stride is given
//   threads       at most so many
#pragma once

#include <cstdint>

namespace fp8 {

// Below so much work, waking threads takes longer than the work itself, and on busy cores much longer.
constexpr int64_t CAST_LEAST_PARALLEL = 1 << 17;        // elements; one thread quantizes as many in some 0.2 ms
constexpr int64_t GEMM_LEAST_PARALLEL = 1 << 20;        // multiplications; one thread does as many in some 10 us
constexpr int64_t FP8_WEIGHT_LEAST_PARALLEL = 1 << 17;  // multiplications; not tuned
constexpr int64_t ATTENTION_LEAST_PARALLEL = 1 << 17;   // multiplications; not tuned
constexpr int64_t NVFP4_LEAST_PARALLEL = 1 << 16;       // multiplications per thread

}  // namespace fp8

extern "C" {

// scaled_mm.cpp. 1 if the instructions that the library was compiled for work on this machine.
int fp8_probe();

// scaled_mm.cpp: kernels/scaled_mm.py has the formula, lines: how many rows or columns share a scale.
void fp8_scaled_mm(int64_t m, int64_t n, int64_t k,
                   const void* left, int64_t left_stride, int64_t left_k_stride, int left_e5m2,
                   const float* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride, int64_t left_lines,
                   const void* right, int64_t right_stride, int64_t right_k_stride, int right_e5m2,
                   const float* right_scales, int64_t right_scale_stride, int64_t right_scale_k_stride, int64_t right_lines,
                   const float* bias, void* out, int dtype, int64_t out_stride, int accumulate, int threads);
void fp8_scaled_grouped_mm(int along, int64_t groups, const int64_t* ends, int64_t m, int64_t n, int64_t k,
                           const void* left, int64_t left_stride, int64_t left_k_stride, int left_e5m2,
                           const float* left_scales, int64_t left_scale_stride,
                           const void* right, int64_t right_group_stride, int64_t right_stride, int64_t right_k_stride,
                           int right_e5m2, const float* right_scales, int64_t right_scale_group_stride,
                           int64_t right_scale_stride, void* out, int dtype, int64_t out_group_stride, int64_t out_stride,
                           int threads);

// mx_mm.cpp: kernels/mxfp8.py has the formula.
void fp8_mx_mm(int64_t m, int64_t n, int64_t k, const void* left, int64_t left_stride, int64_t left_k_stride,
               const uint8_t* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride, int64_t left_lines,
               const void* right, int64_t right_stride, int64_t right_k_stride,
               const uint8_t* right_scales, int64_t right_scale_stride, int64_t right_scale_k_stride,
               int64_t right_lines, const float* bias, void* out, int dtype, int64_t out_stride, int threads);

// mx_cast.cpp
void fp8_mx_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, int64_t block_rows,
                     int64_t block_cols, uint8_t* codes, uint8_t* scales, int threads);

// nvfp4_train_mm.cpp: kernels/nvfp4_training.py has the formula. k: a multiple of 16.
void fp8_nvfp4_train_mm(int64_t m, int64_t n, int64_t k, const uint8_t* left, int64_t left_stride,
                        const uint8_t* left_scales, int64_t left_scale_stride, int64_t left_scale_k_stride,
                        int64_t left_lines, const uint8_t* right, int64_t right_stride, const uint8_t* right_scales,
                        int64_t right_scale_stride, int64_t right_scale_k_stride, int64_t right_lines,
                        const float* left_dequant, const float* right_dequant, const float* bias, void* out,
                        int dtype, int64_t out_stride, int threads);

// nvfp4_train_cast.cpp. x: [rows, k], or [k, rows] where it is transposed. seed: null to round to nearest.
void fp8_nvfp4_quantize(const void* x, int dtype, int64_t rows, int64_t k, int64_t stride, int transposed, float enc,
                        int tiles, int rotated, const int64_t* seed, int64_t stream, int four_over_six,
                        uint8_t* codes, uint8_t* scales, int threads);

// fp8_cast.cpp
void fp8_scales(const void* x, int dtype, int64_t rows, int64_t cols, int axis, int e5m2, float* quant_scale,
                float* dequant_scale, int threads);
void fp8_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int axis, const float* scale, int e5m2,
                  uint8_t* codes, int threads);
void fp8_inputs(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, const float* known,
                uint8_t* codes, float* scales, int threads);
void fp8_delayed(const void* x, int dtype, int64_t count, int e5m2, float* scale, uint8_t* codes, float* largest,
                 int threads);

// update_scales.cpp
void fp8_update_scales(int64_t slots, int64_t length, float* amaxes, float* history, float* scales, int32_t* counts,
                       int32_t* room_of_all, float* known, float largest, float saturated_above, float small_below,
                       int most_room, int algorithm, int interval);

// fingerprint.cpp
void fp8_fingerprints(int64_t count, const void* const* x, const int64_t* numel, const int* dtype, int64_t* out);

// fp8_weight.cpp
void fp8_weight_mm(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes,
                   const float* scales, int64_t n, const float* bias, void* y, int threads);
// The gradient of x: out[m, k] = sum_n grad[m, n] * scale[n] * w[n, k].
void fp8_weight_grad_input(const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes,
                           const float* scales, int64_t k, void* out, int threads);

// nvfp4.cpp
void nvfp4_matmul(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const void* codes, const void* scales,
                  int64_t n, int64_t padded_k, float global_scale, const void* bias, int bias_dtype, int arithmetic,
                  void* y, int threads);

// nvfp4_prefill.cpp. The gradient of x: out[m, k] = sum_n grad[m, n] * w[n, k].
void nvfp4_grad_input(const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const void* codes, const void* scales,
                      int64_t k, int64_t padded_k, float global_scale, void* out, int threads);

// experts.cpp. 0, or 1 where `which` names experts or rows that there are none of.
int nvfp4_experts(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes,
                  const uint8_t* scales, const float* global_scales, int64_t experts, int64_t n, int64_t padded_k,
                  const int64_t* which, int in_groups, void* y, int threads);
int fp8_experts(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes, const float* scales,
                int64_t experts, int64_t n, const int64_t* which, int in_groups, void* y, int threads);
int nvfp4_experts_grad_input(const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes,
                             const uint8_t* scales, const float* global_scales, int64_t experts, int64_t k,
                             int64_t padded_k, const int64_t* which, int in_groups, void* out, int threads);
int fp8_experts_grad_input(const void* grad, int64_t m, int64_t n, int64_t stride, int dtype, const uint8_t* codes,
                           const float* scales, int64_t experts, int64_t k, const int64_t* which, int in_groups, void* out,
                           int threads);

// fp8_attention.cpp: kernels/fp8_cache.py has the formula. Strides are those of all dimensions but the last, which is
// contiguous; of a mask, of all four. mask_kind: 0 for none, 1 for bool, 2 + dtype for what is added.
void fp8_attention(int64_t batch, int64_t groups, int64_t repeats, int64_t queries, int64_t length, int64_t width,
                   int64_t value_width, const void* query, const int64_t* query_strides, int dtype, const uint8_t* keys,
                   const int64_t* key_strides, const float* key_scales, const uint8_t* values,
                   const int64_t* value_strides, const float* value_scales, const void* mask, int mask_kind,
                   const int64_t* mask_strides, float scale, int causal, void* out, int threads);

// fp8_cache.cpp. Strides as above; what is made is contiguous.
void fp8_cache_quantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const void* x, int dtype,
                        const int64_t* strides, const float* scales, uint8_t* rows, int threads);
void fp8_cache_dequantize(int64_t batch, int64_t groups, int64_t length, int64_t width, const uint8_t* rows,
                          const int64_t* strides, const float* scales, void* x, int dtype, int threads);

// nvfp4_paths.cpp and nvfp4_codes.cpp, a library of their own
void nvfp4_scale_paths(const float* weights, const uint8_t* kept_zero, const float* factor, int64_t rows, int64_t columns,
                       int size, int64_t paths, int below, int above, float* found, int threads);
// Feedback within a block of `size` weights (kernels/nvfp4/feedback.py): y, missed, rounded [size, n], factor [size, size].
void nvfp4_round_block(const float* y, const float* factor, int64_t n, int size, float* missed, float* rounded, int threads);
void nvfp4_code_search(int8_t* levels, const float* scales, const float* gradient, const float* hessian, int64_t rows,
                       int64_t columns, int64_t size, int64_t steps, int64_t tenure, int threads);

}  // extern "C"
