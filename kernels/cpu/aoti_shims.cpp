// The operations of operations.h as AOTInductor's generated C++ calls them: torch's stable C interface, no Python.
//
// What an operation refuses, or has no kernel for, ends the call with a line on the error stream; what a package can't do
// was refused by export.
#include <iostream>

#include "operations.h"

namespace fp8 {

const Kernels& kernels() {
#define FP8_LINKED(name) &::name,
  static const Kernels linked{FP8_KERNELS(FP8_LINKED)};
#undef FP8_LINKED
  return linked;
}

}  // namespace fp8

namespace {

using fp8::Tensor;

AOTITorchError refuse(const char* what) {
  std::cerr << what << "; export the model again with the version that loads it\n";
  return AOTI_TORCH_FAILURE;
}

template <class Run>
AOTITorchError without_exceptions(const Run& run) {
  static const bool works = fp8_probe();  // asks the kernel for AMX's tiles too
  if (!works) return refuse("fp8_compile: this CPU can't run the instructions that the package was built with");
  try {
    run();
    return AOTI_TORCH_SUCCESS;
  } catch (const fp8::NoKernel&) {
    return refuse("fp8_compile: there is no kernel for such operands without Python");
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

fp8::Optional optional(AtenTensorHandle* handle) { return handle ? fp8::Optional(*handle) : fp8::Optional(); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_nvfp4_mm(
    AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle block_scales, AtenTensorHandle global_scale,
    AtenTensorHandle* bias, const char** activations, const char* layout, AtenTensorHandle* result) {
  return without_exceptions([&] {
    const auto inputs = activations ? std::optional<std::string>(*activations) : std::nullopt;
    *result = fp8::nvfp4_mm(Tensor(x), Tensor(codes), Tensor(block_scales), Tensor(global_scale), optional(bias), inputs, layout).give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_mm(
    AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scales, AtenTensorHandle* bias, AtenTensorHandle* result) {
  return without_exceptions([&] { *result = fp8::fp8_mm(Tensor(x), Tensor(codes), Tensor(scales), optional(bias)).give(); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_nvfp4_experts_mm(
    AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle block_scales, AtenTensorHandle global_scale,
    AtenTensorHandle which, const char* rows, const char* layout, AtenTensorHandle* result) {
  return without_exceptions([&] {
    *result = fp8::nvfp4_experts_mm(Tensor(x), Tensor(codes), Tensor(block_scales), Tensor(global_scale), Tensor(which), rows, layout).give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_experts_mm(
    AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scales, AtenTensorHandle which, const char* rows,
    AtenTensorHandle* result) {
  return without_exceptions([&] { *result = fp8::fp8_experts_mm(Tensor(x), Tensor(codes), Tensor(scales), Tensor(which), rows).give(); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_quantize_inputs(
    AtenTensorHandle x, AtenTensorHandle* scale, AtenTensorHandle* codes, AtenTensorHandle* dequant_scale) {
  return without_exceptions([&] {
    fp8::Two made = fp8::quantize_inputs(Tensor(x), optional(scale));
    *codes = made.first.give(), *dequant_scale = made.second.give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_scaled_mm(
    AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle scale_left, AtenTensorHandle scale_right,
    AtenTensorHandle* bias, int32_t out_dtype, AtenTensorHandle* result) {
  return without_exceptions([&] {
    *result = fp8::scaled_mm(Tensor(left), Tensor(right), Tensor(scale_left), Tensor(scale_right), optional(bias), out_dtype).give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_quantize_mx(
    AtenTensorHandle x, const int64_t* block, int64_t sizes, AtenTensorHandle* codes, AtenTensorHandle* scales) {
  return without_exceptions([&] {
    fp8::Two made = fp8::quantize_mx(Tensor(x), std::vector<int64_t>(block, block + sizes));
    *codes = made.first.give(), *scales = made.second.give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_mx_mm(
    AtenTensorHandle left, AtenTensorHandle right, AtenTensorHandle scale_left, AtenTensorHandle scale_right,
    AtenTensorHandle* bias, int32_t out_dtype, AtenTensorHandle* result) {
  return without_exceptions([&] {
    *result = fp8::mx_mm(Tensor(left), Tensor(right), Tensor(scale_left), Tensor(scale_right), optional(bias), out_dtype).give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_quantize_mm(
    AtenTensorHandle x, AtenTensorHandle* scale, AtenTensorHandle weight, AtenTensorHandle* weight_scale, AtenTensorHandle* bias,
    int32_t e5m2, int32_t rows, AtenTensorHandle* result) {
  return without_exceptions([&] {
    *result = fp8::quantize_mm(Tensor(x), optional(scale), Tensor(weight), optional(weight_scale), optional(bias), e5m2 != 0, rows != 0).give();
  });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_cache_quantize(
    AtenTensorHandle x, AtenTensorHandle* scales, AtenTensorHandle* result) {
  return without_exceptions([&] { *result = fp8::cache_quantize(Tensor(x), optional(scales)).give(); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_cache_dequantize(
    AtenTensorHandle rows, AtenTensorHandle* scales, int32_t dtype, AtenTensorHandle* result) {
  return without_exceptions([&] { *result = fp8::cache_dequantize(Tensor(rows), optional(scales), dtype).give(); });
}

__attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_attention(
    AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle* key_scales,
    AtenTensorHandle* value_scales, AtenTensorHandle* mask, double scale, int32_t is_causal, AtenTensorHandle* result) {
  return without_exceptions([&] {
    *result = fp8::attention(Tensor(query), Tensor(keys), Tensor(values), optional(key_scales), optional(value_scales), optional(mask), scale, is_causal != 0).give();
  });
}

}  // extern "C"
