// The operations of kernels/cpu as AOTInductor's generated C++ calls them: torch's stable C interface, no Python.
//
// Each does what its Python namesake does (nvfp4.py: matmul, fp8_weight.py: product), checks included; what it can't do was refused by export.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <vector>

#include "fp8_formats.h"

extern "C" {
int fp8_probe();
void nvfp4_matmul(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const void* codes, const void* scales,
                  int64_t n, int64_t padded_k, float global_scale, const void* bias, int bias_dtype, int arithmetic,
                  void* y, int threads);
void fp8_weight_mm(const void* x, int64_t m, int64_t k, int64_t stride, int dtype, const uint8_t* codes,
                   const float* scales, int64_t n, const float* bias, void* y, int threads);
}

namespace {

constexpr int64_t NVFP4_LEAST_PARALLEL = 1 << 16;  // nvfp4.py: LEAST_PARALLEL
constexpr int64_t FP8_LEAST_PARALLEL = 1 << 17;    // fp8_weight.py: LEAST_PARALLEL

// A tensor of one or two dimensions, read once.
struct Matrix {
  void* data = nullptr;
  int64_t dims = 0, sizes[2] = {1, 1}, strides[2] = {0, 0};
  int32_t dtype = -1, device_type = 0, device_index = 0;
  bool known = false;

  explicit Matrix(AtenTensorHandle tensor) {
    known = !aoti_torch_get_dim(tensor, &dims) && dims <= 2 && !aoti_torch_get_data_ptr(tensor, &data) &&
            !aoti_torch_get_dtype(tensor, &dtype) && !aoti_torch_get_device_type(tensor, &device_type) &&
            !aoti_torch_get_device_index(tensor, &device_index);
    for (int64_t d = 0; known && d < dims; d++)
      known = !aoti_torch_get_size(tensor, d, &sizes[d]) && !aoti_torch_get_stride(tensor, d, &strides[d]);
  }

  // fp8_formats.h: Dtype; -1 for others.
  int code() const {
    if (dtype == aoti_torch_dtype_float32()) return 0;
    if (dtype == aoti_torch_dtype_bfloat16()) return 1;
    if (dtype == aoti_torch_dtype_float16()) return 2;
    return -1;
  }
};

AOTITorchError refuse(const char* what) {
  std::cerr << "fp8_compile: " << what << "; export the model again with the version that loads it\n";
  return AOTI_TORCH_FAILURE;
}

template <typename T>
std::vector<char> rows_of(const Matrix& x) {
  std::vector<char> copy(x.sizes[0] * x.sizes[1] * sizeof(T));
  T* out = reinterpret_cast<T*>(copy.data());
  const T* in = static_cast<const T*>(x.data);
  for (int64_t i = 0; i < x.sizes[0]; i++)
    for (int64_t j = 0; j < x.sizes[1]; j++) *out++ = in[i * x.strides[0] + j * x.strides[1]];
  return copy;
}

// A copy of x where its rows are not contiguous; x then reads the copy.
std::vector<char> with_contiguous_rows(Matrix& x) {
  std::vector<char> copy;
  if (x.sizes[1] > 1 && x.strides[1] != 1) {
    copy = x.code() == 0 ? rows_of<uint32_t>(x) : rows_of<uint16_t>(x);
    x.data = copy.data(), x.strides[0] = x.sizes[1];
  }
  return copy;
}

// [M, n] like x, and where it lies.
void* new_result(const Matrix& x, int64_t n, AtenTensorHandle* result) {
  const int64_t sizes[] = {x.sizes[0], n}, strides[] = {n, 1};
  void* y = nullptr;
  if (aoti_torch_empty_strided(2, sizes, strides, x.dtype, x.device_type, x.device_index, result)) return nullptr;
  return aoti_torch_get_data_ptr(*result, &y) ? nullptr : y;
}

int64_t torch_threads() {
  uint32_t threads = 1;
  return torch_get_num_threads(&threads) ? 1 : threads;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_nvfp4_mm(
    AtenTensorHandle x_handle, AtenTensorHandle codes_handle, AtenTensorHandle block_scales_handle,
    AtenTensorHandle global_scale_handle, AtenTensorHandle* bias_handle, const char** activations, const char* layout,
    AtenTensorHandle* result) {
  static const bool works = fp8_probe();  // asks the kernel for AMX's tiles too
  if (!works) return refuse("this CPU can't run the instructions that the package was built with");
  Matrix x(x_handle);
  const Matrix codes(codes_handle), scales(block_scales_handle), global_scale(global_scale_handle);
  if (!x.known || !codes.known || !scales.known || !global_scale.known) return refuse("nvfp4_mm got unreadable tensors");
  const int64_t m = x.sizes[0], k = x.sizes[1], n = codes.sizes[0], padded_k = 2 * codes.sizes[1];
  if (x.dims != 2 || x.code() < 0 || padded_k < k || padded_k - k >= 16 || std::strcmp(layout, "interleaved") != 0)
    return refuse("nvfp4_mm got operands that its CPU kernel does not take");
  const void* bias = nullptr;
  int bias_dtype = 0;
  if (bias_handle) {
    const Matrix read(*bias_handle);
    if (!read.known || read.code() < 0 || read.sizes[0] != n || (n > 1 && read.strides[0] != 1))
      return refuse("nvfp4_mm got a bias that its CPU kernel does not take");
    bias = read.data, bias_dtype = read.code();
  }
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && m * n) return AOTI_TORCH_FAILURE;
  const int64_t threads = std::min(torch_threads(), 1 + m * n * k / NVFP4_LEAST_PARALLEL);
  nvfp4_matmul(x.data, m, k, x.strides[0], x.code(), codes.data, scales.data, n, padded_k,
               *static_cast<const float*>(global_scale.data), bias, bias_dtype, activations ? 1 : 0, y, int(threads));
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_mm(
    AtenTensorHandle x_handle, AtenTensorHandle codes_handle, AtenTensorHandle scales_handle,
    AtenTensorHandle* bias_handle, AtenTensorHandle* result) {
  static const bool works = fp8_probe();
  if (!works) return refuse("this CPU can't run the instructions that the package was built with");
  Matrix x(x_handle);
  const Matrix codes(codes_handle), scales(scales_handle);
  if (!x.known || !codes.known || !scales.known) return refuse("fp8_mm got unreadable tensors");
  const int64_t m = x.sizes[0], k = x.sizes[1], n = codes.sizes[0];
  if (x.dims != 2 || x.code() < 0 || codes.sizes[1] != k || (k > 1 && codes.strides[1] != 1) ||
      (n > 1 && (codes.strides[0] != k || scales.strides[0] != 1)) || scales.code() != 0)
    return refuse("fp8_mm got operands that its CPU kernel does not take");
  std::vector<float> bias;
  if (bias_handle) {
    const Matrix read(*bias_handle);
    if (!read.known || read.code() < 0 || read.sizes[0] != n) return refuse("fp8_mm got a bias that it does not take");
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = i * read.strides[0];
      bias.push_back(read.code() == 0   ? static_cast<const float*>(read.data)[at]
                     : read.code() == 1 ? fp8::BFloat16::load(static_cast<const uint16_t*>(read.data)[at])
                                        : fp8::Float16::load(static_cast<const uint16_t*>(read.data)[at]));
    }
  }
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && m * n) return AOTI_TORCH_FAILURE;
  fp8_weight_mm(x.data, m, k, x.strides[0], x.code(), static_cast<const uint8_t*>(codes.data),
                static_cast<const float*>(scales.data), n, bias_handle ? bias.data() : nullptr, y,
                m * n * k >= FP8_LEAST_PARALLEL ? int(torch_threads()) : 1);
  return AOTI_TORCH_SUCCESS;
}
