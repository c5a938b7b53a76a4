// Floats of any dtype that an operation is given, in FP32 as the kernels read them.
#pragma once

#include <optional>

#include "fp8_formats.h"
#include "tensors.h"

namespace fp8 {

// An element of floats in FP32, by its distance from the first.
inline float float_at(const Tensor& tensor, int64_t distance) {
  if (tensor.code() == FP32) return tensor.as<const float>()[distance];
  if (tensor.code() == BF16) return BFloat16::load(tensor.as<const uint16_t>()[distance]);
  if (tensor.code() == FP16) return Float16::load(tensor.as<const uint16_t>()[distance]);
  return float(tensor.as<const double>()[distance]);
}

// A bias in FP32 and contiguous; nullptr where there is none. Of a small one torch's copy would take longest to begin.
class Bias {
 public:
  explicit Bias(const std::optional<Tensor>& bias) {
    if (!bias) return;
    const int64_t n = bias->sizes[0];
    if (n > SMALL || (bias->code() == FP32 && bias->is_contiguous())) {
      read_.emplace(contiguous(*bias, aoti_torch_dtype_float32()));
      data_ = read_->as<const float>();
    } else {
      for (int64_t i = 0; i < n; ++i) small_[i] = float_at(*bias, i * bias->strides[0]);
      data_ = small_;
    }
  }
  Bias(const Bias&) = delete;
  const float* data() const { return data_; }

 private:
  static constexpr int64_t SMALL = 512;
  std::optional<Read> read_;
  const float* data_ = nullptr;
  float small_[SMALL];
};

}  // namespace fp8
