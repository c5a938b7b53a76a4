// The operations of kernels/cpu as AOTInductor's generated C++ calls them: torch's stable C interface, no Python.
//
// Each does what its Python namesake does (nvfp4.py: matmul, fp8_weight.py: product, fp8_inputs.py: quantize_inputs,
// scaled_mm.py: scaled_mm, experts.py), checks included; what it can't do was refused by export.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <vector>

#include "fp8_formats.h"
#include "kernels.h"

namespace {

constexpr int64_t SCALE_TILE = 128;  // kernels/scaled_mm.py: SCALE_TILE

// A tensor of one or two dimensions, or a stack of matrices, read once.
struct Matrix {
  void* data = nullptr;
  int64_t dims = 0, sizes[3] = {1, 1, 1}, strides[3] = {0, 0, 0};
  int32_t dtype = -1, device_type = 0, device_index = 0;
  bool known = false;

  explicit Matrix(AtenTensorHandle tensor) {
    known = !aoti_torch_get_dim(tensor, &dims) && dims <= 3 && !aoti_torch_get_data_ptr(tensor, &data) &&
            !aoti_torch_get_dtype(tensor, &dtype) && !aoti_torch_get_device_type(tensor, &device_type) &&
            !aoti_torch_get_device_index(tensor, &device_index);
    for (int64_t d = 0; known && d < dims; d++)
      known = !aoti_torch_get_size(tensor, d, &sizes[d]) && !aoti_torch_get_stride(tensor, d, &strides[d]);
  }

  int code() const { return code_of(dtype); }
  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
  bool is_fp8() const { return dtype == aoti_torch_dtype_float8_e4m3fn() || is_e5m2(); }
  bool is_e5m2() const { return dtype == aoti_torch_dtype_float8_e5m2(); }
  const float* floats() const { return static_cast<const float*>(data); }
  // From one to the next along a dimension; 0 where there is one for all.
  int64_t step(int64_t dim) const { return sizes[dim] > 1 ? strides[dim] : 0; }

  // fp8_formats.h: Dtype; -1 for others.
  static int code_of(int32_t dtype) {
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

// [m, n] where x is, and where it lies.
void* new_matrix(const Matrix& x, int64_t m, int64_t n, int32_t dtype, AtenTensorHandle* result) {
  const int64_t sizes[] = {m, n}, strides[] = {n, 1};
  void* y = nullptr;
  if (aoti_torch_empty_strided(2, sizes, strides, dtype, x.device_type, x.device_index, result)) return nullptr;
  return aoti_torch_get_data_ptr(*result, &y) ? nullptr : y;
}

// [M, n] like x.
void* new_result(const Matrix& x, int64_t n, AtenTensorHandle* result) {
  return new_matrix(x, x.sizes[0], n, x.dtype, result);
}

// A bias of n elements in FP32; whether it is one.
bool read_bias(AtenTensorHandle handle, int64_t n, std::vector<float>& bias) {
  const Matrix read(handle);
  if (!read.known || read.code() < 0 || read.dims != 1 || read.sizes[0] != n) return false;
  for (int64_t i = 0; i < n; i++) {
    const int64_t at = i * read.strides[0];
    bias.push_back(read.code() == 0   ? read.floats()[at]
                   : read.code() == 1 ? fp8::BFloat16::load(static_cast<const uint16_t*>(read.data)[at])
                                      : fp8::Float16::load(static_cast<const uint16_t*>(read.data)[at]));
  }
  return true;
}

// Whether there is a scale for all, one for each line, or one for each block of k of a line or of SCALE_TILE lines; of no k's
// there are no blocks.
bool are_scales(const Matrix& scales, int line_dim, int64_t lines, int64_t k) {
  const int64_t have = scales.sizes[line_dim], deep = scales.sizes[1 - line_dim], blocks = (k + SCALE_TILE - 1) / SCALE_TILE;
  if (scales.code() != 0 || scales.dims != 2) return false;
  if (deep == 1 && (have == 1 || have == lines)) return true;
  return deep == blocks && (have == lines || have == (lines + SCALE_TILE - 1) / SCALE_TILE);
}

// How many rows or columns share a scale.
int64_t lines(int64_t scales, int64_t size) { return scales == 1 || scales == size ? 1 : SCALE_TILE; }

// The index of experts, [m] or [experts], in int64.
bool read_index(AtenTensorHandle handle, int64_t size, std::vector<int64_t>& which) {
  const Matrix read(handle);
  const bool wide = read.dtype == aoti_torch_dtype_int64();
  if (!read.known || read.dims != 1 || read.sizes[0] != size || !(wide || read.dtype == aoti_torch_dtype_int32())) return false;
  for (int64_t i = 0; i < size; i++) {
    const int64_t at = i * read.strides[0];
    which.push_back(wide ? static_cast<const int64_t*>(read.data)[at] : static_cast<const int32_t*>(read.data)[at]);
  }
  return true;
}

// Whether a stack [experts, n, k] has its matrices one after the other, and these their rows.
bool is_stack(const Matrix& stack) {
  return stack.known && stack.dims == 3 && (stack.sizes[2] < 2 || stack.strides[2] == 1) &&
         (stack.sizes[1] < 2 || stack.strides[1] == stack.sizes[2]) &&
         (stack.sizes[0] < 2 || stack.strides[0] == stack.sizes[1] * stack.sizes[2]);
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
  if (x.dims != 2 || x.code() < 0 || padded_k < k || padded_k - k >= 16 || padded_k % 16 || codes.dims != 2 ||
      codes.dtype != aoti_torch_dtype_uint8() || scales.dtype != aoti_torch_dtype_float8_e4m3fn() || scales.dims != 2 ||
      scales.sizes[0] != n || scales.sizes[1] != padded_k / 16 || global_scale.code() != 0 || global_scale.count() != 1 ||
      std::strcmp(layout, "interleaved") != 0)
    return refuse("nvfp4_mm got operands that its CPU kernel does not take");
  const void* bias = nullptr;
  int bias_dtype = 0;
  if (bias_handle) {
    const Matrix read(*bias_handle);
    if (!read.known || read.code() < 0 || read.dims != 1 || read.sizes[0] != n || (n > 1 && read.strides[0] != 1))
      return refuse("nvfp4_mm got a bias that its CPU kernel does not take");
    bias = read.data, bias_dtype = read.code();
  }
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && m * n) return AOTI_TORCH_FAILURE;
  const int64_t threads = std::min(torch_threads(), 1 + m * n * k / fp8::NVFP4_LEAST_PARALLEL);
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
  if (x.dims != 2 || x.code() < 0 || codes.dims != 2 || codes.dtype != aoti_torch_dtype_float8_e4m3fn() ||
      scales.dims != 1 || scales.sizes[0] != n || codes.sizes[1] != k || (k > 1 && codes.strides[1] != 1) ||
      (n > 1 && (codes.strides[0] != k || scales.strides[0] != 1)) || scales.code() != 0)
    return refuse("fp8_mm got operands that its CPU kernel does not take");
  std::vector<float> bias;
  if (bias_handle && !read_bias(*bias_handle, n, bias)) return refuse("fp8_mm got a bias that it does not take");
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && m * n) return AOTI_TORCH_FAILURE;
  fp8_weight_mm(x.data, m, k, x.strides[0], x.code(), static_cast<const uint8_t*>(codes.data),
                static_cast<const float*>(scales.data), n, bias_handle ? bias.data() : nullptr, y,
                m * n * k >= fp8::FP8_WEIGHT_LEAST_PARALLEL ? int(torch_threads()) : 1);
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_nvfp4_experts_mm(
    AtenTensorHandle x_handle, AtenTensorHandle codes_handle, AtenTensorHandle block_scales_handle,
    AtenTensorHandle global_scale_handle, AtenTensorHandle which_handle, const char* rows, const char* layout,
    AtenTensorHandle* result) {
  static const bool works = fp8_probe();
  if (!works) return refuse("this CPU can't run the instructions that the package was built with");
  Matrix x(x_handle);
  const Matrix codes(codes_handle), scales(block_scales_handle), global_scale(global_scale_handle);
  const int64_t k = x.sizes[1], experts = codes.sizes[0], n = codes.sizes[1], padded_k = 2 * codes.sizes[2];
  if (!x.known || x.dims != 2 || x.code() < 0 || !is_stack(codes) || !is_stack(scales) || padded_k < k || padded_k - k >= 16 ||
      padded_k % 16 || codes.dtype != aoti_torch_dtype_uint8() || scales.dtype != aoti_torch_dtype_float8_e4m3fn() ||
      scales.sizes[0] != experts || scales.sizes[1] != n || scales.sizes[2] != padded_k / 16 || !global_scale.known ||
      global_scale.dims != 1 || global_scale.sizes[0] != experts || global_scale.code() != 0 || (experts > 1 && global_scale.strides[0] != 1) ||
      std::strcmp(layout, "interleaved") != 0)
    return refuse("nvfp4_experts_mm got operands that its CPU kernel does not take");
  const bool grouped = std::strcmp(rows, "grouped") == 0;
  std::vector<int64_t> which;
  if (!read_index(which_handle, grouped ? experts : x.sizes[0], which)) return refuse("nvfp4_experts_mm got no index of experts");
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && x.sizes[0] * n) return AOTI_TORCH_FAILURE;
  if (nvfp4_experts(x.data, x.sizes[0], k, x.strides[0], x.code(), static_cast<const uint8_t*>(codes.data),
                    static_cast<const uint8_t*>(scales.data), global_scale.floats(), experts, n, padded_k, which.data(),
                    grouped, y, int(torch_threads())))
    return refuse("nvfp4_experts_mm got an index that names experts or rows that there are none of");
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fp8_experts_mm(
    AtenTensorHandle x_handle, AtenTensorHandle codes_handle, AtenTensorHandle scales_handle,
    AtenTensorHandle which_handle, const char* rows, AtenTensorHandle* result) {
  static const bool works = fp8_probe();
  if (!works) return refuse("this CPU can't run the instructions that the package was built with");
  Matrix x(x_handle);
  const Matrix codes(codes_handle), scales(scales_handle);
  const int64_t k = x.sizes[1], experts = codes.sizes[0], n = codes.sizes[1];
  if (!x.known || x.dims != 2 || x.code() < 0 || !is_stack(codes) || codes.sizes[2] != k ||
      codes.dtype != aoti_torch_dtype_float8_e4m3fn() || !scales.known || scales.dims != 2 || scales.sizes[0] != experts ||
      scales.sizes[1] != n || scales.code() != 0 || (n > 1 && scales.strides[1] != 1) || (experts > 1 && scales.strides[0] != n))
    return refuse("fp8_experts_mm got operands that its CPU kernel does not take");
  const bool grouped = std::strcmp(rows, "grouped") == 0;
  std::vector<int64_t> which;
  if (!read_index(which_handle, grouped ? experts : x.sizes[0], which)) return refuse("fp8_experts_mm got no index of experts");
  const std::vector<char> copy = with_contiguous_rows(x);
  void* y = new_result(x, n, result);
  if (!y && x.sizes[0] * n) return AOTI_TORCH_FAILURE;
  if (fp8_experts(x.data, x.sizes[0], k, x.strides[0], x.code(), static_cast<const uint8_t*>(codes.data), scales.floats(),
                  experts, n, which.data(), grouped, y, int(torch_threads())))
    return refuse("fp8_experts_mm got an index that names experts or rows that there are none of");
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_quantize_inputs(
    AtenTensorHandle x_handle, AtenTensorHandle* scale_handle, AtenTensorHandle* codes_result,
    AtenTensorHandle* scale_result) {
  Matrix x(x_handle);
  if (!x.known || x.dims != 2 || x.code() < 0) return refuse("quantize_inputs got inputs that its CPU kernel does not take");
  const float* known = nullptr;
  if (scale_handle) {
    const Matrix scale(*scale_handle);
    if (!scale.known || scale.code() != 0 || scale.count() != 1) return refuse("quantize_inputs got a scale that is no float32");
    known = scale.floats();
  }
  const int64_t rows = x.sizes[0], cols = x.sizes[1];
  const std::vector<char> copy = with_contiguous_rows(x);
  void* codes = new_matrix(x, rows, cols, aoti_torch_dtype_float8_e4m3fn(), codes_result);
  void* scales = new_matrix(x, known ? 1 : rows, 1, aoti_torch_dtype_float32(), scale_result);
  if ((!codes && rows * cols) || (!scales && (known || rows))) return AOTI_TORCH_FAILURE;
  fp8_inputs(x.data, x.code(), rows, cols, x.strides[0], known, static_cast<uint8_t*>(codes),
             static_cast<float*>(scales), rows * cols >= fp8::CAST_LEAST_PARALLEL ? int(torch_threads()) : 1);
  return AOTI_TORCH_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_scaled_mm(
    AtenTensorHandle left_handle, AtenTensorHandle right_handle, AtenTensorHandle left_scale_handle,
    AtenTensorHandle right_scale_handle, AtenTensorHandle* bias_handle, int32_t out_dtype, AtenTensorHandle* result) {
  static const bool works = fp8_probe();
  if (!works) return refuse("this CPU can't run the instructions that the package was built with");
  const Matrix left(left_handle), right(right_handle), scale_left(left_scale_handle), scale_right(right_scale_handle);
  const bool known = left.known && right.known && scale_left.known && scale_right.known;
  if (!known || left.dims != 2 || right.dims != 2 || scale_left.dims != 2 || scale_right.dims != 2)
    return refuse("scaled_mm got unreadable tensors");
  const int64_t m = left.sizes[0], k = left.sizes[1], n = right.sizes[1];
  const int dtype = Matrix::code_of(out_dtype);
  if (!left.is_fp8() || !right.is_fp8() || right.sizes[0] != k || !are_scales(scale_left, 0, m, k) ||
      !are_scales(scale_right, 1, n, k) || dtype < 0)
    return refuse("scaled_mm got operands that its CPU kernel does not take");
  std::vector<float> bias;
  if (bias_handle && !read_bias(*bias_handle, n, bias)) return refuse("scaled_mm got a bias that it does not take");
  void* y = new_matrix(left, m, n, out_dtype, result);
  if (!y && m * n) return AOTI_TORCH_FAILURE;
  fp8_scaled_mm(m, n, k, left.data, left.strides[0], left.strides[1], left.is_e5m2(),
                scale_left.floats(), scale_left.step(0), scale_left.step(1), lines(scale_left.sizes[0], m),
                right.data, right.strides[1], right.strides[0], right.is_e5m2(),
                scale_right.floats(), scale_right.step(1), scale_right.step(0), lines(scale_right.sizes[1], n),
                bias_handle ? bias.data() : nullptr, y, dtype, n, 0, m * n * k >= fp8::GEMM_LEAST_PARALLEL ? int(torch_threads()) : 1);
  return AOTI_TORCH_SUCCESS;
}
