// The operations of kernels/cpu in C++: each checks its operands, allocates its results and calls a kernel.
//
// torch_library.cpp registers them with torch's dispatcher, aoti_shims.cpp gives them to AOTInductor's code. A result is
// new; an operand that does not fit is an exception that names it (tensors.h: Refused), and one that only the formula in
// Python can compute with is a NoKernel. Formulas: the Python file of the same name in kernels/.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace fp8 {

// The kernels that the operations call. They are compiled for an instruction set each, the operations for none.
#define FP8_KERNELS(EACH)                                                                                         \
  EACH(fp8_scaled_mm) EACH(fp8_scaled_grouped_mm) EACH(fp8_scales) EACH(fp8_quantize) EACH(fp8_inputs)            \
  EACH(fp8_delayed) EACH(fp8_update_scales) EACH(fp8_weight_mm) EACH(nvfp4_matmul) EACH(nvfp4_experts) EACH(fp8_experts) \
  EACH(fp8_mx_mm) EACH(fp8_mx_quantize) EACH(fp8_nvfp4_train_mm) EACH(fp8_nvfp4_quantize)                           \
  EACH(fp8_weight_grad_input) EACH(nvfp4_grad_input) EACH(nvfp4_experts_grad_input) EACH(fp8_experts_grad_input) \
  EACH(fp8_attention) EACH(fp8_cache_quantize) EACH(fp8_cache_dequantize)
struct Kernels {
#define FP8_MEMBER(name) decltype(&::name) name;
  FP8_KERNELS(FP8_MEMBER)
#undef FP8_MEMBER
};
const Kernels& kernels();  // whoever links the operations says which

using Optional = std::optional<Tensor>;
using Two = std::pair<Owned, Owned>;

Owned scaled_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
                const Optional& bias, int32_t out_dtype);
Owned scaled_grouped_mm(const Tensor& left, const Tensor& right, const Tensor& offsets, const Tensor& scale_left,
                        const Tensor& scale_right, int32_t out_dtype);
Two scales(const Tensor& x, int32_t dtype, const std::vector<int64_t>& block);
Owned cast(const Tensor& x, const Tensor& quant_scale, int32_t dtype, const std::vector<int64_t>& block);
Two quantize(const Tensor& x, int32_t dtype, const std::vector<int64_t>& block);
Owned quantize_mm(const Tensor& x, const Optional& scale, const Tensor& weight, const Optional& weight_scale,
                  const Optional& bias, bool e5m2, bool rows);
Two quantize_delayed_mm(const Tensor& x, const Tensor& quant_scale, const Tensor& weight, const Optional& weight_scale,
                        const Optional& bias, bool e5m2);
struct Delayed { Owned codes, used_scale, dequant_scale, amax; };
Delayed quantize_delayed(const Tensor& x, const Tensor& quant_scale, int32_t dtype, bool wanted);
struct WholeScale { Owned scale, inverse, amax; };
WholeScale whole_scale(const Tensor& x, const Optional& known, double largest);
void update_scales(const Tensor& amaxes, const Tensor& history, const Tensor& scales, const Tensor& counts,
                   const Tensor& room, const Tensor& known, double largest, const std::string& algorithm, int64_t interval);
// accumulate: what is recorded already stays.
void record_amaxes(const char* op, const Tensor& amaxes, const std::vector<Tensor>& recorded,
                   const std::vector<int64_t>& rows, bool accumulate);
Two quantize_inputs(const Tensor& x, const Optional& scale);
Owned fp8_mm(const Tensor& x, const Tensor& codes, const Tensor& scales, const Optional& bias);
Owned nvfp4_mm(const Tensor& x, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
               const Optional& bias, const std::optional<std::string>& activations, const std::string& layout);
Owned nvfp4_experts_mm(const Tensor& x, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                       const Tensor& which, const std::string& rows, const std::string& layout);
Owned fp8_experts_mm(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& which, const std::string& rows);
Owned mx_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
            const Optional& bias, int32_t out_dtype);
Two quantize_mx(const Tensor& x, const std::vector<int64_t>& block);
Owned nvfp4_train_mm(const Tensor& left, const Tensor& right, const Tensor& scale_left, const Tensor& scale_right,
                     const Tensor& dequant_left, const Tensor& dequant_right, const Optional& bias, int32_t out_dtype);
Two quantize_nvfp4(const Tensor& x, const Tensor& enc, const std::vector<int64_t>& block, bool transpose, bool rotated,
                   const Optional& seed, int64_t stream, bool four_over_six);
Owned fp8_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& scales);
Owned nvfp4_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                    int64_t columns, const std::string& layout);
Owned nvfp4_experts_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& block_scales, const Tensor& global_scale,
                            const Tensor& which, const std::string& rows, int64_t columns, const std::string& layout);
Owned fp8_experts_mm_grad(const Tensor& grad, const Tensor& codes, const Tensor& scales, const Tensor& which,
                          const std::string& rows);
Owned cache_quantize(const Tensor& x, const Optional& scales);
Owned cache_dequantize(const Tensor& rows, const Optional& scales, int32_t dtype);
Owned attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Optional& key_scales,
                const Optional& value_scales, const Optional& mask, double scale, bool is_causal);

}  // namespace fp8
